"""Two ranks for each way out of a process, through the interpreter's own end; run as a program by `test_ending`.

    python -m tests.distributed.ending FOLDER

Forks its ranks, which is faster than to start them, and writes for each way and rank the exit status and the threads of
groups that were left when all that had been registered for the end of the process had run.
"""
import atexit
import json
import os
import signal
import sys
import torch
import torch.distributed as dist
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from swift_megatron.ending import groups_end_with_process
from swift_megatron.mesh import ParallelMesh

WAYS = ('success', 'refusal', 'error', 'interrupt', 'user')


class Model:
    """Knows its groups, and lies in a cycle, as modules and trainers do."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh, self.itself = mesh, self


def note_threads(file: Path) -> None:
    names = []
    for task in Path('/proc/self/task').iterdir():
        with suppress(OSError):  # it ended just before
            names.append((task / 'comm').read_text().strip())
    file.write_text(json.dumps([name for name in names if 'gloo' in name]))


def start(folder: Path, way: str) -> None:
    dist.init_process_group(
        'gloo',
        init_method=f'file://{folder}/{way}',
        timeout=timedelta(seconds=30),
        rank=int(os.environ['RANK']),
        world_size=2)


def run(folder: Path, way: str) -> None:
    """What a rank does: a collective in a group of its own, and the way out."""
    if way == 'user':
        start(folder, way)
    with groups_end_with_process():
        if way != 'user':
            start(folder, way)
    model = Model(ParallelMesh.create(pipeline_parallel_size=2, timeout=timedelta(seconds=30)))
    dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=model.mesh.pipeline_group)
    if way == 'refusal':
        sys.exit(2)
    if way == 'error':
        raise ValueError('injected')
    if way == 'interrupt':
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
        os.kill(os.getpid(), signal.SIGINT)


def main(folder: Path) -> None:
    """Returns in the forked ranks too: they end as programs do."""
    statuses = {}
    for way in WAYS:
        children = {}
        for rank in (0, 1):
            child = os.fork()
            if child == 0:
                os.environ['RANK'] = str(rank)
                sys.stderr = open(os.devnull, 'w', encoding='utf-8')
                atexit.register(note_threads, folder / f'{way}-{rank}.json')  # what is registered first is run last
                return run(folder, way)
            children[child] = rank
        for child, rank in children.items():
            statuses[f'{way}-{rank}'] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (folder / 'statuses.json').write_text(json.dumps(statuses))


if __name__ == '__main__':
    main(Path(sys.argv[1]))
