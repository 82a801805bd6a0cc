"""The rows of tables, as dynamicemb's tools look at them."""

from collections.abc import Iterator

import numpy as np
import torch

from oneemb.dynamicemb.tables import DynamicTables
from oneemb.rows.values import encode_rows

__all__ = ["DynamicEmbStorage", "HybridStorage", "Storage"]


class Storage:
    """Reads and writes rows by table and id.

    Args:
        tables: whose rows they are.
    """

    def __init__(self, tables: DynamicTables):
        self._tables = tables

    def export_keys_values(
        self, device: torch.device, batch_size: int = 65536, table_id: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Ids int64 [N], weights float32 [N, D], state float32 [N, Z] or None, and scores int64 [N] or [N, 2], of the
        rows of a table that `dist_type` gives this rank. Every rank makes the call."""
        for rows in self._tables.export(table_id):
            assert rows.score_NS is not None and rows.state_NZ is not None
            scores = rows.score_NS[:, 0] if rows.score_NS.shape[1] == 1 else rows.score_NS
            arrays = rows.key_N, rows.value_ND, rows.state_NZ, scores
            for begin in range(0, len(rows.key_N), batch_size):
                its = [torch.from_numpy(array[begin : begin + batch_size].copy()).to(device) for array in arrays]
                yield its[0], its[1], its[2] if its[2].shape[1] else None, its[3]

    def insert(
        self, keys: torch.Tensor, table_ids: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None = None
    ) -> None:
        """Give rows, those of them that this rank owns, weights and state: float32 [N, D + Z].

        Args:
            keys, table_ids: int64 [N]; no key twice.
            scores: int64 [N]; None = as of a lookup.
        """
        store = self._tables.rows.store
        store.build()
        dim, format = store.format.dim, store.format
        for t in table_ids.unique().tolist():
            id_N = keys[table_ids == t].cpu().numpy()
            own = self._tables.own(t, id_N)
            words = values[table_ids == t].detach().float().cpu().numpy()[own]
            table_U = np.full(len(own), t, np.int32)
            state_NZ = words[:, dim : dim + format.state_width]
            store.put(table_U, id_N[own], encode_rows(format, words[:, :dim], state_NZ))
            if scores is not None:
                score_U = scores[table_ids == t].cpu().numpy()[own].view(np.uint64)
                store.set_scores(table_U, id_N[own], score_U)

    def size(self) -> int:
        """Rows of all tables on this rank."""
        return int(self._tables.rows.stats()["rows"])

    def num_tables(self) -> int:
        """How many tables there are."""
        return len(self._tables.tables)

    def embedding_dtype(self) -> torch.dtype:
        """That of weights."""
        return self._tables.rows.dtype

    def embedding_dim(self, table_id: int = 0) -> int:
        """Weights of a row."""
        return self._tables.rows.embedding_dim

    def value_dim(self, table_id: int = 0) -> int:
        """Weights and state of a row, as numbers."""
        return self.embedding_dim() + self._tables.rows.store.format.state_width

    max_embedding_dim, max_value_dim = embedding_dim, value_dim

    def init_optimizer_state(self) -> float:
        """What the state of a new row begins with."""
        return next(iter(self._tables.rows.store.format.state), 0.0)


class DynamicEmbStorage(Storage):
    """Rows in one place: where lookups run, or with caching=True in the host's memory."""


class HybridStorage(Storage):
    """Rows of which dynamicemb would keep a part on the GPU and a part on the host. Here they are in one place."""
