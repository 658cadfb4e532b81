"""Where the time of a step goes, by torch's profiler, on this rank."""
import torch
from collections import defaultdict
from statistics import median
from typing import Any, Callable

SKINNY = 16  # a product with a dimension of at most this size is an adapter's
KINDS = {  # the first that has the operator's name
    'attention': ('_scaled_dot_product_flash_attention_for_cpu', '_scaled_dot_product_flash_attention_for_cpu_backward',
                  'scaled_dot_product_attention'),
    # torch waits for a collective inside the function that called it.
    'collectives and waiting': ('_ReduceFrom', '_CopyToBackward', 'c10d::allreduce_', 'c10d::allgather_',
                                'record_param_comms'),
    'update': ('_fused_adamw_', 'Optimizer.step#AdamW.step', 'Optimizer.zero_grad#AdamW.zero_grad', '_foreach_mul_',
               '_foreach_norm', '_foreach_add_'),
    'loss': ('_VocabParallelCrossEntropy', '_VocabParallelCrossEntropyBackward', 'max', 'exp_', 'gather', 'log',
             'scatter_add_', 'masked_fill', '_log_softmax', '_log_softmax_backward_data'),
    'elementwise': ('add', 'add_', 'mul', 'mul_', 'sub', 'sub_', 'neg', 'div', 'div_', 'silu', 'silu_backward'),
    'norms': ('pow', 'mean', 'rsqrt', 'pow_', 'sum', 'expand'),
    'copies and allocations': ('copy_', 'clone', 'cat', 'contiguous', 'fill_', 'zero_', 'zeros', 'empty', 'empty_like',
                               'empty_strided', 'to', '_to_copy'),
}


def _kind(event: Any) -> str:
    name = event.name.removeprefix('aten::')
    if name in ('mm', 'addmm', 'bmm', 'addmm_'):
        smallest = min(min(shape[-2:]) for shape in event.input_shapes if len(shape) >= 2)
        return 'adapter products' if smallest <= SKINNY else 'products'
    return next((kind for kind, names in KINDS.items() if name in names), 'other')


def profile_step(step: Callable[[], Any], repeats: int = 5) -> dict[str, Any]:
    """Milliseconds of a step by kind of work, and the operators that take most.

    The time of an operator is its own on this thread: the median over its calls with the same shapes, times their
    number, so that a call during which another program had the core does not count. What is missing to the whole is
    Python.
    """
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(repeats):
            with torch.profiler.record_function('whole step'):
                step()
    events = profiler.events()
    marks = [event for event in events if event.name == 'whole step']
    calls: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.name != 'whole step' and event.thread == marks[0].thread:
            name = f'{event.name} {[shape for shape in event.input_shapes if shape][:3]}'
            calls[_kind(event), name].append(event.self_cpu_time_total)
    kinds: dict[str, float] = defaultdict(float)
    operators: dict[str, float] = {}
    for (kind, name), times in calls.items():
        operators[name] = median(times) * len(times) / repeats / 1e3
        kinds[kind] += operators[name]
    return {
        'whole_ms': round(median(mark.cpu_time_total for mark in marks) / 1e3, 1),
        'by_kind_ms': _rounded(kinds),
        'largest_operators_ms': dict(list(_rounded(operators).items())[:25]),
    }


def _rounded(times: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in sorted(times.items(), key=lambda item: -item[1])}
