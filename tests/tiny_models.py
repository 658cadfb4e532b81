"""Small random models of many families with non-trivial norms and biases, and the unsharded reference that they are
held to.
"""
import dataclasses
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from typing import Any, Optional

FFN, HEAD = 96, 16
WIDE_HEAD = 24  # where a family may have heads that together are not the hidden size

# What each family needs beyond the common sizes; keys as in its config.
FAMILIES: dict[str, dict[str, Any]] = {
    'llama':
    dict(attention_bias=True, mlp_bias=True, pad_token_id=2),
    'qwen2':
    dict(),
    'qwen3':
    dict(head_dim=WIDE_HEAD),
    'mistral':
    dict(head_dim=WIDE_HEAD, sliding_window=8),
    'phi3':
    dict(pad_token_id=3),
    'gemma2':
    dict(
        head_dim=WIDE_HEAD,
        query_pre_attn_scalar=WIDE_HEAD,
        sliding_window=8,
        final_logit_softcapping=5.,
        attn_logit_softcapping=4.,
        attn_implementation='eager'),
    'gemma3_text':
    dict(
        head_dim=WIDE_HEAD,
        query_pre_attn_scalar=WIDE_HEAD,
        sliding_window=8,
        layer_types=['sliding_attention', 'full_attention', 'sliding_attention', 'sliding_attention',
                     'full_attention']),
    'glm4':
    dict(head_dim=WIDE_HEAD, attention_bias=True, pad_token_id=3, partial_rotary_factor=0.5),
    'olmo2':
    dict(),
    'granite':
    dict(
        attention_bias=True,
        embedding_multiplier=3.,
        logits_scaling=2.,
        residual_multiplier=0.7,
        attention_multiplier=0.3),
    'cohere':
    dict(use_qk_norm=True, logit_scale=0.5, pad_token_id=3),
    'starcoder2':
    dict(use_bias=True, residual_dropout=0., embedding_dropout=0., attention_dropout=0.),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model to test."""
    family: str
    heads: int = 4
    key_value_heads: int = 2
    vocabulary: int = 127
    tied: bool = False
    layers: int = 2
    ffn: int = FFN
    seed: int = 0

    def config(self):
        extra = dict(FAMILIES[self.family])
        attention = extra.pop('attn_implementation', 'sdpa')
        if 'layer_types' in extra:
            extra['layer_types'] = extra['layer_types'][:self.layers]
        config = CONFIG_MAPPING[self.family](
            hidden_size=HEAD * self.heads,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=128,
            tie_word_embeddings=self.tied,
            bos_token_id=0,
            eos_token_id=1,
            **extra)
        config._attn_implementation = attention
        return config


def make_checkpoint(case: Case, directory: str, config: Optional[PretrainedConfig] = None) -> str:
    """Writes a random model of the case, or of another config; every parameter (norms and biases too) far from its
    default.
    """
    config = config or case.config()
    torch.manual_seed(case.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or 'norm' in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[-1]**0.5)
    model.save_pretrained(directory)
    return directory


def load_config(directory: str, case: Case, dtype: torch.dtype = torch.float32):
    config = AutoConfig.from_pretrained(directory)
    config._attn_implementation = case.config()._attn_implementation
    config.dtype = dtype
    return config


def reference_model(directory: str, case: Case, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The plain Hugging Face model."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=case.config()._attn_implementation)


def batch(vocabulary: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Three samples of 5, 11 and 14 tokens, right-padded, prompts without labels. (3, 14)"""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (3, 14), generator=generator)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    for row, (prompt, length) in enumerate([(2, 5), (4, 11), (1, 14)]):
        mask[row, length:] = 0
        ids[row, length:] = 0
        labels[row, length:] = -100
        labels[row, :prompt] = -100
    return {'input_ids': ids, 'attention_mask': mask, 'labels': labels}
