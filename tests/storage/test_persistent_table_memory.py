"""Memory that calls take beside the index of a table: buffers of a bounded size, and nothing for each key."""

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.table import compact_snapshots as compact_module, snapshot_load
from oneemb.storage.table.check import check_table
from oneemb.storage.table.compact_snapshots import compact_snapshots
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.salvage import salvage_table
from tests.support.resources import growth_bytes

KEYS, WIDTH = 1_500_000, 16
# Buffers of keys and of reads, and what the allocator keeps.
BUFFER_BYTES = 8 << 20


def open_table(path):
    return PersistentTable.open(str(path), row_width=WIDTH, chunk_bytes=1 << 20, threads=Threads(2))


@pytest.fixture
def table(tmp_path):
    """A table with a snapshot of many chunks."""
    with open_table(tmp_path) as table:
        put(table, np.random.default_rng(0).permutation(KEYS))
        table.save_snapshot("s", {})
        yield table


def put(table, id_N):
    for id_U in np.array_split(id_N, 50):
        table.put(np.zeros(len(id_U), np.int32), id_U, np.ones((len(id_U), WIDTH), np.float32))


def test_a_load_over_rows_holds_one_index_at_a_time(table, monkeypatch):
    monkeypatch.setattr(snapshot_load, "_PIECE_ROWS", 1 << 16)
    index_bytes = table.stats()["index_bytes"]
    table.load_snapshot("s")  # Its loops are compiled.
    assert growth_bytes(lambda: table.load_snapshot("s")) < index_bytes / 10 + BUFFER_BYTES
    assert index_bytes > 2 * BUFFER_BYTES, "a second index would be found"
    table.clear()
    assert growth_bytes(lambda: table.load_snapshot("s")) < 1.1 * table.stats()["index_bytes"] + BUFFER_BYTES
    assert len(table) == KEYS


def test_tools_take_a_hash_for_each_key_at_most(table, tmp_path, monkeypatch):
    monkeypatch.setattr(compact_module, "_RUN_BYTES", 1 << 18)
    # Half of each chunk becomes garbage that nothing but a compaction of all snapshots frees.
    put(table, np.arange(0, KEYS, 2))
    table.save_snapshot("t", {})
    table.delete_snapshot("s")
    table.close()
    hashes_bytes = 8 * KEYS
    assert not check_table(tmp_path).problems  # Its loops are compiled.
    assert growth_bytes(lambda: check_table(tmp_path)) < hashes_bytes + BUFFER_BYTES
    assert growth_bytes(lambda: salvage_table(str(tmp_path), str(tmp_path / "salvaged"))) < hashes_bytes + BUFFER_BYTES
    results = []
    assert growth_bytes(lambda: results.append(compact_snapshots(tmp_path))) < 2 * KEYS + BUFFER_BYTES
    assert results[0].rows_moved > KEYS / 5
    with open_table(tmp_path) as table:
        table.load_snapshot("t")
        assert len(table) == KEYS
