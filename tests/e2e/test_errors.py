"""Input that cannot be run, and runs that break: one clear sentence or one traceback, soon, and a non-zero exit status.

A failure means that a user waits for a model to load before a spelling mistake is reported, reads a page of tracebacks,
or comes back in the morning to processes that wait for each other.
"""
import json
import os
import pytest
import re
import shutil
from typing import Any

from swift_megatron.config import ParallelFields
from . import jobs
from .console import command
from .harness import Job, run

pytestmark = pytest.mark.slow

LAUNCHER_SECONDS = 1  # of computing; importing torch alone takes longer

LAUNCHER: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {  # flags, environment, message
    'sizes and processes': ({'tensor_parallel_size': 2}, {'NPROC_PER_NODE': '3'},
                            r'3 processes are no multiple of .* 2 x 1 = 2: start 2 or 4 processes'),
    'more ranks than heads': ({'tensor_parallel_size': 10}, {},
                              r'--tensor_parallel_size 10 is more than the 9 query heads .*legal values are 1 to 9'),
    'no rank': ({'tensor_parallel_size': 0}, {}, r'--tensor_parallel_size 0 has to be a whole number of at least 1'),
    'no number': ({'tensor_parallel_size': 'two'}, {}, r"--tensor_parallel_size 'two' has to be a whole number"),
    'processes': ({}, {'NPROC_PER_NODE': 'two'}, r'NPROC_PER_NODE=two has to be a whole number'),
    'device_map': ({'device_map': 'auto'}, {}, r'--device_map auto .*use --tensor_parallel_size'),
    'deepspeed': ({'deepspeed': 'zero3'}, {}, r'--deepspeed zero3 .*leave it out'),
    'fsdp': ({'fsdp': 'fsdp2'}, {}, r'--fsdp fsdp2 .*use --tensor_parallel_size'),
    'dora': ({'use_dora': True}, {}, r'--use_dora True .*leave it out'),
    'pissa': ({'init_weights': 'pissa'}, {}, r'--init_weights pissa .*use true, false or gaussian'),
    'adalora': ({'tuner_type': 'adalora'}, {}, r'--tuner_type adalora .*use --tuner_type lora or full'),
    'three bits': ({'quant_method': 'bnb', 'quant_bits': 3}, {}, r'--quant_bits 3 .*--quant_bits 4'),
    'another quantisation': ({'quant_method': 'hqq', 'quant_bits': 4}, {}, r'--quant_method hqq .*--quant_method bnb'),
    'optimizer': ({'optim': 'adafactor'}, {}, r'--optim adafactor .*use adamw_torch'),
    'liger': ({'use_liger_kernel': True}, {}, r'--use_liger_kernel True .*leave it out'),
    'several adapters': ({'adapters': ['a', 'b']}, {}, r'--adapters a b names 2 adapters, .*swift-megatron export'),
    'first Qwen': ({'model': 'Qwen/Qwen-7B-Chat'}, {}, r"model 'Qwen/Qwen-7B-Chat' is a first-generation Qwen, .*Qwen3-8B"),
    'sequence parallel of ms-swift': ({'sequence_parallel_size': 2}, {}, r'--sequence_parallel_size 2 .*leave it out'),
}


@pytest.fixture(scope='module')
def bare(workshop, tmp_path_factory):
    """The model folder without its weights: whoever reads them fails otherwise than with the expected message."""
    folder = tmp_path_factory.mktemp('bare')
    for name in os.listdir(workshop['untied']):
        if not name.endswith('.safetensors'):
            shutil.copy(os.path.join(workshop['untied'], name), folder)
    return str(folder)


@pytest.mark.parametrize('case', LAUNCHER)
def test_launcher_refuses(workshop, bare, case):
    """A failure means that this input is not refused at once, before ms-swift is loaded and processes are started."""
    changes, environment, message = LAUNCHER[case]
    output = f"never-{case.replace(' ', '-')}"
    finished = command('swift-megatron', 'sft', *workshop.flags(output, **{'model': bare, **changes}), **environment)
    assert finished.exit_code == 2, finished.stderr[-2000:]
    assert finished.stdout == ''
    assert re.fullmatch(rf'swift-megatron: error: {message}.*\n', finished.stderr)
    assert finished.cpu_seconds < LAUNCHER_SECONDS
    assert not os.path.exists(workshop.output(output))


def test_launcher_tells_all_faults_and_unknown_words(workshop, bare):
    """A failure means that a user mends one fault only to meet the next, or that a wrong command is no fault."""
    flags = workshop.flags('never', model=bare, tensor_parallel_size=10, use_dora=True, device_map='auto')
    finished = command('swift-megatron', 'sft', *flags)
    assert finished.exit_code == 2
    assert len(re.findall('^swift-megatron: error: ', finished.stderr,
                          re.MULTILINE)) == finished.stderr.count('\n') == 3
    for argv, message in ((['tune'], "there is no command 'tune': use sft or pt"), (['sft', 'no.yaml'],
                                                                                    "there is no file 'no.yaml'")):
        finished = command('swift-megatron', *argv)
        assert finished.exit_code == 2 and message in finished.stderr and finished.stderr.count('\n') == 1


def _config(directory: str, **changes: Any) -> None:
    path = os.path.join(directory, 'config.json')
    with open(path, encoding='utf-8') as file:
        config = json.load(file)
    with open(path, 'w', encoding='utf-8') as file:
        json.dump({**config, **changes}, file)


WORKER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # flags, changes of config.json, message
    'misspelt field': ({'tensor_paralel_size': 2}, {},
                       r"no argument '--tensor_paralel_size': did you mean --tensor_par"),
    'misspelt argument': ({'lora_rnak': 4}, {}, r"no argument '--lora_rnak': did you mean --lora_rank"),
    'no such choice': ({'lora_bias': 'some'}, {}, r"argument --lora_bias.*invalid choice: 'some' \(choose from"),
    'stray word': ({'lora_rank': ['4', 'big']}, {}, r'big'),
    'two spellings': ({'model_id': 'other'}, {}, r'--model .* and --model_id other differ'),
    'quantised checkpoint': ({}, {'quantization_config': {'quant_method': 'gptq'}}, r'is stored quantised \(gptq\)'),
    'attention dropout': ({}, {'attention_dropout': 0.1}, r'attention_dropout=0.1 .*set it to 0.0'),
    'no such model': ({'model': '/nowhere/llama'}, {}, r"model '/nowhere/llama' cannot be used: "),
    'no such adapter': ({'adapters': '/nowhere/checkpoint-1'}, {}, r'--adapters .*/nowhere/.* cannot be used: '),
    'no plan': ({}, {'model_type': 'gpt2'}, r'model_type gpt2. publishes no tensor-parallel plan, .*plain `swift`'),
    'code of its own, without a plan': ({}, {'model_type': 'fancy', 'auto_map': {'AutoConfig': 'fancy.FancyConfig'}},
                                        r'model_type fancy. publishes no tensor-parallel plan'),
    'code of its own, for other versions': ({}, {'model_type': 'odd', 'auto_map': {'AutoConfig': 'odd.OddConfig'}},
                                            r'config of model .* cannot be loaded .*no_longer_there.*: give'),
    'no weights': ({}, {}, r'holds no model.safetensors'),
    'contradicting losses': ({'label_smoothing_factor': 0.1, 'enable_dft_loss': True}, {}, r'contradict each other'),
}


REMOTE_CODE = {  # beside the weights, as on a hub
    'fancy.py': 'from transformers import PretrainedConfig\n\n\nclass FancyConfig(PretrainedConfig):\n'
                '    model_type = "fancy"\n',
    'odd.py': 'from transformers import no_longer_there\n',
}


@pytest.mark.parametrize('case', WORKER)
def test_workers_refuse(workshop, bare, case, tmp_path):
    """A failure means that this input ends in a traceback, on several processes at once, or is not refused at all."""
    changes, config, message = WORKER[case]
    model = shutil.copytree(bare, tmp_path / 'model')
    _config(str(model), **config)
    for name, code in REMOTE_CODE.items():
        (model / name).write_text(code, encoding='utf-8')
    settings = {'model': str(model), 'tensor_parallel_size': 2, 'max_steps': 1, **changes}
    ended = run(Job(jobs.run_worker, ('sft', workshop.flags('never', **settings)), 2))
    assert [end.exit_code for end in ended] == [2, 2], ended[0].output
    assert len(re.findall(r'^swift-megatron: error: .*$', ended[0].output, re.MULTILINE)) == 1
    assert re.search(f'^swift-megatron: error: .*{message}', ended[0].output, re.MULTILINE)
    assert 'swift-megatron: error' not in ended[1].output
    assert not any('Traceback' in end.output or 'usage:' in end.output for end in ended)


def test_a_fault_of_another_rank_is_told():
    """A failure means that a run ends without a word when not the first process finds the fault, as with stages."""
    ended = run(Job(jobs.fail_alone, (1, ), 2))
    assert [end.exit_code for end in ended] == [0, 2]
    assert ended[1].output == 'swift-megatron: error: the weights of stage 1 are missing\n'


ADAPTERS = {'dora': ({'use_dora': True}, r'use_dora'), 'another kind': ({'peft_type': 'LOHA'}, r'LOHA|only LoRA')}


@pytest.mark.parametrize('case', ADAPTERS)
def test_adapters_that_do_not_fit_are_refused(workshop, case, tmp_path):
    """A failure means that an adapter of a kind that is not supported ends in a traceback, or is trained wrongly."""
    changes, message = ADAPTERS[case]
    with open(tmp_path / 'adapter_config.json', 'w', encoding='utf-8') as file:
        json.dump({
            'peft_type': 'LORA',
            'task_type': 'CAUSAL_LM',
            'r': 8,
            'target_modules': ['q_proj'],
            **changes
        }, file)
    flags = workshop.flags('never', tensor_parallel_size=2, max_steps=1, adapters=str(tmp_path))
    ended = run(Job(jobs.run_worker, ('sft', flags), 2))
    assert [end.exit_code for end in ended] == [2, 2], ended[0].output[-2000:]
    assert re.search(f'^swift-megatron: error: .*({message})', ended[0].output, re.MULTILINE)


CRASH = '''
import os, time
from swift.callbacks import callbacks_map
from swift.callbacks.base import TrainerCallback


class Crash(TrainerCallback):

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and os.environ['RANK'] == '1':
            with open({marker!r}, 'w') as file:
                file.write(str(time.time()))
            raise RuntimeError('the disk of rank 1 is full')


callbacks_map['crash'] = Crash
'''


def test_one_rank_that_fails_ends_the_run(workshop, tmp_path):
    """The last stage fails, and the first waits for it.

    A failure means that the other processes wait for hours, or that the reason stands nowhere on the screen, or below
    the others' complaints.
    """
    marker = tmp_path / 'raised'
    (tmp_path / 'crash.py').write_text(CRASH.format(marker=str(marker)), encoding='utf-8')
    flags = workshop.flags(
        'crash',
        pipeline_parallel_size=2,
        max_steps=6,
        external_plugins=str(tmp_path / 'crash.py'),
        callbacks='crash',
        save_strategy='steps',
        save_steps=1)
    finished = command('swift-megatron', 'sft', *flags)
    assert finished.exit_code not in (0, 2)
    raised = float(marker.read_text(encoding='utf-8'))
    assert finished.ended - raised < 30
    assert finished.stderr.count('RuntimeError: the disk of rank 1 is full') == 1
    reason, complaint = (finished.stderr.find(words) for words in ('the disk of rank 1 is full', 'Connection closed'))
    assert complaint == -1 or reason < complaint
    assert 'Traceback (most recent call last)' in finished.stderr
    assert re.search(r'swift-megatron: .*rank 1 failed first, with exit status 1', finished.stderr)
    assert {name for name in os.listdir(workshop.output('crash')) if name.startswith('checkpoint')} == {'checkpoint-1'}


def test_help():
    """A failure means that nobody finds the parallel fields, or their place among ms-swift's arguments."""
    finished = command('swift-megatron', '--help')
    assert finished.exit_code == 0 and finished.cpu_seconds < LAUNCHER_SECONDS
    fields = [f'--{name}' for name in ParallelFields.__dataclass_fields__]
    assert re.findall(r'^ +(--\w+)', finished.stdout, re.MULTILINE) == fields
    whole = command('swift-megatron', 'sft', '--help')
    found = re.findall(r'^ +(--\w+)', whole.stdout, re.MULTILINE)
    assert whole.exit_code == 0
    assert found[:len(fields)] == fields
    assert not set(fields) & set(found[len(fields):]), 'listed twice'
    assert {'--lora_rank', '--dataset', '--learning_rate', '--model_id'} <= set(found)
