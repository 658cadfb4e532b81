"""Stages made of a Hugging Face decoder: views that share its modules, and what torch.distributed.pipelining runs.

A rank's model is one module tree with the layers' own numbers, so that names, adapters and files are those of the whole
model. A stage is a view of the decoder with its own layers, entered through `inputs_embeds` and left before the final
norm unless it is the last. Only hidden states travel; masks and positions come from each rank's own copy of the batch.

B batch, S sequence (each micro-batch has its own), H hidden.
"""
import copy
import torch
import torch.distributed as dist
from contextlib import AbstractContextManager
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import extract_tensor_meta
from torch.distributed.pipelining.stage import _RecvInfo
from transformers import PreTrainedModel
from typing import Any, Callable, Optional

from .split import StageSplit

DECODER_INPUTS = ('input_ids', 'attention_mask', 'position_ids', 'token_type_ids', 'cu_seq_lens_q', 'cu_seq_lens_k',
                  'max_length_q', 'max_length_k')
NEUTRAL = {
    'embedding_multiplier': 1.,
    'embedding_dropout': 0.
}  # what a decoder does to embeddings, not again on later stages


class StageError(ValueError):
    """An architecture that cannot be cut into stages; the message names the reason."""


class AbsentModule(nn.Module):
    """Stands where another stage has the embedding, the final norm or the head."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError('this module lies on another pipeline stage')


def final_norm_name(lm: PreTrainedModel) -> str:
    """Name of what follows the layers in the decoder, from the published pipeline plan.

    Raises:
        StageError: if the architecture publishes no plan of the usual form.
    """
    plan = getattr(lm.config, 'base_model_pp_plan', None) or {}
    after = list(plan)[list(plan).index('layers') + 1:] if 'layers' in plan else []
    if len(after) != 1 or plan['layers'][1] != ['hidden_states'] or 'hidden_states' not in plan['layers'][0]:
        raise StageError(
            f'{type(lm).__name__} publishes no pipeline plan in which only hidden states pass between layers, so '
            'it cannot be cut into stages: use --pipeline_parallel_size 1')
    return after[0]


def decoder_view(lm: PreTrainedModel, split: StageSplit, stage: int) -> PreTrainedModel:
    """The decoder with the layers of one stage alone; shares all modules."""
    decoder = getattr(lm, lm.base_model_prefix)
    view = copy.copy(decoder)
    layers = nn.ModuleList()
    layers._modules = {str(i): decoder.layers._modules[str(i)] for i in split.layers(stage)}
    view._modules = {**decoder._modules, 'layers': layers}
    if stage < split.num_stages - 1:
        view._modules[final_norm_name(lm)] = nn.Identity()
    view.config = copy.copy(decoder.config)
    view.config.num_hidden_layers = len(layers)
    if getattr(decoder.config, 'layer_types', None) is not None:
        view.config.layer_types = [decoder.config.layer_types[i] for i in split.layers(stage)]
    if stage > 0:
        for name, value in NEUTRAL.items():
            if hasattr(decoder, name):
                setattr(view, name, value)
    return view


def check_passes_hidden_states(lm: PreTrainedModel, split: StageSplit) -> None:
    """Runs a later stage without layers on a probe: it has to return what it is given.

    Raises:
        StageError: if the decoder changes hidden states on entry (a scale in its forward, as in some architectures).
    """
    decoder = getattr(lm, lm.base_model_prefix)
    view = decoder_view(lm, StageSplit(bounds=(0, 0, split.num_layers, split.num_layers), num_ranks=3), 1)
    view._modules['layers'] = nn.ModuleList()
    view.config.num_hidden_layers, view.config.layer_types = 0, []
    device = next(p.device for p in decoder.parameters() if not p.is_meta)
    probe = torch.linspace(-2., 3., 64 * lm.config.hidden_size, device=device, dtype=lm.dtype).view(1, 64, -1)
    view.training = True
    with torch.no_grad():
        returned = view(inputs_embeds=probe.clone(), use_cache=False).last_hidden_state
    if not torch.equal(returned, probe):
        raise StageError(
            f'{type(lm).__name__} changes hidden states before its first layer, so it cannot be cut into stages: '
            'use --pipeline_parallel_size 1')


class StageChunk(nn.Module):
    """One stage's computation on one micro-batch. Hidden states (B, S, H) in and out; the first stage takes token ids.

    Args:
        view: The decoder view of the stage.
        batches: The micro-batches, as this rank holds them.
        autocast: Makes the context in which the forward pass runs.
    """

    def __init__(self, view: PreTrainedModel, batches: list[dict[str, Any]], is_first: bool,
                 autocast: Callable[[], AbstractContextManager]) -> None:
        super().__init__()
        self.__dict__['view'] = view  # not registered: parameters belong to the rank's model
        self.batches, self.is_first, self.autocast = batches, is_first, autocast

    def forward(self, *hidden: torch.Tensor, index: int) -> torch.Tensor:
        batch = {key: value for key, value in self.batches[index].items() if key in DECODER_INPUTS}
        if not self.is_first:
            batch.pop('input_ids')
            batch['inputs_embeds'], = hidden
        with self.autocast():
            return self.view(**batch, use_cache=False).last_hidden_state


class HiddenStateStage(PipelineStage):
    """A PipelineStage whose micro-batches have lengths of their own.

    torch fixes the shapes of all micro-batches by the first. Here each receive buffer is made for its micro-batch, when
    it is needed, and let go after the backward pass: no more buffers live than micro-batches are in flight. Overrides
    private methods of torch 2.9 to 2.13; `tests/distributed/test_pipeline.py` fails when they change.

    Args:
        shapes: (B, S, H) of each micro-batch.
        dtype: Of the hidden states.
    """

    def __init__(self, chunk: StageChunk, stage: int, num_stages: int, device: torch.device, group: dist.ProcessGroup,
                 *, shapes: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
        example = torch.empty(shapes[0], device='meta', dtype=dtype, requires_grad=True)
        super().__init__(
            chunk,
            stage,
            num_stages,
            device,
            input_args=() if stage == 0 else (example, ),
            output_args=(example, ),
            group=group)
        self.shapes, self.dtype = shapes, dtype

    def _buffer(self, index: int) -> torch.Tensor:
        return torch.empty(self.shapes[index], device=self.device, dtype=self.dtype)

    def _meta(self, index: int, requires_grad: bool) -> Any:
        example = torch.empty(self.shapes[index], device='meta', dtype=self.dtype, requires_grad=requires_grad)
        return extract_tensor_meta(example)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        self.args_recv_info = {}
        for index in range(num_microbatches):
            self.args_recv_info[index] = () if self.is_first else (_RecvInfo(f'hidden_{index}', self.stage_index
                                                                             - 1, None, self._meta(index, True)), )

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        for index in range(num_microbatches):
            self.grad_recv_info[index] = () if self.is_last else (_RecvInfo(f'hidden_grad_{index}', self.stage_index
                                                                            + 1, None, self._meta(index, False)), )

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list:
        for info in self.args_recv_info[fwd_chunk_id]:
            info.buffer = self._buffer(fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list:
        if self.has_backward and not self.is_last:
            for info in self.grad_recv_info[bwd_chunk_id]:
                info.buffer = self._buffer(bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            self._release(self.args_recv_info, fwd_chunk_id)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            self._release(self.args_recv_info, bwd_chunk_id)
            self._release(self.grad_recv_info, bwd_chunk_id)

    @staticmethod
    def _release(table: dict, index: int) -> None:
        for info in table.get(index, ()):
            info.buffer = None

    def _get_grad_send_meta(self, input_idx: int) -> Optional[Any]:
        # Only asked for the shape of a missing gradient; hidden states always have one.
        return self._stage_meta.inputs[input_idx] if self._stage_meta.inputs else None
