"""What a run tells at its start: how the model lies on the processes, what a step is, and how much of it is idle."""
import resource
import torch
import torch.distributed as dist
from torch import nn
from typing import Any

from ..config import ParallelFields
from ..mesh import ParallelMesh
from ..model.accounting import frozen_bytes, matrix_elements
from ..model.language_modeling import causal_lm
from ..pipeline_parallel.split import bubble, micro_batches_for_bubble

MIB = 2**20
IDLE_LIMIT = 0.2  # of a step, above which the report says which number of micro-batches would help


def _trainable_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _own_share(model: nn.Module, mesh: ParallelMesh) -> dict[str, Any]:
    """Facts of this rank: layers, bytes, and matrix elements that a token is multiplied with."""
    lm = causal_lm(model)
    split, rank = lm.stage_split, mesh.pipeline_rank
    embedding = matrix_elements(lm.get_input_embeddings()) if split.has_embedding(rank) else 0
    tied = split.has_embedding(rank) and split.has_head(rank) and lm.config.tie_word_embeddings
    return {
        'rank': mesh.rank,
        'stage': rank,
        'layers': [f'{chunk[0]}-{chunk[-1]}' for chunk in map(split.layers, split.stages_of(rank))],
        'frozen': frozen_bytes(model),
        'trainable': _trainable_bytes(model),
        'work': matrix_elements(lm) - (0 if tied else embedding),
    }


def _tokens_per_step(samples: int, dataset: Any) -> str:
    """', about N tokens' where the lengths of the samples are known."""
    rows = getattr(dataset, 'dataset', dataset)
    if 'lengths' not in (getattr(rows, 'column_names', None) or ()):
        return ''
    lengths = [max(n) if isinstance(n, list) else n for n in rows['lengths']]
    return f', about {round(samples * sum(lengths) / len(lengths))} tokens'


def layout_report(config: ParallelFields, model: nn.Module, mesh: ParallelMesh, dataset: Any) -> list[str]:
    """The lines of the report. Every process has to call it.

    Args:
        config: The run's configuration (a TrainerConfig).
        model: This rank's model, with its adapters.
        mesh: The process grid.
        dataset: The training set, for the tokens of a step.
    """
    shares: list[dict[str, Any]] = [_own_share(model, mesh)]
    if dist.is_initialized():
        shares = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(shares, _own_share(model, mesh))
    t, p, d, m = mesh.tensor_parallel_size, mesh.pipeline_parallel_size, mesh.data_parallel_size, config.micro_batches
    samples = config.per_device_train_batch_size * m * config.gradient_accumulation_steps * d
    lines = [
        f'processes: t={t} x p={p} x d={d}; micro-batches m={m}',
        f'step: {samples} samples = {config.per_device_train_batch_size} (micro-batch) x {m} (m) x '
        f'{config.gradient_accumulation_steps} (gradient accumulation) x {d} (d){_tokens_per_step(samples, dataset)}',
    ]
    first_replica = [share for share in shares if share['rank'] // t % d == 0]
    total_work = sum(share['work'] for share in first_replica)
    for stage in range(p):
        ranks = [share for share in first_replica if share['stage'] == stage]
        largest = max(ranks, key=lambda share: sum(share['frozen'].values()) + share['trainable'])
        work = 100 * sum(share['work'] for share in ranks) / total_work
        formats = ' + '.join(f'{size / MIB:.1f} MiB {name}' for name, size in largest['frozen'].items())
        lines.append(
            f'stage {stage}: layers {", ".join(largest["layers"])}; {work:.0f} % of the products; per rank frozen '
            f'{formats or "0 MiB"}, trainable {largest["trainable"] / MIB:.1f} MiB')
    return lines + _pipeline_lines(p, m, config.virtual_pipeline_size)


def _pipeline_lines(p: int, m: int, v: int) -> list[str]:
    if p == 1:
        return []
    idle = bubble(p, m, v)
    lines = [f'expected pipeline bubble: {100 * idle:.0f} % of the step']
    if m < p:
        lines.append(
            f'warning: num_micro_batches={m} is less than pipeline_parallel_size={p}: some stages are always idle; '
            f'--num_micro_batches {p} or more keeps all of them busy')
    if idle > IDLE_LIMIT:
        lines.append(f'warning: the bubble is above {100 * IDLE_LIMIT:.0f} %: --num_micro_batches '
                     f'{micro_batches_for_bubble(p, IDLE_LIMIT, v)} brings it down to that')
    return lines


def memory_report(model: nn.Module, optimizer: Any, mesh: ParallelMesh) -> list[str]:
    """Bytes at the end of a run: the largest rank, and what one card would hold. Every process has to call it.

    Args:
        model: This rank's model, with its adapters.
        optimizer: Its optimizer, or accelerate's wrapper of it.
        mesh: The process grid.
    """
    own = {
        **frozen_bytes(model),
        'trainable':
        _trainable_bytes(model),
        'optimizer':
        sum(value.numel() * value.element_size() for state in optimizer.state.values() for value in state.values()
            if hasattr(value, 'numel')),
    }
    peak = _peak_bytes()
    shares = [(own, peak)]
    if dist.is_initialized():
        shares = [({}, 0) for _ in range(dist.get_world_size())]
        dist.all_gather_object(shares, (own, peak))
    first_replica = [
        share for rank, share in enumerate(shares) if rank // mesh.tensor_parallel_size % mesh.data_parallel_size == 0
    ]
    names = list(dict.fromkeys(name for share, _ in first_replica for name in share))
    largest = {name: max(share.get(name, 0) for share, _ in first_replica) for name in names}
    together = {name: sum(share.get(name, 0) for share, _ in first_replica) for name in names}
    kind = 'device' if torch.cuda.is_available() else 'process'
    lines = [
        'memory, largest rank: ' + ', '.join(f'{name} {size / MIB:.1f} MiB' for name, size in largest.items())
        + f'; peak {max(peak for _, peak in shares) / MIB:.0f} MiB ({kind})'
    ]
    if mesh.model_parallel_size > 1:
        lines.append('memory, one card would hold at most: ' + ', '.join(f'{name} {size / MIB:.1f} MiB'
                                                                         for name, size in together.items()))
    return lines


def _peak_bytes() -> int:
    """Peak memory of the device, or of the process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
