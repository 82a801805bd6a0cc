"""Reads dumps of dynamicemb's tables. dynamicemb_files.py describes the files, and when a dump is complete.

Invariant: a `Dump` that `find_dump` returns is complete: all files exist and have the right length.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from oneemb.foreign.dynamicemb_files import (
    DIST_TYPES,
    META,
    OF_SEED,
    RANKED,
    Layout,
    check_name,
    ids_of_numbers,
    names_in,
    part_of,
)
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError
from oneemb.storage.fs import FileSystem, LocalFileSystem, doing, read_file
from oneemb.storage.hash_index import HashIndex


class DumpRows(NamedTuple):
    """Some rows of a dump."""

    rank: int
    """Rank that has written the rows."""
    key_N: np.ndarray
    """Keys in the form of the file, int64 [N]; `ids_of_numbers` makes ids of them."""
    value_ND: np.ndarray
    """Weights, float32 [N, D]."""
    score_NS: np.ndarray | None
    """Scores, int64 [N, 1 or 2]; None = the dump has no scores."""
    state_NZ: np.ndarray | None
    """Optimizer state, float32 [N, Z]; None = not read, or the dump has no state."""


class Dump:
    """Dump of one table, made and checked by `find_dump`."""

    def __init__(
        self, fs: FileSystem, version: Layout, parts: Sequence[Mapping[str, str]], meta: Mapping[str, Any], dim: int
    ):
        self._fs, self.version, self._parts, self.meta, self._dim = fs, version, list(parts), dict(meta), dim
        self.ranks = len(parts)
        """Number of ranks that have written the dump."""
        self._rows = [self._count(part["keys"], np.int64, 1) for part in parts]
        self.rows = sum(self._rows)
        words, widths = set[int](), set[int]()  # from parts that have rows
        self._state_parts: list[tuple[str, str]] = []
        for part, rows in zip(parts, self._rows, strict=True):
            self._need(part["values"], 4 * dim * rows, f"float32 [{rows}, {dim}]")
            if "scores" in part:
                words |= self._widths(part["scores"], 8, rows, (1, 2))
            if "opt_values" in part:
                widths |= self._widths(part["opt_values"], 4, rows)
            if "counter_keys" in part:
                counts = self._count(part["counter_keys"], np.int64, 1)
                self._need(part["counter_frequencies"], 8 * counts, f"int64 [{counts}]")
        self.has_scores = "scores" in parts[0]
        """Whether the dump has files of scores."""
        self.score_words = self._one(words, "scores")
        """Number of scores of a row, 0 to 2; also 0 if the dump has no rows."""
        self.state_width = self._one(widths, "state values")
        """Number of optimizer state values of a row."""
        if version == "seed":
            self._look_at_states()
        self.has_counters = all("counter_keys" in part for part in parts)
        """Whether the dump has counts of ids without a row."""

    def _look_at_states(self) -> None:
        [part], [rows] = self._parts, self._rows
        # Sorted, so that m comes before v, as in a row's state.
        for name in sorted({found[1] for one in part if (found := OF_SEED.fullmatch(one)) and found[1]}):
            keys, values, scores = (f"opt_state_{name}_{what}" for what in ("keys", "values", "scores"))
            for one, other in ((keys, values), (values, keys)):
                if other not in part and one in part:
                    raise CorruptTableError(
                        f"{part[one]} must have a file of {other} beside it, got none; restore it from a copy"
                    )
            if keys not in part:
                raise CorruptTableError(
                    f"{part[scores]} must have files of keys and values beside it, got none; restore them from a copy"
                )
            if self._count(part[keys], np.int64, 1) != rows:
                raise CorruptTableError(
                    f"{part[keys]} must have the keys of {rows} rows, as {part['keys']} has, got"
                    f" {self._fs.size(part[keys])} bytes; restore it from a copy, or load without the optimizer's state"
                )
            if "scores" in part:
                if scores not in part:
                    raise CorruptTableError(
                        f"{part[keys]} must have a file of {scores} beside it, got none; restore it from a copy"
                    )
                self._need(part[scores], 8 * rows, f"uint64 [{rows}]")
            self.state_width += self._one(self._widths(part[values], 4, rows), "state values")
            self._state_parts.append((part[keys], part[values]))

    def _one(self, found: set[int], what: str) -> int:
        """The number that all parts agree on, 0 if no part has rows; CorruptTableError if they differ."""
        if len(found) > 1:
            raise CorruptTableError(
                f"all rows of a dump must have the same number of {what}, got {' and '.join(map(str, sorted(found)))}"
                f" in {self._parts[0]['keys']} and the files of other ranks; restore the dump from a copy"
            )
        return min(found, default=0)

    def _count(self, path: str, dtype: type, width: int) -> int:
        size, unit = self._fs.size(path), np.dtype(dtype).itemsize * width
        if size % unit:
            raise CorruptTableError(f"{path} must be of whole int64 numbers, got {size} bytes; restore it from a copy")
        return size // unit

    def _need(self, path: str, size: int, what: str) -> None:
        if (got := self._fs.size(path)) != size:
            raise CorruptTableError(f"{path} must be {what}, {size} bytes, got {got}; restore it from a copy")

    def _widths(self, path: str, unit: int, rows: int, widths: Sequence[int] | None = None) -> set[int]:
        """{number of values of each row in a file}; the empty set if there are no rows."""
        size = self._fs.size(path)
        width = size // (unit * rows) if rows else 0
        if size != unit * rows * width or rows and widths is not None and width not in widths:
            raise CorruptTableError(
                f"{path} must have the same number of {unit}-byte values for each of {rows} rows, got {size} bytes;"
                " restore it from a copy"
            )
        return {width} if rows else set()

    def check_distinct(self, num_embeddings: int | None) -> None:
        """Raise CorruptTableError if an id occurs twice."""
        index, dist = HashIndex(Threads(1)), self.meta.get("dist_type", "roundrobin")
        for r, (part, rows) in enumerate(zip(self._parts, self._rows, strict=True)):
            for begin in range(0, rows, _AT_ONCE):
                key_N = self._read(part["keys"], np.int64, begin, min(_AT_ONCE, rows - begin), 1)[:, 0]
                if self.version == "today":
                    key_N = ids_of_numbers(dist, r, key_N, self.ranks, num_embeddings)
                twice = index.put_new(np.zeros(len(key_N), np.int32), key_N, np.zeros(len(key_N), np.int64))
                if twice is not None:
                    raise CorruptTableError(
                        f"id {twice[1]} comes twice in {part['keys']} and the keys of other ranks, and must come once"
                        " in a dump; restore the dump from a copy"
                    )

    def check_states(self) -> None:
        """Raise CorruptTableError unless the files of optimizer state of "seed" have the same keys as the rows."""
        for keys, _ in self._state_parts:
            row_N, state_N = (np.sort(self._whole(path, np.int64, 1)[:, 0]) for path in (self._parts[0]["keys"], keys))
            if (differs_N := row_N != state_N).any():
                raise CorruptTableError(
                    f"{keys} must have the ids of all rows, and no other, got {state_N[differs_N][0]} in place of"
                    f" {row_N[differs_N][0]}; restore it from a copy, or load without the optimizer's state"
                )

    def read(self, batch: int, *, state: bool) -> Iterator[DumpRows]:
        """Yield all rows, at most `batch` at a time, with their optimizer state if `state`; call `check_states` before.
        Raises CorruptTableError if a file became shorter."""
        states = [self._state_of(keys, values) for keys, values in self._state_parts if state]
        for r, (part, rows) in enumerate(zip(self._parts, self._rows, strict=True)):
            for begin in range(0, rows, batch):
                count = min(batch, rows - begin)
                key_N = self._read(part["keys"], np.int64, begin, count, 1)[:, 0]
                value_ND = self._read(part["values"], np.float32, begin, count, self._dim)
                score_NS = state_NZ = None
                if "scores" in part:
                    score_NS = self._read(part["scores"], np.int64, begin, count, self.score_words)
                if "opt_values" in part and state:
                    state_NZ = self._read(part["opt_values"], np.float32, begin, count, self.state_width)
                elif states:
                    state_NZ = np.concatenate([of(key_N) for of in states], axis=1)
                yield DumpRows(r, key_N, value_ND, score_NS, state_NZ)

    def scores(self, batch: int) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
        """Yield (rank, keys, scores) of all rows, in the form of `DumpRows`, at most `batch` rows at a time."""
        for r, (part, rows) in enumerate(zip(self._parts, self._rows, strict=True)):
            for begin in range(0, rows, batch):
                count, score_NS = min(batch, rows - begin), None
                if "scores" in part:
                    score_NS = self._read(part["scores"], np.int64, begin, count, self.score_words)
                yield r, self._read(part["keys"], np.int64, begin, count, 1)[:, 0], score_NS

    def _state_of(self, keys: str, values: str) -> Callable[[np.ndarray], np.ndarray]:
        """Function from keys to one part of their optimizer state; `keys` and `values` are the paths of its files."""
        key_N, rows = self._whole(keys, np.int64, 1)[:, 0], self.rows
        value_NZ = self._whole(values, np.float32, self._one(self._widths(values, 4, rows), "state values"))
        index = HashIndex(Threads(1))
        index.put(np.zeros(rows, np.int32), key_N, np.arange(rows))

        def of(asked_N: np.ndarray) -> np.ndarray:
            return value_NZ[index.find(np.zeros(len(asked_N), np.int32), asked_N)]

        return of

    def _whole(self, path: str, dtype: type, width: int) -> np.ndarray:
        """Values of all rows in a file of "seed", [rows, width]."""
        return self._read(path, dtype, 0, self.rows, width)

    def counters(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield keys of ids without a row, and the counts of these ids, int64 [N] both; `ids_of_numbers` makes ids of
        keys."""
        for part in self._parts:
            rows = self._count(part["counter_keys"], np.int64, 1)
            for begin in range(0, rows, batch):
                count = min(batch, rows - begin)
                columns = [self._read(part[f"counter_{what}"], np.int64, begin, count, 1)[:, 0] for what in _COUNTS]
                yield columns[0], columns[1]

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


def find_dump(folder: str, table: str, *, dim: int, fs: FileSystem | None = None) -> Dump:
    """Dump of a table in a folder, after a check that it is complete; `dim` is the number of weights of a row.

    Raises:
        SnapshotNotFoundError: the folder has no dump of the table; the message names the tables that it has.
        CorruptTableError: the dump is incomplete, or a file has a wrong length.
        StorageError: a file cannot be read.
    """
    check_name(table)
    fs = fs or LocalFileSystem()
    names = names_in(fs, folder)
    ranked = {name: found for name in names if (found := part_of(table, name, RANKED))}
    of_seed = {name: found for name in names if (found := part_of(table, name, OF_SEED))}
    meta_path, has_meta = f"{folder}/{table}_{META}", f"{table}_{META}" in names
    if not ranked and not of_seed and not has_meta:
        raise SnapshotNotFoundError(
            f"no dump of table {table!r} in {folder}; there are: {', '.join(_tables_in(names)) or 'none'}"
        )
    if not has_meta and (ranked or any(found[1] for found in of_seed.values())):
        raise CorruptTableError(
            f"{meta_path}, the last file of a dump, is not there, since the dump of table {table!r} was cut short; load"
            " another dump"
        )
    if ranked and of_seed:
        raise CorruptTableError(
            f"{folder} must have one dump of table {table!r}, but has files of two dumps, {min(of_seed)} and"
            f" {min(ranked)}; remove the files of one"
        )
    version: Layout = "today" if ranked else "seed"
    parts = [{name.removeprefix(f"{table}_"): f"{folder}/{name}" for name in of_seed}]
    if ranked:
        parts = _parts_of_ranks(folder, table, names, list(ranked.values()))
    for kind in ("keys", "values"):
        if kind not in parts[0]:
            raise CorruptTableError(
                f"{folder}/{table}_{kind} is not there: the dump of table {table!r} was cut short, or lost the file;"
                " load another dump"
            )
    with doing("look at", folder):
        return Dump(fs, version, parts, _meta(fs, meta_path) if has_meta else {}, dim)


def _parts_of_ranks(folder: str, table: str, names: set[str], found: "Sequence[re.Match[str]]") -> list[dict[str, str]]:
    """For each rank {kind of file: path}."""
    worlds = {int(match[3]) for match in found}
    if len(worlds) > 1:
        raise CorruptTableError(
            f"{folder} must have one dump of table {table!r}, but has dumps by"
            f" {' and by '.join(map(str, sorted(worlds)))} ranks; remove the files of all but one"
        )
    ranks = worlds.pop()
    kinds = {match[1] for match in found} | {"emb_keys", "emb_values"}
    for kind in sorted(kinds):
        for r in range(ranks):
            if f"{table}_{kind}.rank_{r}.world_size_{ranks}" not in names:
                raise CorruptTableError(
                    f"{folder}/{table}_{kind}.rank_{r}.world_size_{ranks} is not there, but other files of the dump"
                    " are; restore it from a copy"
                )
    for one, other in (("counter_keys", "counter_frequencies"), ("counter_frequencies", "counter_keys")):
        if one in kinds and other not in kinds:
            raise CorruptTableError(
                f"{folder} has {table}_{one} files, but no {table}_{other} files; restore them from a copy"
            )
    return [
        {kind.removeprefix("emb_"): f"{folder}/{table}_{kind}.rank_{r}.world_size_{ranks}" for kind in kinds}
        for r in range(ranks)
    ]


def _tables_in(names: set[str]) -> list[str]:
    of_seed = {name.removesuffix("_keys") for name in names if name.endswith("_keys") and "_opt_state_" not in name}
    return sorted(of_seed | {name.removesuffix(f"_{META}") for name in names if name.endswith(f"_{META}")})


def _meta(fs: FileSystem, path: str) -> dict[str, Any]:
    try:
        found = json.loads((read_file(fs, path) or b"").decode())
    except (UnicodeDecodeError, ValueError) as error:
        raise CorruptTableError(f"{path} must be JSON, but is not ({error}); restore it from a copy") from error
    if not isinstance(found, dict):
        raise CorruptTableError(f"{path} must be a JSON object, got {str(found)[:100]}; restore it from a copy")
    for name, (what, holds) in _META_CHECKS.items():
        if name in found and not holds(found[name]):
            raise CorruptTableError(
                f"{path} must have {what} for {name}, got {str(found[name])[:100]}; restore it from a copy"
            )
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_META_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "dist_type": (f"one of {', '.join(DIST_TYPES)}", lambda value: value in DIST_TYPES),
    "num_embeddings": ("an integer above 0", lambda value: _is_count(value) and value > 0),
    **dict.fromkeys(("opt_type", "evict_strategy"), ("a text", lambda value: isinstance(value, str))),
    **dict.fromkeys(("iters", "step_score"), ("an integer, 0 or more", _is_count)),
    **dict.fromkeys(("lr", "beta1", "beta2", "eps", "weight_decay"), ("a number", _is_number)),
}
"""{name in the last file of a dump: (description of its value, check of its value)}."""
