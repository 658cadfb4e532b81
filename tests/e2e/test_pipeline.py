"""Pipelines through ms-swift's trainer: logs, files, evaluation, resuming and failures with stages.

A failure means that --pipeline_parallel_size changes what a user sees or keeps.
"""
import os
import pytest
import subprocess
import sys
import time
from safetensors.torch import load_file
from typing import Any

from . import jobs
from .harness import ROOT, Job, launch, launch_all
from .runs import assert_same_logs, folder_tree, log_lines, logged

pytestmark = pytest.mark.slow

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


@pytest.fixture(scope='module')
def plain(workshop):
    launch_all({
        tuner:
        Job(jobs.train,
            ('plain', 'sft',
             workshop.flags(f'pp-plain-{tuner}', **SETTINGS, tuner_type=tuner, gradient_accumulation_steps=4)))
        for tuner in ('lora', 'full')
    })
    return {tuner: workshop.output(f'pp-plain-{tuner}') for tuner in ('lora', 'full')}


@pytest.mark.parametrize('tuner, grid', [('lora', 'p2'), ('lora', 't2-p2'), ('full', 'p2'), ('full', 'p3')])
def test_log_and_files_are_the_plain_ones(workshop, plain, tuner, grid):
    """A failure means another curve, another evaluation, or other checkpoint files than without stages."""
    processes, sizes = GRIDS[grid]
    name = f'pp-{tuner}-{grid}'
    settings = in_micro_batches({**SETTINGS, **sizes, 'tuner_type': tuner}, 4)
    launch(Job(jobs.train, ('ours', 'sft', workshop.flags(name, **settings)), processes))
    ours = workshop.output(name)
    assert_same_logs(ours, plain[tuner])
    assert folder_tree(ours) == folder_tree(plain[tuner])
    file = 'adapter_model.safetensors' if tuner == 'lora' else 'model.safetensors'
    saved, expected = (load_file(os.path.join(path, 'checkpoint-14', file)) for path in (ours, plain[tuner]))
    assert set(saved) == set(expected)
    worst = max(float((saved[k] - expected[k]).abs().max() / expected[k].abs().max().clamp(min=1e-6)) for k in expected)
    assert worst < 2e-3, worst  # 14 steps of Adam, whose steps for tiny gradients amplify rounding


def test_small_data_and_interleaving(workshop):
    """A failure means that four samples in micro-batches of one, fewer than a step takes, hang or count wrongly."""
    settings: dict[str, Any] = dict(
        model='deep', dataset='ragged', max_steps=4, lora_dropout=0, per_device_train_batch_size=1)
    launch_all({
        'plain':
        Job(jobs.train, ('plain', 'sft', workshop.flags('pp-few-plain', **settings, gradient_accumulation_steps=6))),
        'ours':
        Job(jobs.train, ('ours', 'sft',
                         workshop.flags(
                             'pp-few',
                             **in_micro_batches(settings, 6),
                             pipeline_parallel_size=2,
                             virtual_pipeline_size=2,
                             pipeline_schedule='interleaved_1f1b',
                             gradient_checkpointing=True)), 2),
    })
    assert_same_logs(workshop.output('pp-few'), workshop.output('pp-few-plain'))


def test_replicas_of_a_pipeline(workshop):
    """A failure means that replicas see the same samples, or that losses and norms are counted by processes."""
    settings: dict[str, Any] = dict(
        model='tied', max_steps=6, lora_dropout=0, train_dataloader_shuffle=False, dataset='train')
    launch_all({
        'plain':
        Job(jobs.train,
            ('plain', 'sft',
             workshop.flags('pp-d2-plain', **settings, per_device_train_batch_size=2, gradient_accumulation_steps=2))),
        'ours':
        Job(jobs.train, ('ours', 'sft',
                         workshop.flags(
                             'pp-d2',
                             **in_micro_batches({
                                 **settings, 'per_device_train_batch_size': 1
                             }, 2),
                             pipeline_parallel_size=2)), 4),
    })
    # Batches of two samples dealt to two replicas hold the same four samples a step.
    ours, expected = (logged(workshop.output(name), 'loss') for name in ('pp-d2', 'pp-d2-plain'))
    assert ours == pytest.approx(expected, rel=1e-4)


FAILING = """
from swift.callbacks import TrainerCallback, callbacks_map
import os


class Failing(TrainerCallback):

    def __init__(self, args, trainer):
        super().__init__(args, trainer)

    def on_substep_end(self, args, state, control, **kwargs):
        if os.environ['RANK'] == '3':
            raise RuntimeError('injected on the last stage')


callbacks_map['failing'] = Failing
"""


def test_a_failing_stage_ends_the_run(workshop, tmp_path):
    """A failure means that a user whose run breaks on one rank waits for a time-out, or reads another rank's error."""
    plugin = tmp_path / 'failing.py'
    plugin.write_text(FAILING)
    flags = workshop.flags(
        'pp-failing',
        model='tied',
        max_steps=50,
        num_micro_batches=2,
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        callbacks='failing',
        external_plugins=str(plugin))
    environment = {
        **os.environ, 'OMP_NUM_THREADS': '1',
        'HF_HUB_OFFLINE': '1',
        'GLOO_SOCKET_IFNAME': 'lo',
        'PYTHONPATH': str(ROOT)
    }
    start = time.time()
    process = subprocess.Popen([sys.executable, '-m', 'swift_megatron', 'sft', *flags],
                               stderr=subprocess.STDOUT,
                               stdout=subprocess.PIPE,
                               text=True,
                               env=environment)
    output, seen = [], None
    for line in process.stdout:
        output.append(line)
        if seen is None and 'injected on the last stage' in line:
            seen = time.time()
    code = process.wait()
    text = ''.join(output)
    assert code not in (0, None), text[-3000:]
    assert seen is not None and time.time() - seen < 30, text[-3000:]
    assert text.index('injected on the last stage') < text.find('Connection closed') or 'Connection closed' not in text
    assert 'rank 3 failed first' in text and time.time() - start < 120


def test_bubble_and_layout_are_told(workshop, plain):
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
