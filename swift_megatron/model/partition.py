"""Turns a Hugging Face causal LM into this rank's part of it: modules stay as they are, linears and embeddings change.

Each attention and MLP block enters its tensor-parallel region once, by a hook on its input: two all-reduces forward
(the row-parallel layers) and two backward (the entries) per decoder layer, adapters included.
"""
import copy
import torch
from torch import nn
from transformers import PreTrainedModel
from typing import Callable

from ..errors import PlanError
from ..mesh import ParallelMesh
from ..sharding import HeadLayout, Layout, length, record_parameters, set_records
from ..tensor_parallel.boundary import BlockEntry, Region
from ..tensor_parallel.embedding import VocabParallelEmbedding
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ..tensor_parallel.norm import ProjectionRMSNorm
from .plan import REMEDY, LinearCut, NormCut, plan_model


def _partitioned_linear(linear: nn.Linear, cut: LinearCut, region: Region) -> nn.Module:
    common = dict(bias=linear.bias is not None, region=region, device=linear.weight.device, dtype=linear.weight.dtype)
    sizes = (linear.in_features, linear.out_features, cut.layout, region.mesh)
    if cut.kind.startswith('column'):
        return ColumnParallelLinear(*sizes, gather_output=cut.kind == 'column_gather', **common)
    return RowParallelLinear(*sizes, split_input=cut.kind == 'row_split', **common)


def _partition_norm(block: nn.Module, name: str, cut: NormCut, region: Region) -> None:
    norm, mesh = getattr(block, name), region.mesh
    if cut.over_projection:
        weight = norm.weight
        common = dict(eps=norm.variance_epsilon, region=region, device=weight.device, dtype=weight.dtype)
        setattr(block, name, ProjectionRMSNorm(weight.shape[0], cut.layout, mesh, **common))
        return
    records = {}
    for parameter_name, parameter in norm.named_parameters():
        spec = mesh.spec(parameter.shape, axis=cut.axis, layout=cut.layout, partial=cut.partial)
        records[parameter_name] = spec
        setattr(norm, parameter_name, nn.Parameter(parameter.new_empty(spec.local_shape)))
    set_records(norm, records)


def _localise_heads(block: nn.Module, heads: HeadLayout, rank: int) -> None:
    """Gives an attention block this rank's head counts, in its attributes and in its own copy of the config."""
    query, key_value = length(heads.query[rank]), length(heads.key_value[rank])
    counts = {
        'num_heads': query,
        'num_attention_heads': query,
        'num_key_value_heads': key_value,
        'num_key_value_groups': query // key_value
    }
    for name, count in counts.items():
        if hasattr(block, name):
            setattr(block, name, count)
    if hasattr(block, 'config'):
        block.config = copy.copy(block.config)
        block.config.num_attention_heads, block.config.num_key_value_heads = query, key_value


def _partition_embedding(model: PreTrainedModel, layout: Layout, region: Region) -> None:
    embedding = model.get_input_embeddings()
    scale = None
    if type(embedding) is not nn.Embedding:
        factor = getattr(embedding, 'scalar_embed_scale', None)
        if factor is None:
            raise PlanError(
                f'the token embedding of {type(model).__name__} is a {type(embedding).__name__}, which cannot be '
                f'split: {REMEDY}')
        scale = torch.tensor(factor, device='cpu')
    model.set_input_embeddings(
        VocabParallelEmbedding(
            embedding.num_embeddings,
            embedding.embedding_dim,
            layout,
            region.mesh,
            padding_idx=embedding.padding_idx,
            scale=scale,
            region=region,
            device=embedding.weight.device,
            dtype=embedding.weight.dtype))


def partition_model(model: PreTrainedModel,
                    mesh: ParallelMesh,
                    multiple: int = 1,
                    region_of: Callable[[ParallelMesh], Region] = Region) -> None:
    """Replaces, in place, the linears, embeddings and norms of a causal LM by this rank's parts, without values.

    Args:
        model: A causal LM on the meta device. Its parameters get the shapes of this rank's slices.
        mesh: The process grid.
        multiple: Cut MLPs in multiples of this many features where that is possible (blocks of quantised weights).
        region_of: Makes the region of each block, of the embedding and of the head: what lies outside of them.

    Raises:
        PlanError: if the model cannot be cut.
    """
    plan = plan_model(model, mesh.tensor_parallel_size, multiple)
    if getattr(model.config, 'attention_dropout', 0.) and mesh.tensor_parallel_size > 1:
        raise PlanError(f'attention_dropout={model.config.attention_dropout} in config.json is not supported with '
                        'tensor_parallel_size > 1: set it to 0.0')
    for path, block_plan in plan.blocks.items():
        block, region = model.get_submodule(path), region_of(mesh)
        for name, cut in block_plan.linears.items():
            setattr(block, name, _partitioned_linear(getattr(block, name), cut, region))
        for name, cut in block_plan.norms.items():
            _partition_norm(block, name, cut, region)
        if block_plan.heads is not None:
            _localise_heads(block, block_plan.heads, mesh.tensor_rank)
        block.register_forward_pre_hook(BlockEntry(region), with_kwargs=True)
    _partition_embedding(model, plan.vocabulary, region_of(mesh))
    head = model.get_output_embeddings()
    new_head = _partitioned_linear(head, LinearCut(kind='column_gather', layout=plan.vocabulary), region_of(mesh))
    new_head.enters_region = True
    model.set_output_embeddings(new_head)
    model.tie_weights()
    new_head.out_features = length(plan.vocabulary[mesh.tensor_rank])
    record_parameters(model, rank=mesh.tensor_rank, size=mesh.tensor_parallel_size)
