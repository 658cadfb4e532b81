"""accelerate's view of the processes, reduced to model replicas: data is dealt to and gathered from replicas."""
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch.utils.data import DataLoader
from typing import Any, Optional

from ..mesh import ParallelMesh
from .evaluation import ReplicaEvaluationLoader


class ReplicaAccelerator(Accelerator):
    """An Accelerator whose number of processes is the number of replicas and whose `gather` runs over them."""
    mesh: ParallelMesh

    @classmethod
    def of(cls, accelerator: Accelerator, mesh: ParallelMesh) -> 'ReplicaAccelerator':
        """The same accelerator, sharing its state, with the mesh's view."""
        view = cls.__new__(cls)
        view.__dict__.update(accelerator.__dict__)
        view.mesh = mesh
        return view

    @property
    def num_processes(self) -> int:
        return self.mesh.data_parallel_size

    @property
    def process_index(self) -> int:
        return self.mesh.data_rank

    def prepare_data_loader(self,
                            data_loader: DataLoader,
                            device_placement: Optional[bool] = None,
                            slice_fn_for_dispatch: Any = None) -> ReplicaEvaluationLoader:
        """Evaluation's; those for training are the trainer's own."""
        return ReplicaEvaluationLoader(data_loader, self.mesh, self.device)

    def gather(self, tensor: Any) -> Any:
        """Concatenates tensors (in any nesting) over the replicas, in replica order."""
        return recursively_apply(self._gather_one, tensor, error_on_other_type=True)

    def _gather_one(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.mesh.data_group is None:
            return tensor
        tensor = tensor.contiguous() if tensor.ndim else tensor.clone()[None]
        parts = [torch.empty_like(tensor) for _ in range(self.mesh.data_parallel_size)]
        dist.all_gather(parts, tensor, group=self.mesh.data_group)
        return torch.cat(parts)
