"""Cross-entropy on logits whose vocabulary is cut over the tensor-parallel ranks (arXiv:1909.08053 section 3).

Only numbers per token cross the ranks: the largest logit with its token, and three sums. N tokens, V vocabulary, V/T
this rank's part.
"""
import torch
import torch.distributed as dist
from dataclasses import dataclass

from ..mesh import ParallelMesh


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """Per-token results, the same on all tensor-parallel ranks. All of shape (N,).

    Args:
        nll: -log p(label), in nats; with gradient.
        smooth: The mean of -log p over the whole vocabulary (the uniform part of label smoothing); with gradient.
        predictions: The most probable token, without gradient.
    """
    nll: torch.Tensor
    smooth: torch.Tensor
    predictions: torch.Tensor


def _largest(logits: torch.Tensor, first: int, mesh: ParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit over the whole vocabulary and its token; of equal ones the first token. (N, V/T) -> 2 x (N,)"""
    values, tokens = logits.max(dim=-1)
    tokens = tokens + first
    if mesh.tensor_parallel_size == 1:
        return values, tokens
    # Token numbers travel as a second float row: exact up to 2^24 in float32, far above any vocabulary.
    own = torch.stack([values, tokens.to(values.dtype)])  # (2, N)
    all_ranks = [torch.empty_like(own) for _ in range(mesh.tensor_parallel_size)]
    dist.all_gather(all_ranks, own, group=mesh.tensor_group)
    gathered = torch.stack(all_ranks)  # (T, 2, N)
    values, rank = gathered[:, 0].max(dim=0)
    tokens = gathered[:, 1].gather(0, rank.unsqueeze(0)).squeeze(0)
    return values, tokens.long()


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """nll = log sum_j exp(z_j) - z_label;  smooth = log sum_j exp(z_j) - mean_j z_j."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor, first: int, vocabulary: int, mesh: ParallelMesh):
        largest, predictions = _largest(logits, first, mesh)
        shifted = logits - largest.unsqueeze(-1)  # (N, V/T)
        local = labels - first
        foreign = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(foreign, 0)
        target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.)
        total = shifted.sum(-1)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), target, total])  # (3, N)
        if mesh.tensor_parallel_size > 1:
            dist.all_reduce(sums, group=mesh.tensor_group)
        normaliser, target, total = sums
        log_normaliser = normaliser.log()
        ctx.save_for_backward(exponentials.div_(normaliser.unsqueeze(-1)), local, foreign)
        ctx.vocabulary = vocabulary
        ctx.mark_non_differentiable(predictions)
        return log_normaliser - target, log_normaliser - total / vocabulary, predictions

    @staticmethod
    def backward(ctx, nll_grad: torch.Tensor, smooth_grad: torch.Tensor, _):
        softmax, local, foreign = ctx.saved_tensors
        grad = softmax * (nll_grad + smooth_grad).unsqueeze(-1)
        grad -= (smooth_grad / ctx.vocabulary).unsqueeze(-1)
        grad.scatter_add_(-1, local.unsqueeze(-1), -nll_grad.masked_fill(foreign, 0.).unsqueeze(-1))
        return grad, None, None, None, None


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, *, first: int, vocabulary: int,
                                 mesh: ParallelMesh) -> TokenLosses:
    """Per-token losses from this rank's part of the logits.

    Args:
        logits: (N, V/T), any floating type; computed in at least float32.
        labels: (N,) token numbers in the whole vocabulary, none masked.
        first: The first token of this rank's part.
        vocabulary: V.
        mesh: The process grid.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll, smooth, predictions = _VocabParallelCrossEntropy.apply(logits, labels, first, vocabulary, mesh)
    return TokenLosses(nll=nll, smooth=smooth, predictions=predictions)
