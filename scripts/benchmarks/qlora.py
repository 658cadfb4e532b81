"""QLoRA: a step on a 4-bit base on one and two ranks, beside plain PEFT on bitsandbytes' Linear4bit. NF4, without
double quantisation.

Times are interleaved in one launch. Memory is measured in fresh processes, one variant each: the peak of the resident
set, less what the process had after its imports, while loading and while training.
"""
import peft
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from typing import Any

from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.accounting import frozen_bytes
from swift_megatron.quantization.base import QuantizationConfig
from .harness import Timing, Variant, interleaved, launch, ratio
from .models import (MAX_NORM, PlainStep, Size, Step, adamw, lora_config, partitioned, token_ids, trainable,
                     write_checkpoint)

SIZE = Size(hidden=1024)
QUICK = Size(hidden=256, layers=2, tokens=64, vocabulary=1000)
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16}  # of the rest of the model and of the products
WANTED = {'peft/t1, time': 1.0, 'peft/t1, memory': 1.0}


def plain_step(path: str, ids: torch.Tensor, dtype: torch.dtype) -> PlainStep:
    """transformers, PEFT and bitsandbytes as one would put them together."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=False)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, quantization_config=quantization, device_map={'': 'cpu'})
    torch.manual_seed(0)
    model = peft.get_peft_model(model, lora_config()).train()
    parameters = trainable(model)
    optimizer = adamw(parameters)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return PlainStep(model, ids, update)


def own_step(path: str, ids: torch.Tensor, dtype: torch.dtype, mesh: ParallelMesh) -> Step:
    quantization = QuantizationConfig(format='nf4', double=False, compute_dtype=dtype)
    return Step(partitioned(path, mesh, lora=True, dtype=dtype, quantization=quantization), ids, mesh)


def _make(name: str, path: str, size: Size, mesh: ParallelMesh) -> Any:
    kind, dtype = name.split()
    if kind == 'peft':
        return plain_step(path, token_ids(size), DTYPES[dtype])
    return own_step(path, token_ids(size), DTYPES[dtype], mesh if kind == 't2' else ParallelMesh())


def _names() -> list[str]:
    return [f'{kind} {dtype}' for dtype in DTYPES for kind in ('peft', 't1', 't2')]


def _times(size: Size, path: str, timing: Timing) -> dict[str, Any]:
    """On each of two ranks."""
    mesh = ParallelMesh.create(tensor_parallel_size=dist.get_world_size())
    ranks = {name: 2 if name.startswith('t2') else 1 for name in _names()}
    steps = {name: _make(name, path, size, mesh) for name in _names() if mesh.rank < ranks[name]}
    losses = {name: steps[name]() for name in ranks if name in steps}
    return {
        'times': interleaved({name: Variant(step=steps.get(name), ranks=ranks[name])
                              for name in ranks}, timing),
        'first_losses': losses
    }


def _resident(field: str) -> int:
    """Bytes, VmRSS or VmHWM of this process."""
    with open('/proc/self/status', encoding='ascii') as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f'{field}:'))


def _memory(size: Size, path: str, name: str) -> dict[str, int]:
    """Of this process for one variant."""
    mesh = ParallelMesh.create(tensor_parallel_size=dist.get_world_size() if dist.is_initialized() else 1)
    __import__('bitsandbytes')
    warm_up = torch.randn(64, 64, requires_grad=True)
    (warm_up @ warm_up).sum().backward()
    before = _resident('VmRSS')
    with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
        file.write('5')  # VmHWM starts again from here
    step = _make(name, path, size, mesh)
    loaded, peak = _resident('VmRSS') - before, _resident('VmHWM') - before
    for _ in range(2):
        step()
    model = step.model
    return {
        'peak_while_loading': peak,
        'after_loading': loaded,
        'peak': _resident('VmHWM') - before,
        'weights': sum(frozen_bytes(model).values()) if isinstance(step, Step) else _plain_bytes(model)
    }


def _plain_bytes(model: torch.nn.Module) -> int:
    """Bytes of the frozen weights of a bitsandbytes model, scales included."""
    total = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            total += parameter.numel() * parameter.element_size()
            state = getattr(parameter, 'quant_state', None)
            if state is not None:
                total += sum(t.numel() * t.element_size() for t in (state.absmax, state.code))
    return total


def run(directory: str, timing: Timing, *, quick: bool) -> dict[str, Any]:
    """Times and memory; the result as it goes into the JSON file."""
    size = QUICK if quick else SIZE
    print(f'\nNF4, {size}')
    path = write_checkpoint(size, directory)
    result = launch(2, _times, size, path, timing)[0]
    times = result['times']
    memory = {}
    for name in _names():
        ranks = launch(2 if name.startswith('t2') else 1, _memory, size, path, name)
        memory[name] = {key: [rank[key] for rank in ranks] for key in ranks[0]}
    ratios: dict[str, Any] = {}
    for dtype in DTYPES:
        peft_peak, own_peak = memory[f'peft {dtype}']['peak'][0], memory[f't1 {dtype}']['peak'][0]
        ratios |= {
            f'peft/t1 {dtype}': ratio(times, f'peft {dtype}', f't1 {dtype}'),
            f't1/t2 {dtype}': ratio(times, f't1 {dtype}', f't2 {dtype}'),
            f'peft/t1 {dtype}, peak memory': round(peft_peak / own_peak, 3)
        }
    case = {'size': size.facts(), **result, 'ratios': ratios, 'bytes_of_each_rank': memory}
    return {'cases': {f'hidden {size.hidden}': case}, 'wanted': WANTED}
