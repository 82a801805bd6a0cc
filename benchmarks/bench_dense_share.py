"""How much longer a whole step takes than its dense modules and its rows each take alone.

    python benchmarks/bench_dense_share.py --out benchmarks/results/dense_share.json

26 tables of 100,000 rows, 64 weights, a batch of 4,096, Zipf 1.05 ids, row-wise Adagrad; the dense modules are an MLP
of 1664, 256 and 1 with SGD. In turn run

    whole       rows looked up, the MLP forward and backward, both updated
    dense       the MLP forward and backward on rows that are there, with their gradient, and its update
    rows        rows looked up, a backward pass from a gradient that is there, their update

once each in a turn. Printed are the medians, and (whole - dense) / rows: 1 where joining them loses and wins nothing.
nn.EmbeddingBag(sparse=True) with SGD, one for all tables, is measured in the same way, in the same turns.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _case import Measured, Timed
from _embedding_systems import Case, make_batches, systems_of
from _machine import keep_freed_memory, machine, save_results, table

BATCHES, ROWS = 8, 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of a table")
    parser.add_argument("--out", help="file of the results")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(2)
    about = machine() | {"threads": 2}
    print(json.dumps(about), flush=True)
    models = {"oneemb": Model("oneemb", "row_wise_adagrad", options.batch, options.rows),
              "nn.EmbeddingBag": Model("torch", "sgd", options.batch, options.rows)}  # fmt: skip
    ms: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for turn in range(-BATCHES, options.turns):
        for name, model in models.items():
            parts = model.turn(turn)
            if turn >= 0:
                ms[name].append(parts)
    results = []
    for name, turns in ms.items():
        medians = {part: round(statistics.median(parts[part] for parts in turns), 2) for part in turns[0]}
        results.append({"system": name, "batch": options.batch, **medians, "share": round(share_of(turns), 3)})
        print(json.dumps(results[-1]), flush=True)
        models[name].close()
    save_results(options.out, about, results)
    print(table(["system", "batch", "whole, ms", "dense, ms", "rows, ms", "(whole - dense) / rows"],
                [[str(value) for value in result.values()] for result in results]))  # fmt: skip


def share_of(turns: list[dict[str, float]]) -> float:
    """Median of (whole - dense) / rows: of the parts of a turn, which lie side by side in time."""
    return statistics.median((parts["whole"] - parts["dense"]) / parts["rows"] for parts in turns)


class Model:
    """One system's rows under an MLP."""

    def __init__(self, system: str, optimizer: str, batch: int = 4096, rows: int = ROWS):
        case = Case(optimizer, 64, batch, 26, rows, "zipf", False)
        torch.manual_seed(0)
        self._grad = torch.randn(batch, case.tables * case.dim) * 1e-3
        self._system = systems_of(case)[system](case, make_batches(case, BATCHES), self._grad, 2)
        self._mlp = torch.nn.Sequential(
            torch.nn.Linear(case.tables * case.dim, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
        )
        self._optimizer = torch.optim.SGD(self._mlp.parameters(), lr=0.01)
        self._label = (torch.rand(batch) < 0.5).float()
        self.close = self._system.close

    def whole(self, i: int) -> Any:
        return self._system.step(i, self._backward_through_mlp)

    def dense(self, i: int) -> Any:
        rows = self._grad.detach().requires_grad_()
        self._backward_through_mlp(rows)
        return rows

    def rows(self, i: int) -> Any:
        return self._system.step(i)

    def turn(self, i: int) -> dict[str, float]:
        """Milliseconds of each part."""
        parts: dict[str, Callable[[int], Any]] = {"whole": self.whole, "dense": self.dense, "rows": self.rows}
        ms = {}
        for name, part in parts.items():
            time.sleep(0.01)  # torch's threads of the part before spin for a while
            begin = time.perf_counter()
            result = part(i)
            ms[name] = (time.perf_counter() - begin) * 1e3
            del result
        return ms

    def _backward_through_mlp(self, rows: torch.Tensor) -> None:
        logit = self._mlp(rows.reshape(len(self._label), -1)).squeeze(1)
        torch.nn.functional.binary_cross_entropy_with_logits(logit, self._label).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def whole_step() -> Measured:
    model = Model("oneemb", "row_wise_adagrad")
    return Timed(model.whole, model.close)


def share() -> Measured:
    model = Model("oneemb", "row_wise_adagrad")
    for i in range(BATCHES):
        model.turn(i)
    gc.collect()
    return Measured(lambda calls: share_of([model.turn(i) for i in range(calls)]), model.close, "of rows", calls=5)


COMPARED = {"dlrm/step": whole_step, "dlrm/share": share}
"""Cases of compare.py."""


if __name__ == "__main__":
    main()
