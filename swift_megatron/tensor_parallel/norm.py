"""Norms on tensors inside a tensor-parallel region.

A norm over the head dimension has a whole weight on every rank, but each rank sees only its heads: its gradients are
partial sums. A weight with a row for each head is cut with the heads. A norm over a whole cut projection needs the sum
of squares of all ranks, one number per token.

B batch, S sequence, P the projection's size (heads x head size), P/T this rank's part.
"""
import torch
from torch import nn

from ..mesh import ParallelMesh
from ..sharding import Layout, set_records
from .boundary import Region


class ProjectionRMSNorm(nn.Module):
    """RMS norm over all P elements of a projection of which this rank holds P/T. (B, S, P/T) -> (B, S, P/T)

        y = w x / sqrt(mean(x^2) + eps), the mean over all ranks' x (arXiv:1910.07467)

    Elements that several ranks hold (shared key/value heads) are counted once; the squares of a copy belong to the
    lowest rank, and so does the gradient through them, which suits the partial sums of the projection's own gradient.
    """

    def __init__(self,
                 size: int,
                 layout: Layout,
                 mesh: ParallelMesh,
                 *,
                 eps: float,
                 region: Region | None = None,
                 device: torch.device | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.region, self.size, self.eps = region or Region(mesh), size, eps
        spec = mesh.spec((size, ), axis=0, layout=layout, partial=True)
        self.weight = nn.Parameter(torch.empty(spec.local_shape, device=device, dtype=dtype))
        set_records(self, {'weight': spec})
        self.counted = None
        if spec.has_copies:
            counted = torch.zeros(spec.local_shape, device='cpu')
            for view in spec.owned(counted):
                view.fill_(1.)
            self.counted = counted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))
        squares = x.square()
        if self.counted is not None:
            squares = squares * self.counted.to(x)
        total = self.region.total(squares.sum(-1, keepdim=True))  # (B, S, 1)
        return (self.weight * (x * torch.rsqrt(total / self.size + self.eps))).to(dtype)
