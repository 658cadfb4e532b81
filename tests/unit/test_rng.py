"""The random state of a process: what is drawn after restoring it is what was drawn after saving it.

A failure means that a resumed run has other dropout masks, or other augmentations, than the uninterrupted one.
"""
import numpy as np
import random
import torch
from types import SimpleNamespace
from typing import Any
from unittest import mock

from swift_megatron.checkpoint.rng import (generator_states, load_random_state, random_state_file, save_random_state,
                                           set_generator_states)


def draw() -> list[Any]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]


def test_all_generators_go_on(tmp_path):
    path = str(tmp_path / random_state_file(1, 2))
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draw()  # the normal distributions keep a second number back
    save_random_state(path)
    expected = draw()
    assert load_random_state(path) and draw() == expected
    assert not load_random_state(path + '-of-another-replica') and draw() != expected


def test_each_stage_and_replica_has_a_file():
    assert len({random_state_file(p, d) for p in range(12) for d in range(12)}) == 144


def test_a_device_is_treated_as_the_cpu_is():
    """On cards, dropout draws from the device's generator: its masks would not be restored. A device is played by a
    generator of its own behind the interface that all of torch's device modules have.
    """
    generator = torch.Generator()
    device = SimpleNamespace(get_rng_state=generator.get_state, set_rng_state=generator.set_state)
    with mock.patch.object(torch.accelerator, 'current_accelerator', return_value=torch.device('cuda')), \
            mock.patch.object(torch, 'get_device_module', return_value=device):
        states = generator_states()
        assert set(states) == {'cpu', 'cuda'}
        assert all(state.dtype == torch.uint8 and state.device.type == 'cpu' for state in states.values())
        expected = torch.rand(3, generator=generator), torch.rand(3)
        set_generator_states(states)
        assert torch.equal(torch.rand(3, generator=generator), expected[0]) and torch.equal(torch.rand(3), expected[1])
        set_generator_states({'cpu': states['cpu'], 'xpu': states['cuda']})  # written on other hardware
        assert torch.equal(torch.rand(3),
                           expected[1]) and not torch.equal(torch.rand(3, generator=generator), expected[0])
