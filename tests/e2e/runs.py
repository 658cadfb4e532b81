"""Command lines of the end-to-end tests, and comparisons of what two trainings left behind."""
import json
import math
import os
import re
from typing import Any, Iterator

RELATIVE = 1e-4  # of logged values: 20 steps of float32 rounding, through Adam

# Keys of a log that tell how fast the machine was. Their counts are compared by `_samples`.
SPEED = re.compile(r'.*runtime|.*_per_second|elapsed_time|remaining_time|train_speed.*|memory.*')
# Facts of a run that name its folders or its processes.
OWN = {'last_model_checkpoint', 'best_model_checkpoint', 'model_parameter_info'}

COMMON: dict[str, Any] = {
    'model_type': 'llama',
    'template': 'chatml',
    'check_model': False,
    'torch_dtype': 'float32',
    'fp16': False,
    'bf16': False,
    'dataloader_num_workers': 0,
    'split_dataset_ratio': 0,
    'add_version': False,
    'report_to': 'none',
    'max_length': 256,
    'learning_rate': 1e-3,
    'logging_steps': 1,
    'save_strategy': 'no',
    'per_device_train_batch_size': 2,
    'per_device_eval_batch_size': 2,
    'gradient_accumulation_steps': 2,
    'lora_dropout': 0.05,
}


def flags(**changes: Any) -> list[str]:
    """The common flags with changes; None leaves a flag out."""
    argv = []
    for name, value in {**COMMON, **changes}.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            argv += [f'--{name}', *(str(v).lower() if isinstance(v, bool) else str(v) for v in values)]
    return argv


def log_lines(output_dir: str) -> list[dict[str, Any]]:
    """logging.jsonl: a line for each log, and a last one about the whole run."""
    with open(os.path.join(output_dir, 'logging.jsonl'), encoding='utf-8') as file:
        return [json.loads(line) for line in file]


def logged(output_dir: str, name: str) -> list[float]:
    """All values of one name in a log, in order."""
    return [line[name] for line in log_lines(output_dir) if name in line]


def _samples(log: dict[str, Any], prefix: str) -> int:
    """How many samples a log's speed counts, out of rounded numbers."""
    return round(log[f'{prefix}_samples_per_second'] * log[f'{prefix}_runtime'])


def differences(ours: Any,
                expected: Any,
                path: str = '',
                relative: float = RELATIVE,
                ignore: tuple = ()) -> Iterator[str]:
    """Where two logs differ: keys, numbers by more than rounding, everything else at all."""
    if isinstance(expected, dict) and isinstance(ours, dict):
        if set(ours) != set(expected):
            yield f'{path}: keys {sorted(set(ours) ^ set(expected))}'
        for key in sorted(set(ours) & set(expected)):
            if not SPEED.fullmatch(key) and key not in OWN and key not in ignore:
                yield from differences(ours[key], expected[key], f'{path}.{key}', relative, ignore)
        for prefix in ('train', 'eval'):
            if f'{prefix}_runtime' in expected and f'{prefix}_runtime' in ours \
                    and _samples(ours, prefix) != _samples(expected, prefix):
                yield f'{path}: {_samples(ours, prefix)} {prefix} samples instead of {_samples(expected, prefix)}'
    elif isinstance(expected, list) and isinstance(ours, list) and len(ours) == len(expected):
        for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
            yield from differences(a, b, f'{path}[{i}]', relative, ignore)
    elif isinstance(expected, float) and isinstance(ours, float):
        if not math.isclose(ours, expected, rel_tol=relative, abs_tol=0 if abs(expected) > 1e-30 else 1e-30):
            yield f'{path}: {ours} instead of {expected}'
    elif ours != expected:
        yield f'{path}: {ours!r} instead of {expected!r}'


def log_differences(ours: str, expected: str, *, relative: float = RELATIVE, ignore: tuple = ()) -> list[str]:
    """Where the logs in two output folders differ."""
    return list(differences(log_lines(ours), log_lines(expected), 'line', relative, ignore))


def assert_same_logs(ours: str, expected: str, *, relative: float = RELATIVE, ignore: tuple = ()) -> None:
    """Raises AssertionError with all differences."""
    found = log_differences(ours, expected, relative=relative, ignore=ignore)
    assert not found, '\n'.join(found)


def folder_tree(directory: str) -> set[str]:
    """Files and folders, without those whose name holds a time, states of the ranks, and this package's own."""
    found = {
        os.path.relpath(os.path.join(root, name), directory)
        for root, folders, files in os.walk(directory)
        for name in [*folders, *files]
    }
    own = ('optimizer', 'rng_state', 'parallel_layout', 'events.')
    return {path for path in found if not os.path.basename(path).startswith(own)}
