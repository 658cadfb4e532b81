"""Who gets which samples: each replica its own, and all ranks of a replica the same, by construction.

The first rank of a replica reads, tokenises and collates; the others receive its batches, together with its random
state, so that dropout masks stay in step whatever the data pipeline draws.
"""
import torch
import torch.distributed as dist
from swift.dataloader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard
from swift.utils import to_device
from typing import Any, Iterator, Optional

from ..checkpoint.rng import generator_states, set_generator_states
from ..mesh import ParallelMesh


def broadcast_in_replica(value: Any, mesh: ParallelMesh) -> Any:
    """The object of the replica's first rank, on all its ranks."""
    box = [value]
    for group in (mesh.pipeline_group, mesh.tensor_group):
        if group is not None:
            dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


def is_reader(mesh: ParallelMesh) -> bool:
    """Whether this is the first rank of its replica."""
    return mesh.tensor_rank == 0 and mesh.pipeline_rank == 0


def no_samples() -> dict[str, torch.Tensor]:
    """A batch that only holds a place: nothing is computed from it, and it has no label token to count."""
    return {name: torch.empty(0, 0, dtype=torch.long) for name in ('input_ids', 'labels')}


def holds_samples(batch: dict[str, Any]) -> bool:
    return batch['input_ids'].numel() > 0


class ReplicaBatchSampler(BatchSamplerShard):
    """ms-swift's sampler with replicas in place of processes."""

    def __init__(self, *args: Any, mesh: ParallelMesh, **kwargs: Any) -> None:
        self.mesh = mesh
        super().__init__(*args, **kwargs)

    @property
    def rank(self) -> int:
        return self.mesh.data_rank

    @property
    def world_size(self) -> int:
        return self.mesh.data_parallel_size


class ReplicaDispatcher(DataLoaderDispatcher):
    """ms-swift's loader for data sets without length, run among the readers: the first of them reads for all
    replicas.
    """

    def __init__(self, *args: Any, mesh: ParallelMesh, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mesh = mesh

    @property
    def group(self) -> Optional[dist.ProcessGroup]:
        return self.mesh.data_group

    @property
    def rank(self) -> int:
        return self.mesh.data_rank

    @property
    def world_size(self) -> int:
        return self.mesh.data_parallel_size


class ReplicaDataLoader(DataLoaderDispatcher):
    """Iterates a loader on the reader and hands every batch to the other ranks of the replica.

    A DataLoaderDispatcher by type, so that ms-swift's resuming recognises it.

    Args:
        loader: The replica's batches.
        mesh: The process grid.
        device: Where batches go.
        step: Micro-batches of an optimizer step, for data without length. The Trainer takes a step whenever it has seen
            so many in a pass over the data, and when the pass ends at a number of batches that it knew before. Without
            one, the gradients and losses of what is left at the end would go into the first step of the next pass: so
            the last step is filled up with batches of no samples.
    """

    def __init__(self,
                 loader: DataLoaderShard | DataLoaderDispatcher,
                 mesh: ParallelMesh,
                 device: torch.device,
                 step: int = 1) -> None:
        super().__init__(loader, device)
        self.loader, self.mesh, self.step = loader, mesh, step

    @property
    def dataset(self) -> Any:
        return self.loader.dataset if hasattr(self.loader, 'dataset') else self.loader.base_dataloader.dataset

    @property
    def batch_sampler(self) -> Any:
        return getattr(self.loader, 'batch_sampler', None)

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for batch in self._batches():
            yield batch
            count += 1
        for _ in range(-count % self.step):
            yield to_device(no_samples(), self.device)

    def _batches(self) -> Iterator[Any]:
        if self.mesh.model_parallel_size == 1:
            yield from self.loader
            return
        batches = iter(self.loader) if is_reader(self.mesh) else None
        while True:
            message = None
            if batches is not None:
                batch = next(batches, None)
                message = (batch, generator_states())
            batch, random_state = broadcast_in_replica(message, self.mesh)
            if batch is None:
                return
            if self.mesh.pipeline_rank == 0:  # later stages have a stream of their own
                set_generator_states(random_state)
            yield to_device(batch, self.device)
