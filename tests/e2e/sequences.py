"""Several trainings one after the other in the same processes: the second costs no start."""
from accelerate import Accelerator
from typing import Any
from unittest import mock

from .jobs import train


def train_each(program: str, argvs: list[list[str]]) -> list[dict[str, Any]]:
    """Trainings in their order, in the same process group; ms-swift's results."""
    return [train(program, 'sft', argv) for argv in argvs]


def train_scaled(program: str, argvs: list[list[str]]) -> list[float]:
    """Trainings with a gradient scaler, which accelerate makes for float16 on GPUs alone; computed in float32.

    In the second and fourth step, one gradient overflows on the last process alone.

    Returns:
        The scale at the end of each training, which begins with 1024.
    """
    import torch
    import torch.distributed as dist

    from swift_megatron.sharding import SPEC, spec_of
    make, unscale = Accelerator.__init__, torch.amp.GradScaler.unscale_
    steps: list[int] = []  # of each training

    def with_scaler(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.native_amp = True
        self.scaler = torch.amp.GradScaler('cpu', init_scale=1024.)
        scalers.append(self.scaler)
        steps.append(0)

    def overflowing(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        steps[-1] += 1
        is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if is_last and steps[-1] % 2 == 0:
            parameters = [p for group in optimizer.param_groups for p in group['params']]
            own = [p for p in parameters if p.grad is not None and not (hasattr(p, SPEC) and spec_of(p).has_copies)]
            own[0].grad.view(-1)[0] = torch.inf
        unscale(self, optimizer)

    scalers: list[torch.amp.GradScaler] = []
    with mock.patch.object(Accelerator, '__init__', with_scaler), \
            mock.patch.object(torch.amp.GradScaler, 'unscale_', overflowing), \
            mock.patch('accelerate.accelerator.get_mixed_precision_context_manager',
                       lambda *_: torch.autocast('cpu', enabled=False)):
        train_each(program, argvs)
    return [scaler.get_scale() for scaler in scalers]


def train_broken_off(argv: list[str], after: int) -> tuple[list[float], list[float]]:
    """A training that a callback stops after some micro-batches of its second step, then one by the same trainer.

    Returns:
        The losses that the first and the second training logged.
    """
    from transformers import TrainerCallback

    from swift_megatron.trainers.sft import ParallelSeq2SeqTrainer
    train_once = ParallelSeq2SeqTrainer.train
    losses: list[list[float]] = []

    class Stop(TrainerCallback):
        seen = 0

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen += 1
            control.should_training_stop = len(losses) == 1 and self.seen == after

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            losses[-1] += [logs['loss']] if 'loss' in logs else []

    def train_twice(self: ParallelSeq2SeqTrainer, *args: Any, **kwargs: Any) -> Any:
        self.add_callback(Stop())
        for _ in range(2):
            losses.append([])
            result = train_once(self, *args, **kwargs)
        return result

    with mock.patch.object(ParallelSeq2SeqTrainer, 'train', train_twice):
        train('ours', 'sft', argv)
    return losses[0], losses[1]
