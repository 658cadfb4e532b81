"""An adapter of a split model, in a file: what PEFT writes for the same adapter of the model on one card.

A failure means that something that was trained on some stage is not in the file, or not where PEFT and plain ms-swift
look for it: a user's head, norms or biases go back to those of the base without a word, or nothing loads the file.
"""
import filecmp
import json
import os
import pytest
import shutil
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from typing import Any, Callable, Optional

from swift_megatron.checkpoint.adapter import save_adapter
from swift_megatron.errors import ConfigError
from swift_megatron.lora.inject import add_lora, load_lora
from swift_megatron.lora.state import load_tensors, saved_tensors
from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.build import build_model
from swift_megatron.model.stages import keep_own_stages
from swift_megatron.sharding import record_parameters, spec_of
from tests.harness import launch
from tests.tiny_models import Case, load_config, make_checkpoint, reference_model

LINEARS = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']
KINDS: dict[str, dict[str, Any]] = {
    'factors alone': {},
    'copies of embedding and head': {
        'modules_to_save': ['embed_tokens', 'lm_head']
    },
    'copies of norms': {
        'modules_to_save': ['input_layernorm', 'norm']
    },
    'adapted head': {
        'target_modules': [*LINEARS, 'lm_head']
    },
    'adapted embedding': {
        'target_modules': ['q_proj', 'embed_tokens']
    },
    'adapted embedding and head by expression': {
        'target_modules': r'.*\.(q_proj|embed_tokens)|lm_head'
    },
    'all biases': {
        'bias': 'all'
    },
    'biases of adapted layers': {
        'bias': 'lora_only',
        'target_modules': ['v_proj', 'o_proj', 'down_proj']
    },
}
DTYPES = {False: torch.float32, True: torch.bfloat16}  # of the untied and the tied base
GRIDS = {'p2': (2, 1), 'p4': (4, 1), 't2 p2': (2, 2)}  # p, t


def case_of(tied: bool) -> Case:
    return Case(family='llama', heads=4, key_value_heads=2, layers=4, tied=tied)


def config_of(kind: str) -> LoraConfig:
    return LoraConfig(task_type='CAUSAL_LM', **{'r': 3, 'lora_alpha': 5, 'target_modules': LINEARS, **KINDS[kind]})


def value_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """What stands for a trained tensor: depends on its name alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) + 7 * len(name)))


def train(model: nn.Module) -> None:
    """Gives all that is trainable a value, whole or this rank's slice of it."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spec = getattr(parameter, 'shard_spec', None)
            whole = value_of(name, tuple(parameter.shape) if spec is None else spec.global_shape)
            parameter.data.copy_(whole if spec is None else spec.slice(whole))


def on_one_card(base: str, tied: bool, directory: str) -> None:
    """PEFT's own files for every kind."""
    for kind in KINDS:
        model = get_peft_model(reference_model(base, case_of(tied), DTYPES[tied]), config_of(kind))
        train(model)
        model.save_pretrained(os.path.join(directory, kind), selected_adapters=['default'])


def own_part(base: str, tied: bool, mesh: ParallelMesh, *, kind: str = '', adapter: Optional[str] = None) -> PeftModel:
    model = build_model(load_config(base, case_of(tied), DTYPES[tied]), mesh, directory=base)
    model.requires_grad_(False)
    model = add_lora(model, config_of(kind), mesh) if adapter is None else load_lora(model, adapter, mesh)
    keep_own_stages(model, mesh)
    record_parameters(model, rank=mesh.tensor_rank, size=mesh.tensor_parallel_size)
    return model


def differences(model: PeftModel, file: dict[str, torch.Tensor]) -> list[str]:
    """Names of this rank's saved tensors that are not the file's slices."""
    return [
        name for name, tensor in saved_tensors(model).items() if not torch.equal(tensor,
                                                                                 spec_of(tensor).slice(file[name]))
    ]


def save_and_load(base: str, tied: bool, expected: str, directory: str, sizes: tuple[int, int]) -> dict[str, Any]:
    """Every kind: saved, overwritten, loaded into the same and into a new model. Kind -> what went wrong here."""
    mesh = ParallelMesh.create(pipeline_parallel_size=sizes[0], tensor_parallel_size=sizes[1])
    faults = {}
    for kind in KINDS:
        model, path = own_part(base, tied, mesh, kind=kind), os.path.join(directory, kind)
        train(model)
        os.makedirs(path, exist_ok=True)
        save_adapter(model, path, mesh)
        torch.distributed.barrier()
        file = load_file(os.path.join(path, 'adapter_model.safetensors'))
        before = differences(model, file)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.fill_(9.)
        load_tensors(model, path)
        faults[kind] = [before, differences(model, file)]
        if sizes == (2, 2):
            new = own_part(base, tied, mesh, adapter=os.path.join(expected, kind))
            trainable = [{n for n, p in part.named_parameters() if p.requires_grad} for part in (model, new)]
            faults[kind] += [differences(new, file), sorted(trainable[0] ^ trainable[1])]
    return faults


@pytest.fixture(scope='module')
def one_card(tmp_path_factory) -> dict[bool, tuple[str, str]]:
    """Base and PEFT's adapters, for the untied and the tied model."""
    directory = tmp_path_factory.mktemp('adapters')
    found = {}
    for tied in (False, True):
        base, plain = make_checkpoint(case_of(tied), str(directory / f'base-{tied}')), str(directory / f'plain-{tied}')
        launch(1, on_one_card, base, tied, plain)
        found[tied] = base, plain
    return found


@pytest.mark.parametrize('tied, grid', [(True, 'p2'), (False, 'p4'), (False, 't2 p2')])
def test_files_are_those_of_one_card(one_card, tmp_path, tied, grid):
    """The file would lack, rename, cast or misplace a tensor of some stage, or lose it when it is loaded again."""
    (base, plain), sizes = one_card[tied], GRIDS[grid]
    found = launch(sizes[0] * sizes[1], save_and_load, base, tied, plain, str(tmp_path), sizes)
    for kind in KINDS:
        assert not any(fault for rank in found for fault in rank[kind]), [kind, found]
        ours, theirs = str(tmp_path / kind), os.path.join(plain, kind)
        assert set(os.listdir(ours)) == set(os.listdir(theirs))
        assert filecmp.cmp(
            f'{ours}/adapter_model.safetensors', f'{theirs}/adapter_model.safetensors',
            shallow=False), [kind, keys_that_differ(ours, theirs)]
        with open(
                f'{ours}/adapter_config.json', encoding='utf-8') as a, open(
                    f'{theirs}/adapter_config.json', encoding='utf-8') as b:
            assert as_sets(json.load(a)) == as_sets(json.load(b)), kind


def as_sets(config: dict[str, Any]) -> dict[str, Any]:
    """PEFT writes sets as lists in no order."""
    return {key: sorted(map(str, value)) if isinstance(value, list) else value for key, value in config.items()}


def keys_that_differ(ours: str, theirs: str) -> list[str]:
    files = [load_file(f'{path}/adapter_model.safetensors') for path in (ours, theirs)]
    return sorted(
        name for name in set(files[0]) | set(files[1]) if name not in files[0] or name not in files[1]
        or files[0][name].dtype != files[1][name].dtype or not torch.equal(files[0][name], files[1][name]))


def messages_for(base: str, directories: list[str]) -> list[list[str]]:
    """What loading each directory says, into a model with adapters and into one without."""
    mesh = ParallelMesh.create(pipeline_parallel_size=2)
    model = own_part(base, False, mesh, kind='copies of norms')

    def said(load: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        try:
            load(*args, **kwargs)
        except ConfigError as error:
            return str(error)
        return ''

    return [[said(load_tensors, model, path), said(own_part, base, False, mesh, adapter=path)] for path in directories]


def test_what_is_missing_is_named(one_card, tmp_path):
    """A damaged adapter would be taken for a whole one, on the stage that misses something or on the others."""
    base, plain = one_card[False]
    source = os.path.join(plain, 'copies of norms')
    tensors = load_file(f'{source}/adapter_model.safetensors')
    lost = ['model.norm.weight', 'model.layers.3.self_attn.v_proj.lora_B.weight', 'adapter_model.safetensors']
    for name in lost:
        os.makedirs(tmp_path / name)
        shutil.copy(f'{source}/adapter_config.json', tmp_path / name)
        rest = {key: tensor for key, tensor in tensors.items() if key != f'base_model.model.{name}'}
        if len(rest) < len(tensors):
            save_file(rest, tmp_path / name / 'adapter_model.safetensors')
    first, last = launch(2, messages_for, base, [str(tmp_path / name) for name in lost])
    for i, name in enumerate(lost):
        assert name in last[i][0] and name in first[i][1] and name in last[i][1]
        assert first[i][0] == '' or i == 2, 'the first stage has all that it needs'
