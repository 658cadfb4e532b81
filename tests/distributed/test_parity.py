"""Oracle parity: a partitioned model trains exactly like the plain Hugging Face model with plain PEFT.

A failure means that users get other losses, gradients or weights than without tensor parallelism. The reference is
loaded from the same checkpoint, all of whose parameters differ from their defaults.
"""
import os
import peft
import pytest
import torch
import torch.distributed as dist
from typing import Any, Callable, Iterator

from swift_megatron.checkpoint.gather import gather_whole
from swift_megatron.lora.inject import add_lora
from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.build import build_model
from swift_megatron.model.language_modeling import hidden_states, token_losses
from swift_megatron.optim.step import GradientStep
from swift_megatron.sharding import spec_of
from tests.harness import launch
from tests.tiny_models import FAMILIES, Case, batch, load_config, make_checkpoint, reference_model

RELATIVE = 1e-5  # float32 rounding over two layers and three steps; see `relative_error`
MAX_NORM = 0.5  # below every gradient norm here: clipping is active
STEPS = 3


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected element of the tensor."""
    return float((value - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def lora_config(**changes: Any) -> peft.LoraConfig:
    settings: dict[str, Any] = dict(r=4, lora_alpha=8, target_modules='all-linear', task_type='CAUSAL_LM')
    return peft.LoraConfig(**{**settings, **changes})


def warm_adapters(model: torch.nn.Module) -> None:
    """Makes lora_B non-zero in the reference, so that lora_A gets a gradient from the first step."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if 'lora_B' in name or 'embedding_A' in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def optimizer_for(model: torch.nn.Module) -> torch.optim.Optimizer:
    # Adam's step is lr m / (sqrt(v) + eps): rounding of a gradient near zero is amplified by lr / eps, here 10, so that
    # weights stay as comparable as gradients. The usual eps of 1e-8 would compare the signs of rounding errors.
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3, weight_decay=0.1)


def reference_steps(model: torch.nn.Module, data: dict) -> dict[str, Any]:
    """Three clipped AdamW steps of the plain model."""
    optimizer = optimizer_for(model)
    result: dict[str, Any] = {'losses': [], 'norms': []}
    model.train()
    for step in range(STEPS):
        loss = model(**data).loss
        loss.backward()
        result['losses'].append(loss.detach())
        if step == 0:
            result['gradients'] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        result['norms'].append(
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    result['weights'] = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return result


def partitioned_steps(model: torch.nn.Module, data: dict, mesh: ParallelMesh, logits_bytes: int) -> dict[str, Any]:
    """The same on this rank's part; gradients and weights are gathered to rank 0."""
    optimizer = optimizer_for(model)
    result: dict[str, Any] = {'losses': [], 'norms': []}
    parameters = [p for p in model.parameters() if p.requires_grad]
    labels = data['labels'][:, 1:]
    chosen = labels != -100
    model.train()
    for step in range(STEPS):
        hidden = hidden_states(model, input_ids=data['input_ids'], attention_mask=data['attention_mask'])
        losses = token_losses(model, hidden[:, :-1][chosen], labels[chosen], mesh, logits_bytes=logits_bytes)
        loss = losses.nll.mean()
        loss.backward()
        gradients = GradientStep(parameters=parameters, mesh=mesh, optimizer=optimizer, max_norm=MAX_NORM)
        gradients.run(last='norm')
        result['losses'].append(loss.detach())
        result['norms'].append(gradients.norm)
        if step == 0:
            result['gradients'] = {
                n: gather_whole(p.grad.clone(), spec_of(p), mesh)
                for n, p in model.named_parameters() if p.grad is not None
            }
        gradients.run('clip')
    result['weights'] = {n: gather_whole(p, spec_of(p), mesh) for n, p in model.named_parameters() if p.requires_grad}
    return result


def differences(ours: dict, reference: dict) -> Iterator[tuple[str, float]]:
    """(what, relative error) for all losses, norms, gradients and weights; different names are an infinite error."""
    for kind in ('losses', 'norms'):
        yield kind, relative_error(torch.stack(ours[kind]), torch.stack(reference[kind]))
    for kind in ('gradients', 'weights'):
        if set(ours[kind]) != set(reference[kind]):
            yield f'{kind}: names {sorted(set(ours[kind]) ^ set(reference[kind]))[:3]}', float('inf')
        for name, expected in reference[kind].items():
            if name in ours[kind]:
                yield f'{kind} {name}', relative_error(ours[kind][name], expected)


ADAPTERS: dict[str, dict[str, Any]] = {
    'lora': {},
    'everything':
    dict(
        target_modules=['q_proj', 'o_proj', 'up_proj', 'down_proj', 'embed_tokens'],
        modules_to_save=['lm_head'],
        use_rslora=True)
}


def kept(path: str, make: Callable[[], Any], rank: int) -> Any:
    """What process 0 makes, once for all processes and launches: it is kept in a file. Every process calls it."""
    if rank == 0 and not os.path.exists(path):
        torch.save(make(), path)
    if dist.is_initialized():
        dist.barrier()
    return torch.load(path)


def lora_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if 'lora_' in name}


def reference_run(case: Case, directory: str, mode: str) -> dict[str, Any]:
    """The plain model's steps; its adapters as they are drawn and as they are at the start, and where they stand."""
    reference = reference_model(directory, case)
    result: dict[str, Any] = {}
    if mode != 'full':
        torch.manual_seed(3)
        reference = peft.get_peft_model(reference, lora_config(**ADAPTERS[mode]))
        result['targets'] = sorted(reference.peft_config['default'].target_modules)
        result['drawn'] = lora_parameters(reference)
        warm_adapters(reference)
        result['start'] = lora_parameters(reference)
    return {**result, **reference_steps(reference, batch(case.vocabulary))}


def compare(case: Case, directory: str, mode: str, logits_bytes: int = 2**28) -> list[tuple[str, float]]:
    """Runs on every rank: trains both, returns on rank 0 what differs by more than float32 rounding."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = ParallelMesh.create(tensor_parallel_size=size)
    model = build_model(load_config(directory, case), mesh, directory=directory)
    data = batch(case.vocabulary)
    reference = kept(f'{directory}/reference-{mode}.pt', lambda: reference_run(case, directory, mode), mesh.rank)
    if mode != 'full':
        torch.manual_seed(3 if mesh.rank == 0 else 99 + mesh.rank)  # ranks that start apart have to agree
        settings = ADAPTERS[mode] or dict(target_modules=reference['targets'])
        model = add_lora(model, lora_config(**settings), mesh)
        for name, parameter in model.named_parameters():
            if 'lora_' in name:
                drawn = spec_of(parameter).slice(reference['drawn'][name])
                assert torch.equal(parameter, drawn), f'{name} is initialised otherwise'
        model.load_state_dict(reference['start'], strict=False)
    else:
        model.requires_grad_(True)
    ours = partitioned_steps(model, data, mesh, logits_bytes)
    copies = [p.detach().clone() for p in model.parameters() if p.requires_grad and spec_of(p).axis is None]
    if size > 1 and copies:
        flat = torch.cat([c.flatten() for c in copies])
        first = flat.clone()
        dist.broadcast(first, 0)
        assert torch.equal(flat, first), 'copies on different ranks drifted apart'
    if mesh.tensor_rank:
        return []
    return [(what, error) for what, error in differences(ours, reference) if not error <= RELATIVE]


def compare_all(cases: list[tuple[Case, str, str]]) -> dict[str, list]:
    """Several comparisons in one launch."""
    torch.use_deterministic_algorithms(True)
    return {
        f'{case.family} {case.heads}/{case.key_value_heads} {mode} tied={case.tied}': compare(case, directory, mode)
        for case, directory, mode in cases
    }


@pytest.fixture(scope='module')
def check(tmp_path_factory) -> Callable[[int, list[tuple[Case, str]]], None]:
    """Compares cases on so many ranks. A case's checkpoint, and what the plain model makes of it, serve all."""
    folder = tmp_path_factory.mktemp('parity')
    directories: dict[Case, str] = {}

    def checked(size: int, cases: list[tuple[Case, str]]) -> None:
        for case, _ in cases:
            if case not in directories:
                directories[case] = make_checkpoint(case, str(folder / str(len(directories))))
        prepared = [(case, directories[case], mode) for case, mode in cases]
        results = launch(size, compare_all, prepared, timeout=280)[0]
        failed = {name: faults[:4] for name, faults in results.items() if faults}
        assert not failed, failed

    return checked


@pytest.mark.parametrize('size', [1, 2])
@pytest.mark.parametrize('mode', ['lora', 'full'])
def test_every_family(size, mode, check):
    """A failure means that this family trains otherwise as soon as its layers are this package's, or are cut."""
    check(size, [(Case(family=family, tied=tied), mode) for family in FAMILIES
                 for tied in (False, True) if not (tied and mode == 'lora')])


HEAD_CASES = {  # tensor-parallel size -> (query heads, key/value heads)
    2: [(9, 3), (14, 2), (8, 1)],
    3: [(12, 2), (9, 3)],
    4: [(14, 2), (10, 5)],
    8: [(28, 4)],
}


@pytest.mark.parametrize('size', HEAD_CASES)
def test_uneven_and_shared_heads(size, check):
    """Heads that do not divide, and key/value heads held by several ranks: separate, normed, fused and cut-norm
    projections.
    """
    cases = [(Case(family=family, heads=heads, key_value_heads=key_value_heads, vocabulary=127), mode)
             for heads, key_value_heads in HEAD_CASES[size]
             for family, mode in [('llama', 'full'), ('llama',
                                                      'lora'), ('qwen3',
                                                                'full'), ('phi3', 'lora'), ('olmo2',
                                                                                            'full'), ('cohere', 'full')]
             ]
    check(size, cases)


@pytest.mark.parametrize('size', [2, 3])
def test_adapters_everywhere(size, check):
    """Adapters on the embedding, a trained copy of the head, rslora; a vocabulary that does not divide."""
    cases = [(Case(family=family, heads=6, key_value_heads=3), 'everything')
             for family in ('llama', 'gemma3_text', 'granite')]
    check(size, cases)


def test_large_vocabulary_in_chunks(tmp_path):
    """A vocabulary of 49152 with room for the logits of two tokens at a time: recomputed chunks give the same
    gradients.
    """
    directory = make_checkpoint(Case(family='gemma2', vocabulary=49152), str(tmp_path / 'model'))
    for mode in ('lora', 'full'):
        faults = launch(2, compare, Case(family='gemma2', vocabulary=49152), directory, mode, 2 * 4 * 49152 // 2)[0]
        assert not faults, faults
