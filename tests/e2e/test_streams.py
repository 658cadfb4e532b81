"""Data without length: the end of a pass in training, and evaluation over replicas.

A failure means that a logged loss, or a step, is no mean over the label tokens that it covers, or that an evaluation
looks at some of the samples only.
"""
import pytest
import torch
import torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from typing import Any, Iterator

from swift_megatron.mesh import ParallelMesh
from . import material
from .harness import Job, launch, launch_all
from .runs import log_lines, logged
from .sequences import train_each

pytestmark = pytest.mark.slow

RELATIVE = 1e-4  # as for all curves: rounding of float32, through Adam
COMMON: dict[str, Any] = dict(
    dataset_shuffle=False,
    train_dataloader_shuffle=False,
    per_device_train_batch_size=1,
    lora_dropout=0,
    adam_epsilon=1e-3,
    learning_rate=1e-2)
STREAM: dict[str, Any] = {**COMMON, 'streaming': True, 'max_steps': 4}
EVALUATED: dict[str, Any] = dict(eval_on_start=True, eval_strategy='steps', eval_steps=4)


@pytest.fixture(scope='module')
def runs(workshop):
    """Streams of 7 samples (two replicas deal out 6 of them), a step of 4; in a pass, 4 and 3 (4 and 2) are left.

    The reference is plain ms-swift on the same samples with a length, which takes a step at the end of a pass. It
    evaluates the samples as a stream of batches of 4, ours in batches of 2 on each of two replicas: 4, 4 and 3.
    """
    seven, six = (
        material.write_rows(str(Path(workshop.folder) / f'first-{n}.jsonl'), material.rows(n, seed=7)) for n in (7, 6))
    # Two files: two shards, which would be dealt to two replicas whole, 8 samples to one and 3 to the other.
    rows = list(material.rows(11, seed=8))
    val = [
        material.write_rows(str(Path(workshop.folder) / f'{name}.jsonl'), part)
        for name, part in (('val-8', iter(rows[:8])), ('val-3', iter(rows[8:])))
    ]

    def plain(name: str, **changes: Any) -> list[str]:
        settings = {**COMMON, 'gradient_accumulation_steps': 4, 'num_train_epochs': 2, **changes}
        return workshop.flags(f'stream-plain-{name}', **settings)

    def ours(name: str, **changes: Any) -> list[str]:
        settings = {**STREAM, 'dataset': seven, 'gradient_accumulation_steps': 4, **changes}
        return workshop.flags(f'stream-{name}', **settings)

    stages = {'pipeline_parallel_size': 2, 'num_micro_batches': 2}
    several = ['--val_dataset', *val]
    evaluated = {**EVALUATED, 'per_device_eval_batch_size': 2}
    launch_all({
        'plain':
        Job(train_each, ('plain', [
            plain('7', dataset=seven),
            plain('6', dataset=six),
            plain(
                'stream', **{
                    **STREAM,
                    **evaluated, 'num_train_epochs': None,
                    'dataset': six,
                    'max_steps': 1,
                    'per_device_eval_batch_size': 4
                }) + several
        ])),
        'one':
        Job(train_each, ('ours', [ours('one')])),
        'two':
        Job(train_each, ('ours', [
            ours('p2', **stages, gradient_accumulation_steps=2),
            ours('d2', **evaluated, gradient_accumulation_steps=2) + several,
        ]), 2),
        'four':
        Job(train_each, ('ours', [ours('p2-d2', **stages, **evaluated, gradient_accumulation_steps=1) + several]), 4),
    })
    return workshop


@pytest.mark.parametrize('name, reference', [('one', '7'), ('p2', '7'), ('d2', '6'), ('p2-d2', '6')])
def test_the_end_of_a_pass_is_a_step_of_its_own(runs, name, reference):
    """A failure means that what is left at the end of a stream goes into the first step of its next pass."""
    ours, plain = runs.output(f'stream-{name}'), runs.output(f'stream-plain-{reference}')
    for value in ('loss', 'grad_norm', 'learning_rate', 'token_acc'):
        assert logged(ours, value) == pytest.approx(logged(plain, value), rel=RELATIVE), value
    assert len(logged(ours, 'loss')) == 4


@pytest.mark.parametrize('name', ['d2', 'p2-d2'])
def test_evaluation_of_a_stream_counts_every_sample_once(runs, name):
    """A failure means that replicas evaluate the same samples, some twice, or wait for each other at the end."""
    ours, plain = (
        next(line for line in log_lines(runs.output(folder)) if 'eval_loss' in line)
        for folder in (f'stream-{name}', 'stream-plain-stream'))
    for value in ('eval_loss', 'eval_token_acc'):
        assert ours[value] == pytest.approx(plain[value], rel=RELATIVE), value
    samples, expected = (line['eval_samples_per_second'] * line['eval_runtime'] for line in (ours, plain))
    assert round(samples) == round(expected) == 11


class Numbers(torch.utils.data.IterableDataset):
    """A stream of samples, each of which is its number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


def joined(rows: list[int]) -> dict[str, torch.Tensor]:
    """One row for all samples, as without padding. (1, N)"""
    row = torch.tensor(rows)[None] + 1
    return {'input_ids': row, 'labels': row}


def dealt(cases: list[tuple[int, bool, bool]]) -> list[tuple]:
    """What a rank gets of each case (samples, whether a stream, whether the last round is dropped), on three grids."""
    from swift_megatron.trainers.evaluation import ReplicaEvaluationLoader
    dist.init_process_group('gloo', timeout=timedelta(seconds=60))
    found = []
    for sizes in ({}, {'tensor_parallel_size': 2}, {'pipeline_parallel_size': 2}):
        mesh = ParallelMesh.create(**sizes)
        for samples, is_stream, drop_last in cases:
            source = Numbers(samples) if is_stream else list(range(samples))
            drop = {} if is_stream else {'drop_last': drop_last}
            loader = torch.utils.data.DataLoader(source, batch_size=2, collate_fn=joined, **drop)
            loader = ReplicaEvaluationLoader(loader, mesh, torch.device('cpu'))
            rounds, ends = [], []
            for batch in loader:
                rounds.append(batch['input_ids'].flatten().tolist())
                ends.append(loader.end_of_dataloader)
            found.append((mesh.data_rank, mesh.data_parallel_size, rounds, ends, loader.remainder, loader.num_samples))
    return found


def test_every_replica_has_its_samples_and_no_other():
    """A failure means that samples are evaluated twice or not at all, which rows without padding would not show."""
    cases = [(n, is_stream, drop_last) for n in (0, 1, 4, 7, 16) for is_stream in (True, False)
             for drop_last in (False, True) if not (is_stream and drop_last)]
    for answer in launch(Job(dealt, (cases, ), 4)):
        for (samples, is_stream, drop_last), found in zip(3 * cases, answer, strict=True):
            rank, d, rounds, ends, remainder, counted = found
            batches = [list(range(samples))[i:i + 2] for i in range(0, samples, 2)]
            expected = [batches[i:i + d] for i in range(0, len(batches), d)]
            if drop_last:
                expected = [dealt for dealt in expected if sum(map(len, dealt)) == 2 * d]
            assert rounds == [[n + 1 for n in dealt[rank]] if rank < len(dealt) else [] for dealt in expected]
            assert remainder == (-1 if is_stream or drop_last else samples % (2 * d))
            assert ends == [not is_stream and i == len(rounds) for i in range(1, len(rounds) + 1)]
            if is_stream:
                assert counted == samples
