"""Processes that talk over gloo, and steps of several variants timed in turn.

All variants of a comparison are built in the same processes and run interleaved, a few steps each per round, so that
what else happens on the machine hits all alike. A variant that needs fewer ranks leaves the others asleep in a barrier.
A round during which other programs took more than a share of a core is run again.
"""
import gc
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from statistics import median, quantiles
from typing import Any, Callable, Optional

TIMEOUT = 3600  # seconds for one launch
CLOCK = os.sysconf('SC_CLK_TCK')

_context = multiprocessing.get_context('forkserver')
_context.set_forkserver_preload(['torch', 'peft', 'transformers.models.llama.modeling_llama'])


def _entry(rank: int, world_size: int, directory: str, results: Any, function: Callable, args: tuple) -> None:
    import torch
    import torch.distributed as dist
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        if world_size > 1:
            dist.init_process_group('gloo', init_method=f'file://{directory}/rendezvous', rank=rank, world_size=world_size,
                                    timeout=timedelta(minutes=20))
        results.put((rank, True, function(*args)))
    except BaseException:
        results.put((rank, False, (time.time(), traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def launch(world_size: int, function: Callable, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Results of the module-level `function(*args)` on `world_size` fresh processes, in rank order.

    Raises:
        RuntimeError: with the traceback of the rank that failed first, or naming the ranks that never answered.
    """
    os.environ.update(GLOO_SOCKET_IFNAME='lo', OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false',
                      DS_ACCELERATOR='cpu', CUDA_VISIBLE_DEVICES='')
    with tempfile.TemporaryDirectory() as directory:
        results = _context.Queue()
        processes = [
            _context.Process(target=_entry, args=(rank, world_size, directory, results, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        answers, failures = _collect(results, processes, time.time() + timeout)
        for process in processes:
            process.join(10 if len(answers) == world_size else 0)
            if process.is_alive():
                process.kill()
        if failures:
            _, rank, text = min(failures)
            raise RuntimeError(f'rank {rank} of {world_size} failed first:\n{text}')
        if len(answers) < world_size:
            raise RuntimeError(f'ranks {sorted(set(range(world_size)) - set(answers))} gave no answer within {timeout} s')
        return [answers[rank] for rank in range(world_size)]


def _collect(results: Any, processes: list, deadline: float) -> tuple[dict[int, Any], list[tuple[float, int, str]]]:
    answers: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    while len(answers) + len(failures) < len(processes) and time.time() < deadline:
        try:
            rank, succeeded, value = results.get(timeout=0.5)
        except queue.Empty:
            if failures or all(not process.is_alive() for process in processes):
                break
            continue
        if succeeded:
            answers[rank] = value
        else:
            failures.append((value[0], rank, value[1]))
            deadline = min(deadline, time.time() + 5)  # the others only wait for this one
    return answers, failures


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How often steps are timed.

    Args:
        rounds: Rounds that count, for each variant.
        steps: Steps of a variant in a round.
        foreign: Cores that other programs may use during a round; above it the round is run again.
        attempts: Rounds at most, as a multiple of `rounds`.
    """
    rounds: int = 7
    steps: int = 3
    foreign: float = 0.15
    attempts: int = 3


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the things that are compared.

    Args:
        step: Runs a step.
        ranks: Takes the first `ranks` processes; the others wait.
    """
    step: Callable[[], Any]
    ranks: int = 2


def _machine_busy() -> float:
    """Seconds of CPU time that all cores together have spent on anything, or that the host has taken away."""
    with open('/proc/stat', encoding='ascii') as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / CLOCK


def _summed(value: float) -> float:
    import torch
    import torch.distributed as dist
    total = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def _meet() -> None:
    import torch.distributed as dist
    if dist.is_initialized():
        dist.barrier()


def _timed_round(variant: Variant, rank: int, steps: int) -> tuple[list[float], float]:
    """Seconds of each step, and the cores that other programs used meanwhile."""
    gc.collect()
    _meet()
    start, busy, own = time.perf_counter(), _machine_busy(), time.process_time()
    seconds = []
    for _ in range(steps if rank < variant.ranks else 0):
        before = time.perf_counter()
        variant.step()
        seconds.append(time.perf_counter() - before)
    _meet()
    own = _summed(time.process_time() - own)
    return seconds, max(0., (_machine_busy() - busy - own) / (time.perf_counter() - start))


def interleaved(variants: dict[str, Variant], timing: Timing, log: Callable[[str], None] = print) -> dict[str, dict[str, Any]]:
    """Times the variants in turn; every process calls it, rank 0's seconds count.

    Returns:
        For each variant `summary` of its steps and the cores that other programs used. Rounds that were disturbed are left
        out where enough others are left; `disturbed` says how many are in the numbers.
    """
    import torch.distributed as dist
    rank = dist.get_rank() if dist.is_initialized() else 0
    for variant in variants.values():  # warm up
        _timed_round(variant, rank, 1)
    rounds: list[tuple[float, dict[str, tuple[list[float], float]]]] = []
    for number in range(timing.rounds * timing.attempts):
        order = list(variants) if number % 2 == 0 else list(reversed(variants))
        measured = {name: _timed_round(variants[name], rank, timing.steps) for name in order}
        # What rank 0 saw decides, so that all ranks go on or stop together.
        foreign = _summed(max(value for _, value in measured.values()) if rank == 0 else 0.)
        rounds.append((foreign, measured))
        if rank == 0:
            log(f'round {number + 1}: others used up to {foreign:.2f} cores, '
                + ', '.join(f'{name} {median(measured[name][0]):.3f} s' for name in variants))
        if sum(value <= timing.foreign for value, _ in rounds) >= timing.rounds:
            break
    kept = sorted(rounds, key=lambda item: item[0])[:timing.rounds]
    disturbed = sum(value > timing.foreign for value, _ in kept)
    if rank:
        return {}
    return {
        name: {
            **summary([s for _, measured in kept for s in measured[name][0]]),
            'foreign_cores': round(median(measured[name][1] for _, measured in kept), 3),
            'disturbed_rounds': disturbed,
        }
        for name in variants
    }


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, quartiles and number of some times."""
    low, middle, high = quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return {'median_s': round(middle, 5), 'q1_s': round(low, 5), 'q3_s': round(high, 5), 'steps': len(seconds)}


def ratio(times: dict[str, dict[str, Any]], slower: str, faster: str) -> Optional[float]:
    """Ratio of medians, None where a variant did not run."""
    if slower not in times or faster not in times:
        return None
    return round(times[slower]['median_s'] / times[faster]['median_s'], 3)
