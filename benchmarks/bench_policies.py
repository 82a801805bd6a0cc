"""What it costs that rows leave: an in-memory step with a policy beside the same without.

    python benchmarks/bench_policies.py                            LRU and LFU, 1 id in 20 of a batch is new
    python benchmarks/bench_policies.py --capacity 4000000 --steps 400

26 tables that share the store's capacity, which is reached before anything is measured, 64 weights, a batch of 4,096,
ids by Zipf's law (1.05), row-wise Adagrad. The embedding without a policy has room for all rows, and meets as many new
ones. Both take turns, a step each. Printed are the median of a step, its share of that without, the longest step as a
multiple of the median, and how many rows left.

A second table says how good the choice is: of the rows that left at capacity, the share that would have left, had the
least of all been taken.

One JSON line a case goes before the tables.
"""

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
from _machine import keep_freed_memory, machine, table

import oneemb
from oneemb.kernels.threads import Threads
from oneemb.policies import LFU, LRU, RowPolicy
from oneemb.storage.policies.evictions import Evictions
from oneemb.storage.policies.usage_index import UsageIndex

TABLES, DIM, BATCH = 26, 64, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=1_000_000, help="rows")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--new", type=float, default=0.05, help="share of the ids of a batch that were never seen")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    print(json.dumps(machine() | {"threads": options.threads}), flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="oneemb-bench-") as folder:
        for name, policy in [("LRU", LRU()), ("LFU, half-life 1,000 steps", LFU(half_life=1000.0))]:
            result = measure(f"{folder}/{name}", RowPolicy(policy, expire_after_steps=100_000), options)
            print(json.dumps({"policy": name, **result}), flush=True)
            rows.append(
                [name, *(f"{value:,}" if isinstance(value, int) else f"{value:.2f}" for value in result.values())]
            )
    print(table(["policy", "ms", "ms without", "ratio", "longest / median", "rows left", "rows"], rows))
    qualities = [[name, f"{quality(policy, options.threads):.3f}"] for name, policy in [("LRU", LRU()), ("LFU", LFU())]]
    print(table(["1,000,000 of 4,000,000 rows left by", "share that the exact choice has too"], qualities))


def batches(options: argparse.Namespace) -> Any:
    """Ids of a step, [B, T]: most by Zipf's law among those seen, the others new."""
    rng = np.random.default_rng(0)
    known = options.capacity // TABLES // 2
    cumulated_V = np.cumsum(1 / np.arange(1, known + 1) ** 1.05)
    cumulated_V /= cumulated_V[-1]
    newest = known
    while True:
        id_BT = np.searchsorted(cumulated_V, rng.random((BATCH, TABLES)))
        new_BT = rng.random((BATCH, TABLES)) < options.new
        id_BT[new_BT] = newest + np.arange(np.count_nonzero(new_BT))
        newest += int(np.count_nonzero(new_BT))
        yield torch.from_numpy(id_BT)


def measure(folder: str, policy: RowPolicy, options: argparse.Namespace) -> dict[str, Any]:
    steps: dict[str, Any] = {}
    for name, row_policy in [("with", policy), ("without", None)]:
        embedding = oneemb.MultiTableEmbedding(
            name, DIM, torch.float32, torch.int64, [oneemb.make_table()] * TABLES,
            oneemb.make_device_mem_store_options(f"{folder}/{name}", None if row_policy is None else options.capacity),
            num_threads=options.threads, policy=row_policy,
        )  # fmt: skip
        optimizer = oneemb.Optimizer(oneemb.optim.RowWiseAdagrad(embedding.parameters(), lr=0.01), [embedding])
        steps[name] = embedding, optimizer
    embedding, _ = steps["with"]
    every = batches(options)
    grad = torch.randn(BATCH, TABLES, DIM) * 1e-3
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    left = 0
    while len(seconds["with"]) < options.steps:
        ids = next(every)
        full = embedding.stats()["rows"] > options.capacity * 0.95
        for name, (trained, optimizer) in steps.items():
            begin = time.perf_counter()
            optimizer.zero_grad()
            trained(ids).backward(grad)
            optimizer.step()
            if full:
                seconds[name].append(time.perf_counter() - begin)
        if not full:
            left = embedding.stats()["policy"]["left"].get("capacity", 0)
    medians = {name: statistics.median(found) * 1e3 for name, found in seconds.items()}
    result = {
        "ms": round(medians["with"], 2),
        "ms_without": round(medians["without"], 2),
        "ratio": round(medians["with"] / medians["without"], 3),
        "longest": round(max(seconds["with"]) * 1e3 / medians["with"], 2),
        "left": embedding.stats()["policy"]["left"].get("capacity", 0) - left,
        "rows": embedding.stats()["rows"],
    }
    for trained, _ in steps.values():
        trained.clear()  # The rows may go.
        trained.close()
    return result


def quality(evict: Any, threads: int) -> float:
    """Of a million rows that left in rounds, the share that is among the million of least score."""
    rows, leave = 4_000_000, 1_000_000
    usage = UsageIndex([RowPolicy(evict)], rows, Threads(threads))
    departures = Evictions(usage, Threads(threads))
    rng = np.random.default_rng(0)
    ids = rng.permutation(rows)
    for begin in range(0, rows, 20_000):
        batch = ids[begin : begin + 20_000]
        usage.use(np.zeros(len(batch), np.int32), batch, np.full(len(batch), -1), rng.zipf(1.5, len(batch)), begin, 0)
    score_N = usage.scores(usage.find(np.zeros(rows, np.int32), np.arange(rows)))
    bound = np.partition(score_N, leave - 1)[leave - 1]
    right = 0
    for begin in range(0, leave, 2_000):
        new = np.arange(rows + begin, rows + begin + 2_000)
        for gone in departures.make_room(np.zeros(len(new), np.int32), [np.full(len(new), -1)]):
            usage.forget(*gone)
            old = gone.id_V[gone.id_V < rows]
            right += int(np.count_nonzero(score_N[old] <= bound))
        usage.use(np.zeros(len(new), np.int32), new, np.full(len(new), -1), np.full(len(new), 2**20), rows + begin, 0)
    return right / usage.left["capacity"]


if __name__ == "__main__":
    main()
