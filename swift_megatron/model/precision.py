"""In which dtype what is computed, sent and kept. docs/precision.md has it as a table.

The dtypes are facts of a model, written down when it is built and agreed on by all ranks before training. They are
never read off "the first parameter" of a rank's part: that is a weight on one stage and an adapter on another.
"""
import torch
import torch.distributed as dist
from dataclasses import dataclass, fields
from torch import nn
from typing import Optional

from ..mesh import ParallelMesh
from .language_modeling import causal_lm

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ABSENT = -1  # a stage without adapters, a run without autocast


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one model in one run.

    Args:
        weights: The frozen (or fully trained) weights that are stored dense.
        hidden: Hidden states between blocks, and between pipeline stages: what the token embedding gives.
        adapters: LoRA factors, and so their gradients and optimizer states; None without adapters.
        autocast: What products are cast to; None without autocast.
    """
    weights: torch.dtype
    hidden: torch.dtype
    adapters: Optional[torch.dtype] = None
    autocast: Optional[torch.dtype] = None

    @property
    def products(self) -> torch.dtype:
        """Products with base weights, and the partial sums of row-parallel layers that are reduced over t."""
        return self.autocast or self.hidden

    @property
    def adapter_products(self) -> Optional[torch.dtype]:
        """X A^T and U B^T. Their sum with the base's product is kept in the base's dtype."""
        return self.adapters and (self.autocast or self.adapters)

    @property
    def block_gradients(self) -> torch.dtype:
        """Gradients of a block's input, summed over t in the backward pass."""
        return self.hidden

    @property
    def losses(self) -> torch.dtype:
        """Cross-entropy and what is logged."""
        return torch.promote_types(self.hidden, torch.float32)

    def describe(self) -> str:
        """One line for the log."""
        names = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return 'dtypes: ' + ', '.join(f'{name} {str(dtype).removeprefix("torch.")}'
                                      for name, dtype in names.items() if dtype is not None)


def _adapter_dtype(model: nn.Module) -> Optional[torch.dtype]:
    return next((parameter.dtype for name, parameter in model.named_parameters() if '.lora_A.' in name), None)


def agreed_precision(model: nn.Module, mesh: ParallelMesh, autocast: Optional[torch.dtype] = None) -> Precision:
    """The dtypes of a model on which all processes agree; `hidden_dtype` of the causal LM becomes that of its
    embedding.

    Every process has to call it, once its part of the model is complete.

    Args:
        model: This rank's part, with its adapters, stages of others taken away.
        mesh: The process grid.
        autocast: The dtype of autocast where it is on.

    Raises:
        RuntimeError: on all processes, if they differ: they would send one dtype and expect another.
    """
    lm = causal_lm(model)
    # The first stage knows: a trained copy of the embedding may have another dtype than the model.
    hidden = lm.get_input_embeddings().weight.dtype if mesh.pipeline_rank == 0 else None
    own = [lm.hidden_dtype, hidden, _adapter_dtype(model), autocast]
    agreed = _agree([ABSENT if dtype is None else DTYPES.index(dtype) for dtype in own], lm, mesh)
    weights, hidden, adapters, autocast = (None if code == ABSENT else DTYPES[code] for code in agreed)
    lm.hidden_dtype = hidden
    return Precision(weights=weights, hidden=hidden, adapters=adapters, autocast=autocast)


def _agree(own: list[int], lm: nn.Module, mesh: ParallelMesh) -> list[int]:
    """The codes of all processes, which have to be the same where they are present."""
    if mesh.world_size == 1:
        return own
    device = next(lm.parameters()).device
    codes = torch.tensor(own, device=device)
    largest = codes.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    smallest = torch.where(codes == ABSENT, largest, codes)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    if not torch.equal(largest, smallest):
        names = [spec.name for spec in fields(Precision)]
        differing = [name for name, a, b in zip(names, largest.tolist(), smallest.tolist()) if a != b]
        raise RuntimeError(f'the processes disagree on the dtype of {", ".join(differing)}: '
                           f'{[DTYPES[code] for code in largest.tolist() if code != ABSENT]} and '
                           f'{[DTYPES[code] for code in smallest.tolist() if code != ABSENT]}')
    return largest.tolist()
