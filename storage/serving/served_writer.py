"""Writes a read-only file of rows. FORMAT.md describes its bytes.

Invariants:
- the file gets its name when it is complete and durable; a call that raises leaves no new file under that name;
- memory grows with the number of keys: 12 bytes for each row, and at most 40 more while slots are chosen. Rows are
  sorted by slot in windows of 64 MiB, or of a 256th of the rows if these take more than 16 GiB. If the rows take more
  than one window, a second copy of them is on the disk during the call.
"""

import errno
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from oneemb.kernels.checksum import blocks_sum, xxh64
from oneemb.kernels.perfect_hash import FIRST_SLOT, DuplicateKeyError, PerfectHash, slots_of
from oneemb.kernels.quantize_rows import quantize_rows
from oneemb.kernels.serve_rows import BLOCK_BYTES
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import FileSystem, LocalFileSystem, storage_error
from oneemb.storage.new_files import begin, remove_unfinished
from oneemb.storage.serving.served_file import MANIFEST_MAX, QUANTIZED, SERVED_MAGIC, ServedInfo
from oneemb.storage.table.file_header import pack_header

_Rows = Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]
_DIGITS = 12  # hex digits in the name of an unfinished file
_WINDOW_BYTES = 64 << 20
_WINDOWS = 256
"""Largest number of windows. With more of them, the pieces of a window on the disk would be too small to read fast."""


def write_served_file(
    path: str, info: ServedInfo, keys: tuple[np.ndarray, np.ndarray], rows: _Rows, *, threads: Threads,
    fs: FileSystem | None = None, progress: Callable[[int, int | None], None] | None = None,
    window_bytes: int | None = None,
) -> ServedInfo:  # fmt: skip
    """Write a file; it replaces a file of the same name. Returns the file's manifest.

    Args:
        info: the manifest without the fields that depend on the rows, which are filled in here.
        keys: table_S int32 and id_S int64 of all rows, in any order.
        rows: batches (table_N int32, id_N int64, weight_ND). weight_ND is float32, or bits of weights if the file has
            the dtype of training; or whole records, uint8 [N, record_bytes].
        progress: called with (rows done, rows).
        window_bytes: as in `RecordWindows`.

    Raises:
        StorageError: a row cannot be written in this dtype (the message names its table and id), or the disk fails.
        CorruptTableError: a key occurs twice.
    """
    # Each writer uses a temporary name of its own, so that no writer renames the unfinished file of another one.
    fs, temporary = fs or LocalFileSystem(), None
    try:
        remove_unfinished_files(fs, os.path.dirname(path), re.escape(os.path.basename(path)))
        temporary, file = begin(fs, path, _DIGITS)
        try:
            writer = _Writer(fs, file, info, threads)
            written = writer.write(keys, rows, progress, window_bytes)
            if writer.is_beyond_end:
                fs.truncate(temporary, written.manifest_begin + len(written.packed()))
            fs.sync(file)
            fs.rename(temporary, path)
        finally:
            fs.unlock(file)
        fs.sync_directory(os.path.dirname(path))
    except OSError as error:
        raise storage_error(error, "write", path) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                fs.remove(temporary)
    return written


def remove_unfinished_files(fs: FileSystem, folder: str, name: str = r".*\.serving") -> None:
    """Remove unfinished files of killed processes. `name`: regular expression of the names of the finished files."""
    remove_unfinished(fs, folder, name, _DIGITS, fs.remove)


class RecordWindows:
    """Sorts records by slot: takes them in any order and returns them as windows, ranges of slots, one after another.

    Records that do not fit in memory are written to the file beyond `end`. The caller cuts them off afterwards.

    Args:
        end: first byte of the file that may be used for that.
        slots: number of slots.
        record_bytes: bytes of a record, a multiple of 8.
        window_bytes: size of a window; up to three are in memory. None = 64 MiB, or a 256th of a very large file.
    """

    def __init__(
        self, fs: FileSystem, file: int, end: int, slots: int, record_bytes: int, window_bytes: int | None = None
    ):
        self._fs, self._file, self._end = fs, file, -(-end // BLOCK_BYTES) * BLOCK_BYTES
        self._slots, self._record_bytes = slots, record_bytes
        least = window_bytes or max(_WINDOW_BYTES, slots * record_bytes // _WINDOWS)
        # A window begins and ends at the end of a block, and has at least one record.
        step = BLOCK_BYTES // math.gcd(record_bytes, BLOCK_BYTES)
        self._window = -(-least // (record_bytes * step)) * step
        self._room = least
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []
        self._bytes = 0
        self._pieces: dict[int, list[tuple[int, int]]] = {}  # {window: (offset, number of records) of each piece}

    @property
    def is_beyond(self) -> bool:
        """Whether records have been written beyond the end of the file."""
        return bool(self._pieces)

    def put(self, slot_N: np.ndarray, record_NX: np.ndarray) -> None:
        """Add records, uint8 [N, record_bytes], for these slots."""
        self._kept.append((slot_N, record_NX))
        self._bytes += record_NX.nbytes + slot_N.nbytes
        if self._bytes > self._room and self._slots > self._window:
            self._write_kept()

    def _write_kept(self) -> None:
        slot_N, record_NX = self._take_kept()
        order_N = np.argsort(slot_N)
        slot_N, record_NX = slot_N[order_N], record_NX[order_N]
        bounds = np.searchsorted(slot_N, np.arange(0, self._slots + self._window, self._window)).tolist()
        for w, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            if first < last:
                self._pieces.setdefault(w, []).append((self._end, last - first))
                self._write(slot_N[first:last])
                self._write(record_NX[first:last])

    def _write(self, array: np.ndarray) -> None:
        self._fs.write(self._file, array.reshape(-1).view(np.uint8), self._end)
        self._end += array.nbytes

    def _take_kept(self) -> tuple[np.ndarray, np.ndarray]:
        slot_N = np.concatenate([slots for slots, _ in self._kept])
        record_NX = np.concatenate([records for _, records in self._kept])
        self._kept, self._bytes = [], 0
        return slot_N, record_NX

    def windows(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield each window: (first slot, records uint8 [S, record_bytes], taken_S bool). Records of empty slots are
        zeros. The arrays are used again for the next window."""
        if self._kept and self._slots > self._window:
            self._write_kept()
        record_SX = np.empty((min(self._window, self._slots), self._record_bytes), np.uint8)
        taken_S = np.empty(len(record_SX), np.bool_)
        for w, first in enumerate(range(0, self._slots, self._window)):
            size = min(self._window, self._slots - first)
            window_SX, window_S = record_SX[:size], taken_S[:size]
            window_SX[:], window_S[:] = 0, False
            for slot_N, record_NX in self._records_of(w):
                window_SX[slot_N - first], window_S[slot_N - first] = record_NX, True
            yield first, window_SX, window_S

    def _records_of(self, w: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if not self._pieces:
            yield from self._kept  # All records are in memory: there is one window, or no record.
        for offset, records in self._pieces.get(w, []):
            bytes_ = np.empty(records * (8 + self._record_bytes), np.uint8)
            if self._fs.read_into(self._file, bytes_.data, offset) < len(bytes_):
                raise OSError(errno.EIO, "records that this call has written cannot be read back")
            yield bytes_[: 8 * records].view(np.int64), bytes_[8 * records :].reshape(records, -1)


class _Writer:
    def __init__(self, fs: FileSystem, file: int, info: ServedInfo, threads: Threads):
        self._fs, self._file, self._info, self._threads = fs, file, info, threads
        self._most = self._squares = 0.0
        self.is_beyond_end = False

    def write(
        self, keys: tuple[np.ndarray, np.ndarray], rows: _Rows, progress: Callable[[int, int | None], None] | None,
        window_bytes: int | None,
    ) -> ServedInfo:  # fmt: skip
        table_S, id_S = keys
        count_T = np.bincount(table_S, minlength=self._info.all_tables)
        made = self._perfect_hash(table_S, id_S)
        info = replace(
            self._info, rows=len(id_S), salt=made.salt,
            rows_of_tables=tuple(int(count_T[t]) for t in self._info.tables),
            slots_of_tables=tuple(int(made.slots_T[t]) for t in self._info.tables),
        )  # fmt: skip
        # Records that are written beyond `pilots_begin` are read back before pilots are written there.
        windows = RecordWindows(self._fs, self._file, info.pilots_begin, made.slots, info.record_bytes, window_bytes)
        done = 0
        for table_N, id_N, weight_ND in rows:
            record_NX = self._encoded(table_N, id_N, weight_ND)
            windows.put(slots_of(table_N, id_N, made.region_T6, made.pilot_B, threads=self._threads), record_NX)
            done += len(id_N)
            if progress is not None:
                progress(done, len(id_S))
        sum_B, taken = self._write_records(windows, made, table_S, id_S, info.blocks)
        if not done == taken == len(id_S):
            raise StorageError(f"snapshot {self._info.name!r} changed while it was read; make the file again")
        self.is_beyond_end = windows.is_beyond
        pilots = made.pilot_B.view(np.uint8)
        tail = np.zeros(info.manifest_begin - info.pilots_begin, np.uint8)
        tail[: len(pilots)] = pilots
        sums = sum_B.view(np.uint8)
        sums_begin = info.sums_begin - info.pilots_begin
        tail[sums_begin : sums_begin + len(sums)] = sums
        self._fs.write(self._file, tail, info.pilots_begin)
        info = replace(
            info, sums=f"{xxh64(tail):016x}", error_max=self._most,
            error_rms=math.sqrt(self._squares / max(1, len(id_S) * info.dim)),
        )  # fmt: skip
        packed = info.packed()
        if len(packed) > MANIFEST_MAX:
            raise StorageError(
                f"the manifest of a file must have at most {MANIFEST_MAX} bytes; with {info.num_tables} tables it has"
                f" {len(packed)}; let fewer tables share an embedding"
            )
        self._fs.write(self._file, packed, info.manifest_begin)
        header = (info.manifest_begin, len(packed) - 8, info.manifest_begin + len(packed), 0)
        self._fs.write(self._file, pack_header(SERVED_MAGIC, header), 0)
        return info

    def _perfect_hash(self, table_S: np.ndarray, id_S: np.ndarray) -> PerfectHash:
        try:
            return PerfectHash.of_keys(table_S, id_S, self._info.all_tables, threads=self._threads)
        except DuplicateKeyError as error:
            raise CorruptTableError(
                f"snapshot {self._info.name!r} has id {id_S[error.n]} of table {table_S[error.n]} twice; run"
                " `oneemb check` on it"
            ) from None
        except ValueError as error:
            raise StorageError(
                f"snapshot {self._info.name!r} cannot be served: {error}; make the file again: it tries other random"
                " hashes"
            ) from None

    def _write_records(
        self, windows: RecordWindows, made: PerfectHash, table_S: np.ndarray, id_S: np.ndarray, blocks: int
    ) -> tuple[np.ndarray, int]:
        """Write all records. Returns (checksums of blocks, number of taken slots)."""
        # An empty slot gets the id of its table's first row, which has another slot: a lookup of that id never reads
        # the empty slot, and a lookup of any other id finds that the ids differ.
        table_T, first_T = np.unique(table_S, return_index=True)
        first_slot_T = made.region_T6[table_T, FIRST_SLOT].astype(np.int64)
        sums, taken, offset = [], 0, BLOCK_BYTES
        for first, record_SX, taken_S in windows.windows():
            empty_E = np.flatnonzero(~taken_S)
            t = np.searchsorted(first_slot_T, first + empty_E, "right") - 1
            record_SX.view(np.int64)[empty_E, -1] = id_S[first_T[t]]
            taken += len(taken_S) - len(empty_E)
            byte_X = record_SX.reshape(-1)
            whole = -(-len(byte_X) // BLOCK_BYTES) * BLOCK_BYTES
            if whole > len(byte_X):
                byte_X = np.concatenate([byte_X, np.zeros(whole - len(byte_X), np.uint8)])
            sums.append(self._write_blocks(byte_X, offset))
            offset += len(byte_X)
        if not sums:
            sums.append(self._write_blocks(np.zeros(blocks * BLOCK_BYTES, np.uint8), offset))
        return np.concatenate(sums), taken

    def _encoded(self, table_N: np.ndarray, id_N: np.ndarray, weight_ND: np.ndarray) -> np.ndarray:
        """Records of these rows, uint8. Raises StorageError for a row that cannot be written in the file's dtype."""
        info = self._info
        if weight_ND.dtype == np.uint8:
            return weight_ND
        record_NX = np.zeros((len(id_N), info.record_bytes), np.uint8)
        if info.weights in QUANTIZED:
            right_N, error_N2 = quantize_rows(
                np.ascontiguousarray(weight_ND), QUANTIZED[info.weights], record_NX, threads=self._threads
            )
            self._count_errors(error_N2[right_N, 0].max(initial=0), error_N2[right_N, 1].sum())
        elif weight_ND.dtype == np.float32 and info.weights == "float16":
            with np.errstate(over="ignore"):
                half_ND = weight_ND.astype(np.float16)
            right_N = np.all(np.isfinite(half_ND), axis=1)
            error_ND = np.abs(half_ND[right_N].astype(np.float64) - weight_ND[right_N])
            self._count_errors(error_ND.max(initial=0), np.square(error_ND).sum())
            record_NX[:, : 2 * info.dim] = half_ND.view(np.uint8)
        else:
            size = info.dim * weight_ND.dtype.itemsize
            record_NX[:, :size] = np.ascontiguousarray(weight_ND).view(np.uint8)
            right_N = np.ones(len(id_N), np.bool_)
        if not right_N.all():
            n = int(np.flatnonzero(~right_N)[0])
            low, high = weight_ND[n].min(), weight_ND[n].max()
            raise StorageError(
                f"the row of id {id_N[n]} in table {table_N[n]} cannot be {info.weights}: its weights must be finite"
                f" and fit, they are from {low} to {high}; serve the rows as float32, or erase this row"
            )
        record_NX.view(np.int64)[:, -1] = id_N
        return record_NX

    def _count_errors(self, most: float, squares: float) -> None:
        self._most, self._squares = max(self._most, float(most)), self._squares + float(squares)

    def _write_blocks(self, byte_X: np.ndarray, offset: int) -> np.ndarray:
        """Write blocks, and return their checksums."""
        sum_B = np.empty(len(byte_X) // BLOCK_BYTES, np.uint32)
        self._threads.run(blocks_sum, len(sum_B), byte_X.view(np.uint64), BLOCK_BYTES // 8, sum_B, share_min=64)
        self._fs.write(self._file, byte_X, offset)
        return sum_B
