"""Pipeline parallelism: schedules against the ideal step, activations in flight, and DeepSpeed's pipeline.

The ideal step of p stages and m micro-batches takes (m + (p - 1) / v) / m times what the slowest rank computes for m
micro-batches (arXiv:2104.04473 section 2.2). That is measured here: all ranks compute their stages' micro-batches at
the same time, on random hidden states and without messages, and the slowest one counts.
"""
import torch
import torch.distributed as dist
from typing import Any, Callable

from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.decoder import stage_view
from swift_megatron.model.language_modeling import causal_lm, token_losses
from swift_megatron.model.micro_batches import run_micro_batches
from swift_megatron.model.stages import keep_own_stages
from swift_megatron.optim.step import GradientStep
from swift_megatron.pipeline_parallel.stage import HiddenStateStage
from .counting import CollectiveCounter, SavedBytes
from .deepspeed_pipeline import deepspeed_step
from .harness import Timing, Variant, interleaved, launch, ratio
from .models import MAX_NORM, PROMPT, Size, adamw, partitioned, predicting, token_ids, trainable, write_checkpoint

SIZE = Size(hidden=512, layers=8, tokens=256, vocabulary=8000)
QUICK = Size(hidden=128, layers=4, tokens=32, vocabulary=200)
WORK = Size(hidden=128, layers=8, tokens=32, vocabulary=200)  # for counts
MICRO_BATCHES = (4, 8, 16)
CHUNKS = {'1f1b': 1, 'gpipe': 1, 'interleaved_1f1b': 2}  # v of each schedule
WANTED = {'1f1b m=8 / ideal': 1.15, 'deepspeed m=8 / 1f1b m=8': 1.0}


class PipelineStep:
    """A LoRA step of m micro-batches of one sequence each: schedule, norm, clipping, AdamW."""

    def __init__(self, model: torch.nn.Module, mesh: ParallelMesh, size: Size) -> None:
        self.model, self.lm, self.mesh = model, causal_lm(model), mesh
        self.ids = [token_ids(size, seed) for seed in range(max(MICRO_BATCHES))]
        self.parameters = trainable(model)
        self.optimizer = adamw(self.parameters)

    def loss_fn(self, num_micro_batches: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """Mean over the tokens of all micro-batches."""
        tokens = num_micro_batches * (self.ids[0].numel() - PROMPT)

        def loss(hidden: torch.Tensor, i: int) -> torch.Tensor:
            return token_losses(self.model, *predicting(hidden, self.ids[i]), self.mesh).nll.sum() / tokens

        return loss

    def run(self, kind: str, num_micro_batches: int) -> list[torch.Tensor]:
        return run_micro_batches(
            self.lm, [{
                'input_ids': ids
            } for ids in self.ids[:num_micro_batches]],
            self.loss_fn(num_micro_batches),
            split=self.lm.stage_split,
            mesh=self.mesh,
            kind=kind)

    def step(self, kind: str, num_micro_batches: int) -> float:
        losses = self.run(kind, num_micro_batches)
        GradientStep(parameters=self.parameters, mesh=self.mesh, optimizer=self.optimizer, max_norm=MAX_NORM).run()
        return float(sum(losses))

    def compute(self, num_micro_batches: int) -> None:
        """All stages of this rank for m micro-batches, forward and backward; over when the slowest rank is done."""
        split, loss_fn = self.lm.stage_split, self.loss_fn(num_micro_batches)
        views = {stage: stage_view(self.lm, split, stage) for stage in split.stages_of(self.mesh.pipeline_rank)}
        for i in range(num_micro_batches):
            for stage, view in views.items():
                shape = (*self.ids[i].shape, self.lm.config.hidden_size)
                entry = {
                    'input_ids': self.ids[i]
                } if stage == 0 else {
                    'inputs_embeds': torch.randn(shape).requires_grad_()
                }
                hidden = view(**entry, use_cache=False).last_hidden_state
                if stage == split.num_stages - 1:
                    loss_fn(hidden, i).backward()
                else:
                    hidden.backward(torch.randn(shape))
        self.optimizer.zero_grad()
        dist.barrier()


def _pipeline(path: str, mesh: ParallelMesh, size: Size, chunks: int) -> PipelineStep:
    model = partitioned(path, mesh, lora=True, chunks=chunks)
    keep_own_stages(model, mesh)
    return PipelineStep(model, mesh, size)


def saved_activations(step: PipelineStep, num_micro_batches: int) -> dict[str, dict[str, float]]:
    """Peak of the bytes that autograd holds on this rank, and as a multiple of one micro-batch's."""
    result = {}
    with SavedBytes(step.model) as saved:
        step.run('gpipe', 1)
    one = saved.peak
    for kind in ('1f1b', 'gpipe'):
        with SavedBytes(step.model) as saved:
            step.run(kind, num_micro_batches)
        result[f'{kind} m={num_micro_batches}'] = {'bytes': saved.peak, 'micro_batches': round(saved.peak / one, 3)}
    step.optimizer.zero_grad()
    return result


def _measure(size: Size, path: str, timing: Timing) -> dict[str, Any]:
    """On each of two ranks."""
    mesh = ParallelMesh.create(pipeline_parallel_size=2)
    steps = {chunks: _pipeline(path, mesh, size, chunks) for chunks in (1, 2)}
    split = steps[1].lm.stage_split
    variants: dict[str, Variant] = {}
    for m in MICRO_BATCHES:
        for chunks, step in steps.items():
            variants[f'compute v={chunks} m={m}'] = Variant(step=lambda step=step, m=m: step.compute(m))
        for kind, chunks in CHUNKS.items():
            variants[f'{kind} m={m}'] = Variant(step=lambda step=steps[chunks], kind=kind, m=m: step.step(kind, m))
    peer: dict[str, Any] = {}
    try:
        step, peer['first_loss'] = deepspeed_step(path, mesh, size, split.bounds, num_micro_batches=8)
        variants['deepspeed m=8'] = Variant(step=step)
    except Exception as error:  # whatever it is, it is the result
        peer['error'] = f'{type(error).__name__}: {error}'
    losses = {kind: float(sum(steps[chunks].run(kind, 8))) for kind, chunks in CHUNKS.items()}
    saved = saved_activations(steps[1], 8)
    steps[2].optimizer.zero_grad()
    return {
        'times': interleaved(variants, timing),
        'losses': losses,
        'saved': saved,
        'deepspeed': peer,
        'layers_of_stages': {
            f'v={chunks}': step.lm.stage_split.bounds
            for chunks, step in steps.items()
        }
    }


def _ratios(times: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Step time over the ideal."""
    result: dict[str, Any] = {}
    for m in MICRO_BATCHES:
        for kind, chunks in CHUNKS.items():
            ideal = (m + 1 / chunks) / m * times[f'compute v={chunks} m={m}']['median_s']
            result[f'{kind} m={m} / ideal'] = round(times[f'{kind} m={m}']['median_s'] / ideal, 3)
    if 'deepspeed m=8' in times:
        result['deepspeed m=8 / 1f1b m=8'] = ratio(times, 'deepspeed m=8', '1f1b m=8')
    return result


class _Work:
    """Counts what a rank's stages do, by wrapping HiddenStateStage's two methods."""

    def __init__(self) -> None:
        self.forward = self.backward = self.peak = 0
        self.methods = HiddenStateStage.forward_one_chunk, HiddenStateStage.backward_one_chunk

    def __enter__(self) -> '_Work':
        forward, backward = self.methods

        def counted_forward(stage: HiddenStateStage, *args: Any, **kwargs: Any) -> Any:
            self.forward += 1
            self.peak = max(self.peak, self.forward - self.backward)
            return forward(stage, *args, **kwargs)

        def counted_backward(stage: HiddenStateStage, *args: Any, **kwargs: Any) -> None:
            backward(stage, *args, **kwargs)
            self.backward += 1

        HiddenStateStage.forward_one_chunk, HiddenStateStage.backward_one_chunk = counted_forward, counted_backward
        return self

    def __exit__(self, *_: Any) -> None:
        HiddenStateStage.forward_one_chunk, HiddenStateStage.backward_one_chunk = self.methods


def _count(size: Size, path: str) -> dict[str, dict[str, Any]]:
    """On each of four ranks: calls, chunks in flight and messages."""
    mesh = ParallelMesh.create(pipeline_parallel_size=4)
    steps = {chunks: _pipeline(path, mesh, size, chunks) for chunks in (1, 2)}
    result = {}
    for m in MICRO_BATCHES:
        for kind, chunks in CHUNKS.items():
            with CollectiveCounter() as counter, _Work() as work:
                steps[chunks].run(kind, m)
            sent = counter.counts['other']['send']
            result[f'{kind} m={m}'] = {
                'forward': work.forward,
                'backward': work.backward,
                'in_flight': work.peak,
                'sent': sent[0],
                'sent_bytes': sent[1]
            }
    return result


def run(directory: str, timing: Timing, *, quick: bool) -> dict[str, Any]:
    """Times with two stages, counts with four; the result as it goes into the JSON file."""
    size = QUICK if quick else SIZE
    print(f'\np=2, LoRA, {size}, float32')
    path = write_checkpoint(size, directory)
    ranks = launch(2, _measure, size, path, timing)
    result, times = ranks[1], ranks[0]['times']
    case = {
        'size': size.facts(),
        'times': times,
        'ratios': _ratios(times),
        'layers_of_stages': result['layers_of_stages'],
        'losses': result['losses'],
        'deepspeed': result['deepspeed'],
        'saved_activations': {
            f'rank {rank}, {name}': value
            for rank, answer in enumerate(ranks)
            for name, value in answer['saved'].items()
        }
    }
    work = launch(4, _count, WORK, write_checkpoint(WORK, directory))
    counts = {name: {key: [rank[name][key] for rank in work] for key in work[0][name]} for name in work[0]}
    return {'cases': {'p=2': case, 'p=4, work of each rank': counts}, 'wanted': WANTED}
