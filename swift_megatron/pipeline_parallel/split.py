"""Which layers each pipeline stage holds. Pure arithmetic; needs no torch.

L layers, p ranks, v chunks per rank; stage s of p v stages lies on rank s mod p (arXiv:2104.04473 section 2.2).
"""
from dataclasses import dataclass
from typing import Optional, Sequence

from ..config import layers_by_hand


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """Contiguous layers of every stage: stage s has layers [bounds[s], bounds[s + 1])."""
    bounds: tuple[int, ...]
    num_ranks: int = 1

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_layers(self) -> int:
        return self.bounds[-1]

    def layers(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stages_of(self, rank: int) -> range:
        """The stages on a pipeline rank, in order."""
        return range(rank, self.num_stages, self.num_ranks)

    def layers_of(self, rank: int) -> list[int]:
        """All layers on a pipeline rank."""
        return [layer for stage in self.stages_of(rank) for layer in self.layers(stage)]

    def has_embedding(self, rank: int) -> bool:
        return rank == 0

    def has_head(self, rank: int) -> bool:
        return rank == self.num_ranks - 1


def balanced_counts(costs: Sequence[float], num_stages: int, *, head_cost: float = 0.) -> list[int]:
    """Layers per stage such that the costliest stage costs least; among equals, the most even squares.

    Args:
        costs: Cost of each layer, in any unit (matrix elements here).
        num_stages: Stages; at most as many as layers.
        head_cost: What the last stage computes beside its layers, in the same unit.

    Raises:
        ValueError: if there are more stages than layers.
    """
    num_layers = len(costs)
    if num_stages > num_layers:
        raise ValueError(f'{num_stages} stages are more than the {num_layers} layers')
    total = [0.]
    for cost in costs:
        total.append(total[-1] + cost)
    best: list[dict[int, tuple[tuple[float, float], list[int]]]] = [{0: ((0., 0.), [0])}]
    for stage in range(num_stages):
        extra = head_cost if stage == num_stages - 1 else 0.
        reached: dict[int, tuple[tuple[float, float], list[int]]] = {}
        for start, ((largest, squares), bounds) in best[-1].items():
            for stop in range(start + 1, num_layers - (num_stages - stage - 1) + 1):
                cost = total[stop] - total[start] + extra
                score = (max(largest, cost), squares + cost**2)
                if stop not in reached or score < reached[stop][0]:
                    reached[stop] = (score, [*bounds, stop])
        best.append(reached)
    bounds = best[-1][num_layers][1]
    return [b - a for a, b in zip(bounds, bounds[1:])]


def split_layers(costs: Sequence[float],
                 *,
                 num_ranks: int,
                 chunks: int = 1,
                 head_cost: float = 0.,
                 by_hand: Optional[str] = None) -> StageSplit:
    """The split of a model, balanced by cost or as `by_hand` says.

    Raises:
        ValueError: if the layers cannot be split so.
    """
    num_stages = num_ranks * chunks
    if by_hand is not None:
        counts = layers_by_hand(by_hand, len(costs), num_stages)
    else:
        counts = balanced_counts(costs, num_stages, head_cost=head_cost)
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return StageSplit(bounds=tuple(bounds), num_ranks=num_ranks)


def bubble(num_ranks: int, num_micro_batches: int, chunks: int = 1) -> float:
    """Idle share of a step, (p - 1) / (v m + p - 1) (arXiv:2104.04473 section 2.2)."""
    return (num_ranks - 1) / (chunks * num_micro_batches + num_ranks - 1)


def micro_batches_for_bubble(num_ranks: int, share: float, chunks: int = 1) -> int:
    """The smallest m whose bubble is at most `share` of the step."""
    m = 1
    while bubble(num_ranks, m, chunks) > share + 1e-9:
        m += 1
    return m
