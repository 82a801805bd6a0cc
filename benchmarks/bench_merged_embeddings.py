"""Many embeddings of one table each, which a graph merges, beside one embedding of as many tables.

    python benchmarks/bench_merged_embeddings.py

Stores in memory, every row known, ids by Zipf's law (1.05); the dense part is next to nothing: rows side by side,
squared, their mean. Ways take turns, a stretch of steps each; printed are medians of the time between two losses,
called and prefetched. One JSON line a case goes before the table.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
from _machine import keep_freed_memory, machine, table

import oneemb
from oneemb.graph import plan


class OneModule(oneemb.TrainGraph):
    """All tables in one embedding."""

    def __init__(self, tables: int, dim: int, threads: int):
        super().__init__()
        self.embedding = embedding_of("one", tables, dim, threads)
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.01))

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.embedding(ids).flatten(1).square().mean()
        loss.backward()
        return loss.detach()


class ManyModules(oneemb.TrainGraph):
    """An embedding for each table."""

    def __init__(self, tables: int, dim: int, threads: int):
        super().__init__()
        self.fields = torch.nn.ModuleList(embedding_of(f"{t}", 1, dim, threads) for t in range(tables))
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.01))

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([field(ids[:, t]) for t, field in enumerate(self.fields)], 1)
        loss = rows.square().mean()
        loss.backward()
        return loss.detach()


def embedding_of(name: str, tables: int, dim: int, threads: int) -> oneemb.MultiTableEmbedding:
    store = oneemb.make_device_mem_store_options(capacity=3_000_000)
    return oneemb.MultiTableEmbedding(
        name, dim, torch.float32, torch.int64, [oneemb.make_table()] * tables, store, num_threads=threads
    )


def batches_of(batch: int, tables: int, rows: int, count: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    cumulated_V = np.cumsum(np.arange(1, rows + 1) ** -1.05)
    cumulated_V /= cumulated_V[-1]
    return [torch.from_numpy(np.searchsorted(cumulated_V, rng.random((batch, tables)))) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of a table")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps in a stretch")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    print(json.dumps(machine() | {"threads": options.threads}), flush=True)
    lines = []
    for batch in options.batches:
        lines += bench(batch, options)
    print(table(["B", "way", "ms a call", "ms prefetched", "ops"], lines))


def bench(batch: int, options: argparse.Namespace) -> list[list[str]]:
    shape = options.tables, options.dim, options.threads
    graphs: dict[str, oneemb.TrainGraph] = {
        "one module": OneModule(*shape),
        "many modules": ManyModules(*shape),
        "many modules, not merged": ManyModules(*shape),
    }
    batches = batches_of(batch, options.tables, options.rows, options.steps)
    for name, graph in graphs.items():
        hidden = mock.patch.object(plan, "_members", lambda *args: ({}, {}))
        with hidden if name.endswith("not merged") else mock.patch.object(plan, "_members", plan._members):
            for ids in batches:
                graph(ids)
    seconds: dict[tuple[str, int], list[float]] = {way: [] for way in itertools.product(graphs, (0, 1))}
    for _ in range(options.rounds):
        for (name, depth), times in seconds.items():
            times += stretch(graphs[name].run(batches, depth))
    median = {way: statistics.median(times) * 1e3 for way, times in seconds.items()}
    ops = {name: sum(node.op not in ("placeholder", "get_attr", "output") for node in graph.compiled().graph.nodes)
           for name, graph in graphs.items()}  # fmt: skip
    case = f"{options.tables} tables, D {options.dim}, B {batch}, Adagrad, in memory"
    result = {name: [round(median[name, depth], 3) for depth in (0, 1)] for name in graphs}
    print(json.dumps({"case": case, "median_ms_called_prefetched": result, "ops": ops}), flush=True)
    return [[str(batch), name, *(f"{one:.2f}" for one in result[name]), str(ops[name])] for name in graphs]


def stretch(losses: Iterator[torch.Tensor]) -> list[float]:
    marks = []
    for _ in losses:
        marks.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(marks)][2:]


if __name__ == "__main__":
    main()
