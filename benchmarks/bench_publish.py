"""Publishing a delta: seconds of oneemb.publish for each sink, beside what one would do by hand for the whole table.

    python benchmarks/bench_publish.py --rows 100000 --out benchmarks/results/publish.json

Each turn a job trains some rows of a table of 32 weights and saves a delta; then each sink gets the delta, and the same
place is written by hand from all rows: MSET of all rows by redis-py, a Parquet file by `export_rows`, a served file by
`InferenceEmbedding.open`, an HNSW index by faiss. Seconds are those of the processor, all threads of this process, and
of the clock: medians of the turns. Redis is a `redis-server` that is started here; without one it is left out.

Then one publisher follows a training process that saves deltas in the same way, with a pause after each; the lag of a
sink is the time from the end of the step before a save to the moment at which the sink shows the version.
"""

import argparse
import functools
import json
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import faiss
import numpy as np
import torch
import usearch.index
from _machine import keep_freed_memory, machine, save_results, table

import oneemb

DIM = 32


class Job:
    """A table of which some rows are trained before each delta."""

    def __init__(self, folder: str, rows: int, changed: float):
        self.folder, self._rows, self._count, self._saved = folder, rows, int(rows * changed), 0
        self.trained_s: list[float] = []
        self.embedding = oneemb.MultiTableEmbedding(
            "items", DIM, torch.float32, torch.int64, [oneemb.make_table()],
            oneemb.make_device_mem_store_options(folder), oneemb.make_uniform_initializer(-1.0, 1.0),
        )  # fmt: skip
        self._optimizer = torch.optim.SGD(self.embedding.parameters(), lr=0.1)
        self._train(np.arange(rows))
        self.embedding.save_snapshot("v0")

    def save_delta(self) -> str:
        self._saved += 1
        self._train(np.random.default_rng(self._saved).choice(self._rows, self._count, replace=False))
        self.trained_s.append(time.monotonic())
        self.embedding.save_delta(f"v{self._saved}", f"v{self._saved - 1}")
        return f"v{self._saved}"

    def _train(self, ids: np.ndarray) -> None:
        for part in torch.from_numpy(ids).split(65536):
            self.embedding(part).sum().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def all_rows(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        with oneemb.make_persistent_table_reader(self.folder, name, "int64", "float32") as reader:
            keys, values = zip(*reader, strict=True)
        return np.concatenate(keys), np.concatenate(values)


class Timed:
    """A sink that notes when it has come to show each version."""

    def __init__(self, sink: oneemb.sinks.Sink):
        self.name, self._sink = sink.name, sink
        self.version, self.close, self.shown_s = sink.version, sink.close, dict[str, float]()

    @property
    def wants_whole(self) -> bool:
        return self._sink.wants_whole

    def apply(self, changes: oneemb.sinks.Changes) -> None:
        self._sink.apply(changes)
        self.shown_s[changes.version.name] = time.monotonic()


def made_sinks(root: Path) -> dict[str, oneemb.sinks.Sink]:
    return {
        "function": oneemb.sinks.Function(lambda changes: [batch.weight_ND.sum() for batch in changes.batches()]),
        "Parquet files": oneemb.sinks.Files(root / "files", merge_share=100.0),
        "table": oneemb.sinks.Table(root / "table"),
        "served file": oneemb.sinks.ServedFile(root / "served" / "file"),
        "FAISS HNSW32, in memory": oneemb.sinks.Faiss(None, "HNSW32"),
        "usearch, in memory": oneemb.sinks.Usearch(None),
    }


def train(folder: str, rows: int, changed: float, saves: int, pause_s: float, publisher: Connection) -> None:
    """Save deltas, once the publisher has brought all rows to the sinks; sends the time of the end of the step before
    each."""
    torch.set_num_threads(1)
    job = Job(folder, rows, changed)
    publisher.send("saved")
    publisher.recv()
    for _ in range(saves):
        job.save_delta()
        time.sleep(pause_s)
    job.embedding.close()
    publisher.send(job.trained_s)


def lags_of(folder: Path, sinks: dict[str, oneemb.sinks.Sink], *arguments: float) -> dict[str, np.ndarray]:
    """Seconds of each sink that follows a training process, for each version, or a later one, to be shown."""
    timed = {name: Timed(sink) for name, sink in sinks.items()}
    context = multiprocessing.get_context("spawn")
    trainer, theirs = context.Pipe()
    process = context.Process(target=train, args=(str(folder), *arguments, theirs))
    process.start()
    trainer.recv()
    with oneemb.publish(folder, list(timed.values()), seconds=0.1) as publisher:
        publisher.flush()
        trainer.send("go")
        trained_s = trainer.recv()
        publisher.flush()
    process.join()
    return {
        name: np.array([
            min(at for version, at in one.shown_s.items() if int(version.removeprefix("v")) > number) - trained
            for number, trained in enumerate(trained_s)
        ])
        for name, one in timed.items()
    }  # fmt: skip


def seconds_of(call: Callable[[], object]) -> tuple[float, float]:
    """(seconds of processors, seconds of the clock) of a call."""
    processor, clock = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - processor, time.perf_counter() - clock


def start_redis(folder: Path) -> tuple[subprocess.Popen, int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = ["redis-server", "--port", str(port), "--dir", str(folder), "--save", "", "--bind", "127.0.0.1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "Ready to accept connections" in line:
            return process, port
    raise RuntimeError("redis-server does not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--saves", type=int, default=60, help="deltas of the process that the sinks follow")
    parser.add_argument("--pause", type=float, default=2.0, metavar="SECONDS", help="time between two of them")
    parser.add_argument("--out", help="file of the results")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    about = machine()
    print(json.dumps(about), flush=True)
    with tempfile.TemporaryDirectory(prefix="oneemb-bench-") as folder:
        root = Path(folder)
        job = Job(f"{folder}/rows", options.rows, options.changed)
        sinks = made_sinks(root)

        def by_usearch(name: str) -> None:
            keys, values = job.all_rows(name)
            usearch.index.Index(ndim=DIM, metric="ip", dtype="f32").add(keys, values, threads=1)

        def by_index(name: str) -> None:
            keys, values = job.all_rows(name)
            index = faiss.IndexIDMap(faiss.IndexHNSWFlat(DIM, 32, faiss.METRIC_INNER_PRODUCT))
            index.add_with_ids(values, keys)

        hands: dict[str, Callable[[str], object]] = {
            "function": lambda name: job.all_rows(name)[1].sum(),
            "Parquet files": lambda name: oneemb.export_rows(
                job.folder, root / "all.parquet", snapshot=name, overwrite=True
            ),
            "FAISS HNSW32, in memory": by_index,
            "usearch, in memory": by_usearch,
        }
        process = None
        if shutil.which("redis-server"):
            import redis

            process, port = start_redis(root)
            client = redis.Redis(port=port)
            sinks["Redis"] = oneemb.sinks.Redis(f"redis://127.0.0.1:{port}?prefix=items")

            def by_redis(name: str) -> None:
                keys, values = job.all_rows(name)
                for begin in range(0, len(keys), 10_000):
                    part = slice(begin, begin + 10_000)
                    client.mset(dict(zip(map(str, keys[part].tolist()), map(bytes, values[part]), strict=True)))

            hands["Redis"] = by_redis
        spent: dict[str, dict[str, list[tuple[float, float]]]] = {name: {"sink": [], "hand": []} for name in sinks}
        publishers = {name: oneemb.publish(job.folder, [sink], seconds=1e5) for name, sink in sinks.items()}
        first = {name: seconds_of(publisher.flush) for name, publisher in publishers.items()}
        for turn in range(-1, options.turns):
            version = job.save_delta()
            for name, publisher in publishers.items():
                seconds = seconds_of(publisher.flush)
                by_hand = seconds_of(functools.partial(hands[name], version)) if name in hands else first[name]
                if turn >= 0:
                    spent[name]["sink"].append(seconds)
                    spent[name]["hand"].append(by_hand)
        for publisher in publishers.values():
            publisher.close()
        job.embedding.clear()
        job.embedding.close()
        followers = made_sinks(root / "followed")
        if process is not None:
            followers["Redis"] = oneemb.sinks.Redis(f"redis://127.0.0.1:{port}?prefix=followed")
        lags = lags_of(root / "trained", followers, options.rows, options.changed, options.saves, options.pause)
        if process is not None:
            process.terminate()
            process.wait()
    results, rows = [], int(options.rows * options.changed)
    for name, both in spent.items():
        (processor, clock), (hand, _) = (
            tuple(statistics.median(one[n] for one in both[side]) for n in (0, 1)) for side in ("sink", "hand")
        )
        ratio = statistics.median(b[0] / a[0] for a, b in zip(both["sink"], both["hand"], strict=True))
        results.append({
            "sink": name, "rows": options.rows, "changed": rows, "delta_ms": round(processor * 1e3, 2),
            "delta_clock_ms": round(clock * 1e3, 2), "rows_per_processor_s": round(rows / processor),
            "all_rows_by_hand_ms": round(hand * 1e3, 1), "times_less": round(ratio, 1),
            "all_rows_per_processor_s": round(options.rows / first[name][0]),
            "lag_p50_s": round(float(np.quantile(lags[name], 0.5)), 2),
            "lag_p99_s": round(float(np.quantile(lags[name], 0.99)), 2),
        })  # fmt: skip
        print(json.dumps(results[-1]), flush=True)
    save_results(options.out, about, results)
    print(table(list(results[0]), [[str(value) for value in result.values()] for result in results]))


if __name__ == "__main__":
    main()
