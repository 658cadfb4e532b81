"""Calls that share their processes: each has the state of a new process, and fails alone.

A failure means that one broken variant hides what the others show, or that a run starts from what another one left.
"""
import os
import pytest

from .harness import run_in_turn

pytestmark = pytest.mark.slow


def call(kind: str) -> None:
    """Leaves a variable and a process group behind; some calls fail on one rank while the other waits for it."""
    import torch
    import torch.distributed as dist
    assert 'LEFT_BEHIND' not in os.environ and not dist.is_initialized(), 'another call left something'
    os.environ['LEFT_BEHIND'] = kind
    dist.init_process_group('gloo')
    if kind == 'raises' and dist.get_rank() == 1:
        raise ValueError('the reason')
    if kind == 'dies' and dist.get_rank() == 0:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def test_a_call_that_fails_fails_alone():
    """Two of five calls fail, at the start and in the middle; the others end well, in new processes where need be."""
    kinds = {'first': 'raises', 'second': 'well', 'third': 'well', 'fourth': 'dies', 'fifth': 'well'}
    outcomes = run_in_turn(call, {name: (kind, ) for name, kind in kinds.items()}, processes=2)
    assert [name for name in kinds if not outcomes[name]] == ['second', 'third', 'fifth']
    assert 'rank 1 of 2: exit code 1' in outcomes['first'] and 'ValueError: the reason' in outcomes['first']
    assert 'rank 0 of 2: exit code 7' in outcomes['fourth']
