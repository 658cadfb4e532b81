"""Parts of a model that are run on their own: the head on given hidden states, a stage's layers, chunks of tokens.

A failure means that the part computes something else than the whole model does, in the dtypes and with the random
numbers that people train with, or that it keeps more memory than it needs.
"""
import pytest
import torch
import weakref
from types import MethodType
from typing import Any

from swift_megatron.lora.inject import add_lora
from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.build import build_model
from swift_megatron.model.language_modeling import causal_lm, hidden_states, token_losses
from swift_megatron.model.micro_batches import run_micro_batches
from swift_megatron.model.stages import keep_own_stages
from swift_megatron.pipeline_parallel.stage import HiddenStateStage
from swift_megatron.quantization.base import QuantizationConfig
from tests.distributed.test_parity import lora_config, relative_error, warm_adapters
from tests.distributed.test_pipeline import micro_batch
from tests.harness import launch
from tests.tiny_models import Case, load_config, make_checkpoint, reference_model

TARGETS = ['q_proj', 'v_proj', 'o_proj', 'up_proj', 'down_proj']


def bound_forwards(directory: str, case: Case) -> list[tuple[str, float]]:
    """Losses with a forward bound to the causal LM and to its decoder, as accelerate binds autocast; relative errors.

    The bound forward of the whole model counts its calls: the head alone is not a call of the model.
    """
    mesh = ParallelMesh.create()
    model = build_model(load_config(directory, case), mesh, directory=directory)
    batch = micro_batch(case.vocabulary, 0, 1)
    targets = batch['labels'][:, 1:]
    chosen = targets != -100

    def loss() -> torch.Tensor:
        hidden = hidden_states(model, input_ids=batch['input_ids'], attention_mask=batch['attention_mask'])
        return token_losses(model, hidden[:, :-1][chosen], targets[chosen], mesh).nll.mean()

    expected, calls = reference_model(directory, case)(**batch).loss, 0
    before = loss()
    original = type(model).forward

    def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(self, *args, **kwargs)

    model.forward = MethodType(bound, model)
    return [('without', relative_error(before, expected)), ('bound', relative_error(loss(), expected)),
            ('calls', float(calls))]


def test_a_forward_bound_to_the_model_is_not_run_by_its_head(tmp_path):
    """Full tuning under accelerate's autocast would run the whole decoder again on hidden states, and train wrong."""
    case = Case(family='gemma2', layers=2)
    for what, error in launch(1, bound_forwards, make_checkpoint(case, str(tmp_path)), case)[0]:
        assert error < 1e-6, what


def head_dropout(directory: str, case: Case) -> float:
    """Adapters with dropout on the head, tokens in five chunks: the gradient against a difference quotient.

    In float64, (L(w + e v) - L(w - e v)) / 2e is the gradient along v to about e^2; both losses draw the masks of the
    step. Relative error.
    """
    mesh = ParallelMesh.create()
    model = build_model(load_config(directory, case, torch.float64), mesh, directory=directory)
    model = add_lora(model, lora_config(target_modules=['lm_head'], lora_dropout=0.5), mesh)
    warm_adapters(model)
    model.double().train()
    hidden = torch.randn(20, causal_lm(model).config.hidden_size, dtype=torch.float64)
    labels = torch.arange(20)

    def loss() -> torch.Tensor:
        torch.manual_seed(7)
        return token_losses(model, hidden, labels, mesh, logits_bytes=4 * 4 * case.vocabulary).nll.sum()

    loss().backward()
    parameters = [p for p in model.parameters() if p.requires_grad]
    directions = [torch.randn_like(p) for p in parameters]
    along = sum(float((p.grad * v).sum()) for p, v in zip(parameters, directions))
    step, losses = 1e-5, []
    with torch.no_grad():
        for sign in (1, -2):
            for p, v in zip(parameters, directions):
                p.add_(v, alpha=sign * step)
            losses.append(float(loss()))
    return abs((losses[0] - losses[1]) / (2 * step) - along) / abs(along)


def test_chunks_of_the_head_are_recomputed_with_their_masks(tmp_path):
    """LoRA with dropout on the head would get the gradient of another loss than the one that was computed."""
    case = Case(family='llama', layers=1)
    assert launch(1, head_dropout, make_checkpoint(case, str(tmp_path)), case)[0] < 1e-6


def bfloat16_stages(directory: str, case: Case, quantized: bool) -> tuple[float, float, str, list[str]]:
    """Three micro-batches in bfloat16 with autocast: (loss on stages, loss on one rank, dtype that travels, dtypes of
    gradients).
    """
    quantization = QuantizationConfig(format='nf4', double=False) if quantized else None
    losses = []
    for stages in (2, 1):
        mesh = ParallelMesh.create(pipeline_parallel_size=2) if stages == 2 else ParallelMesh()
        model = build_model(
            load_config(directory, case, torch.bfloat16), mesh, directory=directory, quantization=quantization)
        model.requires_grad_(False)
        torch.manual_seed(1)
        model = add_lora(model, lora_config(target_modules=TARGETS), mesh)
        keep_own_stages(model, mesh)
        model.train()
        batches = [micro_batch(case.vocabulary, 0, i) for i in range(3)]

        def loss_fn(hidden: torch.Tensor, index: int) -> torch.Tensor:
            targets = batches[index]['labels'][:, 1:]
            chosen = targets != -100
            with torch.autocast('cpu', torch.bfloat16):
                return token_losses(model, hidden[:, :-1][chosen], targets[chosen], mesh).nll.sum()

        if stages == 2:
            losses.append(
                sum(
                    map(
                        float,
                        run_micro_batches(
                            causal_lm(model),
                            batches,
                            loss_fn,
                            split=causal_lm(model).stage_split,
                            mesh=mesh,
                            autocast=lambda: torch.autocast('cpu', torch.bfloat16)))))
            gradients = sorted({str(p.grad.dtype) for p in model.parameters() if p.requires_grad})
        else:
            with torch.autocast('cpu', torch.bfloat16):
                states = [
                    hidden_states(model, input_ids=b['input_ids'], attention_mask=b['attention_mask']) for b in batches
                ]
            losses.append(float(sum(loss_fn(states[i], i) for i in range(3))))
    return (*losses, str(causal_lm(model).hidden_dtype), gradients)


@pytest.mark.parametrize('family, quantized', [('llama', True), ('mistral', False), ('qwen3', True)])
def test_stages_agree_on_the_dtype_that_travels(family, quantized, tmp_path):
    """A stage would wait for another number of bytes than it is sent: an abort with gloo, rubbish or a hang with NCCL.

    llama is without attention biases here: the first floating parameter of a later stage is then an adapter's.
    """
    case = Case(family=family, layers=4, heads=8, key_value_heads=4, ffn=128)
    config = case.config()
    config.attention_bias = config.mlp_bias = False
    directory = make_checkpoint(case, str(tmp_path), config)
    first, last = launch(2, bfloat16_stages, directory, case, quantized)
    loss, expected, _, _ = last
    assert [dtype for _, _, dtype, _ in (first, last)] == ['torch.bfloat16'] * 2
    assert [gradients for *_, gradients in (first, last)] == [['torch.float32']] * 2
    assert loss == pytest.approx(expected, rel=1e-6)  # the same operations on the same numbers


def buffers(directory: str, case: Case, micro_batches: int) -> int:
    """Most receive buffers of hidden states that are alive at a time on this rank."""
    mesh = ParallelMesh.create(pipeline_parallel_size=2)
    model = build_model(load_config(directory, case), mesh, directory=directory)
    keep_own_stages(model, mesh)
    model.requires_grad_(True).train()
    batches = [micro_batch(case.vocabulary, 0, i) for i in range(micro_batches)]
    alive: weakref.WeakSet = weakref.WeakSet()
    most, original = 0, HiddenStateStage._buffer

    def counted(self: HiddenStateStage, index: int) -> torch.Tensor:
        nonlocal most
        buffer = original(self, index)
        alive.add(buffer)
        most = max(most, len(alive))
        return buffer

    HiddenStateStage._buffer = counted
    run_micro_batches(
        model,
        batches,
        lambda hidden, index: hidden.square().mean().view(()),
        split=model.stage_split,
        mesh=mesh,
        kind='1f1b')
    return most


def test_receive_buffers_are_let_go(tmp_path):
    """The last stage would keep a buffer for every micro-batch: 40 MiB each for a 13B model and 4096 tokens.

    1F1B on two stages: the last one computes a micro-batch while the next one arrives, the first one has one gradient.
    """
    case = Case(family='llama', layers=2)
    first, last = launch(2, buffers, make_checkpoint(case, str(tmp_path)), case, 8)
    assert first <= 2 and last <= 2
