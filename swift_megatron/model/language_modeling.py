"""Hidden states and token losses of a partitioned causal LM, without ever holding the logits of a whole batch.

The forward of the model's class computes the logits, for a chunk of tokens at a time, with the hidden states already
there in the place of its decoder: what an architecture does to its logits after the head (a soft cap, a scale) is kept
without knowing of it, on this rank's part of the vocabulary. Chunks are recomputed in the backward pass when there is
more than one, with the dropout masks of the forward pass.

B batch, S sequence, H hidden, N tokens with a label, V vocabulary, /T this rank's part.
"""
import math
import torch
from contextlib import contextmanager
from peft import PeftModel
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from typing import Any, Iterator

from ..mesh import ParallelMesh
from ..tensor_parallel.cross_entropy import TokenLosses, vocab_parallel_cross_entropy
from ..tensor_parallel.linear import ColumnParallelLinear
from .decoder import decoder_of, head_view
from .plan import REMEDY, PlanError

LOGITS_BYTES = 256 * 2**20  # float32 logits that are held at a time, on one rank


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face causal LM inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def hidden_states(model: nn.Module, **inputs: Any) -> torch.Tensor:
    """Output of the decoder with its final norm, before the head. (B, S) token ids -> (B, S, H)"""
    return decoder_of(causal_lm(model))(**inputs, use_cache=False).last_hidden_state


def _head_layers(lm: PreTrainedModel) -> list[ColumnParallelLinear]:
    return [module for module in lm.get_output_embeddings().modules() if isinstance(module, ColumnParallelLinear)]


def _draws(lm: PreTrainedModel) -> bool:
    """Whether the head draws random numbers (adapters with dropout on it)."""
    return any(
        isinstance(module, nn.Dropout) and module.p > 0 and module.training
        for module in lm.get_output_embeddings().modules())


@contextmanager
def _ungathered(lm: PreTrainedModel) -> Iterator[None]:
    """The head returns this rank's part of the vocabulary."""
    layers = _head_layers(lm)
    for layer in layers:
        layer.gather_output = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gather_output = True


def local_logits(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """This rank's part of the logits, after all that the model does to them. (N, H) -> (N, V/T)"""
    lm = causal_lm(model)
    with _ungathered(lm):
        return head_view(lm)(inputs_embeds=hidden.unsqueeze(0)).logits.squeeze(0)


def check_head(lm: PreTrainedModel) -> None:
    """Computes logits without memory, on the meta device.

    Raises:
        PlanError: if the causal LM takes more of its decoder than the hidden states.
    """
    hidden = torch.empty(1, lm.config.hidden_size, dtype=lm.hidden_dtype, device='meta')
    try:
        with torch.no_grad():
            local_logits(lm, hidden)
    except AttributeError as error:
        raise PlanError(
            f'the head of {type(lm).__name__} needs more of the decoder than its hidden states ({error}), which is '
            f'not supported: {REMEDY}') from error


def token_losses(model: nn.Module,
                 hidden: torch.Tensor,
                 labels: torch.Tensor,
                 mesh: ParallelMesh,
                 *,
                 logits_bytes: int = LOGITS_BYTES) -> TokenLosses:
    """Losses of N tokens.

    Args:
        model: The partitioned causal LM, with or without adapters.
        hidden: (N, H) hidden states at the positions that predict the labels.
        labels: (N,) the tokens to predict, none masked.
        mesh: The process grid.
        logits_bytes: How much float32 logits may take at a time on one rank; a smaller number means more chunks.
    """
    head = _head_layers(causal_lm(model))[0]
    first = head.layout[mesh.tensor_rank][0][0]

    def losses(hidden_chunk: torch.Tensor,
               label_chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        result = vocab_parallel_cross_entropy(
            local_logits(model, hidden_chunk), label_chunk, first=first, vocabulary=head.global_out_features, mesh=mesh)
        return result.nll, result.smooth, result.predictions

    num_tokens = labels.numel()
    # The widest rank decides, so that all ranks cut the tokens alike and their collectives meet.
    widest = max(stop - start for ((start, stop), ) in head.layout)
    num_chunks = max(1, math.ceil(4 * num_tokens * widest / logits_bytes))
    if num_chunks == 1:
        return TokenLosses(**dict(zip(('nll', 'smooth', 'predictions'), losses(hidden, labels))))
    chunks = [
        checkpoint(losses, h, y, use_reentrant=False, preserve_rng_state=_draws(causal_lm(model)))
        for h, y in zip(hidden.tensor_split(num_chunks), labels.tensor_split(num_chunks))
    ]
    nll, smooth, predictions = (torch.cat(parts) for parts in zip(*chunks))
    return TokenLosses(nll=nll, smooth=smooth, predictions=predictions)
