"""Both ways of reading blocks: in children of fork, after calls that failed or were interrupted, and refused ones."""

import ctypes
import errno
import os
import threading

import numpy as np
import pytest

from oneemb.kernels.aio import AIO_NUMBERS
from oneemb.kernels.checksum import blocks_sum
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import LocalFileSystem, aligned_bytes, storage_error
from oneemb.storage.table import aio_reader
from oneemb.storage.table.aio_reader import open_reader
from oneemb.storage.table.block_reader import PreadReader, plan_reads
from oneemb.storage.table.geometry import Geometry
from tests.support.forks import ended_well, in_child

APART = 12  # blocks from one read to the next: too far to be read together
READS = 200
GEOMETRY = Geometry(128, 512, 64)
NO_CALL = -1  # the number of a call that the system does not have


@pytest.fixture(params=["aio", "pread"])
def reader(request, tmp_path):
    try:
        made = open_reader(request.param, LocalFileSystem(), str(tmp_path), 512, Threads(2))
    except StorageError:
        pytest.skip("this file system has no direct reads by Linux AIO")
    yield made
    made.close()


@pytest.fixture
def blocks(tmp_path):
    """A file of blocks and, in `read`, those that begin at one of them, APART from each other."""
    made = Blocks(tmp_path / "blocks")
    yield made
    os.close(made.file)


class Blocks:
    def __init__(self, path):
        size = (READS + 1) * APART
        self.data = aligned_bytes(size * 512)
        self.data[:] = np.random.default_rng(0).integers(0, 256, len(self.data), np.uint8)
        path.write_bytes(self.data.tobytes())
        self.file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        self.sum_B = np.empty(size, np.uint32)
        blocks_sum(0, size, self.data.view(np.uint64), GEOMETRY.block_words, self.sum_B)

    def read(self, reader, first, file=None):
        """Read with `reader`; whether every bit is that of the file."""
        place_P = first + np.arange(READS) * APART
        plan, out_UW = plan_reads(GEOMETRY, place_P, np.arange(READS)), np.zeros((READS, 128), np.float32)
        assert len(plan.block_Q) == READS
        file_Q = np.full(READS, self.file if file is None else file)
        reader.read(plan, file_Q, plan.block_Q * 512, self.sum_B, out_UW)
        return out_UW.tobytes() == self.data.reshape(-1, 512)[place_P].tobytes()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_fork_reads_beside_its_parent(reader, blocks):
    assert blocks.read(reader, 0)
    child = in_child(lambda: all(blocks.read(reader, n % APART) for n in range(60)))
    assert all(blocks.read(reader, n % APART) for n in range(5, 65))
    assert ended_well(child) is True
    assert blocks.read(reader, 3)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_closes_a_reader_closes_its_own(reader, blocks):
    assert blocks.read(reader, 0)

    def close():
        reader.close()
        return True

    def read_and_close():
        return blocks.read(reader, 1) and close()

    assert ended_well(in_child(close)) is True
    assert ended_well(in_child(read_and_close)) is True
    assert blocks.read(reader, 2)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_a_child_reads(reader, blocks):
    assert blocks.read(reader, 0)

    def read_and_fork():
        return blocks.read(reader, 1) and ended_well(in_child(lambda: blocks.read(reader, 2)), 30)

    assert ended_well(in_child(read_and_fork)) is True


@pytest.mark.parametrize("destroyed", [True, False], ids=["context ends", "context is lost"])
def test_memory_of_reads_that_nobody_can_wait_for_is_not_used_again(tmp_path, blocks, monkeypatch, destroyed):
    try:
        reader = open_reader("aio", LocalFileSystem(), str(tmp_path), 512, Threads(1))
    except StorageError:
        pytest.skip("this file system has no direct reads by Linux AIO")
    assert blocks.read(reader, 0)
    memory, context = reader._byte_N, reader._context
    setup, destroy, _, submit = AIO_NUMBERS
    broken = setup, destroy if destroyed else NO_CALL, NO_CALL, submit
    monkeypatch.setattr(aio_reader, "AIO_NUMBERS", broken)
    with pytest.raises(OSError) as raised:
        blocks.read(reader, 1)
    assert raised.value.errno == errno.ENOSYS
    monkeypatch.setattr(aio_reader, "AIO_NUMBERS", AIO_NUMBERS)
    if not destroyed:
        assert blocks.read(reader, 2)
        assert reader._byte_N is not memory and any(one is memory for one in reader._kept)
    known = ctypes.CDLL(None).syscall(ctypes.c_long(destroy), ctypes.c_long(context)) == 0
    assert known is not destroyed, "the context with reads in flight has ended, and so have they"
    assert blocks.read(reader, 3)
    reader.close()


def test_reads_that_go_on_after_an_error_do_not_write_where_the_next_ones_do(blocks):
    fs = SlowFiles()
    reader = PreadReader(fs, Threads(1), depth=2)
    with pytest.raises(OSError, match="broken"):
        blocks.read(reader, 0)
    fs.fails = False
    assert blocks.read(reader, 1)
    reader.close()


class SlowFiles(LocalFileSystem):
    """While it fails: one thread's first read fails once the other's has begun, and that one brings zeros, but not
    before the last read of the next call is done."""

    def __init__(self):
        super().__init__()
        self.fails = True
        self.begun, self.go_on, self.ended = (threading.Event() for _ in range(3))

    def read_into(self, file, out, offset):
        if not self.fails:
            size = super().read_into(file, out, offset)
            if offset == (1 + (READS - 1) * APART) * 512:
                self.go_on.set()
                assert self.ended.wait(600)
            return size
        if offset == 0:
            assert self.begun.wait(600)
            raise OSError(errno.EIO, "broken")
        self.begun.set()
        assert self.go_on.wait(600)
        out[:] = bytes(len(out))
        self.ended.set()
        return len(out)


def test_where_no_context_can_be_had_rows_are_read_through_the_cache(tmp_path, monkeypatch):
    try:
        open_reader("aio", LocalFileSystem(), str(tmp_path), 512, Threads(1)).close()
    except StorageError:
        pytest.skip("this file system has no direct reads by Linux AIO")
    monkeypatch.setattr(aio_reader, "aio_setup", lambda *args: -errno.EAGAIN)
    assert open_reader("auto", LocalFileSystem(), str(tmp_path), 512, Threads(1)).name == "pread"
    with pytest.raises(StorageError, match="fs.aio-max-nr"):
        open_reader("aio", LocalFileSystem(), str(tmp_path), 512, Threads(1))


def test_a_refused_read_says_which_limit_to_raise():
    error = storage_error(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "read rows from", "/t")
    assert "EAGAIN" in str(error) and "fs.aio-max-nr" in str(error)
