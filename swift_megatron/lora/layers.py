"""LoRA on partitioned layers: the adapter follows its base (arXiv:2106.09685 on arXiv:1909.08053).

    column: Y_i = X W_i^T + s (X A^T) B_i^T            A whole, B cut along the output
    row:    Y = sum_i (X_i W_i^T + s (X_i A_i^T) B^T)   A cut along the input, B whole; one all-reduce for both products
    tokens: E = sum_i (E_i + s (A_i^T) B^T)             A cut along the vocabulary, B whole

A factor that is whole on every rank sees only the rank's part of the work: its gradients are partial sums. PEFT creates
the factors in their whole size, with its own initialisation, names and config, and this module keeps the slice: the
numbers do not depend on the layout, and neither do the files.

s = alpha / r. B batch, S sequence, R rank of the adapter, I and O input and output size, /T this rank's part.
"""
import torch
from functools import partial
from peft.tuners import lora
from torch import nn
from typing import Any, Optional

from ..quantization.base import QuantizedWeight
from ..sharding import Ranges, ShardSpec, set_records
from ..tensor_parallel.embedding import VocabParallelEmbedding
from ..tensor_parallel.linear import ColumnParallelLinear, PartitionedLinear, RowParallelLinear
from .products import SlicedDropout, low_rank, plus_product


class PartitionedLoraLinear(lora.Linear):
    """What LoRA on column- and row-parallel layers shares. PEFT's layer, holding slices of the factors."""

    def _get_in_out_features(self, module: PartitionedLinear) -> tuple[int, int]:
        return module.global_in_features, module.global_out_features

    @property
    def lora_variants(self) -> dict:
        return {(): None}

    def factor_specs(self, rank: int) -> tuple[ShardSpec, ShardSpec]:
        """Records of A (R, I) and B (O, R)."""
        raise NotImplementedError

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs) -> None:
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        records = {}
        for factor, spec in zip(('lora_A', 'lora_B'), self.factor_specs(r)):
            linear = getattr(self, factor)[adapter_name]
            linear.weight = nn.Parameter(spec.slice(linear.weight.data).clone(), linear.weight.requires_grad)
            linear.out_features, linear.in_features = spec.local_shape
            records[f'{factor}.{adapter_name}.weight'] = spec
        set_records(self, records)
        dropout = self.lora_dropout[adapter_name]
        if isinstance(dropout, nn.Dropout):
            self.lora_dropout[adapter_name] = SlicedDropout(dropout.p,
                                                            self.get_base_layer().global_in_features, self.input_ranges)

    @property
    def input_ranges(self) -> Ranges:
        """What this rank holds of the layer's input; empty if all of it."""
        return ()

    def merge(self, safe_merge: bool = False, adapter_names: Optional[list[str]] = None) -> None:
        """Adds the adapters to the base weight, as PEFT does.

        Raises:
            ValueError: for a quantised base.
        """
        if isinstance(self.get_base_layer().weight, QuantizedWeight):
            raise ValueError('adapters cannot be merged into a quantised base in memory: use swift-megatron export '
                             '--merge_lora true')
        super().merge(safe_merge, adapter_names)

    def unmerge_if_disabled(self) -> None:
        """Adapters that were merged and then switched off leave the base weight, before it is used."""
        if self.disable_adapters and self.merged:
            self.unmerge()

    def _low_rank(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The first product of an adapter. (B, S, I or I/T) -> (B, S, R), a partial sum for row-parallel layers"""
        return low_rank(x, self.lora_A[name].weight, self.lora_dropout[name])

    def _with_adapters(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`base` plus the active adapters' products; a partial sum for row-parallel layers. Shapes stay."""
        total = base
        if not self.disable_adapters and not self.merged:
            for name in self.active_adapters:
                if name in self.lora_A:
                    total = plus_product(total, self._low_rank(name, x) * self.scaling[name], self.lora_B[name].weight)
        return total.to(base.dtype)


class ColumnParallelLoraLinear(PartitionedLoraLinear):
    """(B, S, I) -> (B, S, O/T)"""

    def factor_specs(self, rank: int) -> tuple[ShardSpec, ShardSpec]:
        base = self.get_base_layer()
        return (base.mesh.spec((rank, base.global_in_features), partial=True),
                base.mesh.spec((base.global_out_features, rank), axis=0, layout=base.layout, partial=True))

    def _low_rank(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.get_base_layer().region.narrow_product(partial(super()._low_rank, name), x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base: ColumnParallelLinear = self.get_base_layer()
        self.unmerge_if_disabled()
        x = base.enter(x)
        return base.leave(self._with_adapters(base.local_output(x), x))


class RowParallelLoraLinear(PartitionedLoraLinear):
    """(B, S, I/T) -> (B, S, O)"""

    def factor_specs(self, rank: int) -> tuple[ShardSpec, ShardSpec]:
        base = self.get_base_layer()
        return (base.mesh.spec((rank, base.global_in_features), axis=1, layout=base.layout,
                               partial=True), base.mesh.spec((base.global_out_features, rank), partial=True))

    @property
    def input_ranges(self) -> Ranges:
        base = self.get_base_layer()
        return base.layout[base.mesh.tensor_rank] if base.mesh.tensor_parallel_size > 1 else ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base: RowParallelLinear = self.get_base_layer()
        self.unmerge_if_disabled()
        x = base.enter(x)
        return base.leave(self._with_adapters(base.product(x), x))


class VocabParallelLoraEmbedding(lora.Embedding):
    """(B, S) token ids -> (B, S, H). PEFT stores A as (R, V) and B as (H, R)."""

    def _get_in_out_features(self, module: VocabParallelEmbedding) -> tuple[int, int]:
        return module.global_num_embeddings, module.embedding_dim

    @property
    def lora_variants(self) -> dict:
        return {(): None}

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs) -> None:
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        base = self.get_base_layer()
        specs = {
            'lora_embedding_A': base.mesh.spec((r, base.global_num_embeddings),
                                               axis=1,
                                               layout=base.layout,
                                               partial=True),
            'lora_embedding_B': base.mesh.spec((base.embedding_dim, r), partial=True),
        }
        for factor, spec in specs.items():
            whole = getattr(self, factor)[adapter_name]
            getattr(self, factor)[adapter_name] = nn.Parameter(spec.slice(whole.data).clone(), whole.requires_grad)
        set_records(self, {f'{factor}.{adapter_name}': spec for factor, spec in specs.items()})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        base: VocabParallelEmbedding = self.get_base_layer()
        if self.disable_adapters and self.merged:
            self.unmerge()
        rows = base.lookup(base.weight, ids)
        total = base.scaled(rows)
        if not self.disable_adapters and not self.merged:
            for name in self.active_adapters:
                if name in self.lora_embedding_A:
                    low_rank = base.lookup(self.lora_embedding_A[name].T, ids)  # (B, S, R)
                    total = total + base.scaled(low_rank @ self.lora_embedding_B[name].T * self.scaling[name])
        return base.leave(total.to(rows.dtype))
