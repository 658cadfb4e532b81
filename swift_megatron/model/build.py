"""From a config and a checkpoint directory to this rank's part of the model: meta device, partition, load slices.

No process ever holds the whole model; modules are built without memory, cut, and filled slice by slice.
"""
import math
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from typing import Optional

from ..mesh import ParallelMesh
from ..quantization.base import QuantizationConfig
from .decoder import check_passes_hidden_states
from .language_modeling import check_head
from .loading import load_slices
from .partition import partition_model
from .stages import foreign_prefixes, split_model, untie_stages


def build_model(config: PretrainedConfig,
                mesh: ParallelMesh,
                *,
                directory: Optional[str] = None,
                dtype: Optional[torch.dtype] = None,
                device: Optional[torch.device] = None,
                trust_remote_code: bool = False,
                chunks: int = 1,
                layers_by_hand: Optional[str] = None,
                quantization: Optional[QuantizationConfig] = None) -> PreTrainedModel:
    """This rank's part of a causal LM, in evaluation mode, with its `stage_split` and `hidden_dtype` as attributes.

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
        quantization: How the linears of the decoder's layers are stored; each is quantised as soon as it is read. The
            head and the embedding stay as they are, as in transformers.

    Raises:
        PlanError, StageError: if the model cannot be cut.
        ValueError: if the checkpoint does not hold the model.
    """
    device, dtype = device or torch.device('cpu'), dtype or config.dtype
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.hidden_dtype = model.get_input_embeddings().weight.dtype  # of which hidden states are made
    model.stage_split = split_model(model, mesh, chunks, layers_by_hand)
    partition_model(model, mesh, 1 if quantization is None else quantization.block_size)
    check_head(model)
    aliases = untie_stages(model, mesh)
    if directory is not None:
        model.unused_checkpoint_names = load_slices(
            model, directory, device, skip=foreign_prefixes(model, mesh), aliases=aliases, quantization=quantization)
        fill_buffers(model, device)
        if mesh.pipeline_parallel_size > 1:
            check_passes_hidden_states(model, model.stage_split)
    return model.eval()


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Computes the buffers that no checkpoint holds (rotary frequencies), by the architecture's own initialisation.

    transformers loads models from the meta device itself and recomputes such buffers in `_init_weights`; what is loaded
    is flagged, so that only they change.

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
            raise ValueError(
                f"buffer '{unset[0]}' of {type(module).__name__} is not in the checkpoint, and the architecture does "
                'not compute it: it is not a complete checkpoint of this architecture')
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
