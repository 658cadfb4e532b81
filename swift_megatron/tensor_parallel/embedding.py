"""Token embedding with the vocabulary cut over the tensor-parallel ranks (arXiv:1909.08053 section 3).

V vocabulary, H hidden. Every rank looks up the tokens that it holds, has zeros for the rest, and the ranks' results are
added. The vocabulary need not divide: the ranges are then uneven, no row is padded.
"""
import torch
import torch.nn.functional as F
from torch import nn
from typing import Optional

from ..mesh import ParallelMesh
from ..sharding import Layout, set_records
from .boundary import Region


class VocabParallelEmbedding(nn.Embedding):
    """(B, S) token ids -> (B, S, H), the same on all ranks.

    Args:
        num_embeddings: V.
        embedding_dim: H.
        layout: Which rows each rank holds (one contiguous range each).
        mesh: The process grid.
        padding_idx: Token whose row gets no gradient, as in torch.nn.Embedding.
        scale: Factor on the result (gemma); a tensor so that its rounding is the model's own.
        region: What its result leaves; one of its own if None.
    """

    def __init__(self,
                 num_embeddings: int,
                 embedding_dim: int,
                 layout: Layout,
                 mesh: ParallelMesh,
                 *,
                 padding_idx: Optional[int] = None,
                 scale: Optional[torch.Tensor] = None,
                 region: Optional[Region] = None,
                 device: Optional[torch.device] = None,
                 dtype: Optional[torch.dtype] = None) -> None:
        nn.Module.__init__(self)  # not nn.Embedding's: that one fills the table with random numbers
        self.mesh, self.layout, self.region = mesh, layout, region or Region(mesh)
        self.global_num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        (self.first, last), = layout[mesh.tensor_rank]
        self.num_embeddings = last - self.first
        self.padding_idx = None
        if padding_idx is not None and self.first <= padding_idx < last:
            self.padding_idx = padding_idx - self.first
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2., False, False
        self.register_buffer('embed_scale', scale, persistent=False)
        self.weight = nn.Parameter(torch.empty(self.num_embeddings, embedding_dim, device=device, dtype=dtype))
        set_records(self, {'weight': mesh.spec((num_embeddings, embedding_dim), axis=0, layout=layout, partial=True)})

    def local_ids(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers within this rank's part (0 for tokens of others) and which tokens are its own. (B, S) -> 2 x (B,
        S)
        """
        local = ids - self.first
        own = (local >= 0) & (local < self.num_embeddings)
        return local.masked_fill(~own, 0), own

    def lookup(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `table` (V/T, width) for own tokens, zeros for others. (B, S) -> (B, S, width), a partial sum"""
        local, own = self.local_ids(ids)
        # Padding of own tokens is marked by padding_idx; row 0 stands in for other ranks' tokens and is masked after.
        rows = F.embedding(local, table, self.padding_idx)
        return rows * own.unsqueeze(-1).to(rows.dtype)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """The one all-reduce. (B, S, H) partial sums -> (B, S, H)"""
        return self.region.leave(partial)

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.leave(self.scaled(self.lookup(self.weight, ids)))

    def extra_repr(self) -> str:
        return f'{self.num_embeddings}/{self.global_num_embeddings}, {self.embedding_dim}'
