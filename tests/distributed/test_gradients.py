"""From the ranks' gradients to the step of the whole model: sums, means, norm, clipping, overflow, token mean.

A failure means that a run clips, averages or skips otherwise than the unsharded one: its curve drifts away, or its
ranks do from each other.
"""
import math
import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM
from typing import Any, Callable, Iterator

from swift_megatron.lora.inject import add_lora
from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.build import build_model
from swift_megatron.model.language_modeling import hidden_states, token_losses
from swift_megatron.optim import gradients
from swift_megatron.optim.gradients import average_over_replicas, clip_gradients, gradient_norm, sum_partial_gradients
from swift_megatron.optim.step import GradientStep
from swift_megatron.sharding import ShardSpec, even_layout, record_parameters, set_records, spec_of
from tests.collectives import CollectiveLog
from tests.distributed.test_parity import lora_config, relative_error, warm_adapters
from tests.harness import launch
from tests.tiny_models import Case, load_config, make_checkpoint, reference_model

Errors = Iterator[tuple[str, float]]

# One rounding of float32 for each of the few operations on a number; sums and norms are over some hundred numbers.
FLOAT32 = 1e-6
# A whole Hugging Face model in float64: its norms are float32, about 1e-7.
MODEL = 1e-6

OVERLAPPING = {2: (((0, 6), ), ((4, 10), )), 3: (((0, 4), ), ((2, 7), ), ((2, 3), (7, 10)))}


class Parameters(nn.Module):
    """One parameter of each kind; those of `tied` are one."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        t = mesh.tensor_parallel_size
        self.specs: dict[str, ShardSpec] = {
            'equal': mesh.spec((10, 3)),  # a norm outside the regions
            'factor': mesh.spec((4, 10), partial=True),  # a replicated LoRA factor
            'rows': mesh.spec((10, 3), axis=0, layout=even_layout(10, t), partial=True),
            'columns': mesh.spec((3, 10), axis=1, layout=even_layout(10, t), partial=True),
            'shared': mesh.spec((10, 3), axis=0, layout=OVERLAPPING[t], partial=True),  # key/value heads
            'tied': mesh.spec((11, 2), axis=0, layout=even_layout(11, t), partial=True),
        }
        for name, spec in self.specs.items():
            setattr(self, name, nn.Parameter(torch.zeros(spec.local_shape)))
        self.again = self.tied
        set_records(self, self.specs)
        record_parameters(self, rank=mesh.tensor_rank, size=t)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def give_gradients(model: Parameters, mesh: ParallelMesh, seed: int = 0) -> dict[str, torch.Tensor]:
    """Gradients as a backward pass leaves them on this rank; returns the whole model's."""
    wholes = {}
    for number, (name, spec) in enumerate(model.specs.items()):
        whole = torch.zeros(spec.global_shape, dtype=torch.float64)
        if spec.partial and spec.has_copies:
            for rank in range(mesh.tensor_parallel_size):
                share = drawn(*spec.shape_of(rank), seed=1000 * seed + 10 * number + rank)
                position = torch.zeros_like(whole)
                spec.place(position, share, rank)
                whole += position
                if rank == mesh.tensor_rank:
                    getattr(model, name).grad = share.to(getattr(model, name).dtype)
        else:
            whole = drawn(*spec.global_shape, seed=1000 * seed + 10 * number)
            getattr(model, name).grad = spec.slice(whole).to(getattr(model, name).dtype).clone()
        wholes[name] = whole
    return wholes


def gradient_errors(title: str, model: Parameters, wholes: dict[str, torch.Tensor]) -> Errors:
    for name, whole in wholes.items():
        yield f'{title} {name}', relative_error(getattr(model, name).grad.double(), model.specs[name].slice(whole))


def norm_and_clipping(mesh: ParallelMesh) -> Errors:
    """Partial sums added, each element counted once, the same coefficient everywhere."""
    for max_norm in (0.5, 1e3):
        model = Parameters(mesh)
        wholes = give_gradients(model, mesh)
        sum_partial_gradients(model.parameters(), mesh)
        yield from gradient_errors('summed', model, wholes)
        norm = gradient_norm(model.parameters(), mesh)
        reference = [nn.Parameter(torch.zeros_like(whole)) for whole in wholes.values()]
        for parameter, whole in zip(reference, wholes.values()):
            parameter.grad = whole.clone()
        expected = torch.nn.utils.clip_grad_norm_(reference, max_norm)
        yield 'norm', relative_error(norm.double(), expected)
        before = [p.grad.clone() for p in model.parameters()]
        clip_gradients(model.parameters(), max_norm, norm)
        yield from gradient_errors('clipped', model, {n: p.grad for n, p in zip(wholes, reference)})
        if max_norm > expected:
            unchanged = all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before))
            yield 'not clipped', 0. if unchanged else math.inf


def small_buckets(mesh: ParallelMesh) -> Errors:
    """More than one bucket, and tensors of two types: the same sums, in as many collectives."""
    limit, gradients.BUCKET_ELEMENTS = gradients.BUCKET_ELEMENTS, 35
    model = Parameters(mesh)
    model.factor.data = model.factor.data.bfloat16()
    wholes = give_gradients(model, mesh)
    model.factor.grad = torch.full_like(model.factor, 0.5 + mesh.tensor_rank)  # whose sum is exact in 16 bits
    total = sum(0.5 + rank for rank in range(mesh.tensor_parallel_size))
    wholes['factor'] = torch.full((4, 10), total, dtype=torch.float64)
    with CollectiveLog() as log:
        sum_partial_gradients(model.parameters(), mesh)
    yield from gradient_errors('two types', model, wholes)
    yield 'collectives', 0. if [call.elements for call in log.calls] == [40, 30] else math.inf
    norm = gradient_norm(model.parameters(), mesh)
    yield 'norm', relative_error(norm.double(), torch.cat([w.flatten() for w in wholes.values()]).norm())
    gradients.BUCKET_ELEMENTS = limit


def low_precision(mesh: ParallelMesh) -> Errors:
    """The norm of 16-bit gradients is computed in float32, whichever type comes first; both have their rounding."""
    for order in (('equal', 'factor'), ('tied', 'rows')):
        model = Parameters(mesh)
        for name in order:
            getattr(model, name).data = getattr(model, name).data.bfloat16()
        give_gradients(model, mesh)
        for parameter in model.parameters():
            if spec_of(parameter).has_copies and spec_of(parameter).partial:
                parameter.grad.fill_(0.5)  # sums are exact
        sum_partial_gradients(model.parameters(), mesh)
        norm = gradient_norm(model.parameters(), mesh)
        own = [view.double().square().sum() for p in model.parameters() for view in spec_of(p).owned(p.grad)]
        total = torch.stack(own).sum()
        dist.all_reduce(total, group=mesh.tensor_group)
        yield f'norm {order}', relative_error(norm.double(), total.sqrt())
        clip_gradients(model.parameters(), 0.5, norm)
        yield f'types {order}', 0. if all(p.grad.dtype == p.dtype for p in model.parameters()) else math.inf


def nothing_trained(mesh: ParallelMesh) -> Errors:
    """A rank without gradients takes part, and has the norm of the others."""
    model = Parameters(mesh)
    for function in (sum_partial_gradients, average_over_replicas):
        function(model.parameters(), mesh)
    norm = gradient_norm(model.parameters(), mesh)
    clip_gradients(model.parameters(), 1., norm)
    yield 'norm of nothing', float(norm)
    if mesh.tensor_rank == mesh.tensor_parallel_size - 1:
        model.rows.grad = torch.full_like(model.rows, 2.)
    (start, stop), = even_layout(10, mesh.tensor_parallel_size)[-1]
    count = 3 * (stop - start)
    norm = gradient_norm(model.parameters(), mesh)
    yield 'norm of one rank', relative_error(norm.double(), torch.tensor(2. * count**0.5, dtype=torch.float64))


def replicas(mesh: ParallelMesh) -> Errors:
    """The mean over two replicas, each with its own partial sums."""
    if mesh.data_parallel_size == 1:
        return
    model = Parameters(mesh)
    own = [give_gradients(model, mesh, seed) for seed in range(mesh.data_parallel_size) if seed != mesh.data_rank]
    own.append(give_gradients(model, mesh, mesh.data_rank))
    mean = {name: sum(wholes[name] for wholes in own) / len(own) for name in model.specs}
    sum_partial_gradients(model.parameters(), mesh)
    average_over_replicas(model.parameters(), mesh)
    yield from gradient_errors('mean', model, mean)
    norm = gradient_norm(model.parameters(), mesh)
    yield 'norm', relative_error(norm.double(), torch.cat([g.flatten() for g in mean.values()]).norm())


def overflow(mesh: ParallelMesh) -> Errors:
    """An infinite gradient on any one rank makes all skip the step and halve the scale; none makes all step."""
    for guilty in (*range(mesh.world_size), None):
        model = Parameters(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.)
        scaler = torch.amp.GradScaler('cpu', init_scale=8., growth_interval=1000)
        scaler.scale(torch.ones(()))  # makes the scale
        give_gradients(model, mesh)
        if mesh.rank == guilty:
            model.rows.grad[0, 0] = math.inf
        GradientStep(parameters=[*model.parameters()], mesh=mesh, optimizer=optimizer, scaler=scaler).run('unscale')
        stepped = bool(model.columns.detach().abs().sum() > 0)
        yield f'rank {guilty} overflows: step', 0. if stepped == (guilty is None) else math.inf
        expected = 8. if guilty is None else 4.
        yield f'rank {guilty} overflows: scale', abs(scaler.get_scale() - expected)


def overflow_where_nothing_is_trained(mesh: ParallelMesh) -> Errors:
    """A rank without gradients (a frozen stage) agrees too, instead of letting the others wait."""
    model = Parameters(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.)
    scaler = torch.amp.GradScaler('cpu', init_scale=8., growth_interval=1000)
    scaler.scale(torch.ones(()))
    if mesh.rank == 0:
        give_gradients(model, mesh)
        model.rows.grad[0, 0] = math.inf
    GradientStep(parameters=[*model.parameters()], mesh=mesh, optimizer=optimizer, scaler=scaler).run('unscale')
    yield 'scale', 0. if scaler.get_scale() == 4. else math.inf


# ---- Whole models ----

VOCABULARY = 127
CASE = Case(family='llama', layers=2, tied=True, heads=4, key_value_heads=2)
LENGTHS = (3, 9, 17, 30)
PROMPTS = (1, 4, 0, 11)  # tokens without a label at the start


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    result = []
    for length, prompt in zip(LENGTHS, PROMPTS):
        ids = torch.randint(0, VOCABULARY, (length, ), generator=generator)
        labels = ids.clone()
        labels[:prompt] = -100
        result.append({'input_ids': ids, 'labels': labels})
    return result


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Right-padded, as ms-swift does."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row['input_ids'] for row in rows], batch_first=True)
    mask = pad([torch.ones_like(row['input_ids']) for row in rows], batch_first=True)
    labels = pad([row['labels'] for row in rows], batch_first=True, padding_value=-100)
    return {'input_ids': ids, 'attention_mask': mask, 'labels': labels}


def num_label_tokens() -> int:
    return sum(int((row['labels'][1:] != -100).sum()) for row in samples())


def accumulate(model: nn.Module, batches: list[dict], mesh: ParallelMesh) -> torch.Tensor:
    """Forward and backward of a replica's batches as the trainer does them; the loss over all replicas."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        labels = batch['labels'][:, 1:]
        chosen = labels != -100
        hidden = hidden_states(model, input_ids=batch['input_ids'], attention_mask=batch['attention_mask'])
        losses = token_losses(model, hidden[:, :-1][chosen], labels[chosen], mesh)
        loss = losses.nll.sum() / num_label_tokens() * mesh.data_parallel_size
        loss.backward()
        total += loss.detach()
    parameters = [p for p in model.parameters() if p.requires_grad]
    GradientStep(parameters=parameters, mesh=mesh).run(last='average over replicas')
    if mesh.data_group is not None:
        dist.all_reduce(total, group=mesh.data_group)
    return total / mesh.data_parallel_size


GROUPINGS = {  # which samples lie in which micro-batch
    'one batch': [[0, 1, 2, 3]],
    'four steps': [[0], [1], [2], [3]],
    'two steps': [[0, 3], [1, 2]],
    'uneven steps': [[3, 0, 1], [2]],
}


def token_mean(mesh: ParallelMesh, directory: str) -> Errors:
    """Loss and gradients do not depend on how samples are dealt to micro-batches and replicas."""
    rows = samples()
    for mode in ('full', 'lora'):
        reference = reference_model(directory, CASE, torch.float64)
        model = build_model(load_config(directory, CASE, torch.float64), mesh, directory=directory)
        if mode == 'lora':
            torch.manual_seed(1)
            config = dict(target_modules=['q_proj', 'o_proj', 'up_proj', 'down_proj'])
            reference = peft.get_peft_model(reference, lora_config(**config))
            warm_adapters(reference)
            model = add_lora(model, lora_config(**config), mesh)
            model.load_state_dict({n: p for n, p in reference.named_parameters() if 'lora_' in n}, strict=False)
        else:
            model.requires_grad_(True)
        # Written with torch's own sum over all label tokens, sample by sample: no batch, no padding.
        nll = []
        for row in rows:
            logits = reference(input_ids=row['input_ids'][None]).logits[0, :-1].double()
            nll.append(torch.nn.functional.cross_entropy(logits, row['labels'][1:], ignore_index=-100, reduction='sum'))
        expected = sum(nll) / num_label_tokens()
        expected.backward()
        grads = {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
        for name, grouping in GROUPINGS.items():
            if len(grouping) % mesh.data_parallel_size:
                continue
            model.zero_grad()
            own = grouping[mesh.data_rank::mesh.data_parallel_size]
            loss = accumulate(model, [collated([rows[i] for i in group]) for group in own], mesh)
            yield f'{mode} {name} loss', relative_error(loss, expected.detach())
            for key, parameter in model.named_parameters():
                if parameter.requires_grad:
                    yield f'{mode} {name} {key}', relative_error(parameter.grad, spec_of(parameter).slice(grads[key]))


def loss_at_random_initialisation(mesh: ParallelMesh, directory: str) -> Errors:
    """|loss - ln V| / bound, times FLOAT32.

    -log p = log sum exp z_j - z_label lies within 2 max |z| of ln V, and |z| <= |hidden| |row| (Cauchy-Schwarz): hidden
    is a normed vector with weight 1, of length sqrt(H); rows have numbers of at most 5.5 standard deviations.
    """
    std, size = 1e-6, CASE.config().hidden_size
    bound = 2 * size**0.5 * (size**0.5 * 5.5 * std) + 1e-7 * math.log(VOCABULARY)
    model = build_model(load_config(directory, CASE, torch.float64), mesh, directory=directory)
    own = [collated([row]) for row in samples()[mesh.data_rank::mesh.data_parallel_size]]
    loss = accumulate(model.requires_grad_(True), own, mesh)
    yield 'ln V', abs(float(loss) - math.log(VOCABULARY)) / bound * FLOAT32


def small_initialisation(directory: str) -> str:
    config = CASE.config()
    config.initializer_range = 1e-6
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(directory)
    return directory


CHECKS = (norm_and_clipping, small_buckets, low_precision, nothing_trained, replicas, overflow,
          overflow_where_nothing_is_trained)
MODEL_CHECKS = (token_mean, loss_at_random_initialisation)


def run_checks(tensor_parallel_size: int) -> dict[str, list[tuple[str, float]]]:
    mesh = ParallelMesh.create(tensor_parallel_size=tensor_parallel_size)
    return {check.__name__: [(what, error) for what, error in check(mesh) if not error <= FLOAT32] for check in CHECKS}


def run_model_checks(sizes: list[int], directories: tuple[str, str]) -> dict[tuple, list[tuple[str, float]]]:
    faults = {}
    for size in sizes:
        mesh = ParallelMesh.create(tensor_parallel_size=size)
        for check, directory in zip(MODEL_CHECKS, directories):
            faults[check.__name__, mesh.tensor_parallel_size,
                   mesh.data_parallel_size] = [(what, error) for what, error in check(mesh, directory)
                                               if not error <= MODEL]
    return faults


LAYOUTS = [(4, 2), (3, 3)]  # (processes, T): with two replicas, and with three ranks that overlap


@pytest.fixture(scope='module', params=LAYOUTS, ids=['t2d2', 't3d1'])
def faults(request) -> Callable[[str], dict[int, list]]:
    """Launches all checks once for each layout; gives the faults of one, by rank."""
    answers = launch(request.param[0], run_checks, request.param[1])
    return lambda name: {rank: answer[name][:5] for rank, answer in enumerate(answers) if answer[name]}


def test_norm_and_clipping(faults):
    """A sharded, shared or tied parameter would count twice or not at all, and clipping act at another gradient."""
    assert not faults('norm_and_clipping')


def test_buckets(faults):
    """Gradients that do not fit into one bucket, or are of another type, would be summed into the wrong place."""
    assert not faults('small_buckets')


def test_norm_of_16_bit_gradients(faults):
    """The norm would be rounded to two digits, and a norm above 65504 be infinite in fp16."""
    assert not faults('low_precision')


def test_ranks_without_gradients(faults):
    """A frozen stage would make the others wait for ever."""
    assert not faults('nothing_trained')


def test_mean_over_replicas(faults):
    """Replicas would drift apart, or the learning rate would act d-fold."""
    assert not faults('replicas')


def test_overflow_is_everywhere(faults):
    """In fp16, one rank would skip a step that the others take: their weights no longer belong to one model."""
    assert not faults('overflow')


def test_overflow_with_a_rank_that_trains_nothing(faults):
    """In fp16, a frozen stage would make the others wait for ever."""
    assert not faults('overflow_where_nothing_is_trained')


@pytest.fixture(scope='module')
def model_faults(tmp_path_factory) -> dict[tuple, Any]:
    """Both model checks for t and d in {1, 2}."""
    directory = tmp_path_factory.mktemp('models')
    directories = (make_checkpoint(CASE, str(directory / 'random')), small_initialisation(str(directory / 'small')))
    answers = [
        *launch(1, run_model_checks, [1], directories), *launch(2, run_model_checks, [1, 2], directories),
        *launch(4, run_model_checks, [2], directories)
    ]
    merged: dict[tuple, Any] = {}
    for answer in answers:
        for key, found in answer.items():
            merged.setdefault(key, []).extend(found[:5])
    return merged


@pytest.mark.parametrize('t', [1, 2])
@pytest.mark.parametrize('d', [1, 2])
def test_token_mean(model_faults, t, d):
    """Short answers would weigh more than long ones, depending on how samples fall into micro-batches and replicas."""
    assert not model_faults['token_mean', t, d]


@pytest.mark.parametrize('t', [1, 2])
@pytest.mark.parametrize('d', [1, 2])
def test_loss_at_random_initialisation(model_faults, t, d):
    """The logged loss would be multiplied by a number of processes, or lack the tokens of other ranks."""
    assert not model_faults['loss_at_random_initialisation', t, d]
