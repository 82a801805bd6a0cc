"""How long a training step takes while its table grows from nothing to ten million rows: the worst step counts.

    python benchmarks/bench_table_growth.py [--rows 10000000] [--batch 20000] [--dim 16]

Every id of every step is new: it is hashed, given a slot, begun from its initializer, looked up and updated. Prints
one JSON line: the median and the worst step, their ratio, and the bytes a key takes beside its row.
"""

import argparse
import json
import statistics
import tempfile
import time

import torch
from _machine import keep_freed_memory, machine


def main() -> None:
    import oneemb

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=20_000, help="new ids a step")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        embedding = oneemb.MultiTableEmbedding(
            "growing", options.dim, torch.float32, torch.int64, [oneemb.make_table()],
            oneemb.make_device_mem_store_options(folder), num_threads=options.threads,
        )  # fmt: skip
        optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), [embedding])
        grad = torch.full((options.batch, options.dim), 1e-3)

        def step(first: int, size: int) -> float:
            ids = torch.arange(first, first + size)
            begin = time.perf_counter()
            embedding(ids).backward(grad[:size])
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - begin

        step(-1000, 1000)  # compiles, and leaves a table of 1,000 rows
        seconds = [step(first, options.batch) for first in range(0, options.rows, options.batch)]
        stats = embedding.stats()
        row_bytes = 4 * options.dim
        median, worst = statistics.median(seconds), max(seconds)
        print(
            json.dumps(
                machine()
                | {
                    "rows": stats["rows"],
                    "new_rows_a_step": options.batch,
                    "median_ms": round(median * 1e3, 2),
                    "worst_ms": round(worst * 1e3, 2),
                    "worst_to_median": round(worst / median, 2),
                    "p99_to_median": round(statistics.quantiles(seconds, n=100)[98] / median, 2),
                    "bytes_a_key": round((stats["device"]["bytes"] - stats["rows"] * row_bytes) / stats["rows"], 1),
                }
            )
        )
        embedding.clear()  # The rows may go.
        embedding.close()


if __name__ == "__main__":
    main()
