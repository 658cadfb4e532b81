"""The random models, data and steps that the topics share."""
import os
import peft
import torch
from dataclasses import dataclass
from transformers import AutoModelForCausalLM, LlamaConfig
from typing import Any, Callable, Iterable, Optional

from swift_megatron.lora.inject import add_lora
from swift_megatron.mesh import ParallelMesh
from swift_megatron.model.build import build_model
from swift_megatron.model.language_modeling import hidden_states, token_losses
from swift_megatron.optim.step import GradientStep
from swift_megatron.quantization.base import QuantizationConfig

MAX_NORM = 1.
HEAD_SIZE = 64
PROMPT = 2  # tokens without a label; products of 511 bfloat16 rows are a fifth slower than of 510 or 512
LINEARS = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj',
           'down_proj']  # of a llama's layers, all of them


@dataclass(frozen=True, kw_only=True)
class Size:
    """A llama and its input: one sequence of `tokens`."""
    hidden: int
    layers: int = 8
    tokens: int = 512
    vocabulary: int = 32000

    @property
    def intermediate(self) -> int:
        """2.75 x hidden, in whole blocks of 64."""
        return self.hidden * 11 // 4 // 64 * 64

    def __str__(self) -> str:
        return (
            f'hidden {self.hidden}, intermediate {self.intermediate}, {self.layers} layers, sequences of {self.tokens} '
            f'tokens, vocabulary {self.vocabulary}')

    def facts(self) -> dict[str, int]:
        """All sizes, for the JSON file."""
        return {**vars(self), 'intermediate': self.intermediate}

    def config(self) -> LlamaConfig:
        heads = self.hidden // HEAD_SIZE
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            vocab_size=self.vocabulary,
            max_position_embeddings=max(512, self.tokens),
            tie_word_embeddings=False,
            dtype=torch.float32)


def write_checkpoint(size: Size, directory: str, dtype: torch.dtype = torch.float32) -> str:
    """A random model in a new folder below `directory`."""
    path = os.path.join(directory, f'llama-{size.hidden}')
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(size.config(), dtype=dtype).save_pretrained(path)
    return path


def token_ids(size: Size, seed: int = 1) -> torch.Tensor:
    """(1, S) random tokens; from the third on they are the labels too."""
    return torch.randint(0, size.vocabulary, (1, size.tokens), generator=torch.Generator().manual_seed(seed))


def predicting(hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states at the positions that predict a label, and the labels. (1, S, H), (1, S) -> (N, H), (N,)"""
    return hidden[0, PROMPT - 1:-1], ids[0, PROMPT:]


def masked_labels(ids: torch.Tensor) -> torch.Tensor:
    """The same labels as Hugging Face models and losses take them. (1, S) -> (1, S)"""
    return ids.masked_fill(torch.arange(ids.shape[1]) < PROMPT, -100)


def lora_config() -> peft.LoraConfig:
    return peft.LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS, task_type='CAUSAL_LM')


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """AdamW as the transformers Trainer makes it by default."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def partitioned(path: str,
                mesh: ParallelMesh,
                *,
                lora: bool,
                dtype: torch.dtype = torch.float32,
                quantization: Optional[QuantizationConfig] = None,
                **options: Any) -> torch.nn.Module:
    """This rank's part of the model in a checkpoint, in training mode."""
    config = LlamaConfig.from_pretrained(path)
    model = build_model(config, mesh, directory=path, dtype=dtype, quantization=quantization, **options)
    torch.manual_seed(0)
    return (add_lora(model, lora_config(), mesh) if lora else model.requires_grad_(True)).train()


class Step:
    """Forward, loss, backward, gradient reduction, norm, clipping and AdamW of a partitioned model.

    Its parts are methods of their own, so that a counter or a profiler can go between them.
    """

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor, mesh: ParallelMesh) -> None:
        self.model, self.ids, self.mesh = model, ids, mesh
        self.parameters = trainable(model)
        self.optimizer = adamw(self.parameters)

    def loss(self) -> torch.Tensor:
        hidden, labels = predicting(hidden_states(self.model, input_ids=self.ids), self.ids)
        return token_losses(self.model, hidden, labels, self.mesh).nll.mean()

    def update(self) -> None:
        GradientStep(parameters=self.parameters, mesh=self.mesh, optimizer=self.optimizer, max_norm=MAX_NORM).run()

    def __call__(self) -> float:
        loss = self.loss()
        loss.backward()
        self.update()
        return float(loss.detach())


class PlainStep:
    """The same with a Hugging Face model of any kind, which computes its loss itself.

    Args:
        update: Clips and updates.
    """

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor, update: Callable[[], None]) -> None:
        self.model, self.ids, self.labels, self.update = model, ids, masked_labels(ids), update

    def loss(self) -> torch.Tensor:
        return self.model(input_ids=self.ids, labels=self.labels, use_cache=False).loss

    def __call__(self) -> float:
        loss = self.loss()
        loss.backward()
        self.update()
        return float(loss.detach())
