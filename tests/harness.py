"""Runs a module-level function on several processes that talk over gloo, and fails with the first failing rank's
traceback.

Processes come from a fork server that has torch, transformers and peft imported already: 0.2 s each instead of 10.
"""
import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any, Callable

TIMEOUT = 120  # seconds for one launch

_context = multiprocessing.get_context('forkserver')
_context.set_forkserver_preload(['tests.preload'])


def _entry(rank: int, world_size: int, directory: str, results: Any, function: Callable, args: tuple) -> None:
    import torch
    import torch.distributed as dist
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME='lo')
    torch.set_num_threads(1)
    try:
        if world_size > 1:
            dist.init_process_group(
                'gloo',
                init_method=f'file://{directory}/rendezvous',
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60))
        # Pickled here, so that a result that cannot be is this rank's exception, and tensors outlive this process.
        results.put((rank, True, pickle.dumps(function(*args))))
    except BaseException:
        results.put((rank, False, (time.time(), traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def launch(world_size: int, function: Callable, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Results of `function(*args)` on `world_size` processes, in rank order.

    Raises:
        AssertionError: with the traceback of the rank that failed first, or naming those that died or never answered.
    """
    with tempfile.TemporaryDirectory() as directory:
        results = _context.Queue()
        processes = [
            _context.Process(target=_entry, args=(rank, world_size, directory, results, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        answers: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        deadline = time.time() + timeout
        while len(answers) + len(failures) < world_size and time.time() < deadline:
            try:
                rank, succeeded, value = results.get(timeout=0.5)
            except queue.Empty:
                if failures or all(not process.is_alive() for process in processes):
                    break
                continue
            if succeeded:
                answers[rank] = pickle.loads(value)
            else:
                failures.append((value[0], rank, value[1]))
                deadline = min(deadline, time.time() + 5)  # the others only wait for this one
        dead = {
            rank: process.exitcode
            for rank, process in enumerate(processes)
            if process.exitcode and rank not in answers and rank not in [failure[1] for failure in failures]
        }
        for process in processes:
            if len(answers) == world_size:
                process.join(5)
            if process.is_alive():
                process.kill()
        note = f'of {world_size} ranks, these died without a word: {dead} (rank: exit status)' if dead else ''
        if failures:
            _, rank, text = min(failures)
            raise AssertionError(f'rank {rank} of {world_size} failed first:\n{text}{note}')
        assert not dead, note
        silent = sorted(set(range(world_size)) - set(answers))
        assert not silent, f'ranks {silent} of {world_size} gave no answer within {timeout} s'
        return [answers[rank] for rank in range(world_size)]
