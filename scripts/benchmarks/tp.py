"""Tensor parallelism: a step on one and on two ranks, with LoRA and with all parameters, and transformers' own TP."""
import math
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from typing import Any

from swift_megatron.mesh import ParallelMesh
from .counting import count_collectives
from .harness import Timing, Variant, interleaved, launch, ratio
from .models import MAX_NORM, PlainStep, Size, Step, adamw, partitioned, token_ids, write_checkpoint
from .profiling import profile_step

SIZES = (Size(hidden=256), Size(hidden=1024))
QUICK = (Size(hidden=256, layers=2, tokens=64, vocabulary=1000), )
WANTED = {
    'lora_t1/lora_t2 at 1024': 1.65,
    'transformers_tp2/full_t2 at 1024': 1.15,
    'transformers_tp2/full_t2 at 256': 2.
}


def transformers_step(path: str, ids: torch.Tensor) -> PlainStep:
    """A full-parameter step of transformers' tensor parallelism.

    Its parameters are DTensors and plain tensors. Fused optimizers and norms refuse lists of both, so each kind has a
    group and a norm of its own here: that is more than a user gets, and as fast as it can be.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=dist.get_world_size())).train()
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = adamw([{'params': sharded}, {'params': whole}])

    def update() -> None:
        norms = get_total_norm([p.grad for p in sharded]).full_tensor(), get_total_norm([p.grad for p in whole])
        scale = torch.clamp(MAX_NORM / (torch.stack(norms).norm() + 1e-6), max=1.)
        torch._foreach_mul_([p.grad.to_local() for p in sharded] + [p.grad for p in whole], scale)
        optimizer.step()
        optimizer.zero_grad()

    return PlainStep(model, ids, update)


def _measure(size: Size, path: str, timing: Timing, profiled: bool) -> dict[str, Any]:
    """On each of two ranks."""
    ids = token_ids(size)
    one, two = ParallelMesh(), ParallelMesh.create(tensor_parallel_size=dist.get_world_size())
    steps: dict[str, Any] = {}
    for kind in ('lora', 'full'):
        if two.rank == 0:
            steps[f'{kind}_t1'] = Step(partitioned(path, one, lora=kind == 'lora'), ids, one)
        steps[f'{kind}_t2'] = Step(partitioned(path, two, lora=kind == 'lora'), ids, two)
    steps['transformers_tp2'] = transformers_step(path, ids)
    names = ['lora_t1', 'lora_t2', 'full_t1', 'full_t2', 'transformers_tp2']
    ranks = {name: 1 if name.endswith('t1') else two.world_size for name in names}
    first_losses = {name: steps[name]() for name in names if two.rank < ranks[name]}
    collectives = {name: count_collectives(steps[name], size.layers) for name in names if ranks[name] > 1}
    times = interleaved({name: Variant(step=steps.get(name), ranks=ranks[name]) for name in names}, timing)
    profiles = {}
    for name in ('lora_t1', 'lora_t2', 'full_t2') if profiled else ():
        if two.rank < ranks[name]:
            profiles[name] = profile_step(steps[name])
        dist.barrier()
    if two.rank:
        return {}
    return {
        'times': times,
        'first_losses': first_losses,
        'parameter_bytes_on_rank_0': {
            name: sum(_local(p).numel() * 4 for p in step.model.parameters())
            for name, step in steps.items()
        },
        'collectives_on_rank_0': collectives,
        'profile_of_rank_0': profiles,
    }


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def run(directory: str,
        timing: Timing,
        *,
        quick: bool,
        profiled: bool = False,
        hidden: int | None = None) -> dict[str, Any]:
    """All sizes; the result as it goes into the JSON file."""
    cases = {}
    for size in QUICK if quick else [size for size in SIZES if hidden in (None, size.hidden)]:
        print(f'\n{size}, float32')
        result = launch(2, _measure, size, write_checkpoint(size, directory), timing, profiled)[0]
        losses = list(result['first_losses'].values())
        assert all(math.isclose(loss, losses[0], rel_tol=1e-4) for loss in losses), result['first_losses']
        times = result['times']
        result['ratios'] = {
            'lora_t1/lora_t2': ratio(times, 'lora_t1', 'lora_t2'),
            'full_t1/full_t2': ratio(times, 'full_t1', 'full_t2'),
            'transformers_tp2/full_t2': ratio(times, 'transformers_tp2', 'full_t2'),
        }
        cases[f'hidden {size.hidden}'] = {'size': size.facts(), **result}
    return {'cases': cases, 'wanted': WANTED}
