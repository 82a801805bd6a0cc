"""One served version: its file, and the values of ids that have no row in the file.

Invariant: a pooled bag has the same bits as when its rows are pooled one by one in batch order.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from oneemb.graph.ops.lookup import DTYPES as TRAINED
from oneemb.kernels.arrays import Bags, RowsOfIds
from oneemb.kernels.frozen_rows import MISSING, OTHER, PADDING
from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.serve_rows import pool_rows_again
from oneemb.serving.build import Version
from oneemb.serving.initial import first_weights, initial_of
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.rows.row_format import BITS, RowFormat
from oneemb.storage.serving.layered_file import LayeredFile
from oneemb.storage.serving.served_file import ServedFile

_IDS = {torch.int64: np.int64, torch.int32: np.int32}


class Served:
    """One served version; `absent` says how ids without a row read, "initial" or "zeros"."""

    def __init__(self, file: ServedFile | LayeredFile, absent: str, backend: HostBackend):
        info = file.info
        self.file, self.version, self._backend = file, Version(info.name, info.identity, info.sequence), backend
        gives = info.trained if info.weights == info.trained else "float32"
        self._begins = RowFormat(info.dim, info.trained), gives
        self.dtype, self._bits = TRAINED[gives], BITS[gives]
        self.table_C = np.array(info.tables, np.int32)
        self.is_served_T = np.isin(np.arange(info.num_tables), self.table_C)
        self._in_order = info.tables == tuple(range(len(info.tables)))
        key_type, self.padding_idx = info.embedding.get("key_type", "int64"), info.embedding.get("padding_idx")
        if key_type not in ("int64", "int32") or not (self.padding_idx is None or type(self.padding_idx) is int):
            what = f"wrong key_type {key_type!r} or padding_idx {self.padding_idx!r}"
            raise CorruptTableError(f"{file.path}: {what[:200]}")
        self.key_type = torch.int64 if key_type == "int64" else torch.int32
        if self.padding_idx is not None and not -(1 << 63) <= self.padding_idx < 1 << 63:
            raise CorruptTableError(f"{file.path}: padding_idx {self.padding_idx} is no id")
        self._initial = initial_of(file, absent)
        if file.rows.layers is not None:
            self._compile_loops()

    def _compile_loops(self) -> None:
        """Compile the loops for rows with layers, before the first lookup needs them: a lookup must not wait."""
        table_N, id_N = np.empty(0, np.int32), np.empty(0, _IDS[self.key_type])
        self.rows(table_N, id_N, (0,))
        for scale_N in None, np.empty(0, np.float32):
            self.bags(table_N, id_N, np.zeros(2, np.int64), scale_N, "sum", (1,))

    @property
    def layered(self) -> LayeredFile | None:
        """The file, if it can have layers: if it was made from a snapshot."""
        return self.file if isinstance(self.file, LayeredFile) else None

    def check_as_before(self, before: "Served") -> None:
        """Raise StorageError unless results have the width and dtype, and ids the dtype, of the version `before`, so
        that a model around the embedding still works."""
        now, other = ((one.file.info.dim, one.dtype, one.key_type) for one in (self, before))
        if now != other:
            raise StorageError(
                f"snapshot {self.version.name!r} has rows of {now[0]} weights of {now[1]} for ids of {now[2]}, but"
                f" snapshot {before.version.name!r}, which is served, has {other[0]} of {other[1]} for {other[2]}; open"
                " it again, with the model that goes with it"
            )

    def tables_of_columns(self, column_N: np.ndarray) -> np.ndarray:
        """Table numbers of training for ids, or bags, in these columns."""
        return column_N if self._in_order else self.table_C.take(column_N)

    def only_served(self, table_N: np.ndarray) -> np.ndarray:
        """`table_N`, after a check; ValueError if one of the tables is not served."""
        if len(table_N) and len(self.table_C) < len(self.is_served_T) and not self.is_served_T.take(table_N).all():
            raise ValueError(f"table_ids must be numbers of served tables, {self.table_C.tolist()}")
        return table_N

    def rows(self, table_N: np.ndarray, id_N: np.ndarray, shape: Sequence[int]) -> torch.Tensor:
        """Weights of keys, [*shape, D], where the product of `shape` is the number of keys. CorruptTableError if a row
        is damaged."""
        out, out_ND = self._room(shape)
        self._read(table_N, id_N, out_ND)
        return out

    def _room(self, shape: Sequence[int]) -> tuple[torch.Tensor, np.ndarray]:
        """Tensor for the result of a lookup, [*shape, D], and its memory as an array [rows, D]."""
        # NumPy makes the array: torch's empty, view and numpy would take longer than a short lookup.
        dim = self.file.info.dim
        array = np.empty((*shape, dim), self._bits)
        out = torch.from_numpy(array)
        return out if self.dtype == torch.float32 else out.view(self.dtype), array.reshape(-1, dim)

    def _read(self, table_N: np.ndarray, id_N: np.ndarray, out_ND: np.ndarray) -> np.ndarray:
        """Write the weights of keys to `out_ND`; returns the slot of each key, or MISSING or PADDING."""
        place_N = self.file.read(table_N, id_N, self.padding_idx, out_ND, threads=self._backend.threads)
        if self._initial is not None:
            missing = np.flatnonzero(place_N == MISSING)
            if len(missing):
                out_ND[missing] = first_weights(
                    self._initial, *self._begins, table_N[missing], id_N[missing], threads=self._backend.threads
                )
        return place_N

    def bags(
        self, table_N: np.ndarray, id_N: np.ndarray, offset_P1: np.ndarray, scale_N: np.ndarray | None,
        pooling: Literal["sum", "mean", "max"], shape: Sequence[int],
    ) -> torch.Tensor:  # fmt: skip
        """Pooled weights of bags of keys, [*shape, D]. CorruptTableError if a row is damaged."""
        out, out_PD = self._room(shape)
        if pooling == "max":
            self._max(table_N, id_N, offset_P1, out_PD)
            return out
        bags = (offset_P1, scale_N, pooling == "mean")
        place_N, has_missing = self.file.pool(
            table_N, id_N, self.padding_idx, bags, out_PD, threads=self._backend.threads
        )  # fmt: skip
        if has_missing and self._initial is not None:
            missing = np.flatnonzero(place_N == MISSING)
            other_MD = first_weights(
                self._initial, *self._begins, table_N[missing], id_N[missing], threads=self._backend.threads
            )
            place_N[missing] = OTHER - np.arange(len(missing))
            pool_rows_again(self.file.rows, place_N, other_MD, bags, out_PD, threads=self._backend.threads)
        return out

    def _max(self, table_N: np.ndarray, id_N: np.ndarray, offset_P1: np.ndarray, out_PD: np.ndarray) -> None:
        # Copy rows and compare them as training does, so that maxima, and NaN among them, have the same bits.
        row_ND = np.empty((len(id_N), out_PD.shape[1]), out_PD.dtype)
        place_N = self._read(table_N, id_N, row_ND)
        order_N = np.arange(len(id_N), dtype=np.int64)
        inverse_N = np.where(place_N == PADDING, -1, order_N)
        self._backend.pool_max(
            RowsOfIds(row_ND, order_N, inverse_N), Bags(offset_P1), out_PD, np.empty(out_PD.shape, np.int32)
        )
