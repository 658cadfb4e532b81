"""NF4 and FP4 weights of bitsandbytes (arXiv:2305.14314). The only file that imports it.

Blocks of 64 values run along the rows of the flattened matrix. A slice that keeps whole blocks has the codes and scales
of the whole matrix bit for bit (without double quantisation, whose second scale is a mean over the slice).

bitsandbytes' decoder for CPUs is wrong for rows that are no multiple of 64 long, and its kernels assume such rows.
Those matrices are stored as rows of one block each, which has the same codes, and multiplied after decoding.
"""
import bitsandbytes.functional as bnb_functional
import torch
from bitsandbytes.autograd._functions import MatMul4Bit
from typing import Any

from ..mesh import ParallelMesh
from ..sharding import ShardSpec
from .base import DecodedProduct, QuantizationConfig, QuantizedWeight, keeps_blocks


class FourBitWeight(QuantizedWeight):
    """A 4-bit slice (O/T, I/T) of a weight.

    Args:
        weight: The slice to quantise, float32, float16 or bfloat16, on the device where it stays.
        spec: Its record.
        config: Format, double quantisation, compute dtype.
        mesh: The process grid; not needed, blocks lie within a slice.
    """

    @staticmethod
    def matches(config: QuantizationConfig) -> bool:
        return config.format in ('nf4', 'fp4')

    def __init__(self, weight: torch.Tensor, spec: ShardSpec, config: QuantizationConfig, mesh: ParallelMesh) -> None:
        super().__init__(spec, config)
        self.shape = tuple(weight.shape)
        self.whole_rows = weight.shape[1] % config.block_size == 0
        flat = weight.reshape(-1)
        self.padding = -flat.numel() % config.block_size
        if not self.whole_rows:
            weight = torch.nn.functional.pad(flat, (0, self.padding)).view(-1, config.block_size)
        codes, state = bnb_functional.quantize_4bit(
            weight.contiguous(),
            blocksize=config.block_size,
            compress_statistics=config.double,
            quant_type=config.format)
        self.register_buffer('codes', codes, persistent=False)
        for name, tensor in _state_tensors(state).items():
            self.register_buffer(name, tensor, persistent=False)
        self._state = state

    def dequantized(self) -> torch.Tensor:
        values = bnb_functional.dequantize_4bit(self.codes, self._state)
        if self.whole_rows:
            return values
        values = values.reshape(-1)
        return values[:values.numel() - self.padding].view(self.shape)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        if self.config.compute_dtype is not None:
            x = x.to(self.config.compute_dtype)
        if self.whole_rows:
            # The autograd function itself, in training and evaluation alike: bitsandbytes' module repacks its weight
            # for evaluation on some CPUs, computes in bfloat16 from then on, and cannot train any more.
            y = MatMul4Bit.apply(x, self.codes, None, None, self._state)
        else:
            y = DecodedProduct.apply(x, lambda dtype: self.dequantized().to(dtype))
        return y.to(dtype)

    @property
    def is_that_of_one_card(self) -> bool:
        return keeps_blocks(self.spec, self.config.block_size)

    def extra_repr(self) -> str:
        return f'{self.config.format}, {self.shape[0]} x {self.shape[1]}, double={self.config.double}'


def _state_tensors(state: Any) -> dict[str, torch.Tensor]:
    """What a quantisation state holds beside the codes."""
    tensors = {'absmax': state.absmax, 'table': state.code}
    if state.nested:
        tensors |= {'offset': state.offset, 'absmax_scale': state.state2.absmax, 'absmax_table': state.state2.code}
    return tensors
