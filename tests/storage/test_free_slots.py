"""Free slots against a set: what is reserved, committed and given back, in any order."""

import numpy as np
import pytest

from oneemb.storage.tiers.free_slots import FreeSlots


def test_slots_are_given_out_once_until_they_come_back(seed):
    rng = np.random.default_rng(seed)
    free, taken = FreeSlots(), set()
    for _ in range(400):
        if rng.random() < 0.6:
            size = int(rng.integers(0, min(40, 5000 - len(taken)) + 1))
            first = free.reserve(size, 5000)
            assert (free.reserve(size, 5000) == first).all(), "what is only reserved stays free"
            free.commit(size)
            slots = set(first.tolist())
            assert len(slots) == size and not slots & taken and slots <= set(range(5000))
            taken |= slots
        else:
            back = rng.permutation(sorted(taken))[: rng.integers(0, 60)]
            free.give_back(back)
            taken -= set(back.tolist())
        assert free.used == len(taken) + free.returned
        assert not free.problems("host", np.array(sorted(taken), np.int64), free.returned_N, 0)


def test_slots_given_back_are_used_before_new_ones():
    free = FreeSlots()
    free.reserve(6, 10)
    free.commit(6)
    free.give_back(np.array([1, 4]))
    assert set(free.reserve(3, 10).tolist()) == {1, 4, 6} and free.used == 6


def test_slots_beyond_the_slab_are_refused():
    free = FreeSlots()
    free.reserve(3, 10)
    free.commit(3)
    with pytest.raises(AssertionError, match="slots were lost"):
        free.reserve(2, 4)


@pytest.mark.parametrize(
    ("taken", "returned", "temporary"), [([0, 1], [], 0), ([0, 0, 2], [], 0), ([0, 1, 7], [], 0)],
    ids=["lost", "twice", "beyond"],
)  # fmt: skip
def test_lost_slots_are_told(taken, returned, temporary):
    free = FreeSlots()
    free.reserve(3, 10)
    free.commit(3)
    assert free.problems("host", np.array(taken), np.array(returned, np.int64), temporary)


class Short:
    """Memory that is gone from its n-th use on."""

    def __init__(self, n):
        self.n = n

    def arange(self, size):
        return self.empty(size) + np.arange(size)

    def empty(self, size):
        self.n -= 1
        if self.n < 0:
            raise MemoryError
        return np.zeros(size, np.int64)


def test_giving_back_needs_no_memory():
    memory = Short(100)
    free = FreeSlots(memory.arange, memory.empty)
    slot_N = free.reserve(3000, 5000)
    free.commit(3000)
    stack_X, memory.n = free.stack_X, 0
    free.give_back(slot_N)
    assert free.returned == 3000 and free.stack_X is stack_X
    with pytest.raises(MemoryError):
        free.reserve(10, 5000)
    assert (free.used, free.returned) == (3000, 3000)
