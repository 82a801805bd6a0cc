"""A whole training step: eager and compiled, prefetched or not, on an SSD and in memory, beside nn.EmbeddingBag.

    python benchmarks/bench_train_step.py                          the synthetic DLRM of the documents
    python benchmarks/bench_train_step.py --rows 100000            a smaller one
    python benchmarks/bench_train_step.py --kuairand               the demo's model on its click log

The synthetic DLRM has 26 tables of a million rows, 32 weights each, ids by Zipf's law (1.05), and a cached SSD store
whose cache holds 5 % of the rows. Every row exists before anything is measured. The ways to run a step take turns, a
stretch of steps each, on the same embeddings: one on the SSD, one in memory; and the same dense model on
nn.EmbeddingBag(sparse=True), all in memory.

Printed are medians of the time between two losses, and of the SSD store

    SSD time      what an unprefetched step takes longer than the same step on the store in memory
    hidden        the share of it that prefetching takes away
    read          rows read from the SSD a step, and what the thread that prepares takes for a step: where that is
                  longer than the step in memory, the difference cannot be hidden
    step / limit  the prefetched step over max(compute alone, requests / the disk's rate), all measured in this run:
                  compute alone is the prefetched step in memory, where every row is resident; requests are the
                  reads that the table on disk made in a prefetched step; the disk's rate is that of random reads
                  of this table's blocks, by the same kind of reader at the same depth, with nothing else going on

One JSON line a case goes before the table. Rows read a batch on the traces of a shop, with and without lookahead=16,
are printed by `bench_cache_policy.py --cases orm web --traces FOLDER`.

A million rows a table take 40 s a store to begin, 15 GiB of memory and 7 GB of disk. With --path they are begun once:
later runs with the same --path and sizes find them there (14 GB of disk), and --fill does no more than that.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _machine import keep_freed_memory, machine, save_results, table
from _table_disk import TableDisk, limit_ms

import oneemb

Batch = tuple[torch.Tensor, ...]

PREFETCHED, COMPUTE = "compiled + prefetch, SSD", "compiled + prefetch, memory"


class DenseDLRM(torch.nn.Module):
    """The dense part: numbers through a bottom MLP, the dot products of all pairs, a top MLP."""

    def __init__(self, fields: int, numbers: int, dim: int):
        super().__init__()
        self.bottom = oneemb.nn.FusedMLP(numbers, [64], dim, skip_final_activation=True)
        vectors = fields + 1
        first, second = torch.triu_indices(vectors, vectors, 1)
        self.register_buffer("pair_P", first * vectors + second)
        self.top = oneemb.nn.FusedMLP(dim + len(first), [128, 64], 1, skip_final_activation=True)

    def forward(self, number_BX: torch.Tensor, row_BFD: torch.Tensor) -> torch.Tensor:
        bottom_BD = self.bottom(number_BX)
        vector_BFD = torch.cat([bottom_BD.unsqueeze(1), row_BFD], 1)
        dot_BFF = torch.bmm(vector_BFD, vector_BFD.transpose(1, 2))
        pair_BP = dot_BFF.flatten(1).index_select(1, self.pair_P)
        return self.top(torch.cat([bottom_BD, pair_BP], 1)).squeeze(1)


class Graph(oneemb.TrainGraph):
    """The DLRM on an oneemb embedding."""

    def __init__(self, embedding: oneemb.MultiTableEmbedding, dense: torch.nn.Module, make_optimizer: Callable):
        super().__init__()
        self.embedding = embedding
        self.dense = dense
        self.add_optimizer(make_optimizer(self.parameters()))

    def build(self, ids: torch.Tensor, numbers: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logit = self.dense(numbers, self.embedding(ids))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        loss.backward()
        return loss.detach()


def main() -> None:
    options = parse()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns of the peer's gradients otherwise.
    about = machine() | {"threads": options.threads}
    print(json.dumps(about), flush=True)
    with tempfile.TemporaryDirectory(prefix="oneemb-bench-") as folder:
        results = bench(options, options.path or folder)
    save_results(options.out, about, results)


def bench(options: argparse.Namespace, path: str) -> list[dict[str, Any]]:
    case = kuairand_case(options, path) if options.kuairand else dlrm_case(options, path)
    if options.fill:
        return []
    for _ in case["ways"][PREFETCHED](itertools.islice(case["batches"], options.warm)):
        pass  # fills the cache
    case["read_before"] = case["ssd"].embedding.stats().get("device", {"misses": 0})["misses"]
    disk = TableDisk(case["ssd"].embedding.store.rows.bottom_store, f"{path}/ssd")
    result = report(case, *measure(case["ways"], case["batches"], disk, options), options)
    disk.close()
    for graph in case["ssd"], case["memory"]:
        graph.embedding.clear()  # The rows may go.
        graph.embedding.close()
    return [result]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of a table")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument(
        "--cache-share", type=float, default=0.05,
        help="rows in the cache, as a share of all; it must hold the rows of a step: with few --rows give a larger one",
    )  # fmt: skip
    parser.add_argument("--optimizer", choices=("sgd", "adagrad"), default="adagrad")
    parser.add_argument("--depth", type=int, default=1, help="batches prepared ahead")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="steps in a stretch")
    parser.add_argument("--warm", type=int, default=60, help="steps on the SSD store before any is measured")
    parser.add_argument("--path", help="folder of the stores, which keeps their rows; default: a temporary one")
    parser.add_argument("--fill", action="store_true", help="only begin the rows in --path")
    parser.add_argument("--cache-policy", choices=("lfu", "lru"), default="lfu")
    parser.add_argument("--kuairand", action="store_true", help="the demo's model and click log")
    parser.add_argument("--explain", action="store_true", help="print the table of ops of the prefetched graph")
    parser.add_argument("--out", help="file of the results")
    return parser.parse_args()


def optimizer_of(name: str) -> Callable:
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[name]
    return lambda parameters: kind(parameters, lr=0.01)


def dlrm_case(options: argparse.Namespace, path: str) -> dict[str, Any]:
    """The ways to run a step of the synthetic DLRM, by name."""
    state = options.dim if options.optimizer == "adagrad" else 0
    total = options.tables * options.rows
    cache_mb = max(1, round(total * options.cache_share * (4 * (options.dim + state) + 40) / 2**20))
    make_optimizer = optimizer_of(options.optimizer)

    def graph_on(name: str, store_options: Any) -> Graph:
        embedding = oneemb.MultiTableEmbedding(
            name, options.dim, torch.float32, torch.int64, [oneemb.make_table()] * options.tables, store_options,
            num_threads=options.threads,
        )  # fmt: skip
        torch.manual_seed(0)
        graph = Graph(embedding, DenseDLRM(options.tables, 13, options.dim), make_optimizer)
        begin = time.perf_counter()
        begin_rows(embedding, options)
        print(f"{total:,} rows on the {name} store in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        return graph

    ssd_options = oneemb.make_cached_ssd_store_options(
        cache_mb, f"{path}/ssd", physical_block_size=512, cache_policy=options.cache_policy
    )
    ssd = graph_on("SSD", ssd_options)
    memory = graph_on("memory", oneemb.make_device_mem_store_options(f"{path}/memory", capacity=total))
    return {
        "name": f"DLRM, {options.tables} x {options.rows:,} rows, D {options.dim}, B {options.batch},"
        f" {options.optimizer}, cache {cache_mb} MiB {options.cache_policy}",
        "ways": {} if options.fill else all_ways(ssd, memory, options, make_optimizer),
        "batches": dlrm_batches(options),
        "ssd": ssd,
        "memory": memory,
    }


def begin_rows(embedding: oneemb.MultiTableEmbedding, options: argparse.Namespace, snapshot: str = "begun") -> None:
    """Let the embedding have every row: those of an earlier run on the same path, or new ones."""
    if snapshot in embedding.snapshots():
        embedding.load_snapshot(snapshot)
        rows = embedding.stats()["rows"]
        if rows != options.tables * options.rows:
            raise SystemExit(f"--path holds {rows:,} rows of an earlier run; give another --path, or none")
        return
    for t, first in itertools.product(range(options.tables), range(0, options.rows, 100_000)):
        id_U = np.arange(first, min(first + 100_000, options.rows), dtype=np.int64)
        keys = embedding.store.backend.distinct_keys(np.full(len(id_U), t, np.int32), id_U)
        embedding.store.release(embedding.store.acquire(keys)[0])
    if options.path:
        embedding.save_snapshot(snapshot)


def all_ways(ssd: Graph, memory: Graph, options: argparse.Namespace, make_optimizer: Callable) -> dict[str, Callable]:
    return ways_of(ssd, memory, options) | {"nn.EmbeddingBag, memory": torch_way(options, make_optimizer)}


def ways_of(ssd: Graph, memory: Graph, options: argparse.Namespace) -> dict[str, Callable]:
    def eager(graph: Graph) -> Callable[[Iterator[Batch]], Iterator[Any]]:
        def run(batches: Iterator[Batch]) -> Iterator[Any]:
            for batch in batches:
                loss = graph.build(*batch)
                for optimizer in graph.optimizers:
                    optimizer.step()
                    optimizer.optimizer.zero_grad()
                yield loss

        return run

    # In memory after each on the SSD: disks that are lent by the hour are faster for a while after they have rested.
    return {
        "eager, SSD": eager(ssd),
        "eager, memory": eager(memory),
        "compiled, SSD": lambda batches: ssd.run(batches, 0),
        "compiled, memory": lambda batches: memory.run(batches, 0),
        PREFETCHED: lambda batches: ssd.run(batches, options.depth),
        COMPUTE: lambda batches: memory.run(batches, options.depth),
    }


def torch_way(options: argparse.Namespace, make_optimizer: Callable) -> Callable[[Iterator[Batch]], Iterator[Any]]:
    torch.manual_seed(0)
    bags = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(options.rows, options.dim, mode="sum", sparse=True) for _ in range(options.tables)
    )
    dense = DenseDLRM(options.tables, 13, options.dim)
    optimizers = [make_optimizer(bags.parameters()), make_optimizer(dense.parameters())]
    offsets = torch.arange(options.batch)

    def run(batches: Iterator[Batch]) -> Iterator[Any]:
        for ids, numbers, label in batches:
            row_BFD = torch.stack([bag(ids[:, t].contiguous(), offsets) for t, bag in enumerate(bags)], 1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(dense(numbers, row_BFD), label)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            yield loss.detach()

    return run


def dlrm_batches(options: argparse.Namespace) -> Iterator[Batch]:
    """No batch comes twice: a cache would hold more of it than it has a right to.

    A table's frequent ids lie anywhere in it, as they do when ids are hashes.
    """
    rng = np.random.default_rng(0)
    weight_V = np.arange(1, options.rows + 1) ** -1.05
    cumulated_V = np.cumsum(weight_V / weight_V.sum())
    rank_to_id = [rng.permutation(options.rows) for _ in range(options.tables)]
    while True:
        rank_BT = np.searchsorted(cumulated_V, rng.random((options.batch, options.tables))).clip(max=options.rows - 1)
        id_BT = np.stack([rank_to_id[t][rank_BT[:, t]] for t in range(options.tables)], 1)
        numbers, label = rng.random((options.batch, 13), np.float32), rng.integers(0, 2, options.batch)
        yield torch.from_numpy(id_BT), torch.from_numpy(numbers), torch.from_numpy(label).float()


def kuairand_case(options: argparse.Namespace, path: str) -> dict[str, Any]:
    """The demo's own model, log and batches."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from baselines import on_embedding_bags
    from dlrm import DLRM, OneEmbLookup
    from kuairand import PADDING
    from kuairand_dlrm import TrainStep, load, make_optimizers, parse as parse_demo

    demo = parse_demo([])
    log = load(demo)

    def graph_on(name: str, store_options: Any) -> Any:
        embedding = oneemb.MultiTableEmbedding(
            name, demo.dim, torch.float32, torch.int64, [oneemb.make_table()] * len(log.fields), store_options,
            padding_idx=PADDING, num_threads=options.threads,
        )  # fmt: skip
        torch.manual_seed(0)
        model = DLRM(OneEmbLookup(embedding, log.fields), len(log.fields), log.numeric_EX.shape[1], demo.dim)
        step = TrainStep(model, make_optimizers(model))
        step.embedding = embedding
        return step

    ssd = graph_on("SSD", oneemb.make_cached_ssd_store_options(4, f"{path}/ssd", physical_block_size=512))
    memory = graph_on("memory", oneemb.make_device_mem_store_options(f"{path}/memory", capacity=1_000_000))
    twin = on_embedding_bags(memory.model, log)
    sparse = [p for name, p in twin.named_parameters() if "lookup" in name]
    dense = [p for name, p in twin.named_parameters() if "lookup" not in name]
    optimizers = [torch.optim.Adagrad(sparse, lr=0.02), torch.optim.Adam(dense, lr=1e-3)]

    def on_bags(batches: Iterator[Batch]) -> Iterator[Any]:
        for numbers, ids, label in batches:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(twin(numbers, ids), label)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            yield loss.detach()

    events = np.random.default_rng(0).permutation(log.train)
    size = demo.batch_size
    batches = [log.batch(events[i : i + size]) for i in range(0, min(len(events), 128 * size) - size, size)]
    return {
        "name": f"KuaiRand demo, B {size}, cache 4 MiB",
        "ways": ways_of(ssd, memory, options) | {"nn.EmbeddingBag, memory": on_bags},
        "batches": itertools.cycle(batches),
        "ssd": ssd,
        "memory": memory,
    }


def measure(
    ways: dict[str, Callable], batches: Iterator[Batch], disk: TableDisk, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each step of each way, a stretch of one after a stretch of the other. And, by the keys of the results,
    requests of a prefetched step to the disk and requests a second that the disk can do."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    requests, rates = list[float](), list[float]()
    for turn in range(options.rounds + 1):
        for name, run in ways.items():
            # Every stretch has batches of its own: on those of the way before it would find their rows in the cache.
            # A few steps more than are counted: the first ones find what the last way left in the processor's.
            some = list(itertools.islice(batches, options.steps + 3))
            marks: list[float] = []
            before = disk.requests
            for _ in run(iter(some)):
                marks.append(time.perf_counter())
            if turn:
                seconds[name] += [b - a for a, b in itertools.pairwise(marks)][2:]
            if turn and name == PREFETCHED:
                requests.append((disk.requests - before) / len(some))
        rates.append(disk.rate())  # The ways before ran in memory, so that the disk has rested.
    return seconds, {"requests_a_step": statistics.mean(requests), "disk_requests_per_s": statistics.median(rates)}


def report(
    case: dict[str, Any], seconds: dict[str, list[float]], reads: dict[str, float], options: argparse.Namespace
) -> dict[str, Any]:
    median = {name: statistics.median(some) * 1e3 for name, some in seconds.items()}
    reference = median["nn.EmbeddingBag, memory"]
    ssd_ms = median["compiled, SSD"] - median["compiled, memory"]
    exposed_ms = median[PREFETCHED] - median[COMPUTE]
    limit = limit_ms(median[COMPUTE], *reads.values())
    ssd = case["ssd"]
    plan = ssd._plans.latest
    assert plan is not None
    prepare_ms = sum(one.ns / max(1, one.calls) for _, one in [*plan.keys.stats(), *plan.rows.stats()]) / 1e6
    before, after = (ops_in(graph) for graph in (plan.recorded, plan.whole.graph))
    steps = 3 * (options.rounds + 1) * (options.steps + 3)
    result = {
        "case": case["name"],
        "median_ms": {name: round(one, 2) for name, one in median.items()},
        "ratio_to_embedding_bag": {name: round(one / reference, 2) for name, one in median.items()},
        "ssd_ms": round(ssd_ms, 2),
        "hidden": round(1 - exposed_ms / ssd_ms, 3) if ssd_ms > 0 else None,
        "ops_before_after": [before, after],
        "hit_rate": round(ssd.embedding.stats()["hit_rate"], 4),
        "prepare_ms": round(prepare_ms, 2),
        "hideable": round(min(1.0, median[COMPUTE] / ssd_ms), 3) if ssd_ms > 0 else None,
        "read_a_step": round((ssd.embedding.stats()["device"]["misses"] - case["read_before"]) / steps),
        **{name: round(one, 1) for name, one in reads.items()},
        "limit_ms": round(limit, 2),
        "step_over_limit": round(median[PREFETCHED] / limit, 3),
    }
    print(json.dumps(result), flush=True)
    rows = [[name, f"{one:.1f}", f"{one / reference:.2f}"] for name, one in median.items()]
    print(case["name"])
    print(table(["way", "ms a step", "of nn.EmbeddingBag"], rows))
    hidden = "none to hide" if result["hidden"] is None else f"{result['hidden']:.0%} hidden"
    print(
        f"SSD time {ssd_ms:.1f} ms a step, {hidden}; preparing takes {prepare_ms:.1f} ms;"
        f" {result['read_a_step']:,} rows read a step; ops recorded {before}, compiled {after}"
    )
    print(
        f"step / limit {result['step_over_limit']:.2f}: {median[PREFETCHED]:.1f} ms over {limit:.1f} ms, the longer of"
        f" compute alone, {median[COMPUTE]:.1f} ms, and {reads['requests_a_step']:,.0f} requests at"
        f" {reads['disk_requests_per_s']:,.0f} a second"
    )
    if options.explain:
        print(ssd.explain())
    return result


def ops_in(graph: torch.fx.Graph) -> int:
    return sum(node.op not in ("placeholder", "get_attr", "output") for node in graph.nodes)


if __name__ == "__main__":
    main()
