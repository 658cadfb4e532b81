"""Breaks one invariant at a time, on purpose, and checks that the parity test notices.

A failure means that tests/distributed/test_parity.py would stay green while the package is wrong in that way.
"""
import dataclasses
import pytest
import torch
from typing import Any, Callable

from swift_megatron.lora import inject
from swift_megatron.mesh import ParallelMesh
from swift_megatron.model import language_modeling, partition
from swift_megatron.model.build import build_model
from swift_megatron.model.loading import CheckpointReader
from swift_megatron.optim import step
from swift_megatron.sharding import ShardSpec, spec_of
from swift_megatron.tensor_parallel import boundary, regions
from swift_megatron.tensor_parallel.embedding import VocabParallelEmbedding
from swift_megatron.tensor_parallel.linear import RowParallelLinear
from tests.distributed import test_parity
from tests.harness import launch
from tests.tiny_models import Case, make_checkpoint

CASE = Case(family='llama', heads=9, key_value_heads=3)  # uneven heads, biases everywhere
SHARED = Case(family='qwen3', heads=8, key_value_heads=1)  # one key/value head on both ranks, norms by head
Patch = pytest.MonkeyPatch


def nothing(patch: Patch) -> None:
    """The control: no difference."""


def skipped_all_reduce(patch: Patch, number: int) -> None:
    """1 is the embedding's, 2 to 5 are the two layers', then come the head's and the layers' of the backward pass."""
    calls, original = [0], regions.all_reduced

    def all_reduced(x: torch.Tensor, mesh: Any) -> torch.Tensor:
        calls[0] += 1
        return x.clone() if calls[0] == number else original(x, mesh)

    patch.setattr(regions, 'all_reduced', all_reduced)


def forward_all_reduce(patch: Patch) -> None:
    skipped_all_reduce(patch, 3)


def embedding_all_reduce(patch: Patch) -> None:
    skipped_all_reduce(patch, 1)


def head_backward_all_reduce(patch: Patch) -> None:
    skipped_all_reduce(patch, 6)


def layer_backward_all_reduce(patch: Patch) -> None:
    skipped_all_reduce(patch, 8)


def shifted_slice(patch: Patch) -> None:
    """Rank 1 reads one tensor a row too early."""
    original = CheckpointReader.read

    def read(self: CheckpointReader, name: str, spec: ShardSpec) -> torch.Tensor:
        if name == 'model.layers.1.mlp.up_proj.weight' and spec.rank == 1:
            (start, stop), = spec.ranges
            spec = dataclasses.replace(spec, layout=(spec.layout[0], ((start - 1, stop - 1), )))
        return original(self, name, spec)

    patch.setattr(CheckpointReader, 'read', read)


def partial_gradients(patch: Patch) -> None:
    """What has partial gradients is stepped by each rank's share."""
    patch.setattr(step, 'sum_partial_gradients', lambda parameters, mesh: None)


def norm_counts_copies(patch: Patch) -> None:
    """Replicated parameters count once for each rank."""
    patch.setattr(ShardSpec, 'owned', lambda self, local: [local])


def bias_on_every_rank(patch: Patch) -> None:
    """The bias of a row-parallel layer is added before the all-reduce."""

    def leave(self: RowParallelLinear, partial: torch.Tensor) -> torch.Tensor:
        return self.region.leave(partial if self.bias is None else partial + self.bias)

    patch.setattr(RowParallelLinear, 'leave', leave)


def foreign_tokens(patch: Patch) -> None:
    """The embedding counts row 0 for tokens of other ranks."""
    patch.setattr(VocabParallelEmbedding, 'lookup',
                  lambda self, table, ids: torch.nn.functional.embedding(self.local_ids(ids)[0], table))


def vocabulary_offset(patch: Patch) -> None:
    """The second rank takes its first token for the one after it."""
    original = language_modeling.vocab_parallel_cross_entropy
    patch.setattr(language_modeling, 'vocab_parallel_cross_entropy',
                  lambda *args, first, **kwargs: original(*args, first=first + (first > 0), **kwargs))


def region_not_entered(patch: Patch) -> None:
    """Blocks take their input as it is: gradients before them are one rank's share."""
    patch.setattr(boundary.BlockEntry, '__call__', lambda self, module, args, kwargs: (args, kwargs))


def head_norms_are_not_partial(patch: Patch) -> None:
    """Norms by head keep one rank's share of their gradient."""
    original = partition._partition_norm
    patch.setattr(
        partition, '_partition_norm',
        lambda block, name, cut, region: original(block, name, dataclasses.replace(cut, partial=False), region))


def mean_over_one_token_too_many(patch: Patch) -> None:
    """The loss is divided by another number of tokens."""
    original = test_parity.token_losses

    def token_losses(*args: Any, **kwargs: Any) -> Any:
        losses = original(*args, **kwargs)
        return dataclasses.replace(losses, nll=losses.nll * len(losses.nll) / (len(losses.nll) + 1))

    patch.setattr(test_parity, 'token_losses', token_losses)


BREAKS: dict[Callable[[Patch], None], list[tuple[str, str]]] = {  # -> (case, mode)
    forward_all_reduce: [('uneven', 'full'), ('uneven', 'lora')],
    embedding_all_reduce: [('uneven', 'lora')],
    head_backward_all_reduce: [('uneven', 'full'), ('uneven', 'lora')],
    layer_backward_all_reduce: [('uneven', 'full'), ('uneven', 'lora')],
    shifted_slice: [('uneven', 'full'), ('uneven', 'lora')],
    partial_gradients: [('uneven', 'lora'), ('shared', 'full')],
    norm_counts_copies: [('uneven', 'full'), ('uneven', 'lora'), ('shared', 'full')],
    bias_on_every_rank: [('uneven', 'full')],
    foreign_tokens: [('uneven', 'lora')],
    vocabulary_offset: [('uneven', 'lora')],
    region_not_entered: [('uneven', 'full'), ('uneven', 'lora')],
    head_norms_are_not_partial: [('shared', 'full')],
    mean_over_one_token_too_many: [('uneven', 'lora')],
}
CASES = {'uneven': CASE, 'shared': SHARED}
TRIALS = [(nothing, case, mode) for case in CASES for mode in ('full', 'lora')] + [(broken, case, mode)
                                                                                   for broken, trials in BREAKS.items()
                                                                                   for case, mode in trials]


def title(trial: tuple[Callable, str, str]) -> str:
    return f'{trial[0].__name__} {trial[1]} {trial[2]}'


def compare_broken(directories: dict[str, str]) -> dict[str, list | str]:
    """What the parity test finds on this rank with each break: differences, or the text of its own assertion."""
    found: dict[str, list | str] = {}
    for broken, case, mode in TRIALS:
        with pytest.MonkeyPatch.context() as patch:
            broken(patch)
            try:
                found[title((broken, case, mode))] = test_parity.compare(CASES[case], directories[case], mode)
            except AssertionError as error:
                found[title((broken, case, mode))] = str(error)
    return found


@pytest.fixture(scope='module')
def directories(tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp('models')
    return {name: make_checkpoint(case, str(directory / name)) for name, case in CASES.items()}


@pytest.fixture(scope='module')
def found(directories) -> list[dict[str, list | str]]:
    return launch(2, compare_broken, directories)


@pytest.mark.parametrize('trial', TRIALS, ids=title)
def test_the_parity_test_notices(found, trial):
    """The fault would reach users: nothing else looks at whole models."""
    if trial[0] is nothing:
        assert [answers[title(trial)] for answers in found] == [[], []]
    else:
        # The numbers, on the rank that compares them; drifting copies are found beside them.
        assert found[0][title(trial)]


def compare_with_own_initialisation(directory: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inject, '_same_random_state', lambda mesh: None)
        test_parity.compare(CASE, directory, 'lora')


def test_initialisation_that_depends_on_the_rank(directories):
    """Ranks would train slices of different adapters: the saved adapter is none of them."""
    with pytest.raises(AssertionError, match=r'rank 1 of 2 failed first(.|\n)*lora_A.* is initialised otherwise'):
        launch(2, compare_with_own_initialisation, directories['uneven'])


def test_copies_that_drift_apart(found):
    """A replicated factor would be another one on each rank, and the saved one belong to none of their outputs."""
    assert 'drifted apart' in found[1][title((partial_gradients, 'uneven', 'lora'))]


def test_records_are_what_the_breaks_assume(directories):
    """The breaks above would break nothing."""
    model = build_model(
        test_parity.load_config(directories['uneven'], CASE), ParallelMesh(tensor_parallel_size=2, rank=1))
    spec = spec_of(model.model.layers[1].mlp.up_proj.weight)
    assert spec.ranges == ((48, 96), ) and model.model.layers[0].self_attn.o_proj.bias is not None
