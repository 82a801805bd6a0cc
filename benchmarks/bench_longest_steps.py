"""The longest steps of training, in medians, on stores with a cache, where rows come and leave all the time.

    python benchmarks/bench_longest_steps.py                           a cache of a million rows, host and SSD
    python benchmarks/bench_longest_steps.py --slots 8000000 --store host

26 tables, 16 weights, a batch of 4,096, SGD; ids by Zipf's law (1.05) over twice as many rows as the cache holds, and
1 id in 20 is new. Measured are steps after the cache is full: each store without a policy, and with one that lets rows
leave at capacity, which is one and a half times the cache. Both take turns, a step each.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import torch
from _case import Measured
from _machine import keep_freed_memory, machine, save_results, table

import oneemb

TABLES, DIM, BATCH = 26, 16, 4096
SLOT_BYTES = DIM * 4 + 40
"""Bytes of the cache's budget for each slot: a row and what the hot tier keeps beside it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=1_000_000, help="rows that the cache holds")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--store", nargs="+", choices=("host", "ssd"), default=["host", "ssd"])
    parser.add_argument("--out", help="file of the results")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(2)
    about = machine() | {"threads": 2}
    print(json.dumps(about), flush=True)
    results = []
    for store in options.store:
        training = {policy: Training(store, policy, options.slots, options.batch) for policy in ("none", "LFU")}
        seconds: dict[str, list[float]] = {policy: [] for policy in training}
        for _ in range(options.steps):
            for policy, embedding in training.items():
                seconds[policy].append(embedding.step())
        for policy, embedding in training.items():
            embedding.close()
            results.append(
                {
                    "store": store,
                    "policy": policy,
                    "slots": options.slots,
                    **spread(seconds[policy]),
                    "rows": embedding.rows,
                }
            )
            print(json.dumps(results[-1]), flush=True)
    save_results(options.out, about, results)
    print(table(["store", "policy", "slots", "median, ms", "p99 / median", "longest / median", "rows"],
                [[str(value) for value in result.values()] for result in results]))  # fmt: skip


def spread(seconds: list[float]) -> dict[str, float]:
    """The median in milliseconds, and the 99th percentile and the longest in medians."""
    median = statistics.median(seconds)
    p99 = float(np.percentile(seconds, 99))
    return {
        "ms": round(median * 1e3, 2), "p99": round(p99 / median, 2), "longest": round(max(seconds) / median, 2),
    }  # fmt: skip


class Training:
    """An embedding whose cache is full."""

    def __init__(self, store: str, policy: str, slots: int, batch: int = BATCH):
        from oneemb.policies import LFU, RowPolicy

        self._folder = tempfile.TemporaryDirectory(prefix="oneemb-bench-")
        make = {"host": oneemb.make_cached_host_mem_store_options, "ssd": oneemb.make_cached_ssd_store_options}[store]
        budget_mb = -(-slots * SLOT_BYTES // 2**20)
        chosen = {} if policy == "none" else {"policy": RowPolicy(LFU())}
        self._embedding = oneemb.MultiTableEmbedding(
            "longest", DIM, torch.float32, torch.int64, [oneemb.make_table()] * TABLES,
            make(budget_mb, self._folder.name, capacity=slots * 3 // 2 if chosen else None),
            num_threads=2, **chosen,
        )  # fmt: skip
        self._optimizer = oneemb.Optimizer(torch.optim.SGD(self._embedding.parameters(), lr=0.01), [self._embedding])
        self._grad = torch.ones(batch, TABLES, DIM) * 1e-3
        self._batches = _batches(slots, batch)
        with torch.no_grad():
            per_table = slots // TABLES
            some = max(1, min(BATCH, per_table // 4))  # a lookup of them all would not fit in the cache
            for begin in range(0, per_table, some):
                ids = torch.arange(begin, min(begin + some, per_table))
                self._embedding(ids[:, None].expand(-1, TABLES))
        self.rows = 0

    def step(self) -> float:
        """Seconds of a step on a batch that has not come before."""
        ids = next(self._batches)
        begin = time.perf_counter()
        rows = self._embedding(ids)
        rows.backward(self._grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin

    def close(self) -> None:
        self.rows = self._embedding.stats()["rows"]
        self._embedding.clear()  # The rows may go.
        self._embedding.close()
        self._folder.cleanup()


def _batches(slots: int, batch: int) -> Iterator[torch.Tensor]:
    """Ids of a step, [batch, TABLES]."""
    rng = np.random.default_rng(0)
    known = 2 * slots // TABLES
    cumulated_V = np.cumsum(1 / np.arange(1, known + 1) ** 1.05)
    cumulated_V /= cumulated_V[-1]
    rank_to_id_V, newest = rng.permutation(known), known
    while True:
        rank_BT = np.searchsorted(cumulated_V, rng.random((batch, TABLES))).clip(max=known - 1)
        id_BT = rank_to_id_V[rank_BT]
        new_BT = rng.random((batch, TABLES)) < 0.05
        id_BT[new_BT] = newest + np.arange(np.count_nonzero(new_BT))
        newest += int(np.count_nonzero(new_BT))
        yield torch.from_numpy(id_BT)


def steps(store: str, policy: str, part: str) -> Measured:
    """A part of `spread` over 40 steps a turn."""
    training = Training(store, policy, 1_000_000)
    for _ in range(20):
        training.step()
    units = {"ms": "ms", "longest": "medians"}

    def sample(calls: int) -> float:
        return spread([training.step() for _ in range(calls)])[part]

    return Measured(sample, training.close, units[part], calls=40)


COMPARED = {
    f"longest/{store}/{policy}/{part}": lambda store=store, policy=policy, part=part: steps(store, policy, part)
    for store in ("host", "ssd") for policy in ("none", "LFU") for part in ("ms", "longest")
}  # fmt: skip
"""Cases of compare.py."""


if __name__ == "__main__":
    main()
