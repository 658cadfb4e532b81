"""Reading this rank's slices from safetensors, one tensor at a time.

A file is opened anew for each tensor: safetensors maps files into memory, and the pages that a slice touched would
otherwise stay counted as this process' memory until the end.
"""
import json
import os
import torch
from contextlib import contextmanager
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from typing import Any, Iterator, Optional

from ..errors import ConfigError
from ..quantization.base import QuantizationConfig
from ..sharding import ShardSpec, spec_of

AGAIN = 'download or copy the folder again'


def _read_index(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding='utf-8') as file:
            index = json.load(file)
        if not isinstance(index['weight_map'], dict):
            raise TypeError('weight_map is no mapping')
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"'{path}' cannot be read ({error!r}): {AGAIN}"]) from error
    return index


class CheckpointReader:
    """Tensors of a Hugging Face checkpoint directory by name, whole or in slices.

    As in transformers, one file goes before an index, and files that the index does not name are not read.

    Raises:
        ConfigError: if the directory holds no safetensors weights, lacks a file of its index, or has a broken one.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        index = os.path.join(directory, SAFE_WEIGHTS_INDEX_NAME)
        self.index: Optional[dict[str, Any]] = None
        if os.path.isfile(os.path.join(directory, SAFE_WEIGHTS_NAME)):
            with self.open(SAFE_WEIGHTS_NAME) as file:
                self.file_of: dict[str, str] = dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
        elif os.path.isfile(index):
            self.index = _read_index(index)
            self.file_of = self.index['weight_map']
            lost = [name for name in self.files() if not os.path.isfile(os.path.join(directory, name))]
            if lost:
                raise ConfigError([f"'{directory}' lacks '{lost[0]}', which its index names: {AGAIN}"])
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

    def files(self) -> list[str]:
        """Names of the files that hold the tensors."""
        return sorted(set(self.file_of.values()))

    @contextmanager
    def open(self, name: str) -> Iterator[safe_open]:
        """One of the files.

        Raises:
            ConfigError: if it is cut off, holds something else (a pointer to a large file), or lacks a tensor.
        """
        path = os.path.join(self.directory, name)
        try:
            with safe_open(path, framework='pt') as file:
                yield file
        except SafetensorError as error:
            raise ConfigError([f"'{path}' cannot be read ({error}): {AGAIN}"]) from error

    def read(self, name: str, spec: ShardSpec) -> torch.Tensor:
        """This rank's slice of a tensor, on the CPU, in the file's dtype and in memory of its own.

        Raises:
            ValueError: if the file's tensor has another shape than the model's.
        """
        with self.open(self.file_of[name]) as file:
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


def find_sources(model: nn.Module,
                 reader: CheckpointReader,
                 *,
                 skip: tuple[str, ...] = (),
                 aliases: Optional[dict[str, str]] = None) -> dict[str, Optional[str]]:
    """Parameter -> its name in the checkpoint, tied ones under each of their names; None where it stands under another.

    Args:
        model: The causal LM, whole or partitioned.
        reader: The checkpoint.
        skip: Prefixes of parameters that may be missing.
        aliases: Names under which the checkpoint has a parameter (a tied head).

    Raises:
        ConfigError: if a parameter is missing from the checkpoint, naming the first few.
    """
    prefix = getattr(model, 'base_model_prefix', '')
    every = list(model.named_parameters(remove_duplicate=False))
    sources = {
        name: _checkpoint_name(name, prefix, reader) or _checkpoint_name(
            (aliases or {}).get(name, name), prefix, reader)
        for name, _ in every
    }
    named = [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith(skip)]
    for name, parameter in named:
        if sources[name] is None:  # a tied parameter may stand in the file under its other name
            sources[name] = next((sources[other] for other, p in every if p is parameter and sources[other]), None)
    missing = [name for name, _ in named if sources[name] is None]
    if missing:
        raise ConfigError([
            f"'{reader.directory}' lacks {len(missing)} parameters of the model, such as "
            f"{', '.join(missing[:3])}: it is not a complete checkpoint of this architecture"
        ])
    return sources


def quantised_weights(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that a quantised base stores in its format, as in transformers: the weights of the
    linears in the decoder's layers. Everything else (embedding, head, norms of any shape, biases) stays as it is.

    Args:
        model: The causal LM, whole or partitioned, without adapters; may be on the meta device.
    """
    layers = f'{getattr(model, "base_model_prefix", "")}.layers.'
    return frozenset(f'{path}.weight' for path, module in model.named_modules()
                     if path.startswith(layers) and isinstance(module, nn.Linear))


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
    sources = find_sources(model, reader, skip=skip, aliases=aliases)
    named = [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith(skip)]
    quantised = quantised_weights(model) if quantization is not None else frozenset()
    for name, parameter in named:
        value = reader.read(sources[name], spec_of(parameter))
        if name in quantised:
            linear = model.get_submodule(name.rpartition('.')[0])
            linear.quantize(value.to(device=device, dtype=parameter.dtype), quantization)
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
