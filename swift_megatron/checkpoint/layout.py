"""Which processes wrote a checkpoint: optimizer states lie in it as the ranks held them, one file for each.

Needs no torch; what arguments alone decide is checked before the model's config is read, the layers of each stage when
it is known, and both before weights are read.
"""
import json
import os
from typing import Any, Optional

from ..pipeline_parallel.split import StageSplit
from .atomic import STATE_FILE, replaced_folder

LAYOUT_FILE = 'parallel_layout.json'
SIZES = ('tensor_parallel_size', 'pipeline_parallel_size', 'virtual_pipeline_size')
LAYERS = 'pipeline_layers'
ONLY_MODEL = '--resume_only_model true continues from its weights with new optimizer states'


def write_layout(directory: str, tensor_parallel_size: int, split: StageSplit) -> None:
    """Notes beside the optimizer states how the run was cut."""
    sizes = (tensor_parallel_size, split.num_ranks, split.num_stages // split.num_ranks)
    with open(os.path.join(directory, LAYOUT_FILE), 'w', encoding='utf-8') as file:
        json.dump({**dict(zip(SIZES, sizes)), LAYERS: _counts(split)}, file)


def layout_fault(directory: str, sizes: Any) -> list[str]:
    """Why a run with these arguments cannot resume from the directory, one sentence; empty if it can.

    Args:
        directory: What --resume_from_checkpoint names.
        sizes: Has the fields of SIZES, and `pipeline_layers` as in '9,9,8,6' or None for balanced stages.
    """
    path = os.path.expanduser(directory)
    if not os.path.isdir(path):
        aside = replaced_folder(path)
        if os.path.isdir(aside):
            return [
                f"--resume_from_checkpoint '{directory}' is no directory: a run was stopped while it replaced it; "
                f"rename '{aside}' to it"
            ]
        return [f"--resume_from_checkpoint '{directory}' is no directory: give a checkpoint-N folder"]
    if not os.path.isfile(os.path.join(path, LAYOUT_FILE)):
        return [
            f"'{directory}' holds no optimizer states of swift-megatron (no {LAYOUT_FILE}: written by another program, "
            f'or with --save_only_model true), so they cannot be resumed: {ONLY_MODEL}'
        ]
    if not os.path.isfile(os.path.join(path, STATE_FILE)):
        return [f"'{directory}' holds no {STATE_FILE}, so its step is not known: {ONLY_MODEL}"]
    written = _read(path)
    if written is None:
        return [f"{LAYOUT_FILE} in '{directory}' is damaged, so its optimizer states cannot be resumed: {ONLY_MODEL}"]
    given = {name: getattr(sizes, name) for name in SIZES}
    if any(written[name] != given[name] for name in SIZES):
        return [_differs(directory, _flags({name: written[name] for name in SIZES}), _flags(given))]
    if sizes.pipeline_layers is None:
        return []
    layers = [int(word) for word in sizes.pipeline_layers.split(',')]
    if written[LAYERS] is None:  # not noted: balanced stages, which need not be these
        return [_differs(directory, f'balanced stages (no --{LAYERS})', _flags({LAYERS: layers}))]
    return _layers_fault(directory, written[LAYERS], layers)


def split_fault(directory: str, split: StageSplit) -> list[str]:
    """Why a run with these stages cannot resume from the directory, whose sizes are the run's; empty if it can."""
    written = _read(os.path.expanduser(directory))
    if written is None or written[LAYERS] is None:
        return []
    return _layers_fault(directory, written[LAYERS], _counts(split))


def _layers_fault(directory: str, written: list[int], given: list[int]) -> list[str]:
    return [] if written == given else [_differs(directory, _flags({LAYERS: written}), _flags({LAYERS: given}))]


def _counts(split: StageSplit) -> list[int]:
    return [len(split.layers(stage)) for stage in range(split.num_stages)]


def _read(directory: str) -> Optional[dict[str, Any]]:
    """The note, with the defaults for what older ones lack; None if it is damaged."""
    try:
        with open(os.path.join(directory, LAYOUT_FILE), encoding='utf-8') as file:
            written = {'virtual_pipeline_size': 1, LAYERS: None, **json.load(file)}
    except (ValueError, TypeError):
        return None
    return written if all(name in written for name in SIZES) else None


def _flags(values: dict[str, Any]) -> str:
    words = {name: ','.join(map(str, value)) if isinstance(value, list) else value for name, value in values.items()}
    return ' '.join(f'--{name} {word}' for name, word in words.items())


def _differs(directory: str, written: str, given: str) -> str:
    return (f"'{directory}' was written with {written}, and this run has {given}: its optimizer states belong to other "
            f'slices; resume with what it was written with, or {ONLY_MODEL}')


def optimizer_file(tensor_rank: int, pipeline_rank: int) -> str:
    """Name of the file with the optimizer states of one model-parallel rank."""
    return f'optimizer_t{tensor_rank}_p{pipeline_rank}.pt'
