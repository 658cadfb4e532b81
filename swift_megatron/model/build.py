"""From a config and a checkpoint directory to this rank's part of the model: meta device, partition, load slices.

No process ever holds the whole model; modules are built without memory, cut, and filled slice by slice.
"""
from typing import Optional

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..mesh import ParallelMesh
from .loading import load_slices
from .partition import partition_model


def build_model(config: PretrainedConfig, mesh: ParallelMesh, *, directory: Optional[str] = None,
                dtype: Optional[torch.dtype] = None, device: Optional[torch.device] = None,
                trust_remote_code: bool = False) -> PreTrainedModel:
    """This rank's part of a causal LM, in evaluation mode.

    Args:
        config: The model's configuration, of the whole model.
        mesh: The process grid.
        directory: Checkpoint with safetensors; None leaves the parameters on the meta device.
        dtype: Of the parameters; the config's if None.
        device: Where the parameters go; the CPU if None.
        trust_remote_code: Passed on to transformers.

    Raises:
        PlanError: if the model cannot be cut.
        ValueError: if the checkpoint does not hold the model.
    """
    device = device or torch.device('cpu')
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype, trust_remote_code=trust_remote_code)
    partition_model(model, mesh)
    if directory is None:
        return model.eval()
    unused = load_slices(model, directory, device)
    fill_buffers(model, device)
    model.unused_checkpoint_names = unused
    return model.eval()


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Computes the buffers that no checkpoint holds (rotary frequencies), by the architecture's own initialisation.

    transformers loads models from the meta device itself and recomputes such buffers in `_init_weights`; parameters are
    flagged as loaded, so that only the buffers change.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor._is_hf_initialized = True
    for module in model.modules():
        stale = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in stale.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
        if stale:
            model._init_weights(module)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameters on this rank, tied ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
