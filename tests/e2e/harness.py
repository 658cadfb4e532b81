"""Runs trainings in processes that have ms-swift imported already: half a second each instead of ten.

The standard library has one fork server for a process; the end-to-end tests start their own beside it, because that of
the other tests does without ms-swift.
"""
import dataclasses
import os
import pickle
import re
import socket
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection, context, forkserver, popen_forkserver
from pathlib import Path
from typing import Any, Callable, Optional, Sequence
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 120  # seconds for one launch


class _Server:
    """A fork server with ms-swift in it, and a folder for ms-swift's caches, which would otherwise go to the user's."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix='swift-megatron-e2e-')
        self.server = forkserver.ForkServer()
        self.server.set_forkserver_preload(['tests.e2e.preload', 'tests.e2e.harness'])
        self.lock = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        return {
            'MODELSCOPE_CACHE': self.folder.name,
            'HF_DATASETS_CACHE': os.path.join(self.folder.name, 'hf'),
            'PYTHONPATH': str(ROOT),  # the server silently goes without what it cannot import
        }

    def connect_to_new_process(self, descriptors: list[int]) -> tuple[int, int]:
        with mock.patch.dict(os.environ, self.environment):
            return self.server.connect_to_new_process(descriptors)


_server = _Server()


class _Popen(popen_forkserver.Popen):

    def _launch(self, process_obj: Any) -> None:
        with _server.lock, mock.patch.object(forkserver, 'connect_to_new_process', _server.connect_to_new_process):
            super()._launch(process_obj)


class _Process(context.ForkServerProcess):

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)


class _Context(context.ForkServerContext):
    Process = _Process


_context = _Context()


@dataclasses.dataclass(frozen=True)
class Job:
    """A module-level function to be run on some processes."""
    function: Callable
    args: tuple = ()
    processes: int = 1
    timeout: float = TIMEOUT


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one process ended: its exit code, what it wrote to the terminal, and what the function returned."""
    exit_code: Optional[int]  # None: killed, because it took too long or another process had failed
    output: str
    result: Any = None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def _enter(rank: int, world_size: int, port: int, folder: str, function: Callable, args: tuple) -> None:
    """In the child: everything that is written goes to a file, for the parent to show when something fails."""
    import torch
    import torch.distributed as dist
    output = os.open(os.path.join(folder, f'output-{rank}'), os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR='127.0.0.1',
            MASTER_PORT=str(port))
    try:
        result = function(*args)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    with open(os.path.join(folder, f'result-{rank}'), 'wb') as file:
        pickle.dump(result, file)
    if dist.is_initialized():
        dist.destroy_process_group()


def _wait(processes: Sequence[Any], timeout: float) -> list[Optional[int]]:
    """Exit codes. Once one process has failed, the others have five seconds: they only wait for it."""
    deadline = time.time() + timeout
    running = {process.sentinel: process for process in processes}
    while running and time.time() < deadline:
        for sentinel in connection.wait(list(running), deadline - time.time()):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                deadline = min(deadline, time.time() + 5)
    for process in running.values():
        process.kill()
        process.join()
    return [None if process in running.values() else process.exitcode for process in processes]


def run(job: Job) -> list[Ended]:
    """Runs a job and tells how each process ended, in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        processes = [
            _context.Process(target=_enter, args=(rank, job.processes, port, folder, job.function, job.args))
            for rank in range(job.processes)
        ]
        try:
            for process in processes:
                process.start()
            exit_codes = _wait(processes, job.timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
        return [_ended(folder, rank, exit_code) for rank, exit_code in enumerate(exit_codes)]


def _ended(folder: str, rank: int, exit_code: Optional[int]) -> Ended:
    output_file, result_file = (os.path.join(folder, f'{name}-{rank}') for name in ('output', 'result'))
    output, result = '', None
    if os.path.exists(output_file):
        with open(output_file, encoding='utf-8', errors='replace') as file:
            output = file.read()
    if exit_code == 0 and os.path.exists(result_file):
        with open(result_file, 'rb') as file:
            result = pickle.load(file)
    return Ended(exit_code, output, result)


def launch(job: Job) -> list[Any]:
    """Runs a job; the results in rank order.

    Raises:
        AssertionError: with the last output of a process that failed, or of one that took too long.
    """
    ended = run(job)
    failed = [(rank, end) for rank, end in enumerate(ended) if end.exit_code]
    silent = [(rank, end) for rank, end in enumerate(ended) if end.exit_code is None]
    for rank, end in failed or silent:
        how = f'exit code {end.exit_code}' if end.exit_code else f'no answer within {job.timeout} s'
        raise AssertionError(f'rank {rank} of {job.processes}: {how}:\n{end.output[-6000:]}')
    return [end.result for end in ended]


def launch_all(jobs: dict[str, Job]) -> dict[str, list[Any]]:
    """Runs jobs beside each other; the results by name.

    Raises:
        AssertionError: for the first job that fails, once all have ended.
    """
    with ThreadPoolExecutor(len(jobs)) as pool:
        return dict(zip(jobs, pool.map(launch, jobs.values()), strict=True))


FINISHED = 'finished in turn: '


def _one_after_the_other(calls: dict[str, tuple], ports: list[int], function: Callable) -> None:
    """In the child: a process that did none of the calls before could not tell the difference."""
    import gc
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState
    before = dict(os.environ)
    for (name, args), port in zip(calls.items(), ports, strict=True):
        os.environ['MASTER_PORT'] = str(port)  # a store of its own: a late rank cannot meet the one of the last call
        function(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)
        gc.collect()
        print(f'{FINISHED}{name}', flush=True)


def run_in_turn(function: Callable, calls: dict[str, tuple], processes: int = 1) -> dict[str, str]:
    """Runs a function with each of several arguments, one call after the other in the same processes.

    What a process has to do once (to be forked, to touch its memory, to find files) is done once for all calls. The
    calls after one that fails run in new processes.

    Args:
        function: Module-level; its result is dropped.
        calls: Name -> arguments.
        processes: Of each call.

    Returns:
        Name -> '' or how the call failed, for every call.
    """
    outcome: dict[str, str] = {}
    while len(outcome) < len(calls):
        rest = {name: args for name, args in calls.items() if name not in outcome}
        ports = [_free_port() for _ in rest]
        job = Job(_one_after_the_other, (rest, ports, function), processes, TIMEOUT + 20 * len(rest))
        ended = run(job)
        done = [set(re.findall(f'^{FINISHED}(.*)$', end.output, re.MULTILINE)) for end in ended]
        outcome.update({name: '' for name in rest if all(name in names for names in done)})
        failed = next((name for name in rest if name not in outcome), None)
        if failed is not None:
            outcome[failed] = '\n'.join(f'rank {rank} of {processes}: exit code {end.exit_code}:\n{end.output[-6000:]}'
                                        for rank, end in enumerate(ended) if failed not in done[rank])
    return outcome
