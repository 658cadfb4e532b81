"""Input that cannot be run ends with one sentence for each fault, before processes start and weights are read.

A failure means that a user waits for minutes and reads a traceback, or worse, that a parallel size or an argument is
ignored.
"""
import ast
import dataclasses
import importlib.util
import json
import os
import pathlib
import pytest
import subprocess
import sys
from typing import Any

from swift_megatron import compatibility
from swift_megatron.cli import main as cli
from swift_megatron.cli.flags import describe_fields, expand_file, parallel_fields, read_values
from swift_megatron.config import ConfigError, ParallelFields, layers_by_hand, read_model_config

LLAMA = {'num_attention_heads': 9, 'num_hidden_layers': 30}


def faults_of(num_processes: int = 1, model: dict | None = None, **fields: Any) -> list[str]:
    return ParallelFields(**fields).faults(num_processes, model)


# ---- Parallel fields ----


@pytest.mark.parametrize('fields, num_processes', [
    ({}, 1),
    ({}, 3),
    (dict(tensor_parallel_size=2), 2),
    (dict(tensor_parallel_size=3), 6),
    (dict(tensor_parallel_size=9), 9),
    (dict(tensor_parallel_size=2, pipeline_parallel_size=3, num_micro_batches=8), 12),
    (dict(pipeline_parallel_size=30), 30),
    (dict(pipeline_parallel_size=2, pipeline_layers='14,16', pipeline_schedule='gpipe'), 2),
    (dict(pipeline_parallel_size=2, pipeline_schedule='interleaved_1f1b', virtual_pipeline_size=2), 2),
    (dict(pipeline_parallel_size=2, num_micro_batches=1), 2),
    (dict(zero_stage=0), 2),
])
def test_what_works_is_accepted(fields, num_processes):
    """A run that works would be refused."""
    assert faults_of(num_processes, LLAMA, **fields) == []


@pytest.mark.parametrize(
    'name', ['tensor_parallel_size', 'pipeline_parallel_size', 'num_micro_batches', 'virtual_pipeline_size'])
@pytest.mark.parametrize('value', [0, -1, 2.0, '2', True, [2, 4]])
def test_sizes_are_whole_numbers(name, value):
    """A size of 0 or of True would count as 1 somewhere and as nothing elsewhere."""
    assert faults_of(**{name: value}) == [f'--{name} {value!r} has to be a whole number of at least 1']


PIPELINE = dict(pipeline_parallel_size=2)


@pytest.mark.parametrize(
    'fields, num_processes, message',
    [
        # value, rule, and what to type instead
        (dict(tensor_parallel_size=2), 3,
         '3 processes are no multiple of tensor_parallel_size x pipeline_parallel_size = 2 x 1 = 2: start 2 or 4 '
         'processes (NPROC_PER_NODE x NNODES) or choose sizes whose product divides 3'),
        (dict(PIPELINE, tensor_parallel_size=2), 2, '2 x 2 = 4: start 4 processes'),
        (dict(tensor_parallel_size=10), 10,
         '--tensor_parallel_size 10 is more than the 9 query heads of this model: legal values are 1 to 9'),
        (dict(pipeline_parallel_size=31), 31,
         '--pipeline_parallel_size 31 x --virtual_pipeline_size 1 = 31 stages are more than the 30 layers of this '
         'model: legal values are 1 to 30 stages'),
        (dict(PIPELINE,
              pipeline_schedule='zb'), 2, '--pipeline_schedule zb does not exist: use 1f1b, gpipe, interleaved_1f1b'),
        (dict(PIPELINE,
              virtual_pipeline_size=2), 2, '--virtual_pipeline_size 2 needs --pipeline_schedule interleaved_1f1b'),
        (dict(PIPELINE, pipeline_schedule='interleaved_1f1b'), 2,
         '--pipeline_schedule interleaved_1f1b needs --virtual_pipeline_size of at least 2'),
        (dict(pipeline_layers='30'), 1, '--pipeline_layers 30 needs --pipeline_parallel_size of at least 2'),
        (dict(PIPELINE,
              pipeline_layers='14,15'), 2, "--pipeline_layers '14,15' adds up to 29, but the model has 30 layers"),
        (dict(PIPELINE, pipeline_layers='10,10,10'), 2, "'10,10,10' has 3 numbers, but there are 2 stages"),
        (dict(PIPELINE, pipeline_layers='30,0'), 2, "'30,0' has to be whole numbers of at least 1"),
        (dict(PIPELINE, pipeline_layers='half'), 2, "'half' has to be whole numbers of at least 1"),
    ])
def test_one_sentence_says_value_rule_and_remedy(fields, num_processes, message):
    """A user would know that it does not work, but not what does."""
    found = faults_of(num_processes, LLAMA, **fields)
    assert len(found) == 1 and message in found[0], found


# Fields whose machinery is not in this release: move a line up to test_what_works_is_accepted when it lands.
NOT_YET = [('sequence_parallel', True, 'false'), ('overlap_communication', True, 'false'), ('zero_stage', 1, '0')]


@pytest.mark.parametrize('name, value, default', NOT_YET)
def test_fields_that_are_not_available_yet(name, value, default):
    """The field would be ignored: the run does less than was asked for, without a word."""
    assert faults_of(**{name: value}) == [
        f'--{name} {value} is not available in this release: leave it out or set it to {default}'
    ]
    field = next(spec for spec in dataclasses.fields(ParallelFields) if spec.name == name)
    assert faults_of(**{name: field.default}) == []


def test_every_fault_is_reported_at_once():
    """A user would start five times to learn of five faults."""
    found = faults_of(
        3,
        LLAMA,
        tensor_parallel_size=10,
        pipeline_parallel_size=31,
        pipeline_schedule='zb',
        sequence_parallel=True,
        zero_stage=1)
    for word in ('3 processes', '10 is more than the 9 query heads', '31 stages', 'zb does not exist',
                 '--sequence_parallel', '--zero_stage 1'):
        assert sum(word in fault for fault in found) == 1, (word, found)
    found = faults_of(tensor_parallel_size=0, num_micro_batches='two', sequence_parallel=True)
    assert len(found) == 3 and all('\n' not in fault for fault in found)
    assert str(ConfigError(found)) == '; '.join(found) and ConfigError(found).faults == found


def test_layers_by_hand():
    """Stages would get other layers than asked for."""
    assert layers_by_hand('9, 9,8,6', 32, 4) == [9, 9, 8, 6]
    with pytest.raises(ValueError, match='adds up to 31, but the model has 32 layers'):
        layers_by_hand('9,9,8,5', 32, 4)


def test_derived_numbers():
    """Another number of processes would be started, or of micro-batches run."""
    fields = ParallelFields(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert (fields.model_parallel_size, fields.micro_batches) == (6, 3)
    assert ParallelFields(pipeline_parallel_size=3, num_micro_batches=8).micro_batches == 8


def test_model_config(tmp_path):
    """The check of the heads would fail on hub names or damaged files, before the right message comes."""
    (tmp_path / 'config.json').write_text('{"num_attention_heads": 9}')
    assert read_model_config(str(tmp_path)) == {'num_attention_heads': 9}
    for nothing in (None, '', 'Qwen/Qwen2.5-14B-Instruct', True, 7, ['a', 'b'], str(tmp_path / 'no')):
        assert read_model_config(nothing) is None
    for content in (b'{"num', b'[1, 2]', b'\xff\xfe\x00'):
        (tmp_path / 'config.json').write_bytes(content)
        assert read_model_config(str(tmp_path)) is None
    assert faults_of(64, {'architectures': ['Some']}, tensor_parallel_size=64) == []  # decided later, by the model


# ---- What does not go together with ms-swift's arguments ----

DEFAULTS: dict[str, Any] = {  # of ms-swift 4.6 and transformers 5.19, where not None
    **dict.fromkeys(('use_ray', 'use_swift_lora', 'use_dora', 'use_liger_kernel', 'predict_with_generate',
                     'eval_use_evalscope', 'use_flash_ckpt', 'use_galore', 'torch_compile', 'auto_find_batch_size'),
                    False),
    'sequence_parallel_size': 1,
    'task_type': 'causal_lm',
    'tuner_type': 'lora',
    'tuner_backend': 'peft',
    'init_weights': True,
    'freeze_parameters_ratio': 0.,
    'lisa_activated_layers': 0,
    'optim': 'adamw_torch_fused',
    'enable_jit_checkpoint': False,
    'save_on_each_node': False,
    'safe_serialization': True,
    'new_special_tokens': [],
    'fsdp': [],
}
GOOD: dict[str, list[Any]] = {  # what works beside the defaults
    'tuner_type': ['full'],
    'train_type': ['lora', 'full'],
    'init_weights': ['true', 'false', 'gaussian', False],
    'quant_method': ['bnb'],
    'optimizer': ['lorap'],
    'optim': ['adamw_torch', 'sgd', 'paged_adamw_8bit'],
}
BAD: dict[str, Any] = {
    'device_map': 'auto',
    'max_memory': '{0: 20GB}',
    'deepspeed': 'zero3',
    'deepspeed_autotp_size': 2,
    'fsdp': 'full_shard',
    'sequence_parallel_size': 2,
    'use_ray': True,
    'task_type': 'seq_cls',
    'tuner_type': 'longlora',
    'train_type': 'adalora',
    'tuner_backend': 'unsloth',
    'use_swift_lora': True,
    'use_dora': True,
    'init_weights': 'pissa',
    'target_parameters': ['w'],
    'quant_method': 'hqq',
    'quant_bits': 3,
    'new_special_tokens': ['<a>'],
    'init_strategy': 'zero',
    'freeze_parameters_ratio': 0.5,
    'use_liger_kernel': True,
    'loss_type': 'custom',
    'eval_metric': 'acc',
    'predict_with_generate': True,
    'eval_use_evalscope': True,
    'use_flash_ckpt': True,
    'use_galore': True,
    'lisa_activated_layers': 2,
    'optimizer': 'muon',
    'optim': 'adafactor',
    'torch_compile': True,
    'auto_find_batch_size': True,
    'enable_jit_checkpoint': True,
    'save_on_each_node': True,
    'safe_serialization': False,
}
RULES = {rule.name: rule for rule in compatibility.RULES}


def test_every_rule_has_an_example():
    """A rule that no test covers."""
    assert set(BAD) == set(RULES) and len(RULES) == len(compatibility.RULES)


@pytest.mark.parametrize('name', BAD)
def test_rules_refuse_by_name(name):
    """The argument would be ignored, or fail deep inside a library, or give wrong numbers."""
    assert f'--{name} {BAD[name]} {RULES[name].remedy}' in compatibility.faults({name: BAD[name]})
    assert ': ' in RULES[name].remedy, 'it does not say what to do instead'


@pytest.mark.parametrize('name', BAD)
def test_rules_accept_the_defaults_and_what_works(name):
    """A plain command would be refused."""
    for value in (DEFAULTS.get(name), *GOOD.get(name, [])):
        assert RULES[name].works(value), value


def test_all_defaults_together():
    """A plain command would be refused."""
    assert compatibility.faults({**dict.fromkeys(RULES, None), **DEFAULTS, 'label_smoothing_factor': 0.1}) == []
    assert compatibility.faults({}) == []


def test_all_rules_are_reported_at_once():
    """A user would start many times to learn of many faults."""
    assert len(compatibility.faults(BAD)) >= len(RULES)


@pytest.mark.parametrize('arguments, message', [
    (dict(label_smoothing_factor=0.1, enable_dft_loss=True),
     '--label_smoothing_factor and --enable_dft_loss contradict each other: use one of them'),
    (dict(quant_bits=4), '--quant_bits 4 does nothing without a method: add --quant_method bnb'),
    (dict(quant_method='bnb'), '--quant_method bnb needs --quant_bits 4'),
    (dict(quant_method='bnb', quant_bits=4,
          tuner_type='full'), '--tuner_type full cannot train a quantised model: use --tuner_type lora'),
])
def test_combinations(arguments, message):
    """One of two arguments that contradict each other would be ignored."""
    assert message in compatibility.faults(arguments)


def declared_arguments() -> set[str]:
    """All arguments of ms-swift and transformers, read from their sources: importing them takes ten seconds."""
    swift, transformers = (
        pathlib.Path(importlib.util.find_spec(name).submodule_search_locations[0])
        for name in ('swift', 'transformers'))
    files = [
        *swift.glob('arguments/**/*.py'), swift / 'ray_utils/arguments.py', swift / 'trainers/arguments.py',
        *transformers.glob('training_args*.py')
    ]
    classes = [
        node for file in files for node in ast.walk(ast.parse(file.read_text(encoding='utf-8')))
        if isinstance(node, ast.ClassDef)
    ]
    return {statement.target.id for node in classes for statement in node.body if isinstance(statement, ast.AnnAssign)}


def test_rules_are_about_arguments_that_exist():
    """A rule with a misspelt or renamed argument would never refuse anything."""
    old_spellings = {'train_type'}  # tuner_type, in ms-swift 3
    assert set(RULES) - declared_arguments() <= old_spellings


def test_fields_do_not_hide_arguments_of_ms_swift():
    """A parallel field with the name of one of ms-swift's arguments would change its meaning."""
    assert not {spec.name for spec in dataclasses.fields(ParallelFields)} & declared_arguments()


# ---- Flags and files ----


@pytest.mark.parametrize('argv, values', [
    ([], {}),
    (['--model', 'a/b', '--tensor_parallel_size', '2'], {
        'model': 'a/b',
        'tensor_parallel_size': 2
    }),
    (['--tensor-parallel-size=2'], {
        'tensor_parallel_size': 2
    }),
    (['--dataset', 'a.jsonl', 'b.jsonl#500', '--seed', '1'], {
        'dataset': ['a.jsonl', 'b.jsonl#500'],
        'seed': 1
    }),
    (['--sequence_parallel'], {
        'sequence_parallel': True
    }),
    (['--sequence_parallel', 'false', '--x', 'null'], {
        'sequence_parallel': False,
        'x': None
    }),
    (['--learning_rate', '-0.5', '--y', '-3'], {
        'learning_rate': -0.5,
        'y': -3
    }),
    (['--tensor_parallel_size', '2', '--tensor_parallel_size', '4'], {
        'tensor_parallel_size': 4
    }),
    (['--system', 'You are: [a', '--z='], {
        'system': 'You are: [a',
        'z': None
    }),
    (['--deepspeed', '{"zero_optimization": {"stage": 3}}'], {
        'deepspeed': {
            'zero_optimization': {
                'stage': 3
            }
        }
    }),
    (['--columns={"a": "b=c"}'], {
        'columns': {
            'a': 'b=c'
        }
    }),
])
def test_flags(argv, values):
    """The launcher would check another value than the one that the run gets."""
    assert read_values(argv) == values


CONTENT = {
    'model': 'a/b',
    'tensor_parallel_size': 2,
    'dataset': ['x.jsonl', 'y.jsonl'],
    'sequence_parallel': False,
    'deepspeed': {
        'stage': 3
    },
    'learning_rate': 1e-4,
    'nothing': None
}
FLAGS = [
    '--model', 'a/b', '--tensor_parallel_size', '2', '--dataset', 'x.jsonl', 'y.jsonl', '--sequence_parallel', 'False',
    '--deepspeed', '{"stage": 3}', '--learning_rate', '0.0001', '--nothing', 'None'
]


@pytest.mark.parametrize('name', ['run.json', 'run.yaml', 'run.yml'])
def test_files(name, tmp_path, monkeypatch):
    """A file would mean something else than the same lines do for `swift sft`; flags after it would not win."""
    monkeypatch.setenv('SWIFT_CONFIG_FILE', '')
    path = tmp_path / name
    path.write_text(json.dumps(CONTENT))  # JSON is YAML
    assert expand_file([str(path), '--tensor_parallel_size', '4']) == FLAGS + ['--tensor_parallel_size', '4']
    assert read_values(expand_file([str(path), '--tensor_parallel_size', '4']))['tensor_parallel_size'] == 4
    assert os.environ['SWIFT_CONFIG_FILE'] == str(path)
    assert expand_file(['--model', str(path)]) == ['--model', str(path)]  # only as the first word


def test_environment_section(tmp_path, monkeypatch):
    """Variables of the file would be lost, become arguments, or overwrite what the user set for this run."""
    for name in ('SWIFT_CONFIG_FILE', 'FIRST_OF_TEST', 'SECOND_OF_TEST'):
        monkeypatch.setenv(name, 'mine')
    monkeypatch.delenv('FIRST_OF_TEST')
    path = tmp_path / 'run.yaml'
    path.write_text('ENV:\n  FIRST_OF_TEST: 1\n  SECOND_OF_TEST: 2\nmodel: a/b\n')
    assert expand_file([str(path)]) == ['--model', 'a/b']
    assert (os.environ['FIRST_OF_TEST'], os.environ['SECOND_OF_TEST']) == ('1', 'mine')
    monkeypatch.setenv('FIRST_OF_TEST', '')  # so that it is taken away again


@pytest.mark.parametrize('name, content, message', [
    ('run.yaml', None, "there is no file '{path}'"),
    ('run.json', b'{"model": ', "'{path}' cannot be read: "),
    ('run.yaml', b'model: [a', "'{path}' cannot be read: "),
    ('run.yaml', b'\xff\xfe', "'{path}' cannot be read: "),
    ('run.yaml', b'', "'{path}' has to hold 'name: value' lines"),
    ('run.json', b'["--model", "a"]', "'{path}' has to hold 'name: value' lines"),
    ('run.yaml', b'ENV: [A=1]\nmodel: a', "ENV in '{path}' has to hold 'NAME: value' lines"),
])
def test_bad_files(name, content, message, tmp_path, monkeypatch):
    """A typing mistake in a file would end in a traceback."""
    monkeypatch.setenv('SWIFT_CONFIG_FILE', '')
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        expand_file([str(path)])
    assert str(caught.value).startswith(message.format(path=path)) and '\n' not in str(caught.value)


def test_parallel_fields_of_flags():
    """A parallel size among the flags would be ignored."""
    values = read_values(
        ['--model', 'a', '--tensor_parallel_size', '4', '--zero_stage', 'None', '--pipeline_layers', '9,9,8,6'])
    assert parallel_fields(values) == ParallelFields(tensor_parallel_size=4, pipeline_layers='9,9,8,6')


def test_help_names_every_field():
    """A user could not find out what there is."""
    for spec in dataclasses.fields(ParallelFields):
        assert f'--{spec.name}' in describe_fields() and spec.metadata['help'] in describe_fields()


# ---- The launcher ----

VARIABLES = ('NPROC_PER_NODE', 'NNODES', 'RANK', 'LOCAL_RANK', 'SWIFT_CONFIG_FILE')


@pytest.fixture
def no_variables(monkeypatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize('argv, nodes, given, processes', [
    ([], 1, None, 1),
    (['--tensor_parallel_size', '4'], 1, None, 4),
    (['--tensor_parallel_size', '2'], 1, '4', 4),
    (['--tensor_parallel_size', '4'], 2, None, 2),
    (['--tensor_parallel_size=2', '--pipeline_parallel_size=2'], 1, None, 4),
])
def test_number_of_processes(no_variables, argv, nodes, given, processes):
    """Too few processes would be started, or too many."""
    if given:
        no_variables.setenv('NPROC_PER_NODE', given)
    assert cli.check_flags(argv, nodes) == processes


@pytest.mark.parametrize('argv, given, messages', [
    (['--tensor_parallel_size', 'two'], None, ["--tensor_parallel_size 'two' has to be a whole number"]),
    (['--tensor_parallel_size'], None, ['--tensor_parallel_size True has to be a whole number']),
    (['--tensor_parallel_size', '2', '4'], None, ['--tensor_parallel_size [2, 4] has to be a whole number']),
    (['--tensor_parallel_size', '2'], '3', ['3 processes are no multiple']),
    (['--tensor_parallel_size', '0', '--device_map', 'auto'
      ], 'all', ['NPROC_PER_NODE=all has to be', '--tensor_parallel_size 0', '--device_map auto']),
    (['--model', '--use_dora', 'true'], '0', ['NPROC_PER_NODE=0 has to be', '--use_dora True']),
])
def test_launcher_reports_all_faults(no_variables, argv, given, messages):
    """A typing mistake would end in a traceback, or one fault would hide another."""
    if given:
        no_variables.setenv('NPROC_PER_NODE', given)
    with pytest.raises(ConfigError) as caught:
        cli.check_flags(argv, 1)
    assert len(caught.value.faults) == len(messages)
    for fault, message in zip(caught.value.faults, messages):
        assert message in fault


def test_heads_are_checked_by_the_launcher(no_variables, tmp_path):
    """A size that the model cannot have would be found out by all processes, after they have imported everything."""
    (tmp_path / 'config.json').write_text(json.dumps(LLAMA))
    for flag in ('--model', '--model_id'):
        with pytest.raises(ConfigError, match='legal values are 1 to 9'):
            cli.check_flags([flag, str(tmp_path), '--tensor_parallel_size', '16'], 1)


@pytest.mark.parametrize('variable', ['two', '0', ''])
def test_number_of_nodes(no_variables, variable):
    """A mistake in a variable would end in a traceback."""
    no_variables.setenv('NNODES', variable)
    with pytest.raises(ConfigError, match=f'NNODES={variable} has to be a whole number of at least 1'):
        cli.start('sft', [])


@pytest.mark.parametrize('argv, status, words', [
    (['sftt'], 2, ["swift-megatron: error: there is no command 'sftt': use sft or pt"]),
    (['sft', 'missing.yaml'], 2, ["swift-megatron: error: there is no file 'missing.yaml'"]),
    (['sft', '--tensor_parallel_size', '0', '--device_map', 'auto'
      ], 2, ["error: --tensor_parallel_size 0 has to be", 'error: --device_map auto places whole layers']),
    ([], 2, ['usage: swift-megatron']),
    (['--help'], 0, ['usage: swift-megatron', '--tensor_parallel_size (default: 1)', '--pipeline_layers']),
])
def test_command_without_torch_and_swift(argv, status, words):
    """A typing mistake would be told after ten seconds of imports, in eight voices, or with exit status 0."""
    code = ('import sys; from swift_megatron.cli.main import main\n'
            'try:\n    main()\n'
            'finally:\n'
            "    assert not {'torch', 'swift', 'transformers', 'peft'} & set(sys.modules), 'imported too much'")
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, '-c', code, *argv],
                          capture_output=True,
                          text=True,
                          env=environment,
                          timeout=60)
    output = done.stdout + done.stderr
    assert done.returncode == status, output
    assert 'Traceback' not in output
    for word in words:
        assert word in output
    if words[0].startswith('swift-megatron: error'):
        assert len(done.stderr.splitlines()) == 1


def test_importing_the_package_imports_nothing_else():
    """`import swift_megatron` would take ten seconds."""
    code = ("import sys, swift_megatron; assert 'sft_main' in dir(swift_megatron)\n"
            "assert not {'torch', 'swift', 'yaml'} & set(sys.modules)\n"
            'try:\n    swift_megatron.no_such_name\n'
            "except AttributeError as error:\n    assert 'no_such_name' in str(error)\n"
            'else:\n    raise AssertionError')
    subprocess.run([sys.executable, '-c', code], check=True, timeout=60)
