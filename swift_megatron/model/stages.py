"""Which part of a model belongs to this rank's pipeline stages, and taking the rest away."""
import dataclasses
import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from typing import Optional

from ..mesh import ParallelMesh
from ..pipeline_parallel.split import StageSplit, split_layers
from ..sharding import RECORDS, record_parameters, spec_of
from .accounting import matrix_elements
from .decoder import AbsentModule, final_norm_name
from .plan import REMEDY, PlanError, published_plan


def split_model(model: PreTrainedModel, mesh: ParallelMesh, chunks: int, by_hand: Optional[str]) -> StageSplit:
    """Layers per stage. The cost of a layer, and of the head, is the size of its matrices: what a token is multiplied
    with.
    """
    layers = getattr(getattr(model, model.base_model_prefix, None), 'layers', None)
    if layers is None:
        published_plan(model)  # the reason, where it knows one
        raise PlanError(
            f'the decoder of {type(model).__name__} is not one list of layers, so it cannot be split: {REMEDY}')
    if mesh.pipeline_parallel_size > 1:
        final_norm_name(model)
    return split_layers([matrix_elements(layer) for layer in layers],
                        num_ranks=mesh.pipeline_parallel_size,
                        chunks=chunks,
                        head_cost=matrix_elements(model.get_output_embeddings()),
                        by_hand=by_hand)


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


def follow_embedding(model: nn.Module) -> Optional[bool]:
    """Trains or freezes the head's copy of a tied embedding as the embedding is: in the unsharded model they are one
    parameter, which has the embedding's name. Without this, end stages would wait for each other's gradients.

    Returns:
        Whether both are trained, if that changed the head's copy; None if not, or without a tie between stages.
    """
    ties = {spec_of(parameter).tie: parameter for parameter in model.parameters()}
    if 'copy' not in ties or ties['copy'].requires_grad == ties['source'].requires_grad:
        return None
    return ties['copy'].requires_grad_(ties['source'].requires_grad).requires_grad


def tied_aliases(model: PreTrainedModel) -> dict[str, str]:
    """What `untie_stages` returned for this model."""
    return getattr(model, 'tied_checkpoint_names', {})


def keep_own_stages(model: nn.Module, mesh: ParallelMesh) -> None:
    """Takes the modules of other pipeline stages, and adapters on them, out of the model (a causal LM or PEFT's
    wrapper).
    """
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
