"""Arguments of which a run would drop a part in silence, and models whose code cannot be split, are refused by name.

A failure means that a user trains without an adapter that was given, or waits for the download of a model that ends in
a traceback.
"""
import pytest
import re
from typing import Any

from swift_megatron import compatibility
from swift_megatron.errors import ConfigError
from swift_megatron.pipelines.export import ExportConfig

DROPPED: dict[str, tuple[dict[str, Any], str]] = {
    'two words': ({
        'adapters': ['a', 'b']
    }, r'--adapters a b names 2 adapters, .*swift-megatron export'),
    'with full tuning': ({
        'adapters': 'a',
        'tuner_type': 'full'
    }, r'--adapters a does nothing with --tuner_type full'),
    'with a checkpoint': ({
        'adapters': ['a'],
        'resume_from_checkpoint': 'c'
    }, r'--adapters a does nothing with --resume_from_checkpoint c, .*leave one'),
}


@pytest.mark.parametrize('case', DROPPED)
def test_no_adapter_is_dropped(case):
    """Training starts from the first of several adapters, from none with full tuning, from the checkpoint's own."""
    arguments, message = DROPPED[case]
    fault, = compatibility.faults(arguments)
    assert re.search(message, fault)


def test_one_adapter_is_no_fault(tmp_path):
    """A failure means that the usual way to train an adapter further is refused."""
    (tmp_path / 'adapter_config.json').write_text('{}')
    for value in (str(tmp_path), [str(tmp_path)], 'hub/name', [], None):
        assert compatibility.faults({'adapters': value, 'tuner_type': 'lora'}) == []


def test_a_folder_without_adapter_is_no_adapter(tmp_path):
    """A failure means that a whole model given as adapter ends in ms-swift's assertion."""
    fault, = compatibility.faults({'adapters': str(tmp_path)})
    assert re.search(r'holds no adapter_config.json: .*--model', fault)


def test_export_takes_one_adapter():
    """A failure means that export merges the first adapter alone, or ends in a traceback."""
    with pytest.raises(ConfigError, match='--adapters a b names 2 adapters'):
        ExportConfig.from_values({'adapters': ['a', 'b'], 'merge_lora': True, 'model': 'm'}).complete()


FIRST_QWENS = {
    'qwen/Qwen-7B': r'Qwen1.5-7B, Qwen/Qwen2.5-7B or Qwen/Qwen3-8B',
    'Qwen/Qwen-7B-Chat': r'Qwen1.5-7B, Qwen/Qwen2.5-7B or Qwen/Qwen3-8B',
    'Qwen/Qwen-14B-Chat-Int4': r'Qwen1.5-14B, Qwen/Qwen2.5-14B or Qwen/Qwen3-14B',
    'Qwen-72B': r'Qwen1.5-72B, Qwen/Qwen2.5-72B or Qwen/Qwen3-32B',
    'Qwen/Qwen-1_8B': r'Qwen1.5-1.8B, Qwen/Qwen2.5-1.5B or Qwen/Qwen3-1.7B',
    'Qwen/Qwen-VL-Chat': r'Qwen1.5-7B',
}


@pytest.mark.parametrize('name', FIRST_QWENS)
def test_first_qwen_is_refused_by_name(name):
    """A failure means that gigabytes are downloaded before the run ends in a traceback of remote code."""
    fault, = compatibility.model_faults(name, None)
    assert re.search(rf"'{name}' is a first-generation Qwen, .*use Qwen/{FIRST_QWENS[name]}", fault)


@pytest.mark.parametrize('config', [{
    'model_type': 'qwen',
    'hidden_size': 5120
}, {
    'architectures': ['QWenLMHeadModel'],
    'hidden_size': 5120
}])
def test_first_qwen_is_refused_by_its_config(config):
    """A failure means that a folder of any name, such as a fine-tuned one, is taken for another model."""
    fault, = compatibility.model_faults('/models/mine', config)
    assert 'Qwen/Qwen1.5-14B, Qwen/Qwen2.5-14B or Qwen/Qwen3-14B' in fault


@pytest.mark.parametrize('name',
                         ['Qwen/Qwen1.5-7B', 'Qwen/Qwen2.5-7B-Instruct', 'Qwen/Qwen3-8B', 'Qwen/Qwen2-7B', None])
def test_later_qwens_are_not(name):
    """A failure means that the models that the refusal names are refused."""
    assert compatibility.model_faults(name, None) == []
    assert compatibility.model_faults(name, {'model_type': 'qwen2', 'architectures': ['Qwen2ForCausalLM']}) == []


def test_full_tuning_of_float16_weights_is_refused():
    """A failure means that a run stops at its first step, where the scaler meets gradients in float16."""
    fault, = compatibility.faults({'tuner_type': 'full', 'torch_dtype': 'float16'})
    assert re.search('--torch_dtype float32 --fp16 true .*or --torch_dtype bfloat16', fault)
    assert compatibility.faults({'tuner_type': 'lora', 'torch_dtype': 'float16'}) == []
    assert compatibility.faults({'tuner_type': 'full', 'torch_dtype': 'float32', 'fp16': True}) == []
