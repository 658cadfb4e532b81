"""Linear layers whose weight is cut over the tensor-parallel ranks (arXiv:1909.08053 section 3).

    column: Y = X W^T + b with the output cut: rank i computes Y_i = X W_i^T + b_i
    row:    Y = X W^T + b with the input cut:  Y = sum_i X_i W_i^T + b

The region is entered once by the block around the column-parallel layers, not by each of them (`boundary.py`); a layer
that stands alone (the output head) enters it itself.
`in_features` and `out_features` are this rank's, the global sizes are in `global_in_features` and
`global_out_features`.

B batch, S sequence, I input, O output size of the whole layer, /T this rank's part.
"""
import torch
from torch import nn
from typing import Optional

from ..mesh import ParallelMesh
from ..quantization.base import QuantizationConfig, product, quantize
from ..sharding import RECORDS, Layout, ShardSpec, set_records
from .boundary import Region


class PartitionedLinear(nn.Linear):
    """What the column- and row-parallel layers share: the cut weight and the product with it.

    Args:
        in_features: I, of the whole layer.
        out_features: O, of the whole layer.
        layout: Which part of the cut dimension each rank holds.
        mesh: The process grid.
        bias: Whether the layer has a bias.
        region: The block's; one of the layer's own if None.
    """
    cut_axis: int  # of the weight (O, I)

    def __init__(self,
                 in_features: int,
                 out_features: int,
                 layout: Layout,
                 mesh: ParallelMesh,
                 *,
                 bias: bool = False,
                 region: Optional[Region] = None,
                 device: Optional[torch.device] = None,
                 dtype: Optional[torch.dtype] = None) -> None:
        nn.Module.__init__(self)  # a Linear to PEFT, but nothing of its construction: no whole weight is ever made
        self.mesh, self.layout, self.region = mesh, layout, region or Region(mesh)
        self.global_in_features, self.global_out_features = in_features, out_features
        weight = mesh.spec((out_features, in_features), axis=self.cut_axis, layout=layout, partial=True)
        self.out_features, self.in_features = weight.local_shape
        self.weight = nn.Parameter(torch.empty(weight.local_shape, device=device, dtype=dtype))
        records = {'weight': weight}
        if bias:
            records['bias'] = self._bias_spec()
            self.bias = nn.Parameter(torch.empty(records['bias'].local_shape, device=device, dtype=dtype))
        else:
            self.register_parameter('bias', None)
        set_records(self, records)

    def _bias_spec(self) -> ShardSpec:
        raise NotImplementedError

    def quantize(self, weight: torch.Tensor, config: QuantizationConfig) -> None:
        """Holds this rank's slice `weight` (out_features, in_features) in a quantised format from now on, frozen."""
        spec = getattr(self, RECORDS)['weight']
        del self._parameters['weight']
        self.weight = quantize(weight, spec, config, self.mesh)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """X W_i^T without the bias. (B, S, in_features) -> (B, S, out_features)"""
        return product(x, self.weight)

    def extra_repr(self) -> str:
        return (f'in_features={self.in_features}/{self.global_in_features}, '
                f'out_features={self.out_features}/{self.global_out_features}, bias={self.bias is not None}')


class ColumnParallelLinear(PartitionedLinear):
    """Y_i = X W_i^T + b_i. (B, S, I) -> (B, S, O/T), or (B, S, O) with `gather_output`.

    Ranks may hold the same rows (shared key/value heads); their gradients are then partial sums.
    """
    cut_axis = 0

    def __init__(self, *args, gather_output: bool = False, enters_region: bool = False, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gather_output, self.enters_region = gather_output, enters_region

    def _bias_spec(self) -> ShardSpec:
        return self.mesh.spec((self.global_out_features, ), axis=0, layout=self.layout, partial=True)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The input as the products take it: a layer that `enters_region` itself does it here."""
        return self.region.enter(x) if self.enters_region else x

    def local_output(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the output. (B, S, I) -> (B, S, O/T)"""
        return product(x, self.weight, self.bias)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """What follows once all contributions are in `y`. (B, S, O/T) -> (B, S, O/T or O)"""
        return self.region.gather(y, self.layout) if self.gather_output else y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.local_output(self.enter(x)))


class RowParallelLinear(PartitionedLinear):
    """Y = sum_i X_i W_i^T + b. (B, S, I/T) -> (B, S, O), or from (B, S, I) with `split_input`."""
    cut_axis = 1

    def __init__(self, *args, split_input: bool = False, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.split_input = split_input

    def _bias_spec(self) -> ShardSpec:
        return self.mesh.spec((self.global_out_features, ))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the input. (B, S, I/T or I) -> (B, S, I/T)"""
        return self.region.scatter(x, self.layout) if self.split_input else x

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """The one all-reduce, and the bias once. (B, S, O) partial sums -> (B, S, O)"""
        y = self.region.leave(partial)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.product(self.enter(x)))
