"""What an adapter's file holds, and which tensor of a rank each of its entries is.

Which tensors belong to an adapter is PEFT's rule (factors, `modules_to_save`, biases, the base weight of an adapted
embedding or head), asked on the modules that a rank has; nothing here repeats it.
"""
import os
import torch
import warnings
from itertools import chain
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, get_peft_model_state_dict, load_peft_weights
from safetensors import safe_open
from typing import Iterable

from ..config import ConfigError
from ..sharding import SPEC, ShardSpec


def saved_tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    """Name in the adapter's file -> this rank's parameter or buffer (its slice), for the modules that the rank has."""
    persistent = model.state_dict().keys()
    own = {
        name: tensor
        for name, tensor in chain(
            model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        if name in persistent
    }
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='Setting `save_embedding_layers`.*')
        return get_peft_model_state_dict(model, state_dict=own)


def record_of(tensor: torch.Tensor) -> ShardSpec:
    """How a saved tensor is cut; buffers are whole on every rank."""
    return getattr(tensor, SPEC, None) or ShardSpec(global_shape=tuple(tensor.shape))


def check_complete(names: Iterable[str], found: Iterable[str], directory: str) -> None:
    """Compares what a model's adapters need with what a file has.

    The base weight that PEFT puts beside the adapters of an embedding or head may be missing: the model has it.

    Raises:
        ConfigError: if something is missing, naming the first few.
    """
    present = set(found)
    missing = [name for name in names if name not in present and not name.endswith('.base_layer.weight')]
    if missing:
        raise ConfigError([
            f"'{directory}' lacks {len(missing)} of the adapter's tensors, such as {', '.join(missing[:3])}: it is not "
            'a complete adapter of this configuration; give another checkpoint folder'
        ])


def _adapter_file(directory: str) -> str:
    """The file with an adapter's tensors.

    Raises:
        ConfigError: if the directory has none (PEFT would look for a repository of that name).
    """
    for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME):
        if os.path.isfile(os.path.join(directory, name)):
            return os.path.join(directory, name)
    raise ConfigError([
        f"'{directory}' holds no {SAFETENSORS_WEIGHTS_NAME}: it is not a complete adapter; give another checkpoint "
        'folder, or copy the file to this node'
    ])


def tensor_names(directory: str) -> list[str]:
    """Names of the tensors of an adapter.

    Raises:
        ConfigError: if there is none.
    """
    file = _adapter_file(directory)
    if not file.endswith('.safetensors'):
        return list(load_peft_weights(directory, device='cpu'))
    with safe_open(file, framework='pt') as tensors:
        return list(tensors.keys())


def load_tensors(model: PeftModel, directory: str) -> None:
    """Overwrites a model's adapters by those in a directory, each rank its slices of the modules that it has.

    Raises:
        ConfigError: if the directory has no adapter, or lacks one of the tensors, or has one of another shape.
    """
    _adapter_file(directory)
    weights, own = load_peft_weights(directory, device='cpu'), saved_tensors(model)
    check_complete(own, weights, directory)
    for name, tensor in own.items():
        if name not in weights:
            continue
        spec = record_of(tensor)
        if tuple(weights[name].shape) != spec.global_shape:
            raise ConfigError([
                f"'{name}' has shape {tuple(weights[name].shape)} in '{directory}', but the model's adapter makes it "
                f'{spec.global_shape}: it belongs to another model or configuration'
            ])
        tensor.data.copy_(spec.slice(weights[name]))
