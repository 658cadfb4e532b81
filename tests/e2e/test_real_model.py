"""The real model, SmolLM2-135M-Instruct: 20 steps over ranks and stages, dense and 4-bit, have the curve of plain
`swift sft`.

Its 9 query and 3 key/value heads divide no even number of ranks, its embeddings are tied, its widths 576 and 1536 make
uneven cuts of whole 4-bit blocks. `scripts/test.sh` makes the model and the data.

Two programs cannot agree here as they do on small vocabularies: over 49152 logits torch's log-softmax on CPUs, which
plain ms-swift uses, is off by 5e-7 of the gradient, always to one side (vocab_parallel_cross_entropy by 2e-8). The
learning rate is ms-swift's default for LoRA, with which training amplifies that little.

A failure means that real fine-tuning with this package is not what it claims to be.
"""
import os
import pytest
from typing import Any

from . import jobs
from .harness import Job, launch, launch_all
from .runs import assert_same_logs, flags, logged

MODEL, DATA = os.environ.get('SWIFT_MEGATRON_TEST_MODEL'), os.environ.get('SWIFT_MEGATRON_TEST_DATA')
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MODEL and DATA),
        reason='scripts/test.sh makes the real model and data and names them in '
        'SWIFT_MEGATRON_TEST_MODEL and SWIFT_MEGATRON_TEST_DATA'),
]
STEPS = 20
FOUR_BIT: dict[str, Any] = dict(quant_method='bnb', quant_bits=4, bnb_4bit_use_double_quant=False)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    't2': (2, {
        'tensor_parallel_size': 2
    }),
    'p2': (2, {
        'pipeline_parallel_size': 2,
        'num_micro_batches': 2,
        'gradient_accumulation_steps': 1
    }),
    't2-p2': (4, {
        'tensor_parallel_size': 2,
        'pipeline_parallel_size': 2,
        'num_micro_batches': 2,
        'gradient_accumulation_steps': 1
    }),
}


def command(output: str, **changes: Any) -> list[str]:
    settings = dict(
        model=MODEL,
        dataset=f'{DATA}/sft_chatterbot_en.jsonl',
        output_dir=output,
        max_length=32,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=1e-4,
        lora_dropout=0,
        gradient_checkpointing=False)
    return flags(**{**settings, **changes})


@pytest.fixture(scope='module')
def curves(tmp_path_factory):
    """All runs; output folders by name."""
    folder = tmp_path_factory.mktemp('real')
    variants = {'dense': {}, '4-bit': FOUR_BIT}
    launch_all({
        f'plain-{kind}':
        Job(jobs.train, ('plain', 'sft', command(str(folder / f'plain-{kind}'), **changes)), 1, 240)
        for kind, changes in variants.items()
    })
    for kind, changes in variants.items():
        for name, (processes, sizes) in LAYOUTS.items():
            argv = command(str(folder / f'{name}-{kind}'), **{**changes, **sizes})
            launch(Job(jobs.train, ('ours', 'sft', argv), processes, 240))
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize('kind', ['dense', '4-bit'])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_curve_is_the_plain_one(curves, layout, kind):
    """Loss, gradient norm and accuracy of every step, to 1e-4."""
    ours, plain = str(curves / f'{layout}-{kind}'), str(curves / f'plain-{kind}')
    assert len(logged(ours, 'grad_norm')) == STEPS
    assert_same_logs(ours, plain)
