"""What is known of Hugging Face decoders: how they are entered and left, and how a part of one is run.

A part of a model is run through the forward of its class with a `ModuleView` in the place of the module: an object that
names what is its own (this stage's layers, a config with their number) and takes everything else from the module. The
module itself is neither copied nor changed: a copy would keep what libraries bound to the original instance, such as
the forward that accelerate wraps in autocast, and would run the original instead.

B batch, S sequence, H hidden.
"""
import copy
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from typing import Any

from ..pipeline_parallel.split import StageSplit

DECODER_INPUTS = ('input_ids', 'attention_mask', 'position_ids', 'token_type_ids', 'cu_seq_lens_q', 'cu_seq_lens_k',
                  'max_length_q', 'max_length_k')
NEUTRAL = {
    'embedding_multiplier': 1.,
    'embedding_dropout': 0.
}  # what a decoder does to embeddings, not again on later stages


class StageError(ValueError):
    """An architecture that cannot be cut into stages; the message names the reason."""


class ModuleView:
    """A module in a call of its class's forward, with some attributes of the view's own.

    Args:
        module: What is looked at.
        own: Attributes that the view has in place of the module's.
    """

    def __init__(self, module: nn.Module, **own: Any) -> None:
        self.__dict__.update(own)
        self.__dict__['_module'] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__['_module'], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that the module's class defines."""
        return type(self._module).forward(self, *args, **kwargs)


class AbsentModule(nn.Module):
    """Stands where another stage has the embedding, the final norm or the head."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError('this module lies on another pipeline stage')


def decoder_of(lm: PreTrainedModel) -> nn.Module:
    """The decoder inside a causal LM."""
    return getattr(lm, lm.base_model_prefix)


def decoder_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """What the decoder takes of a batch."""
    return {key: value for key, value in batch.items() if key in DECODER_INPUTS}


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


def _config_of_layers(decoder: nn.Module, layers: range) -> Any:
    """The decoder's config with these layers alone."""
    config = copy.copy(decoder.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, 'layer_types', None) is not None:
        config.layer_types = [config.layer_types[i] for i in layers]
    return config


def stage_view(lm: PreTrainedModel, split: StageSplit, stage: int, **own: Any) -> ModuleView:
    """The decoder with the layers of one stage alone.

    Token ids (B, S) or `inputs_embeds` (B, S, H) in, `last_hidden_state` (B, S, H) out, before the final norm unless it
    is the last stage.

    Args:
        lm: The causal LM.
        split: The layers of each stage.
        stage: Which one.
        own: Further attributes of the view.
    """
    decoder = decoder_of(lm)
    layers = split.layers(stage)
    parts: dict[str, Any] = {
        'layers': [decoder.layers._modules[str(i)] for i in layers],
        'config': _config_of_layers(decoder, layers),
    }
    if stage < split.num_stages - 1:
        parts[final_norm_name(lm)] = nn.Identity()
    if stage > 0:
        parts |= {name: value for name, value in NEUTRAL.items() if hasattr(decoder, name)}
    return ModuleView(decoder, **{**parts, **own})


def head_view(lm: PreTrainedModel) -> ModuleView:
    """The causal LM on hidden states that its decoder has made: `inputs_embeds` (B, S, H) in, `logits` (B, S, V) out.

    What an architecture does to its logits after the head (a soft cap, a scale) is in it.
    """

    def given(inputs_embeds: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)

    return ModuleView(lm, **{lm.base_model_prefix: given})


def check_passes_hidden_states(lm: PreTrainedModel, split: StageSplit) -> None:
    """Runs a later stage without layers on a probe: it has to return what it is given.

    Raises:
        StageError: if the decoder changes hidden states on entry (a scale in its forward, as in some architectures).
    """
    empty = StageSplit(bounds=(0, 0, 0, split.num_layers), num_ranks=3)
    view = stage_view(lm, empty, 1, training=True)
    device = next(p.device for p in view.parameters() if not p.is_meta)
    probe = torch.linspace(-2., 3., 64 * lm.config.hidden_size, device=device, dtype=lm.hidden_dtype).view(1, 64, -1)
    with torch.no_grad():
        returned = view(inputs_embeds=probe.clone(), use_cache=False).last_hidden_state
    if not torch.equal(returned, probe):
        raise StageError(
            f'{type(lm).__name__} changes hidden states before its first layer, so it cannot be cut into stages: '
            'use --pipeline_parallel_size 1')
