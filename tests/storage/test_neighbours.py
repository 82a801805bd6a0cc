"""Rows that a cache writes to a table lie beside the rows with which they lay before, and are read in fewer blocks."""

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.tiers.hot_tier import HotTier
from tests.support.keys import distinct

W = 1024
"""Words of a row, which fills a block of 4096 bytes."""


def table_at(path):
    return PersistentTable.open(
        str(path), row_width=W, physical_block_size=4096, threads=Threads(1), background=False, io="pread"
    )


def begin(row_SW, slot_M, table_M, id_M):
    row_SW[slot_M] = id_M[:, None]


def test_a_table_orders_rows_by_their_places_and_new_ones_by_their_ids(tmp_path):
    rng = np.random.default_rng(0)
    with table_at(tmp_path) as table:
        table_N, id_N = rng.integers(0, 3, 500).astype(np.int32), rng.permutation(5000)[:500] - 2500
        table.put(table_N, id_N, np.zeros((500, W), np.float32))
        mixed = rng.permutation(500)
        assert np.array_equal(mixed[table.write_order(table_N[mixed], id_N[mixed])], np.arange(500))
        table.flush()
        new_N = rng.permutation(2000)[:100] + 10_000
        tables, ids = np.append(np.zeros(100, np.int32), table_N[mixed]), np.append(new_N, id_N[mixed])
        order = table.write_order(tables, ids)
        assert ids[order].tolist() == sorted(new_N.tolist()) + id_N.tolist()
        assert len(table.write_order(tables[:0], ids[:0])) == 0


@pytest.mark.parametrize("flushes", [False, True])
def test_rows_that_are_used_together_stay_neighbours_after_many_evictions(flushes, tmp_path):
    """Groups of 16 rows, of random ids, are always used together; a block has one row, a read at most 64 KiB."""
    rng, group_GN = np.random.default_rng(0), np.random.default_rng(1).permutation(1 << 20)[:3200].reshape(-1, 16)
    with table_at(tmp_path) as table:
        tier = HotTier(
            "device", row_width=W, slots=800, below=table, resident=False, init=begin, threads=Threads(1)
        )  # fmt: skip
        for step in range(600):
            id_U = group_GN[rng.integers(0, len(group_GN), 4) if step >= 50 else np.arange(4 * step, 4 * step + 4)]
            id_U = np.unique(id_U)
            slot_U = tier.acquire(distinct(np.zeros(len(id_U), np.int32), id_U))[0]
            assert (tier.row_SW[slot_U] == id_U[:, None]).all()
            tier.mark_dirty(slot_U)
            tier.release(slot_U)
            if flushes and step % 50 == 0:
                tier.flush()
            if step == 300:
                before = table.stats()
        now = table.stats()
        rows = now["rows_got"] - now["rows_missing"] - before["rows_got"] + before["rows_missing"]
        reads = now["read_requests"] - before["read_requests"]
        assert rows > 5000 and reads < rows / 4, "without an order of writes, hardly two rows are neighbours"
