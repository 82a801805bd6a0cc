"""Free slots: a stack of the slots that were given back, and the slots that were never used.

    slot_N = free.reserve(n, slots)     the next n free slots; they stay free
    ...                                 write rows into them and put their keys into an index; these lines may fail
    free.commit(n)                      takes the slots

Invariants:
- `commit` and `give_back` need no memory and cannot fail: the stack has room for every slot that was ever used;
- `reserve` changes nothing that `commit`, `give_back` or another `reserve` sees;
- every slot below `used` is either taken or on the stack, once, and no slot beyond the slab is given out.
"""

from collections.abc import Callable

import numpy as np

from oneemb.kernels.arrays import Array

_STACK_MIN = 1024


def _empty(size: int) -> np.ndarray:
    return np.empty(size, np.int64)


class FreeSlots:
    """The free slots of a tier.

    Args:
        arange: function that makes an array of 0 to size - 1, int64 [size], in the tier's place.
        empty: function that makes an array of int64 [size], not initialized, in the tier's place. `arange`
            would write the whole stack, which takes as long as several steps in a large tier.
    """

    def __init__(self, arange: Callable[[int], Array] = np.arange, empty: Callable[[int], Array] = _empty):
        self._arange, self._empty = arange, empty
        self.stack_X: Array = empty(0)
        """The stack, int64: the first `returned` entries are free slots, the other entries are unused."""
        self.room = 0
        """Length of `stack_X`, which takes less time to read here."""
        self.returned = 0
        """Number of slots on the stack."""
        self.used = 0
        """Number of slots that have ever been taken. Slot `used` and all after it are new."""

    @property
    def returned_N(self) -> Array:
        """The slots on the stack: int64, a view that is valid until the next call."""
        return self.stack_X[: self.returned]

    def left(self, slots: int) -> int:
        """Number of free slots in a slab of `slots` slots."""
        return slots - self.used + self.returned

    def fresh(self, size: int) -> int:
        """Number of new slots among the next `size` free ones; a new slot has never been taken."""
        return max(0, size - self.returned)

    def reserve(self, size: int, slots: int) -> Array:
        """The next `size` free slots of a slab of `slots`, int64: first slots on the stack, then new ones. All stay
        free until `commit`. A memory error has changed nothing."""
        if size > self.left(slots):
            raise AssertionError(
                f"at least {size} slots must be free, {self.left(slots)} of {slots} are ({self.returned} of them were"
                " given back): slots were lost"
            )
        fresh = self.fresh(size)
        self.make_stack(self.used + fresh)
        slot_N = self._arange(size)
        slot_N += self.used - (size - fresh)
        slot_N[: size - fresh] = self.stack_X[self.returned - (size - fresh) : self.returned]
        return slot_N

    def make_stack(self, need: int) -> None:
        """Make room on the stack for `need` slots or more."""
        if need > len(self.stack_X):
            grown_X = self._empty(max(need, 2 * len(self.stack_X), _STACK_MIN))
            grown_X[: self.returned] = self.stack_X[: self.returned]
            self.stack_X, self.room = grown_X, len(grown_X)

    def commit(self, size: int) -> None:
        """Take the slots that the last `reserve` returned; `size` is their number."""
        fresh = self.fresh(size)
        self.used += fresh
        self.returned -= size - fresh

    def give_back(self, slot_N: Array) -> None:
        """Put taken slots onto the stack, which frees them."""
        top = self.returned + len(slot_N)
        self.stack_X[self.returned : top] = slot_N
        self.returned = top

    def clear(self) -> None:
        """Free all slots; all are new again."""
        self.returned = self.used = 0

    def problems(self, name: str, taken_N: np.ndarray, returned_N: np.ndarray, temporary: int) -> list[str]:
        """One text for each fault: slots that were lost, slots with several rows. Empty if there is none.

        Args:
            taken_N, returned_N: slots of the keys in the tier's index, and those on the stack, on the host.
            temporary: number of slots with temporary rows, which are in no index.
        """
        found = []
        if self.used != len(taken_N) + len(returned_N) + temporary:
            found.append(
                f"the {name} tier has used {self.used} slots; {len(taken_N)} are in its index, {len(returned_N)} are"
                f" free and {temporary} hold temporary rows"
            )
        slot_N = np.concatenate([taken_N, returned_N])
        if len(np.unique(slot_N)) < len(slot_N) or (slot_N >= self.used).any():
            found.append(f"the {name} tier has given out slots twice, or slots beyond the {self.used} that it has used")
        return found
