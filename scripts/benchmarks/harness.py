"""Processes that talk over gloo, and steps of several variants timed in turn.

All variants of a comparison are built in the same processes and run interleaved, a few steps each per round, so that
what else happens on the machine hits all alike. A variant that needs fewer ranks leaves the others asleep in a barrier.
Rounds go on until every variant has had enough turns during which other programs took less than a share of a core.
"""
import gc
import multiprocessing
import os
import queue
import tempfile
import time
import torch
import torch.distributed as dist
import traceback
from dataclasses import dataclass
from datetime import timedelta
from statistics import median, quantiles
from typing import Any, Callable

TIMEOUT = 3 * 3600  # seconds for one launch
CLOCK = os.sysconf('SC_CLK_TCK')

_context = multiprocessing.get_context('forkserver')
_context.set_forkserver_preload(['torch', 'peft', 'transformers.models.llama.modeling_llama'])


def _entry(rank: int, world_size: int, directory: str, results: Any, function: Callable, args: tuple) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        if world_size > 1:
            dist.init_process_group(
                'gloo',
                init_method=f'file://{directory}/rendezvous',
                rank=rank,
                world_size=world_size,
                timeout=timedelta(hours=1))
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
    os.environ.update(
        GLOO_SOCKET_IFNAME='lo',
        OMP_NUM_THREADS='1',
        HF_HUB_OFFLINE='1',
        TOKENIZERS_PARALLELISM='false',
        DS_ACCELERATOR='cpu',
        CUDA_VISIBLE_DEVICES='')
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
            raise RuntimeError(
                f'ranks {sorted(set(range(world_size)) - set(answers))} gave no answer within {timeout} s')
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
        rounds: Turns that count, for each variant.
        steps: Steps of a variant in a turn.
        foreign: Cores that other programs may use during a turn that counts.
        attempts: Rounds at most, as a multiple of `rounds`.
        patience: Seconds that may be spent, over all turns, on waiting for other programs to pause.
    """
    rounds: int = 7
    steps: int = 3
    foreign: float = 0.25
    attempts: int = 3
    patience: float = 0.


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the things that are compared.

    Args:
        step: Runs a step.
        ranks: Takes the first `ranks` processes; the others wait.
    """
    step: Callable[[], Any]
    ranks: int = 2


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A few steps of one variant: seconds of each, seconds of CPU time per step on the busiest rank, cores that others
    used.
    """
    seconds: list[float]
    cpu: float
    foreign: float


def _machine_busy() -> float:
    """Seconds of CPU time that all cores together have spent on anything, or that the host has taken away."""
    with open('/proc/stat', encoding='ascii') as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / CLOCK


def _from_all(value: float) -> list[float]:
    """The value of each rank; all ranks meet here."""
    if not dist.is_initialized():
        return [value]
    values = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
    return [float(value) for value in values]


def _wait_for_quiet(foreign: float, patience: float) -> float:
    """Sleeps until other programs use at most `foreign` cores, and returns the seconds it took; at most `patience`."""
    start = time.perf_counter()
    while time.perf_counter() - start < patience:
        before, busy = time.perf_counter(), _machine_busy()
        time.sleep(0.5)
        if (_machine_busy() - busy) / (time.perf_counter() - before) <= foreign:
            break
    return time.perf_counter() - start


def _turn(variant: Variant, rank: int, steps: int) -> Turn:
    gc.collect()
    _from_all(0.)
    start, busy, own = time.perf_counter(), _machine_busy(), time.process_time()
    seconds = []
    for _ in range(steps if rank < variant.ranks else 0):
        before = time.perf_counter()
        variant.step()
        seconds.append(time.perf_counter() - before)
    cpu = _from_all(time.process_time() - own)
    foreign = (_machine_busy() - busy - sum(cpu)) / (time.perf_counter() - start)
    return Turn(seconds=seconds, cpu=max(cpu) / steps, foreign=max(0., foreign))


def interleaved(variants: dict[str, Variant], timing: Timing) -> dict[str, dict[str, Any]]:
    """Times the variants in turn; every process calls it, rank 0's seconds count.

    Returns:
        On rank 0, for each variant: `summary` of its steps in its least disturbed turns, CPU seconds of a step on the
        busiest rank, the cores that other programs used meanwhile (median), and how many of the turns were above the
        limit.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    turns: dict[str, list[Turn]] = {name: [] for name in variants}
    for variant in variants.values():  # warm up
        _turn(variant, rank, 1)
    patience = timing.patience
    for number in range(timing.rounds * timing.attempts):
        for name in list(variants) if number % 2 == 0 else reversed(list(variants)):
            if rank == 0:  # the others wait for it in the turn
                patience -= _wait_for_quiet(timing.foreign, patience)
            turns[name].append(_turn(variants[name], rank, timing.steps))
        quiet = [sum(turn.foreign <= timing.foreign for turn in own) for own in turns.values()]
        if rank == 0:
            print(f'round {number + 1}: ' + ', '.join(f'{name} {median(own[-1].seconds):.3f} s ({own[-1].foreign:.2f})'
                                                      for name, own in turns.items()))
        if _from_all(float(min(quiet) >= timing.rounds))[0]:  # what rank 0 saw decides
            break
    if rank:
        return {}
    result = {}
    for name, own in turns.items():
        kept = sorted(own, key=lambda turn: turn.foreign)[:timing.rounds]
        result[name] = {
            **summary([seconds for turn in kept for seconds in turn.seconds]),
            'cpu_s':
            round(median(turn.cpu for turn in kept), 5),
            'foreign_cores':
            round(median(turn.foreign for turn in kept), 3),
            'disturbed_turns':
            sum(turn.foreign > timing.foreign for turn in kept),
        }
    return result


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, quartiles and number of some times."""
    low, middle, high = quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return {'median_s': round(middle, 5), 'q1_s': round(low, 5), 'q3_s': round(high, 5), 'steps': len(seconds)}


def ratio(times: dict[str, dict[str, Any]], slower: str, faster: str) -> dict[str, float]:
    """Ratios of the medians and of the CPU times."""
    return {
        what: round(times[slower][key] / times[faster][key], 3)
        for what, key in (('time', 'median_s'), ('cpu', 'cpu_s'))
    }
