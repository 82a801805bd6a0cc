"""From a training step to a served row: the lag of deltas, lookups meanwhile, and lookups of rows in layers.

    python benchmarks/bench_serving_lag.py --rows 1000000 10000000

A job saves a delta of a thousandth of its rows, again and again; a server in another process follows it, five times a
second, and looks ids up all the time. The lag runs from the end of a step, before the delta is saved, to the first
lookup that finds its rows. Beside it stands what a server without layers would do: the time in which it makes the whole
file of a delta. Lookups "meanwhile" are those between the end of the save and that first lookup.

Lookups of versions with one layer and with four are measured in turn with those of a whole file of the same version.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time

import numpy as np
import torch
from _machine import keep_freed_memory, machine, save_results, table

import oneemb

DIM, IDS, FOLLOW_S = 16, 1664, 0.2


class Job:
    """A job with rows of ids 0 to `rows` - 1, whose snapshots are named by numbers; the first one is whole."""

    def __init__(self, folder, rows):
        self.rng, self.rows, self.saved = np.random.default_rng(0), rows, 0
        self.embedding = oneemb.MultiTableEmbedding(
            "rows", DIM, torch.float32, torch.int64, [oneemb.make_table()], oneemb.make_device_mem_store_options(folder)
        )
        self.optimizer = torch.optim.SGD(self.embedding.parameters(), lr=0.1)
        for begin in range(0, rows, 1 << 18):
            self.train(np.arange(begin, min(begin + (1 << 18), rows)))
        self.embedding.save_snapshot("0")

    def train(self, ids):
        self.embedding(torch.from_numpy(ids)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def delta(self, share):
        """Train a share of the rows and save a delta; returns the times of the step's end and of the save's end."""
        self.train(self.rng.choice(self.rows, int(self.rows * share), replace=False))
        trained = time.monotonic()
        self.saved += 1
        self.embedding.save_delta(str(self.saved), since=str(self.saved - 1))
        return trained, time.monotonic()


def serve(folder, rows, ends, out):
    """The server: sends {number of a version: time of its first lookup} and all lookups, (end, seconds)."""
    torch.set_num_threads(1)
    rng, first, looked = np.random.default_rng(os.getpid()), {}, []
    batches = [torch.from_numpy(rng.integers(0, rows, IDS)) for _ in range(64)]
    with oneemb.InferenceEmbedding.open(folder, num_threads=1, verify=True) as served:
        for ids in batches:
            served(ids)
        served.follow(FOLLOW_S)
        out.send("ready")
        n = 0
        while not ends.is_set():
            name, begin = served.version.name, time.monotonic()
            served(batches[n % len(batches)])
            end = time.monotonic()
            first.setdefault(int(name), end)
            looked.append((end, end - begin))
            n += 1
            time.sleep(0.001)
        out.send((first, looked))


def lags(folder, rows, deltas):
    """Lags in seconds, and p99 of lookups meanwhile over p99 of all others."""
    job = Job(folder, rows)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ends = context.Event()
    server = context.Process(target=serve, args=(folder, rows, ends, theirs))
    server.start()
    ours.recv()
    times = []
    for _ in range(deltas):
        times.append(job.delta(0.001))
        time.sleep(1.5 + job.rng.random() * FOLLOW_S)
    time.sleep(5)
    ends.set()
    first, looked = ours.recv()
    server.join()
    served = [min(when for number, when in first.items() if number > n) for n in range(deltas)]
    lag = [when - trained for when, (trained, _) in zip(served, times, strict=True)]
    busy = [(saved, when) for when, (_, saved) in zip(served, times, strict=True)]
    meanwhile, others = [], []
    for end, seconds in looked:
        within = any(begin <= end <= last for begin, last in busy)
        if within:
            meanwhile.append(seconds)
        elif not any(trained <= end <= saved for trained, saved in times):
            others.append(seconds)
    return job, lag, float(np.quantile(meanwhile, 0.99) / np.quantile(others, 0.99))


def layered(job, folder, calls):
    """{layers: (p50, p99) over those of a whole file} of versions with one and with four layers; and the seconds in
    which a whole file was made."""
    rng, found, whole_s = np.random.default_rng(1), {}, []
    batches = [torch.from_numpy(rng.integers(0, job.rows, IDS)) for _ in range(64)]
    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as other:
        base = str(job.saved)
        with oneemb.InferenceEmbedding.open(folder, base, folder=f"{other}/layers", num_threads=1) as served:
            for shares in ([0.001], [0.016, 0.008, 0.004, 0.002]):
                served.rollback(base)
                for share in shares:
                    job.delta(share)
                    served.refresh()
                layers = sum("-since-" in name for name in os.listdir(f"{other}/layers"))
                begin = time.perf_counter()
                whole = oneemb.InferenceEmbedding.open(folder, folder=f"{other}/{layers}", num_threads=1)
                whole_s.append(time.perf_counter() - begin)
                seconds = [[], []]
                for n in range(calls):
                    for one, spent in zip((served, whole), seconds, strict=True):
                        begin = time.perf_counter()
                        one(batches[n % 64])
                        if n >= 128:  # All blocks have been compared with their checksums.
                            spent.append(time.perf_counter() - begin)
                assert torch.equal(served(batches[0]), whole(batches[0]))
                of = [np.quantile(seconds[0], q) / np.quantile(seconds[1], q) for q in (0.5, 0.99)]
                found[len(shares)] = [float(one) for one in of]
                whole.close()
    return found, statistics.median(whole_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--deltas", type=int, default=40)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--out")
    options = parser.parse_args()
    keep_freed_memory()
    cases = []
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as parent:
            folder = f"{parent}/job"
            job, lag, meanwhile = lags(folder, rows, options.deltas)
            of_whole, whole_s = layered(job, folder, options.calls)
            job.embedding.close()
        cases.append({
            "rows": rows, "lag_s": statistics.median(lag), "lag_p99_s": float(np.quantile(lag, 0.99)),
            "whole_file_s": whole_s, "meanwhile": meanwhile, "one_layer": of_whole[1], "four_layers": of_whole[4],
        })  # fmt: skip
        print(json.dumps(cases[-1]))
    head = ["rows", "lag, s", "p99", "whole file, s", "p99 meanwhile", "one layer", "four layers"]
    print(table(head, [[str(value) for value in case.values()] for case in cases]))
    if options.out:
        save_results(options.out, machine(), cases)


if __name__ == "__main__":
    main()
