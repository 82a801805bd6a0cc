"""The user's rules for the rows that a table keeps, checked.

`RowPolicy` is of one table. `kernels/score_rows.py` has the rules by which a use changes a row's score, and `usage.py`
finds the rows that are to leave.
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
    """Rows that were not looked up for longest leave first."""


@dataclass(frozen=True)
class StepLRU:
    """Rows that were not looked up for most steps leave first; those of one step are equal."""


@dataclass(frozen=True)
class LFU:
    """Rows that were looked up least often leave first.

    Args:
        half_life: steps in which a use comes to count half as much; None = uses count for ever.
    """

    half_life: float | None = None

    def __post_init__(self) -> None:
        _check_positive("half_life", self.half_life)
        if self.half_life is not None and not 1e-3 <= self.half_life <= 1e15:
            raise ValueError(f"half_life must be from 0.001 to 1e15 steps, got {self.half_life!r}")


@dataclass(frozen=True)
class MixedLFU:
    """Rows that were looked up least often leave first, and of those looked up about as often the oldest ones.

    How often is known to a power of two, as TorchRec's dynamic embedding has it (`mixed_lru_lfu`).

    Args:
        new_power: the power of a new row.
    """

    new_power: int = 5

    def __post_init__(self) -> None:
        if type(self.new_power) is not int or not 0 <= self.new_power <= 31:
            raise ValueError(f"new_power must be an int from 0 to 31, got {self.new_power!r}")


@dataclass(frozen=True)
class EpochLRU:
    """Rows of old epochs leave first, of these those that were not looked up for longest. See `set_epoch`."""


@dataclass(frozen=True)
class EpochLFU:
    """Rows of old epochs leave first, of these those that were looked up least often. See `set_epoch`."""


@dataclass(frozen=True)
class GivenScore:
    """Rows of the least score leave first, which is what `set_scores` says.

    Args:
        new: the score of new rows, 0 to 2^64 - 1.
        on_use: whether a lookup gives its rows that score again, rather than new ones alone.
    """

    new: int = 0
    on_use: bool = False

    def __post_init__(self) -> None:
        if type(self.new) is not int or not 0 <= self.new < 2**64:
            raise ValueError(f"new must be a score, an int from 0 to 2**64 - 1, got {self.new!r}")
        _check_bool("on_use", self.on_use)


@dataclass(frozen=True)
class AdmitAfter:
    """An id gets a row when it has been seen so often, in lookups in training mode; the row begins then.

    Args:
        sightings: ids of lookups that are equal, this lookup's among them.
        per_lookup: whether a lookup counts once, however many of its ids are equal.
        counters: ids of the table whose sightings are counted at most. Those that were not seen for longest are
            forgotten first, nearly, a sixteenth of those looked at at a time, as rows leave by `LRU`.
        sketch_width: None = counts are exact; else they are in a count-min sketch of 4 rows of this width, 16 bytes of
            memory for each, and `counters` has no effect. A sketch never counts too few, so that no row begins late;
            with probability 1 - e^-4 a count is too large by less than e / sketch_width of all sightings of ids that
            had no row, which nothing takes out again.
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
    """A lookup gives an id without a row one with a probability, a pure function of seed, key and the lookup's number.

    Args:
        probability: above 0, 1 at most, whatever number of the lookup's ids are equal.
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
    """An id gets a row where a function says so.

    Args:
        function: `function(table, ids, counts)`, of int, int64 [N] and int64 [N] arrays: distinct ids that have no row,
            and their sightings, this lookup's among them. Gives bool [N]. It must not call the embedding.
        per_lookup, counters: as of `AdmitAfter`.
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
    """Rules for the rows that a table keeps.

    Args:
        evict: which rows leave where there would be more than `capacity`, or than the store's; None = none, a full
            table or store is a StoreFullError. Tables that share the store's capacity evict by one rule. Where there is
            no capacity, rows get scores by this rule, and none leaves.
        capacity: rows of the table at most; None = no limit but the store's. Some more than needed leave at a time, a
            sixteenth of it at most.
        capacity_mb: the same in MiB of rows, optimizer state included; None = no limit. One of both at most.
        expire_after_steps: rows that were not looked up for more steps than this leave; None = none.
        expire_after_seconds: rows that were not looked up for longer leave, whole seconds; None = none.
        expire_below_norm: rows whose weights have an L2 norm below this leave; None = none.
        expire_where: `expire_where(table, ids, weights)`, of int, int64 [N] and float32 [N, D] arrays, says by bool
            [N] which rows leave; None = none. It must not call the embedding.
        sweep_steps: in so many steps every row is looked at once, whether it has expired by steps or seconds, 256th by
            256th of them; of several tables the least holds for all. So a table holds the rows of the last
            `expire_after_steps + sweep_steps` steps at most. `embedding.evict()` looks at all of them, at norms and
            `expire_where` too.
        sweep_weights: whether sweeps look at norms and `expire_where` too, which reads the weights of rows.
        sweep_above_mb: sweeps pass over the table's rows until they take more MiB than this, optimizer state included,
            wherever they are; None = they never do.
        sweep_above: the same in rows. One of both at most.
        evict_at_snapshot: whether rows of the table that have expired, by whatever, leave before a snapshot is saved.
        clock: what gives seconds, the same for all tables; None = `time.monotonic`.
        admit: which ids get a row; None = all that are looked up in training mode. Gradients of those that get none
            are dropped.
        absent: what ids without a row read as in eval mode: "initial" = as they would begin, "zeros", or as one of
            `oneemb.make_*_initializer` says.
        refused: what ids read as in training that get no row: likewise; None = as `absent` says.
        timestamps: whether a row notes when it was used last in nanoseconds, in place of the step and the second: where
            no table expires by these, and no rule of `evict` asks for steps. The same for all tables of an embedding.
        when_full: what becomes of ids of a lookup that cannot all have rows at a time, since `capacity` is less, or no
            row may leave: "raise" a StoreFullError, or "refuse" those that come last in the lookup a row.

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
            raise ValueError('when_full="refuse" is of tables with a capacity or a capacity_mb; give one')
        if self.capacity is not None and self.capacity_mb is not None:
            raise ValueError("a table has a capacity or a capacity_mb, got both")
        if self.sweep_above is not None and self.sweep_above_mb is not None:
            raise ValueError("a table has sweep_above or sweep_above_mb, got both")
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
                "timestamps take the place of the step and the second of a row's last use, by which this table evicts"
                f" or expires; leave them out, got {self}"
            )

    @property
    def weighs(self) -> bool:
        """Whether rows leave by their weights."""
        return self.expire_below_norm is not None or self.expire_where is not None

    @property
    def sweeps_weights(self) -> bool:
        """Whether steps look at rows' weights."""
        return self.sweep_weights and self.weighs

    @property
    def sweeps(self) -> bool:
        """Whether steps look for rows that have expired."""
        return self.expire_after_steps is not None or self.expire_after_seconds is not None or self.sweeps_weights


def described(policies: Sequence[RowPolicy] | None) -> str:
    """Text of policies, equal for equal policies. Of a function it says only that there is one."""
    if policies is None:
        return ""
    plain = [{field.name: _plain(getattr(its, field.name)) for field in fields(its)} for its in policies]
    return f", policies {plain}"


def _plain(value: object) -> object:
    if isinstance(value, AdmitWhere):
        return f"AdmitWhere(a function, per_lookup={value.per_lookup}, counters={value.counters})"
    return "a function" if callable(value) else value


def rows_instead(
    policies: Sequence[RowPolicy] | None, initial: InitialRows, of: Literal["absent", "refused"]
) -> InitialRows:
    """Values read for ids without a row, or for ids that are refused one; `initial` holds the values of new rows."""
    return reads_as(
        [
            policy.refused if of == "refused" and policy.refused is not None else policy.absent
            for policy in policies or ()
        ],
        initial,
    )  # fmt: skip


def reads_as(said_T: Sequence[Absent], initial: InitialRows) -> InitialRows:
    """Values read for ids of each table, by the table's `Absent`; `initial` holds the values of new rows."""
    kind_TC, param_TC4 = initial.kind_TC.copy(), initial.param_TC4.copy()
    for t, said in enumerate(said_T):
        if said != "initial":
            kind, params = encoded(ConstantInitializer(0.0) if said == "zeros" else said)
            kind_TC[t], param_TC4[t] = kind, [*params, *[0.0] * (4 - len(params))]
    return replace(initial, kind_TC=kind_TC, param_TC4=param_TC4)


def rules_of(policies: Sequence[RowPolicy]) -> ScoreRules:
    """Rules by which uses change the scores of rows, for loops."""
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
