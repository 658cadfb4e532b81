"""Which slice of which tensor a tensor-parallel rank holds: ranges, layouts, head assignment, and the record of a
parameter.

Everything that loads, initialises, reduces, counts, clips, saves or resumes a parameter reads its `ShardSpec`; nothing
else in the package knows how a tensor is cut. A slice is a list of ranges, not the r-th chunk: heads are cut at head
boundaries, fused projections part by part, and a key/value head may be held by several ranks.

T is the tensor-parallel size.
"""
import dataclasses
import math
import torch
from dataclasses import dataclass
from torch import nn
from typing import Literal, Optional

Range = tuple[int, int]  # half-open, in elements of the cut axis of the whole tensor
Ranges = tuple[Range, ...]  # what one rank holds, in the order in which it stores it
Layout = tuple[Ranges, ...]  # what each of the T ranks holds


def length(ranges: Ranges) -> int:
    """Number of elements that `ranges` cover."""
    return sum(stop - start for start, stop in ranges)


def joined(ranges: Ranges) -> Ranges:
    """`ranges` with neighbours that touch made one, order kept."""
    result: list[Range] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def even_layout(size: int, parts: int, multiple: int = 1) -> Layout:
    """Cuts `size` elements into `parts` contiguous ranges of whole multiples, as even as they go; the first are larger.

    Raises:
        ValueError: if `size` is no multiple of `multiple` or there are fewer multiples than parts.
    """
    units, rest = divmod(size, multiple)
    if rest or units < parts:
        raise ValueError(f'{size} elements cannot be cut into {parts} parts of multiples of {multiple}')
    base, larger = divmod(units, parts)
    bounds = [multiple * (i * base + min(i, larger)) for i in range(parts + 1)]
    return tuple(((bounds[i], bounds[i + 1]), ) for i in range(parts))


def scaled(layout: Layout, factor: int, offset: int = 0) -> Layout:
    """`layout` in units of `factor` elements (heads -> elements), shifted by `offset`."""
    return tuple(joined(tuple((offset + a * factor, offset + b * factor) for a, b in ranges)) for ranges in layout)


def fused(*parts: Layout) -> Layout:
    """Layout of a projection whose parts (q, k, v or gate, up) lie one after the other, each cut by its own layout."""
    return tuple(joined(sum(ranges, ())) for ranges in zip(*parts))


def intermediate_layout(size: int, parts: int, block: int = 1) -> Layout:
    """Cut of an MLP's intermediate size: in whole blocks of a quantised weight where there are enough of them, else
    even where it divides, else in multiples of 8 or 1 (kernels like multiples).
    """
    if block > 1 and size % block == 0 and size // block >= parts:
        return even_layout(size, parts, block)
    if size % parts == 0:
        return even_layout(size, parts)
    return even_layout(size, parts, 8 if size % 8 == 0 and size // 8 >= parts else 1)


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """Which attention heads each rank computes, in units of heads.

    `query` is a partition of the query heads. `key_value` may hold a head on several ranks. On every rank the number of
    query heads is a multiple of the number of key/value heads, as grouped-query attention kernels need it.
    """
    query: Layout
    key_value: Layout


def head_layout(num_heads: int, num_key_value_heads: int, parts: int) -> HeadLayout:
    """Deals attention heads to `parts` ranks.

    While there are enough key/value heads, whole groups (a key/value head with its query heads) are dealt out, unevenly
    if need be. With more ranks than key/value heads, a head is held by several ranks and the query heads are cut so
    that the largest rank is as small as possible.

    Raises:
        ValueError: if there are more ranks than query heads, or the query heads are no multiple of the key/value heads.
    """
    if num_heads % num_key_value_heads:
        raise ValueError(f'{num_heads} query heads are no multiple of {num_key_value_heads} key/value heads')
    if parts > num_heads:
        raise ValueError(f'{parts} ranks are more than the {num_heads} query heads')
    group = num_heads // num_key_value_heads
    if parts <= num_key_value_heads:
        key_value = even_layout(num_key_value_heads, parts)
        return HeadLayout(query=scaled(key_value, group), key_value=key_value)
    bounds = _smallest_largest_cut(num_heads, group, parts)
    query = tuple(((a, b), ) for a, b in zip(bounds, bounds[1:]))
    key_value = tuple(((a // group, (b - 1) // group + 1), ) for a, b in zip(bounds, bounds[1:]))
    return HeadLayout(query=query, key_value=key_value)


def _is_regular(start: int, stop: int, group: int) -> bool:
    """Whether query heads [start, stop) use every key/value head they touch equally often."""
    counts = {
        min(stop, (g + 1) * group) - max(start, g * group)
        for g in range(start // group, (stop - 1) // group + 1)
    }
    return len(counts) == 1


def _smallest_largest_cut(num_heads: int, group: int, parts: int) -> list[int]:
    """Bounds of `parts` regular, non-empty ranges over the heads: smallest maximum, then fewest key/value copies."""
    best: list[dict[int, tuple[tuple[int, int], list[int]]]] = [{0: ((0, 0), [0])}]
    for part in range(parts):
        reached: dict[int, tuple[tuple[int, int], list[int]]] = {}
        for start, ((largest, copies), bounds) in best[-1].items():
            for stop in range(start + 1, num_heads - (parts - part - 1) + 1):
                if not _is_regular(start, stop, group):
                    continue
                touched = (stop - 1) // group - start // group + 1
                cost = (max(largest, stop - start), copies + touched)
                if stop not in reached or cost < reached[stop][0]:
                    reached[stop] = (cost, [*bounds, stop])
        best.append(reached)
    return best[-1][num_heads][1]


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """The record of one parameter on one tensor-parallel rank.

    Args:
        global_shape: Shape of the whole tensor, as the unsharded model has it.
        rank: This rank within the tensor-parallel group.
        size: T.
        axis: The dimension that is cut; None when every rank holds the whole tensor.
        layout: What each rank holds of that dimension; empty when `axis` is None.
        partial: Whether the gradients of the copies of an element on several ranks are partial sums that have to be
            added up (a replicated LoRA factor, a shared key/value head). False: the copies have equal gradients.
        tie: 'source' or 'copy' for a token embedding and the output head of other pipeline stage that is the same
            parameter in the unsharded model: their gradients are added up, and the copy counts for nothing.
        name: The parameter's name in the model.
    """
    global_shape: tuple[int, ...]
    rank: int = 0
    size: int = 1
    axis: Optional[int] = None
    layout: Layout = ()
    partial: bool = False
    tie: Optional[Literal['source', 'copy']] = None
    name: str = ''

    @property
    def ranges(self) -> Ranges:
        """What this rank holds of the cut axis."""
        return self.ranges_of(self.rank)

    def ranges_of(self, rank: int) -> Ranges:
        if self.axis is None:
            return ()
        return self.layout[rank]

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Shape of the slice on `rank`."""
        if self.axis is None:
            return self.global_shape
        shape = list(self.global_shape)
        shape[self.axis] = length(self.layout[rank])
        return tuple(shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.shape_of(self.rank)

    @property
    def has_copies(self) -> bool:
        """Whether some element is held by more than one rank."""
        if self.size == 1:
            return False
        return self.axis is None or sum(map(length, self.layout)) > self.global_shape[self.axis]

    def slice(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the whole tensor (a copy, or `whole` itself when nothing is cut)."""
        if self.axis is None or self.size == 1:
            return whole
        return torch.cat([whole.narrow(self.axis, a, b - a) for a, b in self.ranges], dim=self.axis)

    def place(self, whole: torch.Tensor, local: torch.Tensor, rank: int) -> None:
        """Writes `local`, the slice of `rank`, into the whole tensor."""
        if self.axis is None:
            whole.copy_(local)
            return
        position = 0
        for a, b in self.ranges_of(rank):
            whole.narrow(self.axis, a, b - a).copy_(local.narrow(self.axis, position, b - a))
            position += b - a

    def owned(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Views of the elements of the local slice that this rank counts: of several copies the lowest rank's."""
        if self.tie == 'copy':
            return []
        if not self.has_copies:
            return [local]
        if self.axis is None:
            return [local] if self.rank == 0 else []
        views, position = [], 0
        for a, b in self.ranges:
            for start, stop in _without(((a, b), ), [r for rank in range(self.rank) for r in self.layout[rank]]):
                views.append(local.narrow(self.axis, position + start - a, stop - start))
            position += b - a
        return views

    def num_owned(self) -> int:
        """Number of elements that this rank counts (sums up to the whole tensor over the ranks)."""
        probe = torch.empty(self.local_shape, device='meta')
        return sum(view.numel() for view in self.owned(probe))

    @property
    def num_local(self) -> int:
        """Number of elements on this rank."""
        return math.prod(self.local_shape)


def _without(ranges: Ranges, taken: list[Range]) -> Ranges:
    """`ranges` less the elements in `taken`."""
    for start, stop in taken:
        pieces: list[Range] = []
        for a, b in ranges:
            pieces += [(a, min(b, start)), (max(a, stop), b)] if a < stop and start < b else [(a, b)]
        ranges = tuple((a, b) for a, b in pieces if a < b)
    return ranges


RECORDS = 'shard_records'  # on a module: how the parameters below it are cut, by name
SPEC = 'shard_spec'  # on a parameter: its own record
MODULES_TO_SAVE = '.modules_to_save.'  # in the names of PEFT's trained copies of whole modules


def set_records(module: nn.Module, records: dict[str, ShardSpec]) -> None:
    """Notes on a module how parameters below it are cut, and makes it load whole tensors by taking its slices.

    The note stays with the module when it is wrapped or copied (PEFT's `modules_to_save`), which a mark on the
    parameter would not; `record_parameters` carries it to the parameters.
    """
    if not hasattr(module, RECORDS):
        setattr(module, RECORDS, {})
        module.register_load_state_dict_pre_hook(_slice_whole_tensors)
    getattr(module, RECORDS).update(records)


def _slice_whole_tensors(module: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    for name, spec in getattr(module, RECORDS).items():
        tensor = state_dict.get(prefix + name)
        if tensor is not None and tuple(tensor.shape) == spec.global_shape != spec.local_shape:
            state_dict[prefix + name] = spec.slice(tensor)


def record_parameters(model: nn.Module, *, rank: int, size: int) -> None:
    """Attaches a record to every parameter; one that no module has a note on is whole, with equal gradients, on all
    ranks.

    Called again after each change of the module tree (adapters, copies of modules).
    """
    records: dict[str, ShardSpec] = {}
    for prefix, module in model.named_modules():
        for name, spec in getattr(module, RECORDS, {}).items():
            records[f'{prefix}.{name}' if prefix else name] = spec
    for name, parameter in model.named_parameters():
        spec = records.get(name) or ShardSpec(global_shape=tuple(parameter.shape), rank=rank, size=size)
        if MODULES_TO_SAVE in name:  # a copy of a tied head is a parameter of its own
            spec = dataclasses.replace(spec, tie=None)
        assert tuple(parameter.shape) == spec.local_shape, (name, tuple(parameter.shape), spec.local_shape)
        setattr(parameter, SPEC, dataclasses.replace(spec, name=name))


def spec_of(parameter: torch.Tensor) -> ShardSpec:
    """The record of a parameter, attached by `record_parameters`."""
    return getattr(parameter, SPEC)
