#!/usr/bin/env python3
"""Measures the speed and memory of the parallel steps on this machine's CPU, beside other libraries' on the same model.

    python scripts/benchmark.py                   # tensor parallelism, beside transformers' own
    python scripts/benchmark.py --topic pp        # pipeline schedules against their ideal, beside DeepSpeed's pipeline
    python scripts/benchmark.py --topic qlora     # 4-bit bases, beside PEFT with bitsandbytes
    python scripts/benchmark.py --quick           # all code of a topic at tiny sizes, in seconds

Every rank has one thread. Prints medians and ratios and writes everything to benchmarks/TOPIC.json (nothing with
--quick, unless --out says where). Needs neither ms-swift nor a network. Keep the machine quiet: turns in which other
programs took more than --foreign cores are replaced by later ones, up to three times as many, and --patience lets it
wait for quiet moments. CPU seconds of a step, on its busiest rank, stand beside its time: they say what it would take
alone, less the time that ranks wait for each other.
"""
import argparse
import importlib
import json
import os
import platform
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ('torch', 'transformers', 'peft', 'deepspeed', 'bitsandbytes')


def parse(arguments: Optional[list[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--topic', choices=('tp', 'pp', 'qlora'), default='tp')
    parser.add_argument('--qlora', dest='topic', action='store_const', const='qlora', help='the same as --topic qlora')
    parser.add_argument('--quick', action='store_true', help='tiny sizes: shows that it runs, the numbers mean nothing')
    parser.add_argument('--rounds', type=int, help='turns of each variant that count (default: 7, quick: 2)')
    parser.add_argument('--steps', type=int, help='steps in a turn (default: 3, quick: 2)')
    parser.add_argument(
        '--foreign', type=float, default=0.25, help='cores others may use during a turn (default: %(default)s)')
    parser.add_argument('--patience', type=float, default=0., help='seconds to wait for quiet moments, in all')
    parser.add_argument('--profile', action='store_true', help='tp only: also profile rank 0')
    parser.add_argument('--hidden', type=int, help='tp only: this hidden size alone')
    parser.add_argument('--out', type=Path, help='JSON file (default: benchmarks/TOPIC.json)')
    return parser.parse_args(arguments)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return 'not installed'


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
    model = next((line.partition(':')[2].strip() for line in lines if line.startswith('model name')),
                 platform.processor())
    return {
        'date': time.strftime('%Y-%m-%d %H:%M'),
        'cpu': model,
        'cores': os.cpu_count(),
        'threads_per_rank': 1,
        'load_average': [round(value, 2) for value in os.getloadavg()],
        'python': platform.python_version(),
        'versions': {
            package: _version(package)
            for package in PACKAGES
        },
    }


def show(result: dict[str, Any]) -> None:
    """Medians, quartiles and ratios of every case."""
    for name, case in result['cases'].items():
        print(f'\n{name}')
        for variant, times in case.get('times', {}).items():
            print(f'  {variant:28} {times["median_s"]:8.4f} s  [{times["q1_s"]:.4f}, {times["q3_s"]:.4f}]  '
                  f'{times["steps"]} steps, CPU {times["cpu_s"]:.4f} s, others used {times["foreign_cores"]:.2f} cores')
        for key, values in case.items():
            if key in ('times', 'size') or not values:
                continue
            print(f'  {key}:')
            print('\n'.join(f'    {line}' for line in _lines(values)))
    for key, values in result.items():
        if key not in ('cases', 'machine'):
            print(f'{key}: {json.dumps(values)}')


def _lines(values: Any) -> list[str]:
    if not isinstance(values, dict):
        return [json.dumps(values)]
    return [f'{key:42} {json.dumps(value)}' for key, value in values.items()]


def main() -> None:
    options = parse()
    from benchmarks.harness import Timing
    timing = Timing(
        rounds=options.rounds or (2 if options.quick else 7),
        steps=options.steps or (2 if options.quick else 3),
        foreign=options.foreign,
        attempts=1 if options.quick else 3,
        patience=options.patience)
    extra = {'profiled': options.profile, 'hidden': options.hidden} if options.topic == 'tp' else {}
    before = machine()
    print(json.dumps(before))
    topic = importlib.import_module(f'benchmarks.{options.topic}')
    with tempfile.TemporaryDirectory() as directory:
        result = {'machine': before, **topic.run(directory, timing, quick=options.quick, **extra)}
    show(result)
    out = options.out or (None if options.quick else ROOT / 'benchmarks' / f'{options.topic}.json')
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')
        print(f'wrote {out}')


if __name__ == '__main__':
    main()
