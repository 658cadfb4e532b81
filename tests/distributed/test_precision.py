"""The dtypes of docs/precision.md are those that a step really has, and all ranks agree on them.

A failure means that a rank sends another dtype than the next one expects (an abort or a hang), or that products, sums
or gradients are rounded elsewhere than the documentation says.
"""
import pytest
import re
import torch
from contextlib import AbstractContextManager
from typing import Any, Optional

from swift_megatron.lora.inject import add_lora
from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.build import build_model
from swift_megatron.model.language_modeling import causal_lm, token_losses
from swift_megatron.model.micro_batches import run_micro_batches
from swift_megatron.model.precision import DTYPES, Precision, agreed_precision
from swift_megatron.model.stages import keep_own_stages
from swift_megatron.optim.step import GradientStep
from swift_megatron.quantization.base import QuantizationConfig
from tests.collectives import CollectiveLog
from tests.distributed.test_parity import lora_config
from tests.distributed.test_pipeline import micro_batch
from tests.harness import launch
from tests.tiny_models import Case, load_config, make_checkpoint

CASE = Case(family='llama', layers=4, heads=8, key_value_heads=4, ffn=128)
BF16, FP32 = torch.bfloat16, torch.float32

# (dtype of the weights, of autocast, what is trained) -> what docs/precision.md says
ROWS: list[tuple[torch.dtype, Optional[torch.dtype], str, Precision]] = [
    (BF16, BF16, 'lora', Precision(weights=BF16, hidden=BF16, adapters=FP32, autocast=BF16)),
    (BF16, None, 'lora', Precision(weights=BF16, hidden=BF16, adapters=FP32)),
    (BF16, BF16, 'qlora', Precision(weights=BF16, hidden=BF16, adapters=FP32, autocast=BF16)),
    (FP32, BF16, 'lora', Precision(weights=FP32, hidden=FP32, adapters=FP32, autocast=BF16)),
    (BF16, BF16, 'full', Precision(weights=BF16, hidden=BF16, autocast=BF16)),
    (FP32, None, 'full', Precision(weights=FP32, hidden=FP32)),
]


def step(directory: str, dtype: torch.dtype, autocast: Optional[torch.dtype],
         trained: str) -> tuple[Precision, dict[str, set]]:
    """The agreed dtypes of a step on two tensor ranks x two stages, and those found, by what they are of."""
    mesh = ParallelMesh.create(tensor_parallel_size=2, pipeline_parallel_size=2)
    quantization = QuantizationConfig(format='nf4') if trained == 'qlora' else None
    model = build_model(load_config(directory, CASE, dtype), mesh, directory=directory, quantization=quantization)
    model.requires_grad_(trained == 'full')
    if trained != 'full':
        model = add_lora(model, lora_config(target_modules=['q_proj', 'o_proj', 'up_proj', 'down_proj']), mesh)
    keep_own_stages(model, mesh)
    model.train()
    precision = agreed_precision(model, mesh, autocast)
    batches = [micro_batch(CASE.vocabulary, 0, i) for i in range(2)]
    losses: list[torch.Tensor] = []

    def context() -> AbstractContextManager:
        return torch.autocast('cpu', autocast, enabled=autocast is not None)

    def loss_fn(hidden: torch.Tensor, index: int) -> torch.Tensor:
        targets = batches[index]['labels'][:, 1:]
        chosen = targets != -100
        with context():
            losses.append(token_losses(model, hidden[:, :-1][chosen], targets[chosen], mesh).nll.sum())
        return losses[-1]

    with CollectiveLog() as log:
        run_micro_batches(
            causal_lm(model),
            batches,
            loss_fn,
            split=causal_lm(model).stage_split,
            mesh=mesh,
            kind='gpipe',
            autocast=context)
    parameters = [p for p in model.parameters() if p.requires_grad]
    tokens = {tuple(batch['input_ids'].shape) for batch in batches}
    whole = {b * s * causal_lm(model).config.hidden_size for b, s in tokens}
    found: dict[str, set] = {
        'sent to another stage': {c.dtype
                                  for c in log.calls if c.kind in ('send', 'recv') and c.elements in whole},
        'sums of blocks': {c.dtype
                           for c in log.calls if c.kind == 'allreduce' and c.elements in whole},
        'numbers per token': {
            c.dtype
            for c in log.calls
            if c.kind in ('allreduce', 'allgather') and c.elements not in whole and mesh.pipeline_rank == 1
        } - {precision.hidden},  # the head's gradient has the tokens with a label alone
        'losses': {loss.dtype
                   for loss in losses},
        'gradients': {p.grad.dtype
                      for p in parameters},
    }
    with CollectiveLog() as log:
        gradients = GradientStep(parameters=parameters, mesh=mesh)
        gradients.run(last='norm')
    found['sums of gradients'] = {c.dtype for c in log.calls if c.elements > 1}
    found['sum of squares'] = {c.dtype for c in log.calls if c.elements == 1}
    found['norm'] = {gradients.norm.dtype}
    return precision, found


def steps(directory: str) -> list[tuple[Precision, dict[str, set]]]:
    return [step(directory, *row[:3]) for row in ROWS]


def test_dtypes_are_those_of_the_table(tmp_path):
    directory = make_checkpoint(CASE, str(tmp_path))
    for rank, results in enumerate(launch(4, steps, directory)):
        for (dtype, autocast, trained, expected), (precision, found) in zip(ROWS, results, strict=True):
            row = (rank, dtype, autocast, trained)
            assert precision == expected, row
            trains = expected.adapters or expected.weights
            assert found['sent to another stage'] == {expected.hidden}, row
            assert found['sums of blocks'] == {expected.products, expected.block_gradients}, (row, found)
            assert found['gradients'] == {trains}, (row, found)
            # Full tuning of this model has no copies whose gradients are partial sums.
            assert found['sums of gradients'] == ({trains} if expected.adapters else set()), (row, found)
            assert found['sum of squares'] == {torch.float64} and found['norm'] == {torch.float32}, row
            if rank >= 2:
                assert found['losses'] == {expected.losses} == {torch.float32}, row
                assert found['numbers per token'] <= {torch.float32}, (row, found)


def disagreeing(directory: str) -> str:
    """What is said when the last stage was built in another dtype."""
    mesh = ParallelMesh.create(pipeline_parallel_size=2)
    dtype = BF16 if mesh.pipeline_rank == 0 else FP32
    model = build_model(load_config(directory, CASE, dtype), mesh, directory=directory)
    keep_own_stages(model, mesh)
    try:
        agreed_precision(model, mesh)
    except RuntimeError as error:
        return str(error)
    return ''


def test_ranks_that_disagree_stop(tmp_path):
    """The run would hang or train on rubbish in its first step."""
    messages = launch(2, disagreeing, make_checkpoint(CASE, str(tmp_path)))
    assert messages[0] == messages[1] and re.search('disagree on the dtype of weights', messages[0])


@pytest.mark.parametrize('autocast', [None, BF16])
def test_every_dtype_of_the_table_is_known(autocast):
    """A dtype that has no code could not be agreed on."""
    precision = Precision(weights=torch.float16, hidden=torch.float16, adapters=FP32, autocast=autocast)
    derived: list[Any] = [precision.products, precision.adapter_products, precision.block_gradients, precision.losses]
    assert set(derived) <= set(DTYPES)
    assert precision.adapter_products == (autocast or FP32)
