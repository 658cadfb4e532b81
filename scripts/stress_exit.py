#!/usr/bin/env python3
"""Counts how short runs of several processes end while the machine is busy.

    python scripts/stress_exit.py --runs 200 --busy 4

Each run is `swift-megatron sft` on a small random model over two tensor ranks and two stages: two steps, one
checkpoint. Its processes are forked from this one, which has imported everything, and end as the command's do, through
the interpreter's own shutdown (a child of `multiprocessing` would leave by `os._exit`, where nothing can go wrong any
more). As under torchrun, the others get SIGTERM when one fails. Prints exit statuses, and the output of a run that did
not end with 0 everywhere; exits with 1 if there was one.
"""
import argparse
import collections
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZES = ['--tensor_parallel_size', '2', '--pipeline_parallel_size', '2']
BUSY = 'import time\nwhile True: sum(range(100000)); time.sleep(0)'


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--runs', type=int, default=200)
    parser.add_argument('--processes', type=int, default=4, help='of each run; a multiple of 4')
    parser.add_argument('--busy', type=int, default=2, help='processes that only compute, beside the runs')
    return parser.parse_args()


def material(folder: str) -> list[str]:
    """A small model and data set; the flags of a run."""
    from tests.e2e.material import DATA, make_model, write_rows
    from tests.e2e.runs import flags
    model = make_model(os.path.join(folder, 'model'), heads=4, key_value_heads=2, layers=2)
    data = write_rows(os.path.join(folder, 'data.jsonl'), DATA['train'])
    return [
        *flags(
            model=model,
            dataset=data,
            max_steps=2,
            save_strategy='steps',
            save_steps=2,
            dataloader_num_workers=1,
            report_to='tensorboard'), *SIZES, '--output_dir',
        os.path.join(folder, 'output')
    ]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def enter(rank: int, processes: int, port: int, folder: str) -> None:
    """In the child: the environment that torchrun gives, and a file for what is written."""
    output = os.open(os.path.join(folder, f'rank-{rank}'), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR='127.0.0.1',
        MASTER_PORT=str(port))


def wait(children: dict[int, int]) -> list[int]:
    """Exit statuses in rank order, minus the signal for one that was killed."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        child, status = os.wait()
        if child in children:
            statuses[children[child]] = os.waitstatus_to_exitcode(status)
            if statuses[children[child]]:
                for other, rank in children.items():
                    if rank not in statuses:
                        os.kill(other, signal.SIGTERM)
    return [statuses[rank] for rank in sorted(statuses)]


def main() -> int:
    """The exit status: of the whole series here, of a rank in a forked child."""
    options = arguments()
    sys.path[:0] = [str(ROOT)]
    folder = tempfile.mkdtemp(prefix='stress-exit-')
    os.environ['MODELSCOPE_CACHE'] = os.path.join(folder, 'cache')
    import tests.e2e.preload  # noqa: F401
    from swift_megatron.cli.worker import run as worker
    flags = material(folder)
    busy = [subprocess.Popen([sys.executable, '-c', BUSY]) for _ in range(options.busy)]
    counts: collections.Counter = collections.Counter()
    start = time.time()
    for run in range(options.runs):
        port, children = free_port(), {}
        for rank in range(options.processes):
            child = os.fork()
            if child == 0:
                enter(rank, options.processes, port, folder)
                return worker('sft', flags)
            children[child] = rank
        statuses = wait(children)
        counts[tuple(statuses)] += 1
        if any(statuses):
            print(f'run {run}: exit statuses {statuses}', flush=True)
            for rank in range(options.processes):
                print(f'---- rank {rank}\n' + Path(folder, f'rank-{rank}').read_text(errors='replace')[-3000:])
        shutil.rmtree(os.path.join(folder, 'output'), ignore_errors=True)
        if run % 10 == 9:
            print(f'{run + 1} runs, {time.time() - start:.0f} s', flush=True)
    for process in busy:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    print(f'{options.runs} runs of {options.processes} processes in {time.time() - start:.0f} s; exit statuses:')
    for statuses, count in counts.most_common():
        print(f'{count:5d} x {list(statuses)}')
    return int(any(any(statuses) for statuses in counts))


if __name__ == '__main__':
    sys.exit(main())
