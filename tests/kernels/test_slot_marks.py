import numpy as np
import pytest

from oneemb.kernels.slot_marks import add_pins, share_counts
from oneemb.kernels.threads import Threads


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("size", [0, 1, 7, 65_536, 65_539, 500_001])
def test_pinned_slots_are_counted_as_pins_come_and_go(size, count):
    rng, threads = np.random.default_rng(size), Threads(count)
    pin_S, pinned_X = np.zeros(size + 10, np.int32), share_counts(threads)
    for pins in (1, 2, 1, -1, -2, 1, -1, -1):
        slot_U = rng.permutation(size + 10)[:size]
        slot_U = np.where((rng.random(size) < 0.1) | (pin_S[slot_U] + pins < 0), -1, slot_U)
        expected_S = pin_S.copy()
        expected_S[slot_U[slot_U >= 0]] += pins
        add_pins(pin_S, slot_U, pins, pinned_X, threads=threads)
        assert (pin_S == expected_S).all() and pinned_X.sum() == np.count_nonzero(expected_S)
