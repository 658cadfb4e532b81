"""Where the files of a run lie, what is in them, and who writes them: stages, nodes with disks of their own, a hub.

A failure means that a user of several stages or nodes gets an incomplete adapter, cannot resume, or waits for ever.
"""
import filecmp
import json
import os
import pytest
import re
import shutil
from typing import Any

from . import jobs
from .harness import Job, launch, launch_all, run
from .runs import assert_same_logs, folder_tree, logged
from .test_variants import SETTINGS as THREE_STEPS
from .test_variants import assert_same_weights

pytestmark = pytest.mark.slow

TWO_STAGES: dict[str, Any] = {  # the step of two accumulated batches, as two micro-batches
    'tensor_parallel_size': 1,
    'pipeline_parallel_size': 2,
    'gradient_accumulation_steps': 1
}


@pytest.mark.parametrize('name, settings', [
    ('copies', {
        'modules_to_save': ['embed_tokens', 'norm', 'lm_head'],
        'lora_bias': 'all'
    }),
    ('head', {
        'model': 'tied',
        'target_modules': ['all-linear', 'all-embedding', 'lm_head']
    }),
])
def test_an_adapter_of_two_stages_is_the_plain_one(workshop, name, settings):
    """A failure means that what the last stage trains is not what plain ms-swift saves, or is not saved."""
    settings = {**THREE_STEPS, 'lora_dropout': 0, **settings}
    ours, plain = workshop.train_both(f'stages-{name}', own=TWO_STAGES, **settings)
    assert_same_logs(ours, plain)
    assert_same_weights(ours, plain)
    assert folder_tree(ours) == folder_tree(plain)
    configs = []
    for path in (ours, plain):
        with open(f'{path}/checkpoint-3/adapter_config.json', encoding='utf-8') as file:
            content = json.load(file)
        configs.append({key: sorted(value) if isinstance(value, list) else value for key, value in content.items()})
    assert configs[0] == configs[1]


SETTINGS: dict[str, Any] = {
    **TWO_STAGES, 'dataset': 'train',
    'lora_dropout': 0.3,
    'max_steps': 4,
    'save_strategy': 'steps',
    'save_steps': 2,
    'save_total_limit': 1,
    'modules_to_save': ['lm_head']
}


def on_nodes(workshop, name: str, **changes: Any) -> Job:
    """A training on two nodes; each has the folder of its number."""
    return Job(jobs.train_on_nodes, (workshop.flags(f'{name}-{{node}}', **{**SETTINGS, **changes}), ), 2)


def test_nodes_with_their_own_disks_and_a_hub(workshop):
    """A failure means that a run on two nodes crashes at its first checkpoint, hangs when it uploads, uploads half a
    model, does not say what to copy, or cannot go on from what it said.
    """
    said = launch(on_nodes(workshop, 'nodes', save_total_limit=2, push_to_hub=True, hub_model_id='model'))
    paths = [f"{workshop.output('nodes')}-{node}" for node in (0, 1)]
    told = [line for line in said[0] if 'write to 2 disks' in line]
    assert len(told) == 1 and '--ignore-existing' in told[0]
    uploads = [line for line in said[0] if line.startswith('upload')]
    assert len(uploads) == 3 and not [line for line in said[1] if line.startswith('upload')]
    assert all('adapter_model.safetensors' in line and '_writing' not in line for line in uploads)
    assert filecmp.cmp(*(f'{paths[0]}/{folder}adapter_model.safetensors' for folder in ('', 'checkpoint-4/')), False)
    for node, path in enumerate(paths):
        assert {name
                for name in os.listdir(path)
                if 'checkpoint' in name} == {'checkpoint-2', 'checkpoint-4', 'last-checkpoint'}
        own = set(os.listdir(f'{path}/checkpoint-2'))
        assert {
            f'optimizer_t0_p{node}.pt', f'rng_state_p{node}_d0.pth', 'trainer_state.json', 'scheduler.pt',
            'parallel_layout.json'
        } <= own
        assert ('adapter_model.safetensors' in own) == (node == 0)

    checkpoint = f"{workshop.output('nodes')}-{{node}}/checkpoint-2"
    resume = on_nodes(workshop, 'nodes-again', resume_from_checkpoint=checkpoint)
    ended = run(resume)
    assert ended[1].exit_code and re.search("checkpoint-2' holds no adapter_.*copy", ended[1].output)
    for name in os.listdir(f'{paths[0]}/checkpoint-2'):  # what was said
        if not os.path.exists(f'{paths[1]}/checkpoint-2/{name}'):
            shutil.copy(f'{paths[0]}/checkpoint-2/{name}', f'{paths[1]}/checkpoint-2/{name}')
    launch(resume)
    again = f"{workshop.output('nodes-again')}-0"
    for key in ('loss', 'grad_norm'):
        assert logged(again, key) == logged(paths[0], key)[2:]
    assert filecmp.cmp(*(f'{path}/checkpoint-4/adapter_model.safetensors' for path in (paths[0], again)), False)


def test_each_disk_has_what_its_ranks_resume_from(workshop):
    """A failure means that replicas, or tensor-parallel ranks, on a node without the first of them have no states
    there.
    """
    layouts = {'t2': {'tensor_parallel_size': 2}, 'd2': {}}
    settings: dict[str, Any] = {'max_steps': 1, 'save_strategy': 'steps', 'save_steps': 1}
    launch_all({
        name: Job(jobs.train_on_nodes, (workshop.flags(f'{name}-{{node}}', **settings, **sizes), ), 2)
        for name, sizes in layouts.items()
    })
    for name, states in (('t2', 'optimizer_t{}_p0.pt rng_state_p0_d0.pth'),
                         ('d2', 'optimizer_t0_p0.pt rng_state_p0_d{}.pth')):
        for node in (0, 1):
            directory = f"{workshop.output(name)}-{node}/checkpoint-1"
            found = sorted(file for file in os.listdir(directory) if file.startswith(('optimizer', 'rng_state')))
            assert found == states.format(node).split()
            assert all(os.path.getsize(f'{directory}/{file}') > 1000 for file in found)


def test_an_upload_of_two_tensor_ranks(workshop):
    """A failure means that --push_to_hub hangs at the end of a run on one disk, or uploads half a model."""
    flags = workshop.flags('upload', tensor_parallel_size=2, max_steps=1, push_to_hub=True, hub_model_id='model')
    said = launch(Job(jobs.train_on_nodes, (flags, ), 2))
    (upload, ), others = ([line for line in lines if 'upload' in line] for lines in said)
    assert 'adapter_model.safetensors' in upload and 'README.md' in upload and not others
    assert not [line for line in said[0] if 'disks' in line]


def test_other_balanced_stages_are_refused(workshop):
    """A failure means that moments of stages by hand go to the layers of balanced ones without a word."""
    directory = f"{workshop.output('by-hand')}/checkpoint-2"
    os.makedirs(directory)
    with open(f'{directory}/parallel_layout.json', 'w', encoding='utf-8') as file:
        json.dump({'tensor_parallel_size': 1, 'pipeline_parallel_size': 2, 'pipeline_layers': [1, 4]}, file)
    with open(f'{directory}/trainer_state.json', 'w', encoding='utf-8') as file:
        json.dump({}, file)
    settings = {**TWO_STAGES, 'tuner_type': 'full', 'model': 'deep', 'resume_from_checkpoint': directory}
    ended = run(Job(jobs.run_worker, ('sft', workshop.flags('by-hand', **settings)), 2))
    assert ended[0].exit_code == 2
    assert re.search(r'error: .*--pipeline_layers 1,4, and .*--pipeline_layers 3,2: .*--resume_only_model true',
                     ended[0].output), ended[0].output[-2000:]
