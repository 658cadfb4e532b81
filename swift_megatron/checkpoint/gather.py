"""Whole tensors from the ranks' slices, one at a time, on the CPU of tensor rank 0."""
import torch
import torch.distributed as dist
from typing import Any, Iterator, Optional

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


def stream_from_stages(tensors: Iterator[tuple[str, Optional[torch.Tensor]]],
                       mesh: ParallelMesh) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all pipeline stages, one at a time, on process 0; nothing on the others.

    Args:
        tensors: This stage's (name, whole tensor); the tensor is None but on tensor rank 0.
        mesh: The process grid. Every rank of replica 0 has to consume the iterator.
    """
    group = mesh.pipeline_group
    if mesh.pipeline_rank > 0:
        first = dist.get_global_rank(group, 0)
        for name, tensor in tensors:
            if tensor is not None:
                dist.send_object_list([(name, tensor.shape, tensor.dtype)], dst=first, group=group)
                dist.send(_on_wire(tensor, group), dst=first, group=group)
        if mesh.tensor_rank == 0:
            dist.send_object_list([None], dst=first, group=group)
        return
    yield from ((name, tensor) for name, tensor in tensors if tensor is not None)
    if mesh.tensor_rank > 0:
        return
    for stage in range(1, mesh.pipeline_parallel_size):
        source = dist.get_global_rank(group, stage)
        while True:
            header: list[Any] = [None]
            dist.recv_object_list(header, src=source, group=group)
            if header[0] is None:
                break
            name, shape, dtype = header[0]
            buffer = _on_wire(torch.empty(shape, dtype=dtype), group)
            dist.recv(buffer, src=source, group=group)
            yield name, buffer.cpu()


def _on_wire(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor where the group's backend can send it from."""
    return tensor.cuda() if dist.get_backend(group) == 'nccl' else tensor
