"""From a config and a checkpoint directory to this rank's part of the model: meta device, partition, load slices.

No process ever holds the whole model; modules are built without memory, cut, and filled slice by slice.
"""
import dataclasses
import math
from typing import Optional

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..mesh import ParallelMesh
from ..pipeline_parallel.split import StageSplit, split_layers
from ..pipeline_parallel.stage import AbsentModule, check_passes_hidden_states, final_norm_name
from ..quantization.base import QuantizationConfig, QuantizedWeight
from ..sharding import RECORDS, record_parameters, spec_of
from .language_modeling import check_head
from .loading import load_slices
from .partition import partition_model
from .plan import REMEDY, PlanError, published_plan


def build_model(config: PretrainedConfig, mesh: ParallelMesh, *, directory: Optional[str] = None,
                dtype: Optional[torch.dtype] = None, device: Optional[torch.device] = None, trust_remote_code: bool = False,
                chunks: int = 1, layers_by_hand: Optional[str] = None,
                quantization: Optional[QuantizationConfig] = None) -> PreTrainedModel:
    """This rank's part of a causal LM, in evaluation mode, with its `stage_split` as an attribute.

    Modules of other pipeline stages are still there, on the meta device and without memory, so that adapters are put on
    the whole model and draw its random numbers; `keep_own_stages` then takes them away.

    Args:
        config: The model's configuration, of the whole model.
        mesh: The process grid.
        directory: Checkpoint with safetensors; None leaves all parameters on the meta device.
        dtype: Of the parameters; the config's if None.
        device: Where the parameters go; the CPU if None.
        trust_remote_code: Passed on to transformers.
        chunks: Model chunks per pipeline rank (v).
        layers_by_hand: Layers per stage, as in '9,9,8,6'; balanced by cost if None.
        quantization: How the linears of the decoder's layers are stored; each is quantised as soon as it is read. The head
            and the embedding stay as they are, as in transformers.

    Raises:
        PlanError, StageError: if the model cannot be cut.
        ValueError: if the checkpoint does not hold the model.
    """
    device = device or torch.device('cpu')
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype, trust_remote_code=trust_remote_code)
    model.stage_split = _split(model, mesh, chunks, layers_by_hand)
    partition_model(model, mesh, 1 if quantization is None else quantization.block_size)
    check_head(model)
    aliases = untie_stages(model, mesh)
    if directory is not None:
        model.unused_checkpoint_names = load_slices(
            model, directory, device, skip=foreign_prefixes(model, mesh), aliases=aliases,
            quantization=quantization)
        fill_buffers(model, device)
        if mesh.pipeline_parallel_size > 1:
            check_passes_hidden_states(model, model.stage_split)
    return model.eval()


def _split(model: PreTrainedModel, mesh: ParallelMesh, chunks: int, by_hand: Optional[str]) -> StageSplit:
    """Layers per stage. The cost of a layer, and of the head, is the size of its matrices: what a token is multiplied with."""
    layers = getattr(getattr(model, model.base_model_prefix, None), 'layers', None)
    if layers is None:
        published_plan(model)  # the reason, where it knows one
        raise PlanError(f'the decoder of {type(model).__name__} is not one list of layers, so it cannot be split: {REMEDY}')
    if mesh.pipeline_parallel_size > 1:
        final_norm_name(model)
    return split_layers(
        [matrix_elements(layer) for layer in layers],
        num_ranks=mesh.pipeline_parallel_size,
        chunks=chunks,
        head_cost=matrix_elements(model.get_output_embeddings()),
        by_hand=by_hand)


def matrix_elements(module: nn.Module) -> int:
    """Elements of all matrices below a module."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1) + sum(
        weight.spec.num_local for weight in quantized_weights(module).values())


def _module_name(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, other in model.named_modules() if other is module)


def foreign_prefixes(model: PreTrainedModel, mesh: ParallelMesh) -> tuple[str, ...]:
    """Name prefixes of the parameters that lie on other pipeline stages."""
    split, rank = model.stage_split, mesh.pipeline_rank
    base = model.base_model_prefix
    own = set(split.layers_of(rank))
    prefixes = [f'{base}.layers.{i}.' for i in range(split.num_layers) if i not in own]
    if not split.has_embedding(rank):
        prefixes.append(_module_name(model, model.get_input_embeddings()) + '.')
    if not split.has_head(rank):
        prefixes += [f'{base}.{final_norm_name(model)}.', _module_name(model, model.get_output_embeddings()) + '.']
    return tuple(prefixes)


def untie_stages(model: PreTrainedModel, mesh: ParallelMesh) -> dict[str, str]:
    """Gives embedding and head on different stages a parameter each, marked as one that is held twice.

    Returns:
        The name under which a checkpoint has the head's weight, if it is tied: {head's name: embedding's name}.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight or mesh.pipeline_parallel_size == 1:
        return {}
    head.weight = nn.Parameter(torch.empty_like(embedding.weight))
    for module, tie in ((embedding, 'source'), (head, 'copy')):
        records = getattr(module, RECORDS)
        records['weight'] = dataclasses.replace(records['weight'], tie=tie)
    record_parameters(model, rank=mesh.tensor_rank, size=mesh.tensor_parallel_size)
    model.tied_checkpoint_names = {f'{_module_name(model, head)}.weight': f'{_module_name(model, embedding)}.weight'}
    return model.tied_checkpoint_names


def tied_aliases(model: PreTrainedModel) -> dict[str, str]:
    """What `untie_stages` returned for this model."""
    return getattr(model, 'tied_checkpoint_names', {})


def keep_own_stages(model: nn.Module, mesh: ParallelMesh) -> None:
    """Takes the modules of other pipeline stages, and adapters on them, out of the model (a causal LM or PEFT's wrapper)."""
    if mesh.pipeline_parallel_size == 1:
        return
    lm = model.get_base_model() if isinstance(model, PeftModel) else model
    decoder, split, rank = getattr(lm, lm.base_model_prefix), lm.stage_split, mesh.pipeline_rank
    own = set(split.layers_of(rank))
    for i in range(split.num_layers):
        if i not in own:
            del decoder.layers._modules[str(i)]
    if not split.has_embedding(rank):
        _set_child(decoder, _child_name(decoder, lm.get_input_embeddings()), AbsentModule())
    if not split.has_head(rank):
        _set_child(decoder, final_norm_name(lm), AbsentModule())
        _set_child(lm, _child_name(lm, lm.get_output_embeddings()), AbsentModule())


def _child_name(parent: nn.Module, child: nn.Module) -> str:
    return next(name for name, module in parent.named_children() if module is child)


def _set_child(parent: nn.Module, name: str, child: nn.Module) -> None:
    parent._modules[name] = child


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Computes the buffers that no checkpoint holds (rotary frequencies), by the architecture's own initialisation.

    transformers loads models from the meta device itself and recomputes such buffers in `_init_weights`; what is loaded is
    flagged, so that only they change.

    Raises:
        ValueError: if the architecture leaves one without a value.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor._is_hf_initialized = True
    for module in model.modules():
        stale = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in stale.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
            if buffer.is_floating_point():
                module._buffers[name].fill_(math.nan)
        if stale:
            model._init_weights(module)
        unset = [name for name in stale if module._buffers[name].isnan().any()]
        if unset:
            raise ValueError(f"buffer '{unset[0]}' of {type(module).__name__} is not in the checkpoint, and the architecture does "
                             'not compute it: it is not a complete checkpoint of this architecture')
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


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
    """Paths of quantised weights whose blocks do not lie as in the whole matrix: their values differ from single-card QLoRA's."""
    return [name for name, weight in quantized_weights(model).items() if not weight.is_that_of_one_card]
