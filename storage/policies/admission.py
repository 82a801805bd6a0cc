"""Admission decides which ids get a row: ids seen often enough, ids drawn by chance, or ids that a user's function
admits.

    admission = Admission(policies, threads)
    admitted_M = admission.asks(table_M, id_M, uses_M, lookup)      keys that have no row
    admission.note(table_M, id_M, uses_M, admitted_M, lookup)       after the lookup

A sighting is an occurrence of an id without a row in a lookup. If a rule needs sightings, they are counted exactly, for
at most `counters` ids (the ids that were not seen for longest are forgotten first), or approximately by a sketch, whose
counts are never too small. Snapshots contain the counts.

Shape letters: M keys without a row, T tables, S width and R depth of a sketch.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from oneemb.kernels.score_rows import hashes_of
from oneemb.kernels.sketch import add_to_sketch, read_sketch
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.policies.evictions import Evictions
from oneemb.storage.policies.row_policy import AdmitAfter, AdmitChance, AdmitWhere, EpochLFU, RowPolicy
from oneemb.storage.policies.usage_index import UsageClock, UsageIndex
from oneemb.storage.table.snapshot_reader import Keep

_COUNT = np.uint64(0xFFFFFFFF)
_SEED_FACTOR, _LOOKUP_FACTOR = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


class Admission:
    """Decides for each key without a row whether it gets a row, by the policies of the tables."""

    def __init__(self, policies: Sequence[RowPolicy], threads: Threads):
        self._rules = {t: policy.admit for t, policy in enumerate(policies) if policy.admit is not None}
        self._threads = threads
        self.admitted = self.refused = 0
        """Number of keys without a row that got a row in a lookup, and that got none; a key counts once in each
        lookup."""
        self.clear()

    def clear(self) -> None:
        """Forget all sightings."""
        self._counters: dict[int, _Counters | _Sketch] = {}
        for t, rule in self._rules.items():
            match rule:
                case AdmitAfter(sketch_width=int(width)):
                    self._counters[t] = _Sketch(width, self._threads)
                case AdmitAfter() | AdmitWhere():
                    self._counters[t] = _Counters(rule.counters, self._threads)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(counters.nbytes for counters in self._counters.values())

    def asks(
        self, table_M: np.ndarray, id_M: np.ndarray, uses_M: np.ndarray, lookup: int, *, again: bool = False
    ) -> np.ndarray:
        """Whether each of these distinct keys gets a row: bool [M]. Changes nothing.

        Args:
            uses_M: int64, number of ids in the lookup that have the key.
            lookup: number of the lookup.
            again: whether the same lookup was made before; then no key of a table with a rule gets a row now.

        Raises:
            ValueError: a user's function raises, or returns an invalid array.
        """
        admitted_M = np.ones(len(id_M), np.bool_)
        for t, rule in self._rules.items():
            of_table = np.flatnonzero(table_M == t)
            if len(of_table) == 0:
                continue
            if again:
                admitted_M[of_table] = False
                continue
            id_N = id_M[of_table]
            match rule:
                case AdmitChance(probability, seed):
                    salt = (seed * _SEED_FACTOR + lookup * _LOOKUP_FACTOR) % 2**64
                    draw_N = hashes_of(table_M[of_table], id_N, salt, threads=self._threads)
                    admitted_M[of_table] = draw_N.astype(np.float64) < probability * 2.0**64
                case AdmitAfter(sightings):
                    admitted_M[of_table] = self._counts(t, id_N, uses_M[of_table]) >= sightings
                case AdmitWhere(function):
                    admitted_M[of_table] = _asked(function, t, id_N, self._counts(t, id_N, uses_M[of_table]))
        return admitted_M

    def _counts(self, table: int, id_N: np.ndarray, uses_N: np.ndarray) -> np.ndarray:
        """Number of sightings of each id, this lookup included."""
        return self._counters[table].counts(id_N) + self._sightings(table, uses_N)

    def _sightings(self, table: int, uses_N: np.ndarray) -> np.ndarray:
        rule = self._rules[table]
        assert isinstance(rule, AdmitAfter | AdmitWhere)
        return np.ones_like(uses_N) if rule.per_lookup else uses_N

    def note(
        self, table_M: np.ndarray, id_M: np.ndarray, uses_M: np.ndarray, admitted_M: np.ndarray, lookup: int
    ) -> None:
        """Count the sightings of a lookup, with the arguments and the result of `asks`. Admitted keys have a row now,
        so their counts are removed."""
        for t in self._rules:
            of_table = np.flatnonzero(table_M == t)
            refused, admitted = of_table[~admitted_M[of_table]], of_table[admitted_M[of_table]]
            self.admitted, self.refused = self.admitted + len(admitted), self.refused + len(refused)
            if t in self._counters and len(of_table):
                self._counters[t].forget(id_M[admitted])
                self._counters[t].add(id_M[refused], self._sightings(t, uses_M[refused]), lookup)

    def forget(self, table_M: np.ndarray, id_M: np.ndarray) -> None:
        """Remove the counts of these keys, which have got a row without admission."""
        for t, counters in self._counters.items():
            counters.forget(id_M[table_M == t])

    def sightings(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """Counted ids of a table and their numbers of sightings, both int64 [N]. Empty if the table has a sketch or
        counts nothing."""
        counters = self._counters.get(table)
        if not isinstance(counters, _Counters):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return counters.items()

    def add_sightings(self, table: int, id_N: np.ndarray, count_N: np.ndarray) -> None:
        """Add `count_N` sightings to the counts of these distinct ids, which have no row."""
        counters = self._counters.get(table)
        if counters is not None and len(id_N):
            counters.add(id_N, count_N, None)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays of the sightings, for snapshots."""
        return {sightings_name(t): counters.to_array() for t, counters in self._counters.items()}

    def from_arrays(self, arrays: Mapping[str, np.ndarray], name: str) -> None:
        """Load the counts from the arrays that `to_arrays` has put into snapshot `name`. Counts begin at zero if the
        array is missing, or was made by the other way of counting. CorruptTableError if an array is invalid."""
        self.clear()
        for t, counters in self._counters.items():
            found = arrays.get(sightings_name(t))
            if found is None:
                continue
            try:
                counters.from_array(found)
            except ValueError as error:
                raise CorruptTableError(
                    f"snapshot {name!r} has an invalid array {sightings_name(t)!r}: {error}; restore its file from a"
                    " copy, or load another snapshot"
                ) from error


def _asked(function: object, table: int, id_N: np.ndarray, count_N: np.ndarray) -> np.ndarray:
    assert callable(function)
    try:
        admitted_N = np.asarray(function(table, id_N.copy(), count_N))
    except Exception as error:
        raise ValueError(f"admit= of table {table} raised {error!r}; the lookup was not made") from error
    if admitted_N.dtype != np.bool_ or admitted_N.shape != id_N.shape:
        raise ValueError(
            f"admit= of table {table} must give bool [{len(id_N)}], one for each id, got {admitted_N.dtype}"
            f" {list(admitted_N.shape)}"
        )
    return admitted_N


class _Counters:
    """Exact counts of sightings for at most `most` ids: a usage index of ids without rows, in which each lookup is an
    epoch."""

    def __init__(self, most: int, threads: Threads):
        self._most, self._threads = most, threads
        self._usage = UsageIndex([RowPolicy(EpochLFU())], most, threads)
        self._evictions = Evictions(self._usage, threads)

    @property
    def nbytes(self) -> int:
        return self._usage.nbytes

    def counts(self, id_N: np.ndarray) -> np.ndarray:
        place_N = self._usage.find(_no_table(id_N), id_N)
        count_N = np.zeros(len(id_N), np.int64)
        known = np.flatnonzero(place_N >= 0)
        count_N[known] = (self._usage.scores(place_N[known]) & _COUNT).astype(np.int64)
        return count_N

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Counted ids and their numbers of sightings, both int64 [N]."""
        id_N, score_N, _ = self._usage.uses(0)
        return id_N, (score_N & _COUNT).astype(np.int64)

    def add(self, id_N: np.ndarray, more_N: np.ndarray, lookup: int | None) -> None:
        """Add `more_N` sightings to the counts of the ids. lookup: number of the lookup; None = that of the last
        one."""
        if len(id_N) > self._most:  # Too many ids to count: the ids with the greatest hashes are left out.
            kept = np.argsort(hashes_of(_no_table(id_N), id_N, 0, threads=self._threads))[: self._most]
            id_N, more_N = id_N[kept], more_N[kept]
        table_N = _no_table(id_N)
        place_N = self._usage.find(table_N, id_N)
        for gone in self._evictions.make_room(table_N[place_N < 0], [place_N]):
            self._usage.forget(*gone)
        if lookup is not None:
            self._usage.clock.epoch = min(lookup, 2**32 - 1)
        self._usage.use(table_N, id_N, place_N, more_N, 0, 0)

    def forget(self, id_N: np.ndarray) -> None:
        self._usage.forget(_no_table(id_N), id_N, "admitted")

    def to_array(self) -> np.ndarray:
        """int64 [N + 1, 3]: first the usage index's clock, then for each id the id and its four usage words."""
        _, id_N, place_N = self._usage.items()
        usage_N4 = self._usage.usage_words(place_N)
        order_N = np.argsort(id_N)  # so that equal states are equal bytes
        head = np.array([[self._usage.clock.lookups, self._usage.clock.shard, self._usage.clock.epoch]])
        body_N3 = np.concatenate([id_N[order_N, None], usage_N4[order_N].view(np.int64)], axis=1)
        return np.concatenate([head, body_N3])

    def from_array(self, array: np.ndarray) -> None:
        if array.dtype != np.int64:
            return  # a sketch's
        if array.ndim != 2 or array.shape[1] != 3 or len(array) == 0 or (array[0] < 0).any() or array[0, 1] >= 256:
            raise ValueError(f"counts must be int64 [N + 1, 3], got {array.dtype} {list(array.shape)}")
        id_N, usage_N4 = array[1:, 0].copy(), np.ascontiguousarray(array[1:, 1:]).view(np.uint32)
        if len(np.unique(id_N)) < len(id_N):
            raise ValueError("ids repeat")
        if len(id_N) > self._most:  # Keep the ids that were seen last.
            latest = np.sort(np.argsort(-usage_N4[:, 1].astype(np.int64), kind="stable")[: self._most])
            id_N, usage_N4 = id_N[latest], usage_N4[latest]
        lookups, shard, epoch = array[0].tolist()
        self._usage.begin(UsageClock(lookups=lookups, shard=shard, epoch=min(epoch, 2**32 - 1)), 0, 0)
        self._usage.add(_no_table(id_N), id_N, usage_N4)


class _Sketch:
    """Counts sightings of any number of ids by a count-min sketch (Cormode, Muthukrishnan, J. Algorithms 55, 2005): a
    count is never too small, and with probability 1 - e^-4 it is too large by less than e/S of all counted
    sightings."""

    def __init__(self, width: int, threads: Threads):
        self._width, self._threads = width, threads
        self._count_RS = np.zeros((4, width), np.uint32)

    @property
    def nbytes(self) -> int:
        return self._count_RS.nbytes

    def counts(self, id_N: np.ndarray) -> np.ndarray:
        return read_sketch(self._count_RS, id_N, threads=self._threads)

    def add(self, id_N: np.ndarray, more_N: np.ndarray, lookup: int | None) -> None:
        add_to_sketch(self._count_RS, id_N, more_N)

    def forget(self, id_N: np.ndarray) -> None:
        """Does nothing: other ids share the cells of an id, so a sketch cannot remove a count."""

    def to_array(self) -> np.ndarray:
        return self._count_RS

    def from_array(self, array: np.ndarray) -> None:
        if array.dtype == np.uint32 and array.shape == self._count_RS.shape:
            self._count_RS = array.copy()


def _no_table(id_N: np.ndarray) -> np.ndarray:
    return np.zeros(len(id_N), np.int32)


# ---- arrays of several parts -----------------------------------------------------------------------------------------


_SIGHTINGS = "sightings of table "


def sightings_name(table: int) -> str:
    """Name of the array with the sightings of a table's ids."""
    return f"{_SIGHTINGS}{table}"


def joined_arrays(parts: Sequence[Mapping[str, np.ndarray]], is_own: Keep) -> dict[str, np.ndarray]:
    """Join the arrays of the parts of a snapshot for one rank: {name: array with the counts of the rank's own keys}.

    Args:
        parts: for each part, {name: array}, as from `Admission.to_arrays`.
        is_own: function of table_N and id_N; returns bool [N], whether the rank owns the key.
    """
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        arrays = [part[name] for part in parts if name in part]
        table = name.removeprefix(_SIGHTINGS)
        if name.startswith(_SIGHTINGS) and table.isdecimal():
            joined[name] = _joined_sightings(arrays, int(table), is_own)
        else:
            joined[name] = arrays[0]
    return joined


def _joined_sightings(arrays: Sequence[np.ndarray], table: int, is_own: Keep) -> np.ndarray:
    """Join one table's counts of several parts. Sketches are joined by their maximum: a sketch counts no id of its own
    part too low, so the maximum counts no id too low."""
    first, same = arrays[0], [array for array in arrays if array.dtype == arrays[0].dtype and array.ndim == 2]
    if first.dtype == np.uint32:
        return np.maximum.reduce([array for array in same if array.shape == first.shape] or [first])
    if first.dtype != np.int64 or any(len(array) == 0 or array.shape[1] != 3 for array in same) or not same:
        return first  # Invalid: `from_array` raises the error.
    head = np.max([array[0] for array in same], axis=0)
    body_N3 = np.concatenate([array[1:] for array in same])
    body_N3 = body_N3[is_own(np.full(len(body_N3), table, np.int32), np.ascontiguousarray(body_N3[:, 0]))]
    # If several parts have counted an id, which no save of one job makes, the greatest usage counts.
    body_N3 = body_N3[np.lexsort((body_N3[:, 1].view(np.uint64), body_N3[:, 0]))]
    last_N = np.append(body_N3[1:, 0] != body_N3[:-1, 0], True)[: len(body_N3)]
    return np.concatenate([head[None], body_N3[last_N]])
