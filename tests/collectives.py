"""Notes every collective that a piece of code runs, below all Python wrappers: nothing can go round it."""
import torch
import torch.distributed as dist
from dataclasses import dataclass, field
from torch.utils._python_dispatch import TorchDispatchMode
from typing import Any, Optional


@dataclass(frozen=True)
class Collective:
    """One call: its kind (allreduce, send, ...), what this process put in, the group's ranks, and the dtype."""
    kind: str
    elements: int
    ranks: tuple[int, ...]
    dtype: Optional[torch.dtype] = field(default=None, compare=False)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


class CollectiveLog(TorchDispatchMode):
    """`with CollectiveLog() as log: ...` fills `log.calls`, in order; backward passes are noted too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == 'c10d':
            # Gathers take (outputs, inputs, group, ...), reductions and broadcasts (tensors, group, ...).
            groups = [i for i, value in enumerate(args) if isinstance(value, torch.ScriptObject)]
            group = dist.ProcessGroup.unbox(args[groups[0]])
            tensors = _tensors(args[groups[0] - 1])
            self.calls.append(
                Collective(
                    kind=func.__name__.split('.')[0].strip('_'),
                    elements=sum(tensor.numel() for tensor in tensors),
                    ranks=tuple(dist.get_process_group_ranks(group)),
                    dtype=tensors[0].dtype if tensors else None))
        return func(*args, **(kwargs or {}))
