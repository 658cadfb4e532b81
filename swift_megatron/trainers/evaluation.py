"""Which replica evaluates which samples: each sample once, whatever is left at the end.

Batches are dealt in turn: replica r gets batch r of every d. In the last round there may be too few of them, or a
shorter one: nothing is repeated to fill it up, a replica without a batch gets one of no samples and takes part in the
sums alone. So d replicas with batches of B samples give what one process gives with batches of d B.
"""
import itertools
import torch
import torch.distributed as dist
from accelerate.state import GradientState
from functools import partial
from swift.utils import to_device
from torch.utils.data import DataLoader, IterableDataset, Sampler
from typing import Any, Callable, Iterator, Optional

from ..mesh import ParallelMesh
from .data import broadcast_in_replica, is_reader, no_samples

Counted = tuple[int, dict[str, Any]]  # number of samples, and their batch
KEPT = ('num_workers', 'pin_memory', 'timeout', 'worker_init_fn', 'multiprocessing_context', 'prefetch_factor',
        'persistent_workers', 'in_order')  # of the loader that is dealt out


class DealtBatches(Sampler):
    """This replica's batches of indices; an empty one where there are not enough for all.

    Args:
        batches: The batches of one process.
        drop_last: Whether a last round that does not fill all replicas' batches is left out.
    """

    def __init__(self, batches: Any, mesh: ParallelMesh, drop_last: bool) -> None:
        self.batches, self.mesh, self.drop_last = batches, mesh, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        batches, d = iter(self.batches), self.mesh.data_parallel_size
        while dealt := list(itertools.islice(batches, d)):
            if len(dealt) == d or not self.drop_last:
                yield dealt[self.mesh.data_rank] if self.mesh.data_rank < len(dealt) else []

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.batches), self.mesh.data_parallel_size)
        return rounds + int(rest > 0 and not self.drop_last)


def _counted(rows: list, collate: Callable[[list], dict[str, Any]]) -> Counted:
    return len(rows), collate(rows) if rows else no_samples()


class ReplicaEvaluationLoader:
    """Reads on the first rank of a replica and hands every batch to its other ranks.

    To accelerate it looks like one of its own loaders: `remainder`, the number of samples in the last round, makes it
    weigh that round by them. As in a run of one process, the rounds of a data set without length all weigh the same.

    Args:
        loader: What evaluation in one process would iterate.
        mesh: The process grid.
        device: Where batches go.
    """

    def __init__(self, loader: DataLoader, mesh: ParallelMesh, device: torch.device) -> None:
        self.mesh, self.device, self.dataset = mesh, device, loader.dataset
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        settings = {name: getattr(loader, name) for name in KEPT if hasattr(loader, name)}
        if self.is_stream:
            settings['batch_size'] = loader.batch_size
        else:
            settings['batch_sampler'] = DealtBatches(loader.batch_sampler, mesh, loader.drop_last)
        self.base_dataloader = DataLoader(
            loader.dataset, collate_fn=partial(_counted, collate=loader.collate_fn), **settings)
        self.gradient_state = GradientState()
        self.end_of_dataloader, self.remainder = False, -1
        if not self.is_stream and not loader.drop_last:
            self.remainder = len(loader.dataset) % (loader.batch_size * mesh.data_parallel_size)
        self.num_samples = 0  # of all replicas, in a data set without length, as far as it was read

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.num_samples, self.end_of_dataloader = 0, False
        self.gradient_state._add_dataloader(self)
        try:
            batches = self._read() if is_reader(self.mesh) else None
            for number in itertools.count(1):
                own: Optional[Counted] = None if batches is None else next(batches, None)
                own = broadcast_in_replica(own, self.mesh)
                if own is None:
                    return
                self.num_samples += own[0]
                self.end_of_dataloader = not self.is_stream and number == len(self)
                yield to_device(own[1], self.device)
        finally:
            self.gradient_state._remove_dataloader(self)

    def _read(self) -> Iterator[Counted]:
        if not self.is_stream or self.mesh.data_group is None:
            return iter(self.base_dataloader)
        return self._deal()

    def _deal(self) -> Iterator[Counted]:
        """The first replica's reader reads for all; with each batch goes the number of samples of the round."""
        mesh = self.mesh
        batches = iter(self.base_dataloader) if mesh.data_rank == 0 else None
        while True:
            rounds: Optional[list[Optional[Counted]]] = None
            if batches is not None:
                dealt = list(itertools.islice(batches, mesh.data_parallel_size))
                total = sum(count for count, _ in dealt)
                dealt += [(0, no_samples())] * (mesh.data_parallel_size - len(dealt))
                rounds = [(total, batch) if total else None for _, batch in dealt]
            own: list[Optional[Counted]] = [None]
            dist.scatter_object_list(own, rounds, dist.get_global_rank(mesh.data_group, 0), group=mesh.data_group)
            if own[0] is None:
                return
            yield own[0]
