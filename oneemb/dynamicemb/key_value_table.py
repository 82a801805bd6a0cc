"""Access to the rows of tables by id, for dynamicemb's tools."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from oneemb.dynamicemb.dynamicemb_config import DynamicEmbScoreStrategy
from oneemb.dynamicemb.table_dumps import TableDumps
from oneemb.dynamicemb.tables import DynamicTables
from oneemb.dynamicemb.types import CopyMode, Found, Storage as Interface
from oneemb.foreign.dynamicemb_files import ids_of_numbers, numbers_in_file
from oneemb.rows.values import encode_rows
from oneemb.storage.store_rows import set_rows

__all__ = ["DynamicEmbStorage", "HybridStorage", "Storage"]


class Storage(Interface[Any, Any]):
    """Rows of tables, read and written by table and id.

    Args:
        tables: tables that hold the rows.
    """

    def __init__(self, tables: DynamicTables):
        self._tables = tables

    def export_keys_values(
        self, device: torch.device, batch_size: int = 65536, table_id: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Yield rows of a table that `dist_type` assigns to this rank: ids int64 [N], weights float32 [N, D], optimizer
        state float32 [N, Z] or None, scores int64 [N] or [N, 2]. Every rank makes the call."""
        for rows in self._tables.export(table_id):
            assert rows.score_NS is not None and rows.state_NZ is not None
            scores = rows.score_NS[:, 0] if rows.score_NS.shape[1] == 1 else rows.score_NS
            arrays = rows.key_N, rows.value_ND, rows.state_NZ, scores
            for begin in range(0, len(rows.key_N), batch_size):
                tensors = [torch.from_numpy(array[begin : begin + batch_size].copy()).to(device) for array in arrays]
                yield tensors[0], tensors[1], tensors[2] if tensors[2].shape[1] else None, tensors[3]

    def find(
        self,
        unique_keys: torch.Tensor,
        table_ids: torch.Tensor,
        copy_mode: CopyMode,
        lfu_accumulated_frequency: torch.Tensor | None = None,
    ) -> Found:
        """Read rows of this rank, without changing any.

        Args:
            unique_keys, table_ids: distinct ids, and the table of each: int64 [N].
            copy_mode: EMBEDDING = read weights; VALUE = read weights and optimizer state.
            lfu_accumulated_frequency: has no effect.
        """
        device, dim = unique_keys.device, self.embedding_dim()
        id_N, table_N = unique_keys.cpu().numpy(), table_ids.cpu().numpy()
        value_NW = np.zeros((len(id_N), self.value_dim()), np.float32)
        score_NS, found_N = np.zeros((len(id_N), 2), np.int64), np.zeros(len(id_N), np.bool_)
        words = 1
        for t in np.unique(table_N).tolist():
            place_M = np.flatnonzero((table_N == t) & np.isin(id_N, self._tables.rows.store.policy.uses(t)[0]))
            place_M = place_M[np.argsort(id_N[place_M])]
            found_N[place_M] = True
            for rows in self._tables.read(t, id_N[place_M], scored=True):
                assert rows.score_NS is not None and rows.state_NZ is not None
                batch_K, place_M = place_M[: len(rows.key_N)], place_M[len(rows.key_N) :]
                value_NW[batch_K] = np.concatenate([rows.value_ND, rows.state_NZ], axis=1)
                words = max(words, rows.score_NS.shape[1])
                score_NS[batch_K, : rows.score_NS.shape[1]] = rows.score_NS
        missing = torch.from_numpy(np.flatnonzero(~found_N)).to(device)
        return Found(
            len(missing), unique_keys[missing], missing, table_ids[missing], None, torch.from_numpy(found_N).to(device),
            torch.from_numpy(score_NS if words == 2 else score_NS[:, 0].copy()).to(device),
            torch.from_numpy(value_NW if copy_mode is CopyMode.VALUE else value_NW[:, :dim].copy()).to(device),
        )  # fmt: skip

    def insert(
        self,
        keys: torch.Tensor,
        table_ids: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        """Write the rows of the ids that this rank owns; other ids are ignored.

        Args:
            keys, table_ids: distinct ids, and the table of each: int64 [N].
            values: weights and optimizer state, float32 [N, D + Z].
            scores: int64 [N]; None = the scores that a lookup would give.
            preserve_existing: whether existing rows stay as they are.
        """
        store = self._tables.rows.store
        store.build()
        dim, format = store.format.dim, store.format
        for t in table_ids.unique().tolist():
            id_N = keys[table_ids == t].cpu().numpy()
            own = self._tables.own(t, id_N)
            if preserve_existing:
                own = own[~np.isin(id_N[own], store.policy.uses(t)[0])]
            words = values[table_ids == t].detach().float().cpu().numpy()[own]
            table_U = np.full(len(own), t, np.int32)
            state_NZ = words[:, dim : dim + format.state_width]
            set_rows(store, table_U, id_N[own], encode_rows(format, words[:, :dim], state_NZ))
            if scores is not None:
                score_U = scores[table_ids == t].cpu().numpy()[own].view(np.uint64)
                store.policy.set_scores(table_U, id_N[own], score_U)

    def dump(
        self,
        table_id: int,
        meta_file_path: str,
        emb_key_path: str,
        embedding_file_path: str,
        score_file_path: str | None,
        opt_file_path: str | None,
        timestamp: int,
    ) -> None:
        """Write this rank's part of a table into files of today's layout. Every rank makes the call.

        Unlike `DynamicEmbDump` this overwrites files in place: a call that fails leaves incomplete files.

        Args:
            score_file_path, opt_file_path: files of scores and optimizer state; None = do not write them.
            timestamp: scores of strategy TIMESTAMP are written as their distance from this time.
        """
        info, ranks = self._tables.tables[table_id], self._tables.ranks
        columns: dict[str, list[np.ndarray]] = {emb_key_path: [], embedding_file_path: []}
        columns |= {path: [] for path in (score_file_path, opt_file_path) if path is not None}
        for rows in self._tables.export(table_id):
            assert rows.score_NS is not None and rows.state_NZ is not None
            key_N = numbers_in_file(info.options.dist_type, rows.key_N, ranks.size, info.num_embeddings)
            columns[emb_key_path].append(key_N.astype("<i8"))
            columns[embedding_file_path].append(rows.value_ND.astype("<f4"))
            if score_file_path is not None:
                counts_back = info.options.score_strategy is DynamicEmbScoreStrategy.TIMESTAMP
                score_NS = timestamp - rows.score_NS if counts_back else rows.score_NS
                columns[score_file_path].append(score_NS.astype("<i8"))
            if opt_file_path is not None:
                columns[opt_file_path].append(rows.state_NZ.astype("<f4"))
        for path, arrays in columns.items():
            with open(path, "wb") as file:
                file.writelines(array.tobytes() for array in arrays)
        meta = TableDumps(self._tables).meta(table_id, "today", opt_file_path is not None)
        if ranks.first:
            with open(meta_file_path, "w") as text:
                json.dump(meta, text)

    def load(
        self,
        table_id: int,
        meta_file_path: str,
        emb_file_path: str,
        embedding_file_path: str,
        score_file_path: str | None,
        opt_file_path: str | None,
        include_optim: bool,
        timestamp: int,
    ) -> None:
        """Load the rows in the files that this rank owns; other rows stay as they are.

        Args:
            emb_file_path: file of keys that the rank of the same number has written.
            score_file_path, opt_file_path: files of scores and optimizer state; None = there are none.
            include_optim: whether to load the optimizer's state and options.
            timestamp: same as for `dump`.

        Raises:
            ValueError: a file has another number of rows than the file of keys.
        """
        info, ranks = self._tables.tables[table_id], self._tables.ranks
        store, dumps = self._tables.rows.store, TableDumps(self._tables)
        store.build()
        with open(meta_file_path) as text:
            meta = json.load(text)
        key_N = np.fromfile(emb_file_path, "<i8")
        count, dist = meta.get("num_embeddings", info.num_embeddings), meta.get("dist_type", info.options.dist_type)
        id_N = ids_of_numbers(dist, ranks.rank, key_N, ranks.size, count)
        value_ND = _of_rows(embedding_file_path, "<f4", len(id_N))
        score_NS = None if score_file_path is None else _of_rows(score_file_path, "<i8", len(id_N))
        with_state = include_optim and opt_file_path is not None and store.format.state_width > 0
        state_NZ = _of_rows(str(opt_file_path), "<f4", len(id_N)) if with_state else None
        own = self._tables.own(table_id, id_N)
        if len(own):
            state_UZ = None if state_NZ is None else state_NZ[own]
            score_US = None if score_NS is None else score_NS[own]
            dumps.put(table_id, id_N[own], value_ND[own], state_UZ, score_US, timestamp)
        if include_optim:
            dumps.take_options(table_id, meta)

    def size(self) -> int:
        """Number of rows of all tables on this rank."""
        return int(self._tables.rows.stats()["rows"])

    def num_tables(self) -> int:
        """Number of tables."""
        return len(self._tables.tables)

    # Documented by the interface; all tables of an embedding have one width.

    def embedding_dtype(self) -> torch.dtype:
        return self._tables.rows.dtype

    def embedding_dim(self, table_id: int = 0) -> int:
        return self._tables.rows.embedding_dim

    def value_dim(self, table_id: int = 0) -> int:
        return self.embedding_dim() + self._tables.rows.store.format.state_width

    def max_embedding_dim(self) -> int:
        return self.embedding_dim()

    def max_value_dim(self) -> int:
        return self.value_dim()

    def embedding_dims(self, on_device: bool = False) -> torch.Tensor:
        device = self._tables.rows.weights[0].device if on_device else torch.device("cpu")
        return torch.full((self.num_tables(),), self.embedding_dim(), dtype=torch.int64, device=device)

    def all_dims_vec4(self) -> bool:
        return self.embedding_dim() % 4 == self.value_dim() % 4 == 0

    def init_optimizer_state(self) -> float:
        return next(iter(self._tables.rows.store.format.state), 0.0)


class DynamicEmbStorage(Storage):
    """Rows that dynamicemb keeps in one place: on the device of lookups or, with caching=True, in host memory."""


class HybridStorage(Storage):
    """Rows that dynamicemb keeps partly on the GPU and partly in host memory. oneemb keeps them in one place."""


def _of_rows(path: str, dtype: str, rows: int) -> np.ndarray:
    """Numbers in a file, as an array [rows, numbers of a row]."""
    numbers = np.fromfile(path, dtype)
    if len(numbers) % rows if rows else len(numbers):
        raise ValueError(
            f"{path} must have the same number of values for each of {rows} keys, got {len(numbers)} values"
        )
    return numbers.reshape(rows, len(numbers) // max(1, rows))
