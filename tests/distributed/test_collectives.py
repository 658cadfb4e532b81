"""Number and size of the collectives of a training step, counted below all wrappers.

The expected lists are Megatron's (arXiv:1909.08053 section 3): two all-reduces of B S H elements forward and two
backward for each decoder layer, whatever is adapted, and a few numbers per token for the vocabulary.

A failure means that a step sends more than it has to, which on slow links costs more than the computation saves.
"""
import math
import pytest
import torch.distributed as dist
from collections import Counter
from torch import nn
from typing import Any

from swift_megatron.lora.inject import add_lora
from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.build import build_model
from swift_megatron.model.language_modeling import hidden_states, token_losses
from swift_megatron.optim.step import GradientStep
from swift_megatron.sharding import spec_of
from tests.collectives import Collective, CollectiveLog
from tests.distributed.test_parity import lora_config
from tests.harness import launch
from tests.tiny_models import Case, batch, load_config, make_checkpoint

ALL = (0, 1)  # the tensor group
LAYERS = 3
PARALLEL_BLOCKS = {'cohere'}  # attention and MLP from one normed input
NORMED_PROJECTIONS = {'olmo2': 2}  # norms over whole cut projections: q and k
FAMILIES = ('llama', 'phi3', 'gemma2', 'cohere', 'olmo2', 'starcoder2', 'glm4')
EVERY_LINEAR = [
    'q_proj', 'k_proj', 'v_proj', 'o_proj', 'qkv_proj', 'gate_proj', 'up_proj', 'down_proj', 'gate_up_proj', 'c_fc',
    'c_proj'
]
MODES = ('full', 'linears', 'embedding too')


def case_of(family: str) -> Case:
    return Case(family=family, layers=LAYERS)


def trained(model: nn.Module, mode: str, mesh: ParallelMesh) -> nn.Module:
    if mode == 'full':
        return model.requires_grad_(True)
    names = {name.rpartition('.')[2] for name, _ in model.named_modules()}
    targets = [name for name in EVERY_LINEAR if name in names] + ['embed_tokens'] * (mode == 'embedding too')
    return add_lora(model, lora_config(target_modules=targets), mesh)


def step(directory: str, family: str, mode: str) -> dict[str, Any]:
    """The calls of each phase of one training step, on one rank, and the sizes to compare with."""
    mesh = ParallelMesh.create(tensor_parallel_size=dist.get_world_size())
    model = build_model(load_config(directory, case_of(family)), mesh, directory=directory)
    hidden_size = model.config.hidden_size
    model = trained(model, mode, mesh).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    data = batch(127)
    labels = data['labels'][:, 1:]
    chosen = labels != -100
    phases: dict[str, list[Collective]] = {}
    with CollectiveLog() as log:
        hidden = hidden_states(model, input_ids=data['input_ids'], attention_mask=data['attention_mask'])
        phases['decoder'] = log.calls
        log.calls = []
        loss = token_losses(model, hidden[:, :-1][chosen], labels[chosen], mesh).nll.mean()
        phases['loss'] = log.calls
        log.calls = []
        loss.backward()
        phases['backward'] = log.calls
        log.calls = []
        GradientStep(parameters=parameters, mesh=mesh, max_norm=0.5).run()
        phases['step'] = log.calls
    partial = sum(
        math.prod(spec_of(p).global_shape) for p in parameters if spec_of(p).partial and spec_of(p).has_copies)
    return {
        'phases': phases,
        'tokens': data['input_ids'].numel(),
        'hidden': hidden_size,
        'labels': int(chosen.sum()),
        'partial': partial
    }


def all_steps(directories: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (family, mode): step(directory, family, mode)
        for family, directory in directories.items()
        for mode in MODES
    }


@pytest.fixture(scope='module')
def steps(tmp_path_factory) -> dict[tuple[str, str], dict[str, Any]]:
    """Steps of all families and modes on two ranks, by one launch; both ranks run the same collectives."""
    directory = tmp_path_factory.mktemp('models')
    directories = {family: make_checkpoint(case_of(family), str(directory / family)) for family in FAMILIES}
    answers = launch(2, all_steps, directories)
    for key, answer in answers[0].items():
        assert answer['phases'] == answers[1][key]['phases'], f'{key}: the ranks run different collectives'
    return answers[0]


def reduces(*elements: int) -> Counter:
    return Counter(Collective('allreduce', number, ALL) for number in elements)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('family', FAMILIES)
def test_decoder_forward(steps, family, mode):
    """More than the embedding's and each layer's two all-reduces: a layer gathers, or an adapter has one of its own."""
    found = steps[family, mode]
    tokens, whole = found['tokens'], found['tokens'] * found['hidden']
    norms = [tokens] * NORMED_PROJECTIONS.get(family, 0)
    assert Counter(found['phases']['decoder']) == reduces(whole, *[whole, whole, *norms] * LAYERS)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('family', FAMILIES)
def test_loss(steps, family, mode):
    """Logits would cross the ranks, V numbers a token, instead of five."""
    found = steps[family, mode]
    expected = reduces(3 * found['labels'])
    expected[Collective('allgather', 2 * found['labels'], ALL)] = 1
    assert Counter(found['phases']['loss']) == expected


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('family', FAMILIES)
def test_backward(steps, family, mode):
    """More than the head's and each layer's two all-reduces: projections enter their region one by one.

    With a frozen embedding nothing before the first layer needs a gradient: the entry of its attention has no
    all-reduce, and neither has that of its MLP where both take the same input.
    """
    found = steps[family, mode]
    tokens, whole = found['tokens'], found['tokens'] * found['hidden']
    entries = 2 * LAYERS
    if mode == 'linears':
        entries -= 2 if family in PARALLEL_BLOCKS else 1
    norms = [tokens] * NORMED_PROJECTIONS.get(family, 0) * LAYERS
    head = found['labels'] * found['hidden']
    assert Counter(found['phases']['backward']) == reduces(head, *[whole] * entries, *norms)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('family', FAMILIES)
def test_optimizer_step(steps, family, mode):
    """Each adapter factor would be summed on its own: hundreds of small collectives, not one and one for the norm."""
    found = steps[family, mode]
    partial = [found['partial']] if found['partial'] else []
    assert Counter(found['phases']['step']) == reduces(*partial, 1)
    if mode != 'full':
        # 4 x the whole side of each factor that ranks share: input of column-, output of row-parallel layers.
        assert found['partial'] > 0


def log_of_known_calls() -> list[tuple[str, int, tuple[int, ...]]]:
    import torch
    pair = dist.new_group([0, 1])
    dist.new_group([0])
    x = torch.ones(6)
    with CollectiveLog() as log:
        dist.all_reduce(x)
        dist.all_reduce(x[:2], group=pair)
        dist.all_gather([torch.empty(6) for _ in range(3)], x)
        dist.broadcast(x, 0)
        dist.barrier()
        x.requires_grad_().sum().backward()
    return [(call.kind, call.elements, call.ranks) for call in log.calls]


def test_the_log_sees_every_collective():
    """The tests above would pass whatever is sent."""
    expected = [('allreduce', 6, (0, 1, 2)), ('allreduce', 2, (0, 1)), ('allgather', 6, (0, 1, 2)),
                ('broadcast', 6, (0, 1, 2))]
    assert launch(3, log_of_known_calls)[0][:4] == expected
