"""What `oneemb.plan` says of a step beside what the step takes: bytes between ranks, and time.

    python benchmarks/bench_plan.py [--ranks 1 2 3] [--path DIR]

Each case is a graph that does nothing but to look ids up (8 tables, Zipf 1.05) and train their rows with Adagrad, on
1, 2 and 3 processes of this machine, which talk by gloo, one thread each. Batches are not prepared ahead. Before the
cases of a number of processes `oneemb.measure_machine()` measures the machine; the plan knows of the case its sizes
and the share of unique ids.

Bytes are counted where they go into the process group. They are compared twice: with what the plan says, where every
owner has as many keys as any other and batches are prepared ahead, and with the messages of the counts of keys that
there were (`exact`).

Times are those that a fifth of the steps are below: the machine may have other users. One JSON line a case.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _machine import keep_freed_memory, machine, table
from torch import distributed

import oneemb
from oneemb.embeddings.rank_traffic import KeyCounts, messages_of
from oneemb.kernels.owner import owner_of
from oneemb.planning.machine import QUIET, zipf_ids

TABLES, VOCABULARY, BATCHES, STEPS = 8, 200_000, 8, 60
CASES = list(itertools.product([256, 2048, 8192], [8, 32, 128]))  # samples of a rank, weights of a row


class Counting:
    """A process group that counts the bytes that go to each other rank."""

    def __init__(self, group: Any):
        self._group, self.sent = group, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def alltoall_base(self, received: torch.Tensor, sent: torch.Tensor, received_R: Any, sent_R: Any) -> Any:
        size = sent.element_size() * (sent.numel() // max(1, len(sent)))
        self.sent += size * (sum(sent_R) - sent_R[self._group.rank()])
        return self._group.alltoall_base(received, sent, received_R, sent_R)


class Steps(oneemb.TrainGraph):
    """Looks ids up and trains their rows."""

    def __init__(self, embedding: oneemb.MultiTableEmbedding):
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.01))

    def build(self, ids: torch.Tensor) -> None:
        self.embedding(ids).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rank", type=int, nargs=2, metavar=("RANK", "RANKS"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_rank(*options.rank, options.folder)
        return
    print(json.dumps(machine()), flush=True)
    rows = []
    for ranks in options.ranks:
        figures = oneemb.measure_machine()
        for measured in measure(ranks):
            batch, dim = measured["batch"], measured["dim"]
            plan = oneemb.plan(
                rows=TABLES * VOCABULARY, embedding_dim=dim, ids=TABLES, unique=measured["unique"], batch=batch,
                ranks=ranks, optimizer="Adagrad", machine=figures,
            )  # fmt: skip
            ahead_ms = sum(message.ms for message in plan.messages if message.ahead)  # of a thread that there is not
            case = {
                "ranks": ranks, "batch": batch, "dim": dim, "unique": round(measured["unique"], 3),
                "step_ms": measured["ms"], "planned_ms": round(plan.step_ms + ahead_ms, 3),
                "bytes": measured["bytes"], "planned_bytes": plan.bytes_sent, "exact_bytes": measured["exact"],
                "parts_ms": {name: round(ms, 3) for name, ms in plan.parts_ms.items()},
            }  # fmt: skip
            print(json.dumps(case), flush=True)
            ratio, bytes_ratio = case["planned_ms"] / case["step_ms"], "-"
            if ranks > 1:
                bytes_ratio = f"{case['planned_bytes'] / case['bytes']:.3f}"
            exact = "yes" if case["bytes"] == case["exact_bytes"] else "NO"
            rows.append([
                str(ranks), str(batch), str(dim), f"{case['step_ms']:.2f}", f"{case['planned_ms']:.2f}",
                f"{ratio:.2f}", f"{case['bytes']:,.0f}", bytes_ratio, exact,
            ])  # fmt: skip
    print(table(["ranks", "batch", "dim", "step ms", "planned", "ratio", "bytes a rank", "ratio", "exact"], rows))
    within = sum(abs(float(row[5]) - 1) <= 0.2 for row in rows)
    print(f"{within} of {len(rows)} step times are within a fifth of the plan's")


def measure(ranks: int) -> list[dict[str, Any]]:
    """What each case takes on so many processes."""
    with tempfile.TemporaryDirectory(prefix="oneemb-bench-") as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--folder", folder]
        processes = [
            subprocess.Popen([*command, "--rank", str(rank), str(ranks)], stdout=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank has failed")
    return [json.loads(line) for line in said[0].splitlines()]


def be_rank(rank: int, ranks: int, folder: str) -> None:
    """Run every case as one of the ranks; the first one prints what it has measured."""
    keep_freed_memory()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    for c, (batch, dim) in enumerate(CASES):
        result = run_case(os.path.join(folder, str(c)), rank, ranks, batch, dim)
        if rank == 0:
            print(json.dumps(result), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def run_case(path: str, rank: int, ranks: int, batch: int, dim: int) -> dict[str, Any]:
    group = Counting(distributed.group.WORLD)
    embedding = oneemb.MultiTableEmbedding(
        "bench", dim, torch.float32, torch.int64, [oneemb.make_table()] * TABLES,
        oneemb.make_device_mem_store_options(path), num_threads=1, process_group=group if ranks > 1 else None,
    )  # fmt: skip
    graph = Steps(embedding)
    batches = [[zipf_ids(np.random.default_rng([b, r]), VOCABULARY, (batch, TABLES)) for r in range(ranks)]
               for b in range(BATCHES)]  # fmt: skip
    loader = ((torch.from_numpy(batches[b % BATCHES][rank]),) for b in range(BATCHES + STEPS))
    marks, sent = [], []
    for _ in graph.run(loader, prefetch_depth=0):
        marks.append(time.perf_counter())
        sent.append(group.sent)
    embedding.clear()  # The rows may go.
    embedding.close()
    counts = [[counts_of(ids, ranks) for ids in each] for each in batches]
    return {
        "batch": batch, "dim": dim,
        "unique": sum(map(sum, (each[rank] for each in counts))) / BATCHES / batch / TABLES,
        "ms": round(float(np.quantile(np.diff(marks)[BATCHES - 1 :], QUIET)) * 1e3, 3),
        "bytes": (sent[2 * BATCHES - 1] - sent[BATCHES - 1]) / BATCHES,
        "exact": exact_bytes(counts, rank, dim) / BATCHES if ranks > 1 else 0,
    }  # fmt: skip


def counts_of(id_BT: np.ndarray, ranks: int) -> list[int]:
    """How many keys of a batch each rank owns."""
    count_R = np.zeros(ranks, np.int64)
    for t, column in enumerate(id_BT.T):
        id_U = np.unique(column)
        count_R += np.bincount(owner_of(np.full(len(id_U), t, np.int32), id_U, ranks), minlength=ranks)
    return count_R.tolist()


def exact_bytes(counts: list[list[list[int]]], rank: int, dim: int) -> int:
    """What this rank sends to others in a step with each of the batches."""
    total = 0
    for each in counts:
        messages = messages_of([KeyCounts(dim, 4, each[rank], [asks_R[rank] for asks_R in each])], in_run=False)
        total += sum(sum(message.sent_R) - message.sent_R[rank] for message in messages)
    return total


if __name__ == "__main__":
    main()
