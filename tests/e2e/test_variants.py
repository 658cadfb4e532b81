"""What else ms-swift's arguments can ask for, each as a short run beside plain `swift`.

A failure means that an argument is ignored, or acts otherwise than with plain ms-swift, when a model is split.
"""
import json
import os
import pytest
from safetensors import safe_open
from typing import Any

from . import jobs
from .conftest import Training
from .harness import Job, launch
from .runs import assert_same_logs, folder_tree, log_lines, logged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for the runs of all

# Adam's step is lr m / (sqrt(v) + eps): with this eps, rounding of a gradient near zero stays rounding of the weight.
SETTINGS: dict[str, Any] = dict(max_steps=3, adam_epsilon=1e-3, learning_rate=1e-2, save_strategy='steps', save_steps=3)

VARIANTS: dict[str, dict[str, Any]] = {
    # Data
    'epochs': {
        'dataset': 'ragged',
        'max_steps': None,
        'num_train_epochs': 2,
        'gradient_accumulation_steps': 3,
        'save_steps': 2,
        'logging_steps': 2,
        'dataloader_num_workers': 1,
        'dataset_num_proc': 2
    },
    'streaming': {
        'streaming': True,
        'val_dataset': 'val',
        'eval_strategy': 'steps',
        'eval_steps': 3
    },
    'lazy tokenising': {
        'lazy_tokenize': True
    },
    'grouped by length': {
        'group_by_length': True
    },
    'in order, rest dropped': {
        'train_dataloader_shuffle': False,
        'dataloader_drop_last': True,
        'max_length': 64,
        'truncation_strategy': 'left'
    },
    'validation split': {
        'split_dataset_ratio': 0.2,
        'eval_strategy': 'steps',
        'eval_steps': 3
    },
    # Losses
    'last round': {
        'loss_scale': 'last_round'
    },
    'weighted tokens': {
        'loss_scale': 'react',
        'dataset': 'weighted'
    },
    'label smoothing': {
        'label_smoothing_factor': 0.1,
        'gradient_accumulation_steps': 1
    },
    'dft loss': {
        'enable_dft_loss': True
    },
    'channel loss': {
        'enable_channel_loss': True,
        'dataset': 'channels'
    },
    'weighted channels': {
        'enable_channel_loss': True,
        'loss_scale': 'react',
        'dataset': 'weighted',
        'lora_dropout': 0
    },
    'exact matches': {
        'acc_strategy': 'seq',
        'dataset': 'drill',
        'max_steps': 10,
        'save_steps': 10,
        'tuner_type': 'full',
        'learning_rate': 1e-3,
        'adam_epsilon': 1e-8
    },
    # Adapters
    'trained copies': {
        'modules_to_save': ['embed_tokens', 'lm_head']
    },
    'everywhere': {
        'target_modules': ['all-linear', 'all-embedding']
    },
    'some layers': {
        'target_regex': r'.*layers\.1\..*(q_proj|down_proj)'
    },
    'biases': {
        'lora_bias': 'all',
        'lora_rank': 3,
        'lora_alpha': 5,
        'save_only_model': True
    },
    'tied copies': {
        'model': 'tied',
        'modules_to_save': 'embed_tokens'
    },
    'tied embeddings': {
        'model': 'tied',
        'target_modules': ['all-linear', 'all-embedding']
    },
    # The head sees tokens with a label alone, so that its dropout has other masks than plain ms-swift's.
    'tied head': {
        'model': 'tied',
        'target_modules': ['lm_head', 'q_proj'],
        'lora_dropout': 0
    },
    'scaled': {
        'use_rslora': True,
        'init_weights': 'gaussian',
        'lora_dtype': 'float32'
    },
    'two learning rates': {
        'lorap_lr_ratio': 16,
        'learning_rate': 1e-3
    },
    'noisy embeddings': {
        'neftune_noise_alpha': 5
    },
    # Optimisation
    'no checkpointing, sgd': {
        'gradient_checkpointing': False,
        'optim': 'sgd',
        'max_grad_norm': 0.3
    },
    'reentrant checkpointing': {
        'gradient_checkpointing_kwargs': '{"use_reentrant": true}',
        'use_logits_to_keep': True
    },
    'no clipping': {
        'max_grad_norm': 0,
        'weight_decay': 0.5,
        'warmup_ratio': 0.5,
        'lr_scheduler_type': 'linear'
    },
    'frozen parts': {
        'tuner_type': 'full',
        'freeze_parameters': ['model.embed_tokens', 'model.layers.0'],
        'trainable_parameters': ['model.layers.0.mlp']
    },
    'default precision': {
        'fp16': None,
        'bf16': None
    },
}

OWN_TESTS = {'pre-training': 'test_pre_training_is_the_plain_one', 'bfloat16': 'test_bfloat16_follows_the_plain_curve'}
# Runs with settings and tests of their own. bfloat16 keeps 8 bits: dropout and a large step would hide what it does.
OTHERS: dict[str, dict[str, Any]] = {
    'pre-training': {
        'command': 'pt',
        'dataset': 'texts',
        'tuner_type': 'lora'
    },
    'bfloat16': {
        'torch_dtype': 'bfloat16',
        'fp16': None,
        'bf16': None,
        'max_steps': 6,
        'save_steps': 6,
        'lora_dropout': 0,
        'learning_rate': 1e-3,
        'use_cpu': True
    },
}


def folder_of(name: str) -> str:
    return name.replace(' ', '-')


@pytest.fixture(scope='module')
def outcomes(request, workshop) -> dict[str, str]:
    """Name -> '' or how its run failed, for all runs that the chosen tests need: by each program in turn."""
    chosen = [item for item in request.session.items if item.module is request.module]
    params = {item.callspec.params['variant'] for item in chosen if hasattr(item, 'callspec')}
    functions = {item.originalname for item in chosen}
    names = [name for name in VARIANTS if name in params or 'test_variants_act' in functions]
    names += [name for name, test in OWN_TESTS.items() if test in functions]
    trainings = {}
    for name in names:
        settings = {**SETTINGS, **{**VARIANTS, **OTHERS}[name]}
        command = settings.pop('command', 'sft')
        own = {**settings, 'tensor_parallel_size': 2}
        trainings[f'{folder_of(name)}-ours'] = Training(own, 2, command=command)
        trainings[f'{folder_of(name)}-plain'] = Training(settings, program='plain', command=command)
    found = workshop.train_in_turn(trainings)
    return {name: found[f'{folder_of(name)}-ours'] or found[f'{folder_of(name)}-plain'] for name in names}


@pytest.fixture
def both(workshop, outcomes):
    """The output folders of both programs' runs by name; fails if one of the two failed."""

    def folders(name: str) -> tuple[str, str]:
        assert not outcomes[name], outcomes[name]
        return workshop.output(f'{folder_of(name)}-ours'), workshop.output(f'{folder_of(name)}-plain')

    return folders


@pytest.fixture(params=VARIANTS)
def variant(request, both):
    """Output folders of both programs' runs."""
    return both(request.param)


def test_variant_logs_the_same(variant):
    """A failure means that this argument has another effect on training than with plain ms-swift."""
    ours, plain = variant
    assert_same_logs(ours, plain)


def test_variant_writes_the_same(variant):
    """A failure means that this argument has another effect on what is saved than with plain ms-swift."""
    ours, plain = variant
    assert_same_weights(ours, plain)
    assert folder_tree(ours) == folder_tree(plain)


def assert_same_weights(ours: str, expected: str, relative: float = 1e-3) -> None:
    """Compares the weights in the last checkpoints of two output folders; relative to a tensor's largest value.

    The bound is ten times that of the log: one number of a tensor may change more than a mean over all.
    """
    step = log_lines(expected)[-1]['global_step']
    directories = [os.path.join(directory, f'checkpoint-{step}') for directory in (ours, expected)]
    files = [
        sorted(name for name in os.listdir(directory) if name.endswith('.safetensors')) for directory in directories
    ]
    assert files[0] == files[1] and len(files[1]) == 1
    found, wanted = (safe_open(os.path.join(directory, files[0][0]), framework='pt') for directory in directories)
    assert set(found.keys()) == set(wanted.keys())
    for name in wanted.keys():
        a, b = found.get_tensor(name), wanted.get_tensor(name)
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert (a - b).abs().max() <= relative * b.abs().max(), name


def test_variants_act(both):
    """A failure means that a comparison above proves nothing, because the argument has no effect in either program."""
    plain = {name: both(name)[1] for name in VARIANTS}
    assert max(logged(plain['exact matches'], 'seq_acc')) > 0.3
    assert {'loss_None', 'loss_source1', 'loss_source2'} <= set().union(*log_lines(plain['channel loss']))
    usual = logged(plain['lazy tokenising'], 'loss')[0]
    for name in ('last round', 'label smoothing', 'dft loss', 'noisy embeddings', 'grouped by length',
                 'in order, rest dropped'):
        assert abs(logged(plain[name], 'loss')[0] - usual) > 1e-3, name


def test_pre_training_is_the_plain_one(both):
    """A failure means that `swift-megatron pt` trains on other tokens than `swift pt`."""
    ours, plain = both('pre-training')
    assert_same_logs(ours, plain)
    assert_same_weights(ours, plain)


def test_bfloat16_follows_the_plain_curve(both):
    """A failure means that training in the precision that everyone uses breaks, or drifts further than its rounding.

    bfloat16 keeps 8 bits: each program's logits, the sums that make them, and the partial sums of the split layers are
    rounded to a part in 2^9, and these roundings are not the same ones. The losses may differ by one rounding of each
    program; a gradient passes through the roundings of two layers, forward and backward, four times as many.
    """
    ours, plain = both('bfloat16')
    assert logged(ours, 'loss') == pytest.approx(logged(plain, 'loss'), rel=2**-8)
    assert logged(ours, 'grad_norm') == pytest.approx(logged(plain, 'grad_norm'), rel=2**-6)
    files = [
        safe_open(f'{directory}/checkpoint-6/adapter_model.safetensors', framework='pt') for directory in (ours, plain)
    ]
    types = [{name: file.get_tensor(name).dtype for name in file.keys()} for file in files]
    assert types[0] == types[1]


def test_python_face_is_the_command(workshop):
    """A failure means that `sft_main(TrainerConfig(...))` or `SwiftModel.from_pretrained` do something else."""
    settings = {**SETTINGS, 'max_steps': 2, 'save_steps': 2}
    launch(Job(jobs.train, ('ours', 'sft', workshop.flags('face-flags', **settings, tensor_parallel_size=2)), 2))
    config = {
        **settings, 'model_id': workshop['untied'],
        'dataset': [workshop['train']],
        'tensor_parallel_size': 2,
        'output_dir': workshop.output('face-python')
    }
    logits = launch(Job(jobs.train_from_python, (config, ), 2))
    assert_same_logs(workshop.output('face-python'), workshop.output('face-flags'), relative=0)
    assert logits[0] == logits[1]
    reference, = launch(Job(jobs.probe_adapter, (workshop['untied'], workshop.output('face-python') + '/checkpoint-2')))
    for row, expected in zip(logits[0], reference, strict=True):
        for values, expected_values in zip(row, expected, strict=True):
            assert values == pytest.approx(expected_values, rel=1e-4, abs=1e-4)


def test_args_json_repeats_the_run(workshop):
    """A failure means that the parallel sizes are not in args.json, from which a user sees how a run was started."""
    launch(Job(jobs.train, ('ours', 'sft', workshop.flags('sizes', max_steps=1, tensor_parallel_size=2)), 2))
    with open(f"{workshop.output('sizes')}/args.json", encoding='utf-8') as file:
        assert json.load(file)['tensor_parallel_size'] == 2
