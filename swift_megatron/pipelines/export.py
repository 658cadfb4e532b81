"""`export`: merges an adapter into its base, on one process and without building the model."""
import json
import os
import torch
from dataclasses import dataclass, fields
from typing import Any, Optional

from ..checkpoint.merge import merge_adapter
from ..compatibility import several_adapters
from ..errors import ConfigError
from ..quantization.base import QuantizationConfig

TARGETS = ('checkpoint', 'dequantized')


@dataclass
class ExportConfig:
    """What to merge, and where to.

    Args:
        adapters: A checkpoint-N folder of a LoRA run.
        model: The base; what args.json beside the adapter says, if None.
        output_dir: The new folder; '<adapters>-merged' if None, as ms-swift names it.
        merge_lora: Has to be true: merging is all that this command does.
        merge_into: 'checkpoint' (the 16-bit base) or 'dequantized' (what the 4-bit base of the run stands for).
        quant_bits, bnb_4bit_quant_type, bnb_4bit_use_double_quant: The 4-bit form; from args.json if None.
        torch_dtype: From which the base was quantised, that of the run; from args.json if None.
    """
    adapters: Optional[str] = None
    model: Optional[str] = None
    output_dir: Optional[str] = None
    merge_lora: bool = False
    merge_into: str = 'checkpoint'
    quant_bits: Optional[int] = None
    bnb_4bit_quant_type: Optional[str] = None
    bnb_4bit_use_double_quant: Optional[bool] = None
    torch_dtype: Optional[str] = None

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> 'ExportConfig':
        """From flags.

        Raises:
            ConfigError: for flags that do not exist.
        """
        known = {spec.name for spec in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError([
                f"there is no argument '--{unknown[0]}' for export: it takes --{', --'.join(sorted(known))}; "
                'for other formats use swift export'
            ])
        return cls(**values)

    def complete(self) -> None:
        """Fills in what the run's args.json knows, and checks everything.

        Raises:
            ConfigError: with every fault.
        """
        if not self.merge_lora:
            raise ConfigError(
                ['export only merges adapters: add --merge_lora true (for other formats use swift export)'])
        if self.merge_into not in TARGETS:
            raise ConfigError([f'--merge_into {self.merge_into} does not exist: use {" or ".join(TARGETS)}'])
        if several_adapters(self.adapters):
            raise ConfigError([several_adapters(self.adapters)])
        if not isinstance(self.adapters, str) or not os.path.isdir(self.adapters):
            raise ConfigError([f"--adapters '{self.adapters}' is no folder: give a checkpoint-N folder of a LoRA run"])
        run = _read_args(self.adapters)
        for name in ('model', 'quant_bits', 'bnb_4bit_quant_type', 'bnb_4bit_use_double_quant', 'torch_dtype'):
            if getattr(self, name) is None:
                setattr(self, name, run.get(name))
        if not isinstance(self.model, str) or not os.path.isdir(self.model):
            raise ConfigError([f"the base model '{self.model}' is no local folder: give one with --model"])
        if self.merge_into == 'dequantized' and self.quant_bits not in (4, 8):
            raise ConfigError([
                '--merge_into dequantized needs a quantised base, but the run of this adapter had none: leave it out, '
                'or state --quant_bits 4 --bnb_4bit_quant_type nf4'
            ])
        self.output_dir = self.output_dir or f'{self.adapters.rstrip("/")}-merged'


def _read_args(adapters: str) -> dict[str, Any]:
    path = os.path.join(adapters, 'args.json')
    if not os.path.isfile(path):
        return {}
    with open(path, encoding='utf-8') as file:
        return json.load(file)


def _dtype(name: Optional[str]) -> torch.dtype:
    """'bfloat16' or 'torch.bfloat16' -> torch.bfloat16; float32 if there is no name, which rounds no 16-bit weight."""
    dtype = getattr(torch, str(name or 'float32').removeprefix('torch.'), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError([f'--torch_dtype {name} does not exist: use bfloat16, float16 or float32'])
    return dtype


def export_main(config: ExportConfig) -> list[str]:
    """Merges; what to tell the user, line by line.

    Raises:
        ConfigError: if something cannot be merged.
    """
    config.complete()
    quantization = None
    if config.merge_into == 'dequantized':
        double = True if config.bnb_4bit_use_double_quant is None else config.bnb_4bit_use_double_quant
        quantization = QuantizationConfig(
            format='int8' if config.quant_bits == 8 else config.bnb_4bit_quant_type or 'nf4', double=double)
    merge_adapter(
        config.model,
        config.adapters,
        config.output_dir,
        into=config.merge_into,
        quantization=quantization,
        dtype=_dtype(config.torch_dtype))
    lines = [f"merged '{config.adapters}' into '{config.model}': {config.output_dir}"]
    if config.quant_bits and config.merge_into == 'checkpoint':
        lines.append(
            'the adapter was trained on a quantised base and is merged into the 16-bit checkpoint; --merge_into '
            'dequantized merges into the weights that it was trained on')
    return lines
