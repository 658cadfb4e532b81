"""Which slice each rank holds. Expected values are written down or found by enumeration, never by the code under test.

A failure means that a rank computes with the wrong heads, or that an element of a weight is lost, held twice by
mistake, or counted twice in the gradient norm.
"""
import copy
import itertools
import math
import pytest
import torch
from torch import nn

from swift_megatron.sharding import (RECORDS, ShardSpec, even_layout, fused, head_layout, intermediate_layout, joined,
                                     length, record_parameters, scaled, set_records, spec_of)

HEADS = [  # (query heads, key/value heads, T), query heads per rank, key/value heads per rank
    ((9, 3, 2), [6, 3], [[0, 1], [2]]),
    ((9, 3, 3), [3, 3, 3], [[0], [1], [2]]),
    ((9, 3, 4), None, None),
    ((9, 3, 8), None, None),
    ((14, 2, 2), [7, 7], [[0], [1]]),
    ((14, 2, 4), None, None),
    ((14, 2, 8), None, None),
    ((12, 2, 3), [4, 4, 4], [[0], [0, 1], [1]]),
    ((10, 5, 4), [4, 2, 2, 2], [[0, 1], [2], [3], [4]]),
    ((8, 1, 2), [4, 4], [[0], [0]]),
    ((28, 4, 8), None, None),
    ((40, 8, 3), [15, 15, 10], [[0, 1, 2], [3, 4, 5], [6, 7]]),
    ((40, 8, 8), [5] * 8, [[i] for i in range(8)]),
    ((52, 52, 8), [7, 7, 7, 7, 6, 6, 6, 6], None),
]
# The largest number of query heads on a rank where several cuts are as good: no cut into whole heads has a smaller one
# (a group of 3 or 7 heads cannot be shared by 2 ranks evenly, and 9 heads on 4 ranks in regular pieces need 3 on one).
LARGEST = {(9, 3, 4): 3, (9, 3, 8): 2, (14, 2, 4): 4, (14, 2, 8): 2, (28, 4, 8): 4}

GRID = [(heads, key_value, size) for heads in range(1, 33) for key_value in range(1, heads + 1)
        if heads % key_value == 0 for size in (1, 2, 3, 4, 5, 6, 8, 16) if size <= heads]
GRID += [(64, 8, size) for size in (8, 9, 16, 24, 32, 64)]


def elements(ranges):
    return [i for start, stop in ranges for i in range(start, stop)]


@pytest.mark.parametrize('sizes, query, key_value', HEADS, ids=lambda value: '-'.join(map(str, value)) if value else '')
def test_heads_of_real_models(sizes, query, key_value):
    """A model that users have (SmolLM2, Qwen2.5, Llama 3, ...) would be refused or split unevenly beyond need."""
    layout = head_layout(*sizes)
    if query is not None:
        assert [length(ranges) for ranges in layout.query] == query
    if key_value is not None:
        assert [elements(ranges) for ranges in layout.key_value] == key_value
    if sizes in LARGEST:
        assert max(map(length, layout.query)) == LARGEST[sizes]


@pytest.mark.parametrize('check', ['partition', 'attention', 'groups'])
def test_heads_of_any_model(check):
    """A query head would be lost or computed twice, or would attend to another head's keys."""
    for heads, key_value, size in GRID:
        layout, group = head_layout(heads, key_value, size), heads // key_value
        case = f'{heads} heads, {key_value} key/value heads, T={size}: {layout}'
        if check == 'partition':
            assert len(layout.query) == len(layout.key_value) == size, case
            assert sum(map(elements, layout.query), []) == list(range(heads)), case
            assert set(sum(map(elements, layout.key_value), [])) == set(range(key_value)), case
        elif check == 'attention':
            for query, own in zip(map(elements, layout.query), map(elements, layout.key_value)):
                # Local query head i attends to local key/value head i // (local group), as repeat_kv does it.
                assert query and len(query) % len(own) == 0, case
                attended = [own[i // (len(query) // len(own))] for i in range(len(query))]
                assert [head // group for head in query] == attended, case
        elif size <= key_value:
            assert sum(map(elements, layout.key_value), []) == list(range(key_value)), case
            for query, own in zip(map(elements, layout.query), map(elements, layout.key_value)):
                assert query == [head for head in range(heads) if head // group in own], case


def regular_cuts(heads, group, size):
    """(largest, copies) of every cut into ranges that use each of their key/value heads equally often."""
    for inner in itertools.combinations(range(1, heads), size - 1):
        bounds = (0, *inner, heads)
        pieces = [[head // group for head in range(a, b)] for a, b in zip(bounds, bounds[1:])]
        if all(len({piece.count(g) for g in set(piece)}) == 1 for piece in pieces):
            yield max(map(len, pieces)), sum(len(set(piece)) for piece in pieces)


def test_shared_heads_are_cut_best():
    """The slowest rank would have more heads than it needs to, or ranks hold more key/value heads than they need."""
    for heads, key_value, size in [(9, 3, 4), (9, 3, 8), (12, 2, 3), (14, 2, 4), (14, 2, 8), (8, 1, 2), (12, 4, 5),
                                   (12, 4, 6), (12, 3, 5), (16, 2, 3), (16, 4, 6), (15, 3, 4), (16, 2, 6), (12, 2, 5),
                                   (18, 3, 4)]:
        layout = head_layout(heads, key_value, size)
        found = max(map(length, layout.query)), sum(map(length, layout.key_value))
        assert found == min(regular_cuts(heads, heads // key_value, size)), (heads, key_value, size, layout)


@pytest.mark.parametrize('heads, key_value, size, message', [
    (4, 2, 5, '5 ranks are more than the 4 query heads'),
    (9, 2, 2, '9 query heads are no multiple of 2 key/value heads'),
])
def test_impossible_heads_are_refused(heads, key_value, size, message):
    """A rank would have no head, or attention would read past its keys."""
    with pytest.raises(ValueError, match=message):
        head_layout(heads, key_value, size)


def test_even_layout():
    """A row of the vocabulary or of the MLP would be lost, or one rank would hold much more than the others."""
    assert even_layout(127, 3) == (((0, 43), ), ((43, 85), ), ((85, 127), ))
    assert even_layout(5, 3) == (((0, 2), ), ((2, 4), ), ((4, 5), ))
    assert even_layout(40, 3, multiple=8) == (((0, 16), ), ((16, 32), ), ((32, 40), ))
    for size, parts, multiple in itertools.product(range(1, 65), range(1, 9), (1, 2, 8)):
        if size % multiple or size // multiple < parts:
            with pytest.raises(
                    ValueError, match=f'{size} elements cannot be cut into {parts} parts of multiples of {multiple}'):
                even_layout(size, parts, multiple)
            continue
        layout = even_layout(size, parts, multiple)
        sizes = [length(ranges) for ranges in layout]
        assert sum(map(elements, layout), []) == list(range(size))
        assert all(n % multiple == 0 for n in sizes) and max(sizes) - min(sizes) <= multiple
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    'size, parts, expected',
    [
        (1536, 2, [768, 768]),
        (1536, 3, [512, 512, 512]),
        (4864, 3, [1624, 1624, 1616]),  # 608 blocks of 8
        (96, 7, [16, 16, 16, 16, 16, 8, 8]),
        (90, 4, [23, 23, 22, 22]),  # no multiple of 8
        (16, 3, [6, 5, 5]),  # fewer blocks of 8 than ranks
    ])
def test_intermediate_layout(size, parts, expected):
    """The MLP would be cut into odd sizes, on which matrix kernels are slow, or lose neurons."""
    layout = intermediate_layout(size, parts)
    assert [length(ranges) for ranges in layout] == expected
    assert sum(map(elements, layout), []) == list(range(size))


def test_fused_projections():
    """A rank's part of a fused qkv or gate_up projection would mix queries with keys, or gates with ups."""
    heads = head_layout(12, 2, 3)
    layout = fused(scaled(heads.query, 2), scaled(heads.key_value, 2, 24), scaled(heads.key_value, 2, 28))
    assert layout == (((0, 8), (24, 26), (28, 30)), ((8, 16), (24, 32)), ((16, 24), (26, 28), (30, 32)))
    half = even_layout(6, 2)
    assert fused(half, scaled(half, 1, 6)) == (((0, 3), (6, 9)), ((3, 6), (9, 12)))
    assert joined(((0, 2), (2, 5), (6, 7), (4, 6))) == ((0, 5), (6, 7), (4, 6))  # the order is the order of storage


LAYOUTS = {  # of an axis of 12 elements
    'even': (((0, 4), ), ((4, 8), ), ((8, 12), )),
    'uneven': (((0, 7), ), ((7, 8), ), ((8, 12), )),
    'fused': (((0, 1), (6, 9)), ((1, 3), (9, 10)), ((3, 6), (10, 12))),
    'shared': (((0, 8), ), ((0, 8), ), ((8, 12), )),
    'overlapping': (((0, 5), ), ((3, 9), ), ((4, 12), )),
    'fused and shared': (((0, 2), (6, 9)), ((2, 4), (6, 9), (11, 12)), ((4, 6), (8, 12))),
    'out of order': (((6, 9), (0, 2)), ((2, 6), ), ((10, 12), (9, 10))),
}


def specs(layout, axis):
    shape = (12, 5) if axis == 0 else (2, 12, 3)
    return [ShardSpec(global_shape=shape, rank=rank, size=3, axis=axis, layout=layout) for rank in range(3)]


@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize('name', LAYOUTS)
def test_slices(name, axis):
    """Loading, saving or resuming would take other rows than the layout says."""
    layout = LAYOUTS[name]
    whole = torch.randn(specs(layout, axis)[0].global_shape)
    rebuilt = torch.full_like(whole, float('nan'))
    for rank, spec in enumerate(specs(layout, axis)):
        local = spec.slice(whole)
        assert torch.equal(local, whole.index_select(axis, torch.tensor(elements(layout[rank]))))
        assert spec.ranges == layout[rank] and spec.shape_of(rank) == spec.local_shape == tuple(local.shape)
        assert local.data_ptr() != whole.data_ptr()  # a copy: whole tensors can be freed
        spec.place(rebuilt, local, rank)
    assert torch.equal(rebuilt, whole)


@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize('name', LAYOUTS)
def test_every_element_is_counted_once(name, axis):
    """The gradient norm, and so clipping, would count shared key/value heads twice or not at all."""
    layout = LAYOUTS[name]
    shape = specs(layout, axis)[0].global_shape
    whole = torch.arange(1., 1 + math.prod(shape), dtype=torch.float64).reshape(shape)
    counted = []
    for rank, spec in enumerate(specs(layout, axis)):
        local = spec.slice(whole)
        owned = spec.owned(local)
        assert spec.num_owned() == sum(view.numel() for view in owned) and spec.num_local == local.numel()
        for view in owned:
            assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()  # views, to be scaled
        # Of several copies the lowest rank's counts.
        earlier = set(sum(map(elements, layout[:rank]), []))
        expected = whole.index_select(
            axis, torch.tensor([i for i in elements(layout[rank]) if i not in earlier], dtype=torch.long))
        values = torch.cat([view.flatten() for view in owned]) if owned else torch.empty(0, dtype=torch.float64)
        assert torch.equal(values.sort().values, expected.flatten().sort().values)
        counted.append(values)
    assert torch.equal(torch.cat(counted).sort().values, whole.flatten())
    assert specs(layout, axis)[0].has_copies == (sum(map(length, layout)) > 12)


def test_whole_tensors():
    """A replicated parameter would be cut, or be counted once for each rank."""
    tensor = torch.randn(3, 4)
    replicated = [ShardSpec(global_shape=(3, 4), rank=rank, size=2) for rank in range(2)]
    assert all(spec.slice(tensor) is tensor and spec.has_copies and spec.local_shape == (3, 4) for spec in replicated)
    assert [spec.num_owned() for spec in replicated] == [12, 0]
    alone = ShardSpec(global_shape=(3, 4))
    assert alone.owned(tensor)[0] is tensor and not alone.has_copies and alone.num_owned() == alone.num_local == 12
    target = torch.empty(3, 4)
    replicated[1].place(target, tensor, 1)
    assert torch.equal(target, tensor)
    scalar = ShardSpec(global_shape=(), size=2)
    assert scalar.num_owned() == scalar.num_local == 1


class Cut(nn.Module):
    """A module that holds rows 0-2 and 6-7 of 8."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))
        self.bias = nn.Parameter(torch.zeros(2))
        layout = (((0, 2), (6, 8)), ((2, 6), ))
        set_records(self, {'weight': ShardSpec(global_shape=(8, 3), size=2, axis=0, layout=layout, partial=True)})


def test_modules_load_whole_tensors_by_taking_their_slice():
    """Adapters and full checkpoints in PEFT's or Hugging Face's files would not load on a partitioned model."""
    whole = torch.randn(8, 3)
    expected = torch.cat([whole[0:2], whole[6:8]])
    model = nn.ModuleDict({'inner': Cut()})
    model.load_state_dict({'inner.weight': whole, 'inner.bias': torch.ones(2)})
    assert torch.equal(model['inner'].weight, expected) and torch.equal(model['inner'].bias, torch.ones(2))
    model.load_state_dict({'inner.weight': expected * 2, 'inner.bias': torch.ones(2)})  # a slice stays a slice
    assert torch.equal(model['inner'].weight, expected * 2)
    with pytest.raises(RuntimeError, match='size mismatch'):
        model.load_state_dict({'inner.weight': whole[:7], 'inner.bias': torch.ones(2)})


def test_copied_modules_keep_their_records():
    """A trained copy of the head (PEFT's modules_to_save) would be saved as a slice, or counted on every rank."""
    model = nn.ModuleDict({'original': Cut()})
    model['copy'] = copy.deepcopy(model['original'])
    record_parameters(model, rank=0, size=2)
    for name in ('original', 'copy'):
        spec = spec_of(model[name].weight)
        assert (spec.global_shape, spec.axis, spec.partial, spec.name) == ((8, 3), 0, True, f'{name}.weight')
        bias = spec_of(model[name].bias)
        assert (bias.axis, bias.partial, bias.size, bias.has_copies) == (None, False, 2, True)
    getattr(model['copy'], RECORDS)['bias'] = ShardSpec(global_shape=(2, ), size=2, partial=True)
    record_parameters(model, rank=0, size=2)
    assert spec_of(model['copy'].bias).partial and not spec_of(model['original'].bias).partial
    whole = torch.randn(8, 3)
    model['copy'].load_state_dict({'weight': whole, 'bias': torch.zeros(2)})
    assert torch.equal(model['copy'].weight, torch.cat([whole[:2], whole[6:]]))


def test_a_record_that_does_not_fit_is_an_error():
    """A parameter that was replaced without its record would be saved and reduced by a wrong one."""
    module = Cut()
    module.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(AssertionError, match='weight'):
        record_parameters(module, rank=0, size=2)
