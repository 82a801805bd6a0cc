"""Makes a snapshot of all rows that the files of chunks have, for a table whose snapshot files cannot be read.

Nothing says which version of a row a snapshot had, or which rows were erased. So each key gets its last row in the
chunk with the greatest number. Compaction writes rows again, so this row may be an older one.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from oneemb.kernels.row_blocks import bits_clear, bits_set
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, FormatVersionError, StorageError
from oneemb.storage.fs import FileSystem, doing, read_file
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.table.chunk_damage import keys_of_runs, sound_runs_of
from oneemb.storage.table.chunk_files import chunk_numbers, chunk_paths
from oneemb.storage.table.chunk_scan import live_rows
from oneemb.storage.table.file_header import HEADER_BYTES, KEYS_MAGIC, ROWS_MAGIC, read_header
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotInfo, SnapshotRecord


def unlisted_rows(
    fs: FileSystem, path: str, name: str, identity: str, other_meta: Mapping[str, Any], known: list[SnapshotRecord],
    problem: Callable[[StorageError], None],
) -> SnapshotRecord | None:  # fmt: skip
    """A snapshot, not saved yet, of the newest version of each row in the chunks of a table. None if the table has no
    chunk, and no snapshot that can be read describes its rows.

    Args:
        name, identity: of the new snapshot.
        other_meta: description of the rows if no snapshot file of the table can be read.
        known: the table's snapshots that can be read. The newest one describes the rows; if there is none, a damaged
            snapshot does, whatever its checksum.
        problem: called with an error for each chunk that cannot be used.

    Raises:
        CorruptTableError: there are chunks, and no file of any can be read.
    """
    with doing("list", f"{path}/chunks"):
        numbers = sorted(set(chunk_numbers(fs.names(f"{path}/chunks")).values()))
    newest = max(known, key=lambda record: record.info.sequence, default=None)
    if newest is None and not numbers:
        return None
    geometry = _geometry(fs, path, numbers) if newest is None else newest.geometry
    meta = (_damaged_meta(fs, f"{path}/snapshots") or other_meta) if newest is None else newest.info.meta
    parts: list[ChunkPart] = []
    index, begin = HashIndex(Threads(1)), 0
    # A row's number in all chunks is `begin` of its chunk and its number there; only the last row of a key is live.
    live_N, count_1 = np.empty(0, np.uint8), np.zeros(1, np.int64)
    for number in numbers:
        runs = sound_runs_of(fs, f"{path}/chunks", number, geometry, problem)
        if not runs:
            continue
        part = ChunkPart(number, runs[-1].first + runs[-1].blocks, runs[-1].end, runs[-1].sum, 0)
        keys, runs = keys_of_runs(fs, f"{path}/chunks", geometry, part, runs)
        end = begin + -(-part.blocks * geometry.rows_per_block // 64) * 64
        live_N = _with_room(live_N, end // 8)
        for run in runs:
            row_N = np.arange(run.rows) + run.first * geometry.rows_per_block
            old_N = index.put(*keys.of(row_N), begin + row_N)
            # In this order: if a run has a key twice, its first row is the old row of the second.
            bits_set(live_N, begin + row_N, end, count_1)
            bits_clear(live_N, old_N, end, count_1)
        parts.append(part)
        begin = end
    begin = 0
    for part in parts:
        end = begin + -(-part.blocks * geometry.rows_per_block // 64) * 8
        part.bit_N, begin = live_N[begin:end], end
        part.rows = len(live_rows(part.bit_N))
    meta = {key: value for key, value in meta.items() if key not in ("delta", "snapshot")}
    info = SnapshotInfo(
        name, len(index), 0, geometry.row_width, geometry.physical_block_size, time.time(),
        1 + max((record.info.sequence for record in known), default=0), meta | {"salvaged": {"from_chunks": True}}, 1,
        identity, "oneemb salvage",
    )  # fmt: skip
    return SnapshotRecord(info, geometry, parts, SnapshotFiles(fs, f"{path}/snapshots").path(name))


def _with_room(bit_N: np.ndarray, size: int) -> np.ndarray:
    """These bytes, followed by zeros, `size` or more."""
    if size <= len(bit_N):
        return bit_N
    grown_N = np.zeros(max(size, len(bit_N) * 3 // 2), np.uint8)
    grown_N[: len(bit_N)] = bit_N
    return grown_N


def _geometry(fs: FileSystem, path: str, numbers: list[int]) -> Geometry:
    """The geometry of the newest chunk of which a header can be read."""
    for number in reversed(numbers):
        for file, magic in zip(chunk_paths(f"{path}/chunks", number), (ROWS_MAGIC, KEYS_MAGIC), strict=True):
            try:
                _, *sizes = read_header(_begin(fs, file), magic, file)
                return Geometry(*sizes)
            except (CorruptTableError, FormatVersionError):
                continue
    raise CorruptTableError(f"{path}: at least one file of a chunk must begin with a sound header, none of"
                            f" {len(numbers)} chunks has one; restore the folder from a copy")  # fmt: skip


def _begin(fs: FileSystem, path: str) -> bytes:
    try:
        with doing("read", path):
            file = fs.open(path)
            try:
                header = bytearray(HEADER_BYTES)
                return bytes(header[: fs.read_into(file, memoryview(header), 0)])
            finally:
                fs.close(file)
    except StorageError:
        return b""  # It is missing, or its disk fails: there are others.


def _damaged_meta(fs: FileSystem, directory: str) -> Mapping[str, Any]:
    """Meta of a damaged snapshot whose manifest is JSON still; {} if there is none."""
    for name in reversed(SnapshotFiles(fs, directory).names()):
        try:
            data = read_file(fs, SnapshotFiles(fs, directory).path(name)) or b""
            manifest, _ = json.JSONDecoder().raw_decode(data[HEADER_BYTES:].decode("latin-1"))
            if isinstance(manifest["meta"], dict):
                return manifest["meta"]
        except (StorageError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return {}
