#!/usr/bin/env python3
"""Trains every row of the 16-bit battery and holds it to an exact run: see tests/e2e/battery.py.

    python scripts/battery.py                      # all rows, some minutes on two cores; writes benchmarks/battery.json
    python scripts/battery.py --rows qlora --out - # rows whose name has this word; prints only

Prints one line for each row: the distance of loss, grad_norm and trained weights from the exact run, this package's
over plain ms-swift's, and what does not hold. The exit status is 1 if something does not.
"""
import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'scripts')]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', default='', help='only rows whose name has this text')
    parser.add_argument('--out', default=str(ROOT / 'benchmarks' / 'battery.json'), help='JSON file, - for none')
    parser.add_argument('--timeout', type=float, default=3600., help='seconds for each group of runs')
    parser.add_argument('--keep', help='folder for what the runs write, to look at afterwards')
    arguments = parser.parse_args()
    from benchmark import machine

    from tests.e2e import battery
    from tests.e2e.harness import Job, launch
    rows = [row for row in battery.table() if arguments.rows in row.name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or scratch
        Path(folder).mkdir(parents=True, exist_ok=True)
        started = time.time()
        paths, = launch(Job(battery.make_material, (folder, )))
        battery.run_rows(rows, paths, folder, arguments.timeout)
        report = battery.report(rows, paths, folder)
        seconds = round(time.time() - started)
    width = max(len(row.name) for row in rows)
    for row, entry in zip(rows, report, strict=True):
        figures = '  '.join(f'{what} {entry[what]["ours"]:.1e}/{entry[what]["plain"]:.1e}'
                            for what in ('loss', 'grad_norm', 'weights'))
        sys.stdout.write(f'{row.name:{width}}  {figures}  {"; ".join(entry["faults"]) or "holds"}\n')
    if arguments.out != '-':
        battery.write_report(
            arguments.out, {
                'machine': machine(),
                'seconds': seconds,
                'steps': battery.STEPS,
                'seeds': battery.SEEDS,
                'factor': battery.FACTOR,
                'rows': report
            })
    return int(any(entry['faults'] for entry in report))


if __name__ == '__main__':
    sys.exit(main())
