"""The main job: LoRA fine-tuning with tensor parallelism is the run of plain `swift sft`, and so is what it writes.

A failure means that a user who calls `swift-megatron` instead of `swift` gets another model, or another account of it.
"""
import json
import os
import pytest
from safetensors import safe_open
from typing import Any, Callable

from tests.harness import launch as launch_without_swift
from . import jobs
from .conftest import Training
from .harness import Job, launch, launch_all
from .runs import assert_same_logs, folder_tree, log_differences, log_lines, logged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for the runs of many

# 46 samples in batches of 2 and 2: the 12th step of an epoch has one batch. 11 samples of evaluation in batches of 4.
SETTINGS: dict[str, Any] = dict(
    max_steps=20,
    val_dataset='val',
    eval_strategy='steps',
    eval_steps=10,
    save_strategy='steps',
    save_steps=20,
    per_device_eval_batch_size=4)


@pytest.fixture(scope='module')
def curve(workshop):
    """20 steps with dropout, activation checkpointing, accumulation, evaluation and images; by both programs."""
    settings = {**SETTINGS, 'report_to': 'tensorboard'}
    return launch_all({
        'plain':
        Job(jobs.train_and_probe, ('plain', workshop.flags('curve-plain', **settings))),
        'ours':
        Job(jobs.train_and_probe, ('ours', workshop.flags('curve-ours', **settings, tensor_parallel_size=2)), 2),
    })


def test_log_is_the_plain_one(workshop, curve):
    """A failure means another curve than plain ms-swift's: loss, grad_norm, accuracy, evaluation, epochs or counts.

    The masks of the dropout are the same ones, whole or sliced, also when activations are computed again.
    """
    assert_same_logs(workshop.output('curve-ours'), workshop.output('curve-plain'))
    whole, expected = (
        log_lines(workshop.output(f'curve-{name}'))[-1]['model_parameter_info'] for name in ('ours', 'plain'))
    assert whole.partition(']')[0] == expected.partition(']')[0]


def test_learning_happens(workshop, curve):
    """A failure means that the comparison above proves nothing: the data cannot be learned, or clipping never acts."""
    losses = logged(workshop.output('curve-plain'), 'loss')
    assert losses[-1] < losses[0] - 0.3
    assert min(logged(workshop.output('curve-plain'), 'grad_norm')) > 1  # max_grad_norm


def test_trained_model_is_the_plain_one(curve):
    """A failure means that the weights drifted apart although the curve looked right, or differ between the ranks."""
    assert curve['ours'][0] == curve['ours'][1]
    assert _distance(curve['ours'][0], curve['plain'][0]) < 1e-4


def _flat(nested: Any) -> list[float]:
    return [x for row in nested for position in row for x in position]


def _distance(logits: Any, expected: Any) -> float:
    """Largest difference of two nested lists of logits, relative to the largest expected one."""
    a, b = _flat(logits), _flat(expected)
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) / max(map(abs, b))


def _header(path: str) -> bytes:
    """The header of a safetensors file: names, shapes, types, places, and metadata."""
    with open(path, 'rb') as file:
        return file.read(int.from_bytes(file.read(8), 'little'))


def test_adapter_file_has_the_layout_of_peft(workshop, curve):
    """A failure means that vLLM, PEFT or a merge script meets an adapter of another form than it knows."""
    ours, plain = (os.path.join(workshop.output(f'curve-{name}'), 'checkpoint-20') for name in ('ours', 'plain'))
    assert _header(f'{ours}/adapter_model.safetensors') == _header(f'{plain}/adapter_model.safetensors')
    configs = []
    for directory in (ours, plain):
        with open(f'{directory}/adapter_config.json', encoding='utf-8') as file:
            config = json.load(file)
        configs.append({**config, 'target_modules': sorted(config['target_modules'])})
    assert configs[0] == configs[1]


def test_adapter_values_are_the_plain_ones(workshop, curve):
    """A failure means that the saved adapter is not the trained one, such as the slice or the copy of a single rank."""
    ours, plain = (
        safe_open(
            os.path.join(workshop.output(f'curve-{name}'), 'checkpoint-20', 'adapter_model.safetensors'),
            framework='pt') for name in ('ours', 'plain'))
    for name in plain.keys():
        expected = plain.get_tensor(name)
        assert (ours.get_tensor(name) - expected).abs().max() < 1e-3 * expected.abs().max(), name


def test_plain_peft_computes_the_trained_model(workshop, curve):
    """A failure means that the adapter does not load completely in PEFT, which leaves the rest of it at zero."""
    adapter = os.path.join(workshop.output('curve-ours'), 'checkpoint-20')
    logits, = launch_without_swift(1, jobs.probe_adapter, workshop['untied'], adapter)
    assert _distance(logits, curve['ours'][0]) < 1e-5


def test_output_folder_is_the_plain_one(workshop, curve):
    """A failure means that images, logs, args.json or a checkpoint are missing, or something half-written stays."""
    ours, plain = workshop.output('curve-ours'), workshop.output('curve-plain')
    assert folder_tree(ours) == folder_tree(plain)
    assert os.path.realpath(f'{ours}/last-checkpoint') == os.path.realpath(f'{ours}/checkpoint-20')


def test_args_json_is_the_plain_one(workshop, curve):
    """A failure means that `swift infer` and `swift export` find other settings beside the adapter than were given."""
    read = []
    for name in ('ours', 'plain'):
        with open(f"{workshop.output(f'curve-{name}')}/args.json", encoding='utf-8') as file:
            read.append(json.load(file))
    ours, plain = read
    own = {
        'output_dir', 'logging_dir', 'ddp_backend', 'rank', 'local_rank', 'global_world_size', 'local_world_size',
        'training_args', 'run_name', 'use_cpu'
    }
    assert {name for name in plain if name not in own and ours.get(name, 'missing') != plain[name]} == set()


def test_swift_infer_loads_the_adapter(workshop, curve):
    """A failure means that a user cannot talk to the model with `swift infer --adapters` as after `swift sft`."""
    results = {name: workshop.output(f'answers-{name}.jsonl') for name in ('ours', 'plain')}
    launch_all({
        name: Job(jobs.infer, (f"{workshop.output(f'curve-{name}')}/checkpoint-20", workshop['ragged'], result))
        for name, result in results.items()
    })
    texts = []
    for result in results.values():
        with open(result, encoding='utf-8') as file:
            texts.append([json.loads(line)['response'] for line in file])
    assert len(texts[0]) == 4 and texts[0] == texts[1]


@pytest.mark.parametrize('direction', ['ours to plain', 'plain to ours'])
def test_adapters_go_on_in_the_other_program(workshop, curve, direction):
    """A failure means that an adapter cannot be trained further by the other program, or starts from something else."""
    source, target = direction.split(' to ')
    adapter = os.path.join(workshop.output(f'curve-{source}'), 'checkpoint-20')
    name = direction.replace(' ', '-')
    settings = {**SETTINGS, 'max_steps': 1, 'eval_on_start': True, 'save_strategy': 'no', 'adapters': adapter}
    own = {'tensor_parallel_size': 2} if target == 'ours' else {}
    launch(Job(jobs.train, (target, 'sft', workshop.flags(name, **settings, **own)), 2 if own else 1))
    final = logged(workshop.output(f'curve-{source}'), 'eval_loss')[-1]
    assert logged(workshop.output(name), 'eval_loss')[0] == pytest.approx(final, rel=1e-5)


# Replicas get every other sample: together they have the batches of one process with batches of twice the size.
REPLICAS = {
    **SETTINGS, 'max_steps': 8,
    'val_dataset': 'even_val',
    'eval_steps': 4,
    'lora_dropout': 0,
    'save_strategy': 'no',
    'per_device_train_batch_size': 2,
    'per_device_eval_batch_size': 1
}
TWICE = {'per_device_train_batch_size': 4, 'per_device_eval_batch_size': 2}

ODD = {**REPLICAS, 'val_dataset': 'val', 'max_steps': 1, 'eval_steps': 1}  # samples of evaluation

RAGGED = dict(dataset='ragged', lora_dropout=0, max_steps=3)
T2, P2 = dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)
LAYOUTS = {  # four samples in every optimizer step: processes, settings
    'one batch': (2, dict(per_device_train_batch_size=4, gradient_accumulation_steps=1, **T2)),
    'four accumulated': (2, dict(per_device_train_batch_size=1, gradient_accumulation_steps=4, **T2)),
    'micro-batches': (2, dict(
        per_device_train_batch_size=1, gradient_accumulation_steps=1, num_micro_batches=4, **T2)),
    'stages': (2, dict(per_device_train_batch_size=1, gradient_accumulation_steps=1, num_micro_batches=4, **P2)),
    'replicas': (4, dict(per_device_train_batch_size=1, gradient_accumulation_steps=2, **T2)),
}

STEEP = dict(max_steps=3, lora_dropout=0, optim='sgd', learning_rate=1e-2, lr_scheduler_type='constant')
BROKEN = {  # a function of the trainer that is left out, and the layout that needs it
    'sum_partial_gradients': 't2',
    'average_over_replicas': 'd2',
    'clip_gradients': 't2',
}
SHORT: dict[str, Training] = {
    'replicas-plain': Training({
        **REPLICAS,
        **TWICE
    }, program='plain'),
    'replicas-d2': Training(REPLICAS, 2),
    'replicas-t2d2': Training({
        **REPLICAS,
        **T2
    }, 4),
    'odd-plain': Training({
        **ODD,
        **TWICE
    }, program='plain'),
    'odd-d2': Training(ODD, 2),
    **{
        name: Training({
            **RAGGED,
            **settings
        }, processes)
        for name, (processes, settings) in LAYOUTS.items()
    },
    'steep-t2': Training({
        **STEEP,
        **T2
    }, 2),
    'steep-d2': Training(STEEP, 2),
    **{
        f'without-{function}': Training({
            **STEEP,
            **(T2 if layout == 't2' else {})
        }, 2, without=function)
        for function, layout in BROKEN.items()
    },
}


@pytest.fixture(scope='module')
def short(workshop) -> Callable[[str], str]:
    """The output folder of a training of SHORT; fails if that training failed."""
    outcomes = workshop.train_in_turn(SHORT)

    def folder(name: str) -> str:
        assert not outcomes[name], outcomes[name]
        return workshop.output(name)

    return folder


@pytest.mark.parametrize('layout', ['d2', 't2d2'])
def test_replicas_log_the_plain_curve(short, layout):
    """The same global batches on one process, on two replicas, and on two replicas of two ranks.

    A failure means that something is counted per process instead of per replica, or that a loss is one replica's.
    total_flos is left out: it counts padding, of which smaller batches have less.
    """
    assert_same_logs(short(f'replicas-{layout}'), short('replicas-plain'), ignore=('total_flos', ))


def test_replicas_evaluate_each_sample_once(short):
    """A failure means that eval_loss, and so the choice of the best checkpoint, depends on the number of replicas."""
    for key in ('eval_loss', 'eval_token_acc'):
        assert logged(short('odd-d2'), key) == pytest.approx(logged(short('odd-plain'), key), rel=1e-4)


def test_token_mean_does_not_depend_on_the_layout(short):
    """A failure means that samples of different lengths weigh differently when a step is cut differently."""
    for key in ('loss', 'grad_norm', 'token_acc'):
        values = {name: logged(short(name), key) for name in LAYOUTS}
        for name in LAYOUTS:
            assert values[name] == pytest.approx(values['one batch'], rel=1e-5), (key, values)


@pytest.mark.parametrize('function', BROKEN)
def test_a_missing_step_is_noticed(short, function):
    """A failure means that the comparisons of this file cannot see a gradient that is not reduced or not clipped."""
    assert log_differences(short(f'without-{function}'), short(f'steep-{BROKEN[function]}')) != []
