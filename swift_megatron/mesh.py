"""Who talks to whom: the p x d x t grid of processes and its groups.

Ranks are numbered with tensor parallelism innermost, so that its ranks share a node and its fast links, then data
parallelism, then the pipeline (arXiv:2104.04473 section 3). The mesh is built once and handed down as an argument.
"""
import torch
import torch.distributed as dist
from dataclasses import dataclass
from datetime import timedelta
from typing import Optional, Sequence

from .sharding import Layout, ShardSpec


@dataclass(frozen=True, kw_only=True)
class ParallelMesh:
    """This process' place in the grid and the groups it belongs to.

    A group is None where it has one member. `rank` is the global rank
    `(pipeline_rank * d + data_rank) * t + tensor_rank`.
    """
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    rank: int = 0
    tensor_group: Optional[dist.ProcessGroup] = None
    pipeline_group: Optional[dist.ProcessGroup] = None
    data_group: Optional[dist.ProcessGroup] = None
    tied_group: Optional[dist.ProcessGroup] = None  # first and last stage, on those two alone

    def __deepcopy__(self, memo: dict) -> 'ParallelMesh':
        return self  # modules are copied (PEFT's modules_to_save), process groups cannot be

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor_parallel_size % self.data_parallel_size

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (self.tensor_parallel_size * self.data_parallel_size)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Number of processes that hold one copy of the model (t x p)."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def spec(self,
             global_shape: Sequence[int],
             *,
             axis: Optional[int] = None,
             layout: Layout = (),
             partial: bool = False) -> ShardSpec:
        """The record of a parameter on this process."""
        return ShardSpec(
            global_shape=tuple(global_shape),
            rank=self.tensor_rank,
            size=self.tensor_parallel_size,
            axis=axis,
            layout=layout,
            partial=partial)

    @classmethod
    def create(cls,
               *,
               tensor_parallel_size: int = 1,
               pipeline_parallel_size: int = 1,
               timeout: Optional[timedelta] = None) -> 'ParallelMesh':
        """Builds the groups over all processes of the default group; every process has to call it.

        Args:
            tensor_parallel_size: t.
            pipeline_parallel_size: p.
            timeout: How long a process waits for the others of a group, which do not inherit it from the default group;
                torch's if None.

        Raises:
            ValueError: if the number of processes is no multiple of t x p.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        model_size = tensor_parallel_size * pipeline_parallel_size
        if world_size % model_size:
            raise ValueError(f'{world_size} processes are no multiple of tensor_parallel_size x '
                             f'pipeline_parallel_size = {tensor_parallel_size} x {pipeline_parallel_size}')
        sizes = (pipeline_parallel_size, world_size // model_size, tensor_parallel_size)
        if world_size == 1:
            return cls()
        grid = torch.arange(world_size).view(sizes)  # of ranks
        groups = {
            f'{name}_group': _own_group(grid.movedim(axis, -1).flatten(0, 1), timeout)
            for axis, name in enumerate(('pipeline', 'data', 'tensor'))
        }
        groups['tied_group'] = groups['pipeline_group']
        if pipeline_parallel_size > 2:
            groups['tied_group'] = _own_group(grid[[0, -1]].flatten(1).T, timeout)
        return cls(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            data_parallel_size=sizes[1],
            rank=dist.get_rank(),
            **groups)


def _own_group(members: torch.Tensor, timeout: Optional[timedelta]) -> Optional[dist.ProcessGroup]:
    """Makes a group of each row of ranks, which every process has to do in the same order; the one that this process is
    in. None where it is in none, or alone.
    """
    size = members.shape[1]
    if size == 1 or size == dist.get_world_size():
        return None if size == 1 else dist.group.WORLD
    own = None
    for ranks in members.tolist():
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            own = group
    return own
