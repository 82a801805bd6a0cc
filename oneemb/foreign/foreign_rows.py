"""Rows of a table of another library, as a source for `import_rows`.

A reader of a format gives a `ForeignTable`; `ForeignRows` joins its weights and optimizer state by id and checks them.

Invariant: before the first row is given, all checksums of the format are compared, and no id comes twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from oneemb.foreign.stored_arrays import FileArray, RowArray
from oneemb.graph.row_optimizers import StateNames, states_in
from oneemb.kernels.threads import Threads
from oneemb.rows.files import RowsOfFile, checked_batch
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows

_AT_ONCE = 1 << 16


class StatePart(NamedTuple):
    """One part of the optimizer state, or the scores, of a table's rows."""

    values: RowArray
    """[M, D], or [M] or [M, 1] for one value a row."""
    keys: RowArray | None
    """Id of each row of `values`, integers [M]; None = the order of the table's rows."""


@dataclass
class ForeignTable:
    """Table of another library, as a reader finds it.

    Args:
        what: name of the table for errors, with the path.
        library: name of the library for `states_in`.
        keys, values: ids, integers [N], and weights [N, D].
        state: {the library's name of a part of the optimizer state: its values}.
        scores: frequencies or times of last use; None = the source has none.
        step: number of optimizer steps; None = the source has no such count.
        not_carried: sentences about content of the source that rows do not hold.
    """

    what: str
    library: str
    keys: RowArray
    values: RowArray
    state: Mapping[str, StatePart] = field(default_factory=dict)
    scores: StatePart | None = None
    step: int | None = None
    not_carried: list[str] = field(default_factory=list)


class ForeignRows:
    """Rows of a foreign table, with the interface `RowFile`. See `oneemb.rows.foreign`.

    Args:
        attached: format of the rows of the embedding that gets the rows; None = a snapshot gets them.
        optimizer: name of the optimizer whose state the table has; None = the optimizer of `attached` if the table has
            its state, else the first optimizer whose state the table has.
        with_state: whether to read the optimizer state.

    Raises:
        CorruptTableError: an id comes twice, or a checksum differs.
        ValueError: the table has no state of the optimizer.
    """

    def __init__(self, table: ForeignTable, attached: RowFormat | None, optimizer: str | None, *, with_state: bool):
        self.table = table
        values = table.values
        if len(values.shape) != 2 or len(table.keys.shape) != 1 or table.keys.shape[0] != values.shape[0]:
            raise CorruptTableError(
                f"{table.what} must have ids [N] and weights [N, D], got {list(table.keys.shape)} and"
                f" {list(values.shape)}"
            )
        self.size: int | None = values.shape[0]
        self.dim = values.shape[1]
        self.dtype = str(values.dtype) if str(values.dtype) in ("float16", "bfloat16") else "float32"
        self._state: list[tuple[StatePart, HashIndex | None, np.ndarray]] = []
        self.optimizer: str | None = None
        self.without_state = 0
        """Number of rows read so far without optimizer state in the source. They begin with the state of new rows."""
        self.nonfinite = 0
        """Number of rows read so far with a weight or a value of state that is infinite or NaN."""
        initial = np.empty(0, np.float32)
        if with_state:
            self.optimizer, parts = _optimizer_in(table, attached, optimizer, self.dim)
            if table.step is None and parts.counts_steps:
                raise ValueError(
                    f"step must be given with the state of {self.optimizer!r}, whose updates depend on the number of"
                    f" steps, but {table.what} has no such number; give step=..., the number of steps that were taken"
                )
            widths = [self.dim] * len(parts.weight_state) + [1] * len(parts.row_state)
            initial = np.zeros(sum(widths), np.float32)
            if attached is not None and attached.optimizer == self.optimizer:
                initial = np.asarray(attached.state, np.float32)
            begin = 0
            for name, width in zip((*parts.weight_state, *parts.row_state), widths, strict=True):
                part = table.state[name]
                index = None if part.keys is None else distinct_keys(f"{table.what}, {name}", part.keys)
                self._state.append((part, index, initial[begin : begin + width]))
                begin += width
        self.state_width = len(initial)
        # Rows that have state have had a step: after step 0, momentum would begin anew.
        self.step = 1 if table.step is None and with_state else table.step or 0
        self.note: SnapshotRows | None = SnapshotRows(
            RowFormat(self.dim, self.dtype, self.optimizer, tuple(initial.tolist())), self.step
        )
        distinct_keys(table.what, table.keys)
        for array in (table.keys, values, *(one for part, _, _ in self._state for one in part)):
            if isinstance(array, FileArray):
                array.verify()

    def scan(self, batch: int) -> Iterator[RowsOfFile]:
        """Batches of all rows, in the order of the source."""
        for begin in range(0, self.table.keys.shape[0], batch):
            end = min(begin + batch, self.table.keys.shape[0])
            id_N, weight_ND = self.table.keys.read(begin, end), self.table.values.read(begin, end)
            state_NZ = None
            if self._state:
                parts = [self._part(part, index, initial, begin, id_N) for part, index, initial in self._state]
                state_NZ = np.concatenate([values for values, _ in parts], 1)
                self.without_state += int(np.logical_or.reduce([missing for _, missing in parts]).sum())
            rows = checked_batch(self.table.what, begin, id_N, weight_ND, None, state_NZ)
            finite_N = np.isfinite(rows.weight_ND).all(1)
            if rows.state_NZ is not None:
                finite_N &= np.isfinite(rows.state_NZ).all(1)
            self.nonfinite += int((~finite_N).sum())
            yield rows

    def _part(
        self, part: StatePart, index: HashIndex | None, initial: np.ndarray, begin: int, id_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One part of the state of some rows, float32 [N, X], and whether each row lacks it."""
        if index is None:
            values = part.values.read(begin, begin + len(id_N)).reshape(len(id_N), -1)
            with np.errstate(over="ignore"):  # Values that float32 does not hold are counted as infinite.
                return values.astype(np.float32, copy=False), np.zeros(len(id_N), bool)
        row_N = index.find(np.zeros(len(id_N), np.int32), id_N.astype(np.int64))
        found_N = row_N >= 0
        out_NX = np.tile(initial, (len(id_N), 1))
        out_NX[found_N] = part.values.take(row_N[found_N]).reshape(int(found_N.sum()), -1)
        return out_NX, ~found_N

    def scores(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Batches of ids and scores, int64 [N] both."""
        scores = self.table.scores
        assert scores is not None
        keys = self.table.keys if scores.keys is None else scores.keys
        for begin in range(0, keys.shape[0], batch):
            end = min(begin + batch, keys.shape[0])
            yield keys.read(begin, end).astype(np.int64), scores.values.read(begin, end).reshape(-1).astype(np.int64)

    def close(self) -> None:
        """Do nothing: no file is open between reads."""


def distinct_keys(what: str, keys: RowArray) -> HashIndex:
    """Index from each id to its row. CorruptTableError if an id comes twice."""
    index = HashIndex(Threads(1))
    for begin in range(0, keys.shape[0], _AT_ONCE):
        key_N = keys.read(begin, min(begin + _AT_ONCE, keys.shape[0]))
        if key_N.dtype.kind not in "iu" or key_N.dtype == np.uint64 and len(key_N) and int(key_N.max()) >= 1 << 63:
            raise CorruptTableError(f"{what}: ids must be int64, got {key_N.dtype}")
        key_N = key_N.astype(np.int64)
        twice = index.put_new(np.zeros(len(key_N), np.int32), key_N, np.arange(begin, begin + len(key_N)))
        if twice is not None:
            n = int(np.flatnonzero(key_N == twice[1])[:2][-1])
            raise CorruptTableError(
                f"{what}: each id must come once, but id {key_N[n]} of row {begin + n} comes a second time; write the"
                " source again, or restore it from a copy"
            )
    return index


def _optimizer_in(
    table: ForeignTable, attached: RowFormat | None, optimizer: str | None, dim: int
) -> tuple[str, StateNames]:
    """Optimizer whose state the table has, and the names of the parts of its state."""
    known = states_in(table.library)
    widths = {name: 1 if len(part.values.shape) == 1 else part.values.shape[1] for name, part in table.state.items()}

    def has(name: str) -> bool:
        parts = known[name]
        expected = {**dict.fromkeys(parts.weight_state, dim), **dict.fromkeys(parts.row_state, 1)}
        return all(widths.get(part) == width for part, width in expected.items())

    if optimizer is not None and optimizer not in known:
        raise ValueError(
            f"optimizer must be one whose state {table.library} keeps as rows do, {', '.join(sorted(known))}, got"
            f" {optimizer!r}; import without with_state"
        )
    wanted = optimizer
    if wanted is None and attached is not None and attached.optimizer in known:
        wanted = attached.optimizer
    fitting = [name for name in known if has(name) and len([*known[name].weight_state, *known[name].row_state])]
    # The most parts first: the state of some optimizers is a part of that of others.
    fitting.sort(key=lambda name: -len([*known[name].weight_state, *known[name].row_state]))
    if wanted is None and fitting:
        wanted = fitting[0]
    if wanted is None or not has(wanted):
        there = ", ".join(f"{name} [{width}]" for name, width in widths.items()) or "none"
        raise ValueError(
            f"{table.what} must have the optimizer's state {_described(known, wanted)} for rows of {dim} weights, and"
            f" has {there}; name the optimizer with optimizer=..., or import without with_state"
        )
    return wanted, known[wanted]


def _described(known: Mapping[str, StateNames], wanted: str | None) -> str:
    if wanted is None:
        return "of one of " + ", ".join(sorted(known))
    return f"of {wanted!r}, " + ", ".join([*known[wanted].weight_state, *known[wanted].row_state])


def unused_state(table: ForeignTable, optimizer: str | None) -> Sequence[str]:
    """Names of the parts of the state that the rows of an optimizer do not hold."""
    parts = states_in(table.library).get(optimizer or "", StateNames((), (), False))
    return sorted(set(table.state) - {*parts.weight_state, *parts.row_state})
