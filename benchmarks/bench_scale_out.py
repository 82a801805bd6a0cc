"""A training step of ranks that own rows together, beside TorchRec's DistributedModelParallel on the same ranks.

    python benchmarks/bench_scale_out.py                        2 processes, gloo; one id, then bags
    python benchmarks/bench_scale_out.py --ranks 1 2 3 --dim 64 --ids uniform
    python benchmarks/bench_scale_out.py --lookups bags           bags of 1 to 20 ids, which give their sums

A DLRM of 26 tables of 100,000 rows, 32 weights each, ids by Zipf's law (1.05), Adagrad, a batch of 2,048 on each rank
(of bags an eighth), every process on one thread. The dense part is the same module in DistributedDataParallel for all.
TorchRec's tables are sharded by rows and by tables, its optimizer is fused, and it is run plainly and with
TrainPipelineSparseDist, which exchanges the ids of coming batches ahead as `run` does; it is left out where it is not
installed. The same TorchRec model is also run with oneemb's sharder. The dense part trained alone, on rows that stay,
is what no system can save.

The systems take turns in the same processes, a stretch of steps each. Printed are medians of the time of a step, as a
share of the best of TorchRec's, and of oneemb

    sent            bytes that a rank sends to others in a step, and what it would send if a key, a row and a gradient
                    went for each id
    in exchanges    the time of a step that its own thread spends in exchanges, waiting for the others included

One JSON line a case goes before the table.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from _embedding_systems import Batch, Case, make_batches
from _machine import keep_freed_memory, load_results, machine, save_results, table
from bench_train_step import DenseDLRM
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

import oneemb

Steps = Callable[[Iterator[Any]], Iterator[Any]]
"""Trains on each of these batches; gives something after each step."""

LEARNING_RATE = 0.01


def main() -> None:
    options = parse()
    print(json.dumps(machine() | {"threads": 1}), flush=True)
    save_results(options.out, machine() | {"threads": 1}, [])
    for ranks in options.ranks:
        for lookups in options.lookups:
            bags = lookups == "bags"
            case = argparse.Namespace(
                **vars(options) | {"pooled": bags, "batch": max(1, options.batch // (8 if bags else 1))}
            )
            with tempfile.TemporaryDirectory(prefix="oneemb-bench-") as folder:
                multiprocessing.spawn(work, (ranks, folder, case), nprocs=ranks)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of a table")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2048, help="samples of a rank; of bags an eighth")
    parser.add_argument("--ids", choices=("zipf", "uniform"), default="zipf")
    parser.add_argument("--lookups", nargs="+", choices=("ids", "bags"), default=["ids", "bags"])
    parser.add_argument("--comm-dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="steps in a stretch")
    parser.add_argument("--warm", type=int, default=2, help="rounds that are not counted")
    parser.add_argument("--out", help="file of the results")
    return parser.parse_args()


def work(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    """One process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    case = Case("adagrad", options.dim, options.batch, options.tables, options.rows, options.ids, options.pooled)
    made = make_batches(case, options.steps, seed=rank)
    number_BX = torch.rand(options.batch, 13, generator=torch.Generator().manual_seed(rank))
    label_B = (number_BX.sum(1) > 6.5).float()
    graph = graph_of(folder, options)
    ours = [(*ids_of(batch, options.pooled), number_BX, label_B) for batch in made]
    systems: dict[str, tuple[Steps, list[Any]]] = {
        "oneemb, called": (lambda batches: (graph(*batch) for batch in batches), ours),
        "oneemb, run": (graph.run, ours),
        "dense part alone": (dense_steps(options), ours),
    }
    systems |= torchrec_systems(options, made, number_BX, label_B)
    seconds, traffic = measure(systems, options, graph)
    if rank == 0:
        report(ranks, seconds, traffic, statistics.mean(len(batch.id_N) for batch in made), options)
    distributed.barrier()
    distributed.destroy_process_group()


def ids_of(batch: Batch, pooled: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The arguments of a lookup: ids and, of bags, offsets."""
    ids = torch.from_numpy(batch.id_N)
    if not pooled:
        return ids.view(batch.length_BT.shape), None
    return ids, torch.from_numpy(np.concatenate([[0], np.cumsum(batch.length_BT)]))


class Graph(oneemb.TrainGraph):
    """The DLRM on embeddings whose rows the ranks own together."""

    def __init__(self, embedding: oneemb.MultiTableEmbedding, dense: torch.nn.Module):
        super().__init__()
        self.embedding, self.dense = embedding, dense
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=LEARNING_RATE))

    def build(
        self, ids: torch.Tensor, offsets: torch.Tensor | None, numbers: torch.Tensor, label: torch.Tensor
    ) -> torch.Tensor:
        loss = loss_of(self.dense, numbers, self.embedding(ids, offsets=offsets), label)
        loss.backward()
        return loss.detach()


def loss_of(dense: torch.nn.Module, number_BX: torch.Tensor, row_BTD: torch.Tensor, label_B: torch.Tensor) -> Any:
    return torch.nn.functional.binary_cross_entropy_with_logits(dense(number_BX, row_BTD), label_B)


def dense_of(options: argparse.Namespace) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(DenseDLRM(options.tables, 13, options.dim))


def dense_steps(options: argparse.Namespace) -> Steps:
    """Trains the dense part alone. The rows have a gradient, as those of a lookup, and stay as they are."""
    dense = dense_of(options)
    optimizer = torch.optim.Adagrad(dense.parameters(), lr=LEARNING_RATE)
    row_BTD = torch.randn(options.batch, options.tables, options.dim, requires_grad=True)

    def steps(batches: Iterator[Any]) -> Iterator[Any]:
        for _, _, number_BX, label_B in batches:
            optimizer.zero_grad()
            loss = loss_of(dense, number_BX, row_BTD, label_B)
            loss.backward()
            optimizer.step()
            yield loss.detach()

    return steps


def graph_of(folder: str, options: argparse.Namespace) -> Graph:
    embedding = oneemb.MultiTableEmbedding(
        "rows", options.dim, torch.float32, torch.int64, [oneemb.make_table()] * options.tables,
        oneemb.make_device_mem_store_options(f"{folder}/rows"), num_threads=1,
        process_group=distributed.group.WORLD, comm_dtype=getattr(torch, options.comm_dtype),
    )  # fmt: skip
    return Graph(embedding, dense_of(options))


def torchrec_systems(
    options: argparse.Namespace, made: Sequence[Batch], number_BX: torch.Tensor, label_B: torch.Tensor
) -> dict[str, tuple[Steps, list[Any]]]:
    """TorchRec's ways to run a step, by name."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    try:
        import torchrec
        from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
        from torchrec.distributed.types import ShardingEnv, ShardingPlan
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.streamable import Pipelineable

        import oneemb.torchrec
    except ImportError:
        return {}
    ranks, names = distributed.get_world_size(), [f"f{t}" for t in range(options.tables)]

    class Step(Pipelineable):
        def __init__(self, ids: Any, numbers: torch.Tensor, label: torch.Tensor):
            self.ids, self.numbers, self.label = ids, numbers, label

        def to(self, device: torch.device, non_blocking: bool = False) -> "Step":
            return self

        def record_stream(self, stream: object) -> None:
            pass

        def pin_memory(self) -> "Step":
            return self

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torchrec.EmbeddingBagCollection(
                device=torch.device("meta"),
                tables=[
                    torchrec.EmbeddingBagConfig(
                        name=f"t{t}", embedding_dim=options.dim, num_embeddings=options.rows, feature_names=[name]
                    )
                    for t, name in enumerate(names)
                ],
            )
            torch.manual_seed(0)
            self.dense = DenseDLRM(options.tables, 13, options.dim)

        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            row_BTD = self.rows(batch.ids).values().view(-1, options.tables, options.dim)
            loss = loss_of(self.dense, batch.numbers, row_BTD, batch.label)
            return loss, loss.detach()

    batches = [
        Step(
            torchrec.KeyedJaggedTensor.from_lengths_sync(
                names, torch.from_numpy(id_N), torch.from_numpy(length_P.astype(np.int32))
            ),
            number_BX,
            label_B,
        )
        for id_N, length_P in (batch.by_table() for batch in made)
    ]

    def system(kind: str, pipelined: bool) -> Steps:
        model = Model()
        apply_optimizer_in_backward(torch.optim.Adagrad, model.rows.parameters(), {"lr": LEARNING_RATE})
        shards = {
            f"t{t}": table_wise(t % ranks, compute_kernel="fused")
            if kind == "tables"
            else row_wise(compute_kernel="fused")
            for t in range(options.tables)
        }
        plan = construct_module_sharding_plan(model.rows, shards, local_size=ranks, world_size=ranks, device_type="cpu")
        sharder: Any = EmbeddingBagCollectionSharder()
        if kind == "keys":
            module_type = torchrec.EmbeddingBagCollection
            sharder = oneemb.torchrec.EmbeddingBagCollectionSharder(module_type=module_type, num_threads=1)
        parallel = DistributedModelParallel(
            model, env=ShardingEnv.from_process_group(distributed.group.WORLD), device=torch.device("cpu"),
            plan=ShardingPlan({"rows": plan}), sharders=[sharder],
        )  # fmt: skip
        dense = [parameter for name, parameter in parallel.named_parameters() if "dense" in name]
        optimizer = torch.optim.Adagrad(dense, lr=LEARNING_RATE)

        pipeline = TrainPipelineSparseDist(parallel, optimizer, torch.device("cpu"), execute_all_batches=True)

        def plain(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                optimizer.zero_grad()
                loss, _ = parallel(batch)
                loss.backward()
                optimizer.step()
                yield loss.detach()

        def in_pipeline(batches: Iterator[Any]) -> Iterator[Any]:
            batches = iter(batches)
            while True:
                try:
                    yield pipeline.progress(batches)
                except StopIteration:
                    return

        return in_pipeline if pipelined else plain

    kinds = {"keys": "oneemb's sharder", "rows": "TorchRec, by rows", "tables": "TorchRec, by tables"}
    return {
        f"{name}{', pipelined' if pipelined else ''}": (system(kind, pipelined), batches)
        for kind, name in kinds.items()
        for pipelined in (False, True)
    }


def measure(
    systems: dict[str, tuple[Steps, list[Any]]], options: argparse.Namespace, graph: Graph
) -> tuple[dict[str, list[float]], dict[str, tuple[float, float]]]:
    """Seconds of a step, one number a round; and of oneemb the bytes sent and the seconds in exchanges, of a step."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    traffic: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    ranks = graph.embedding.ranks
    for round in range(-options.warm, options.rounds):
        for name, (run, batches) in systems.items():
            steps = run(iter([batches[0], *batches]))
            next(steps)  # what a loop does before its first step is not a step's
            sent, spent = ranks.traffic.sent_bytes, ranks.traffic.seconds
            distributed.barrier()
            begin = time.perf_counter()
            for _ in steps:
                pass
            distributed.barrier()
            if round >= 0:
                seconds[name].append((time.perf_counter() - begin) / len(batches))
                now = ranks.traffic
                traffic[name].append(((now.sent_bytes - sent) / len(batches), (now.seconds - spent) / len(batches)))
    medians = {name: tuple(np.median(found, axis=0)) for name, found in traffic.items()}
    return seconds, medians  # type: ignore[return-value]


def report(
    ranks: int, seconds: dict[str, list[float]], traffic: dict[str, tuple[float, float]], ids: float,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    medians = {name: statistics.median(found) * 1e3 for name, found in seconds.items()}
    others = {name: ms for name, ms in medians.items() if name.startswith("TorchRec")}
    best = min(others.values(), default=None)
    case = f"{ranks} ranks, {options.tables} x {options.rows:,} rows, D {options.dim}, B {options.batch}, {options.ids}"
    case += ", bags" if options.pooled else ""
    # Keys go there twice, with the lookup and with the gradients; the owner of an id is another rank as often as not.
    number_bytes = getattr(torch, options.comm_dtype).itemsize
    of_each_id = ids * (ranks - 1) / ranks * 2 * (8 + 4 + options.dim * number_bytes)
    rows, lines = [], []
    for name, ms in medians.items():
        sent, spent = traffic[name]
        line = {"case": case, "system": name, "ms": round(ms, 2)}
        cells = [name, f"{ms:.1f}", "" if best is None else f"{ms / best:.2f}", "", "", ""]
        if name.startswith("oneemb,"):
            line |= {
                "sent_bytes": round(sent),
                "exchange_ms": round(spent * 1e3, 2),
                "sent_bytes_for_each_id": round(of_each_id),
            }
            cells[3:] = [f"{sent / 1e6:.2f} MB", f"{of_each_id / 1e6:.2f} MB", f"{spent * 1e3:.1f}"]
        print(json.dumps(line))
        lines.append(line)
        rows.append(cells)
    head = [case, "ms", "of TorchRec's best", "sent", "for each id", "ms in exchanges"]
    print(table(head, rows), flush=True)
    if options.out:  # of fewer ranks there are some already
        save_results(options.out, machine() | {"threads": 1}, [*load_results(options.out), *lines])


if __name__ == "__main__":
    main()
