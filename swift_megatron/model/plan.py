"""How a Hugging Face architecture is cut: its published tensor-parallel plan, read as data, made precise.

transformers publishes for each architecture which linears are cut along the output ("colwise") or the input
("rowwise"), `config.base_model_tp_plan` and `_tp_plan` of the causal LM. The plan does not say where: attention is cut
at head boundaries, fused projections part by part, the MLP along its intermediate size, and the head along the
vocabulary. Where a published plan gathers (a fused projection that the model slices, a norm over a whole projection),
this module cuts without gathering if it knows how, and gathers if not. Whatever it cannot place is an error, never left
whole in silence.
"""
import re
from dataclasses import dataclass, field
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from typing import Literal, Optional

from ..errors import PlanError
from ..sharding import HeadLayout, Layout, even_layout, fused, head_layout, intermediate_layout, scaled

Kind = Literal['column', 'column_gather', 'row', 'row_split']

COLUMN_STYLES = {'colwise', 'packed_colwise', 'colwise_gather_output'}
ROW_STYLES = {'rowwise', 'rowwise_split_input'}
OTHER_STYLES = {'replicated_with_grad_allreduce', 'embedding_rowwise'}

QUERY, KEY_VALUE, FUSED_QKV, OUTPUT = {'q_proj'}, {'k_proj', 'v_proj'}, {'qkv_proj'}, {'o_proj', 'dense'}
FUSED_GATE_UP = {'gate_up_proj'}
QUERY_NORMS, KEY_NORMS = {'q_norm', 'q_layernorm'}, {'k_norm', 'k_layernorm'}
ACTIVATIONS = {'act_fn', 'act', 'activation_fn'}
PROJECTION_RMS_NORMS = {'Olmo2RMSNorm', 'Olmo3RMSNorm'}  # y = (w x / rms(x)) in float32, over the whole projection

REMEDY = 'train this model with plain `swift`'


@dataclass(frozen=True, kw_only=True)
class LinearCut:
    """How one linear is cut."""
    kind: Kind
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class NormCut:
    """How the weight of a norm inside a region is held: whole with partial gradients (axis None), or cut along axis 0.

    `over_projection` marks an RMS norm over all elements of a cut projection.
    """
    axis: Optional[int] = None
    layout: Layout = ()
    partial: bool = True
    over_projection: bool = False


@dataclass(kw_only=True)
class BlockPlan:
    """Cuts of one attention or MLP block, by the names of its direct children."""
    linears: dict[str, LinearCut] = field(default_factory=dict)
    norms: dict[str, NormCut] = field(default_factory=dict)
    heads: Optional[HeadLayout] = None


@dataclass(kw_only=True)
class ModelPlan:
    """Cuts of a whole causal LM: the blocks by module path, and the vocabulary."""
    blocks: dict[str, BlockPlan]
    vocabulary: Layout


def decoder_plan(config: PretrainedConfig, name: str) -> dict[str, str]:
    """The tensor-parallel plan that a decoder's config publishes: module path pattern within the decoder -> style.

    Args:
        config: The model's config; enough to know before anything of the model is downloaded or built.
        name: How a message calls the model.

    Raises:
        PlanError: if it publishes none.
    """
    plan = getattr(config, 'base_model_tp_plan', None)
    if not plan:
        raise PlanError(f'{name} publishes no tensor-parallel plan, so it cannot be split: {REMEDY}, or '
                        'use an architecture such as llama, qwen2, qwen3, mistral, phi3, gemma2, glm4, olmo2')
    return plan


def published_plan(model: PreTrainedModel) -> dict[str, str]:
    """Module path pattern ('*' for a layer number) -> style, for the whole model.

    Raises:
        PlanError: if the architecture publishes no plan, or one with styles beyond dense layers.
    """
    name = type(model).__name__
    plan = {
        f'{model.base_model_prefix}.{pattern}': style
        for pattern, style in decoder_plan(model.config, name).items()
    }
    plan.update(getattr(type(model), '_tp_plan', None) or {})
    foreign = sorted(set(plan.values()) - COLUMN_STYLES - ROW_STYLES - OTHER_STYLES)
    if foreign:
        raise PlanError(f'{name} needs the tensor-parallel styles {", ".join(foreign)} (mixture of experts or latent '
                        'attention), which are not supported: use a dense model')
    return plan


def _styles(model: PreTrainedModel) -> dict[str, str]:
    """Module path -> style. Every entry of the plan has to match a module, every linear of a layer an entry."""
    plan = published_plan(model)
    modules = dict(model.named_modules())
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r'\*', r'\d+'))
        matched = [path for path in modules if expression.fullmatch(path)]
        if not matched and style != 'replicated_with_grad_allreduce':
            raise PlanError(
                f"the plan of {type(model).__name__} names '{pattern}', which matches no module, so it is not "
                f'known how to split it: {REMEDY}')
        styles.update(dict.fromkeys(matched, style))
    foreign = [
        path for path, style in styles.items()
        if style in COLUMN_STYLES | ROW_STYLES and not isinstance(modules[path], nn.Linear)
    ]
    if foreign:
        raise PlanError(
            f"'{foreign[0]}' of {type(model).__name__} is a {type(modules[foreign[0]]).__name__}, no nn.Linear, so it "
            f'is not known how to split it: {REMEDY}')
    layers = f'{model.base_model_prefix}.layers.'
    blocks = {path.rpartition('.')[0] for path, style in styles.items() if style in COLUMN_STYLES | ROW_STYLES}
    unplaced = [
        path for path, module in modules.items() if path.startswith(layers) and path not in styles and (
            isinstance(module, nn.Linear) or path.rpartition('.')[0] not in blocks and _holds_matrix(module))
    ]
    if unplaced:
        raise PlanError(
            f"'{unplaced[0]}' of {type(model).__name__} is in no entry of its tensor-parallel plan, so it is not "
            f'known how to split it: {REMEDY}')
    return styles


def _holds_matrix(module: nn.Module) -> bool:
    """Whether a module has work worth splitting of its own: experts, a convolution, a recurrent layer."""
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))


def legal_tensor_sizes(num_heads: int) -> str:
    """The legal values of t for a message."""
    return f'1 to {num_heads}'


def attention_heads(config: PretrainedConfig, size: int) -> HeadLayout:
    """Heads of each of `size` ranks.

    Raises:
        PlanError: if there are fewer query heads than ranks.
    """
    num_heads = config.num_attention_heads
    num_key_value_heads = getattr(config, 'num_key_value_heads', None) or num_heads
    if size > num_heads:
        raise PlanError(
            f'tensor_parallel_size={size} is more than the {num_heads} query heads of this model: legal values '
            f'are {legal_tensor_sizes(num_heads)}')
    return head_layout(num_heads, num_key_value_heads, size)


class _AttentionPlanner:
    """Cuts of one attention block at head boundaries."""

    def __init__(self, path: str, block: nn.Module, config: PretrainedConfig, size: int) -> None:
        self.path, self.block, self.config, self.size = path, block, config, size
        self.heads = attention_heads(config, size)
        self.head_dim = block.head_dim
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = getattr(config, 'num_key_value_heads', None) or self.num_heads
        self.query = scaled(self.heads.query, self.head_dim)
        self.key_value = scaled(self.heads.key_value, self.head_dim)

    def plan(self, styles: dict[str, str]) -> BlockPlan:
        plan = BlockPlan(heads=self.heads)
        for name, style in styles.items():
            child = getattr(self.block, name)
            if style in COLUMN_STYLES:
                plan.linears[name] = LinearCut(kind='column', layout=self._column(name, child))
            elif style in ROW_STYLES:
                self._expect(name, name in OUTPUT, child.in_features, self.num_heads * self.head_dim)
                plan.linears[name] = LinearCut(kind='row', layout=self.query)
        for name, child in self.block.named_children():
            if name not in plan.linears and next(child.parameters(), None) is not None:
                plan.norms[name] = self._norm(name, child)
        _refuse_own_parameters(self.path, self.block)
        return plan

    def _expect(self, name: str, known: bool, size: int, expected: int) -> None:
        if not known or size != expected:
            raise PlanError(
                f"'{self.path}.{name}' is not a projection of whole heads ({size} features, {expected} expected), "
                f'so it cannot be split: {REMEDY}')

    def _column(self, name: str, child: nn.Linear) -> Layout:
        query_size, key_value_size = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        if name in FUSED_QKV:
            self._expect(name, True, child.out_features, query_size + 2 * key_value_size)
            return fused(self.query, scaled(self.heads.key_value, self.head_dim, query_size),
                         scaled(self.heads.key_value, self.head_dim, query_size + key_value_size))
        if name in KEY_VALUE:
            self._expect(name, True, child.out_features, key_value_size)
            return self.key_value
        self._expect(name, name in QUERY, child.out_features, query_size)
        return self.query

    def _norm(self, name: str, child: nn.Module) -> NormCut:
        """By the shape of the weight: head size, (heads, head size) or the whole projection."""
        shapes = {tuple(p.shape) for p in child.parameters()}
        if name in QUERY_NORMS:
            heads, layout, elements = self.num_heads, self.heads.query, self.query
        elif name in KEY_NORMS:
            heads, layout, elements = self.num_key_value_heads, self.heads.key_value, self.key_value
        else:
            raise PlanError(f"'{self.path}.{name}' ({type(child).__name__}) is not known, so it cannot be split: "
                            f'{REMEDY}')
        if shapes == {(self.head_dim, )}:
            return NormCut()
        if shapes == {(heads, self.head_dim)}:
            return NormCut(axis=0, layout=layout)
        if shapes == {(heads * self.head_dim, )} and type(child).__name__ in PROJECTION_RMS_NORMS:
            return NormCut(axis=0, layout=elements, over_projection=True)
        raise PlanError(
            f"'{self.path}.{name}' ({type(child).__name__}, shapes {sorted(shapes)}) is not known, so it cannot "
            f'be split: {REMEDY}')


def _refuse_own_parameters(path: str, block: nn.Module) -> None:
    for name, _ in block.named_parameters(recurse=False):
        raise PlanError(f"parameter '{path}.{name}' is in no linear, so it is not known how to split it: {REMEDY}")


def _activation(path: str, name: str, child: nn.Module, gathers: bool) -> NormCut:
    """A learned activation with numbers for all features (xIELU): whole; each rank sees its features, unless they are
    gathered.
    """
    if name in ACTIVATIONS and all(parameter.numel() == 1 for parameter in child.parameters()):
        return NormCut(partial=not gathers)
    raise PlanError(f"'{path}.{name}' ({type(child).__name__}) is not known, so it cannot be split: {REMEDY}")


def _mlp_plan(path: str, block: nn.Module, styles: dict[str, str], size: int, multiple: int) -> BlockPlan:
    """Cuts of an MLP along its intermediate size; blocks of unknown shape gather and split as their plan says."""
    plan = BlockPlan()
    widths = {getattr(block, name).in_features for name, style in styles.items() if style in ROW_STYLES}
    inner = widths.pop() if len(widths) == 1 else None
    for name, style in styles.items():
        child = getattr(block, name)
        if style in ROW_STYLES:
            plan.linears[name] = LinearCut(
                kind='row', layout=_cut_intermediate(path, child.in_features, size, multiple))
        elif child.out_features == inner and style == 'colwise':
            plan.linears[name] = LinearCut(kind='column', layout=_cut_intermediate(path, inner, size, multiple))
        elif inner and child.out_features == 2 * inner and (name in FUSED_GATE_UP or style == 'packed_colwise'):
            half = _cut_intermediate(path, inner, size, multiple)
            plan.linears[name] = LinearCut(kind='column', layout=fused(half, scaled(half, 1, inner)))
        elif style == 'colwise_gather_output':
            plan.linears[name] = LinearCut(kind='column_gather', layout=even_layout(child.out_features, size))
        else:
            raise PlanError(
                f"'{path}.{name}' has {child.out_features} outputs, but the block's output projection takes "
                f'{inner}, so it is not known how to split it: {REMEDY}')
    gathers = any(cut.kind == 'column_gather' for cut in plan.linears.values())
    for name, child in block.named_children():
        if name not in plan.linears and next(child.parameters(), None) is not None:
            plan.norms[name] = _activation(path, name, child, gathers)
    _refuse_own_parameters(path, block)
    if gathers:
        plan.linears = {
            name: LinearCut(kind='row_split', layout=cut.layout) if cut.kind == 'row' else cut
            for name, cut in plan.linears.items()
        }
    return plan


def _cut_intermediate(path: str, features: int, size: int, multiple: int) -> Layout:
    if size > features:
        raise PlanError(
            f"tensor_parallel_size={size} is more than the {features} features of '{path}': legal values are "
            f'1 to {features}')
    return intermediate_layout(features, size, multiple)


def plan_model(model: PreTrainedModel, size: int, multiple: int = 1) -> ModelPlan:
    """Where every module of a causal LM is cut for `size` tensor-parallel ranks.

    Args:
        model: The unsharded model; may be on the meta device.
        size: T.
        multiple: Cut MLPs in multiples of this many features where that is possible (blocks of quantised weights).

    Raises:
        PlanError: if something cannot be cut, with the reason and what to type instead.
    """
    styles_by_block: dict[str, dict[str, str]] = {}
    head_name = None
    for path, style in _styles(model).items():
        if model.get_submodule(path) is model.get_output_embeddings():
            head_name = path
        elif isinstance(model.get_submodule(path), nn.Linear):
            parent, _, name = path.rpartition('.')
            styles_by_block.setdefault(parent, {})[name] = style
    if head_name is None:
        raise PlanError(f'the plan of {type(model).__name__} does not name its output head, so it cannot be split: '
                        f'{REMEDY}')
    blocks = {}
    for path, styles in styles_by_block.items():
        block = model.get_submodule(path)
        if hasattr(block, 'head_dim'):
            blocks[path] = _AttentionPlanner(path, block, model.config, size).plan(styles)
        elif (QUERY | KEY_VALUE | FUSED_QKV) & set(styles):
            raise PlanError(
                f"'{path}' ({type(block).__name__}) does not say its head size, so it is not known where to split "
                f'it: {REMEDY}')
        else:
            blocks[path] = _mlp_plan(path, block, styles, size, multiple)
    vocabulary = model.get_input_embeddings().num_embeddings
    if size > vocabulary:
        raise PlanError(
            f'tensor_parallel_size={size} is more than the vocabulary of {vocabulary}: legal values are 1 to '
            f'{vocabulary}')
    return ModelPlan(blocks=blocks, vocabulary=even_layout(vocabulary, size))
