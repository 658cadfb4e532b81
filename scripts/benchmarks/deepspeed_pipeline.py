"""The same LoRA step through DeepSpeed's PipelineModule: the same Hugging Face layers, the same split, PEFT's adapters.

What it needs to run: no activation checkpointing (its default kind fails with LoRA), nothing but hidden states between
stages, trainable parameters on every stage.
"""
import peft
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM
from typing import Any, Callable

from swift_megatron.mesh import ParallelMesh
from .models import MAX_NORM, Size, adamw, lora_config, masked_labels, token_ids


class _Layer(nn.Module):
    """A decoder layer that computes its rotary angles itself. (B, S, H) -> (B, S, H)"""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        return self.layer(hidden, position_embeddings=self.rotary(hidden, positions), position_ids=positions)


class _Head(nn.Module):
    """Final norm and head. (B, S, H) -> (B, S, V)"""

    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden))


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[0, :-1], labels[0, 1:])


def deepspeed_step(path: str, mesh: ParallelMesh, size: Size, bounds: tuple[int, ...], *,
                   num_micro_batches: int) -> tuple[Callable[[], None], float]:
    """A step of the pipeline over all ranks, and the loss of its first run."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    class SplitPipeline(PipelineModule):
        """Cut where this package cuts; DeepSpeed has no setting for it."""

        def _partition_layers(self, method: str = '') -> None:
            inner = [1 + bound for bound in bounds[1:-1]]  # the embedding is layer 0
            self.parts = [0, *inner, len(self._layer_specs)]
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    torch.manual_seed(0)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), lora_config())
    lm = model.get_base_model()
    deepspeed.init_distributed(dist_backend='gloo', verbose=False)
    layers: list[Any] = [
        lm.model.embed_tokens, *(_Layer(layer, lm.model.rotary_emb) for layer in lm.model.layers),
        _Head(lm.model.norm, lm.lm_head)
    ]
    module = SplitPipeline(
        layers, num_stages=mesh.pipeline_parallel_size, loss_fn=_loss, activation_checkpoint_interval=0)
    own = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=own,
        optimizer=adamw(own),
        config={
            'train_micro_batch_size_per_gpu': 1,
            'gradient_accumulation_steps': num_micro_batches,
            'gradient_clipping': MAX_NORM,
            'steps_per_print': 10**9,
            'zero_optimization': {
                'stage': 0
            }
        })
    batches = [(ids, masked_labels(ids)) for ids in (token_ids(size, seed) for seed in range(num_micro_batches))]

    def step() -> float:
        return float(engine.train_batch(data_iter=iter(batches)))

    return step, step()
