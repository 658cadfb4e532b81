"""What all stages of a pipeline have to do alike: ties that are frozen by name, and steps that are left out.

A failure means that stages wait for each other for ever, or that their weights no longer belong to one model.
"""
import math
import pytest
from typing import Any

from .harness import Job, launch, launch_all
from .runs import assert_same_logs, logged
from .sequences import train_broken_off, train_each, train_scaled

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = dict(
    model='tied', max_steps=3, lora_dropout=0, adam_epsilon=1e-3, learning_rate=1e-2, tuner_type='full')
STAGES: dict[str, Any] = dict(pipeline_parallel_size=2, num_micro_batches=2, gradient_accumulation_steps=1)

# In plain ms-swift the tied parameter has the embedding's name alone: that of the head neither freezes nor trains it.
TIES: dict[str, dict[str, Any]] = {
    'embedding frozen': {
        'freeze_parameters': 'model.embed_tokens'
    },
    'head frozen': {
        'freeze_parameters': ['lm_head', 'model.layers.0']
    },
    'embedding frozen by pattern': {
        'freeze_parameters_regex': 'embed|layers.1'
    },
    'all but the head frozen': {
        'freeze_parameters': 'model',
        'trainable_parameters': ['lm_head', 'model.layers.2']
    },
    'all but the embedding frozen': {
        'freeze_parameters_regex': '.*',
        'trainable_parameters_regex': 'embed_tokens|layers.0'
    },
    'copy of the embedding': {
        'tuner_type': 'lora',
        'modules_to_save': 'embed_tokens'
    },
    'copy of the head': {
        'tuner_type': 'lora',
        'modules_to_save': 'lm_head'
    },
}


@pytest.fixture(scope='module')
def ties(workshop):
    """All of TIES in the processes of one launch each: plain, two stages, two stages of two tensor ranks."""

    def flags(program: str, sizes: dict[str, Any]) -> list[list[str]]:
        return [workshop.flags(f'{program}-{name}', **{**SETTINGS, **TIES[name], **sizes}) for name in TIES]

    launch_all({
        'plain': Job(train_each, ('plain', flags('tie-plain', {}))),
        'p2': Job(train_each, ('ours', flags('tie-p2', STAGES)), 2),
        't2-p2': Job(train_each, ('ours', flags('tie-t2-p2', {
            **STAGES, 'tensor_parallel_size': 2
        })[:2]), 4),
    })
    return workshop


@pytest.mark.parametrize('grid, name',
                         [*(('p2', name) for name in TIES), *(('t2-p2', name) for name in list(TIES)[:2])])
def test_a_tie_is_trained_or_frozen_at_both_ends(ties, grid, name):
    """A failure means that one end of a tie is trained alone, and the other waits for it or goes another way."""
    assert_same_logs(ties.output(f'tie-{grid}-{name}'), ties.output(f'tie-plain-{name}'))


# The default optimizer looks at the overflow itself, and accelerate then takes a step for taken that was left out.
SCALED: dict[str, Any] = {
    **SETTINGS, 'model': 'untied',
    'tuner_type': 'lora',
    'fp16': True,
    'max_steps': 4,
    'optim': 'adamw_torch'
}
SKIPPED = (False, True, False, True)
HALVED_TWICE = 256.
FROZEN: dict[str, Any] = {**SCALED, 'target_regex': r'.*layers\.1\..*_proj'}  # nothing is trained on the first stage


@pytest.fixture(scope='module')
def scaled(workshop):
    """Folders by name, and the scales at the end by launch, rank and training."""
    flags = workshop.flags
    scales = launch_all({
        'plain':
        Job(train_scaled, ('plain', [flags('overflow-plain', **SCALED),
                                     flags('overflow-plain-frozen', **FROZEN)])),
        'two':
        Job(train_scaled, ('ours', [
            flags('overflow-p2', **{
                **SCALED,
                **STAGES
            }),
            flags('overflow-p2-frozen', **{
                **FROZEN,
                **STAGES
            }),
            flags('overflow-t2', **SCALED, tensor_parallel_size=2)
        ]), 2),
        'four':
        Job(train_scaled, ('ours', [
            flags('overflow-t2-p2-frozen', **{
                **FROZEN,
                **STAGES
            }, tensor_parallel_size=2),
            flags('overflow-p2-d2', **{
                **SCALED,
                **STAGES, 'per_device_train_batch_size': 1
            })
        ]), 4)
    })
    return workshop, scales


def test_scales_stay_in_step(scaled):
    """A failure means that a rank lowers its scale when others do not: its gradients are another's times a power of 2.
    """
    for scales in scaled[1].values():
        assert all(scale == HALVED_TWICE for of_rank in scales for scale in of_rank)


@pytest.mark.parametrize('name', ['p2', 'p2-frozen', 't2', 't2-p2-frozen'])
def test_an_overflow_is_one_on_all_ranks(scaled, name):
    """A failure means that in float16 a stage cannot run, or takes a step that the others leave out."""
    workshop, _ = scaled
    ours = workshop.output(f'overflow-{name}')
    plain = workshop.output(f"overflow-plain{'-frozen' if 'frozen' in name else ''}")
    norms, expected = logged(ours, 'grad_norm'), logged(plain, 'grad_norm')
    assert tuple(not math.isfinite(norm) for norm in norms) == SKIPPED
    assert norms[::2] == pytest.approx(expected[::2], rel=1e-4)
    for value in ('loss', 'learning_rate'):
        assert logged(ours, value) == pytest.approx(logged(plain, value), rel=1e-4), value
    rates = logged(ours, 'learning_rate')
    assert rates[0] == rates[1] != rates[2] == rates[3]


def test_nothing_is_left_of_a_step_that_was_broken_off(workshop):
    """A failure means that micro-batches which waited when a callback stopped the training go into the next one."""
    settings = {
        **SETTINGS,
        **STAGES, 'num_micro_batches': 4,
        'max_steps': 2,
        'learning_rate': 0.,
        'train_dataloader_shuffle': False
    }
    for rank, (broken,
               again) in enumerate(launch(Job(train_broken_off, (workshop.flags('broken-off', **settings), 3 + 2), 2))):
        assert len(broken) == 1 and len(again) == 2, rank
        assert again[0] == broken[0]
