"""Counts over a rank's part of a model: elements, bytes by format, what differs from one card."""
from torch import nn
from typing import Optional

from ..quantization.base import QuantizedWeight
from ..sharding import spec_of


def matrix_elements(module: nn.Module) -> int:
    """Elements of all matrices below a module."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1) + sum(
        weight.spec.num_local for weight in quantized_weights(module).values())


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """The quantised weights of a model by module path."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}


def owned_elements(model: nn.Module, *, trainable: Optional[bool] = None) -> int:
    """Weight elements that this rank counts, quantised ones included; summed over a replica's ranks: the whole model's.

    Args:
        trainable: Only those that are, or are not, trained.
    """
    dense = [p for p in model.parameters() if trainable is None or p.requires_grad == trainable]
    total = sum(spec_of(parameter).num_owned() for parameter in dense)
    if not trainable:
        total += sum(weight.spec.num_owned() for weight in quantized_weights(model).values())
    return total


def frozen_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of the frozen base on this rank, by format."""
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            name = str(parameter.dtype).removeprefix('torch.')
            sizes[name] = sizes.get(name, 0) + parameter.numel() * parameter.element_size()
    for weight in quantized_weights(model).values():
        sizes[weight.config.format] = sizes.get(weight.config.format, 0) + weight.num_bytes
    return sizes


def unlike_one_card(model: nn.Module) -> list[str]:
    """Paths of quantised weights whose blocks do not lie as in the whole matrix: their values differ from single-card
    QLoRA's.
    """
    return [name for name, weight in quantized_weights(model).items() if not weight.is_that_of_one_card]
