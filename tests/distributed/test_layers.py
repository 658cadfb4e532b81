"""The package's own layers in float64 against torch.nn, on 2 and 3 ranks.

A failure means that a layer computes something else than its unsharded original, or hands back another gradient. Sums
of at most a few hundred products of numbers near 1 lose at most some 1e-14 of their largest element in float64; 1e-12
leaves room.

Where several ranks hold the same rows (shared key/value heads), each rank uses its copy on its own. The reference then
is one whole tensor that is used by all ranks in turn: `sum_r <Y[rows of r], C_r>`.
"""
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from typing import Any, Callable, Iterator

from swift_megatron.mesh import ParallelMesh
from swift_megatron.optim.gradients import sum_partial_gradients
from swift_megatron.sharding import Layout, even_layout, fused, length, record_parameters, scaled, spec_of
from swift_megatron.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from swift_megatron.tensor_parallel.embedding import VocabParallelEmbedding
from swift_megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from swift_megatron.tensor_parallel.norm import ProjectionRMSNorm
from swift_megatron.tensor_parallel.regions import (copy_to_tensor_parallel_region, gather_from_tensor_parallel_region,
                                                    reduce_from_tensor_parallel_region,
                                                    reduce_within_tensor_parallel_region,
                                                    scatter_to_tensor_parallel_region)
from tests.distributed.test_parity import relative_error
from tests.harness import launch

BOUND = 1e-12
Errors = Iterator[tuple[str, float]]

IN, OUT = 12, 18
LAYOUTS: dict[int, dict[str, Layout]] = {  # T -> cuts of 18 elements
    2: {
        'even': even_layout(18, 2),
        'uneven': (((0, 13), ), ((13, 18), )),
        'fused': fused(even_layout(6, 2), scaled(even_layout(6, 2), 1, 6), scaled(even_layout(6, 2), 1, 12)),
        'shared': (((0, 18), ), ((0, 18), )),
        'overlapping': (((0, 12), ), ((6, 18), )),
    },
    3: {
        'even': even_layout(18, 3),
        'uneven': (((0, 1), ), ((1, 11), ), ((11, 18), )),
        'fused': fused(even_layout(10, 3), scaled(even_layout(8, 3), 1, 10)),
        'shared': (((0, 9), ), ((0, 9), ), ((9, 18), )),
        'overlapping': (((0, 6), (10, 14)), ((6, 10), (10, 18)), ((14, 18), )),
    },
}
PARTITIONS = ('even', 'uneven', 'fused')


def drawn(*shape: int, seed: int = 0, rank: int = 0) -> torch.Tensor:
    """Normal numbers, the same wherever they are drawn with the same seed and rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def part_of(whole: torch.Tensor, layout: Layout, rank: int, dim: int = -1) -> torch.Tensor:
    return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in layout[rank]], dim=dim)


def leaf(value: torch.Tensor) -> torch.Tensor:
    return value.clone().requires_grad_()


def same(value: torch.Tensor, expected: torch.Tensor) -> float:
    """0 if bitwise equal, else infinite."""
    return 0. if torch.equal(value, expected) else float('inf')


# ---- Regions ----


def regions(mesh: ParallelMesh) -> Errors:
    """All pairs against their definitions, with inputs and gradients that must stay as they are."""
    size, rank = mesh.tensor_parallel_size, mesh.tensor_rank
    parts = {name: LAYOUTS[size][name] for name in PARTITIONS}
    ranks = range(size)
    x_of = [drawn(2, 5, OUT, seed=1, rank=r) for r in ranks]  # what each rank puts in, where ranks differ
    grad_of = [drawn(2, 5, OUT, seed=2, rank=r) for r in ranks]
    common, common_grad = drawn(2, 5, OUT, seed=3), drawn(2, 5, OUT, seed=4)
    total_x, total_grad = sum(x_of), sum(grad_of)
    cases: list[tuple[str, Callable, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = [
        # name, function, input, expected output, gradient of the output, expected gradient of the input
        ('copy_to', copy_to_tensor_parallel_region, common, common, grad_of[rank], total_grad),
        ('reduce_from', reduce_from_tensor_parallel_region, x_of[rank], total_x, common_grad, common_grad),
        ('reduce_within', reduce_within_tensor_parallel_region, x_of[rank], total_x, grad_of[rank], total_grad),
    ]
    for name, layout in parts.items():
        whole_grad = torch.empty_like(common)
        for r in ranks:
            index = torch.tensor([i for a, b in layout[r] for i in range(a, b)])
            whole_grad[..., index] = part_of(grad_of[r], layout, r)
        cases += [
            (f'scatter_to {name}', lambda x, m, layout=layout: scatter_to_tensor_parallel_region(x, layout, m), common,
             part_of(common, layout, rank), part_of(grad_of[rank], layout, rank), whole_grad),
            (f'gather_from {name}', lambda x, m, layout=layout: gather_from_tensor_parallel_region(x, layout, m),
             part_of(common, layout, rank), common, common_grad, part_of(common_grad, layout, rank)),
        ]
    for name, function, value, expected, grad, expected_grad in cases:
        for strides in ('contiguous', 'transposed'):
            x, g = leaf(value), grad.clone()
            taken = x
            if strides == 'transposed':
                taken = x.transpose(0, 1).contiguous().transpose(0, 1)
                g = g.transpose(0, 1).contiguous().transpose(0, 1)
            y = function(taken, mesh)
            y.backward(g)
            yield f'{name} {strides} forward', relative_error(y, expected)
            yield f'{name} {strides} backward', relative_error(x.grad, expected_grad)
            yield f'{name} {strides} changed its input', same(taken, value)
            yield f'{name} {strides} changed the gradient it was handed', same(g, grad)
    x = leaf(common)
    copy_to_tensor_parallel_region(x, mesh).sum().backward()  # the gradient is one expanded number
    yield 'copy_to expanded gradient', relative_error(x.grad, torch.full_like(x, float(size)))


# ---- Linears ----


def linear_pair(kind: type, layout: Layout, mesh: ParallelMesh, features: tuple[int, int], bias: bool,
                **options: Any) -> tuple[nn.Module, nn.Module]:
    """(partitioned layer with this rank's slices, whole layer)"""
    torch.manual_seed(7)
    whole = nn.Linear(*features, bias=bias, dtype=torch.float64)
    layer = kind(*features, layout, mesh, bias=bias, dtype=torch.float64, **options)
    layer.load_state_dict(whole.state_dict())
    record_parameters(layer, rank=mesh.tensor_rank, size=mesh.tensor_parallel_size)
    return layer, whole


def parameter_errors(name: str, layer: nn.Module, whole: nn.Module, mesh: ParallelMesh) -> Errors:
    """Gradients, once partial sums are added up, against the slices of the whole layer's."""
    sum_partial_gradients(layer.parameters(), mesh)
    expected = dict(whole.named_parameters())
    for key, parameter in layer.named_parameters():
        yield f'{name} {key}', relative_error(parameter.grad, spec_of(parameter).slice(expected[key].grad))


def column_parallel(mesh: ParallelMesh) -> Errors:
    """Y_i = X W_i^T + b_i for every kind of layout, and with the output gathered."""
    size, rank = mesh.tensor_parallel_size, mesh.tensor_rank
    for name, layout in LAYOUTS[size].items():
        for bias in (False, True):
            layer, whole = linear_pair(ColumnParallelLinear, layout, mesh, (IN, OUT), bias, enters_region=True)
            x, reference = leaf(drawn(2, 5, IN, seed=5)), leaf(drawn(2, 5, IN, seed=5))
            y, expected = layer(x), whole(reference)
            coefficients = [drawn(2, 5, length(layout[r]), seed=6, rank=r) for r in range(size)]
            (y * coefficients[rank]).sum().backward()
            sum((part_of(expected, layout, r) * coefficients[r]).sum() for r in range(size)).backward()
            yield f'{name} output', relative_error(y, part_of(expected, layout, rank))
            yield f'{name} input gradient', relative_error(x.grad, reference.grad)
            yield from parameter_errors(name, layer, whole, mesh)
    for name in PARTITIONS:
        layout = LAYOUTS[size][name]
        layer, whole = linear_pair(
            ColumnParallelLinear, layout, mesh, (IN, OUT), True, enters_region=True, gather_output=True)
        x, reference = leaf(drawn(2, 5, IN, seed=5)), leaf(drawn(2, 5, IN, seed=5))
        y, expected = layer(x), whole(reference)
        (y * drawn(2, 5, OUT, seed=6)).sum().backward()
        (expected * drawn(2, 5, OUT, seed=6)).sum().backward()
        yield f'gathered {name} output', relative_error(y, expected)
        yield f'gathered {name} input gradient', relative_error(x.grad, reference.grad)
        yield from parameter_errors(f'gathered {name}', layer, whole, mesh)


def row_parallel(mesh: ParallelMesh) -> Errors:
    """Y = sum_i X_i W_i^T + b from cut inputs, and from a whole input that the layer cuts itself."""
    size, rank = mesh.tensor_parallel_size, mesh.tensor_rank
    for name in PARTITIONS:
        layout = LAYOUTS[size][name]
        for bias in (False, True):
            for split in (False, True):
                layer, whole = linear_pair(RowParallelLinear, layout, mesh, (OUT, IN), bias, split_input=split)
                reference = leaf(drawn(2, 5, OUT, seed=8))
                x = leaf(reference.detach() if split else part_of(reference.detach(), layout, rank))
                y, expected = layer(x), whole(reference)
                (y * drawn(2, 5, IN, seed=9)).sum().backward()
                (expected * drawn(2, 5, IN, seed=9)).sum().backward()
                title = f'{name} bias={bias} split_input={split}'
                yield f'{title} output', relative_error(y, expected)
                yield f'{title} input gradient', relative_error(
                    x.grad, reference.grad if split else part_of(reference.grad, layout, rank))
                yield from parameter_errors(title, layer, whole, mesh)


# ---- Vocabulary ----


def embedding(mesh: ParallelMesh) -> Errors:
    """Vocabularies that do not divide, a padding token on any rank or none, and a scale."""
    size = mesh.tensor_parallel_size
    for vocabulary in (127, 101, 5):
        ids = torch.randint(0, vocabulary, (3, 40), generator=torch.Generator().manual_seed(vocabulary))
        ids[0, :5] = torch.tensor([0, vocabulary - 1, vocabulary // 2, 0, 3])
        for padding in (None, 0, vocabulary // 2, vocabulary - 1):
            for scale in (None, 1.7):
                torch.manual_seed(1)
                whole = nn.Embedding(vocabulary, 6, padding_idx=padding, dtype=torch.float64)
                with torch.no_grad():
                    whole.weight.normal_()  # the padding row too: it may hold numbers in a checkpoint
                layer = VocabParallelEmbedding(
                    vocabulary,
                    6,
                    even_layout(vocabulary, size),
                    mesh,
                    padding_idx=padding,
                    dtype=torch.float64,
                    scale=None if scale is None else torch.tensor(scale, dtype=torch.float64))
                layer.load_state_dict(whole.state_dict())
                record_parameters(layer, rank=mesh.tensor_rank, size=size)
                y, expected = layer(ids), whole(ids) * (scale or 1.)
                (y * drawn(3, 40, 6, seed=2)).sum().backward()
                (expected * drawn(3, 40, 6, seed=2)).sum().backward()
                title = f'V={vocabulary} padding={padding} scale={scale}'
                yield f'{title} output', relative_error(y, expected)
                yield from parameter_errors(title, layer, whole, mesh)


def logit_cases(vocabulary: int, size: int) -> dict[str, torch.Tensor]:
    """Logits (N, V) that are easy, large, far apart, tied, or partly impossible."""
    tokens = 12
    plain = drawn(tokens, vocabulary, seed=vocabulary)
    tied = plain.round()
    tied[0] = 1.  # all equal
    tied[1, 3] = tied[1, vocabulary - 2] = 50.  # equal on the first and the last rank
    tied[2, vocabulary - 2] = tied[2, vocabulary - 1] = 50.  # equal on one rank
    half = plain.clone()
    (_, last), = even_layout(vocabulary, size)[0]
    half[:, last - 3:] = float('-inf')  # all of the other ranks, and some of the first
    return {
        'plain': plain,
        'shifted by 1e4': plain + 1e4,
        'shifted by -1e4': plain - 1e4,
        'times 1e4': plain * 1e4,
        'tied': tied,
        'impossible tokens': half,
    }


def cross_entropy(mesh: ParallelMesh) -> Errors:
    """-log p of the label, its mean over the vocabulary, the prediction, and their gradients."""
    size, rank = mesh.tensor_parallel_size, mesh.tensor_rank
    for vocabulary in (127, 101):
        layout = even_layout(vocabulary, size)
        (first, _), = layout[rank]
        labels = torch.randint(0, vocabulary, (12, ), generator=torch.Generator().manual_seed(3))
        labels[:3] = torch.tensor([0, vocabulary - 1, layout[0][0][1]])  # at the borders
        for name, logits in logit_cases(vocabulary, size).items():
            possible = name != 'impossible tokens'
            targets = labels if possible else labels % (layout[0][0][1] - 3)
            reference, local = leaf(logits), leaf(part_of(logits, layout, rank))
            result = vocab_parallel_cross_entropy(local, targets, first=first, vocabulary=vocabulary, mesh=mesh)
            log_p = F.log_softmax(reference, dim=-1)
            nll, smooth = -log_p.gather(-1, targets[:, None]).squeeze(-1), -log_p.mean(-1)
            weights, smooth_weights = drawn(12, seed=4), drawn(12, seed=5)
            title = f'V={vocabulary} {name}'
            yield f'{title} nll', relative_error(result.nll, nll)
            # The first of equally probable tokens, as torch.argmax has it.
            expected = torch.tensor([next(i for i, z in enumerate(row) if z == max(row)) for row in logits.tolist()])
            yield f'{title} predictions', same(result.predictions, expected)
            loss, expected_loss = (result.nll * weights).sum(), (nll * weights).sum()
            if possible:
                yield f'{title} smooth', relative_error(result.smooth, smooth)
                loss = loss + (result.smooth * smooth_weights).sum()
                expected_loss = expected_loss + (smooth * smooth_weights).sum()
            loss.backward()
            expected_loss.backward()
            yield f'{title} gradient', relative_error(local.grad, part_of(reference.grad, layout, rank))
            if possible:
                smoothed = F.cross_entropy(reference, targets, reduction='none', label_smoothing=0.1)
                yield f'{title} label smoothing', relative_error(0.9 * result.nll + 0.1 * result.smooth, smoothed)


def low_precision_logits(mesh: ParallelMesh) -> Errors:
    """16-bit logits are summed in float32: the loss is that of the rounded logits, far below 16-bit rounding (4e-3).

    BOUND is for float64; float32 has 6e-8 for each of some additions: errors are scaled by 1e-7.
    """
    layout = even_layout(127, mesh.tensor_parallel_size)
    logits = drawn(12, 127, seed=1).to(torch.bfloat16)
    labels = torch.arange(12) * 10
    (first, _), = layout[mesh.tensor_rank]
    result = vocab_parallel_cross_entropy(
        part_of(logits, layout, mesh.tensor_rank), labels, first=first, vocabulary=127, mesh=mesh)
    yield 'dtype', 0. if result.nll.dtype == torch.float32 else float('inf')
    yield 'nll', relative_error(result.nll, F.cross_entropy(logits.float(), labels, reduction='none')) * 1e-7


# ---- Norm over a cut projection ----


def projection_norm(mesh: ParallelMesh) -> Errors:
    """y = w x / rms(x) over all ranks' x, each element once though ranks share heads."""
    size, rank = mesh.tensor_parallel_size, mesh.tensor_rank
    for name, layout in LAYOUTS[size].items():
        weight = leaf(drawn(OUT, seed=1) + 1.)
        layer = ProjectionRMSNorm(OUT, layout, mesh, eps=1e-5, dtype=torch.float64)
        layer.load_state_dict({'weight': weight.detach()})
        record_parameters(layer, rank=rank, size=size)
        whole = leaf(drawn(2, 5, OUT, seed=2))
        x = leaf(part_of(whole.detach(), layout, rank))
        expected = weight * whole / (whole.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        coefficients = [drawn(2, 5, length(layout[r]), seed=3, rank=r) for r in range(size)]
        y = layer(x)
        (y * coefficients[rank]).sum().backward()
        sum((part_of(expected, layout, r) * coefficients[r]).sum() for r in range(size)).backward()
        yield f'{name} output', relative_error(y, part_of(expected, layout, rank))
        sum_partial_gradients(layer.parameters(), mesh)
        yield f'{name} weight', relative_error(layer.weight.grad, part_of(weight.grad, layout, rank))
        # Gradients of copies of x are partial sums: together they are the whole one.
        total = torch.zeros_like(whole)
        index = torch.tensor([i for a, b in layout[rank] for i in range(a, b)])
        total[..., index] = x.grad
        dist.all_reduce(total)
        yield f'{name} input gradient', relative_error(total, whole.grad)


CHECKS = (regions, column_parallel, row_parallel, embedding, cross_entropy, low_precision_logits, projection_norm)


def run_checks(checks: tuple[Callable[[ParallelMesh], Errors], ...]) -> dict[str, list[tuple[str, float]]]:
    """On every rank: what differs by more than rounding, by check."""
    mesh = ParallelMesh.create(tensor_parallel_size=dist.get_world_size())
    return {check.__name__: [(what, error) for what, error in check(mesh) if not error <= BOUND] for check in checks}


@pytest.fixture(scope='module', params=[2, 3])
def faults(request) -> Callable[[str], dict[int, list]]:
    """Launches all checks once for each number of ranks; gives the faults of one, by rank."""
    answers = launch(request.param, run_checks, CHECKS)
    return lambda name: {rank: answer[name][:5] for rank, answer in enumerate(answers) if answer[name]}


def test_regions(faults):
    """Activations or gradients would be wrong in every model, or a collective would overwrite a tensor of others."""
    assert not faults('regions')


def test_column_parallel_linear(faults):
    """q, k, v, gate, up or the head would compute or learn something else."""
    assert not faults('column_parallel')


def test_row_parallel_linear(faults):
    """o or down would compute or learn something else; a bias would be added once for each rank."""
    assert not faults('row_parallel')


def test_vocab_parallel_embedding(faults):
    """Tokens at the borders of the ranks' parts, or the padding token, would have another embedding or gradient."""
    assert not faults('embedding')


def test_vocab_parallel_cross_entropy(faults):
    """The loss, label smoothing, token_acc or the gradient of the head would be wrong."""
    assert not faults('cross_entropy')


def test_cross_entropy_of_16_bit_logits(faults):
    """The loss of a bf16 run would be rounded to two digits."""
    assert not faults('low_precision_logits')


def test_projection_rms_norm(faults):
    """OLMo 2's queries and keys would be normed by one rank's part of them."""
    assert not faults('projection_norm')


def test_one_rank_is_the_identity():
    """A run without tensor parallelism would copy, or need a process group."""
    x, layout, mesh = torch.randn(2, 3), (((0, 3), ), ), ParallelMesh()
    assert copy_to_tensor_parallel_region(x, mesh) is x
    assert reduce_from_tensor_parallel_region(x, mesh) is x
    assert reduce_within_tensor_parallel_region(x, mesh) is x
    assert scatter_to_tensor_parallel_region(x, layout, mesh) is x
    assert gather_from_tensor_parallel_region(x, layout, mesh) is x
