"""Several trainings one after the other in the same processes: the second costs no start."""
from accelerate import Accelerator
from typing import Any
from unittest import mock

from .jobs import train


def train_each(program: str, argvs: list[list[str]]) -> list[dict[str, Any]]:
    """Trainings in their order, in the same process group; ms-swift's results."""
    return [train(program, 'sft', argv) for argv in argvs]


def train_scaled(program: str, argvs: list[list[str]], scale: float, backoff: float) -> list[dict[str, Any]]:
    """Trainings in float16 on a CPU as they run on a GPU: accelerate leaves out autocast and scaler on CPUs."""
    import torch
    make = Accelerator.__init__

    def with_scaler(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.native_amp = True
        self.scaler = torch.amp.GradScaler('cpu', init_scale=scale, backoff_factor=backoff)

    with mock.patch.object(Accelerator, '__init__', with_scaler):
        return train_each(program, argvs)
