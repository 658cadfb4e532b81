"""Pipelines through ms-swift's trainer: logs, files, evaluation, resuming and failures with stages.

A failure means that --pipeline_parallel_size changes what a user sees or keeps.
"""
import os
import pytest
from safetensors.torch import load_file
from typing import Any, Callable

from . import jobs
from .conftest import Training
from .harness import Job, launch
from .runs import assert_same_logs, folder_tree, log_lines, logged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for the runs of many

# 46 samples in micro-batches of 2: an epoch ends with less than a step. 11 samples of evaluation in batches of 4.
SETTINGS: dict[str, Any] = dict(
    model='tied',
    max_steps=14,
    val_dataset='val',
    eval_strategy='steps',
    eval_steps=7,
    save_strategy='steps',
    save_steps=7,
    per_device_eval_batch_size=4,
    lora_dropout=0)
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    'p2': (2, {
        'pipeline_parallel_size': 2
    }),
    't2-p2': (4, {
        'pipeline_parallel_size': 2,
        'tensor_parallel_size': 2
    }),
    'p3': (3, {
        'pipeline_parallel_size': 3,
        'pipeline_schedule': 'gpipe'
    }),
}


def in_micro_batches(settings: dict[str, Any], m: int) -> dict[str, Any]:
    """The same step, cut into m micro-batches instead of accumulated."""
    return {**settings, 'num_micro_batches': m, 'gradient_accumulation_steps': 1}


COMPARED = [('lora', 'p2'), ('lora', 't2-p2'), ('full', 'p2'), ('full', 'p3')]
FEW: dict[str, Any] = dict(model='deep', dataset='ragged', max_steps=4, lora_dropout=0, per_device_train_batch_size=1)
# Batches of two samples dealt to two replicas hold the same four samples a step.
DEALT: dict[str, Any] = dict(model='tied', max_steps=6, lora_dropout=0, train_dataloader_shuffle=False, dataset='train')
RUNS: dict[str, Training] = {
    **{
        f'pp-plain-{tuner}': Training(dict(SETTINGS, tuner_type=tuner, gradient_accumulation_steps=4), program='plain')
        for tuner in ('lora', 'full')
    },
    **{
        f'pp-{tuner}-{grid}':
        Training(in_micro_batches({
            **SETTINGS,
            **GRIDS[grid][1], 'tuner_type': tuner
        }, 4), GRIDS[grid][0])
        for tuner, grid in COMPARED
    },
    'pp-few-plain':
    Training({
        **FEW, 'gradient_accumulation_steps': 6
    }, program='plain'),
    'pp-few':
    Training(
        dict(
            **in_micro_batches(FEW, 6),
            pipeline_parallel_size=2,
            virtual_pipeline_size=2,
            pipeline_schedule='interleaved_1f1b',
            gradient_checkpointing=True), 2),
    'pp-d2-plain':
    Training({
        **DEALT, 'per_device_train_batch_size': 2,
        'gradient_accumulation_steps': 2
    }, program='plain'),
    'pp-d2':
    Training(in_micro_batches({
        **DEALT, 'per_device_train_batch_size': 1,
        'pipeline_parallel_size': 2
    }, 2), 4),
}


@pytest.fixture(scope='module')
def runs(workshop) -> Callable[[str], str]:
    """The output folder of a training of RUNS; fails if that training failed."""
    outcomes = workshop.train_in_turn(RUNS)

    def folder(name: str) -> str:
        assert not outcomes[name], outcomes[name]
        return workshop.output(name)

    return folder


@pytest.mark.parametrize('tuner, grid', COMPARED)
def test_log_and_files_are_the_plain_ones(runs, tuner, grid):
    """A failure means another curve, another evaluation, or other checkpoint files than without stages."""
    ours, plain = runs(f'pp-{tuner}-{grid}'), runs(f'pp-plain-{tuner}')
    assert_same_logs(ours, plain)
    assert folder_tree(ours) == folder_tree(plain)
    file = 'adapter_model.safetensors' if tuner == 'lora' else 'model.safetensors'
    saved, expected = (load_file(os.path.join(path, 'checkpoint-14', file)) for path in (ours, plain))
    assert set(saved) == set(expected)
    worst = max(float((saved[k] - expected[k]).abs().max() / expected[k].abs().max().clamp(min=1e-6)) for k in expected)
    assert worst < 2e-3, worst  # 14 steps of Adam, whose steps for tiny gradients amplify rounding


def test_resumed_run_is_the_uninterrupted_one(workshop, runs):
    """A failure means that a stopped pipeline run goes on with other data, optimizer states or weights."""
    straight = runs('pp-lora-p2')
    again = {**RUNS['pp-lora-p2'].settings, 'resume_from_checkpoint': f'{straight}/checkpoint-7'}
    launch(Job(jobs.train, ('ours', 'sft', workshop.flags('pp-resumed', **again)), 2))
    resumed = workshop.output('pp-resumed')
    assert logged(resumed, 'grad_norm')[:7] == logged(straight, 'grad_norm')[7:]
    a, b = (load_file(f'{path}/checkpoint-14/adapter_model.safetensors') for path in (straight, resumed))
    assert all((a[k] == b[k]).all() for k in a)


def test_small_data_and_interleaving(runs):
    """A failure means that four samples in micro-batches of one, fewer than a step takes, hang or count wrongly."""
    assert_same_logs(runs('pp-few'), runs('pp-few-plain'))


def test_replicas_of_a_pipeline(runs):
    """A failure means that replicas see the same samples, or that losses and norms are counted by processes."""
    assert logged(runs('pp-d2'), 'loss') == pytest.approx(logged(runs('pp-d2-plain'), 'loss'), rel=1e-4)


def test_bubble_and_layout_are_told(workshop):
    """A failure means that nobody tells the user what lies where and how much of a step is idle."""
    settings = in_micro_batches(
        {
            **SETTINGS, 'pipeline_parallel_size': 2,
            'max_steps': 1,
            'save_strategy': 'no',
            'eval_strategy': 'no',
            'val_dataset': None
        }, 1)
    output = launch(Job(jobs.train_and_capture, (workshop.flags('pp-told', **settings), ), 2))[0]
    for words in ('processes: t=1 x p=2 x d=1; micro-batches m=1', 'stage 0: layers', 'expected pipeline bubble: 50 %',
                  'num_micro_batches=1 is less than pipeline_parallel_size=2', '--num_micro_batches 4',
                  'memory, largest rank:'):
        assert words in output, words
    assert [line for line in log_lines(workshop.output('pp-told')) if 'loss' in line]
