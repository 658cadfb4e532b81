"""Full-parameter checkpoints as Hugging Face safetensors with an index, streamed: no device ever holds a whole model.

Tensors are gathered to the CPU of process 0 one by one and written in files of at most the given size, so that process
0 needs host memory for one file and one tensor.
"""
import json
import os
import re
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from typing import Iterator

from ..mesh import ParallelMesh
from ..sharding import ShardSpec, spec_of
from .gather import gather_whole, stream_from_stages

UNITS = {'KB': 10**3, 'MB': 10**6, 'GB': 10**9, 'TB': 10**12, 'KIB': 2**10, 'MIB': 2**20, 'GIB': 2**30, 'TIB': 2**40}


def size_in_bytes(text: str | int) -> int:
    """'5GB' -> 5000000000, Hugging Face's way of writing file sizes.

    Raises:
        ValueError: if the text is no number with one of the known units.
    """
    match = re.fullmatch(r'(\d+(?:\.\d+)?)\s*([KMGT]i?B)?', str(text), re.IGNORECASE)
    if match is None:
        raise ValueError(f"max_shard_size '{text}' is no size: write it like 5GB")
    return int(float(match[1]) * UNITS.get((match[2] or '').upper(), 1))


def _bins(tensors: Iterator[tuple[str, torch.Tensor]], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive tensors of at most `limit` bytes together; a larger tensor has a file of its own."""
    current: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if current and size + num_bytes > limit:
            yield current
            current, size = {}, 0
        current[name] = tensor
        size += num_bytes
    if current:
        yield current


def _saved(model: nn.Module, mesh: ParallelMesh) -> Iterator[tuple[str, torch.Tensor, ShardSpec]]:
    """Parameters, tied ones once, and the buffers that belong in a checkpoint, which are whole on every rank."""
    for name, parameter in model.named_parameters():
        if spec_of(parameter).tie != 'copy':
            yield name, parameter, spec_of(parameter)
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer, mesh.spec(buffer.shape)


def save_full_model(model: nn.Module, directory: str, mesh: ParallelMesh, *, max_shard_size: str | int = '5GB') -> None:
    """Writes model.safetensors, or model-0000i-of-0000n.safetensors and an index. Every rank of replica 0 has to call
    it.

    Args:
        model: The partitioned causal LM. Tied parameters are written once.
        directory: Where process 0 writes; it has to exist.
        mesh: The process grid.
        max_shard_size: Largest file, as in '5GB'.
    """
    wholes = stream_from_stages(
        ((name, gather_whole(tensor, spec, mesh)) for name, tensor, spec in _saved(model, mesh)), mesh)
    if mesh.rank != 0:
        for _ in wholes:
            pass
        return
    limit = size_in_bytes(max_shard_size)
    files: list[dict[str, int]] = []
    for number, tensors in enumerate(_bins(wholes, limit)):
        save_file(tensors, os.path.join(directory, f'model-{number + 1:05d}.safetensors'), metadata={'format': 'pt'})
        files.append({name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()})
    if len(files) == 1:
        os.replace(os.path.join(directory, 'model-00001.safetensors'), os.path.join(directory, SAFE_WEIGHTS_NAME))
        return
    weight_map = {}
    for number, sizes in enumerate(files):
        final = f'model-{number + 1:05d}-of-{len(files):05d}.safetensors'
        os.replace(os.path.join(directory, f'model-{number + 1:05d}.safetensors'), os.path.join(directory, final))
        weight_map.update(dict.fromkeys(sizes, final))
    total = sum(sum(sizes.values()) for sizes in files)
    with open(os.path.join(directory, SAFE_WEIGHTS_INDEX_NAME), 'w', encoding='utf-8') as file:
        json.dump({'metadata': {'total_size': total}, 'weight_map': dict(sorted(weight_map.items()))}, file, indent=2)
