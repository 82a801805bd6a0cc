"""Memory that calls take beside the index of a table: buffers of a bounded size, and nothing for each key."""

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.table import snapshot_load
from oneemb.storage.table.persistent_table import PersistentTable
from tests.support.resources import growth_bytes

KEYS = 1_500_000
# Buffers of keys and of reads, and what the allocator keeps.
BUFFER_BYTES = 8 << 20


def open_table(path):
    return PersistentTable.open(str(path), row_width=1, chunk_bytes=1 << 18, threads=Threads(2))


@pytest.fixture
def table(tmp_path):
    """A table with a snapshot of many chunks, of one word a row."""
    with open_table(tmp_path) as table:
        for id_U in np.array_split(np.random.default_rng(0).permutation(KEYS), 50):
            table.put(np.zeros(len(id_U), np.int32), id_U, np.ones((len(id_U), 1), np.float32))
        table.save_snapshot("s", {})
        yield table


def test_a_load_over_rows_holds_one_index_at_a_time(table, monkeypatch):
    monkeypatch.setattr(snapshot_load, "_PIECE_ROWS", 1 << 16)
    index_bytes = table.stats()["index_bytes"]
    table.load_snapshot("s")  # Its loops are compiled.
    assert growth_bytes(lambda: table.load_snapshot("s")) < index_bytes / 10 + BUFFER_BYTES
    assert index_bytes > 2 * BUFFER_BYTES, "a second index would be found"
    table.clear()
    assert growth_bytes(lambda: table.load_snapshot("s")) < 1.1 * table.stats()["index_bytes"] + BUFFER_BYTES
    assert len(table) == KEYS
