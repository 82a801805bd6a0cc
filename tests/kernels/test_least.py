import numpy as np
import pytest

from oneemb.kernels.least import least_of

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
def test_the_least_are_those_that_sorting_finds(kind):
    number_N = NUMBERS[kind](np.random.default_rng(0))
    for count in (1, 2, 40, 50, 1250, 1999, 20_000):
        if count <= len(number_N):
            bound = np.sort(number_N)[count - 1]
            below, equal = least_of(number_N, count)
            assert below.tolist() == np.flatnonzero(number_N < bound).tolist()
            assert equal.tolist() == np.flatnonzero(number_N == bound).tolist()
