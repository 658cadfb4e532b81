"""Merging a LoRA adapter into a Hugging Face checkpoint, tensor by tensor: W + s B A, without loading the model.

The base is the 16-bit checkpoint, or what a 4-bit base stands for (the weights that the adapter was trained on). One
file of the checkpoint is held at a time. The folder that comes out loads in transformers and vLLM, and computes what
the base with the adapter computes: where only one end of a tied model was trained, its head is a tensor of its own.
"""
import json
import os
import re
import shutil
import torch
from dataclasses import dataclass, field
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from typing import Any, Literal, Optional

from ..errors import MergeError
from ..mesh import ParallelMesh
from ..model.loading import CheckpointReader, find_sources, quantised_weights
from ..quantization.base import QuantizationConfig, quantize
from .atomic import AtomicFolder, settle, sync
from .changes import Change, Ends, read_changes

MERGE_FILE = 'merged_adapter.json'  # notes in the result what was merged; its presence refuses a second time
# Weights in any form, which would be the base's, and hidden files.
NOT_COPIED = re.compile(r'.*\.(safetensors|bin|gguf|pth?|h5|msgpack|onnx|onnx_data|ot|tflite|npz)(\.index\.json)?|\..*')


@dataclass(kw_only=True)
class _Base:
    """The checkpoint that is merged into, and what of its model matters here."""
    reader: CheckpointReader
    ends: Ends
    quantised: frozenset[str]  # parameters that a quantised base stores in its format
    parameters: dict[str, list[str]]  # tensor of the checkpoint -> parameters that are made from it
    model: PreTrainedModel  # on the meta device

    @property
    def two_ends(self) -> bool:
        """Whether the config ties embedding and head, but the files hold both."""
        return self.ends.tied and sum(len(names) for names in self.parameters.values()) == len(self.parameters)


@dataclass(kw_only=True)
class _Written:
    """What differs from the base beside the values."""
    untied: bool = False
    added: dict[str, str] = field(default_factory=dict)  # tensor -> its file
    added_bytes: int = 0


def _open_base(directory: str) -> _Base:
    reader = CheckpointReader(directory)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
        with torch.device('meta'):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    except (OSError, ValueError) as error:
        raise MergeError(f"'{directory}' has no config.json of a causal LM that transformers knows "
                         f'({str(error).splitlines()[0]}): give the folder of the base with --model') from error
    ends = Ends.of(model)
    sources = find_sources(model, reader)
    if ends.tied:
        for name, other in ((ends.head, ends.embedding), (ends.embedding, ends.head)):
            sources[name] = sources[name] or sources[other]
    parameters: dict[str, list[str]] = {}
    for name, source in sources.items():
        if source is not None:
            parameters.setdefault(source, []).append(name)
    return _Base(reader=reader, ends=ends, quantised=quantised_weights(model), parameters=parameters, model=model)


def merge_adapter(model_dir: str,
                  adapter_dir: str,
                  output_dir: str,
                  *,
                  into: Literal['checkpoint', 'dequantized'] = 'checkpoint',
                  quantization: Optional[QuantizationConfig] = None,
                  dtype: torch.dtype = torch.float32) -> None:
    """Writes a checkpoint with the adapter merged in.

    Args:
        model_dir: The base, with safetensors.
        adapter_dir: A PEFT LoRA adapter.
        output_dir: Must not exist yet, or be empty. It gets its name when it is complete and on the disk.
        into: 'checkpoint' adds to the base as it is stored; 'dequantized' to what its 4-bit form stands for.
        quantization: The 4-bit form; needed for 'dequantized'.
        dtype: From which the base was quantised: that of the weights in the adapter's run.

    Raises:
        ConfigError: if the adapter is merged already, incomplete or does not fit the base, if the base is not complete,
            or the folder is in use.
    """
    _refuse_twice(model_dir, adapter_dir, output_dir)
    base = _open_base(model_dir)
    changes = read_changes(adapter_dir, base.model, base.ends)
    form = quantization if into == 'dequantized' else None
    settle(output_dir)
    folder = AtomicFolder(output_dir)
    staging = folder.staging
    if not folder.begin():
        raise MergeError(f"'{output_dir}' is being written by another process: wait, or give another --output_dir")
    try:
        # An embedding and a head that both stand in the files are the same tensor only as long as neither is changed.
        written = _Written(
            untied=base.two_ends and not changes.keys().isdisjoint((base.ends.embedding, base.ends.head)))
        for file in base.reader.files():
            tensors = _merged_file(file, base, changes, form, dtype, written)
            save_file(tensors, os.path.join(staging, file), metadata={'format': 'pt'})
        _copy_the_rest(base.reader, staging, written)
        with open(os.path.join(staging, MERGE_FILE), 'w', encoding='utf-8') as note:
            json.dump({'base': model_dir, 'adapter': adapter_dir, 'merged_into': into}, note, indent=2)
        sync(staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    folder.publish()


def _merged_file(file: str, base: _Base, changes: dict[str, Change], form: Optional[QuantizationConfig],
                 dtype: torch.dtype, written: _Written) -> dict[str, torch.Tensor]:
    """The tensors of one file of the checkpoint, changed. An end that was tied and differs now is one more of them."""
    tensors = {}
    with base.reader.open(file) as source:
        for name in source.keys():
            stored = source.get_tensor(name)
            first, *others = base.parameters.get(name, [name])
            if form is not None and first in base.quantised:
                stored = _dequantised(stored, form, dtype)
            tensors[name] = changes.get(first, Change()).applied(stored)
            for other in others:
                tensor = changes.get(other, Change()).applied(stored)
                if not torch.equal(tensor, tensors[name]):
                    tensors[other] = tensor
                    written.untied = True
                    written.added[other] = file
                    written.added_bytes += tensor.numel() * tensor.element_size()
    return tensors


def _dequantised(weight: torch.Tensor, form: QuantizationConfig, dtype: torch.dtype) -> torch.Tensor:
    """What the quantised form of a weight stands for, in the checkpoint's dtype."""
    alone = ParallelMesh()
    return quantize(weight.to(dtype), alone.spec(weight.shape), form, alone).dequantized().to(weight.dtype)


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


def _copy_the_rest(reader: CheckpointReader, staging: str, written: _Written) -> None:
    """Config, tokenizer and index; a head that is a tensor of its own is no longer tied."""
    for name in os.listdir(reader.directory):
        path = os.path.join(reader.directory, name)
        if os.path.isfile(path) and not NOT_COPIED.fullmatch(name):
            shutil.copy(path, os.path.join(staging, name))
    if written.untied:
        path = os.path.join(staging, 'config.json')
        with open(path, encoding='utf-8') as file:
            config = json.load(file)
        _write_json({**config, 'tie_word_embeddings': False}, path)
    if reader.index is not None:
        index = {**reader.index, 'weight_map': {**reader.index['weight_map'], **written.added}}
        if 'total_size' in index.get('metadata', {}):
            size = index['metadata']['total_size'] + written.added_bytes
            index['metadata'] = {**index['metadata'], 'total_size': size}
        _write_json(index, os.path.join(staging, SAFE_WEIGHTS_INDEX_NAME))


def _write_json(content: dict[str, Any], path: str) -> None:
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(content, file, indent=2)
