"""Every architecture that is accepted trains like the plain Hugging Face model, on three ranks.

tests/distributed/test_parity.py looks deeper into the families of tests/tiny_models.py; here is each of the others
once, with shared key/value heads (4 query and 2 key/value heads on 3 ranks) and all parameters and buffers far from
their defaults.

Computed in float64, so that a gradient that is a small difference of large numbers (an activation's) is not rounding;
norms and rotary tables are float32 inside transformers, which leaves about 1e-7.
"""
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.build import build_model
from tests.architectures import SUPPORTED, attention_of, small_config
from tests.distributed.test_parity import RELATIVE, differences, partitioned_steps, reference_steps
from tests.harness import launch
from tests.tiny_models import FAMILIES, batch

OTHERS = [model_type for model_type in SUPPORTED if model_type not in FAMILIES]


def make(model_type: str, directory: str) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(model_type), dtype=torch.float64)
    stored = model.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or 'norm' in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[-1]**0.5)
        for name, buffer in model.named_buffers():
            if name in stored:
                buffer.mul_(1.25)  # read from the checkpoint, or wrong
    model.save_pretrained(directory)
    return directory


def compare(model_type: str, directory: str) -> list[tuple[str, float]]:
    """Three clipped AdamW steps of both, from one random state: dropout on whole activations has the same masks."""
    mesh = ParallelMesh.create(tensor_parallel_size=dist.get_world_size())
    config = AutoConfig.from_pretrained(directory)
    config.dtype, config._attn_implementation = torch.float64, attention_of(model_type)
    model = build_model(config, mesh, directory=directory).requires_grad_(True)
    faults = [(f'{name} was not read', float('inf')) for name in model.unused_checkpoint_names]
    torch.manual_seed(5)
    ours = partitioned_steps(model, batch(127), mesh, 2**28)
    if mesh.rank:
        return faults
    reference = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation=attention_of(model_type))
    torch.manual_seed(5)
    return faults + [(what, error) for what, error in differences(ours, reference_steps(reference, batch(127)))
                     if not error <= RELATIVE]


def compare_all(directories: dict[str, str]) -> dict[str, list[tuple[str, float]]]:
    return {model_type: compare(model_type, directory) for model_type, directory in directories.items()}


@pytest.fixture(scope='module')
def faults(tmp_path_factory) -> dict[str, list[tuple[str, float]]]:
    directory = tmp_path_factory.mktemp('models')
    return launch(3, compare_all, {model_type: make(model_type, str(directory / model_type))
                                   for model_type in OTHERS})[0]


@pytest.mark.parametrize('model_type', OTHERS)
def test_trains_like_the_plain_model(faults, model_type):
    """Users of this architecture would get other losses, gradients or weights than without tensor parallelism."""
    assert not faults[model_type][:4]
