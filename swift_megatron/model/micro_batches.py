"""Runs micro-batches through this rank's stages of a causal LM.

Only hidden states travel; masks and positions come from each rank's own copy of the batch.

B batch, S sequence (each micro-batch has its own), H hidden.
"""
import torch
from contextlib import AbstractContextManager, nullcontext
from transformers import PreTrainedModel
from typing import Any, Callable, Optional

from ..mesh import ParallelMesh
from ..pipeline_parallel.schedule import LossFunction, run_stages
from ..pipeline_parallel.split import StageSplit
from ..pipeline_parallel.stage import StageForward
from .decoder import decoder_inputs, stage_view


def _stage_forward(lm: PreTrainedModel, split: StageSplit, stage: int, batches: list[dict[str, Any]],
                   autocast: Callable[[], AbstractContextManager]) -> StageForward:
    view = stage_view(lm, split, stage)

    def compute(index: int, hidden: Optional[torch.Tensor]) -> torch.Tensor:
        inputs = decoder_inputs(batches[index])
        if hidden is not None:
            inputs.pop('input_ids')
            inputs['inputs_embeds'] = hidden
        with autocast():
            return view(**inputs, use_cache=False).last_hidden_state

    return compute


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
    return run_stages(
        {stage: _stage_forward(lm, split, stage, batches, autocast)
         for stage in split.stages_of(mesh.pipeline_rank)},
        loss_fn,
        shapes=[(*batch['input_ids'].shape, lm.config.hidden_size) for batch in batches],
        dtype=lm.hidden_dtype,
        device=batches[0]['input_ids'].device,
        num_stages=split.num_stages,
        mesh=mesh,
        kind=kind,
        backward=backward)
