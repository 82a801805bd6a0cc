"""Free slots: a stack of the slots that were given back, and the slots that were never used.

    slot_N = free.reserve(n)     the next n free slots: a copy, so that they are still free
    ...                          write rows into them, put their keys into an index: all of that may fail
    free.commit(n)               now they are taken

Invariants:
- `commit` and `give_back` need no memory and cannot fail: the stack has room for every slot that was ever used;
- `reserve` changes nothing that `commit`, `give_back` or another `reserve` sees;
- every slot below `used` is taken or on the stack, once, and no slot is given out that is not there.
"""

from collections.abc import Callable

import numpy as np

from oneemb.kernels.arrays import Array

__all__ = ["FreeSlots"]

_STACK_MIN = 1024


class FreeSlots:
    """The free slots of a tier.

    Args:
        arange: makes an array of the numbers 0 to size - 1, int64, where slots are needed: on the host or on a GPU.
    """

    def __init__(self, arange: Callable[[int], Array]):
        self._arange = arange
        self.stack_X: Array = arange(0)
        """The memory of the stack: int64."""
        self._top = 0
        self.used = 0
        """Slots from here on were never used."""

    @property
    def returned(self) -> int:
        """How many slots are on the stack."""
        return self._top

    @property
    def returned_N(self) -> Array:
        """The slots on the stack: int64, a view that is good until the next call."""
        return self.stack_X[: self._top]

    def fresh(self, size: int) -> int:
        """How many of the next `size` free slots were never used."""
        return max(0, size - self._top)

    def reserve(self, size: int, slots: int) -> Array:
        """The next `size` free slots, int64 [size], those given back last first. They stay free until `commit`.

        Args:
            slots: how many slots there are now.

        Raises:
            MemoryError, torch.OutOfMemoryError: there is no memory for them; nothing has changed.
        """
        fresh = self.fresh(size)
        if self.used + fresh > slots:
            raise AssertionError(
                f"{size} slots were asked for, {self._top} were given back and {slots - self.used} of {slots} were"
                " never used: slots were lost"
            )
        self.make_stack(self.used + fresh)
        slot_N = self._arange(size)
        slot_N += self.used - (size - fresh)
        slot_N[: size - fresh] = self.stack_X[self._top - (size - fresh) : self._top]
        return slot_N

    def make_stack(self, need: int) -> None:
        """Have a stack for this many slots, and for some more to come."""
        if need > len(self.stack_X):
            grown_X = self._arange(max(need, 2 * len(self.stack_X), _STACK_MIN))
            grown_X[: self._top] = self.stack_X[: self._top]
            self.stack_X = grown_X

    def commit(self, size: int) -> None:
        """Take the slots that the last `reserve`, of this size, has given."""
        fresh = self.fresh(size)
        self.used += fresh
        self._top -= size - fresh

    def give_back(self, slot_N: Array) -> None:
        """Free slots that are taken."""
        top = self._top + len(slot_N)
        self.stack_X[self._top : top] = slot_N
        self._top = top

    def clear(self) -> None:
        """Free all slots, as if none was ever used."""
        self._top = self.used = 0

    def problems(self, name: str, taken_N: np.ndarray, returned_N: np.ndarray, lent: int) -> list[str]:
        """Slots that were lost, or that several rows have, in words; empty if there are none.

        Args:
            name: of the tier.
            taken_N: the slots of the keys in the tier's index: int64.
            returned_N: `returned_N`, on the host.
            lent: how many slots hold temporary rows, which are in no index.
        """
        found = []
        if self.used != len(taken_N) + len(returned_N) + lent:
            found.append(
                f"the {name} tier has used {self.used} slots; {len(taken_N)} are in its index, {len(returned_N)} are"
                f" free and {lent} hold temporary rows"
            )
        slot_N = np.concatenate([taken_N, returned_N])
        if len(np.unique(slot_N)) < len(slot_N) or (slot_N >= self.used).any():
            found.append(f"the {name} tier has given out slots twice, or slots beyond the {self.used} that it has used")
        return found
