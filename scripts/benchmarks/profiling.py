"""Where the time of a step goes, by torch's profiler, on this rank."""
from collections import defaultdict
from typing import Any, Callable

import torch

SKINNY = 16  # a product with a dimension of at most this size is an adapter's
ADDITIONS = ('add', 'add_', 'mul', 'mul_', 'sub', 'neg', 'div', 'div_', 'silu', 'silu_backward')
NORMS = ('pow', 'mean', 'rsqrt', 'pow_', 'sum', 'expand')
COPIES = ('copy_', 'clone', 'cat', 'contiguous', 'fill_', 'zero_', 'zeros', 'empty', 'empty_like', 'empty_strided', 'to', '_to_copy')


def _category(event: Any) -> str:
    name = event.name.removeprefix('aten::')
    shapes = [shape for shape in event.input_shapes if len(shape) >= 2]
    if name in ('mm', 'addmm', 'bmm', 'addmm_'):
        return 'adapter products' if min(min(shape[-2:]) for shape in shapes) <= SKINNY else 'products'
    if 'attention' in name:
        return 'attention'
    if 'allreduce' in name or 'all_reduce' in name or 'allgather' in name or name.startswith(('c10d', 'gloo')):
        return 'collectives'
    if 'fused_adam' in name or 'foreach' in name or 'Optimizer' in name:
        return 'update'
    if name in ('max', 'exp_', 'gather', 'scatter_add_', 'masked_fill', 'log', '_log_softmax', 'sum_to_size'):
        return 'loss'
    if name in ADDITIONS:
        return 'elementwise'
    if name in NORMS:
        return 'norms'
    if name in COPIES:
        return 'copies and allocations'
    return 'other'


def profile_step(step: Callable[[], Any], repeats: int = 3) -> dict[str, Any]:
    """Milliseconds of a step by kind of work (own time of each operator), and the operators that take most.

    `python and waiting` is what no operator accounts for: Python, and with several ranks the wait for the others, in as far
    as it lies outside a collective.
    """
    step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(repeats):
            with torch.profiler.record_function('whole step'):
                step()
    categories: dict[str, float] = defaultdict(float)
    operators: dict[str, float] = defaultdict(float)
    whole = 0.
    for event in profiler.events():
        if event.name == 'whole step':
            whole += event.cpu_time_total
            continue
        if not event.name.startswith('aten::') and event.thread != profiler.events()[0].thread:
            continue
        categories[_category(event)] += event.self_cpu_time_total
        operators[f'{event.name} {[s for s in event.input_shapes if s][:3]}'] += event.self_cpu_time_total
    unit = 1e3 * repeats
    largest = sorted(operators.items(), key=lambda item: -item[1])[:25]
    return {
        'whole_ms': round(whole / unit, 1),
        'by_kind_ms': {kind: round(value / unit, 1) for kind, value in sorted(categories.items(), key=lambda item: -item[1])},
        'largest_operators_ms': {name: round(value / unit, 1) for name, value in largest},
    }
