"""One training step of embedding tables on the CPU, and a lookup alone, beside the systems people use.

    python benchmarks/bench_embedding_step.py                                  the cases of docs/benchmarks.md
    python benchmarks/bench_embedding_step.py --all                            every optimizer, width, batch, ids
    python benchmarks/bench_embedding_step.py --optimizer adam --dim 16 128    some of them
    python benchmarks/bench_embedding_step.py --keyed                          TorchRec's EmbeddingBagCollection, whole
    python benchmarks/bench_embedding_step.py --optimizer row_wise_adagrad --batch 1 16 256 4096 65536
                                               --out benchmarks/results/batch_sizes.json

All systems run in turn on the same ids in one process. A row of the table gives the median of a case in
milliseconds, its ratio to each peer (below 1: oneemb takes less time), and how far it is from the memory's limit:
the bytes that must move at least once, over the time, as a fraction of the bandwidth of a plain copy measured in the
same run. One JSON line a case goes before it.

A peer whose package is missing is left out, with a line that says so.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
from collections.abc import Sequence

import torch
from _case import Measured, Timed
from _embedding_systems import Batch, Case, make_batches, peers_of, systems_of
from _machine import copy_bandwidth, interleaved, keep_freed_memory, machine, save_results, table

_OPTIMIZERS = ("lookup", "row_wise_adagrad", "sgd", "adagrad", "adam")


def main() -> None:
    options = _options()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    about = machine() | {"threads": options.threads}
    bandwidth = copy_bandwidth()
    print(json.dumps(about | {"copy_gb_per_s": round(bandwidth / 1e9, 1)}), flush=True)
    rows, results = [], []
    for case in _cases(options):
        result = _measure(case, options.peers, options.threads, options.runs, bandwidth)
        print(json.dumps(result), flush=True)
        results.append(result)
        rows.append(
            [
                str(case),
                f"{result['median_ms']['oneemb']:.2f}",
                *(
                    f"{result['median_ms'][peer]:.2f} ({result['ratio'][peer]:.2f})" if peer in result["ratio"] else "-"
                    for peer in options.peers
                ),
                f"{result['bytes'] / 1e6:.0f}",
                f"{result['of_copy_bandwidth']:.0%}",
            ]
        )
    save_results(options.out, about | {"copy_gb_per_s": round(bandwidth / 1e9, 1)}, results)
    heads = [f"{peer} ms (ratio)" for peer in options.peers]
    print(table(["case", "oneemb ms", *heads, "must move, MB", "of copy bandwidth"], rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every combination, in place of the documents' cases")
    parser.add_argument("--optimizer", nargs="+", choices=_OPTIMIZERS)
    parser.add_argument("--dim", nargs="+", type=int)
    parser.add_argument("--batch", nargs="+", type=int)
    parser.add_argument("--ids", nargs="+", choices=("zipf", "uniform"))
    parser.add_argument("--pooled", nargs="+", type=int, choices=(0, 1), help="1 = bags of 1 to 20 ids")
    parser.add_argument("--pooling", nargs="+", choices=("sum", "max"), default=["sum"])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of a table")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--keyed", action="store_true", help="the whole call of EmbeddingBagCollection")
    parser.add_argument("--peers", nargs="*", help="default: all that there are")
    parser.add_argument("--out", help="file of the results")
    options = parser.parse_args()
    if options.peers is None:
        options.peers = (
            ["torchrec_fused", "torchrec", "oneemb_sharded"]
            if options.keyed
            else ["oneemb_graph", "fbgemm", "torch", "torchrec"]
        )
    return options


def _cases(options: argparse.Namespace) -> list[Case]:
    asked = options.optimizer, options.dim, options.batch, options.ids, options.pooled
    if options.all:
        default: tuple[Sequence, ...] = _OPTIMIZERS, (16, 64, 128), (4096, 16384), ("zipf", "uniform"), (0, 1)
    else:
        default = _OPTIMIZERS, (64,), (4096,), ("zipf",), (0,)
    chosen = itertools.product(*(some or usual for some, usual in zip(asked, default, strict=True)))
    cases = [
        Case(optimizer, dim, batch, options.tables, options.rows, ids, bool(pooled), pooling, options.keyed)
        for (optimizer, dim, batch, ids, pooled), pooling in itertools.product(chosen, options.pooling)
        if pooled or pooling == "sum"
    ]
    if not options.all and not any(asked):
        cases.append(
            Case("row_wise_adagrad", 64, 4096, options.tables, options.rows, "zipf", True, keyed=options.keyed)
        )
    return cases


def _measure(case: Case, peers: list[str], threads: int, runs: int, bandwidth: float) -> dict:
    batches = make_batches(case, 4 if case.pooled else 8)
    torch.manual_seed(0)
    grad = torch.randn(case.batch, case.tables * case.dim) * 1e-3
    systems = {}
    for name in ["oneemb", *(peer for peer in peers_of(case) if peer in peers)]:
        try:
            systems[name] = systems_of(case)[name](case, batches, grad, threads)
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    calls = {name: system.lookup if case.optimizer == "lookup" else system.step for name, system in systems.items()}
    seconds = interleaved(calls, runs, warm=len(batches))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for system in systems.values():
        system.close()
    del systems, calls
    gc.collect()
    must_move = statistics.mean(_bytes(case, batch) for batch in batches)
    return {
        "case": vars(case),
        "median_ms": {name: round(median * 1e3, 3) for name, median in medians.items()},
        "ratio": {name: round(medians["oneemb"] / medians[name], 3) for name in medians if name != "oneemb"},
        "unique": round(statistics.mean(batch.unique for batch in batches)),
        "bytes": round(must_move),
        "of_copy_bandwidth": round(must_move / medians["oneemb"] / bandwidth, 3),
    }


def _bytes(case: Case, batch: Batch) -> int:
    """Bytes that must be read or written: ids, rows once, output; for a step the gradient and the rows once more."""
    state_width = {"lookup": 0, "sgd": 0, "row_wise_adagrad": 1, "adagrad": case.dim, "adam": 2 * case.dim}
    out = 4 * case.dim * case.batch * case.tables
    lookup = 8 * len(batch.id_N) + 4 * case.dim * batch.unique + out
    if case.optimizer == "lookup":
        return lookup
    return lookup + out + 2 * 4 * (case.dim + state_width[case.optimizer]) * batch.unique


def _compared(system: str, optimizer: str, batch: int = 4096, rows: int = 200_000, pooled: bool = False) -> Measured:
    case = Case(optimizer, 64, batch, 26, rows, "zipf", pooled)
    grad = torch.randn(batch, case.tables * case.dim, generator=torch.Generator().manual_seed(0)) * 1e-3
    made = systems_of(case)[system](case, make_batches(case, 4 if pooled else 8), grad, 2)
    return Timed(made.lookup if optimizer == "lookup" else made.step, made.close)


_SYSTEMS = {"eager": "oneemb", "graph": "oneemb_graph"}
COMPARED = {
    "headline/lookup": lambda: _compared("oneemb", "lookup"),
    **{
        f"headline/{optimizer}/{name}": lambda system=system, optimizer=optimizer: _compared(system, optimizer)
        for optimizer in _OPTIMIZERS if optimizer != "lookup" for name, system in _SYSTEMS.items()
    },
    **{
        f"headline/pooled/{name}": lambda system=system: _compared(system, "row_wise_adagrad", pooled=True)
        for name, system in _SYSTEMS.items()
    },
    **{
        f"batch/{batch}/{name}": lambda system=system, batch=batch: _compared(
            system, "row_wise_adagrad", batch, 50_000)
        for batch in (1, 16, 256, 4096, 65536) for name, system in _SYSTEMS.items()
    },
}  # fmt: skip
"""Cases of compare.py."""


if __name__ == "__main__":
    main()
