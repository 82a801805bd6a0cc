"""Memory that calls take beside the index of a table: buffers of a bounded size, and nothing for each key."""

from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.table import compact_snapshots as compact_module, snapshot_load
from oneemb.storage.table.check import check_table
from oneemb.storage.table.compact_snapshots import compact_snapshots
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.salvage import salvage_table
from tests.support.forks import fork_context
from tests.support.resources import growth_bytes

KEYS, WIDTH = 1_500_000, 16
# Buffers of keys and of reads, and what the allocator keeps.
BUFFER_BYTES = 8 << 20


def open_table(path):
    return PersistentTable.open(str(path), row_width=WIDTH, chunk_bytes=1 << 20, threads=Threads(2))


def put(table, id_N):
    for id_U in np.array_split(id_N, 50):
        table.put(np.zeros(len(id_U), np.int32), id_U, np.ones((len(id_U), WIDTH), np.float32))


def fill(table):
    """Make a snapshot of many chunks."""
    put(table, np.random.default_rng(0).permutation(KEYS))
    table.save_snapshot("s", {})


def run_in_own_process(proof, *args):
    # The heap of this process has what other tests have left.
    with ProcessPoolExecutor(1, fork_context()) as pool:
        pool.submit(proof, *args).result(300)


def test_a_load_over_rows_holds_one_index_at_a_time(tmp_path):
    run_in_own_process(load_over_rows, tmp_path)


def test_tools_take_a_hash_for_each_key_at_most(tmp_path):
    run_in_own_process(run_tools, tmp_path)


def load_over_rows(path):
    pytest.MonkeyPatch().setattr(snapshot_load, "_PIECE_ROWS", 1 << 16)
    with open_table(path) as table:
        fill(table)
        index_bytes = table.stats()["index_bytes"]
        table.load_snapshot("s")  # Its loops are compiled.
        assert growth_bytes(lambda: table.load_snapshot("s")) < index_bytes / 10 + BUFFER_BYTES
        assert index_bytes > 2 * BUFFER_BYTES, "a second index would be found"
        table.clear()
        assert growth_bytes(lambda: table.load_snapshot("s")) < 1.1 * table.stats()["index_bytes"] + BUFFER_BYTES
        assert len(table) == KEYS


def run_tools(path):
    pytest.MonkeyPatch().setattr(compact_module, "_RUN_BYTES", 1 << 18)
    with open_table(path) as table:
        fill(table)
        # Half of each chunk becomes garbage that nothing but a compaction of all snapshots frees.
        put(table, np.arange(0, KEYS, 2))
        table.save_snapshot("t", {})
        table.delete_snapshot("s")
    hashes_bytes = 8 * KEYS
    assert not check_table(path).problems  # Its loops are compiled.
    assert growth_bytes(lambda: check_table(path)) < hashes_bytes + BUFFER_BYTES
    assert growth_bytes(lambda: salvage_table(str(path), f"{path}-salvaged")) < hashes_bytes + BUFFER_BYTES
    results = []
    assert growth_bytes(lambda: results.append(compact_snapshots(path))) < 2 * KEYS + BUFFER_BYTES
    assert results[0].rows_moved > KEYS / 5
    with open_table(path) as table:
        table.load_snapshot("t")
        assert len(table) == KEYS
