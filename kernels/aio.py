"""Linux AIO from one compiled loop: many direct reads in flight, each checked and copied out when it is complete.

    Q read requests, P places, U rows out, K reads in flight, M buffers

The loop keeps K reads in flight by io_submit and io_getevents through libc's syscall(), and checks and copies while the
device reads. Direct reads need memory addresses, offsets and lengths that are multiples of the device's block.
"""

import platform
import sys

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, external
from oneemb.kernels.row_blocks import rows_deliver

# The numbers of io_setup, io_destroy, io_getevents and io_submit.
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
AIO_NUMBERS = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None

# Result of `aio_read` for a block whose checksum differs. Its other results are 0 and negative error numbers.
BAD_BLOCK = 1

_IOCB_WORDS = 8  # struct iocb: data, (key, flags), (opcode, priority, file), address, bytes, offset, 0, (flags, fd)

_EINTR, _EAGAIN, _EINVAL = 4, 11, 22

# If the system accepts no read while none is in flight, it is asked again after 1, 2, 4, ... ms, for a second in all.
_REFUSALS_MAX = 10

_syscall = external("syscall", "int64", ["int64"] * 6)
_errno_place = external("__errno_location", "int32*", [])
_usleep = external("usleep", "int32", ["uint32"])


@cpu
def aio_setup(number: Number, depth: Number, context_1: Array) -> Number:
    """Make a context for `depth` reads in flight. Returns 0 or a negative error number."""
    if _syscall(number, depth, context_1.ctypes.data, 0, 0, 0) < 0:
        return -np.int64(_errno_place()[0])
    return np.int64(0)


@cpu
def aio_destroy(number: Number, context: Number) -> Number:
    """Wait for the reads in flight and destroy the context. Returns a negative number if there is no such context."""
    return _syscall(number, context, 0, 0, 0, 0)


@cpu
def aio_read(
    getevents: Number, submit: Number, context: Number, depth: Number, iocb_MX: Array, event_KX: Array, word_X: Array,
    buffer_words: Number, file_Q: Array, offset_Q: Array, bytes_Q: Array, block_Q: Array, first_Q: Array,
    place_P: Array, to_P: Array, rows_per_block: Number, block_words: Number, sum_B: Array, out_UW: Array,
    failed_4: Array,
) -> Number:  # fmt: skip
    """Read all requests and copy their rows out. No read is in flight afterwards, unless io_getevents itself fails.

    Request q reads bytes_Q[q] bytes at offset_Q[q] of the file descriptor file_Q[q]; `row_blocks` explains block_Q,
    first_Q, place_P, to_P, sum_B and out_UW. Buffer m begins at word_X[m * buffer_words]. There are twice as many
    buffers as reads in flight: the loop submits the next reads before it checks and copies complete ones, so that the
    device never waits.

    Returns 0; or BAD_BLOCK with failed_4 = (request, p, buffer, 0), where place_P[p] is in the damaged block; or a
    negative error number with failed_4[0] = request: -EAGAIN if the system accepts no read although none is in flight.
    failed_4[3] reads are still in flight, and may write into `word_X` until the context is destroyed.
    """
    requests, buffers = len(file_Q), len(iocb_MX)
    base = word_X.ctypes.data
    free_M, request_M = np.empty(buffers, np.int64), np.empty(buffers, np.int64)
    for m in range(buffers):
        free_M[m] = m
    free = buffers
    ready_K, landed_K = np.empty(depth, np.int64), np.empty(depth, np.int64)
    prepared = ready = in_flight = landed = 0  # `ready` reads are prepared and not yet accepted by the system
    refused = 0  # times in a row that the system accepted none
    result = np.int64(0)
    while True:
        while in_flight + ready < depth and prepared < requests and result == 0:
            free -= 1
            m = free_M[free]
            request_M[m] = prepared
            iocb_MX[m, 0] = m
            iocb_MX[m, 1] = 0
            iocb_MX[m, 2] = np.int64(file_Q[prepared]) << 32  # opcode 0 is a read, the file is the upper half
            iocb_MX[m, 3] = base + 8 * buffer_words * m
            iocb_MX[m, 4] = bytes_Q[prepared]
            iocb_MX[m, 5] = offset_Q[prepared]
            iocb_MX[m, 6] = 0
            iocb_MX[m, 7] = 0
            ready_K[ready] = iocb_MX.ctypes.data + 8 * _IOCB_WORDS * m
            ready += 1
            prepared += 1
        if ready > 0 and result == 0:
            taken = _syscall(submit, context, ready, ready_K.ctypes.data, 0, 0)
            error = _errno_place()[0] if taken < 0 else _EAGAIN
            taken = max(taken, 0)
            refused = 0 if taken > 0 or in_flight > 0 else refused + 1
            if taken == 0 and ((error != _EAGAIN and error != _EINTR) or refused > _REFUSALS_MAX):
                result = -np.int64(error)
                failed_4[0] = prepared - ready
            in_flight += taken
            ready -= taken
            for i in range(ready):
                ready_K[i] = ready_K[i + taken]
        for i in range(landed):
            m = landed_K[i]
            q = request_M[m]
            if result == 0:
                p = rows_deliver(
                    word_X, buffer_words * m, block_Q[q], place_P, to_P, first_Q[q], first_Q[q + 1],
                    rows_per_block, block_words, sum_B, out_UW,
                )  # fmt: skip
                if p < first_Q[q + 1]:
                    # No read is prepared from now on, so that nothing overwrites the buffer.
                    result = np.int64(BAD_BLOCK)
                    failed_4[0] = q
                    failed_4[1] = p
                    failed_4[2] = m
            free_M[free] = m
            free += 1
        landed = 0
        if in_flight == 0:
            if result != 0 or ready == 0:
                break
            if refused > 0:  # The system's limit is reached; other processes may end their reads.
                _usleep(np.uint32(1000 << (refused - 1)))
            continue
        # Waiting for several reads at once saves system calls; the last reads are waited for one by one.
        least = min(max(1, depth // 8), in_flight)
        events = _syscall(getevents, context, least, depth, event_KX.ctypes.data, 0)
        if events <= 0:
            error = _errno_place()[0] if events < 0 else _EINVAL
            if error == _EINTR:
                continue
            failed_4[0] = request_M[m]
            failed_4[3] = in_flight
            return -np.int64(error)
        in_flight -= events
        landed = events
        for e in range(events):
            m = event_KX[e, 0]
            q = request_M[m]
            landed_K[e] = m
            if event_KX[e, 2] < 0 and result == 0:
                result = event_KX[e, 2]
                failed_4[0] = q
            # A short read leaves old bytes in the buffer, which might pass their checksums: they are zeroed.
            for w in range(max(0, event_KX[e, 2]) // 8, bytes_Q[q] // 8):
                word_X[buffer_words * m + w] = 0
    return result
