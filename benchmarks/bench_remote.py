"""Rows in a Redis server beside redis-benchmark on the same server.

    python benchmarks/bench_remote.py [--rounds 9] [--dims 64 16] [--depth 512] [--threads 1] [--cases rows training]

It starts a redis-server of its own, in memory, on a free port of loopback. A case is a function in CASES.

    rows    rows a second that are pushed and pulled, batches of 8,192 different ids out of 100,000; beside
            redis-benchmark's SET and GET of values as large, from one connection with `depth` commands under way. They
            take turns: every round runs each once. Its keys are 16 bytes long, and those of rows about 50.
    training  ms of a training step whose rows are in Redis, below a cache of an eighth of them: 8 tables, 64 weights,
            Adagrad, batches of 2,048, an MLP of --width; called, and by `graph.run`, which pulls the rows of the next
            batch meanwhile, beside the same in memory. `hidden` is the share of what Redis costs a called step that
            `run` does not wait for. Rounds are of ten steps.

Figures are medians over the rounds; `of redis-benchmark` is the median of the rounds' own ratios.
"""

import argparse
import contextlib
import csv
import json
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _machine import machine, table

BATCH, BATCHES_A_ROUND, IDS = 8192, 8, 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 16])
    parser.add_argument("--depth", type=int, default=512, help="commands that redis-benchmark has under way")
    parser.add_argument("--threads", type=int, default=1, help="connections of oneemb")
    parser.add_argument("--width", type=int, default=1024, help="of the MLP of the case `training`")
    parser.add_argument("--compute-threads", type=int, default=1, help="torch's, in the case `training`")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    if shutil.which("redis-server") is None or shutil.which("redis-benchmark") is None:
        print("left out: there is no redis-server and redis-benchmark (apt-get install redis-server)")
        return
    print(json.dumps({"machine": machine(), "redis": version(), "batch": BATCH}), flush=True)
    lines = []
    with redis_server() as port:
        for name in arguments.cases:
            for case in CASES[name](arguments, port):
                print(json.dumps(case), flush=True)
                lines.append(case)
    for name in arguments.cases:
        cases = [case for case in lines if case["case"] == name]
        print(table(list(cases[0]), [[shown(value) for value in case.values()] for case in cases]))


def shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def rows(arguments: argparse.Namespace, port: int) -> Iterator[dict[str, Any]]:
    """Rows a second that are pushed and pulled, and redis-benchmark's commands a second."""
    for dim in arguments.dims:
        yield from rows_of(dim, arguments, port)


def rows_of(dim: int, arguments: argparse.Namespace, port: int) -> Iterator[dict[str, Any]]:
    from oneemb.storage.remote.servers import open_server

    rng = np.random.default_rng(0)
    server = open_server(f"redis://127.0.0.1:{port}/?prefix=bench&&num_threads={arguments.threads}")
    value_ND = rng.random((BATCH, dim), np.float32)

    def push(ids: list[np.ndarray]) -> None:
        for id_N in ids:
            server.push(f"d{dim}", id_N, [value_ND[: len(id_N)]])

    def pull(ids: list[np.ndarray]) -> None:
        for id_N in ids:
            server.pull(f"d{dim}", id_N, [dim])

    every_id = np.arange(IDS) * 7919 * 2**20  # far apart, with keys of all lengths; a pull finds every row
    push(np.array_split(every_id, -(-IDS // BATCH)))
    rates: dict[str, list[float]] = {"push": [], "SET": [], "pull": [], "GET": []}
    for n in range(-1, arguments.rounds):
        ids = [rng.choice(every_id, BATCH, replace=False) for _ in range(BATCHES_A_ROUND)]
        measured = {
            "push": rate(push, ids),
            "SET": redis_benchmark(port, "set", 4 * dim, arguments.depth),
            "pull": rate(pull, ids),
            "GET": redis_benchmark(port, "get", 4 * dim, arguments.depth),
        }
        if n >= 0:  # the first one warms up
            for name, value in measured.items():
                rates[name].append(value)
    server.close()
    for ours, theirs in (("push", "SET"), ("pull", "GET")):
        yield {
            "case": "rows",
            "dim": dim,
            "call": ours,
            "rows/s": round(statistics.median(rates[ours])),
            "redis-benchmark": f"{theirs} {statistics.median(rates[theirs]):,.0f}/s",
            "of redis-benchmark": statistics.median(a / b for a, b in zip(rates[ours], rates[theirs], strict=True)),
        }


TABLES, DIM, SAMPLES, STEPS_A_ROUND, WARM_ROUNDS = 8, 64, 2048, 10, 4


def training(arguments: argparse.Namespace, port: int) -> Iterator[dict[str, Any]]:
    """A step with rows in Redis, called and run, beside one with rows in memory."""
    import torch

    import oneemb

    class Graph(oneemb.TrainGraph):
        def __init__(self, options: Any):
            super().__init__()
            self.embedding = oneemb.MultiTableEmbedding(
                "rows", DIM, torch.float32, torch.int64, [oneemb.make_table()] * TABLES, options
            )
            layers, width = torch.nn, arguments.width
            self.dense = layers.Sequential(
                layers.Linear(TABLES * DIM, width), layers.ReLU(), layers.Linear(width, width), layers.ReLU(),
                layers.Linear(width, 1),
            )  # fmt: skip
            self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.01))

        def build(self, ids: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            logit = self.dense(self.embedding(ids).flatten(1)).squeeze(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
            loss.backward()
            return loss.detach()

    torch.set_num_threads(arguments.compute_threads)
    rng = np.random.default_rng(0)

    def batches() -> list[Any]:
        id_NBT = (rng.random((STEPS_A_ROUND, SAMPLES, TABLES)) ** 3 * IDS).astype(np.int64)
        return [(torch.from_numpy(id_BT), torch.rand(SAMPLES)) for id_BT in id_NBT]

    def step(graph: Graph, ahead: bool, given: list[Any]) -> float:
        begin = time.perf_counter()
        for _ in graph.run(given) if ahead else (graph(*batch) for batch in given):
            pass
        return (time.perf_counter() - begin) / len(given) * 1e3

    with tempfile.TemporaryDirectory() as folder:
        cache_mb = IDS * TABLES * DIM * 8 // 8 // 2**20
        options = {
            name: oneemb.make_cached_remote_store_options(
                f"redis://127.0.0.1:{port}/?prefix={name}&&num_threads={arguments.threads}",
                cache_mb,
                f"{folder}/{name}",
            )
            for name in ("called", "run")
        }
        graphs = {"memory": Graph(oneemb.make_device_mem_store_options(f"{folder}/memory"))}
        graphs |= {name: Graph(keywords) for name, keywords in options.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for n in range(-WARM_ROUNDS, arguments.rounds):
            given = batches()
            for name, graph in graphs.items():
                taken = step(graph, name == "run", given)
                if n >= 0:  # the first ones bring most of the rows, and warm up
                    times[name].append(taken)
        ms = {name: statistics.median(taken) for name, taken in times.items()}
        stats = graphs["run"].embedding.stats()
        steps = (WARM_ROUNDS + arguments.rounds) * STEPS_A_ROUND
        for graph in graphs.values():
            graph.embedding.clear()  # The rows may go.
            graph.embedding.close()
    yield {
        "case": "training",
        "in memory, ms": ms["memory"],
        "called, ms": ms["called"],
        "run, ms": ms["run"],
        "hidden": (ms["called"] - ms["run"]) / (ms["called"] - ms["memory"]),
        "rows pulled a step": round(stats["remote"]["rows_pulled"] / steps),
        "rows pushed a step": round(stats["remote"]["rows_pushed"] / steps),
    }


CASES: dict[str, Callable[[argparse.Namespace, int], Iterator[dict[str, Any]]]] = {"rows": rows, "training": training}


def rate(call: Callable[[list[np.ndarray]], None], ids: list[np.ndarray]) -> float:
    """Rows a second of a call on a round's batches."""
    begin = time.perf_counter()
    call(ids)
    return BATCH * BATCHES_A_ROUND / (time.perf_counter() - begin)


def redis_benchmark(port: int, command: str, size_bytes: int, depth: int) -> float:
    """Commands a second, as redis-benchmark measures them."""
    words = f"redis-benchmark -p {port} -t {command} -d {size_bytes} -r {IDS} -c 1 -P {depth} --csv".split()
    done = subprocess.run([*words, "-n", str(BATCH * BATCHES_A_ROUND)], capture_output=True, text=True, check=True)
    return float(next(line[1] for line in csv.reader(done.stdout.splitlines()) if line and line[0] == command.upper()))


def version() -> str:
    return subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]


@contextlib.contextmanager
def redis_server() -> Iterator[int]:
    """The port of a server that keeps what it has in memory alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        words = f"redis-server --port {port} --bind 127.0.0.1 --appendonly no --save".split()
        with subprocess.Popen([*words, "", "--dir", folder], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                if not any("Ready to accept connections" in line for line in process.stdout):
                    raise RuntimeError("redis-server did not start")
                yield port
            finally:
                process.terminate()


if __name__ == "__main__":
    main()
