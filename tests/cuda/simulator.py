"""Numba's simulator with threads that wait: it makes the threads of a block anew for each block and polls them.

The poll holds the interpreter, so that each `syncthreads` takes as long as Python leaves a thread alone, 5 ms. Here the
last thread that arrives wakes the launch, and threads are kept from block to block. All threads of a block still run at
the same time.
"""

import os
import sys
import threading

import numpy as np
from numba.cuda.simulator import kernel, kernelapi

_idle = []
os.register_at_fork(after_in_child=_idle.clear)  # A child of fork has none of these threads.


def install():
    """Have every later launch of this process run by these threads."""
    kernel.BlockManager = _Blocks
    kernelapi.FakeCUDAShared.array = _shared_array


class _Blocks(kernel.BlockManager):
    def run(self, grid_point, *args):
        places = list(np.ndindex(*self._block_dim))
        threads = [_idle.pop() if _idle else _Thread() for _ in places]
        self.guard, self.arrived, self.failure = threading.Lock(), threading.Semaphore(0), None
        self.running = len(threads)
        for thread, place in zip(threads, places, strict=True):
            thread.begin(self, grid_point, place, args)
        left = threads
        while left:
            self.arrived.acquire()
            left = [thread for thread in left if thread.blocked]
            self.running = len(left)
            for thread in left:
                thread.blocked = False
                thread.go.release()
        _idle.extend(threads)
        if self.failure is not None:
            raise self.failure

    def arrive(self):
        """Called by each thread of the block that waits or has ended."""
        with self.guard:
            self.running -= 1
            if self.running == 0:
                self.arrived.release()


class _Thread(kernel.BlockThread):
    """A thread of the machine that is a CUDA thread of one block after the other."""

    def __init__(self):
        threading.Thread.__init__(self, daemon=True)
        self.go, self.blocked = threading.Semaphore(0), False
        self.start()

    def begin(self, manager, block, place, args):
        self._manager, self._arguments = manager, args
        self.blockIdx, self.threadIdx = kernelapi.Dim3(*block), kernelapi.Dim3(*place)
        size = kernelapi.Dim3(*manager._block_dim)
        self.thread_id = self.threadIdx.x + size.x * (self.threadIdx.y + size.y * self.threadIdx.z)
        self.go.release()

    def run(self):
        while True:
            self.go.acquire()
            manager = self._manager
            try:
                manager._f(*self._arguments)
            except BaseException as error:
                error.add_note(f"in thread {self.threadIdx} of block {self.blockIdx}")
                manager.failure = manager.failure or error
            self._manager = self._arguments = None
            manager.arrive()

    def syncthreads(self):
        self._stop_after_a_failure()
        self.blocked = True
        self._manager.arrive()
        self.go.acquire()
        self._stop_after_a_failure()

    def _stop_after_a_failure(self):
        if self._manager.failure is not None:
            raise RuntimeError("another thread of the block has failed")


def _shared_array(self, shape, dtype, alignment=None):
    """The block's array of the line that asks. Numba finds the line in the text of the whole stack."""
    frame = sys._getframe(1)
    place = frame.f_code.co_filename, frame.f_lineno
    with _shared:
        if place not in self._allocations:
            self._allocations[place] = np.empty(shape, dtype)
        return self._allocations[place]


_shared = threading.Lock()
