"""Collectives of a step by its parts, and bytes that autograd keeps for the backward pass."""
import torch
from collections import defaultdict
from torch.utils._python_dispatch import TorchDispatchMode
from typing import Any, Iterator

from swift_megatron.model.language_modeling import causal_lm

NOT_COUNTED = ('wait_tensor', 'wrap_tensor_autograd', 'barrier')


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class CollectiveCounter(TorchDispatchMode):
    """Calls and bytes (put in by this process) of every collective, below all Python wrappers, by the part of the step.

    Parts are set by the caller (`counter.part = ...`) and by hooks on the decoder's layers, see `watch`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part = 'other'
        self.counts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        self.handles: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kind = func.__name__.split('.')[0].strip('_')
        if func.namespace == 'c10d' and kind not in NOT_COUNTED:
            # Gathers take (outputs, inputs, group, ...), reductions and broadcasts (tensors, group, ...).
            group = next(i for i, value in enumerate(args) if isinstance(value, torch.ScriptObject))
            self._note(kind, args[group - 1])
        elif func.namespace == '_c10d_functional' and kind not in NOT_COUNTED:
            self._note(kind.replace('all_reduce', 'allreduce').replace('all_gather_into_tensor', 'allgather'), args[0])
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, tensors: Any) -> None:
        entry = self.counts[self.part][kind]
        entry[0] += 1
        entry[1] += sum(tensor.numel() * tensor.element_size() for tensor in _tensors(tensors))

    def watch(self, model: torch.nn.Module) -> None:
        """Makes each decoder layer a part of its own, 'layer forward' and 'layer backward', all layers together."""
        lm = causal_lm(model)
        for number, layer in enumerate(getattr(lm, lm.base_model_prefix).layers):
            self.handles.append(layer.register_forward_pre_hook(self._enter if number else self._enter_first))
            self.handles.append(layer.register_forward_hook(self._leave))

    def _enter(self, layer: torch.nn.Module, args: tuple) -> None:
        self.part = 'layer forward'

    def _enter_first(self, layer: torch.nn.Module, args: tuple) -> None:
        self._enter(layer, args)
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: self._set('embedding backward'))

    def _leave(self, layer: torch.nn.Module, args: tuple, output: Any) -> None:
        self.part = 'head and loss forward'
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self._set('layer backward'))

    def _set(self, part: str) -> None:
        self.part = part

    def report(self, num_layers: int) -> dict[str, Any]:
        """Part -> kind -> calls and bytes; those of layers per layer."""
        for handle in self.handles:
            handle.remove()
        result: dict[str, Any] = {}
        for part, kinds in self.counts.items():
            share = num_layers if part.startswith('layer') else 1
            result[part + (' (per layer)' if share > 1 else '')] = {
                kind: {
                    'calls': calls / share,
                    'bytes': size / share
                }
                for kind, (calls, size) in kinds.items()
            }
        return result


def count_collectives(step: Any, num_layers: int) -> dict[str, Any]:
    """Collectives of one step, which has a `model`, a `loss` and an `update`."""
    with CollectiveCounter() as counter:
        counter.watch(step.model)
        counter.part = 'embedding forward'
        loss = step.loss()
        counter.part = 'head and loss backward'
        loss.backward()
        counter.part = 'update'
        step.update()
    return counter.report(num_layers)


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the storages that autograd holds for backward passes, now and at most; parameters are not counted.

    Args:
        model: Whose parameters and buffers are left out.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.now = self.peak = 0
        self.left_out = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        self.holders: dict[int, int] = defaultdict(int)  # storage -> saved tensors on it
        super().__init__(self._pack, lambda saved: saved.tensor)

    def __enter__(self) -> 'SavedBytes':
        super().__enter__()
        return self

    def _pack(self, tensor: torch.Tensor) -> Any:
        return _Saved(tensor, self)

    def hold(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() not in self.left_out:
            self.holders[storage.data_ptr()] += 1
            if self.holders[storage.data_ptr()] == 1:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)

    def drop(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() not in self.left_out:
            self.holders[storage.data_ptr()] -= 1
            if not self.holders[storage.data_ptr()]:
                self.now -= storage.nbytes()


class _Saved:
    """One tensor that autograd saved."""

    def __init__(self, tensor: torch.Tensor, count: SavedBytes) -> None:
        self.tensor, self.count = tensor.detach(), count
        count.hold(tensor.untyped_storage())

    def __del__(self) -> None:
        self.count.drop(self.tensor.untyped_storage())
