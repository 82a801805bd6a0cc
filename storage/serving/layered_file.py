"""A served file with layers: small files of the rows that have changed since, and of keys that have no row any more.

Invariants:
- each layer goes on from the version that the file and the layers before it make up: the identities are compared;
- all blocks of a layer are compared with their checksums before a lookup reads the layer;
- all versions with the same file share its arrays, so a further version takes memory and time for its layers only.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from oneemb.kernels.perfect_hash import FIRST_BUCKET, FIRST_SLOT, SLOTS
from oneemb.kernels.serve_layers import Layers, filter_of
from oneemb.kernels.serve_rows import BLOCK_BYTES, ServedRows, pool_rows, serve_rows
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.serving.room import Room
from oneemb.storage.serving.served_file import ServedFile, ServedInfo, with_gone


class LayeredFile:
    """A file and its layers, looked up as one file. The calls are those of `ServedFile`.

    Args:
        base: the file; `room`, in which it is mapped, has places for the layers.
        layers: paths of the layers, the oldest first; none = the file alone.
        before: open version with the same file; its open layers are used again.

    Raises:
        FileNotFoundError: a layer is not there.
        CorruptTableError: a layer is damaged, or goes on from another version.
        RoomFullError: the room has no place for a layer.
    """

    def __init__(
        self, base: ServedFile, room: Room, layers: Sequence[str] = (), *, threads: Threads,
        before: "LayeredFile | None" = None,
    ):  # fmt: skip
        self.base, self.room, self.path = base, room, layers[-1] if layers else base.path
        there = {} if before is None else before.mapped
        self.mapped: dict[str, tuple[ServedFile, int]] = {}
        """{path: open layer, offset of its first byte in the room}, the oldest first."""
        last = base.info
        for path in layers:
            layer, offset = there.get(path) or room.open_layer(path, threads)
            _check_goes_on(layer, last, base.info)
            if path not in there:
                layer.verify()
            self.mapped[path] = layer, offset
            last = layer.info
        files = [base, *self.layers]
        self.info = replace(
            base.info, name=last.name, identity=last.identity, sequence=last.sequence, embedding=last.embedding,
            error_max=max(one.info.error_max for one in files),
            error_rms=math.sqrt(
                sum(one.info.error_rms**2 * one.info.rows for one in files)
                / max(1, sum(one.info.rows for one in files))
            ),
        )  # fmt: skip
        self.rows = self._rows(threads) if layers else base.rows

    @property
    def layers(self) -> list[ServedFile]:
        """Open layers, the oldest first."""
        return [layer for layer, _ in self.mapped.values()]

    def _rows(self, threads: Threads) -> ServedRows:
        base, tables = self.base.info, self.base.info.num_tables
        byte_X, size = self.room.bytes(), base.record_bytes
        record_X = byte_X[BLOCK_BYTES:]
        record_SW = record_X[: len(record_X) // size * size].view(np.int64).reshape(-1, size // 8)
        pilot_X = byte_X[base.pilots_begin :]
        pilot_B = pilot_X[: len(pilot_X) // 2 * 2].view(np.uint16)
        region_LT6 = np.zeros((len(self.mapped), 2 * tables, 6), np.uint64)
        for region_T6, (layer, offset) in zip(region_LT6, reversed(self.mapped.values()), strict=True):
            used_T = np.flatnonzero(layer.rows.region_T6[:, SLOTS])
            region_T6[used_T] = layer.rows.region_T6[used_T]
            region_T6[used_T, FIRST_SLOT] += np.uint64(offset // size)
            region_T6[used_T, FIRST_BUCKET] += np.uint64((offset + layer.info.pilots_begin - base.pilots_begin) // 2)
        keys = [layer.keys() for layer in self.layers]
        table_N = np.concatenate([table_N for table_N, _, _ in keys]) % np.int32(tables)
        id_N = np.concatenate([id_N for _, id_N, _ in keys])
        return replace(
            self.base.rows, pilot_B=pilot_B, record_SW=record_SW,
            layers=Layers(region_LT6, filter_of(table_N, id_N, self.base.rows.region_T6, threads=threads)),
        )  # fmt: skip

    def read(
        self, table_N: np.ndarray, id_N: np.ndarray, padding_id: int | None, out_ND: np.ndarray, *, threads: Threads
    ) -> np.ndarray:
        """Read rows; see `ServedFile.read`."""
        place_N, block = serve_rows(self.rows, table_N, id_N, padding_id, out_ND, threads=threads)
        if block >= 0:
            raise self.base.damaged_block(block)
        return place_N

    def pool(
        self, table_N: np.ndarray, id_N: np.ndarray, padding_id: int | None, bags: tuple, out_PX: np.ndarray, *,
        threads: Threads,
    ) -> tuple[np.ndarray, bool]:  # fmt: skip
        """Read and pool rows; see `ServedFile.pool`."""
        place_N, has_missing, block = pool_rows(self.rows, table_N, id_N, padding_id, bags, out_PX, threads=threads)
        if block >= 0:
            raise self.base.damaged_block(block)
        return place_N, has_missing

    def verify(self) -> None:
        """Compare all rows of the whole file with their checksums; those of layers were compared when the layers were
        opened. See `ServedFile.verify`."""
        self.base.verify()


def _check_goes_on(layer: ServedFile, before: ServedInfo, base: ServedInfo) -> None:
    """Raise CorruptTableError unless a layer goes on from a version, and has rows of the kind of the file's rows."""
    info, tables = layer.info, tuple(with_gone(base.tables, base.num_tables))
    found = info.since, info.trained, info.weights, info.dim, info.num_tables, info.tables
    wanted = before.identity, base.trained, base.weights, base.dim, base.num_tables, tables
    if found != wanted:
        raise CorruptTableError(
            f"{layer.path} must go on from identity {before.identity} with {base.num_tables} tables of {base.dim}"
            f" {base.weights} weights, got {info.since or 'no other version'} with {info.num_tables} of {info.dim}"
            f" {info.weights}: it was put there under another name; remove the file, and it is made again"
        )
