"""Runs the micro-batches of a step through the stages, with torch's schedules.

GPipe (arXiv:1811.06965), 1F1B (arXiv:2006.09503) and interleaved 1F1B (arXiv:2104.04473). A group of micro-batches that
a schedule cannot take (fewer than stages, or no multiple of its rounds: the end of an epoch) runs in GPipe's order,
which computes the same numbers.
"""
import torch
from contextlib import nullcontext
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS
from typing import Any, Callable, Optional, Sequence

from ..mesh import ParallelMesh
from .stage import HiddenStateStage, StageChunk, StageForward

LossFunction = Callable[[torch.Tensor, int], torch.Tensor]


def _schedule(kind: str, stages: list[HiddenStateStage], num_micro_batches: int, loss_fn: Callable) -> Any:
    p = stages[0].group_size
    common = dict(n_microbatches=num_micro_batches, loss_fn=loss_fn, scale_grads=False)
    if len(stages) > 1:
        rounds = max(1, num_micro_batches // p)
        if kind == 'interleaved_1f1b' and num_micro_batches % rounds == 0:
            return ScheduleInterleaved1F1B(stages, **common)
        return ScheduleLoopedBFS(stages, **common)
    if kind == '1f1b' and num_micro_batches >= p:
        return Schedule1F1B(stages[0], **common)
    return ScheduleGPipe(stages[0], **common)


def run_stages(computes: dict[int, StageForward],
               loss_fn: LossFunction,
               *,
               shapes: Sequence[tuple[int, int, int]],
               dtype: torch.dtype,
               device: torch.device,
               num_stages: int,
               mesh: ParallelMesh,
               kind: str = '1f1b',
               backward: bool = True) -> list[torch.Tensor]:
    """Forward, and backward if asked for, of some micro-batches; gradients add up in the parameters.

    Args:
        computes: What each stage of this rank computes, by its number.
        loss_fn: (hidden states (B, S, H), number of the micro-batch) -> loss to differentiate; called on the last stage
            only.
        shapes: (B, S, H) of each micro-batch.
        dtype: Of the hidden states that pass between stages.
        device: Where they lie.
        num_stages: All stages, p v.
        mesh: The process grid.
        kind: '1f1b', 'gpipe' or 'interleaved_1f1b'.
        backward: Whether to run the backward pass.

    Returns:
        The losses, detached, on the ranks of the last stage; an empty list on the others.
    """
    stages = [
        HiddenStateStage(
            StageChunk(compute, dtype if stage < num_stages - 1 else None),
            stage,
            num_stages,
            device,
            mesh.pipeline_group,
            shapes=shapes,
            dtype=dtype) for stage, compute in computes.items()
    ]

    def loss_of(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(hidden, int(index))
        return loss.clone() if loss._is_view() else loss  # a view could not be detached in place

    schedule = _schedule(kind if backward else 'gpipe', stages, len(shapes), loss_of)
    schedule._has_backward = backward
    for stage in stages:
        stage.has_backward = backward
    losses: Optional[list[torch.Tensor]] = [] if stages[-1].is_last else None
    with nullcontext() if backward else torch.no_grad():
        schedule._step_microbatches(
            arg_mbs=[()] * len(shapes),
            kwarg_mbs=[{
                'index': i
            } for i in range(len(shapes))],
            target_mbs=[torch.tensor(i) for i in range(len(shapes))],
            losses=losses,
            return_outputs=False)
    return [loss.detach() for loss in losses or []]
