"""The conjugate pairs at the borders of tensor-parallel regions (Megatron's f and g, arXiv:1909.08053 section 3).

Each function is the identity for T = 1, runs over the mesh's tensor group, and never writes into a tensor that it was
handed: autograd or the caller may still own it.

B batch, S sequence, H hidden (the whole last dimension), H/T this rank's part of it.
"""
import torch
import torch.distributed as dist

from ..mesh import ParallelMesh
from ..sharding import Layout, length


def all_reduced(x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """Sum of `x` over the tensor group, in a new tensor."""
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=mesh.tensor_group)
    return result


def all_gathered(x: torch.Tensor, layout: Layout, mesh: ParallelMesh) -> torch.Tensor:
    """Whole last dimension from the parts that `layout` gives each rank. (..., H/T) -> (..., H)"""
    widest = max(map(length, layout))
    padded = torch.nn.functional.pad(x, (0, widest - x.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in layout]
    dist.all_gather(parts, padded, group=mesh.tensor_group)
    whole = x.new_empty(*x.shape[:-1], max(stop for ranges in layout for _, stop in ranges))
    for part, ranges in zip(parts, layout):
        position = 0
        for start, stop in ranges:
            whole[..., start:stop] = part[..., position:position + stop - start]
            position += stop - start
    return whole


def own_part(x: torch.Tensor, layout: Layout, mesh: ParallelMesh) -> torch.Tensor:
    """This rank's part of the last dimension. (..., H) -> (..., H/T)"""
    return torch.cat([x[..., start:stop] for start, stop in layout[mesh.tensor_rank]], dim=-1)


class _CopyTo(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return all_reduced(grad, ctx.mesh), None


class _ReduceFrom(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
        return all_reduced(x, mesh)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


class _ReduceWithin(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return all_reduced(x, mesh)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return all_reduced(grad, ctx.mesh), None


class _ScatterTo(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x: torch.Tensor, layout: Layout, mesh: ParallelMesh) -> torch.Tensor:
        ctx.layout, ctx.mesh = layout, mesh
        return own_part(x, layout, mesh)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return all_gathered(grad, ctx.layout, ctx.mesh), None, None


class _GatherFrom(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x: torch.Tensor, layout: Layout, mesh: ParallelMesh) -> torch.Tensor:
        ctx.layout, ctx.mesh = layout, mesh
        return all_gathered(x, layout, mesh)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return own_part(grad, ctx.layout, ctx.mesh), None, None


def copy_to_tensor_parallel_region(x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """Enters a region (f). Forward: identity. Backward: sum of the ranks' gradients. (B, S, H) -> (B, S, H)"""
    return x if mesh.tensor_parallel_size == 1 else _CopyTo.apply(x, mesh)


def reduce_from_tensor_parallel_region(x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """Leaves a region (g). Forward: sum of the ranks' partial results. Backward: identity. (B, S, H) -> (B, S, H)"""
    return x if mesh.tensor_parallel_size == 1 else _ReduceFrom.apply(x, mesh)


def reduce_within_tensor_parallel_region(x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """A sum that the ranks go on to use each for its own part. Forward and backward: sum over the ranks.

    For statistics over a cut dimension (a norm over a whole projection): every rank's use of the sum gives it a
    gradient.
    """
    return x if mesh.tensor_parallel_size == 1 else _ReduceWithin.apply(x, mesh)


def scatter_to_tensor_parallel_region(x: torch.Tensor, layout: Layout, mesh: ParallelMesh) -> torch.Tensor:
    """Takes this rank's part of the last dimension. Forward: slice. Backward: all-gather. (..., H) -> (..., H/T)"""
    return x if mesh.tensor_parallel_size == 1 else _ScatterTo.apply(x, layout, mesh)


def gather_from_tensor_parallel_region(x: torch.Tensor, layout: Layout, mesh: ParallelMesh) -> torch.Tensor:
    """Puts the ranks' parts together. Forward: all-gather. Backward: slice. (..., H/T) -> (..., H)

    What follows has to be the same on all ranks, so that each rank's gradient is already the whole one.
    """
    return x if mesh.tensor_parallel_size == 1 else _GatherFrom.apply(x, layout, mesh)
