"""Reading this rank's slices from safetensors, one tensor at a time.

A file is opened anew for each tensor: safetensors maps files into memory, and the pages that a slice touched would
otherwise stay counted as this process' memory until the end.
"""
import json
import os
import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from typing import Optional

from ..config import ConfigError
from ..quantization.base import QuantizationConfig
from ..sharding import ShardSpec, spec_of
from ..tensor_parallel.linear import PartitionedLinear


class CheckpointReader:
    """Tensors of a Hugging Face checkpoint directory by name, whole or in slices.

    Raises:
        ValueError: if the directory holds no safetensors weights.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        index = os.path.join(directory, SAFE_WEIGHTS_INDEX_NAME)
        single = os.path.join(directory, SAFE_WEIGHTS_NAME)
        if os.path.isfile(index):
            with open(index, encoding='utf-8') as file:
                self.file_of: dict[str, str] = json.load(file)['weight_map']
        elif os.path.isfile(single):
            with safe_open(single, framework='pt') as file:
                self.file_of = dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
        else:
            raise ConfigError([
                f"'{directory}' holds no {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}: weights are read in "
                'slices, which needs safetensors; convert them with '
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
            ])

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def names(self) -> list[str]:
        return list(self.file_of)

    def read(self, name: str, spec: ShardSpec) -> torch.Tensor:
        """This rank's slice of a tensor, on the CPU, in the file's dtype and in memory of its own.

        Raises:
            ValueError: if the file's tensor has another shape than the model's.
        """
        with safe_open(os.path.join(self.directory, self.file_of[name]), framework='pt') as file:
            view = file.get_slice(name)
            if tuple(view.get_shape()) != spec.global_shape:
                raise ConfigError([
                    f"'{name}' has shape {tuple(view.get_shape())} in '{self.directory}', but the model's config "
                    f'makes it {spec.global_shape}: config.json and weights do not belong together'
                ])
            # What safetensors returns are views of the mapped file, of rows that lie apart where the second axis is
            # cut.
            if spec.axis is None:
                return (view[:] if spec.global_shape else file.get_tensor(name)).clone()
            index = (slice(None), ) * spec.axis
            return torch.cat([view[(*index, slice(start, stop))] for start, stop in spec.ranges], dim=spec.axis)


def _checkpoint_name(name: str, prefix: str, reader: CheckpointReader) -> Optional[str]:
    """The checkpoint's name of a parameter; checkpoints of the bare decoder lack its prefix. None if it is not
    there.
    """
    if name in reader:
        return name
    short = name.removeprefix(f'{prefix}.')
    return short if short in reader else None


def load_slices(model: nn.Module,
                directory: str,
                device: torch.device,
                *,
                skip: tuple[str, ...] = (),
                aliases: Optional[dict[str, str]] = None,
                quantization: Optional[QuantizationConfig] = None) -> list[str]:
    """Gives every parameter of a partitioned model its slice from the checkpoint, in the parameter's dtype.

    Args:
        model: Parameters on the meta device are replaced, others are overwritten.
        directory: A Hugging Face checkpoint with safetensors.
        device: Where replaced parameters go.
        skip: Prefixes of parameters that lie on other pipeline stages and are left as they are.
        quantization: How the linears of the decoder's layers are stored; dense if None.
        aliases: Names under which the checkpoint has a parameter (a tied head).

    Returns:
        Names in the checkpoint that no stage of the model has a use for.

    Raises:
        ValueError: if a parameter is missing from the checkpoint, naming the first few.
    """
    reader = CheckpointReader(directory)
    prefix = getattr(model, 'base_model_prefix', '')
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    sources = {}
    for name in names:
        sources[name] = (
            _checkpoint_name(name, prefix, reader) or _checkpoint_name((aliases or {}).get(name, name), prefix, reader))
    named = [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith(skip)]
    for name, parameter in named:
        if sources[name] is None:  # a tied parameter may stand in the file under its other name
            sources[name] = next(
                (sources[other]
                 for other, p in model.named_parameters(remove_duplicate=False) if p is parameter and sources[other]),
                None)
    missing = [name for name, _ in named if sources[name] is None]
    if missing:
        raise ConfigError([
            f"'{directory}' lacks {len(missing)} parameters of the model, such as {', '.join(missing[:3])}: it is "
            'not a complete checkpoint of this architecture'
        ])
    for name, parameter in named:
        value = reader.read(sources[name], spec_of(parameter))
        owner = model.get_submodule(name.rpartition('.')[0])
        in_layers = name.startswith(f'{prefix}.layers.') and isinstance(owner, PartitionedLinear)
        if quantization is not None and in_layers and parameter is owner._parameters.get('weight'):
            owner.quantize(value.to(device=device, dtype=parameter.dtype), quantization)
        elif parameter.is_meta:
            _replace(model, parameter, value.to(device=device, dtype=parameter.dtype))
        else:
            parameter.data.copy_(value)
    used = set(sources.values()) | load_buffers(model, reader, device, skip)
    return sorted(set(reader.names()) - used)


def load_buffers(model: nn.Module, reader: CheckpointReader, device: torch.device, skip: tuple[str, ...]) -> set[str]:
    """Gives buffers that a checkpoint holds (a layer's scale, constants of an activation) their values; their names in
    it.
    """
    found = set()
    for name, buffer in list(model.named_buffers()):
        source = _checkpoint_name(name, getattr(model, 'base_model_prefix', ''), reader)
        if source is None:
            continue
        found.add(source)
        if not name.startswith(skip):
            value = reader.read(source, ShardSpec(global_shape=tuple(buffer.shape))).to(
                device=device, dtype=buffer.dtype)
            path, _, own = name.rpartition('.')
            model.get_submodule(path)._buffers[own] = value
    return found


def _replace(model: nn.Module, parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Puts a parameter with `value` everywhere the (meta) parameter stands, record kept."""
    loaded = nn.Parameter(value, requires_grad=parameter.requires_grad)
    loaded.__dict__.update(parameter.__dict__)
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is parameter:
                module._parameters[name] = loaded
