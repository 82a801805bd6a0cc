"""Initializers of new rows: their options, checked, and the form that loops take."""

import math
from dataclasses import dataclass

from oneemb.kernels import init_rows


@dataclass(frozen=True)
class ConstantInitializer:
    """Each weight of a new row is `value`."""

    value: float

    def __post_init__(self) -> None:
        _check_finite(self, "value")


@dataclass(frozen=True)
class UniformInitializer:
    """Weights of a new row are uniformly distributed between `low` and `high`."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _check_finite(self, "low", "high")
        if self.low > self.high:
            raise ValueError(f"low must not be above high, got low={self.low}, high={self.high}")


@dataclass(frozen=True)
class NormalInitializer:
    """Weights of a new row are normally distributed with this mean and standard deviation."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _check_finite(self, "mean", "std")
        if self.std < 0:
            raise ValueError(f"std must be 0 or more, got {self.std}")


@dataclass(frozen=True)
class TruncNormalInitializer:
    """Weights of a new row are normally distributed with this mean and standard deviation, truncated to the range from
    `a` to `b`."""

    mean: float = 0.0
    std: float = 1.0
    a: float = -2.0
    b: float = 2.0

    def __post_init__(self) -> None:
        _check_finite(self, "mean", "std", "a", "b")
        if self.std <= 0:
            raise ValueError(f"std must be above 0, got {self.std}")
        if self.a >= self.b:
            raise ValueError(f"a must be below b, got a={self.a}, b={self.b}")
        low, high = (normal_cdf((bound - self.mean) / self.std) for bound in (self.a, self.b))
        if high - low < 1e-9:
            raise ValueError(
                f"a normal distribution with mean={self.mean}, std={self.std} hardly ever lies between a={self.a} and"
                f" b={self.b}; move the bounds towards the mean"
            )


@dataclass(frozen=True)
class IdInitializer:
    """Each weight of a new row is the row's id modulo `modulus`, which is never negative."""

    modulus: int = 100_000

    def __post_init__(self) -> None:
        if type(self.modulus) is not int or not 1 <= self.modulus <= 2**24:
            raise ValueError(f"modulus must be an int from 1 to 2**24, got {self.modulus!r}")


Initializer = ConstantInitializer | UniformInitializer | NormalInitializer | TruncNormalInitializer | IdInitializer


def encoded(initializer: Initializer) -> tuple[int, list[float]]:
    """(kind, parameters) of an initializer for `InitialRows`."""
    match initializer:
        case ConstantInitializer(value):
            return init_rows.CONSTANT, [value]
        case UniformInitializer(low, high):
            return init_rows.UNIFORM, [low, high]
        case NormalInitializer(mean, std):
            return init_rows.NORMAL, [mean, std]
        case TruncNormalInitializer(mean, std, a, b):
            return init_rows.TRUNC_NORMAL, [mean, std, *(normal_cdf((bound - mean) / std) for bound in (a, b))]
        case IdInitializer(modulus):
            return init_rows.BY_ID, [float(modulus)]


def largest_weight(initializer: Initializer) -> float:
    """Upper bound of the absolute value of a new row's weights."""
    match initializer:
        case ConstantInitializer(value):
            return abs(value)
        case UniformInitializer(low, high):
            return max(abs(low), abs(high))
        case NormalInitializer(mean, std):
            return abs(mean) + 7 * std  # Weights are drawn from 32 random bits, which give no deviation above 7 * std.
        case TruncNormalInitializer(_, _, a, b):
            return max(abs(a), abs(b))
        case IdInitializer(modulus):
            return float(modulus - 1)


def _check_finite(options: Initializer, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}")
        object.__setattr__(options, name, float(value))


def normal_cdf(x: float) -> float:
    """Probability that a standard normal number is below x."""
    return 0.5 * math.erfc(-x / math.sqrt(2.0))
