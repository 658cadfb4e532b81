"""What the installed transformers offers, and which of it can be split: the table of the README, as data for tests."""
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typing import Any

SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=127,
    max_position_embeddings=128,
    pad_token_id=3,
    bos_token_id=0,
    eos_token_id=1)
YARN = dict(rope_type='yarn', rope_theta=1e4, factor=2., original_max_position_embeddings=64)

# Dense decoders that can be split, with what their small config needs beside SIZES. tests/tiny_models.FAMILIES are
# tested more deeply; all others are held to the unsharded model in tests/distributed/test_architectures.py.
SUPPORTED: dict[str, dict[str, Any]] = {
    'apertus': dict(rope_parameters=YARN),
    'arcee': dict(rope_parameters=YARN),
    'cohere': {},
    'cohere2': dict(sliding_window=8),
    'cwm': dict(head_dim=16, sliding_window=8, rope_parameters=YARN),
    'ernie4_5': dict(use_bias=True),
    'exaone4': dict(sliding_window=8),
    'gemma': dict(head_dim=24),
    'gemma2': dict(head_dim=24),
    'gemma3_text': dict(head_dim=24),
    'glm': dict(head_dim=16, attention_bias=True),
    'glm4': dict(head_dim=16),
    'granite': {},
    'helium': dict(head_dim=16),
    'hyperclovax': dict(logits_scaling=0.5, residual_multiplier=0.7),
    'jais2': {},
    'llama': {},
    'ministral': dict(head_dim=24, sliding_window=8),
    'ministral3': dict(head_dim=24, rope_parameters=dict(YARN, llama_4_scaling_beta=0.1)),
    'mistral': dict(head_dim=24),
    'nanochat': {},
    'olmo': dict(clip_qkv=1.),
    'olmo2': {},
    'olmo3': dict(sliding_window=8),
    'phi': {},
    'phi3': {},
    'qwen2': {},
    'qwen3': dict(head_dim=24),
    'seed_oss': dict(attention_dropout=0., residual_dropout=0.1),
    'smollm3': dict(attention_bias=True),
    'starcoder2': dict(attention_dropout=0., residual_dropout=0.1, embedding_dropout=0.1),
    'vaultgemma': dict(head_dim=24, query_pre_attn_scalar=24),
}

# Not multimodal by its config, but with encoders for images and sound, which ms-swift's entry refuses.
SPLIT_BUT_MULTIMODAL = {'phi4_multimodal'}

# Decoders with a plan that are refused, and words of the reason.
REFUSED: dict[str, str] = {
    'aria_text': "'model.layers.0.mlp.router' of AriaTextForCausalLM is in no entry",
    'deepseek_v2': 'styles mla_kv_a_proj, moe_tp_experts',
    'deepseek_v3': 'styles moe_tp_experts',
    'doge': "'model.layers.*.mlp.router_gate', which matches no module",
    'gemma4_text': 'styles moe_tp_experts',
    'gemma4_unified_text': 'needs more of the decoder than its hidden states',
    'gpt_neox': "'gpt_neox.layers.0.attention.query_key_value' has 192 outputs",
    'granite_swa': "'model.layers.*.self_attn.sinks', which matches no module",
    'hrm_text': 'the decoder of HrmTextForCausalLM is not one list of layers',
    'llama4_text': 'styles moe_tp_experts, packed_rowwise',
    'minicpm3': 'styles mla_kv_a_proj',
    'mixtral': 'styles moe_tp_experts',
    'olmo_hybrid': "'model.layers.0.linear_attn.q_proj' of OlmoHybridForCausalLM is in no entry",
    'qwen2_moe': "'model.layers.*.mlp.gate_proj', which matches no module",
    'qwen3_5_text': "'model.layers.*.self_attn.q_proj', which matches no module",
    'qwen3_moe': 'styles moe_tp_experts',
    'youtu': "'model.layers.0.self_attn.q_a_proj' of YoutuForCausalLM is in no entry",
}


def planned() -> list[str]:
    """Model types of causal LMs whose config publishes a tensor-parallel plan."""
    return [
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name in CONFIG_MAPPING and getattr(CONFIG_MAPPING[name], 'base_model_tp_plan', None)
    ]


def small_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """A config of the small sizes, with what the type needs, for float64."""
    config = CONFIG_MAPPING[model_type](**{**SIZES, **SUPPORTED.get(model_type, {}), **changes})
    config.dtype, config._attn_implementation = torch.float64, attention_of(model_type)
    return config


def attention_of(model_type: str) -> str:
    """SDPA leaves out a cap on attention logits; eager attention is not a number on padding outside of a window."""
    return 'sdpa' if model_type in SUPPORTED and model_type != 'vaultgemma' else 'eager'


def on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """The model of a config, without memory."""
    with torch.device('meta'):
        return AutoModelForCausalLM.from_config(config)
