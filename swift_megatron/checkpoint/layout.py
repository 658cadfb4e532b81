"""Which processes wrote a checkpoint: optimizer states lie in it as the ranks held them, one file for each.

Needs no torch; the check runs before weights are read.
"""
import json
import os
from typing import Any

LAYOUT_FILE = 'parallel_layout.json'
FIELDS = ('tensor_parallel_size', 'pipeline_parallel_size')


def write_layout(directory: str, sizes: Any) -> None:
    """Notes the sizes of the run beside its optimizer states."""
    with open(os.path.join(directory, LAYOUT_FILE), 'w', encoding='utf-8') as file:
        json.dump({name: getattr(sizes, name) for name in FIELDS}, file)


def layout_fault(directory: str, sizes: Any, num_processes: int) -> list[str]:
    """Why a run of these sizes cannot resume from the directory; empty if it can."""
    only_model = '--resume_only_model true continues from its weights with new optimizer states'
    path = os.path.join(os.path.expanduser(directory), LAYOUT_FILE)
    if not os.path.isdir(os.path.expanduser(directory)):
        return [f"--resume_from_checkpoint '{directory}' is no directory: give a checkpoint-N folder"]
    if not os.path.isfile(path):
        return [
            f"'{directory}' was not written by swift-megatron (no {LAYOUT_FILE}), so its optimizer states cannot be "
            f'resumed: {only_model}'
        ]
    with open(path, encoding='utf-8') as file:
        written = json.load(file)
    if any(written[name] != getattr(sizes, name) for name in FIELDS):
        flags = ' '.join(f'--{name} {written[name]}' for name in FIELDS)
        return [f"'{directory}' was written with {flags}: resume with these sizes, or {only_model}"]
    return []


def optimizer_file(tensor_rank: int, pipeline_rank: int) -> str:
    """Name of the file with the optimizer states of one model-parallel rank."""
    return f'optimizer_t{tensor_rank}_p{pipeline_rank}.pt'
