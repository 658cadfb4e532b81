"""Random state of one process: Python's, numpy's, and torch's generator of every device that the process draws on.

Dropout draws on the device that computes. A device's generator, like the CPU's, gives its state as a byte tensor on the
CPU, so that all are kept, sent and restored alike.
"""
import numpy as np
import os
import random
import torch
from typing import Any

GeneratorStates = dict[str, torch.Tensor]  # device type -> uint8 tensor on the CPU


def _generators() -> dict[str, Any]:
    """Device type -> the module of torch with `get_rng_state` and `set_rng_state` of this process' device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = ['cpu'] if accelerator is None else ['cpu', accelerator.type]
    return {device: torch.random if device == 'cpu' else torch.get_device_module(device) for device in devices}


def generator_states() -> GeneratorStates:
    """State of the CPU's generator and of the current device's."""
    return {device: generator.get_rng_state() for device, generator in _generators().items()}


def set_generator_states(states: GeneratorStates) -> None:
    """Restores `generator_states()`; states of device types that this process does not have are left out."""
    for device, generator in _generators().items():
        if device in states:
            generator.set_rng_state(states[device])


def random_state_file(pipeline_rank: int, data_rank: int) -> str:
    """Name of the file with the random state of one stage of one replica; its tensor-parallel ranks draw in step."""
    return f'rng_state_p{pipeline_rank}_d{data_rank}.pth'


def save_random_state(path: str) -> None:
    """Writes this process' state."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    torch.save(
        {
            'python': random.getstate(),
            'numpy': (str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
            'generators': generator_states(),
        }, path)


def load_random_state(path: str) -> bool:
    """Restores the state in a file; False, and nothing changed, if there is none."""
    if not os.path.isfile(path):
        return False
    states = torch.load(path, map_location='cpu', weights_only=True)
    random.setstate(states['python'])
    name, keys, position, has_gauss, gauss = states['numpy']
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    set_generator_states(states['generators'])
    return True
