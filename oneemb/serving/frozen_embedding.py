"""Embedding of an exported program: lookups in frozen rows, and pooling, in aten ops.

B samples, T tables, N ids, P bags, D weights of a row.

Invariants:
- arguments, shapes, dtypes and numbers are those of `MultiTableEmbedding` in eval mode: rows have equal bits, and bags
  are summed in float32 in batch order and rounded once;
- no branch depends on values: a wrong value in `table_ids` or `offsets` raises when an op indexes with it.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from oneemb.embeddings.embedding import TableEmbedding
from oneemb.graph.ops.keys import bags_of, check_ids, one_table, pooling_of
from oneemb.serving.free_sizes import FreeSizes

_NO_BAG = 1 << 40


class FrozenEmbedding(torch.nn.Module):
    """Lookups in the frozen rows of an embedding, with results of `dtype`."""

    lookup: torch.nn.Module
    """Module that holds the rows: `FrozenRows` or `HashedRows`."""

    def __init__(self, embedding: TableEmbedding, dtype: torch.dtype):
        super().__init__()
        self.name, self.dtype, self.key_type = embedding.name, dtype, embedding.key_type
        self.embedding_dim, self.column_dims = embedding.embedding_dim, embedding.column_dims
        self.num_tables, self.padding_idx = embedding.num_tables, embedding.padding_idx
        self.free_sizes = FreeSizes()
        self.eval()

    def forward(
        self,
        ids: torch.Tensor,
        table_ids: torch.Tensor | int | None = None,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        pooling: Literal["sum", "mean", "max"] | None = None,
        *,
        columns: Sequence[int] | None = None,
        include_last_offset: bool = True,
    ) -> torch.Tensor:
        """Look up ids, like `MultiTableEmbedding.forward` in eval mode."""
        table_ids = one_table(table_ids, self.num_tables, ids)
        bags = bags_of(
            ids, table_ids, offsets, per_sample_weights, pooling, columns, self.num_tables, include_last_offset
        )
        ids, table_ids, offsets, per_sample_weights, _ = bags
        pools = pooling_of(pooling, offsets)
        if offsets is None and (columns is not None or per_sample_weights is not None):
            raise ValueError("columns and per_sample_weights are for bags, which need offsets; pass offsets")
        if offsets is None:
            check_ids(ids, table_ids, self.num_tables, self.key_type)
            table_N = self._tables_of(ids, table_ids)
            rows: torch.Tensor = self.lookup(table_N, self._wide(ids).reshape(-1))
            return rows.to(self.dtype).reshape(*ids.shape, self.embedding_dim)
        return bags.shaped(self._pooled(ids, table_ids, offsets, per_sample_weights, pools, columns))

    def read(self, ids: torch.Tensor, table_ids: torch.Tensor | int | None = None) -> torch.Tensor:
        """Look up ids, like `MultiTableEmbedding.read`."""
        return self(ids, table_ids)

    def _tables_of(self, ids: torch.Tensor, table_ids: torch.Tensor | None) -> torch.Tensor:
        if table_ids is not None:
            return self._in_range(table_ids.long()).expand(ids.shape).reshape(-1)
        if self.num_tables == 1:
            return torch.zeros_like(ids, dtype=torch.int64).reshape(-1)
        return torch.arange(self.num_tables, device=ids.device).expand(ids.shape).reshape(-1)

    def _wide(self, ids: torch.Tensor) -> torch.Tensor:
        """`ids` as int64. The op `^` makes a script refuse floating-point ids, which `long()` alone would accept."""
        return ids if self.key_type == torch.int64 else (ids ^ 0).long()

    def _in_range(self, table_ids: torch.Tensor) -> torch.Tensor:
        """Table ids, with `num_tables` in place of negative ones, so that indexing with them raises: some compilers
        count a negative index from the end."""
        return torch.where(table_ids < 0, self.num_tables, table_ids)

    def _pooled(
        self,
        ids: torch.Tensor,
        table_ids: torch.Tensor | None,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        pooling: str,
        columns: Sequence[int] | None,
    ) -> torch.Tensor:
        if ids.dtype != self.key_type or ids.dim() != 1:
            raise TypeError(f"ids of bags must be {self.key_type} [N], got {ids.dtype} {list(ids.shape)}")
        if offsets.dtype not in (torch.int64, torch.int32) or offsets.dim() != 1:
            raise TypeError(f"offsets must be int64 [bags + 1], got {offsets.dtype} {list(offsets.shape)}")
        if per_sample_weights is not None and (pooling != "sum" or per_sample_weights.dtype != torch.float32):
            raise ValueError(
                f'per_sample_weights must be float32, for pooling="sum", got {per_sample_weights.dtype} for {pooling!r}'
            )
        if columns is not None and (table_ids is not None or not all(0 <= t < self.num_tables for t in columns)):
            raise ValueError(
                f"columns must be tables from 0 to {self.num_tables - 1}, without table_ids, got {list(columns)}"
            )
        offsets, count = offsets.long(), offsets.shape[0] - 1
        by_column = 1 if table_ids is not None else self.num_tables
        self.free_sizes.assume_samples(count, by_column if columns is None else len(columns))
        bag_N = self._bags_of(ids, offsets)
        if columns is not None:
            columns_C = torch.tensor(list(columns), device=ids.device)
            none_B = torch.zeros(count // len(columns), dtype=torch.int64, device=ids.device)
            table_P = (columns_C.unsqueeze(1) + none_B).reshape(-1)
        elif table_ids is not None:
            table_P = self._in_range(table_ids.long()).expand(count)
        else:
            table_P = torch.arange(count, device=ids.device) % self.num_tables
        rows = self.lookup(table_P.index_select(0, bag_N), self._wide(ids))
        if per_sample_weights is not None:
            if self.padding_idx is not None:  # a padding id's weight may be infinite
                per_sample_weights = torch.where(ids == self.padding_idx, 0.0, per_sample_weights)
            rows = rows * per_sample_weights.unsqueeze(1)
        elif pooling == "mean":
            scale_P = 1.0 / self._without_padding(ids, offsets).diff().clamp(min=1).float()
            rows = rows * scale_P.index_select(0, bag_N).unsqueeze(1)
        pooled = self._pool(ids, rows, offsets, "max" if pooling == "max" else "sum").to(self.dtype)
        if columns is not None:
            pooled_CBD = pooled.reshape(len(columns), count // len(columns), self.embedding_dim)
            return pooled_CBD.transpose(0, 1).contiguous()
        if table_ids is not None or self.num_tables == 1:
            return pooled
        # Two steps, since one reshape would compare both shapes, which are equal for 0 samples.
        flat = pooled.reshape(-1).reshape(-1, self.num_tables * self.embedding_dim)
        return flat.reshape(-1, self.num_tables, self.embedding_dim)

    def _bags_of(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Number of the bag of each id, int64 [N]; a number beyond all bags if offsets are wrong, so that indexing
        raises."""
        bag_N = torch.searchsorted(offsets[1:].contiguous(), torch.arange(ids.shape[0], device=ids.device), right=True)
        rises = (offsets[1:] >= offsets[:-1]).all()
        # Count by an op: an exporter would fix `ids.shape[0]` if it were compared with a tensor.
        right = rises & (offsets[0] == 0) & (offsets[-1] == torch.ones_like(ids, dtype=torch.int64).sum())
        return torch.where(right, bag_N, _NO_BAG)

    def _without_padding(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Offsets of the bags after padding ids are left out."""
        if self.padding_idx is None:
            return offsets
        # cat, not pad: an AOTInductor package reads the padded tensor even if it is empty.
        before_N1 = torch.cat([ids.new_zeros(1, dtype=torch.int64), (ids != self.padding_idx).long().cumsum(0)])
        return before_N1.index_select(0, offsets)

    def _pool(self, ids: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, mode: str) -> torch.Tensor:
        if mode == "max" and self.padding_idx is not None:  # In a sum padding adds 0.
            rows = rows.index_select(0, torch.nonzero(ids != self.padding_idx).squeeze(1))
            offsets = self._without_padding(ids, offsets)
        # `rows` has one row for each id of the bags, in their order.
        return torch.nn.functional.embedding_bag(
            torch.arange(rows.shape[0], device=ids.device), rows, offsets, mode=mode, include_last_offset=True
        )

    def extra_repr(self) -> str:
        return f"{self.name!r}, tables={self.num_tables}, dim={self.embedding_dim}"
