"""Dumps of dynamicemb's tables, read and written byte for byte.

Little-endian, without headers; n rows, D weights, Z numbers of state, r of R ranks. "today":

    <table>_emb_keys.rank_<r>.world_size_<R>        int64 [n]
    <table>_emb_values.rank_...                     float32 [n, D]
    <table>_emb_scores.rank_...                     int64 [n], or [n, 2] of two scores
    <table>_opt_values.rank_...                     float32 [n, Z], where state is dumped
    <table>_counter_keys.rank_...                   int64 [m], where counts are; of ids without a row
    <table>_counter_frequencies.rank_...            int64 [m]
    <table>_opt_args.json                           of the optimizer and the table

and "seed", with one file for all ranks:

    <table>_keys, <table>_values                    as above
    <table>_scores                                  uint64 [n], but of tables of LRU
    <table>_opt_state_<name>_keys, ..._values       of each part of the state, with an order of its own
    <table>_opt_args.json

Invariants:
- <table>_opt_args.json is written last, and removed first: where it is, every other file is there, whole, of one dump;
- files appear under their names when what is in them outlives a loss of power.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError
from oneemb.storage.foreign.oneflow_table import doing
from oneemb.storage.fs import FileSystem, LocalFileSystem
from oneemb.storage.hash_index import HashIndex

__all__ = [
    "Dump", "DumpRows", "DumpWriter", "Layout", "file_key", "find_dump", "key_of_file", "owner_of_key", "unpublish",
]  # fmt: skip

Layout = Literal["today", "seed"]

_UNFINISHED = ".unfinished"
_RANKED = re.compile(r"(emb_keys|emb_values|emb_scores|opt_values|counter_keys|counter_frequencies)"
                     r"\.rank_(\d+)\.world_size_(\d+)")  # fmt: skip
_OF_SEED = re.compile(r"keys|values|scores|opt_state_(.+)_(keys|values)")
_META = "opt_args.json"


class DumpRows(NamedTuple):
    """Some rows of a dump."""

    rank: int
    """The one that has written them."""
    key_N: np.ndarray
    """int64, as the file has them; see `key_of_file`."""
    value_ND: np.ndarray
    """float32."""
    score_NS: np.ndarray | None
    """int64, S of 1 or 2; None = there are none."""
    state_NZ: np.ndarray | None
    """float32; None = there is none."""


# ---- which rank has a key --------------------------------------------------------------------------------------------


def owner_of_key(dist_type: str, id_N: np.ndarray, ranks: int, num_embeddings: int | None) -> np.ndarray:
    """The rank that dynamicemb keeps each id on: int64 [N].

    Args:
        num_embeddings: of the table's config, which "continuous" asks for.
    """
    unsigned_N = id_N.astype(np.uint64)
    if dist_type == "hash_roundrobin":
        unsigned_N = _hashed(unsigned_N)
    elif dist_type == "continuous":
        block = _block(ranks, num_embeddings)
        inside_N = unsigned_N < np.uint64(block * ranks)
        return np.where(inside_N, unsigned_N // np.uint64(block), unsigned_N % np.uint64(ranks)).astype(np.int64)
    return (unsigned_N % np.uint64(ranks)).astype(np.int64)


def file_key(dist_type: str, id_N: np.ndarray, ranks: int, num_embeddings: int | None) -> np.ndarray:
    """What stands in the file of its rank for each id: int64 [N]. Under "continuous" a place in the rank's block; ids
    beyond all blocks are dealt round."""
    if dist_type != "continuous":
        return id_N
    unsigned_N, block = id_N.astype(np.uint64), np.uint64(_block(ranks, num_embeddings))
    inside_N = unsigned_N < block * np.uint64(ranks)
    return np.where(inside_N, unsigned_N % block, unsigned_N // np.uint64(ranks)).astype(np.int64)


def key_of_file(dist_type: str, rank: int, key_N: np.ndarray, ranks: int, num_embeddings: int | None) -> np.ndarray:
    """The ids that stand in a rank's file: int64 [N]."""
    if dist_type != "continuous":
        return key_N
    unsigned_N, block = key_N.astype(np.uint64), np.uint64(_block(ranks, num_embeddings))
    beyond_N = unsigned_N * np.uint64(ranks) + np.uint64(rank)
    return np.where(unsigned_N < block, unsigned_N + block * np.uint64(rank), beyond_N).astype(np.int64)


def _block(ranks: int, num_embeddings: int | None) -> int:
    return max(1, -(-(num_embeddings or 0) // ranks))


def _hashed(unsigned_N: np.ndarray) -> np.ndarray:
    """The finaliser of MurmurHash3 (Appleby), uint64."""
    h_N, shift = unsigned_N, np.uint64(33)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h_N = (h_N ^ (h_N >> shift)) * np.uint64(factor)
    return h_N ^ (h_N >> shift)


# ---- writing ---------------------------------------------------------------------------------------------------------


class _File:
    """A file that is written under a temporary name."""

    def __init__(self, fs: FileSystem, path: str):
        self._fs, self.path, self._offset = fs, path, 0
        self.temporary = path + _UNFINISHED
        with suppress(FileNotFoundError):
            fs.remove(self.temporary)  # what a killed dump has left
        with doing("create", self.temporary):
            self._file: int | None = fs.create(self.temporary)

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        assert self._file is not None
        with doing("write", self.temporary):
            self._fs.write(self._file, data, self._offset)
        self._offset += len(data)

    def finish(self) -> None:
        if self._file is not None:
            with doing("flush", self.temporary):
                self._fs.sync(self._file)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._fs.close(file)


class DumpWriter:
    """Writes what one rank has of a table.

    Args:
        folder: is there.
        table: its name.
        rank, ranks: which of how many writes; of "seed" one writes for all.
        version: "today" or "seed".
        states: names and widths of the parts of the state; none = there is no state in the dump.
        with_state: whether there are files of state, though they may be empty.
        with_counts: whether there are files of counts.

    Raises:
        ValueError: the table's name is none of a file.
        StorageError: a file cannot be made.
    """

    def __init__(
        self, folder: str, table: str, *, rank: int, ranks: int, version: Layout = "today",
        states: Sequence[tuple[str, int]] = (), with_state: bool = False, with_counts: bool = False,
        fs: FileSystem | None = None,
    ):  # fmt: skip
        _check_name(table)
        self._fs, self._folder, self._table, self._version = fs or LocalFileSystem(), folder, table, version
        self._suffix = f".rank_{rank}.world_size_{ranks}" if version == "today" else ""
        self._states, self._files = list(states), dict[str, _File]()
        names = ["keys", "values"]
        if version == "today":
            names = ["emb_keys", "emb_values", "emb_scores", *["opt_values"] * with_state]
            names += ["counter_keys", "counter_frequencies"] if with_counts else []
        elif with_state:
            names += [f"opt_state_{name}_{what}" for name, _ in states for what in ("keys", "values")]
        self._with_state = with_state
        try:
            for name in names:
                self._file(name)
        except BaseException:
            self.discard()
            raise

    def _file(self, name: str) -> _File:
        if name not in self._files:
            self._files[name] = _File(self._fs, f"{self._folder}/{self._table}_{name}{self._suffix}")
        return self._files[name]

    def append(
        self, key_N: np.ndarray, value_ND: np.ndarray, score_NS: np.ndarray | None, state_NZ: np.ndarray | None
    ) -> None:
        """Write some rows.

        Args:
            key_N: int64, as the file has them.
            score_NS: int64; None = the files have none, as "seed" has none of LRU.

        Raises:
            StorageError: the disk fails.
        """
        today = self._version == "today"
        self._file("emb_keys" if today else "keys").write(key_N.astype(np.int64))
        self._file("emb_values" if today else "values").write(value_ND.astype(np.float32))
        if score_NS is not None:
            self._file("emb_scores" if today else "scores").write(score_NS.astype(np.int64))
        if not self._with_state:
            return
        assert state_NZ is not None
        if today:
            self._file("opt_values").write(state_NZ.astype(np.float32))
            return
        begin = 0
        for name, width in self._states:
            self._file(f"opt_state_{name}_keys").write(key_N.astype(np.int64))
            self._file(f"opt_state_{name}_values").write(state_NZ[:, begin : begin + width].astype(np.float32))
            begin += width

    def append_counter(self, key_M: np.ndarray, count_M: np.ndarray) -> None:
        """Write counts of ids without a row, both int64. "seed" has none."""
        if self._version == "today":
            self._file("counter_keys").write(key_M.astype(np.int64))
            self._file("counter_frequencies").write(count_M.astype(np.int64))

    def finish(self) -> None:
        """Return when what was written outlives a loss of power, under temporary names still."""
        for file in self._files.values():
            file.finish()

    def publish(self) -> None:
        """Give the files their names, once `unpublish` has removed those of another dump."""
        for file in self._files.values():
            with doing("rename", file.temporary):
                self._fs.rename(file.temporary, file.path)
        with doing("flush", self._folder):
            self._fs.sync_directory(self._folder)

    def publish_meta(self, meta: Mapping[str, Any]) -> None:
        """Make the dump of the table whole, once all ranks have published."""
        path = f"{self._folder}/{self._table}_{_META}"
        file = self._files[_META] = _File(self._fs, path)
        file.write(np.frombuffer(json.dumps(meta, indent=4).encode(), np.uint8))
        file.finish()
        with doing("rename", file.temporary):
            self._fs.rename(file.temporary, path)
        with doing("flush", self._folder):
            self._fs.sync_directory(self._folder)

    def discard(self) -> None:
        """Close the files, and remove those that have not got their names."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()
            with suppress(OSError):
                self._fs.remove(file.temporary)


def unpublish(folder: str, table: str, fs: FileSystem | None = None) -> None:
    """Remove a table's dump, of whatever version and number of ranks: what makes it whole first.

    Raises:
        StorageError: a file cannot be removed.
    """
    fs = fs or LocalFileSystem()
    names = _names(fs, folder)
    if f"{table}_{_META}" in names:
        with doing("remove", f"{folder}/{table}_{_META}"):
            fs.remove(f"{folder}/{table}_{_META}")
            fs.sync_directory(folder)
    for name in sorted(names):
        if _part_of(table, name, _RANKED) or _part_of(table, name, _OF_SEED):
            with doing("remove", f"{folder}/{name}"):
                fs.remove(f"{folder}/{name}")
    with doing("flush", folder):
        fs.sync_directory(folder)


# ---- reading ---------------------------------------------------------------------------------------------------------


class Dump:
    """A dump of one table, looked at by `find_dump`."""

    def __init__(
        self, fs: FileSystem, version: Layout, parts: Sequence[Mapping[str, str]], meta: Mapping[str, Any], dim: int
    ):
        self._fs, self.version, self._parts, self.meta, self._dim = fs, version, list(parts), dict(meta), dim
        self.ranks = len(parts)
        """How many have written it."""
        self._rows = [self._count(part["keys"], np.int64, 1) for part in parts]
        self.rows = sum(self._rows)
        words, widths = set[int](), set[int]()
        self._state_parts: list[tuple[str, str]] = []
        for part, rows in zip(parts, self._rows, strict=True):
            self._need(part["values"], 4 * dim * rows, f"float32 [{rows}, {dim}]")
            if "scores" in part:
                words.add(self._width(part["scores"], 8, rows, (1, 2)))
            if "opt_values" in part:
                widths.add(self._width(part["opt_values"], 4, rows, None))
            if "counter_keys" in part:
                counts = self._count(part["counter_keys"], np.int64, 1)
                self._need(part["counter_frequencies"], 8 * counts, f"int64 [{counts}]")
        self.score_words = self._one(words, "scores")
        """Scores of a row: 0, 1 or 2."""
        self.state_width = self._one(widths, "numbers of state")
        """Numbers of state of a row."""
        if version == "seed":
            self._look_at_states()
        self.has_counters = all("counter_keys" in part for part in parts)
        """Whether there are counts of ids without a row."""

    def _look_at_states(self) -> None:
        [part], [rows] = self._parts, self._rows
        states = [name for name in part if name.startswith("opt_state_") and name.endswith("_keys")]
        # m comes before v, as it does in the state of a row.
        for name in sorted(states):
            keys, values = part[name], part.get(f"{name.removesuffix('_keys')}_values")
            if values is None:
                raise CorruptTableError(f"{keys} has no file of values beside it; restore it from a copy")
            if self._count(keys, np.int64, 1) != rows:
                raise CorruptTableError(
                    f"{keys} must have the keys of {rows} rows, as {part['keys']} has, got {self._fs.size(keys)} bytes;"
                    " restore it from a copy, or load without the optimizer's state"
                )
            self.state_width += self._width(values, 4, rows, None)
            self._state_parts.append((keys, values))

    def _one(self, found: set[int], what: str) -> int:
        """The number that all parts have; 0 where none has any."""
        found.discard(0)
        if len(found) > 1:
            raise CorruptTableError(f"{self._parts[0]['keys']} and its like have {what} of several widths, {found}")
        return found.pop() if found else 0

    def _count(self, path: str, dtype: type, width: int) -> int:
        size, unit = self._fs.size(path), np.dtype(dtype).itemsize * width
        if size % unit:
            raise CorruptTableError(f"{path} must be of whole int64 numbers, got {size} bytes; restore it from a copy")
        return size // unit

    def _need(self, path: str, size: int, what: str) -> None:
        if (got := self._fs.size(path)) != size:
            raise CorruptTableError(f"{path} must be {what}, {size} bytes, got {got}; restore it from a copy")

    def _width(self, path: str, unit: int, rows: int, widths: Sequence[int] | None) -> int:
        """Numbers of a row in a file; 0 where there are no rows."""
        size = self._fs.size(path)
        width = size // (unit * rows) if rows else 0
        if size != unit * rows * width or rows and widths is not None and width not in widths:
            raise CorruptTableError(
                f"{path} must have as many numbers of {unit} bytes for each of {rows} rows, got {size} bytes; restore"
                " it from a copy"
            )
        return width

    def check_distinct(self, num_embeddings: int | None) -> None:
        """Raise CorruptTableError if an id comes twice."""
        index, dist = HashIndex(Threads(1)), self.meta.get("dist_type", "roundrobin")
        for r, (part, rows) in enumerate(zip(self._parts, self._rows, strict=True)):
            for begin in range(0, rows, _AT_ONCE):
                key_N = self._read(part["keys"], np.int64, begin, min(_AT_ONCE, rows - begin), 1)[:, 0]
                if self.version == "today":
                    key_N = key_of_file(dist, r, key_N, self.ranks, num_embeddings)
                table_N = np.zeros(len(key_N), np.int32)
                seen = index.find(table_N, key_N) >= 0
                if seen.any() or len(np.unique(key_N)) < len(key_N):
                    twice = key_N[seen][0] if seen.any() else _twice(key_N)
                    raise CorruptTableError(f"id {twice} comes twice in {part['keys']} and its like; restore the dump")
                index.put(table_N, key_N, np.zeros(len(key_N), np.int64))

    def read(self, batch: int) -> Iterator[DumpRows]:
        """All rows, at most so many at a time.

        Raises:
            CorruptTableError: a file became shorter, or the state of a row is missing.
        """
        states = [self._state_of(keys, values) for keys, values in self._state_parts]
        for r, (part, rows) in enumerate(zip(self._parts, self._rows, strict=True)):
            for begin in range(0, rows, batch):
                count = min(batch, rows - begin)
                key_N = self._read(part["keys"], np.int64, begin, count, 1)[:, 0]
                scores = state = None
                if "scores" in part:
                    scores = self._read(part["scores"], np.int64, begin, count, self.score_words)
                if "opt_values" in part:
                    state = self._read(part["opt_values"], np.float32, begin, count, self.state_width)
                elif states:
                    state = np.concatenate([one(key_N) for one in states], axis=1)
                yield DumpRows(r, key_N, self._read(part["values"], np.float32, begin, count, self._dim), scores, state)

    def _state_of(self, keys: str, values: str) -> Any:
        """A function that gives a part of the state of ids, which it finds by their keys."""
        rows = self.rows
        key_N = self._read(keys, np.int64, 0, rows, 1)[:, 0]
        index, width = HashIndex(Threads(1)), self._width(values, 4, rows, None)
        table_N = np.zeros(rows, np.int32)
        index.put(table_N, key_N, np.arange(rows))
        value_NZ = self._read(values, np.float32, 0, rows, width)

        def of(its_N: np.ndarray) -> np.ndarray:
            place_N = index.find(np.zeros(len(its_N), np.int32), its_N)
            if (place_N < 0).any():
                raise CorruptTableError(f"{keys} lacks id {its_N[place_N < 0][0]}, which has a row; restore the dump")
            found: np.ndarray = value_NZ[place_N]
            return found

        return of

    def counters(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids without a row and their counts, both int64."""
        for part in self._parts:
            rows = self._count(part["counter_keys"], np.int64, 1)
            for begin in range(0, rows, batch):
                count = min(batch, rows - begin)
                its = [self._read(part[f"counter_{what}"], np.int64, begin, count, 1)[:, 0] for what in _COUNTS]
                yield its[0], its[1]

    def _read(self, path: str, dtype: type, begin: int, rows: int, width: int) -> np.ndarray:
        out = np.empty((rows, width), np.dtype(dtype).newbyteorder("<"))
        data = out.reshape(-1).view(np.uint8).data
        with doing("read", path):
            file = self._fs.open(path)
            try:
                got = self._fs.read_into(file, data, begin * width * out.itemsize) if len(data) else 0
            finally:
                self._fs.close(file)
        if got != len(data):
            raise CorruptTableError(f"{path} became shorter while it was read; restore it from a copy")
        return out.astype(dtype, copy=False)


_COUNTS = ("keys", "frequencies")
_AT_ONCE = 1 << 16
_NEEDED = {"today": ("emb_keys", "emb_values"), "seed": ("keys", "values")}


def find_dump(folder: str, table: str, *, dim: int, fs: FileSystem | None = None) -> Dump:
    """The dump of a table that lies in a folder, found to be whole.

    Args:
        dim: weights of a row.

    Raises:
        SnapshotNotFoundError: there is none; the message names the tables that there are.
        CorruptTableError: it is not whole, or a file is not as long as it has to be.
        StorageError: a file cannot be read.
    """
    _check_name(table)
    fs = fs or LocalFileSystem()
    names = _names(fs, folder)
    ranked = {name: found for name in names if (found := _part_of(table, name, _RANKED))}
    of_seed = {name: found for name in names if (found := _part_of(table, name, _OF_SEED))}
    meta_path = f"{folder}/{table}_{_META}"
    if not ranked and not of_seed:
        tables = sorted(name.removesuffix(f"_{_META}") for name in names if name.endswith(f"_{_META}"))
        raise SnapshotNotFoundError(f"no dump of table {table!r} in {folder}; there are: {', '.join(tables) or 'none'}")
    if f"{table}_{_META}" not in names:
        raise CorruptTableError(
            f"{meta_path}, the last file of a dump, is not there: the dump of table {table!r} was cut short; load"
            " another one"
        )
    if ranked and of_seed:
        raise CorruptTableError(
            f"{folder} has files of two dumps of table {table!r}: {min(of_seed)} and {min(ranked)}; remove those of one"
        )
    version: Layout = "today" if ranked else "seed"
    parts = [{name.removeprefix(f"{table}_"): f"{folder}/{name}" for name in of_seed}]
    if ranked:
        worlds = {int(found[3]) for found in ranked.values()}
        if len(worlds) > 1:
            raise CorruptTableError(
                f"{folder} has dumps of table {table!r} by {' and by '.join(map(str, sorted(worlds)))} ranks; remove"
                " the files of all but one"
            )
        ranks = worlds.pop()
        kinds = {found[1] for found in ranked.values()} | set(_NEEDED[version])
        for kind in sorted(kinds):
            for r in range(ranks):
                if f"{table}_{kind}.rank_{r}.world_size_{ranks}" not in names:
                    raise CorruptTableError(
                        f"{folder}/{table}_{kind}.rank_{r}.world_size_{ranks} is not there, and other files of the dump"
                        " are; restore it from a copy"
                    )
        parts = [
            {kind.removeprefix("emb_"): f"{folder}/{table}_{kind}.rank_{r}.world_size_{ranks}" for kind in kinds}
            for r in range(ranks)
        ]
        for one, other in (("counter_keys", "counter_frequencies"), ("counter_frequencies", "counter_keys")):
            if one in kinds and other not in kinds:
                raise CorruptTableError(f"{folder} has {table}_{one} files and no {table}_{other}; restore them")
    for kind in ("keys", "values"):
        if kind not in parts[0]:
            raise CorruptTableError(f"{folder}/{table}_{kind} is not there; restore it from a copy")
    with doing("look at", folder):
        return Dump(fs, version, parts, _meta(fs, meta_path), dim)


def _meta(fs: FileSystem, path: str) -> dict[str, Any]:
    with doing("read", path):
        data, file = bytearray(fs.size(path)), fs.open(path)
        try:
            fs.read_into(file, memoryview(data), 0)
        finally:
            fs.close(file)
    try:
        found = json.loads(data.decode())
    except (UnicodeDecodeError, ValueError) as error:
        raise CorruptTableError(f"{path} must be JSON, and is not ({error}); restore it from a copy") from error
    if not isinstance(found, dict):
        raise CorruptTableError(f"{path} must be a JSON object, got {str(found)[:100]}; restore it from a copy")
    return found


def _check_name(table: str) -> None:
    if not table or "/" in table or "\0" in table:
        raise ValueError(f"the files of a table have its name, which must have no '/', got {table!r}")


def _part_of(table: str, name: str, pattern: "re.Pattern[str]") -> "re.Match[str] | None":
    return pattern.fullmatch(name.removeprefix(f"{table}_")) if name.startswith(f"{table}_") else None


def _twice(key_N: np.ndarray) -> int:
    unique_U, count_U = np.unique(key_N, return_counts=True)
    return int(unique_U[count_U > 1][0])


def _names(fs: FileSystem, folder: str) -> set[str]:
    try:
        return set(fs.names(folder))
    except OSError as error:
        raise SnapshotNotFoundError(f"no folder of dumps at {folder}: {error.strerror or error}") from error
