"""Policies that users give: which ids of a table get a row, and which rows are evicted. Arguments are checked here.

A `RowPolicy` is the policy of one table. `kernels/score_rows.py` computes the scores of rows, and `evictions.py` finds
the rows to evict.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.score_rows import COUNT, DECAYED, EPOCH_COUNT, EPOCH_LOOKUP, GIVEN, LOOKUP, MIXED, STEP, ScoreRules
from oneemb.storage.rows.initializers import ConstantInitializer, Initializer, encoded


@dataclass(frozen=True)
class LRU:
    """Eviction rule: the rows that have not been looked up for the longest time are evicted first."""


@dataclass(frozen=True)
class StepLRU:
    """Eviction rule: the rows that have not been looked up for most steps are evicted first. Rows that the same step
    looked up last have equal rank."""


@dataclass(frozen=True)
class LFU:
    """Eviction rule: the rows that were looked up least often are evicted first.

    Args:
        half_life: number of steps after which a use counts half as much; None = uses count in full for ever.
    """

    half_life: float | None = None

    def __post_init__(self) -> None:
        _check_positive("half_life", self.half_life)
        if self.half_life is not None and not 1e-3 <= self.half_life <= 1e15:
            raise ValueError(f"half_life must be from 0.001 to 1e15 steps, got {self.half_life!r}")


@dataclass(frozen=True)
class MixedLFU:
    """Eviction rule: the rows that were looked up least often are evicted first; among rows that were looked up about
    equally often, those whose last use is oldest.

    Uses are counted roughly, as a power of two, as in TorchRec's dynamic embedding (`mixed_lru_lfu`).

    Args:
        new_power: the power of two with which a new row begins.
    """

    new_power: int = 5

    def __post_init__(self) -> None:
        if type(self.new_power) is not int or not 0 <= self.new_power <= 31:
            raise ValueError(f"new_power must be an int from 0 to 31, got {self.new_power!r}")


@dataclass(frozen=True)
class EpochLRU:
    """Eviction rule: rows last used in old epochs are evicted first; within an epoch, the rows that have not been
    looked up for the longest time. `set_epoch` sets the epoch."""


@dataclass(frozen=True)
class EpochLFU:
    """Eviction rule: rows last used in old epochs are evicted first; within an epoch, the rows that were looked up
    least often. `set_epoch` sets the epoch."""


@dataclass(frozen=True)
class GivenScore:
    """Eviction rule: the rows with the lowest scores are evicted first. `set_scores` sets the scores of rows.

    Args:
        new: score of new rows, 0 to 2^64 - 1.
        on_use: if True, a lookup resets the scores of all its rows to `new`; if False, only new rows get this score.
    """

    new: int = 0
    on_use: bool = False

    def __post_init__(self) -> None:
        if type(self.new) is not int or not 0 <= self.new < 2**64:
            raise ValueError(f"new must be a score, an int from 0 to 2**64 - 1, got {self.new!r}")
        _check_bool("on_use", self.on_use)


@dataclass(frozen=True)
class AdmitAfter:
    """Admission rule: an id gets a row once it has been seen often enough in lookups in training mode.

    Args:
        sightings: how often the id must have occurred in lookups, the current lookup included.
        per_lookup: whether an id counts once in a lookup, however often it occurs in the lookup.
        counters: largest number of ids of the table whose sightings are counted. Beyond it, ids that have not been seen
            for a long time are forgotten, up to a sixteenth of the ids at a time, roughly in the order of `LRU`.
        sketch_width: None = counts are exact. Otherwise sightings are counted in a count-min sketch of 4 rows of this
            width, of 16 * sketch_width bytes, and `counters` has no effect. A sketch never counts too few sightings, so
            no id gets its row late. With probability 1 - e^-4 a count is too large by less than e / sketch_width of all
            sightings of ids without a row; counts in a sketch never decrease.
    """

    sightings: int
    per_lookup: bool = False
    counters: int = 1 << 20
    sketch_width: int | None = None

    def __post_init__(self) -> None:
        _check_int("sightings", self.sightings, 1, 2**31)
        _check_bool("per_lookup", self.per_lookup)
        _check_int("counters", self.counters, 1, 2**38)
        if self.sketch_width is not None:
            _check_int("sketch_width", self.sketch_width, 1, 2**32)


@dataclass(frozen=True)
class AdmitChance:
    """Admission rule: a lookup gives an id without a row a row with this probability. The outcome is a pure function of
    the seed, the key and the number of the lookup.

    Args:
        probability: above 0 and at most 1; it does not depend on how often the id occurs in the lookup.
        seed: an int from 0 to 2^64 - 1.
    """

    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.probability is None:
            raise TypeError("probability must be a number above 0, 1 at most, got None; it has no default")
        _check_positive("probability", self.probability)
        if self.probability > 1:
            raise ValueError(f"probability must be 1 at most, got {self.probability!r}")
        _check_int("seed", self.seed, 0, 2**64 - 1)


@dataclass(frozen=True)
class AdmitWhere:
    """Admission rule: a function says which ids get a row.

    Args:
        function: `function(table, ids, counts)` returns bool [N], whether each id gets a row. `table` is an int; `ids`,
            int64 [N], are distinct ids without a row; `counts`, int64 [N], are their sightings, the current lookup
            included. The function must not call the embedding.
        per_lookup, counters: as in `AdmitAfter`.
    """

    function: Callable[[int, np.ndarray, np.ndarray], np.ndarray]
    per_lookup: bool = False
    counters: int = 1 << 20

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be a function, got {self.function!r}")
        _check_bool("per_lookup", self.per_lookup)
        _check_int("counters", self.counters, 1, 2**38)


Eviction = LRU | StepLRU | LFU | MixedLFU | EpochLRU | EpochLFU | GivenScore
Admission = AdmitAfter | AdmitChance | AdmitWhere
Absent = Literal["initial", "zeros"] | Initializer


@dataclass(frozen=True)
class RowPolicy:
    """Policy of one table: which ids get a row, and which rows are evicted.

    Args:
        evict: rule that chooses the rows to evict if a table would have more rows than `capacity`, or the store more
            than its own capacity. None = nothing is evicted, and a full table or store raises StoreFullError. Tables
            that share the store's capacity need the same rule. Without any capacity, rows get scores by this rule and
            none is evicted.
        capacity: largest number of rows of the table; None = only the store's limit. An eviction makes room for more
            rows than are needed at the moment, at most a sixteenth of the capacity.
        capacity_mb: `capacity` in MiB of rows, optimizer state included; None = no limit. Give at most one of the two.
        expire_after_steps: rows that have not been looked up for more steps than this are evicted; None = off.
        expire_after_seconds: rows that have not been looked up for more (whole) seconds are evicted; None = off.
        expire_below_norm: rows whose weights have an L2 norm below this are evicted; None = off.
        expire_where: `expire_where(table, ids, weights)`, of an int and int64 [N] and float32 [N, D] arrays, returns
            bool [N], which rows to evict; None = off. The function must not call the embedding.
        sweep_steps: number of steps in which each row is checked once for having expired by steps or seconds, a 256th
            of the rows at a time. If tables differ, the lowest number applies to all. So a table has no row that has
            not been looked up for `expire_after_steps + sweep_steps` steps. `embedding.evict()` checks all rows at
            once, for norms and `expire_where` too.
        sweep_weights: whether sweeps check norms and `expire_where` too, which means reading the weights of rows.
        sweep_above_mb: sweeps skip the table while its rows, in all tiers and with optimizer state, take no more MiB
            than this; None = never.
        sweep_above: `sweep_above_mb` as a number of rows. Give at most one of the two.
        evict_at_snapshot: whether all expired rows of the table are evicted before a snapshot is saved.
        clock: function that returns seconds, the same for all tables; None = `time.monotonic`.
        admit: rule that chooses the ids that get a row; None = every id that is looked up in training mode. Gradients
            of ids without a row are dropped.
        absent: values that ids without a row have in eval mode: "initial" = the values of a new row, "zeros", or an
            initializer of `oneemb.make_*_initializer`.
        refused: values that ids have in training mode if they get no row: as for `absent`; None = the same as `absent`.
        timestamps: if True, a row records the time of its last use in nanoseconds, instead of step and second. Not
            possible if a table expires by steps or seconds, or if its `evict` uses steps. The same for all tables of an
            embedding.
        when_full: what happens if the ids of one lookup cannot all have a row, because `capacity` is too small or no
            row may be evicted: "raise" = StoreFullError; "refuse" = the last ids of the lookup get no row.

    Raises:
        TypeError, ValueError: an argument is out of its range.
    """

    evict: Eviction | None = None
    capacity: int | None = None
    expire_after_steps: int | None = None
    expire_after_seconds: int | None = None
    expire_below_norm: float | None = None
    expire_where: Callable[[int, np.ndarray, np.ndarray], np.ndarray] | None = None
    sweep_steps: int = 256
    clock: Callable[[], float] | None = None
    admit: Admission | None = None
    capacity_mb: int | None = None
    sweep_weights: bool = False
    evict_at_snapshot: bool = False
    absent: Absent = "initial"
    sweep_above_mb: int | None = None
    refused: Absent | None = None
    when_full: Literal["raise", "refuse"] = "raise"
    timestamps: bool = False
    sweep_above: int | None = None

    def __post_init__(self) -> None:
        if self.evict is not None and not isinstance(self.evict, Eviction):
            raise TypeError(f"evict must be one of oneemb.policies, such as LRU(), got {self.evict!r}")
        if self.admit is not None and not isinstance(self.admit, Admission):
            raise TypeError(f"admit must be one of oneemb.policies, such as AdmitAfter(2), got {self.admit!r}")
        for name in ("absent", "refused"):
            value = getattr(self, name)
            is_word = isinstance(value, str) and value in ("initial", "zeros")
            if not isinstance(value, Initializer) and not is_word and (value is not None or name == "absent"):
                raise ValueError(f'{name} must be "initial", "zeros" or an initializer, got {value!r}')
        if not isinstance(self.when_full, str) or self.when_full not in ("raise", "refuse"):
            raise ValueError(f'when_full must be "raise" or "refuse", got {self.when_full!r}')
        if self.when_full == "refuse" and self.capacity is None and self.capacity_mb is None:
            raise ValueError('when_full="refuse" needs a capacity or a capacity_mb of the table, got neither; give one')
        if self.capacity is not None and self.capacity_mb is not None:
            raise ValueError("a table may have a capacity or a capacity_mb, got both; leave one out")
        if self.sweep_above is not None and self.sweep_above_mb is not None:
            raise ValueError("a table may have sweep_above or sweep_above_mb, got both; leave one out")
        for name in (
            "capacity", "capacity_mb", "expire_after_steps", "expire_after_seconds", "sweep_above", "sweep_above_mb",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 1, 2**40)
        _check_positive("expire_below_norm", self.expire_below_norm)
        _check_int("sweep_steps", self.sweep_steps, 1, 2**31)
        for name in ("sweep_weights", "evict_at_snapshot", "timestamps"):
            _check_bool(name, getattr(self, name))
        for name in ("expire_where", "clock"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be a function, got {value!r}")

        by_steps = isinstance(self.evict, StepLRU | MixedLFU) or isinstance(self.evict, LFU) and self.evict.half_life
        expires = self.expire_after_steps is not None or self.expire_after_seconds is not None
        if self.timestamps and (by_steps or expires):
            raise ValueError(
                "timestamps take the place of the step and the second of a row's last use, but this table evicts or"
                f" expires by step or second, got {self}; leave timestamps out"
            )

    @property
    def weighs(self) -> bool:
        """Whether rows may expire because of their weights."""
        return self.expire_below_norm is not None or self.expire_where is not None

    @property
    def sweeps_weights(self) -> bool:
        """Whether sweeps read the weights of rows."""
        return self.sweep_weights and self.weighs

    @property
    def sweeps(self) -> bool:
        """Whether steps sweep the table for rows that have expired."""
        return self.expire_after_steps is not None or self.expire_after_seconds is not None or self.sweeps_weights


def described(policies: Sequence[RowPolicy] | None) -> str:
    """End of a description, ", policies [...]", equal for equal policies; "" for None. For a field that holds a
    function the text has only the words "a function"."""
    if policies is None:
        return ""
    plain = [{field.name: _plain(getattr(policy, field.name)) for field in fields(policy)} for policy in policies]
    return f", policies {plain}"


def _plain(value: object) -> object:
    if isinstance(value, AdmitWhere):
        return f"AdmitWhere(a function, per_lookup={value.per_lookup}, counters={value.counters})"
    return "a function" if callable(value) else value


def rows_instead(
    policies: Sequence[RowPolicy] | None, initial: InitialRows, of: Literal["absent", "refused"]
) -> InitialRows:
    """Values that ids without a row have, for each table: in eval mode ("absent"), or in training mode ("refused").
    `initial` holds the values of new rows."""
    return reads_as(
        [
            policy.refused if of == "refused" and policy.refused is not None else policy.absent
            for policy in policies or ()
        ],
        initial,
    )  # fmt: skip


def reads_as(absent_T: Sequence[Absent], initial: InitialRows) -> InitialRows:
    """Values that ids without a row have, by the `Absent` of each table. `initial` holds the values of new rows."""
    kind_TC, param_TC4 = initial.kind_TC.copy(), initial.param_TC4.copy()
    for t, absent in enumerate(absent_T):
        if absent != "initial":
            kind, params = encoded(ConstantInitializer(0.0) if absent == "zeros" else absent)
            kind_TC[t], param_TC4[t] = kind, [*params, *[0.0] * (4 - len(params))]
    return replace(initial, kind_TC=kind_TC, param_TC4=param_TC4)


def rules_of(policies: Sequence[RowPolicy]) -> ScoreRules:
    """The eviction rules of tables as arrays for loops."""
    tables = len(policies)
    rules = ScoreRules(
        np.zeros(tables, np.int64), np.ones(tables), np.zeros(tables, np.uint64), np.zeros(tables, np.bool_)
    )
    for t, policy in enumerate(policies):
        match policy.evict:
            case None | LRU():
                rules.kind_T[t] = LOOKUP
            case StepLRU():
                rules.kind_T[t] = STEP
            case LFU(half_life):
                rules.kind_T[t] = COUNT if half_life is None else DECAYED
                rules.param_T[t] = 1.0 if half_life is None else half_life
            case MixedLFU(new_power):
                rules.kind_T[t], rules.param_T[t] = MIXED, new_power
            case EpochLRU():
                rules.kind_T[t] = EPOCH_LOOKUP
            case EpochLFU():
                rules.kind_T[t] = EPOCH_COUNT
            case GivenScore(new, on_use):
                rules.kind_T[t], rules.given_T[t], rules.writes_T[t] = GIVEN, new, on_use
    return rules


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be an int from {least} to {most}, got {value!r}")


def _check_bool(name: str, value: object) -> None:
    if type(value) is not bool:
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _check_positive(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be a number above 0, or None, got {value!r}")
