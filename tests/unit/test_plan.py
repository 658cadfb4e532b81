"""No silent path: what cannot be split is refused by name, with what to do instead.

A failure means that a part of a model is left whole, or is cut at a wrong place, without a word: the run trains on, and
is wrong. Or that a model which users train today is refused tomorrow.
"""
import pytest
import re
import torch
from torch import nn
from transformers import GPT2Config

from swift_megatron.errors import PlanError
from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.build import build_model
from swift_megatron.model.partition import partition_model
from swift_megatron.model.plan import REMEDY, plan_model
from tests.architectures import REFUSED, SPLIT_BUT_MULTIMODAL, SUPPORTED, on_meta, planned, small_config
from tests.tiny_models import FAMILIES, Case

TWO = ParallelMesh(tensor_parallel_size=2, rank=1)


def outcome(model_type: str) -> str:
    """'' if a small model of the type can be split, the reason if not."""
    try:
        config = small_config(model_type)
        on_meta(config)
    except Exception:  # its config wants sizes that hang together in ways of its own
        return 'not built'
    try:
        build_model(config, TWO)
    except PlanError as error:
        return str(error)
    return ''


@pytest.fixture(scope='module')
def outcomes() -> dict[str, str]:
    return {model_type: outcome(model_type) for model_type in planned()}


@pytest.mark.parametrize('model_type', SUPPORTED)
def test_supported_architectures_stay_supported(outcomes, model_type):
    """Users of this architecture would be turned away."""
    assert outcomes[model_type] == ''


@pytest.mark.parametrize('model_type', REFUSED)
def test_other_architectures_are_refused_by_name(outcomes, model_type):
    """Experts, latent attention or a recurrence would be left whole or cut like an MLP."""
    assert REFUSED[model_type] in outcomes[model_type]


def test_nothing_is_split_that_is_not_proven(outcomes):
    """An architecture of a new transformers would be split, and no test has compared it with the unsharded model."""
    accepted = {model_type for model_type, reason in outcomes.items() if not reason}
    assert accepted == set(SUPPORTED) | SPLIT_BUT_MULTIMODAL
    assert set(FAMILIES) <= set(SUPPORTED)


def test_every_refusal_says_what_to_do(outcomes):
    """A user would know that it does not work, but not what does."""
    for model_type, reason in outcomes.items():
        assert reason in ('', 'not built') or REMEDY in reason or 'use a dense model' in reason, (model_type, reason)


def refused(model: nn.Module, *words: str, size: int = 2) -> None:
    """The model is refused with all the words in the message."""
    with pytest.raises(PlanError) as caught:
        partition_model(model, ParallelMesh(tensor_parallel_size=size))
    for word in words:
        assert word in str(caught.value)


def llama(**changes) -> nn.Module:
    return on_meta(small_config('llama', **changes))


@pytest.mark.parametrize('size', [1, 2])
def test_architecture_without_plan(size):
    """GPT-2 would be left whole on every rank: no memory saved, gradients counted twice."""
    with pytest.raises(PlanError, match=f'GPT2LMHeadModel publishes no tensor-parallel plan.*{REMEDY}.*llama'):
        build_model(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=127), ParallelMesh(tensor_parallel_size=size))


def test_plan_entry_without_module():
    """A layer that transformers renamed would be left whole."""
    config = small_config('llama')
    config.base_model_tp_plan = {**config.base_model_tp_plan, 'layers.*.mlp.up_projection': 'colwise'}
    refused(on_meta(config), 'LlamaForCausalLM', "'model.layers.*.mlp.up_projection', which matches no module", REMEDY)


def test_linear_without_plan_entry():
    """An added projection would be computed from one rank's half of its input."""
    model = llama()
    model.model.layers[1].mlp.router = nn.Linear(64, 4, device='meta')
    refused(model, "'model.layers.1.mlp.router' of LlamaForCausalLM is in no entry", REMEDY)


def test_experts_without_plan_entry():
    """A mixture of experts whose plan covers its dense part alone would hold all experts on every rank."""
    model = llama()
    experts = model.model.layers[0].experts = nn.Module()
    experts.weight = nn.Parameter(torch.empty(4, 64, 96, device='meta'))
    refused(model, "'model.layers.0.experts' of LlamaForCausalLM is in no entry", REMEDY)


def test_plan_entry_for_something_else_than_a_linear():
    """A Conv1D, whose weight lies the other way round, would be left whole."""
    model = llama()
    model.model.layers[0].mlp.up_proj = nn.Conv1d(64, 96, 1, device='meta')
    refused(model, "'model.layers.0.mlp.up_proj' of LlamaForCausalLM is a Conv1d, no nn.Linear", REMEDY)


@pytest.mark.parametrize('block', ['self_attn', 'mlp'])
def test_unknown_norm_in_a_block(block):
    """A norm over cut features would see one rank's half of them, or have a gradient of one rank's half."""
    model = llama()
    model.model.layers[0].get_submodule(block).inner_norm = nn.RMSNorm(96, device='meta')
    refused(model, f"'model.layers.0.{block}.inner_norm' (RMSNorm)", REMEDY)


@pytest.mark.parametrize('block', ['self_attn', 'mlp'])
def test_unknown_parameter_in_a_block(block):
    """Attention sinks, one for each head, would be those of other heads."""
    model = llama()
    model.model.layers[0].get_submodule(block).sinks = nn.Parameter(torch.empty(4, device='meta'))
    refused(model, f"'model.layers.0.{block}.sinks'", REMEDY)


@pytest.mark.parametrize('name', ['q_norm', 'k_norm'])
def test_norm_of_unknown_shape_or_kind(name):
    """A norm over a whole projection would be computed over one rank's part; only OLMo's is known to be a plain RMS."""
    for norm in (nn.RMSNorm(8, device='meta'), nn.LayerNorm(64 if name == 'q_norm' else 32, device='meta')):
        model = llama()
        setattr(model.model.layers[0].self_attn, name, norm)
        refused(model, f"'model.layers.0.self_attn.{name}' ({type(norm).__name__}, shapes", REMEDY)


def test_attention_without_head_size():
    """Attention would be cut like an MLP, in the middle of a head."""
    model = llama(num_key_value_heads=4)
    del model.model.layers[0].self_attn.head_dim
    refused(model, "'model.layers.0.self_attn' (LlamaAttention) does not say its head size", REMEDY)


def test_projection_of_other_size_than_its_heads():
    """A query projection with a gate in it (as in Qwen3-Next) would be cut in the middle of the heads."""
    model = llama()
    model.model.layers[0].self_attn.q_proj = nn.Linear(64, 128, device='meta')
    refused(model, "'model.layers.0.self_attn.q_proj' is not a projection of whole heads (128 features, 64 expected)",
            REMEDY)


def test_mlp_of_other_size_than_its_output():
    """The gate would be cut at other places than what it is multiplied with."""
    model = llama()
    model.model.layers[0].mlp.gate_proj = nn.Linear(64, 100, device='meta')
    refused(model, "'model.layers.0.mlp.gate_proj' has 100 outputs, but the block's output projection takes 96", REMEDY)


@pytest.mark.parametrize('size', [5, 8])
def test_more_ranks_than_heads(size):
    """Ranks without a head would fail inside attention, or hang."""
    refused(
        llama(), f'tensor_parallel_size={size} is more than the 4 query heads', 'legal values are 1 to 4', size=size)


def test_more_ranks_than_neurons():
    """Ranks without a neuron would multiply by an empty matrix."""
    refused(
        llama(intermediate_size=3),
        "tensor_parallel_size=4 is more than the 3 features of 'model.layers.0.mlp'",
        'legal values are 1 to 3',
        size=4)


def test_more_ranks_than_tokens():
    """Ranks without a token would take the largest of no logits."""
    refused(
        llama(vocab_size=3, pad_token_id=None),
        'tensor_parallel_size=4 is more than the vocabulary of 3',
        'legal values are 1 to 3',
        size=4)


def test_attention_dropout():
    """Ranks hold different heads, but would drop the same positions in each: not the dropout that was asked for."""
    refused(llama(attention_dropout=0.1), 'attention_dropout=0.1', 'tensor_parallel_size > 1', 'set it to 0.0')
    partition_model(llama(attention_dropout=0.1), ParallelMesh())


def test_embedding_of_unknown_kind():
    """What an embedding does beside looking up rows would be lost."""

    class PositionedEmbedding(nn.Embedding):
        pass

    model = llama()
    model.model.embed_tokens = PositionedEmbedding(127, 64, device='meta')
    refused(model, 'LlamaForCausalLM is a PositionedEmbedding', REMEDY)


def test_head_that_needs_more_than_hidden_states():
    """The first training step would fail with an AttributeError, after minutes of loading."""
    config = small_config('gemma4_unified_text')
    with pytest.raises(
            PlanError, match=f'Gemma4UnifiedForCausalLM needs more of the decoder.*shared_kv_states.*{REMEDY}'):
        build_model(config, TWO)


# Cut of each linear of a layer with 9 query and 3 key/value heads of 16: (kind, elements on rank 0, on rank 1).
SEPARATE = {
    'self_attn.q_proj': ('column', 96, 48),
    'self_attn.k_proj': ('column', 32, 16),
    'self_attn.v_proj': ('column', 32, 16),
    'self_attn.o_proj': ('row', 96, 48),
}
KINDS = {
    'llama': {
        **SEPARATE, 'mlp.gate_proj': ('column', 48, 48), 'mlp.up_proj': ('column', 48, 48),
        'mlp.down_proj': ('row', 48, 48),
    },
    'phi3': {  # fused, and cut part by part without gathering, though the published plan gathers
        'self_attn.qkv_proj': ('column', 160, 80), 'self_attn.o_proj': ('row', 96, 48),
        'mlp.gate_up_proj': ('column', 96, 96), 'mlp.down_proj': ('row', 48, 48),
    },
    'starcoder2': {**SEPARATE, 'mlp.c_fc': ('column', 48, 48), 'mlp.c_proj': ('row', 48, 48)},
}


@pytest.mark.parametrize('family', KINDS)
def test_cuts(family):
    """A projection would be gathered where it need not be, which costs time, or cut at other places than its heads."""
    plan = plan_model(on_meta(Case(family=family, heads=9, key_value_heads=3).config()), 2)
    for layer in (0, 1):
        found = {
            f'{block}.{name}': (cut.kind, *(sum(b - a for a, b in ranges) for ranges in cut.layout))
            for block in ('self_attn', 'mlp')
            for name, cut in plan.blocks[f'model.layers.{layer}.{block}'].linears.items()
        }
        assert found == KINDS[family]
    assert set(plan.blocks) == {f'model.layers.{layer}.{block}' for layer in (0, 1) for block in ('self_attn', 'mlp')}
    assert plan.vocabulary == (((0, 64), ), ((64, 127), ))


def test_messages_have_no_line_breaks():
    """The command line shows one line for each fault."""
    with pytest.raises(PlanError) as caught:
        build_model(GPT2Config(), TWO)
    assert not re.search(r'\n', str(caught.value))
