"""Pipeline parallelism: a model cut into stages trains exactly like the plain Hugging Face model on the same
micro-batches.

A failure means that users get other losses, gradients or weights with --pipeline_parallel_size than without, or that a
ragged batch, a frozen stage or the end of an epoch breaks a run. Every launch has a timeout.
"""
import dataclasses
import math
import peft
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from typing import Any, Callable, Optional

from swift_megatron.checkpoint.gather import gather_whole, stream_from_stages
from swift_megatron.errors import StageError
from swift_megatron.lora.inject import add_lora
from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.build import build_model
from swift_megatron.model.language_modeling import causal_lm, hidden_states, token_losses
from swift_megatron.model.micro_batches import run_micro_batches
from swift_megatron.model.stages import foreign_prefixes, keep_own_stages
from swift_megatron.optim.step import GradientStep
from swift_megatron.pipeline_parallel.stage import HiddenStateStage
from swift_megatron.sharding import record_parameters, spec_of
from tests.distributed.test_parity import (MAX_NORM, STEPS, differences, kept, lora_config, lora_parameters,
                                           optimizer_for, warm_adapters)
from tests.harness import launch
from tests.tiny_models import FAMILIES, Case, load_config, make_checkpoint, reference_model

RELATIVE = 1e-5
LENGTHS = (5, 14, 9, 11, 3, 12, 7, 8)  # tokens of the micro-batches; every step takes them in another order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One way of running a case."""
    t: int = 1
    p: int = 2
    d: int = 1
    v: int = 1
    micro_batches: int = 4
    schedule: str = '1f1b'
    mode: str = 'full'
    layers_by_hand: Optional[str] = None
    checkpointing: Optional[str] = None  # 'reentrant' or 'non-reentrant'
    adapted_layers: Optional[tuple[int, ...]] = None

    @property
    def processes(self) -> int:
        return self.t * self.p * self.d


def micro_batch(vocabulary: int, step: int, number: int) -> dict[str, torch.Tensor]:
    """Two samples of different lengths, right-padded, the first two tokens without labels. (2, S)"""
    generator = torch.Generator().manual_seed(100 * step + number)
    length = LENGTHS[(number + step) % len(LENGTHS)]
    ids = torch.randint(0, vocabulary, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - length // 3:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    return {'input_ids': ids, 'attention_mask': mask, 'labels': labels}


def batches_of(case: Case, run: Run, step: int) -> list[list[dict]]:
    """The micro-batches of each replica."""
    return [[micro_batch(case.vocabulary, step, run.micro_batches * replica + i) for i in range(run.micro_batches)]
            for replica in range(run.d)]


def label_tokens(batches: list[list[dict]]) -> torch.Tensor:
    return sum((batch['labels'][:, 1:] != -100).sum() for replica in batches for batch in replica)


def adapters_for(run: Run) -> peft.LoraConfig:
    if run.adapted_layers is None:
        return lora_config()
    return lora_config(target_modules=['q_proj', 'o_proj', 'up_proj'], layers_to_transform=list(run.adapted_layers))


def reference(directory: str, case: Case, run: Run) -> dict[str, Any]:
    """Three clipped steps of the plain model over all micro-batches of all replicas, and its adapters at the start.

    Schedule, stages and tensor ranks play no part: it is made once for all runs with the same samples and adapters.
    """
    name = f'reference-{run.mode}-{run.adapted_layers}-{run.micro_batches}-{run.d}.pt'
    return kept(f'{directory}/{name}', lambda: _reference(directory, case, run), dist.get_rank())


def _reference(directory: str, case: Case, run: Run) -> dict[str, Any]:
    model = reference_model(directory, case)
    result: dict[str, Any] = {'losses': [], 'norms': []}
    if run.mode == 'lora':
        torch.manual_seed(3)
        model = peft.get_peft_model(model, adapters_for(run))
        warm_adapters(model)
        result['start'] = lora_parameters(model)
    optimizer = optimizer_for(model)
    model.train()
    for step in range(STEPS):
        batches = batches_of(case, run, step)
        total = torch.zeros(())
        for batch in (batch for replica in batches for batch in replica):
            logits = model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits[:, :-1].float()
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch['labels'][:, 1:].flatten(), ignore_index=-100,
                reduction='sum') / label_tokens(batches)
            loss.backward()
            total += loss.detach()
        result['losses'].append(total)
        parameters = [p for p in model.parameters() if p.grad is not None]
        if step == 0:
            result['gradients'] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        result['norms'].append(torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    result['weights'] = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return result


def build(directory: str, case: Case, run: Run) -> tuple[torch.nn.Module, ParallelMesh]:
    """This rank's model, ready to train."""
    mesh = ParallelMesh.create(tensor_parallel_size=run.t, pipeline_parallel_size=run.p)
    model = build_model(
        load_config(directory, case), mesh, directory=directory, chunks=run.v, layers_by_hand=run.layers_by_hand)
    if run.mode == 'lora':
        targets = sorted({
            n.rsplit('.', 1)[1]
            for n, m in model.named_modules() if 'Parallel' in type(m).__name__ and '.layers.' in n
        })
        torch.manual_seed(3 + mesh.rank)
        config = adapters_for(run)
        if isinstance(config.target_modules, str):  # partitioned layers are no nn.Linear to PEFT's all-linear
            config.target_modules = targets
        model.requires_grad_(False)
        model = add_lora(model, config, mesh)
        warm_adapters(model)
        start = reference(directory, case, run)['start']
        keep_own_stages(model, mesh)
        model.load_state_dict({n: p for n, p in start.items() if '.lora_B.' in n}, strict=False)
    else:
        keep_own_stages(model, mesh)
        model.requires_grad_(True)
    record_parameters(model, rank=mesh.tensor_rank, size=mesh.tensor_parallel_size)
    if run.checkpointing:
        lm = causal_lm(model)
        lm.gradient_checkpointing_enable({'use_reentrant': run.checkpointing == 'reentrant'})
        lm.enable_input_require_grads()
    return model, mesh


def train(directory: str, case: Case, run: Run) -> dict[str, Any]:
    """The same steps on this rank's stages; whole tensors of all stages on rank 0."""
    model, mesh = build(directory, case, run)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_for(model) if parameters else None
    result: dict[str, Any] = {'losses': [], 'norms': []}
    model.train()

    def collected(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        named = dict(model.named_parameters())
        wholes = {
            n: gather_whole(t.clone(), spec_of(named[n]), mesh)
            for n, t in tensors.items() if spec_of(named[n]).tie != 'copy'
        }
        return dict(stream_from_stages(iter(wholes.items()), mesh))

    for step in range(STEPS):
        everyone = batches_of(case, run, step)
        own, tokens = everyone[mesh.data_rank], label_tokens(everyone)
        total = torch.zeros(())

        def loss_fn(hidden: torch.Tensor, index: int) -> torch.Tensor:
            labels = own[index]['labels'][:, 1:]
            chosen = labels != -100
            losses = token_losses(model, hidden[:, :-1][chosen], labels[chosen], mesh)
            loss = losses.nll.sum() / tokens * mesh.data_parallel_size
            total.add_(loss.detach() / mesh.data_parallel_size)
            return loss

        if run.p == 1:
            for index, batch in enumerate(own):
                loss_fn(
                    hidden_states(model, input_ids=batch['input_ids'], attention_mask=batch['attention_mask']),
                    index).backward()
        else:
            run_micro_batches(
                causal_lm(model), own, loss_fn, split=causal_lm(model).stage_split, mesh=mesh, kind=run.schedule)
        for group in (mesh.pipeline_group, mesh.data_group):
            if group is not None:
                dist.all_reduce(total, group=group)
        gradients = GradientStep(parameters=parameters, mesh=mesh, optimizer=optimizer, max_norm=MAX_NORM)
        gradients.run(last='norm')
        result['losses'].append(total)
        result['norms'].append(gradients.norm)
        if step == 0:
            result['gradients'] = collected({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        gradients.run('clip')
    result['weights'] = collected({n: p.detach() for n, p in model.named_parameters() if p.requires_grad})
    result['layers'] = causal_lm(model).stage_split.layers_of(mesh.pipeline_rank)
    return result


def compare(jobs: list[tuple[Case, str, Run]]) -> dict[str, list]:
    """Several comparisons in one launch; on rank 0 what differs by more than float32 rounding."""
    faults = {}
    for case, directory, run in jobs:
        ours = train(directory, case, run)
        expected = reference(directory, case, run)
        if dist.get_rank() == 0:
            faults[f'{case} {run}'] = [(what, error) for what, error in differences(ours, expected)
                                       if not error <= RELATIVE]
        dist.barrier()
    return faults


@pytest.fixture(scope='module')
def check(tmp_path_factory) -> Callable[[list[tuple[Case, Run]]], None]:
    """Compares runs with the plain model's, in one launch. A case's checkpoint is the same for all."""
    folder = tmp_path_factory.mktemp('pipeline')
    directories: dict[Case, str] = {}

    def checked(jobs: list[tuple[Case, Run]]) -> None:
        for case, _ in jobs:
            if case not in directories:
                directories[case] = make_checkpoint(case, str(folder / str(len(directories))))
        prepared = [(case, directories[case], run) for case, run in jobs]
        processes = {run.processes for _, run in jobs}
        assert len(processes) == 1
        faults = launch(processes.pop(), compare, prepared, timeout=250)[0]
        assert len(faults) == len(jobs)
        failed = {name: found[:4] for name, found in faults.items() if found}
        assert not failed, failed

    return checked


@pytest.mark.parametrize('mode', ['full', 'lora'])
def test_every_family_on_two_stages(mode, check):
    """Each architecture's masks, rotary embeddings per layer type, embedding scales and tied heads stay right on
    stages.
    """
    check([(Case(family=family, layers=5, tied=i % 2 == (mode == 'full')), Run(mode=mode))
           for i, family in enumerate(FAMILIES)])


def test_schedules_and_checkpointing(check):
    """Every schedule, with and without activation checkpointing of both kinds, gives the same numbers."""
    jobs = [(Case(family=family,
                  layers=5), Run(schedule=schedule, v=v, checkpointing=checkpointing, mode=mode, micro_batches=m))
            for family, schedule, v, checkpointing, mode, m in [(
                'llama', 'gpipe', 1, None, 'full',
                4), ('qwen3', 'interleaved_1f1b', 2, None, 'full',
                     4), ('gemma3_text', 'interleaved_1f1b', 2, 'non-reentrant', 'lora',
                          6), ('llama', '1f1b', 1, 'reentrant', 'lora',
                               3), ('gemma2', 'gpipe', 1, 'non-reentrant', 'lora',
                                    4), ('qwen2', '1f1b', 1, 'reentrant', 'full', 5)]]
    check(jobs)


def test_ragged_ends(check):
    """Fewer micro-batches than stages, a number that does not fit the interleaved rounds, stages cut by hand."""
    jobs = [(Case(family='llama', layers=5, tied=True), Run(micro_batches=1)),
            (Case(family='qwen2', layers=5), Run(micro_batches=5, schedule='interleaved_1f1b', v=2)),
            (Case(family='granite', layers=5), Run(layers_by_hand='1,4', micro_batches=3)),
            (Case(family='mistral', layers=2), Run(micro_batches=2))]
    check(jobs)


def test_stages_without_trainable_parameters(check):
    """Adapters on the first or the last layers alone: a stage has nothing to train, the others' numbers do not
    change.
    """
    jobs = [(Case(family='llama', layers=4), Run(mode='lora', adapted_layers=layers, checkpointing=checkpointing))
            for layers in ((0, ), (3, )) for checkpointing in (None, 'non-reentrant')]
    check(jobs)


@pytest.mark.parametrize('sizes', [(1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (2, 2, 2)], ids=str)
def test_grid(sizes, check):
    """Four families over tensor ranks, stages and replicas, tied and untied, full and LoRA; five layers over four
    stages.
    """
    t, p, d = sizes
    jobs = [(Case(family='llama', layers=5, tied=True), Run(t=t, p=p, d=d)),
            (Case(family='qwen3', layers=5), Run(t=t, p=p, d=d, mode='lora')),
            (Case(family='gemma2', layers=5, tied=True), Run(t=t, p=p, d=d, schedule='gpipe', mode='lora')),
            (Case(family='phi3', layers=5), Run(t=t, p=p, d=d, checkpointing='non-reentrant'))]
    check(jobs)


def _first_loss(directory: str, case: Case, t: int, p: int) -> float:
    """Mean loss of a model over all label tokens."""
    model, mesh = build(directory, case, Run(t=t, p=p))
    everyone = [[micro_batch(case.vocabulary, 0, 4 * replica + i) for i in range(4)]
                for replica in range(mesh.data_parallel_size)]
    own, tokens, total = everyone[mesh.data_rank], label_tokens(everyone), torch.zeros(())

    def loss_fn(hidden: torch.Tensor, index: int) -> torch.Tensor:
        labels = own[index]['labels'][:, 1:]
        chosen = labels != -100
        loss = token_losses(model, hidden[:, :-1][chosen], labels[chosen], mesh).nll.sum() / tokens
        total.add_(loss.detach())
        return loss

    run_micro_batches(model, own, loss_fn, split=model.stage_split, mesh=mesh)
    for group in (mesh.pipeline_group, mesh.data_group):
        if group is not None:
            dist.all_reduce(total, group=group)
    return float(total)


@pytest.mark.parametrize('sizes', [(1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2)], ids=str)
def test_loss_at_random_initialisation(sizes, tmp_path):
    """With a head near zero every token is equally likely: the loss is ln(V), however the model is spread.

    Without stages test_gradients.py shows it.
    """
    t, p, d = sizes
    case = Case(family='llama', layers=2)
    directory = str(tmp_path)
    config = case.config()
    config.initializer_range = 1e-4
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    for loss in launch(t * p * d, _first_loss, directory, case, t, p):
        assert loss == pytest.approx(math.log(case.vocabulary), abs=1e-4)


def _own_bytes(directory: str, case: Case) -> tuple[int, int, list[int]]:
    mesh = ParallelMesh.create(pipeline_parallel_size=4)
    model = build_model(load_config(directory, case), mesh, directory=directory)
    foreign = foreign_prefixes(model, mesh)
    meta = [name for name, p in model.named_parameters() if p.is_meta]
    assert all(name.startswith(foreign) for name in meta), 'a parameter of this stage was not loaded'
    keep_own_stages(model, mesh)
    assert not any(p.is_meta for p in model.parameters()), 'a parameter of another stage is left'
    own = sum(p.numel() for p in model.parameters())
    return own, sum(p.numel() for p in reference_model(directory, case).parameters()), model.stage_split.layers_of(
        mesh.pipeline_rank)


def test_a_rank_holds_only_its_stage(tmp_path):
    """Otherwise the model would not fit. Untied: the stages' parameters add up to the model's; each layer lies once."""
    case = Case(family='llama', layers=5)
    results = launch(4, _own_bytes, make_checkpoint(case, str(tmp_path)), case)
    assert sum(own for own, _, _ in results) == results[0][1]
    assert sorted(layer for _, _, layers in results for layer in layers) == list(range(5))


def _alive(directory: str, case: Case, schedule: str) -> int:
    """Most micro-batches whose activations this stage holds at a time."""
    model, mesh = build(directory, case, Run(p=2, micro_batches=6, schedule=schedule))
    own = [micro_batch(case.vocabulary, 0, i) for i in range(6)]
    alive, most = set(), 0
    forward, backward = HiddenStateStage.forward_one_chunk, HiddenStateStage.backward_one_chunk

    def counted_forward(self, index, *args, **kwargs):
        nonlocal most
        alive.add(index)
        most = max(most, len(alive))
        return forward(self, index, *args, **kwargs)

    def counted_backward(self, index, *args, **kwargs):
        backward(self, index, *args, **kwargs)
        alive.discard(index)

    HiddenStateStage.forward_one_chunk, HiddenStateStage.backward_one_chunk = counted_forward, counted_backward
    run_micro_batches(
        model, own, lambda hidden, index: hidden.square().mean(), split=model.stage_split, mesh=mesh, kind=schedule)
    assert not alive
    return most


@pytest.mark.parametrize('schedule, expected', [('1f1b', [2, 1]), ('gpipe', [6, 6])])
def test_micro_batches_in_flight(schedule, expected, tmp_path):
    """1F1B holds at most min(m, p - rank) micro-batches, not m: that is why it fits."""
    case = Case(family='llama', layers=2)
    assert launch(2, _alive, make_checkpoint(case, str(tmp_path)), case, schedule) == expected


def _refused(directory: str, case: Case) -> str:
    """The message for an architecture that scales hidden states in its forward under a name we do not know."""
    import transformers
    decoder = transformers.models.granite.modeling_granite.GraniteModel
    original = decoder.__init__

    def renamed(self, config):
        original(self, config)
        self.__class__ = type('Odd', (decoder, ), {'forward': scaled})

    def scaled(self, inputs_embeds=None, **inputs):
        return decoder.forward(self, inputs_embeds=3. * inputs_embeds, **inputs)

    decoder.__init__ = renamed
    mesh = ParallelMesh.create(pipeline_parallel_size=2)
    try:
        build_model(load_config(directory, case), mesh, directory=directory)
    except StageError as error:
        return str(error)
    return ''


def test_an_unknown_scale_on_entry_is_refused(tmp_path):
    """Otherwise a later stage would scale hidden states once more, and train on wrong numbers without an error."""
    case = Case(family='granite', layers=2)
    for message in launch(2, _refused, make_checkpoint(case, str(tmp_path)), case):
        assert 'changes hidden states' in message and '--pipeline_parallel_size 1' in message
