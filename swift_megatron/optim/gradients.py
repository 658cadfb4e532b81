"""What happens to gradients between the backward pass and the optimizer: sums over copies, mean over replicas, norm,
clip.

All of it reads the parameters' `ShardSpec`. Collectives run on flat buckets; every process visits the parameters in the
same order.
"""
import torch
import torch.distributed as dist
from typing import Iterable, Iterator, Optional

from ..mesh import ParallelMesh
from ..sharding import spec_of

BUCKET_ELEMENTS = 16 * 2**20


def _with_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [parameter for parameter in parameters if parameter.grad is not None]


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Consecutive tensors of one dtype, of about BUCKET_ELEMENTS elements together."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or sum(t.numel()
                                                              for t in bucket) + tensor.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _all_reduce(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sums the tensors over the group, in place."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        for tensor, summed in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
            tensor.copy_(summed.view_as(tensor))


def sum_partial_gradients(parameters: Iterable[torch.nn.Parameter], mesh: ParallelMesh) -> None:
    """Adds up the gradients of copies that are partial sums, over the tensor group.

    Whole copies (replicated LoRA factors, head norms) are added as they are; slices that overlap on some ranks (shared
    key/value heads) are added in the place that they have in the whole tensor.
    """
    if mesh.tensor_parallel_size == 1:
        return
    partial = [p for p in _with_gradients(parameters) if spec_of(p).partial and spec_of(p).has_copies]
    wholes = []
    for parameter in partial:
        spec = spec_of(parameter)
        whole = parameter.grad.new_zeros(spec.global_shape)
        spec.place(whole, parameter.grad, mesh.tensor_rank)
        wholes.append(whole)
    _all_reduce(wholes, mesh.tensor_group)
    for parameter, whole in zip(partial, wholes):
        parameter.grad.copy_(spec_of(parameter).slice(whole))


def sum_tied_gradients(parameters: Iterable[torch.nn.Parameter], mesh: ParallelMesh) -> None:
    """Adds up the gradients of a token embedding and an output head that are one parameter, over the end stages."""
    if mesh.tied_group is not None:
        _all_reduce([p.grad for p in _with_gradients(parameters) if spec_of(p).tie], mesh.tied_group)


def average_over_replicas(parameters: Iterable[torch.nn.Parameter], mesh: ParallelMesh) -> None:
    """Mean of the gradients over the data-parallel group, as DistributedDataParallel leaves them."""
    if mesh.data_parallel_size == 1:
        return
    gradients = [parameter.grad for parameter in _with_gradients(parameters)]
    if gradients:
        torch._foreach_div_(gradients, mesh.data_parallel_size)
    _all_reduce(gradients, mesh.data_group)


def gradient_norm(parameters: Iterable[torch.nn.Parameter],
                  mesh: ParallelMesh,
                  device: Optional[torch.device] = None) -> torch.Tensor:
    """L2 norm of the whole model's gradient, each element once, the same number on all ranks. Shape ().

    Args:
        parameters: This rank's, of which there may be none with a gradient (a frozen stage).
        mesh: The process grid.
        device: Where the groups' collectives run, which cannot be seen from no gradient; by default that of the first
            gradient, or else of the first parameter.
    """
    parameters = list(parameters)
    gradients = _with_gradients(parameters)
    views = [view for p in gradients for view in spec_of(p).owned(p.grad) if view.numel()]
    if device is None:
        device = next((p.device for p in [*gradients, *parameters]), torch.device('cpu'))
    total = torch.zeros((), dtype=torch.float64, device=device)
    if views:
        norms = torch._foreach_norm(views, 2, dtype=torch.promote_types(views[0].dtype, torch.float32))
        total = torch.stack([norm.to(device) for norm in norms]).double().square().sum()
    for group in (mesh.tensor_group, mesh.pipeline_group):
        if group is not None:
            dist.all_reduce(total, group=group)
    return total.sqrt().float()


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scales all gradients by min(1, max_norm / (norm + 1e-6)), torch's clip_grad_norm_ rule."""
    gradients = [parameter.grad for parameter in _with_gradients(parameters)]
    if gradients:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.).to(gradients[0].device))


def agree_on_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, mesh: ParallelMesh,
                      device: torch.device) -> None:
    """Makes an infinite gradient on one rank an infinite gradient on all, so that all skip the step and lower the
    scale.

    To be called between the scaler's `unscale_` and `step`. A stage without gradients takes part.
    """
    found = scaler._per_optimizer_states[id(optimizer)]['found_inf_per_device']
    flag = torch.zeros((), device=device)
    for own in found.values():
        flag = torch.maximum(flag, own.to(device))
    for group in (mesh.tensor_group, mesh.data_group, mesh.pipeline_group):
        if group is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    for key in found or [device]:
        found[key] = flag.to(key).reshape(())
