"""What adapters make autograd keep for the backward pass, in bytes.

A failure means that LoRA and QLoRA take more memory than they need: a copy of its input for each projection, which for
a 13B model and 4096 tokens is a quarter of all activations.
"""
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from swift_megatron.lora.inject import add_lora
from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.build import build_model
from swift_megatron.model.language_modeling import causal_lm, hidden_states
from swift_megatron.quantization.base import QuantizationConfig
from tests.distributed.test_parity import lora_config
from tests.harness import launch
from tests.tiny_models import Case, load_config, make_checkpoint

CASE = Case(family='llama', layers=1, heads=16, key_value_heads=8, ffn=768)
TOKENS, RANK = 512, 4
HIDDEN = 256  # 16 heads of 16


def kept(model: nn.Module, autocast: bool) -> int:
    """Bytes of all memory that autograd keeps of one forward pass, each piece once; parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    pieces: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            pieces[storage.data_ptr()] = storage  # kept alive, so that no other piece gets its address
        return tensor

    ids = torch.arange(TOKENS).remainder(CASE.vocabulary)[None]
    embedded = causal_lm(model).get_input_embeddings()(ids).detach().requires_grad_()
    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        hidden_states(model, inputs_embeds=embedded)
    return sum(piece.nbytes() for piece in pieces.values())


def surplus(directory: str, autocast: bool, dropout: float, quantized: bool) -> int:
    """Bytes that adapters on all projections of one layer add."""
    mesh = ParallelMesh.create(tensor_parallel_size=torch.distributed.get_world_size())
    quantization = QuantizationConfig(format='nf4', double=False) if quantized else None
    config = load_config(directory, CASE, torch.bfloat16)
    model = build_model(config, mesh, directory=directory, quantization=quantization).requires_grad_(False).train()
    without = kept(model, autocast)
    targets = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']
    model = add_lora(model, lora_config(r=RANK, lora_dropout=dropout, target_modules=targets), mesh).train()
    return kept(model, autocast) - without


@pytest.mark.parametrize('autocast', [True, False])
@pytest.mark.parametrize('dropout', [0., 0.05])
def test_projections_share_their_input(autocast, dropout, tmp_path):
    """One x for q, k and v, one for gate and up, none of them cast to float32; with dropout, a byte for each element of
    each mask.
    """
    t = 2
    per_token = 2 * (2 * HIDDEN + HIDDEN // t + CASE.ffn // t)  # bfloat16: two norms' outputs, attention's, the MLP's
    per_token += 7 * RANK * (2 if autocast else 4)  # U, for the gradient of B
    factors = 7 * 4 * RANK * (HIDDEN + CASE.ffn)  # autocast's 16-bit copies of the factors, at most
    if dropout:
        per_token += 5 * HIDDEN + HIDDEN // t + CASE.ffn // t
    directory = make_checkpoint(CASE, str(tmp_path))
    for quantized in (False, True):
        for rank, surplus_bytes in enumerate(launch(t, surplus, directory, autocast, dropout, quantized)):
            assert surplus_bytes <= TOKENS * per_token + factors, (quantized, rank, surplus_bytes / TOKENS, per_token)
