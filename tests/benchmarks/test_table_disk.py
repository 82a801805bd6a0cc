"""The disk's rate is measured with the blocks of the table, all of them and nothing else."""

import os

import numpy as np
import pytest
from _table_disk import TableDisk, limit_ms

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StorageError
from oneemb.storage.table.aio_reader import AioReader
from oneemb.storage.table.block_reader import PreadReader
from oneemb.storage.table.chunk_files import ROWS_BEGIN
from oneemb.storage.table.persistent_table import PersistentTable

ROWS, WIDTH, BLOCK = 2000, 64, 512


@pytest.fixture(params=["aio", "pread"])
def table(request, tmp_path):
    try:
        made = PersistentTable.open(
            tmp_path, row_width=WIDTH, physical_block_size=BLOCK, threads=Threads(1), io=request.param,
            chunk_bytes=1 << 16,
        )  # fmt: skip
    except StorageError:
        pytest.skip("this file system has no direct reads by Linux AIO")
    yield made
    made.close()


@pytest.fixture
def read(monkeypatch):
    """(inode, offset, bytes) of each read that a reader of the tables makes."""
    reads = []
    for kind in (AioReader, PreadReader):

        def record(self, plan, file_Q, offset_Q, sum_B, out_UW, to_disk=kind.read):
            to_disk(self, plan, file_Q, offset_Q, sum_B, out_UW)
            inode_Q = [os.fstat(file).st_ino for file in file_Q.tolist()]
            size_Q = plan.blocks_Q * plan.geometry.block_bytes
            reads.extend(zip(inode_Q, offset_Q.tolist(), size_Q.tolist(), strict=True))

        monkeypatch.setattr(kind, "read", record)
    return reads


def put(table, rows):
    table.put(np.zeros(rows, np.int32), np.arange(rows), np.ones((rows, WIDTH), np.float32))


def test_random_reads_are_of_each_block_of_the_table_once(table, read, tmp_path):
    put(table, ROWS)
    disk = TableDisk(table, str(tmp_path), reads=50_000)  # So many that no block is left out.
    read.clear()  # The trial of the reader.
    assert disk.rate() > 0
    files = [path.stat() for path in (tmp_path / "chunks").glob("*.rows")]
    assert len(files) > 2
    blocks = [(file.st_ino, at, BLOCK) for file in files for at in range(ROWS_BEGIN, file.st_size, BLOCK)]
    assert len(blocks) >= ROWS * WIDTH * 4 / BLOCK
    assert sorted(read) == sorted(blocks)
    disk.close()


def test_requests_are_the_reads_of_the_table_and_not_those_of_the_rate(table, read, tmp_path):
    put(table, ROWS)
    disk = TableDisk(table, str(tmp_path))
    disk.rate()
    assert disk.requests == 0
    read.clear()
    id_U = np.arange(0, ROWS, 50)
    table.get(np.zeros(len(id_U), np.int32), id_U, np.empty((len(id_U), WIDTH), np.float32))
    assert disk.requests == len(read) > 1
    disk.close()


def test_a_table_with_no_rows_on_disk_has_no_rate(table, tmp_path):
    disk = TableDisk(table, str(tmp_path))
    assert disk.rate() == 0
    disk.close()


@pytest.mark.parametrize("requests, rate, limit", [(0, 0, 20), (1000, 100_000, 20), (5000, 100_000, 50)])
def test_the_limit_is_the_longer_of_computing_and_reading(requests, rate, limit):
    assert limit_ms(20, requests, rate) == pytest.approx(limit)
