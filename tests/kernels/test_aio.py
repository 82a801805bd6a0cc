"""The loop of direct reads where the system refuses: it always ends, and says what it leaves in flight."""

import ctypes
import os
import platform
import threading

import numpy as np
import pytest

from oneemb.kernels.aio import AIO_NUMBERS, aio_destroy, aio_read, aio_setup
from oneemb.kernels.checksum import blocks_sum
from oneemb.storage.fs import aligned_bytes

BLOCK, BLOCKS, DEPTH = 512, 40, 8
NO_CALL = -1  # of a call that the system does not have
GIVES_ZERO = {"x86_64": 24, "aarch64": 124}.get(platform.machine())  # sched_yield
EAGAIN, ENOSYS, EINVAL = 11, 38, 22
EVENT_WORDS, IOCB_WORDS = 4, 8

pytestmark = pytest.mark.skipif(AIO_NUMBERS is None, reason="this system has no Linux AIO")


@pytest.fixture
def reads(tmp_path):
    """A file of blocks, and the call that reads all of them."""
    made = Reads(tmp_path / "blocks")
    yield made
    made.close()


class Reads:
    def __init__(self, path):
        self.data = np.random.default_rng(0).integers(0, 256, BLOCKS * BLOCK, np.uint8)
        path.write_bytes(self.data.tobytes())
        self.file = os.open(path, os.O_RDONLY)
        self.memory = aligned_bytes(2 * DEPTH * BLOCK)
        self.context = context()

    def read(self, *, submit=None, getevents=None, at=None):
        """(what the loop gives, what failed, the blocks); the loop runs on a thread that is not waited for for ever."""
        n, out_UW = np.arange(BLOCKS), np.zeros((BLOCKS, BLOCK // 4), np.uint32)
        sum_B, failed_4, found = np.empty(BLOCKS, np.uint32), np.zeros(4, np.int64), []
        aligned = aligned_bytes(len(self.data))
        aligned[:] = self.data
        blocks_sum(0, BLOCKS, aligned.view(np.uint64), BLOCK // 8, sum_B)

        def run():
            result = aio_read(
                getevents or AIO_NUMBERS[2], submit or AIO_NUMBERS[3], self.context if at is None else at, DEPTH,
                np.zeros((2 * DEPTH, IOCB_WORDS), np.int64), np.zeros((DEPTH, EVENT_WORDS), np.int64),
                self.memory.view(np.uint64), BLOCK // 8, np.full(BLOCKS, self.file), n * BLOCK,
                np.full(BLOCKS, BLOCK), n, np.arange(BLOCKS + 1), n, n, 1, BLOCK // 8, sum_B, out_UW, failed_4,
            )  # fmt: skip
            found.append(result)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(600)
        assert found, "the loop has not ended"
        return found[0], failed_4.tolist(), out_UW

    def close(self):
        aio_destroy(AIO_NUMBERS[1], self.context)
        os.close(self.file)


def context():
    context_1 = np.zeros(1, np.int64)
    assert aio_setup(AIO_NUMBERS[0], DEPTH, context_1) == 0
    return int(context_1[0])


def test_every_block_is_read(reads):
    result, _, out_UW = reads.read()
    assert result == 0 and out_UW.tobytes() == reads.data.tobytes()


@pytest.mark.parametrize("getevents, error", [(NO_CALL, ENOSYS), (GIVES_ZERO, EINVAL)])
def test_reads_that_cannot_be_waited_for_are_counted_and_end_with_their_context(reads, getevents, error):
    result, failed_4, _ = reads.read(getevents=getevents)
    assert result == -error and failed_4[3] == DEPTH
    assert aio_destroy(AIO_NUMBERS[1], reads.context) == 0, "what is in flight is waited for"
    reads.context = context()
    result, _, out_UW = reads.read()
    assert result == 0 and out_UW.tobytes() == reads.data.tobytes()


def test_a_context_that_the_system_does_not_know_leaves_nothing_in_flight(reads):
    result, failed_4, _ = reads.read(at=4096)
    assert result == -EINVAL and failed_4[3] == 0
    assert aio_destroy(AIO_NUMBERS[1], 4096) < 0


def test_a_system_that_takes_no_read_is_not_asked_for_ever(reads):
    result, failed_4, _ = reads.read(submit=GIVES_ZERO)
    assert result == -EAGAIN and failed_4[0] == 0 and failed_4[3] == 0


def test_a_context_that_is_full_of_what_nobody_collects_is_not_asked_for_ever(reads):
    fill(reads)
    result, failed_4, _ = reads.read()
    assert result == -EAGAIN and failed_4[0] == 0 and failed_4[3] == 0


def fill(reads):
    """Read through the context of `reads` until it takes no more, and collect nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory, iocb = aligned_bytes(BLOCK), np.zeros(IOCB_WORDS, np.int64)
    iocb[2:6] = reads.file << 32, memory.ctypes.data, BLOCK, 0
    one = np.array([iocb.ctypes.data])
    for _ in range(1 << 16):
        taken = libc.syscall(*map(ctypes.c_long, (AIO_NUMBERS[3], reads.context, 1, one.ctypes.data)))
        if taken < 1:
            assert ctypes.get_errno() == EAGAIN
            return
    raise AssertionError("the context never fills up")
