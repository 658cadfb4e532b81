"""The border of a tensor-parallel region, as an object: what a block does on entering and on leaving.

Inside a region tensors are cut by heads, features or the vocabulary; outside, every rank holds them whole. Linears,
embedding, head, norms and adapters ask their block's region and know no collective: what lies outside, and how it comes
in and goes out, is the choice of the region alone (arXiv:1909.08053 section 3).

B batch, S sequence, H hidden, R rank of an adapter.
"""
import torch
from torch import nn
from typing import Callable

from ..mesh import ParallelMesh
from ..sharding import Layout
from .regions import (copy_to_tensor_parallel_region, gather_from_tensor_parallel_region,
                      reduce_from_tensor_parallel_region, reduce_within_tensor_parallel_region,
                      scatter_to_tensor_parallel_region)


class Region:
    """The region of one block, outside of which tokens are whole on all ranks.

    Args:
        mesh: The process grid.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh

    def __deepcopy__(self, memo: dict) -> 'Region':
        return self  # modules are copied (PEFT's modules_to_save) within their region

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What the block's column-parallel layers take; its gradient is summed over t. (B, S, H) -> (B, S, H)"""
        return copy_to_tensor_parallel_region(x, self.mesh)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """What lies outside, from the ranks' partial sums. (B, S, H) -> (B, S, H)"""
        return reduce_from_tensor_parallel_region(partial, self.mesh)

    def narrow_product(self, product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """A product of what `enter` returned whose result is much smaller (X A^T): a region may make it of what lies
        outside, and bring the result in instead. (B, S, H) -> (B, S, R)
        """
        return product(x)

    def gather(self, part: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The whole last dimension, where a block needs it inside. (..., H/T) -> (..., H)"""
        return gather_from_tensor_parallel_region(part, layout, self.mesh)

    def scatter(self, whole: torch.Tensor, layout: Layout) -> torch.Tensor:
        """This rank's part of a last dimension that was gathered. (..., H) -> (..., H/T)"""
        return scatter_to_tensor_parallel_region(whole, layout, self.mesh)

    def total(self, statistics: torch.Tensor) -> torch.Tensor:
        """Statistics over a cut dimension, summed over the ranks, each of which goes on with them. Shape stays."""
        return reduce_within_tensor_parallel_region(statistics, self.mesh)


class BlockEntry:
    """Forward pre-hook of a block: its input enters the region."""

    def __init__(self, region: Region) -> None:
        self.region = region

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (self.region.enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, 'hidden_states': self.region.enter(kwargs['hidden_states'])}
