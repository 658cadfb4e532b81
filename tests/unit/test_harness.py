"""The test harness itself: a fault on one of several processes has to be found in seconds and named.

A failure means that a broken run looks like a time-out, or that the first error is hidden behind those that it caused.
"""
import os
import pytest
import time
import torch
import torch.distributed as dist

from tests.harness import launch


def rank_and_sum(offset: int) -> tuple[int, int]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def tensor_of_rank() -> torch.Tensor:
    return torch.full((3, ), float(dist.get_rank()))


def raise_on(guilty: int, after: float) -> None:
    if dist.get_rank() == guilty:
        time.sleep(after)
        raise ValueError('the reason')
    dist.all_reduce(torch.ones(1))  # the others only wait for the guilty one


def raise_in_turn() -> None:
    time.sleep(1. - 0.5 * dist.get_rank())
    raise ValueError(f'reason of rank {dist.get_rank()}')


def hang_on(guilty: int) -> None:
    if dist.get_rank() == guilty:
        time.sleep(60)


def all_hang() -> None:
    time.sleep(60)


def die_on(guilty: int) -> None:
    if dist.get_rank() == guilty:
        os._exit(7)
    time.sleep(1)


def die_on_and_wait(guilty: int) -> None:
    if dist.get_rank() == guilty:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def return_what_cannot_be_sent() -> object:
    return lambda: None


def leave_state(value: str | None) -> str:
    before = os.environ.get('LEFT_BEHIND', 'nothing')
    if value is not None:
        os.environ['LEFT_BEHIND'] = value
    return f'{before} {torch.get_num_threads()}'


def test_results_come_in_rank_order():
    """Tests would compare one rank's numbers with another's."""
    assert launch(2, rank_and_sum, 5) == [(0, 11), (1, 11)]
    assert [t.tolist() for t in launch(2, tensor_of_rank)] == [[0.] * 3, [1.] * 3]  # though the processes are gone


def test_processes_start_clean_and_with_one_thread():
    """A test would depend on those before it; and threads that spin would take the cores from the other ranks."""
    assert launch(1, leave_state, 'something') == ['nothing 1']
    assert launch(1, leave_state, None) == ['nothing 1']


@pytest.mark.parametrize('guilty', [0, 1])
def test_the_first_exception_is_shown(guilty):
    """One would read "connection closed by peer", and not the reason."""
    start = time.time()
    with pytest.raises(AssertionError) as caught:
        launch(2, raise_on, guilty, 0.3, timeout=30)
    assert str(caught.value).startswith(f'rank {guilty} of 2 failed first:\nTraceback')
    assert 'ValueError: the reason' in str(caught.value)
    assert time.time() - start < 15  # not the time-out


def test_the_earlier_of_two_exceptions_is_shown():
    """The rank with the lower number would be blamed, not the one that failed first."""
    with pytest.raises(AssertionError, match='rank 1 of 2 failed first:(.|\n)*ValueError: reason of rank 1'):
        launch(2, raise_in_turn, timeout=30)


def test_a_hanging_rank_is_named():
    """One would not know where to look."""
    start = time.time()
    with pytest.raises(AssertionError, match=r'ranks \[1\] of 2 gave no answer within 6 s'):
        launch(2, hang_on, 1, timeout=6)
    with pytest.raises(AssertionError, match=r'ranks \[0, 1\] of 2 gave no answer within 2 s'):
        launch(2, all_hang, timeout=2)
    assert time.time() - start < 15


def test_a_rank_that_dies_is_named():
    """A crash in native code, or the kernel killing a rank for its memory, would look like a hang of the others."""
    for function in (die_on, die_on_and_wait):  # with the others done, or failing because of it
        with pytest.raises(AssertionError, match=r'these died without a word: \{1: 7\}'):
            launch(2, function, 1, timeout=20)


def test_a_result_that_cannot_be_sent_is_an_error():
    """The rank would look as if it hung."""
    with pytest.raises(AssertionError, match='rank 0 of 1 failed first(.|\n)*pickle'):
        launch(1, return_what_cannot_be_sent, timeout=10)
