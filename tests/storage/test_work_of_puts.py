"""The work of a put does not grow with the number of chunks. Work is counted in Python's instructions and in calls."""

import sys
from functools import partial

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.table.live_rows import LiveRows
from oneemb.storage.table.persistent_table import PersistentTable
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.inside import check_chunk_totals, chunk_files_of

# One row a block, so that the smallest chunk has 64 rows.
WIDTH, ROWS_A_CHUNK = 128, 64


def table_with(chunks, **options):
    """A table that is full of live rows, and its number of keys."""
    table = PersistentTable.open(
        "/t", row_width=WIDTH, physical_block_size=512, chunk_bytes=1, threads=Threads(1), fs=FaultyFileSystem(),
        background=False, **options,
    )  # fmt: skip
    keys = chunks * ROWS_A_CHUNK
    put(table, np.arange(keys))
    table.flush()
    assert len(chunk_files_of(table).chunks) in (chunks, chunks + 1)
    return table, keys


def put(table, id_U):
    table.put(np.zeros(len(id_U), np.int32), id_U, np.zeros((len(id_U), WIDTH), np.float32))


def instructions(job):
    """Number of Python instructions that a job runs in this thread."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        job()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("snapshots", [0, 2])
def test_a_put_runs_as_much_python_in_a_table_of_1000_chunks_as_in_one_of_10(snapshots):
    work = {}
    for chunks in (10, 1000):
        table, keys = table_with(chunks)
        for n in range(snapshots):
            table.save_snapshot(f"s{n}", {})
        rng = np.random.default_rng(0)
        work[chunks] = [instructions(partial(put, table, rng.integers(0, keys, 1))) for _ in range(20)]
        check_chunk_totals(table)
    assert np.median(work[1000]) <= 1.2 * np.median(work[10]), work


def test_dead_chunks_are_looked_for_only_after_an_extent_lost_its_last_live_row(monkeypatch):
    table, keys = table_with(300, max_space_amplification=50.0)
    calls, real = [], LiveRows.dead_chunks
    monkeypatch.setattr(LiveRows, "dead_chunks", lambda self: calls.append(real(self)) or calls[-1])
    for first in range(0, keys // 4, 4):  # Every fourth row is overwritten, so that no old chunk dies.
        put(table, np.array([first]))
        assert table.contains(np.zeros(1, np.int32), np.array([first])).all()  # The key is put into the index now.
    made = len(chunk_files_of(table).chunks) - 300
    table.stats()
    assert made >= 10 and len(calls) <= made + 1, (len(calls), made)
    put(table, np.arange(ROWS_A_CHUNK))
    table.stats()
    assert len(calls) <= made + 4 and sum(map(len, calls)) == 1, "the first chunk has no live row, and is removed"
    assert len(chunk_files_of(table).chunks) <= 300 + made + 1
