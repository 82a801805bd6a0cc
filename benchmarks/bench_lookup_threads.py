"""Lookups in eval mode on one thread and on two: where a second thread begins to pay.

    python benchmarks/bench_lookup_threads.py --out benchmarks/results/lookup_threads.json

26 tables of 50,000 rows, 16 weights, ids uniform over the rows, no gradient. One embedding on one thread and one on two
take turns, some calls a turn. Printed are the medians of the turns and the median of their ratios: above 1 the second
thread costs time. torch itself is on as many threads in both.
"""

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch
from _case import Measured, Timed
from _machine import keep_freed_memory, machine, save_results, table

import oneemb

TABLES, ROWS, DIM = 26, 50_000, 16
IDS = (768, 3_072, 12_288, 49_152)
"""Ids of a lookup; not all are whole samples of 26 ids, so each id has its table beside it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, nargs="+", default=IDS)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of a table")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", help="file of the results")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(2)
    about = machine()
    print(json.dumps(about), flush=True)
    embeddings = {threads: Lookups(threads, options.rows) for threads in (1, 2)}
    results = []
    for ids in options.ids:
        timed = {threads: embedding.timed(ids) for threads, embedding in embeddings.items()}
        ms: dict[int, list[float]] = {threads: [] for threads in timed}
        for _ in range(options.turns):
            for threads, case in timed.items():
                time.sleep(0.01)
                ms[threads].append(case.sample(case.calls))
        ratio = statistics.median(two / one for one, two in zip(ms[1], ms[2], strict=True))
        medians = {threads: round(statistics.median(samples), 4) for threads, samples in ms.items()}
        results.append({"ids": ids, "ms_one": medians[1], "ms_two": medians[2], "two_over_one": round(ratio, 3)})
        print(json.dumps(results[-1]), flush=True)
    for embedding in embeddings.values():
        embedding.close()
    save_results(options.out, about, results)
    print(table(["ids", "one thread, ms", "two threads, ms", "two / one"],
                [[str(value) for value in result.values()] for result in results]))  # fmt: skip


class Lookups:
    """An embedding in eval mode that has every row."""

    def __init__(self, threads: int, rows: int = ROWS):
        self._folder = tempfile.TemporaryDirectory(prefix="oneemb-bench-")
        self._embedding = oneemb.MultiTableEmbedding(
            "lookups", DIM, torch.float32, torch.int64, [oneemb.make_table()] * TABLES,
            oneemb.make_device_mem_store_options(self._folder.name), num_threads=threads,
        )  # fmt: skip
        # An optimizer says how wide rows are, and lookups of training insert them.
        self._optimizer = oneemb.Optimizer(torch.optim.SGD(self._embedding.parameters(), lr=0.01), [self._embedding])
        with torch.no_grad():
            for begin in range(0, rows, 10_000):
                self._embedding(torch.arange(begin, min(begin + 10_000, rows))[:, None].expand(-1, TABLES))
        self._embedding.eval()
        self._rows = rows

    def timed(self, ids: int) -> Timed:
        generator = torch.Generator().manual_seed(ids)
        batches = [torch.randint(self._rows, (ids,), generator=generator) for _ in range(8)]
        tables = torch.arange(ids) % TABLES

        def look(i: int) -> Any:
            with torch.no_grad():
                return self._embedding(batches[i % len(batches)], tables)

        return Timed(look, self.close)

    def close(self) -> None:
        self._embedding.clear()  # The rows may go.
        self._embedding.close()
        self._folder.cleanup()


def lookup(ids: int, threads: int) -> Measured:
    return Lookups(threads).timed(ids)


COMPARED = {
    f"eval/{ids}/{threads}-thread": lambda ids=ids, threads=threads: lookup(ids, threads)
    for ids in IDS for threads in (1, 2)
}  # fmt: skip
"""Cases of compare.py."""


if __name__ == "__main__":
    main()
