"""The installed command with a YAML file and processes of its own, and the module under torchrun.

A failure means that one of the two documented ways to start a run does not start it, or starts another one.
"""
import json
import os
import pytest
import yaml

from . import jobs
from .console import command
from .harness import Job, launch
from .runs import COMMON, assert_same_logs

pytestmark = pytest.mark.slow

STEPS = 2
SETTINGS = {'lora_dropout': 0, 'max_steps': STEPS}


@pytest.fixture(scope='module')
def expected(workshop):
    """The output folder of the same run by plain ms-swift: four samples at a time."""
    flags = workshop.flags('command-plain', **SETTINGS, per_device_train_batch_size=4)
    launch(Job(jobs.train, ('plain', 'sft', flags)))
    return workshop.output('command-plain')


def test_yaml_file_and_processes(workshop, expected, tmp_path):
    """A failure means that a YAML file, flags that override it, or the number of processes in it are not obeyed."""
    content = {
        **COMMON,
        **SETTINGS, 'model': workshop['untied'],
        'dataset': [workshop['train']],
        'max_steps': 50,
        'output_dir': workshop.output('command-yaml'),
        'ENV': {
            'NPROC_PER_NODE': 2
        }
    }
    path = tmp_path / 'run.yaml'
    path.write_text(yaml.safe_dump(content), encoding='utf-8')
    finished = command('swift-megatron', 'sft', str(path), '--max_steps', str(STEPS))
    assert finished.exit_code == 0, finished.stderr[-4000:]
    assert 'processes: t=1 x p=1 x d=2' in finished.stdout + finished.stderr
    assert_same_logs(workshop.output('command-yaml'), expected, ignore=('total_flos', ))  # padding in smaller batches
    assert os.path.isfile(f"{workshop.output('command-yaml')}/run.yaml")  # as ms-swift keeps it


def test_under_torchrun(workshop, expected):
    """A failure means that clusters whose scheduler calls torchrun cannot use the package, or get a folder per rank."""
    flags = workshop.flags(
        'command-torchrun', **SETTINGS, tensor_parallel_size=2, per_device_train_batch_size=4, add_version=True)
    finished = command('torchrun', '--standalone', '--nproc_per_node', '2', '-m', 'swift_megatron', 'sft', *flags)
    assert finished.exit_code == 0, finished.stderr[-4000:]
    version, = os.listdir(workshop.output('command-torchrun'))
    output = f"{workshop.output('command-torchrun')}/{version}"
    assert version.startswith('v0-')
    assert_same_logs(output, expected)
    with open(f'{output}/args.json', encoding='utf-8') as file:
        assert json.load(file)['global_world_size'] == 2
