"""Numbers that a loop tells the host, which does not wait for them and copies nothing.

    told_X = (numbers..., 0)       in page-locked memory of the host, whose address is valid on the device
    told_X = (numbers..., 1)       once the loop has written them: first the numbers, then the mark

Invariant: memory that a loop may still write goes to no other loop. It is free again when the host has read the
numbers; where the host never reads them it stays taken. None of it goes back to torch, which would not wait for loops.
"""

import threading

import torch

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import cuda
from oneemb.kernels.launch import Gpu


@cuda.inner
def tell(number_X: Array, told_X: Array) -> None:
    """Tell the host as many numbers as it waits for: none if told_X is empty. One thread of a launch calls this."""
    count = told_X.shape[0] - 1
    for i in range(count):
        told_X[i] = number_X[i]
    if count > 0:
        cuda.threadfence_system()
        told_X[count] = 1


class Later:
    """A few int64 numbers that a loop on the current stream will `tell`. One thread at a time reads them."""

    told_X: torch.Tensor
    """The memory, for the loop."""
    _values: list[int] | None = None

    def __init__(self, gpu: Gpu, size: int):
        self._gpu, self._size, self._stream = gpu, size, gpu.stream_now()
        self._memory = gpu.told(size)
        self.told_X, self._told = self._memory

    def values(self, *, wait: bool = True) -> list[int] | None:
        """The numbers. If they have not come, the host waits for them; with wait=False the result is None."""
        if self._values is None:
            told, size = self._told, self._size
            if not told[size]:
                if not wait:
                    return None
                self._gpu.waits += 1
                self._gpu.wait_for(self._stream)
                assert told[size], "the device has done its work and told no numbers"
            threading.Lock().acquire()  # Its barrier keeps a processor from reading the numbers before the mark.
            self._values = told[:size].tolist()
            self._gpu.give_back(self._memory)
        return self._values
