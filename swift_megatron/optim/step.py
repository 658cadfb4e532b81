"""What lies between the last backward pass and the next forward pass: one order, for trainer, tests and benchmarks.

    sum partial gradients over t -> sum tied ones over the end stages -> mean over d -> unscale -> agree on overflow
    -> norm -> clip -> step

Each is a stage by name; another kind of optimizer exchanges stages and leaves the order alone.
"""
import torch
from dataclasses import dataclass, field
from typing import Callable, Mapping, Optional, Sequence

from ..mesh import ParallelMesh
from .gradients import (agree_on_overflow, average_over_replicas, clip_gradients, gradient_norm, sum_partial_gradients,
                        sum_tied_gradients)


@dataclass(kw_only=True)
class GradientStep:
    """One optimizer step on this rank's parameters. Every rank runs the same stages.

    Args:
        parameters: The trained parameters of this rank; may be none (a frozen stage).
        mesh: The process grid.
        optimizer: Needed by `unscale`, `agree on overflow` and `step`; None on a rank that trains nothing.
        scaler: Of float16 losses, if there is one.
        max_norm: Where gradients are clipped; not at all if None or 0.
        device: Where collectives run; that of the parameters if None.
        stages: What is done, by name, in order.
    """
    parameters: Sequence[torch.nn.Parameter]
    mesh: ParallelMesh
    optimizer: Optional[torch.optim.Optimizer] = None
    scaler: Optional[torch.amp.GradScaler] = None
    max_norm: Optional[float] = None
    device: Optional[torch.device] = None
    stages: Mapping[str, 'Stage'] = field(default_factory=lambda: STAGES)
    norm: Optional[torch.Tensor] = None  # of the whole gradient before clipping, shape (), once its stage has run

    def run(self, first: Optional[str] = None, last: Optional[str] = None) -> None:
        """Runs the stages from `first` to `last`, both included; all that lie before or after if None."""
        names = list(self.stages)
        start = 0 if first is None else names.index(first)
        stop = len(names) if last is None else names.index(last) + 1
        for name in names[start:stop]:
            self.stages[name](self)


Stage = Callable[[GradientStep], None]


def _sum_partial(step: GradientStep) -> None:
    sum_partial_gradients(step.parameters, step.mesh)


def _sum_tied(step: GradientStep) -> None:
    sum_tied_gradients(step.parameters, step.mesh)


def _average(step: GradientStep) -> None:
    average_over_replicas(step.parameters, step.mesh)


def _unscale(step: GradientStep) -> None:
    if step.scaler is not None and step.optimizer is not None:
        step.scaler.unscale_(step.optimizer)


def _agree(step: GradientStep) -> None:
    if step.scaler is not None and step.optimizer is not None:
        agree_on_overflow(step.scaler, step.optimizer, step.mesh, step.device or torch.device('cpu'))


def _norm(step: GradientStep) -> None:
    """A norm that is not a number drops the step, as in ms-swift: no parameter keeps a gradient."""
    step.norm = gradient_norm(step.parameters, step.mesh, step.device)
    if step.norm.isnan():
        for parameter in step.parameters:
            parameter.grad = None


def _clip(step: GradientStep) -> None:
    if step.max_norm:
        clip_gradients(step.parameters, step.max_norm, step.norm)


def _step(step: GradientStep) -> None:
    if step.optimizer is None:
        return
    if step.scaler is None:
        step.optimizer.step()
    else:
        step.scaler.step(step.optimizer)
        step.scaler.update()
    step.optimizer.zero_grad()


STAGES: Mapping[str, Stage] = {
    'sum partial gradients': _sum_partial,
    'sum tied gradients': _sum_tied,
    'average over replicas': _average,
    'unscale': _unscale,
    'agree on overflow': _agree,
    'norm': _norm,
    'clip': _clip,
    'step': _step,
}
