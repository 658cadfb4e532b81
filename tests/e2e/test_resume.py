"""Saving and resuming: an interrupted run that goes on is the uninterrupted run.

A failure means that a user whose job was stopped gets another model, loses a checkpoint, or goes on with a wrong state.
"""
import filecmp
import os
import pytest
import re
from typing import Any

from . import jobs
from .conftest import Training
from .harness import Job, launch, launch_all, run
from .runs import assert_same_logs, log_lines, logged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for the runs of many

SETTINGS: dict[str, Any] = dict(
    max_steps=6, save_strategy='steps', save_steps=3, dataset='ragged', gradient_accumulation_steps=1)

LAYOUTS = {  # processes, settings
    'lora t2': (2, {'tensor_parallel_size': 2}),
    'full t2 p2': (4, {
        'tensor_parallel_size': 2,
        'pipeline_parallel_size': 2,
        'tuner_type': 'full',
        'model': 'tied'
    }),
    'lora d2': (2, {'per_device_train_batch_size': 1}),
    'stream t2': (2, {'tensor_parallel_size': 2, 'streaming': True, 'dataset': 'train'}),
    # Every stage of every replica draws masks of its own, in the middle of an epoch.
    'lora p2 d2': (4, {
        'pipeline_parallel_size': 2,
        'per_device_train_batch_size': 1,
        'dataset': 'train',
        'lora_dropout': 0.3
    }),
    'lora t2 p2': (4, {
        'tensor_parallel_size': 2,
        'pipeline_parallel_size': 2,
        'dataset': 'train',
        'lora_dropout': 0.3,
        'lora_bias': 'all',
        'modules_to_save': ['embed_tokens', 'norm', 'lm_head']
    }),
}


@pytest.fixture(scope='module')
def outcomes(workshop) -> dict[str, str]:
    """Six steps over three shuffled epochs with dropout, at once and in two runs. The second ones go on in processes
    that have not seen the first ones.

    Returns:
        Name of a layout -> '' or how one of its runs failed.
    """
    settings = {name: (processes, {**SETTINGS, **own}) for name, (processes, own) in LAYOUTS.items()}
    straight = workshop.train_in_turn({
        _folder(name, 'straight'): Training(own, processes)
        for name, (processes, own) in settings.items()
    })
    again = workshop.train_in_turn({
        _folder(name, 'resumed'):
        Training({
            **own, 'resume_from_checkpoint': f"{workshop.output(_folder(name, 'straight'))}/checkpoint-3"
        }, processes)
        for name, (processes, own) in settings.items()
    })
    return {name: straight[_folder(name, 'straight')] or again[_folder(name, 'resumed')] for name in LAYOUTS}


def _folder(layout: str, kind: str) -> str:
    return f'{layout}-{kind}'.replace(' ', '-')


@pytest.fixture(params=LAYOUTS)
def resumed(request, workshop, outcomes):
    """The output folders of the straight run and of the resumed one."""
    assert not outcomes[request.param], outcomes[request.param]
    return tuple(workshop.output(_folder(request.param, kind)) for kind in ('straight', 'resumed'))


def test_resumed_run_logs_the_same(resumed):
    """A failure means that data order, dropout masks, optimizer or scheduler do not go on where they stopped."""
    straight, again = resumed
    assert len(logged(straight, 'loss')) == 6
    for key in ('loss', 'grad_norm', 'learning_rate', 'token_acc', 'epoch'):
        assert logged(again, key) == logged(straight, key)[3:], key


def test_resumed_run_has_the_same_weights(resumed):
    """A failure means that the last checkpoint differs in some bit: something was not stored or not restored."""
    straight, again = (f'{directory}/checkpoint-6' for directory in resumed)
    files = sorted(name for name in os.listdir(straight) if name.endswith(('.safetensors', '.pth')))
    assert files == sorted(name for name in os.listdir(again) if name.endswith(('.safetensors', '.pth')))
    assert filecmp.cmpfiles(straight, again, files, shallow=False) == (files, [], [])


def test_nothing_half_written_stays(resumed):
    """A failure means that a folder that is no complete checkpoint lies beside the others."""
    assert _folders(resumed[0]) == {'checkpoint-3', 'checkpoint-6', 'last-checkpoint'}
    assert os.path.realpath(f'{resumed[0]}/last-checkpoint').endswith('checkpoint-6')


def _folders(directory: str) -> set[str]:
    return {name for name in os.listdir(directory) if os.path.isdir(os.path.join(directory, name))}


def test_a_save_that_fails_leaves_the_last_checkpoint(workshop):
    """A failure means that a full disk costs a user the last good checkpoint, or leaves one that only looks
    complete.
    """
    settings = {**SETTINGS, 'max_steps': 3, 'save_steps': 1, 'tensor_parallel_size': 2}
    launch(Job(jobs.train, ('ours', 'sft', workshop.flags('save-right', **settings)), 2))
    ended = run(Job(jobs.train_until_save_fails, (2, workshop.flags('save-fails', **settings)), 2))
    assert 'OSError: no space left on device' in ended[0].output
    output = workshop.output('save-fails')
    complete = {name for name in _folders(output) if re.fullmatch(r'checkpoint-\d+', name)}
    assert complete == {'checkpoint-1'} and os.path.realpath(f'{output}/last-checkpoint').endswith('checkpoint-1')
    again = {**settings, 'resume_from_checkpoint': f'{output}/checkpoint-1'}
    launch(Job(jobs.train, ('ours', 'sft', workshop.flags('save-fails', **again)), 2))
    assert _folders(output) == {'checkpoint-1', 'checkpoint-2', 'checkpoint-3', 'last-checkpoint'}
    assert filecmp.cmp(
        f'{output}/checkpoint-3/adapter_model.safetensors',
        f"{workshop.output('save-right')}/checkpoint-3/adapter_model.safetensors",
        shallow=False)


def test_more_replicas_can_go_on(workshop):
    """A failure means that a user who gets more processes cannot use them for the rest of the run."""
    settings = {**SETTINGS, 'tensor_parallel_size': 2, 'lora_dropout': 0}
    launch(Job(jobs.train, ('ours', 'sft', workshop.flags('one-replica', **settings)), 2))
    again = {
        **settings, 'per_device_train_batch_size': 1,
        'resume_from_checkpoint': f"{workshop.output('one-replica')}/checkpoint-3"
    }
    said, *_ = launch(Job(jobs.train_and_capture, (workshop.flags('two-replicas', **again), ), 4))
    assert said.count('2 of 4 ranks find no random state') == 1
    for key in ('loss', 'grad_norm', 'learning_rate'):
        expected = logged(workshop.output('one-replica'), key)[3:]
        assert logged(workshop.output('two-replicas'), key) == pytest.approx(expected, rel=1e-4)


# Two good steps and then ones that are far too long: the best checkpoint is not the last one, and the run stops early.
SELECTION: dict[str, Any] = dict(
    max_steps=8,
    learning_rate=1e-2,
    lr_scheduler_type='cosine',
    val_dataset='val',
    eval_strategy='steps',
    eval_steps=1,
    save_strategy='steps',
    save_steps=1,
    save_total_limit=2,
    load_best_model_at_end=True,
    early_stop_interval=2,
    lora_dropout=0,
    gradient_accumulation_steps=1,
    dataset='drill')


@pytest.mark.parametrize('tuner_type', ['lora', 'full'])
def test_best_checkpoint_is_chosen_kept_and_loaded(workshop, tuner_type):
    """A failure means that another checkpoint is kept, or that training ends at another step or with other weights."""
    settings = {**SELECTION, 'tuner_type': tuner_type}
    ours, plain = f'best-{tuner_type}-ours', f'best-{tuner_type}-plain'
    results = launch_all({
        'plain':
        Job(jobs.train_and_probe, ('plain', workshop.flags(plain, **settings))),
        'ours':
        Job(jobs.train_and_probe, ('ours', workshop.flags(ours, **settings, tensor_parallel_size=2)), 2),
    })
    ours, plain = workshop.output(ours), workshop.output(plain)
    assert_same_logs(ours, plain, relative=1e-3)
    assert _folders(ours) == _folders(plain)
    best, expected = (os.path.basename(log_lines(path)[-1]['best_model_checkpoint']) for path in (ours, plain))
    assert best == expected
    assert best != max(_folders(plain) - {'last-checkpoint'}), 'this test shows nothing'
    assert log_lines(plain)[-1]['global_step'] < SELECTION['max_steps'], 'this test shows nothing'
    assert results['ours'][0][0][-1] == pytest.approx(results['plain'][0][0][-1], rel=1e-3, abs=1e-3)


@pytest.fixture(scope='module')
def checkpoint(workshop):
    """checkpoint-2 of both programs: two of four steps."""
    settings = {**SETTINGS, 'max_steps': 4, 'save_steps': 2, 'lora_dropout': 0}
    ours, plain = workshop.train_both('source', **settings)
    return settings, f'{ours}/checkpoint-2', f'{plain}/checkpoint-2'


def test_only_the_model_can_be_resumed(workshop, checkpoint):
    """A failure means that --resume_only_model does not do what plain ms-swift does, or not from another layout."""
    settings, ours, plain = checkpoint
    settings = {**settings, 'resume_only_model': True}
    launch_all({
        'plain':
        Job(jobs.train, ('plain', 'sft', workshop.flags('only-plain', **settings, resume_from_checkpoint=plain))),
        't1':
        Job(jobs.train, ('ours', 'sft', workshop.flags('only-t1', **settings, resume_from_checkpoint=ours))),
        't2':
        Job(jobs.train,
            ('ours', 'sft', workshop.flags('only-t2', **settings, resume_from_checkpoint=plain,
                                           tensor_parallel_size=2)), 2),
    })
    for name in ('only-t1', 'only-t2'):
        assert_same_logs(workshop.output(name), workshop.output('only-plain'))


def test_another_layout_is_refused(workshop, checkpoint):
    """A failure means that states of other slices are taken for this rank's, or that nobody says what to do."""
    settings, ours, plain = checkpoint
    flags = workshop.flags('refused', **settings, resume_from_checkpoint=ours)
    ended, = run(Job(jobs.run_worker, ('sft', flags)))
    assert ended.exit_code == 2
    assert re.search(
        r'error: .*checkpoint-2.* written with --tensor_parallel_size 2 .*--tensor_parallel_size 1 .*'
        r'--resume_only_model true', ended.output)
    flags = workshop.flags('refused', **settings, resume_from_checkpoint=plain)
    ended, = run(Job(jobs.run_worker, ('sft', flags)))
    assert ended.exit_code == 2
    assert re.search(r'error: .*no optimizer states of swift-megatron.*--resume_only_model true', ended.output)
