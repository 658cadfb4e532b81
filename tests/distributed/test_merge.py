"""Merging: the folder that comes out computes what the base with the adapter computes, whatever was trained.

The reference is transformers with PEFT: the adapter is loaded onto the base, and neither is merged.

A failure means that a user tests one model, and puts another one to work.
"""
import json
import os
import pytest
import re
import shutil
import torch
import warnings
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from typing import Any, Callable

from swift_megatron.checkpoint.merge import merge_adapter
from swift_megatron.errors import ConfigError
from swift_megatron.quantization.base import QuantizationConfig
from tests.harness import launch
from tests.tiny_models import Case, make_checkpoint, reference_model

VOCABULARY = 127
# Each value that float32 rounds is rounded once more by the merge: W + s B A.
BOUND = 1e-5

BASES = {'untied': Case(family='llama'), 'tied': Case(family='llama', tied=True)}
# What can be trained, as PEFT's config says it.
KINDS: dict[str, dict[str, Any]] = {
    'linears':
    dict(target_modules=['q_proj', 'down_proj']),
    'embedding':
    dict(target_modules=['embed_tokens']),
    'head':
    dict(target_modules=['lm_head']),
    'both ends':
    dict(target_modules=['q_proj', 'embed_tokens', 'lm_head']),
    'copied embedding':
    dict(target_modules=['q_proj'], modules_to_save=['embed_tokens']),
    'copied head':
    dict(target_modules=['q_proj'], modules_to_save=['lm_head']),
    'copied ends':
    dict(target_modules=['q_proj'], modules_to_save=['embed_tokens', 'lm_head']),
    'adapted embedding, copied head':
    dict(target_modules=['q_proj', 'embed_tokens'], modules_to_save=['lm_head']),
    'copied norms':
    dict(target_modules=['q_proj'], modules_to_save=['input_layernorm', 'norm']),
    'biases':
    dict(target_modules=['q_proj', 'o_proj'], bias='all'),
    'ranks of their own':
    dict(target_modules='all-linear', use_rslora=True, rank_pattern={'q_proj': 2}, alpha_pattern={'layers.1.mlp': 5}),
}
TIED_KINDS: dict[str, dict[str, Any]] = {
    'embedding that stays tied':
    dict(target_modules=['q_proj', 'embed_tokens'], ensure_weight_tying=True),
    'copied embedding that stays tied':
    dict(target_modules=['q_proj'], modules_to_save=['embed_tokens'], ensure_weight_tying=True),
}


def write_adapter(model: torch.nn.Module, directory: str, **settings: Any) -> str:
    """A PEFT adapter on the model with every trained number drawn at random."""
    peft_model = get_peft_model(model, LoraConfig(task_type='CAUSAL_LM', r=4, lora_alpha=8, **settings))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    peft_model.save_pretrained(directory)
    return directory


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def loaded(directory: str) -> torch.nn.Module:
    """A folder in transformers; every weight has to come from the files."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return model


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def merge_all_kinds(folder: str) -> dict[str, tuple[float, float]]:
    """Base and kind -> how far the merged model is from base and adapter, and how far the base alone is."""
    warnings.filterwarnings('ignore', message='.*tie_word_embeddings.*')
    found = {}
    for name, case in BASES.items():
        base = make_checkpoint(case, f'{folder}/{name}')
        in_shards = f'{folder}/{name}-in-shards'
        reference_model(base, case).save_pretrained(in_shards, max_shard_size='50KB')
        plain = logits(reference_model(base, case))
        for number, (kind, settings) in enumerate({**KINDS, **(TIED_KINDS if case.tied else {})}.items()):
            adapter = write_adapter(reference_model(base, case), f'{folder}/adapter-{name}-{number}', **settings)
            merged = f'{folder}/merged-{name}-{number}'
            merge_adapter(in_shards, adapter, merged)
            expected = logits(PeftModel.from_pretrained(reference_model(base, case), adapter))
            found[f'{name}: {kind}'] = distance(logits(loaded(merged)), expected), distance(plain, expected)
    return found


@pytest.fixture(scope='module')
def kinds(tmp_path_factory) -> dict[str, tuple[float, float]]:
    return launch(1, merge_all_kinds, str(tmp_path_factory.mktemp('merge')))[0]


@pytest.mark.parametrize('case',
                         [f'untied: {kind}' for kind in KINDS] + [f'tied: {kind}' for kind in [*KINDS, *TIED_KINDS]])
def test_merged_folder_is_base_and_adapter(kinds, case):
    """A failure means that the merged model is another one: a part not merged, or a head that followed or did not."""
    found, without = kinds[case]
    assert without > 1e-2, 'this adapter shows nothing'
    assert found < BOUND


QUANTISED: dict[str, Case] = {
    # Norms over (heads, head size), which are matrices.
    'cohere': Case(family='cohere', key_value_heads=4, ffn=128),
    'llama': Case(family='llama', ffn=128),
}
NF4 = QuantizationConfig(format='nf4', double=False)


def merge_into_quantised(folder: str, dtype: torch.dtype) -> dict[str, tuple[float, list[str], list[str]]]:
    """Family -> distance of the logits from bitsandbytes' with PEFT; tensors that were rounded; those that were not."""
    found = {}
    for name, case in QUANTISED.items():
        base = make_checkpoint(case, f'{folder}/{name}')
        reference_model(base, case, dtype).save_pretrained(base)
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.float32)
        quantised = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, quantization_config=four_bits, attn_implementation='sdpa')
        linears = sorted(path for path, module in quantised.named_modules() if type(module).__name__ == 'Linear4bit')
        adapter = write_adapter(reference_model(base, case), f'{folder}/adapter-{name}', target_modules=['q_proj'])
        merge_adapter(base, adapter, f'{folder}/merged-{name}', into='dequantized', quantization=NF4)
        expected = logits(PeftModel.from_pretrained(quantised, adapter))
        before, after = (load_file(f'{path}/model.safetensors') for path in (base, f'{folder}/merged-{name}'))
        changed = sorted(key for key in before if not torch.equal(before[key], after[key]))
        found[name] = distance(logits(loaded(f'{folder}/merged-{name}')), expected), changed, linears
    return found


@pytest.fixture(scope='module')
def quantised(tmp_path_factory) -> dict[str, tuple[float, list[str], list[str]]]:
    return launch(1, merge_into_quantised, str(tmp_path_factory.mktemp('merge-4-bit')), torch.float32)[0]


@pytest.mark.parametrize('name', QUANTISED)
def test_merged_into_the_quantised_base(quantised, name):
    """A failure means that tensors are rounded that a 4-bit base holds as they are, or the other way round."""
    found, changed, linears = quantised[name]
    assert changed == [f'{linear}.weight' for linear in linears]
    assert found < BOUND


def edit_json(path: str, change: Callable[[dict], Any]) -> None:
    with open(path, encoding='utf-8') as file:
        content = json.load(file)
    change(content)
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(content, file)


def drop(directory: str, *endings: str) -> None:
    """Leaves tensors out of an adapter's file."""
    path = f'{directory}/adapter_model.safetensors'
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.endswith(endings)}
    save_file(kept, path, metadata={'format': 'pt'})


def _rename(directory: str) -> None:
    path = f'{directory}/adapter_model.safetensors'
    save_file({name.replace('q_proj', 'x_proj'): tensor for name, tensor in load_file(path).items()}, path)


def _second_shard(directory: str) -> str:
    return os.path.join(directory, sorted(name for name in os.listdir(directory) if name.startswith('model-'))[1])


def _untold(base: str) -> None:
    name = 'model.layers.0.self_attn.q_proj.weight'
    edit_json(f'{base}/model.safetensors.index.json', lambda index: index['weight_map'].pop(name))


def _set(directory: str, **changes: Any) -> None:
    edit_json(f'{directory}/adapter_config.json', lambda config: config.update(changes))


LAYER = 'layers.1.self_attn.q_proj'
# Name -> (what is done to the base's folder, message), and the same for the adapter's.
BROKEN_BASES: dict[str, tuple[Callable[[str], Any], str]] = {
    'shard missing': (lambda base: os.remove(_second_shard(base)), r"lacks 'model-00002-of-.*', which its index names"),
    'shard cut off': (lambda base: os.truncate(_second_shard(base), 1000), r'model-00002-of-.* cannot be read'),
    'tensor missing': (_untold, r'lacks 1 .* model.layers.0.self_attn.q_proj.weight'),
    'no config': (lambda base: os.remove(f'{base}/config.json'), r'config.json'),
}
BROKEN_ADAPTERS: dict[str, tuple[Callable[[str], Any], str]] = {
    'no weights':
    (lambda adapter: os.remove(f'{adapter}/adapter_model.safetensors'), r'holds no adapter_model.safetensors'),
    'cut off': (lambda adapter: os.truncate(f'{adapter}/adapter_model.safetensors', 1000),
                r'adapter_model.safetensors.* cannot be read'),
    'A without B': (lambda adapter: drop(adapter, f'{LAYER}.lora_B.weight'), rf"lacks .*{LAYER}.lora_B.weight'"),
    'B without A': (lambda adapter: drop(adapter, f'{LAYER}.lora_A.weight'), rf"lacks .*{LAYER}.lora_A.weight'"),
    'a layer missing': (lambda adapter: drop(adapter, f'{LAYER}.lora_A.weight', f'{LAYER}.lora_B.weight'),
                        rf"lacks 2 .*{LAYER}.lora_A.weight'"),
    'copy missing': (lambda adapter: drop(adapter, 'lm_head.weight'), r"lacks .*lm_head.weight'"),
    'another model': (_rename, r'x_proj.* belongs to another model'),
    'another rank': (lambda adapter: _set(adapter, r=5), r'has shape \(4, 64\).* \(5, 64\)'),
    'dora': (lambda adapter: _set(adapter, use_dora=True), r'use_dora'),
    'trained tokens': (lambda adapter: _set(adapter, trainable_token_indices=[3, 4]), r'trainable_token_indices'),
    'another kind': (lambda adapter: _set(adapter, peft_type='LOHA'), r'LOHA'),
    'no kind': (lambda adapter: _set(adapter, peft_type=None), r'adapter_config.json.* cannot be read'),
}
BROKEN = {**BROKEN_BASES, **BROKEN_ADAPTERS}


def merge_broken(folder: str) -> dict[str, str]:
    """Name -> the message of the refusal, or what else happened."""
    case = BASES['untied']
    base = f'{folder}/base'
    reference_model(make_checkpoint(case, f'{folder}/one-file'), case).save_pretrained(base, max_shard_size='100KB')
    good = write_adapter(
        reference_model(base, case), f'{folder}/adapter', target_modules=['q_proj'], modules_to_save=['lm_head'])
    found = {}
    for name, (spoil, _) in BROKEN.items():
        model, adapter = (shutil.copytree(path, f'{folder}/{name}/{part}')
                          for path, part in ((base, 'base'), (good, 'adapter')))
        spoil(model if name in BROKEN_BASES else adapter)
        try:
            merge_adapter(model, adapter, f'{folder}/{name}/merged')
            found[name] = 'merged'
            continue
        except ConfigError as error:
            found[name] = str(error)
        except Exception as error:
            found[name] = f'{type(error).__name__}: {error}'
        assert sorted(os.listdir(f'{folder}/{name}')) == ['adapter', 'base'], f'{name}: something half-written stays'
    return found


@pytest.fixture(scope='module')
def refusals(tmp_path_factory) -> dict[str, str]:
    return launch(1, merge_broken, str(tmp_path_factory.mktemp('broken')))[0]


@pytest.mark.parametrize('name', BROKEN)
def test_incomplete_folders_are_refused(refusals, name):
    """A failure means that a file lost on the way gives a model that is merged in part, or a traceback."""
    assert re.search(BROKEN[name][1], refusals[name]), refusals[name]
    assert 'Error: ' not in refusals[name]


def merge_special_files(folder: str) -> dict[str, float]:
    """Kind of base -> distance of the merged model: a tied one whose files hold both ends, and the bare decoder's."""
    case = BASES['tied']
    model = reference_model(make_checkpoint(case, f'{folder}/usual'), case)
    adapter = write_adapter(reference_model(f'{folder}/usual', case), f'{folder}/adapter', **KINDS['embedding'])
    expected = logits(PeftModel.from_pretrained(reference_model(f'{folder}/usual', case), adapter))
    weights = load_file(f'{folder}/usual/model.safetensors')
    shutil.copytree(f'{folder}/usual', f'{folder}/both')
    both = {**weights, 'lm_head.weight': weights['model.embed_tokens.weight'].clone()}
    save_file(both, f'{folder}/both/model.safetensors', metadata={'format': 'pt'})
    model.model.save_pretrained(f'{folder}/bare')
    found = {}
    for name in ('both', 'bare'):
        merge_adapter(f'{folder}/{name}', adapter, f'{folder}/merged-{name}')
        with open(f'{folder}/merged-{name}/config.json', encoding='utf-8') as file:
            assert json.load(file)['tie_word_embeddings'] is False
        found[name] = distance(logits(loaded(f'{folder}/merged-{name}')), expected)
    return found


def test_tied_models_in_other_files(tmp_path):
    """A failure means that tying is looked for in the names of tensors: these bases load, train, and merge wrong."""
    found = launch(1, merge_special_files, str(tmp_path))[0]
    assert max(found.values()) < BOUND, found


def merge_beside_other_weights(folder: str) -> tuple[list[str], list[str], float]:
    """Files of the merged folder, those of its base, and the distance of the merged model."""
    case = BASES['untied']
    base = f'{folder}/base'
    reference_model(make_checkpoint(case, f'{folder}/one-file'), case).save_pretrained(base, max_shard_size='100KB')
    weights = load_file(f'{folder}/one-file/model.safetensors')
    save_file({'tok_embeddings.weight': weights['model.embed_tokens.weight']}, f'{base}/consolidated.safetensors')
    for name in ('consolidated.00.pth', 'pytorch_model.bin', 'tf_model.h5', 'flax_model.msgpack', 'model.onnx'):
        with open(f'{base}/{name}', 'wb') as file:
            file.write(b'weights in another form')
    with open(f'{base}/tokenizer.model', 'wb') as file:
        file.write(b'a tokenizer')
    adapter = write_adapter(reference_model(base, case), f'{folder}/adapter', target_modules=['q_proj'])
    merge_adapter(base, adapter, f'{folder}/merged')
    expected = logits(PeftModel.from_pretrained(reference_model(base, case), adapter))
    return sorted(os.listdir(f'{folder}/merged')), sorted(os.listdir(base)), distance(
        logits(loaded(f'{folder}/merged')), expected)


def test_other_weights_are_left_behind(tmp_path):
    """A failure means that the merged folder holds weights without the adapter, which some programs would load."""
    merged, base, found = launch(1, merge_beside_other_weights, str(tmp_path))[0]
    assert found < BOUND
    kept = [
        name for name in base
        if name.startswith(('model-', 'model.safetensors')) or not name.endswith(('.safetensors', '.pth', '.bin', '.h5',
                                                                                  '.msgpack', '.onnx'))
    ]
    assert merged == sorted([*kept, 'merged_adapter.json'])
