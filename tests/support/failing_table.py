"""Lets allocations of puts and erasures in a persistent table with an index on disk fail, one at a time; run as a
program with failing_malloc.c preloaded.

    python failing_table.py LIBRARY KIND FOLDER STRIDE

KIND is not used. After each failure the table is not broken, and each row is the one from before the call or the one
from after the call. The oracle is an array of numbers. Each line printed is a fault; the last line says how many
allocations have failed.
"""

import sys

import numpy as np
from pytest import MonkeyPatch

from oneemb.kernels.threads import Threads
from oneemb.storage.table.persistent_table import PersistentTable
from tests.support.cold_shards import make_shards_small
from tests.support.failing_allocations import Preloaded, load_loops

IDS, BATCH, WIDTH = 20000, 3000, 4


def read(table):
    """The number in each row, 0 where there is no row."""
    row_UW = np.zeros((IDS, WIDTH), np.float32)
    table.get(np.zeros(IDS, np.int32), np.arange(IDS), row_UW)
    return row_UW[:, 0].copy()


def run(table, allocations, stride):
    wrong, failures, rng, number = [], 0, np.random.default_rng(0), 0
    for name in ("put", "erase"):
        for n in range(0, 400, stride):
            number += 1
            for _ in range(2):  # Some of the keys of the call are in memory then, some in the file.
                ids = rng.choice(IDS, BATCH, replace=False)
                table.put(np.zeros(BATCH, np.int32), ids, np.full((BATCH, WIDTH), number, np.float32))
            before_K, ids = read(table), rng.choice(IDS, BATCH, replace=False)
            after_K = before_K.copy()
            after_K[ids] = number + 0.5 if name == "put" else 0
            rows_UW, error = np.full((BATCH, WIDTH), number + 0.5, np.float32), None
            allocations.fail_after(n)
            try:
                if name == "put":
                    table.put(np.zeros(BATCH, np.int32), ids, rows_UW)
                else:
                    table.erase(np.zeros(BATCH, np.int32), ids)
            except Exception as raised:
                error = repr(raised)
            count = allocations.counted()
            allocations.fail_after(-1)
            failures += count > n
            try:
                now_K = read(table)
                odd = np.flatnonzero((now_K != before_K) & (now_K != after_K) | (error is None) & (now_K != after_K))
                found = [f"rows of {len(odd)} keys, such as {odd[:3]}"] if len(odd) else []
                found += [f"{len(table)} rows"] if len(table) != np.count_nonzero(now_K) else []
            except Exception as raised:
                found = [repr(raised)]
            wrong += [f"{name}, allocation {n} of {count}, {error}: {it}" for it in found]
            if table.broken or len(wrong) > 20:
                return wrong, failures
            if error is None and count <= n:
                break
        print(f"{name}: {n} allocations", file=sys.stderr, flush=True)
    return wrong, failures


if __name__ == "__main__":
    library, _, folder, stride = sys.argv[1:]
    make_shards_small(MonkeyPatch(), overlay=300)
    load_loops()
    with PersistentTable.open(
        folder, row_width=WIDTH, threads=Threads(1), background=False, index_memory_bytes=1
    ) as table:
        run(table, Preloaded(library), 1000)  # which loads what it needs
        wrong, failures = run(table, Preloaded(library), int(stride))
        if not table.broken and not table.stats()["index_blocks_read"]:
            wrong.append("no block of the index was read")
    print(*wrong, sep="\n")
    print(f"{failures} failures")
