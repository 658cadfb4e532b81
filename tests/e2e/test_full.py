"""Full-parameter tuning: the curve of plain `swift sft`, and a checkpoint that transformers loads.

A failure means that the model in the checkpoint is not the one that was trained, or not the plain run's.
"""
import json
import os
import pytest
from safetensors import safe_open
from typing import Any, Iterator

from tests.harness import launch as launch_without_swift
from . import jobs
from .harness import Job, launch_all
from .runs import assert_same_logs

pytestmark = pytest.mark.slow

# Adam's step is lr m / (sqrt(v) + eps): with this eps, rounding of a gradient near zero stays rounding of the weight.
SETTINGS: dict[str, Any] = dict(
    tuner_type='full',
    max_steps=6,
    adam_epsilon=1e-3,
    learning_rate=1e-2,
    val_dataset='val',
    eval_strategy='steps',
    eval_steps=3,
    save_strategy='steps',
    save_steps=6)


@pytest.fixture(scope='module', params=['tied', 'untied'])
def full(request, workshop):
    """The model's name, and the checkpoints of both programs; the tied model in files of at most 200 KB."""
    model = request.param
    settings = {**SETTINGS, 'model': model}
    own = {'tensor_parallel_size': 2, 'max_shard_size': '200KB' if model == 'tied' else None}
    results = launch_all({
        'plain':
        Job(jobs.train_and_probe, ('plain', workshop.flags(f'full-{model}-plain', **settings))),
        'ours':
        Job(jobs.train_and_probe, ('ours', workshop.flags(f'full-{model}-ours', **settings, **own)), 2),
    })
    return model, workshop.output(f'full-{model}-ours'), workshop.output(f'full-{model}-plain'), results


def _weights(directory: str) -> Iterator[tuple[str, Any]]:
    for name in sorted(os.listdir(directory)):
        if name.endswith('.safetensors'):
            with safe_open(os.path.join(directory, name), framework='pt') as file:
                assert file.metadata() == {'format': 'pt'}
                for key in file.keys():
                    yield key, file.get_tensor(key)


def test_log_is_the_plain_one(full):
    """A failure means another curve than plain ms-swift's when all weights are trained."""
    _, ours, plain, _ = full
    assert_same_logs(ours, plain)


def test_weights_are_the_plain_ones(full):
    """A failure means that some weight was trained, cut or put together wrongly, or is in the files twice."""
    _, ours, plain, _ = full
    found = list(_weights(f'{ours}/checkpoint-6'))
    expected = dict(_weights(f'{plain}/checkpoint-6'))
    assert sorted(name for name, _ in found) == sorted(expected)
    for name, weight in found:
        assert weight.dtype == expected[name].dtype and weight.shape == expected[name].shape, name
        assert (weight - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name


def test_index_names_every_weight(full):
    """A failure means that transformers or vLLM cannot find a weight of a checkpoint in several files."""
    model, ours, _, _ = full
    files = [name for name in os.listdir(f'{ours}/checkpoint-6') if name.endswith('.safetensors')]
    if model == 'untied':
        assert files == ['model.safetensors']
        return
    with open(f'{ours}/checkpoint-6/model.safetensors.index.json', encoding='utf-8') as file:
        index = json.load(file)
    assert len(files) > 2 and set(index['weight_map'].values()) == set(files)
    weights = dict(_weights(f'{ours}/checkpoint-6'))
    assert set(index['weight_map']) == set(weights)
    assert index['metadata']['total_size'] == sum(weight.numel() * weight.element_size() for weight in weights.values())
    assert max(os.path.getsize(f'{ours}/checkpoint-6/{name}') for name in files) < 200_000 + 4096  # and a header


def test_transformers_loads_the_trained_model(full):
    """A failure means that the checkpoint is incomplete, or not the model that was trained."""
    _, ours, _, results = full
    logits, = launch_without_swift(1, jobs.probe_checkpoint, f'{ours}/checkpoint-6')
    for row, expected_row in zip(logits, results['ours'][0], strict=True):
        for values, expected in zip(row, expected_row, strict=True):
            assert values == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_files_beside_the_weights_are_the_plain_ones(full):
    """A failure means that the checkpoint lacks its tokenizer or configuration, or has others than the plain run's."""
    model, ours, plain, _ = full
    names = []
    for directory in (ours, plain):
        names.append({
            name
            for name in os.listdir(f'{directory}/checkpoint-6')
            if not name.startswith(('model', 'optimizer', 'rng_state', 'parallel_layout'))
        })
    assert names[0] == names[1]
    for name in ('config.json', 'generation_config.json', 'tokenizer_config.json', 'tokenizer.json'):
        with open(
                f'{ours}/checkpoint-6/{name}', encoding='utf-8') as a, open(
                    f'{plain}/checkpoint-6/{name}', encoding='utf-8') as b:
            assert json.load(a) == json.load(b), name
