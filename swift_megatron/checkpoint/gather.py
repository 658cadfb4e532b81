"""Whole tensors from the ranks' slices, one at a time, on the CPU of tensor rank 0."""
from typing import Optional

import torch
import torch.distributed as dist

from ..mesh import ParallelMesh
from ..sharding import ShardSpec


def gather_whole(local: torch.Tensor, spec: ShardSpec, mesh: ParallelMesh) -> Optional[torch.Tensor]:
    """The whole tensor on tensor rank 0 (on the CPU), None on the others. Every tensor rank has to call it.

    Args:
        local: This rank's slice; parameter, gradient or optimizer moment.
        spec: The parameter's record.
        mesh: The process grid.
    """
    local = local.detach().contiguous()
    if spec.axis is None or mesh.tensor_parallel_size == 1:
        return local.cpu() if mesh.tensor_rank == 0 else None
    group = mesh.tensor_group
    if mesh.tensor_rank != 0:
        dist.send(local, dst=dist.get_global_rank(group, 0), group=group)
        return None
    whole = torch.empty(spec.global_shape, dtype=local.dtype)
    spec.place(whole, local, 0)
    for rank in range(1, mesh.tensor_parallel_size):
        received = torch.empty(spec.shape_of(rank), dtype=local.dtype, device=local.device)
        dist.recv(received, src=dist.get_global_rank(group, rank), group=group)
        spec.place(whole, received, rank)
    return whole

