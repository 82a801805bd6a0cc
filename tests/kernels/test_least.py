import numpy as np
import pytest

from oneemb.kernels.shard_rows import least_of

NUMBERS = {
    "all different": lambda rng: rng.random(20_000),
    "few different": lambda rng: rng.integers(0, 4, 20_000).astype(float),
    "all equal": lambda rng: np.ones(20_000),
    "most are pinned": lambda rng: np.where(rng.random(20_000) < 0.9, np.inf, rng.random(20_000)),
    "the sample is too low": lambda rng: np.where(np.arange(20_000) % 16 == 0, 0, rng.random(20_000)),
    "the sample is too high": lambda rng: np.where(np.arange(20_000) % 16 == 0, 2, rng.random(20_000)),
    "few": lambda rng: rng.random(50),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_the_least_are_those_that_sorting_finds_and_of_equal_ones_those_of_the_least_ties(kind):
    number_N = NUMBERS[kind](np.random.default_rng(0))
    tie_N = np.random.default_rng(1).permutation(len(number_N))
    order_N = np.lexsort((tie_N, number_N))
    for count in (0, 1, 2, 40, 50, 1250, 1999, 20_000, 20_001):
        found = least_of(number_N, count, tie_N.take)
        assert sorted(found.tolist()) == sorted(order_N[:count].tolist())


def test_equal_ones_come_last_in_the_order_of_their_ties():
    number_N, tie_N = np.array([2.0, 1.0, 2.0, 0.0, 2.0, 2.0]), np.array([5, 0, 3, 1, 4, 2])
    assert least_of(number_N, 4, tie_N.take).tolist() == [1, 3, 5, 2]
