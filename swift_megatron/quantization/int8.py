"""8-bit weights with one scale for each output row (the weights of LLM.int8, arXiv:2208.07339), as bitsandbytes stores
them.

    c_ij = round(127 w_ij / a_i),  a_i = max_j |w_ij|,  W = a c / 127

The product decodes the weight and multiplies in the compute dtype: what bitsandbytes does in training on CPUs.
Activations are never rounded. A row slice takes the largest value of the whole row over the ranks, so that its codes
are the whole matrix's.
"""
import torch
import torch.distributed as dist

from ..mesh import ParallelMesh
from ..sharding import ShardSpec
from .base import DecodedProduct, QuantizationConfig, QuantizedWeight


class EightBitWeight(QuantizedWeight):
    """An 8-bit slice (O/T, I/T) of a weight.

    Args:
        weight: The slice to quantise, on the device where it stays.
        spec: Its record.
        config: Its compute dtype.
        mesh: The process grid; row slices agree on their rows' scales over the tensor group.
    """

    @staticmethod
    def matches(config: QuantizationConfig) -> bool:
        return config.format == 'int8'

    def __init__(self, weight: torch.Tensor, spec: ShardSpec, config: QuantizationConfig, mesh: ParallelMesh) -> None:
        super().__init__(spec, config)
        self.source_dtype = weight.dtype
        weight = weight.to(torch.float16)  # as bitsandbytes does before it quantises
        scales = weight.abs().amax(dim=1).float()  # (O/T,)
        if spec.axis == 1 and mesh.tensor_group is not None:
            dist.all_reduce(scales, op=dist.ReduceOp.MAX, group=mesh.tensor_group)
        scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
        codes = torch.round(weight * (127. / scales.unsqueeze(1))).to(torch.int8)
        self.register_buffer('codes', codes, persistent=False)
        self.register_buffer('scales', scales, persistent=False)

    def _decoded(self, dtype: torch.dtype) -> torch.Tensor:
        return self.codes.to(dtype) * (self.scales / 127.).unsqueeze(1).to(dtype)

    def dequantized(self) -> torch.Tensor:
        return self._decoded(self.source_dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return DecodedProduct.apply(x, self._decoded)

    def extra_repr(self) -> str:
        return f'int8, {self.codes.shape[0]} x {self.codes.shape[1]}'
