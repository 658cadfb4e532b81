"""Merging a LoRA adapter into a Hugging Face checkpoint, tensor by tensor: W + s B A, without building the model.

The base is the 16-bit checkpoint, or what a 4-bit base stands for (the weights that the adapter was trained on). One
file of the checkpoint is held at a time. The folder that comes out loads in transformers and vLLM.

s = alpha / r, or alpha / sqrt(r) with rslora.
"""
import json
import math
import os
import re
import shutil
import torch
from dataclasses import dataclass
from peft import LoraConfig
from peft.utils import load_peft_weights
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from typing import Any, Callable, Literal, Optional

from ..mesh import ParallelMesh
from ..quantization.base import QuantizationConfig, quantize

MERGE_FILE = 'merged_adapter.json'  # notes in the result what was merged; its presence refuses a second time
PREFIX = 'base_model.model.'
NOT_COPIED = re.compile(r'.*\.safetensors(\.index\.json)?$|.*\.bin(\.index\.json)?$|.*\.gguf$|.*\.pth?$|\..*')


class MergeError(ValueError):
    """An adapter that cannot be merged; the message names the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What an adapter changes, by the checkpoint's tensor names."""
    deltas: dict[str, Callable[[], torch.Tensor]]  # name -> s B A, computed when it is needed
    replaced: dict[str, torch.Tensor]  # name -> trained copy of a whole tensor (modules_to_save, biases)


def _scaling(config: LoraConfig, module: str) -> float:
    """s of a module, with PEFT's patterns."""

    def own(patterns: dict[str, Any], default: Any) -> Any:
        return next((value for pattern, value in patterns.items() if re.match(rf'(.*\.)?({pattern})$', module)),
                    default)

    rank, alpha = own(config.rank_pattern, config.r), own(config.alpha_pattern, config.lora_alpha)
    return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


def read_adapter(directory: str) -> Adapter:
    """The changes of a PEFT LoRA directory.

    Raises:
        MergeError: if it is no LoRA adapter that this merge knows.
    """
    if not os.path.isfile(os.path.join(directory, 'adapter_config.json')):
        raise MergeError(f"'{directory}' holds no adapter_config.json: give a checkpoint-N folder of a LoRA run")
    config = LoraConfig.from_pretrained(directory)
    if config.peft_type != 'LORA' or config.use_dora or config.fan_in_fan_out or getattr(config, 'lora_bias', False):
        raise MergeError(f"'{directory}' is no plain LoRA adapter: merge it with swift export --merge_lora true")
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in load_peft_weights(directory, device='cpu').items()}
    deltas: dict[str, Callable[[], torch.Tensor]] = {}
    replaced: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith('.lora_A.weight'):
            module = name.removesuffix('.lora_A.weight')
            deltas[f'{module}.weight'] = _linear_delta(tensor, weights[f'{module}.lora_B.weight'],
                                                       _scaling(config, module))
        elif name.endswith('.lora_embedding_A'):
            module = name.removesuffix('.lora_embedding_A')
            deltas[f'{module}.weight'] = _embedding_delta(tensor, weights[f'{module}.lora_embedding_B'],
                                                          _scaling(config, module))
        elif 'lora_' not in name:
            replaced[name.replace('.base_layer.', '.')] = tensor
    return Adapter(deltas=deltas, replaced=replaced)


def _linear_delta(a: torch.Tensor, b: torch.Tensor, scaling: float) -> Callable[[], torch.Tensor]:
    return lambda: (b.float() @ a.float()) * scaling  # (O, R) (R, I) -> (O, I)


def _embedding_delta(a: torch.Tensor, b: torch.Tensor, scaling: float) -> Callable[[], torch.Tensor]:
    return lambda: (b.float() @ a.float()).T * scaling  # (H, R) (R, V) -> (V, H)


def _is_quantised(name: str) -> bool:
    """Whether a 4-bit base stores this tensor in 4 bits: matrices of the decoder's layers."""
    return '.layers.' in name and name.endswith('.weight')


def _merged(name: str, tensor: torch.Tensor, adapter: Adapter, base: Optional[QuantizationConfig]) -> torch.Tensor:
    alone = ParallelMesh()
    if name in adapter.replaced:
        tensor = adapter.replaced[name].to(tensor.dtype)
    elif base is not None and tensor.ndim == 2 and _is_quantised(name):
        tensor = quantize(tensor.float(), alone.spec(tensor.shape), base, alone).dequantized().to(tensor.dtype)
    delta = adapter.deltas.get(name)
    return tensor if delta is None else (tensor.float() + delta()).to(tensor.dtype)


def _tied_names(model_dir: str, names: set[str]) -> dict[str, str]:
    """Names that a tied checkpoint leaves out -> the name under which the tensor stands."""
    with open(os.path.join(model_dir, 'config.json'), encoding='utf-8') as file:
        tied = json.load(file).get('tie_word_embeddings', False)
    embedding = next((name for name in names if name.endswith('embed_tokens.weight')), None)
    return {'lm_head.weight': embedding} if tied and embedding and 'lm_head.weight' not in names else {}


def merge_adapter(model_dir: str,
                  adapter_dir: str,
                  output_dir: str,
                  *,
                  into: Literal['checkpoint', 'dequantized'] = 'checkpoint',
                  quantization: Optional[QuantizationConfig] = None) -> None:
    """Writes a checkpoint with the adapter merged in.

    Args:
        model_dir: The base, with safetensors.
        adapter_dir: A PEFT LoRA adapter.
        output_dir: Must not exist yet, or be empty. Written under another name and renamed at the end.
        into: 'checkpoint' adds to the base as it is stored; 'dequantized' to what its 4-bit form stands for.
        quantization: The 4-bit form; needed for 'dequantized'.

    Raises:
        MergeError: if the adapter is merged already, does not fit the base, or the folder is in use.
    """
    _refuse_twice(model_dir, adapter_dir, output_dir)
    adapter = read_adapter(adapter_dir)
    files = sorted(name for name in os.listdir(model_dir) if name.endswith('.safetensors'))
    names = {name: file for file in files for name in _names_in(os.path.join(model_dir, file))}
    if not names:
        raise MergeError(f"'{model_dir}' holds no {SAFE_WEIGHTS_NAME}: merging needs safetensors")
    aliases = _tied_names(model_dir, set(names))
    untied = {name: aliases[name] for name in (*adapter.deltas, *adapter.replaced) if name in aliases}
    unknown = [name for name in (*adapter.deltas, *adapter.replaced) if name not in names and name not in untied]
    if unknown:
        raise MergeError(
            f"the adapter changes '{unknown[0]}', which '{model_dir}' does not have: it belongs to another model")
    base = quantization if into == 'dequantized' else None
    staging = f'{output_dir.rstrip("/")}.incomplete'
    shutil.rmtree(staging, ignore_errors=True)
    os.makedirs(staging)
    for file in files:
        with safe_open(os.path.join(model_dir, file), framework='pt') as source:
            tensors = {name: _merged(name, source.get_tensor(name), adapter, base) for name in source.keys()}
            tensors |= {
                name: _merged(name, source.get_tensor(stored), adapter, None)
                for name, stored in untied.items() if names[stored] == file
            }
        save_file(tensors, os.path.join(staging, file), metadata={'format': 'pt'})
    _copy_the_rest(model_dir, staging, untied, names)
    with open(os.path.join(staging, MERGE_FILE), 'w', encoding='utf-8') as note:
        json.dump({'base': model_dir, 'adapter': adapter_dir, 'merged_into': into}, note, indent=2)
    if os.path.isdir(output_dir):
        os.rmdir(output_dir)
    os.replace(staging, output_dir)


def _refuse_twice(model_dir: str, adapter_dir: str, output_dir: str) -> None:
    note = os.path.join(model_dir, MERGE_FILE)
    if os.path.isfile(note):
        with open(note, encoding='utf-8') as file:
            before = json.load(file)
        raise MergeError(
            f"'{model_dir}' has the adapter '{before['adapter']}' merged in already: merge into the original "
            f"checkpoint instead, --model {before['base']}")
    if os.path.isdir(output_dir) and os.listdir(output_dir):
        merged = os.path.isfile(os.path.join(output_dir, MERGE_FILE))
        reason = f"holds '{adapter_dir}' merged already" if merged else 'is not empty'
        raise MergeError(f"'{output_dir}' {reason}: give another --output_dir")


def _names_in(path: str) -> list[str]:
    with safe_open(path, framework='pt') as file:
        return list(file.keys())


def _copy_the_rest(model_dir: str, staging: str, untied: dict[str, str], names: dict[str, str]) -> None:
    """Config, tokenizer and index; a head that the adapter made a tensor of its own is no longer tied."""
    for name in os.listdir(model_dir):
        path = os.path.join(model_dir, name)
        if os.path.isfile(path) and not NOT_COPIED.fullmatch(name):
            shutil.copy(path, os.path.join(staging, name))
    if untied:
        path = os.path.join(staging, 'config.json')
        with open(path, encoding='utf-8') as file:
            config = json.load(file)
        config['tie_word_embeddings'] = False
        with open(path, 'w', encoding='utf-8') as file:
            json.dump(config, file, indent=2)
    index = os.path.join(model_dir, SAFE_WEIGHTS_INDEX_NAME)
    if os.path.isfile(index):
        with open(index, encoding='utf-8') as file:
            content = json.load(file)
        content['weight_map'] |= {name: names[stored] for name, stored in untied.items()}
        with open(os.path.join(staging, SAFE_WEIGHTS_INDEX_NAME), 'w', encoding='utf-8') as file:
            json.dump(content, file, indent=2)
