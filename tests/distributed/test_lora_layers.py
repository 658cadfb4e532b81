"""LoRA on the package's own layers in float64 against plain PEFT on torch.nn, on 2 and 3 ranks.

A failure means that adapters train happily and are wrong, or are other ones once merged. The bound is that of
tests/distributed/test_layers.py.
"""
import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from typing import Any, Callable

from swift_megatron.lora.inject import add_lora
from swift_megatron.mesh import ParallelMesh
from swift_megatron.optim.gradients import sum_partial_gradients
from swift_megatron.sharding import Layout, even_layout, length, record_parameters, spec_of
from swift_megatron.tensor_parallel.embedding import VocabParallelEmbedding
from swift_megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.distributed.test_layers import IN, LAYOUTS, OUT, PARTITIONS, Errors, drawn, run_checks, same
from tests.distributed.test_parity import relative_error
from tests.harness import launch


class Small(nn.Module):
    """Embedding, column-parallel layer with bias, row-parallel layer with bias, head; whole or partitioned."""

    def __init__(self, mesh: ParallelMesh | None = None, layout: Layout = ()) -> None:
        super().__init__()
        options = dict(bias=True, dtype=torch.float64)
        if mesh is None:
            self.tokens = nn.Embedding(101, IN, dtype=torch.float64)
            self.up, self.down = nn.Linear(IN, OUT, **options), nn.Linear(OUT, IN, **options)
            self.head = nn.Linear(IN, 101, dtype=torch.float64)
        else:
            vocabulary = even_layout(101, mesh.tensor_parallel_size)
            self.tokens = VocabParallelEmbedding(101, IN, vocabulary, mesh, dtype=torch.float64)
            self.up = ColumnParallelLinear(IN, OUT, layout, mesh, enters_region=True, **options)
            self.down = RowParallelLinear(OUT, IN, layout, mesh, **options)
            self.head = ColumnParallelLinear(
                IN, 101, vocabulary, mesh, gather_output=True, enters_region=True, **options)

    def forward(self, ids: torch.Tensor, recompute: str = '') -> torch.Tensor:
        hidden = self.tokens(ids)
        if recompute:
            hidden = hidden + checkpoint(self.block, hidden, use_reentrant=recompute == 'reentrant')
        else:
            hidden = hidden + self.block(hidden)
        return self.head(hidden)

    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(hidden)))


TARGETS = ['tokens', 'up', 'down', 'head']
IDS = torch.arange(24).reshape(2, 12) * 4


def lora_pair(mesh: ParallelMesh, layout: Layout, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """(partitioned, whole) with the same adapters, whose factors are all different from zero."""
    torch.manual_seed(1)
    plain = Small()
    partitioned = Small(mesh, layout)
    partitioned.load_state_dict(plain.state_dict())
    config = dict(r=4, lora_alpha=12, target_modules=TARGETS, **settings)
    whole = peft.get_peft_model(plain, peft.LoraConfig(**config))
    model = add_lora(partitioned, peft.LoraConfig(**config), mesh)
    factors = {
        name: drawn(*parameter.shape, seed=i) * 0.3
        for i, (name, parameter) in enumerate(whole.named_parameters()) if 'lora_' in name
    }
    for either in (whole, model):
        either.load_state_dict(factors, strict=False)
    return model, whole


def gradient_errors(title: str, model: nn.Module, whole: nn.Module, mesh: ParallelMesh) -> Errors:
    sum_partial_gradients(model.parameters(), mesh)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.requires_grad}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    yield f'{title} trained names', 0. if set(trained) == set(expected) else float('inf')
    for name, parameter in trained.items():
        yield f'{title} {name}', relative_error(parameter.grad, spec_of(parameter).slice(expected[name]))


def run_both(title: str,
             model: nn.Module,
             whole: nn.Module,
             mesh: ParallelMesh,
             recompute: str = '',
             seed: int = 11) -> Errors:
    """Errors of the output and of all gradients, from one random state on all ranks and in the whole model."""
    coefficients = drawn(2, 12, 101, seed=9)
    outputs = []
    for either, how in ((model, recompute), (whole, '')):
        either.zero_grad()
        torch.manual_seed(seed)
        outputs.append(either(IDS, recompute=how))
        (outputs[-1] * coefficients).sum().backward()
    yield f'{title} output', relative_error(*outputs)
    yield from gradient_errors(title, model, whole, mesh)


def lora(mesh: ParallelMesh) -> Errors:
    """Adapters on every kind of layer, scaled by r or its root, one or two of them at a time, and switched off."""
    for name in PARTITIONS:
        layout = LAYOUTS[mesh.tensor_parallel_size][name]
        for rslora in (False, True):
            model, whole = lora_pair(mesh, layout, use_rslora=rslora)
            yield from run_both(f'{name} rslora={rslora}', model, whole, mesh)
    torch.manual_seed(5)
    whole.add_adapter('second', peft.LoraConfig(r=2, lora_alpha=2, target_modules=['up', 'down']))
    model.add_adapter('second', peft.LoraConfig(r=2, lora_alpha=2, target_modules=['up', 'down']))
    record_parameters(model, rank=mesh.tensor_rank, size=mesh.tensor_parallel_size)
    factors = {n: drawn(*p.shape, seed=50 + i) for i, (n, p) in enumerate(whole.named_parameters()) if '.second.' in n}
    for either in (model, whole):
        either.load_state_dict(factors, strict=False)
        either.base_model.set_adapter(['default', 'second'])
    yield from run_both('two adapters', model, whole, mesh)
    with torch.no_grad(), model.disable_adapter(), whole.disable_adapter():
        yield 'disabled adapters', relative_error(model(IDS), whole(IDS))


def merging(mesh: ParallelMesh) -> Errors:
    """Adapters merged into the slices are the slices of the merged weights, and come out again."""
    for name in PARTITIONS:
        model, whole = lora_pair(mesh, LAYOUTS[mesh.tensor_parallel_size][name])
        base = {n: p.detach().clone() for n, p in model.named_parameters() if 'base_layer' in n}
        with torch.no_grad():
            expected = whole(IDS)
            for safe in (False, True):
                model.merge_adapter(safe_merge=safe)
                whole.merge_adapter()
                yield f'{name} merged output', relative_error(model(IDS), expected)
                reference = dict(whole.named_parameters())
                for n, p in model.named_parameters():
                    if 'base_layer' in n:
                        yield f'{name} merged {n}', relative_error(p, spec_of(p).slice(reference[n]))
                model.unmerge_adapter()
                whole.unmerge_adapter()
                yield f'{name} unmerged output', relative_error(model(IDS), expected)
                for n, p in model.named_parameters():
                    if 'base_layer' in n:
                        yield f'{name} unmerged {n}', relative_error(p, base[n])
            model.merge_adapter()
            with model.disable_adapter(), whole.disable_adapter():  # merged and then switched off: merged no more
                yield f'{name} merged, disabled', relative_error(model(IDS), whole(IDS))


def dropout(mesh: ParallelMesh) -> Errors:
    """Masks of the unsharded model, and the same ones when activations are recomputed."""
    for name in PARTITIONS:
        model, whole = lora_pair(mesh, LAYOUTS[mesh.tensor_parallel_size][name], lora_dropout=0.4)
        for recompute in ('', 'reentrant', 'not reentrant'):
            for seed in (11, 12):
                yield from run_both(f'{name} {recompute}', model, whole, mesh, recompute, seed)
        state = torch.random.get_rng_state()
        everywhere = [torch.empty_like(state) for _ in range(mesh.tensor_parallel_size)]
        dist.all_gather(everywhere, state)
        yield f'{name} random states differ', max(same(other, state) for other in everywhere)
        whole.eval()
        model.eval()
        yield f'{name} evaluation', relative_error(model(IDS), whole(IDS))


def masks_of_cut_inputs(mesh: ParallelMesh) -> Errors:
    """Ranks drop different elements of a cut input: their masks are slices of one that is not periodic over the ranks.
    """
    layout = LAYOUTS[mesh.tensor_parallel_size]['even']
    model, _ = lora_pair(mesh, layout, lora_dropout=0.5)
    torch.manual_seed(4)
    ones = torch.ones(2, 5, length(layout[mesh.tensor_rank]), dtype=torch.float64)
    mask = model.base_model.model.down.lora_dropout['default'](ones)
    masks = [torch.empty_like(mask) for _ in range(mesh.tensor_parallel_size)]
    dist.all_gather(masks, mask)
    yield 'equal masks', max(1. if torch.equal(masks[0], other) else 0. for other in masks[1:])
    torch.manual_seed(4)
    whole = F.dropout(torch.ones(2, 5, OUT, dtype=torch.float64), 0.5)
    yield 'slices of one mask', same(torch.cat(masks, -1), whole)


CHECKS = (lora, merging, dropout, masks_of_cut_inputs)


@pytest.fixture(scope='module', params=[2, 3])
def faults(request) -> Callable[[str], dict[int, list]]:
    """Launches all checks once for each number of ranks; gives the faults of one, by rank."""
    answers = launch(request.param, run_checks, CHECKS)
    return lambda name: {rank: answer[name][:5] for rank, answer in enumerate(answers) if answer[name]}


def test_lora_layers(faults):
    """Adapters would train happily and be wrong, the worst kind of fault: nobody sees it before deployment."""
    assert not faults('lora')


def test_merging_adapters(faults):
    """A merged model would be another one than the one trained, or unmerging would damage the base."""
    assert not faults('merging')


def test_dropout_masks(faults):
    """Ranks would see different inputs, or other ones in the recomputation than in the forward pass: wrong gradients.
    """
    assert not faults('dropout')


def test_dropout_masks_of_cut_inputs(faults):
    """The same features would be dropped on every rank: t times fewer independent drops."""
    assert not faults('masks_of_cut_inputs')
