"""The two products of a LoRA adapter, and the dropout before the first: U = drop(X) A^T and Y + s U B^T.

Of the first product's input nothing but X itself is kept for the backward pass, in the dtype and the memory in which
the block has it anyway: the projections of a block (q, k, v; gate, up) share one X, where a cast or a dropped copy
would be each projection's own. The cast is made again, and so is the dropped input, from the mask that is kept (a byte
for each element).

B batch, S sequence, I input and O output size of the layer, /T this rank's part, R rank of the adapter.
"""
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from typing import Any, Optional

from ..sharding import Ranges


class SlicedDropout(nn.Dropout):
    """Dropout on a whole or a cut input, with this rank's slice of the mask that the whole input gets.

    Drawing the whole mask keeps the random number generators of all ranks in step, and makes the run the one without
    tensor parallelism. (B, S, I/T) -> (B, S, I/T)

    Args:
        p: Probability that an element is dropped.
        width: I, of the whole layer.
        ranges: What this rank holds of it; all of it if empty.
    """

    def __init__(self, p: float, width: int, ranges: Ranges = ()) -> None:
        super().__init__(p)
        self.width, self.ranges = width, ranges

    @property
    def scale(self) -> float:
        """What kept elements are multiplied with."""
        return 1 / (1 - self.p) if self.p < 1 else 0.

    def mask(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """Which elements of this rank's part are kept, drawn for the whole width; None where nothing is dropped.
        (B, S, I/T) -> (B, S, I/T)
        """
        if not self.training or self.p == 0:
            return None
        whole = torch.empty(*x.shape[:-1], self.width, dtype=torch.bool, device=x.device).bernoulli_(1 - self.p)
        if not self.ranges:
            return whole
        return torch.cat([whole[..., start:stop] for start, stop in self.ranges], dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.mask(x)
        return x if mask is None else _dropped(x, mask, self.scale)


def _dropped(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return mask.to(x.dtype).mul_(scale).mul_(x)


class _LowRank(torch.autograd.Function):
    """U = drop(X) A^T, multiplied in `dtype`; the dropout is computed in A's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, mask: Optional[torch.Tensor], scale: float,
                dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x, a, mask)
        ctx.scale, ctx.dtype = scale, dtype
        return F.linear(_input(x, a.dtype, mask, scale, dtype), a.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Optional[torch.Tensor], ...]:
        x, a, mask = ctx.saved_tensors
        grad_x = grad_a = None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_x = grad @ a.to(ctx.dtype)  # (..., I/T)
                if mask is not None:
                    grad_x = _dropped(grad_x.to(a.dtype), mask, ctx.scale)
                grad_x = grad_x.to(x.dtype)
            if ctx.needs_input_grad[1]:
                dropped = _input(x, a.dtype, mask, ctx.scale, ctx.dtype)
                grad_a = (grad.flatten(0, -2).t() @ dropped.flatten(0, -2)).to(a.dtype)  # (R, I/T)
        return grad_x, grad_a, None, None, None


def _input(x: torch.Tensor, wide: torch.dtype, mask: Optional[torch.Tensor], scale: float,
           dtype: torch.dtype) -> torch.Tensor:
    """X as A multiplies it: the adapter's dropout is computed in the adapter's dtype, as PEFT does."""
    return (x if mask is None else _dropped(x.to(wide), mask, scale)).to(dtype)


def product_dtype(adapter: torch.Tensor) -> torch.dtype:
    """Dtype in which an adapter's factors are multiplied: autocast's where it is on, else their own."""
    device = adapter.device.type
    if torch.is_autocast_enabled(device) and adapter.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return adapter.dtype


def low_rank(x: torch.Tensor, a: nn.Parameter, dropout: nn.Module) -> torch.Tensor:
    """U = drop(X) A^T. (..., I/T), (R, I/T) -> (..., R)

    Args:
        x: The input of the layer, in any floating dtype.
        a: The adapter's first factor.
        dropout: A SlicedDropout, or an identity.
    """
    mask = dropout.mask(x) if isinstance(dropout, SlicedDropout) else None
    return _LowRank.apply(x, a, mask, dropout.scale if mask is not None else 1., product_dtype(a))


def plus_product(total: torch.Tensor, low_rank: torch.Tensor, b: nn.Parameter) -> torch.Tensor:
    """total + U B^T, in one pass over the output where the types allow it. (..., O), (..., R), (O, R) -> (..., O)

    The scale is on U already: R numbers per token in place of O.
    """
    if total.dtype == low_rank.dtype and (b.dtype == total.dtype or torch.is_autocast_enabled(total.device.type)):
        return torch.addmm(total.flatten(0, -2), low_rank.flatten(0, -2), b.t()).view(total.shape)
    return total + F.linear(low_rank, b)
