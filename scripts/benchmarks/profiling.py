"""Where the time of a step goes, by torch's profiler, on this rank."""
from collections import defaultdict
from typing import Any, Callable

import torch

SKINNY = 16  # a product with a dimension of at most this size is an adapter's
KINDS = {  # the first that has the operator's name
    'attention': ('_scaled_dot_product_flash_attention_for_cpu', '_scaled_dot_product_flash_attention_for_cpu_backward',
                  'scaled_dot_product_attention'),
    # torch waits for a collective inside the function that called it.
    'collectives and waiting': ('_ReduceFrom', '_CopyToBackward', 'c10d::allreduce_', 'c10d::allgather_',
                                'record_param_comms'),
    'update': ('_fused_adamw_', 'Optimizer.step#AdamW.step', 'Optimizer.zero_grad#AdamW.zero_grad', '_foreach_mul_',
               '_foreach_norm', '_foreach_add_'),
    'loss': ('_VocabParallelCrossEntropy', '_VocabParallelCrossEntropyBackward', 'max', 'exp_', 'gather', 'scatter_add_',
             'masked_fill', 'log', '_log_softmax', '_log_softmax_backward_data'),
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


def profile_step(step: Callable[[], Any], repeats: int = 3) -> dict[str, Any]:
    """Milliseconds of a step by kind of work (own time of each operator on this thread), and the operators that take most.

    What is missing to the whole is Python.
    """
    step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(repeats):
            with torch.profiler.record_function('whole step'):
                step()
    categories: dict[str, float] = defaultdict(float)
    operators: dict[str, float] = defaultdict(float)
    events = profiler.events()
    marks = [event for event in events if event.name == 'whole step']
    for event in events:
        if event.name == 'whole step' or event.thread != marks[0].thread:
            continue
        categories[_kind(event)] += event.self_cpu_time_total
        operators[f'{event.name} {[s for s in event.input_shapes if s][:3]}'] += event.self_cpu_time_total
    unit = 1e3 * repeats
    largest = sorted(operators.items(), key=lambda item: -item[1])[:25]
    return {
        'whole_ms': round(sum(mark.cpu_time_total for mark in marks) / unit, 1),
        'by_kind_ms': {kind: round(value / unit, 1) for kind, value in sorted(categories.items(), key=lambda item: -item[1])},
        'largest_operators_ms': {name: round(value / unit, 1) for name, value in largest},
    }
