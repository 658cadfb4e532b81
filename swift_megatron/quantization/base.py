"""Frozen bases in other formats than a dense matrix, behind one interface: a product, and the matrix when it is asked
for.

The partitioned linears call `product` and do not know what they hold. Each format has a file of its own; `quantize`
asks them in turn, the first that matches makes the weight.

O output, I input features of the whole matrix, /T this rank's part.
"""
import torch
import torch.nn.functional as F
from abc import abstractmethod
from dataclasses import dataclass
from torch import nn
from typing import Any, Callable, Literal, Optional

from ..mesh import ParallelMesh
from ..sharding import ShardSpec


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """How frozen linears are stored.

    Args:
        format: 'nf4' or 'fp4' (arXiv:2305.14314), or 'int8' (arXiv:2208.07339).
        double: Whether the scales of the blocks are quantised again.
        compute_dtype: Dtype of the product; the input's if None.
        block_size: Values that share a scale, in 4 bits. In 8 bits a row has one.
    """
    format: Literal['nf4', 'fp4', 'int8']
    double: bool = True
    compute_dtype: Optional[torch.dtype] = None
    block_size: int = 64


class QuantizedWeight(nn.Module):
    """A frozen weight (O/T, I/T) in some format. Stands in a linear in the place of its weight parameter.

    Args:
        spec: Which slice of the whole matrix it is.
        config: How it is stored.
    """

    def __init__(self, spec: ShardSpec, config: QuantizationConfig) -> None:
        super().__init__()
        self.spec, self.config = spec, config

    def __deepcopy__(self, memo: dict) -> 'QuantizedWeight':
        return self  # frozen: copies of modules share it

    @property
    def is_that_of_one_card(self) -> bool:
        """Whether its values are those of the whole matrix, quantised on one card (double quantisation aside)."""
        return True

    @abstractmethod
    def product(self, x: torch.Tensor) -> torch.Tensor:
        """X W^T, with the gradient of X alone; no dequantised weight outlives the call. (..., I/T) -> (..., O/T)"""

    @abstractmethod
    def dequantized(self) -> torch.Tensor:
        """The matrix (O/T, I/T) that the format stands for, in the dtype that was quantised."""

    @property
    def num_bytes(self) -> int:
        """Bytes held on this rank: codes, scales and tables."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes: PEFT leaves adapters in their own dtype where the base's is no floating one."""
        return next(self.buffers()).dtype


class DecodedProduct(torch.autograd.Function):
    """X W^T where W is decoded for each pass and let go; gradient of X alone. (..., I/T) -> (..., O/T)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, decode: Callable[[torch.dtype], torch.Tensor]) -> torch.Tensor:
        ctx.decode = decode
        return F.linear(x, decode(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return grad @ ctx.decode(grad.dtype), None


def product(x: torch.Tensor,
            weight: nn.Parameter | QuantizedWeight,
            bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """X W^T + b for a weight in any format. (..., I/T) -> (..., O/T)"""
    if isinstance(weight, QuantizedWeight):
        y = weight.product(x)
        return y if bias is None else y + bias.to(y.dtype)
    return F.linear(x, weight, bias)


def quantize(weight: torch.Tensor, spec: ShardSpec, config: QuantizationConfig, mesh: ParallelMesh) -> QuantizedWeight:
    """This rank's slice of a weight (O/T, I/T) in the format that the config names. Every tensor rank calls it.

    Raises:
        ValueError: if no format matches.
    """
    from .bnb import FourBitWeight  # bitsandbytes is needed only here, and is not always installed
    from .int8 import EightBitWeight
    for candidate in (FourBitWeight, EightBitWeight):
        if candidate.matches(config):
            return candidate(weight, spec, config, mesh)
    raise ValueError(f"there is no quantisation format '{config.format}'")


def keeps_blocks(spec: ShardSpec, block_size: int) -> bool:
    """Whether quantising the slice gives the codes of the whole matrix: blocks run along rows, and no cut goes through
    one.
    """
    if spec.size == 1:
        return True
    if spec.global_shape[1] % block_size:
        return False
    return spec.axis != 1 or all(bound % block_size == 0 for ranges in spec.layout for r in ranges for bound in r)
