"""Runs the micro-batches of a step through the stages, with torch's schedules.

GPipe (arXiv:1811.06965), 1F1B (arXiv:2006.09503) and interleaved 1F1B (arXiv:2104.04473). A group of micro-batches that
a schedule cannot take (fewer than stages, or no multiple of its rounds: the end of an epoch) runs in GPipe's order,
which computes the same numbers.
"""
import torch
from contextlib import AbstractContextManager, nullcontext
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS
from transformers import PreTrainedModel
from typing import Any, Callable, Optional

from ..mesh import ParallelMesh
from .split import StageSplit
from .stage import HiddenStateStage, StageChunk, decoder_view

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


def run_micro_batches(lm: PreTrainedModel,
                      batches: list[dict[str, Any]],
                      loss_fn: LossFunction,
                      *,
                      split: StageSplit,
                      mesh: ParallelMesh,
                      kind: str = '1f1b',
                      backward: bool = True,
                      autocast: Callable[[], AbstractContextManager] = nullcontext) -> list[torch.Tensor]:
    """Forward, and backward if asked for, of some micro-batches; gradients add up in the parameters.

    Args:
        lm: This rank's part of the causal LM.
        batches: The micro-batches: `input_ids` (B, S) and what else the decoder takes, on this rank's device. Every
            rank of a replica holds the same ones; their shapes may differ.
        loss_fn: (hidden states (B, S, H) after the final norm, number of the micro-batch) -> loss to differentiate;
            called on the last stage only.
        split: The layers of each stage.
        mesh: The process grid.
        kind: '1f1b', 'gpipe' or 'interleaved_1f1b'.
        backward: Whether to run the backward pass.
        autocast: Makes the context of every forward pass.

    Returns:
        The losses, detached, on the ranks of the last stage; an empty list on the others.
    """
    device = batches[0]['input_ids'].device
    shapes = [(*batch['input_ids'].shape, lm.config.hidden_size) for batch in batches]
    stages = [
        HiddenStateStage(
            StageChunk(decoder_view(lm, split, stage), batches, stage == 0, autocast),
            stage,
            split.num_stages,
            device,
            mesh.pipeline_group,
            shapes=shapes,
            dtype=lm.dtype) for stage in split.stages_of(mesh.pipeline_rank)
    ]
    schedule = _schedule(kind if backward else 'gpipe', stages, len(batches),
                         lambda hidden, index: loss_fn(hidden, int(index)))
    schedule._has_backward = backward
    for stage in stages:
        stage.has_backward = backward
    losses: Optional[list[torch.Tensor]] = [] if stages[-1].is_last else None
    with nullcontext() if backward else torch.no_grad():
        schedule._step_microbatches(
            arg_mbs=[()] * len(batches),
            kwarg_mbs=[{
                'index': i
            } for i in range(len(batches))],
            target_mbs=[torch.tensor(i) for i in range(len(batches))],
            losses=losses,
            return_outputs=False)
    return [loss.detach() for loss in losses or []]
