"""QLoRA through the commands: curves of plain `swift sft` with bitsandbytes, and merged checkpoints.

A failure means that a user with several small cards gets another model than one with a large card.
"""
import os
import pytest
from typing import Any, Callable

from . import jobs
from .conftest import Training
from .harness import Job, launch
from .runs import assert_same_logs, logged

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = dict(
    model='wide',
    max_steps=20,
    lora_dropout=0,
    gradient_accumulation_steps=2,
    save_strategy='steps',
    save_steps=20,
    quant_method='bnb',
    quant_bits=4,
    bnb_4bit_use_double_quant=False)


@pytest.fixture(scope='module')
def runs(workshop) -> Callable[[str], str]:
    """20 steps on a 4-bit base: plain, two tensor ranks, two stages, and both; the output folder of one by its name."""
    pipeline = {**SETTINGS, 'num_micro_batches': 2, 'gradient_accumulation_steps': 1, 'pipeline_parallel_size': 2}
    outcomes = workshop.train_in_turn({
        'q-plain': Training(SETTINGS, program='plain'),
        'q-t2': Training({
            **SETTINGS, 'tensor_parallel_size': 2
        }, 2),
        'q-p2': Training(pipeline, 2),
        'q-t2-p2': Training({
            **pipeline, 'tensor_parallel_size': 2
        }, 4),
    })

    def folder(name: str) -> str:
        assert not outcomes[name], outcomes[name]
        return workshop.output(name)

    return folder


@pytest.mark.parametrize('name', ['q-t2', 'q-p2', 'q-t2-p2'])
def test_curve_is_the_plain_one(runs, name):
    """A failure means other codes, other products or other gradients than bitsandbytes' on one card."""
    assert_same_logs(runs(name), runs('q-plain'))
    assert logged(runs(name), 'loss')[-1] < logged(runs(name), 'loss')[0] - 0.2


@pytest.mark.parametrize('into', ['checkpoint', 'dequantized'])
def test_merged_checkpoint_is_the_trained_model(workshop, runs, into):
    """A failure means that the merged folder does not load in transformers, or is not base plus adapter."""
    adapter, output = f'{runs("q-t2-p2")}/checkpoint-20', workshop.output(f'merged-{into}')
    merged, expected = launch(Job(jobs.merge_and_probe, (workshop['wide'], adapter, output, into)))[0]
    assert merged == pytest.approx(expected, rel=1e-4, abs=1e-4)
    message, again = launch(Job(jobs.merge_twice, (workshop['wide'], adapter, output)))[0]
    assert 'merged already' in message and 'merged in already' in again
    beside = os.listdir(os.path.dirname(output))
    assert os.path.basename(output) in beside and not any(name.startswith('_') for name in beside)
