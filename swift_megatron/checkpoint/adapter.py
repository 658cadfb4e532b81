"""A PEFT adapter directory from the ranks' parts: the files that PEFT writes for the model on one card.

Each pipeline stage contributes what PEFT would write for its own modules. Tensors travel one at a time, whole, to the
host memory of process 0, which holds the adapter once and writes it.
"""
import copy
import os
import torch
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file

from ..lora.state import record_of, saved_tensors
from ..mesh import ParallelMesh
from .gather import gather_whole, stream_from_stages

ADAPTER = 'default'  # PEFT's name of the one adapter; its files lie in the directory itself


def gather_adapter(model: PeftModel, mesh: ParallelMesh) -> dict[str, torch.Tensor]:
    """Name in the file -> whole tensor, of all stages, on process 0; nothing elsewhere. Every rank of replica 0 has to
    call it.
    """
    parts = ((name, gather_whole(tensor, record_of(tensor), mesh)) for name, tensor in saved_tensors(model).items())
    return dict(stream_from_stages(parts, mesh))


def save_adapter(model: PeftModel, directory: str, mesh: ParallelMesh) -> None:
    """Writes adapter_model.safetensors, adapter_config.json and PEFT's model card. Every rank of replica 0 has to call
    it.

    Args:
        model: This rank's part of the model.
        directory: Where process 0 writes; it has to exist.
        mesh: The process grid.
    """
    tensors = gather_adapter(model, mesh)
    if mesh.rank != 0:
        return
    model.create_or_update_model_card(directory)
    save_file(_apart(tensors), os.path.join(directory, SAFETENSORS_WEIGHTS_NAME), metadata={'format': 'pt'})
    lm = model.get_base_model()
    config = copy.copy(model.peft_config[ADAPTER])
    config.inference_mode = True  # as PEFT writes it: who loads the adapter decides anew
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(lm, 'name_or_path', None)
    mapping = None
    if config.task_type is None:
        mapping = {'base_model_class': type(lm).__name__, 'parent_library': type(lm).__module__}
    config.save_pretrained(directory, auto_mapping_dict=mapping)


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, none sharing memory with another (tied weights on one rank): safetensors takes no aliases."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return result
