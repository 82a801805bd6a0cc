"""Statistics of a comparison: two revisions have sampled in turn, a pair of samples a round.

A round's ratio, new over base, is of two samples that lie side by side in time, so whatever slows the machine for
longer than a round cancels. The median of the ratios passes over rounds in which only one of both was disturbed.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["SLOWER", "Comparison", "compare", "enough", "order", "slower"]

SLOWER = 1.05
"""A case is slower where its whole interval lies above this."""

_RESAMPLES = 4000


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One case on both revisions.

    Args:
        base, new: medians of the samples.
        ratio: median of the rounds' ratios, new over base.
        low, high: interval of the ratio, 95 % by bootstrap over rounds.
    """

    base: float
    new: float
    ratio: float
    low: float
    high: float
    rounds: int


def compare(base: Sequence[float], new: Sequence[float], seed: int = 0) -> Comparison:
    """Medians, the median of the ratios, and its interval.

    Args:
        base, new: the samples of each round, above 0; less is better.
    """
    if len(base) != len(new) or not base:
        raise ValueError(f"both revisions must have a sample of each round, got {len(base)} and {len(new)}")
    if min(*base, *new) <= 0:
        raise ValueError(f"samples must be above 0, got {min(*base, *new)}")
    ratio_R = np.asarray(new, np.float64) / np.asarray(base, np.float64)
    pick = np.random.default_rng(seed).integers(0, len(ratio_R), (_RESAMPLES, len(ratio_R)))
    low, high = np.percentile(np.median(ratio_R[pick], axis=1), (2.5, 97.5))
    return Comparison(
        statistics.median(base),
        statistics.median(new),
        float(np.median(ratio_R)),
        float(low),
        float(high),
        len(ratio_R),
    )


def enough(so_far: Comparison, rounds_min: int, rounds_max: int, width: float) -> bool:
    """Whether no more rounds are needed: the interval is narrow, or there have been as many as there may be.

    Its place does not count: a rule that stopped where the interval first lies above a bound would find it there by
    chance too often.
    """
    return so_far.rounds >= rounds_min and (so_far.high - so_far.low <= width or so_far.rounds >= rounds_max)


def order(turn: int) -> tuple[int, int]:
    """Which revision samples first and which second in a round: ABBA, so that neither always follows the other."""
    return (0, 1) if turn % 2 == 0 else (1, 0)


def slower(first: Comparison, again: Callable[[], Comparison]) -> bool:
    """Whether a case is slower.

    A suspect is measured again, in new processes each time, until two of at most three ratios lie on the same side of
    the bound: two processes of the same code may differ by a tenth for as long as they live, by where their memory
    lies, and no number of rounds shows that.
    """
    if first.low <= SLOWER:
        return False
    above = below = 0
    while max(above, below) < 2:
        is_above = again().ratio > SLOWER
        above, below = above + is_above, below + (not is_above)
    return above == 2
