"""Loaders of a click log in Parquet: rows a second of oneemb.data.Loader, of a plain pyarrow loop, and of datasets.

    python benchmarks/bench_loader.py --out benchmarks/results/loader.json

The log has 3 columns of strings, 8 of integers, 6 of floats and a label, in row groups of 100,000. All loaders give
batches of 4,096 as tensors: ids int64 [B, 11], with strings hashed, numbers float32 [B, 6], labels. The loop does it by
hand with pyarrow and `oneemb.hash_ids`; Hugging Face's `datasets` gives columns as Arrow tables in batches, which the
same lines make tensors of; without that package it is left out. Loaders take turns; printed are rows a second of
processor time, over all threads, and of the clock: medians of the turns. The last column is the ratio to the rows a
second of training DLRM on some batches of this log, the model and optimizers of `make demo`, by processor time.
"""

import argparse
import importlib.util
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
import pyarrow
import pyarrow.parquet
import torch
from _machine import keep_freed_memory, machine, save_results, table

import oneemb

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

STRINGS, INTEGERS, FLOATS = (
    tuple(f"{kind}{n}" for n in range(count)) for kind, count in (("s", 3), ("i", 8), ("f", 6))
)
BATCH, TRAINED = 4096, 10
"""Rows of a batch, and batches that are trained in a turn."""

Batches = Iterator[dict[str, torch.Tensor]]


def write_log(folder: str, rows: int) -> None:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {name: [f"user{n}" for n in rng.zipf(1.3, rows) % 1_000_000] for name in STRINGS}
    columns |= {name: rng.zipf(1.3, rows) % 1_000_000 for name in INTEGERS}
    columns |= {name: rng.random(rows) for name in FLOATS}
    columns["label"] = rng.random(rows) < 0.3
    pyarrow.parquet.write_table(pyarrow.table(columns), f"{folder}/log.parquet", row_group_size=100_000)


def by_loader(folder: str, **options: Any) -> Batches:
    columns = {"ids": oneemb.data.Ids(*STRINGS, *INTEGERS), "dense": oneemb.data.Numbers(*FLOATS), "label": "label"}
    yield from oneemb.data.Loader(oneemb.data.Files(f"{folder}/*.parquet"), BATCH, columns, **options)


def by_hand(batches: Any) -> Batches:
    for batch in batches:
        ids = [oneemb.hash_ids(batch[name]) for name in STRINGS]
        ids += [torch.from_numpy(batch[name].to_numpy().astype(np.int64)) for name in INTEGERS]
        dense = torch.from_numpy(np.stack([np.array(batch[name], np.float32) for name in FLOATS], 1))
        label = torch.from_numpy(np.array(batch["label"].cast(pyarrow.float32())))
        yield {"ids": torch.stack(ids, 1), "dense": dense, "label": label}


def by_pyarrow(folder: str) -> Batches:
    yield from by_hand(pyarrow.parquet.ParquetFile(f"{folder}/log.parquet").iter_batches(BATCH))


def by_datasets(folder: str) -> Batches:
    import datasets

    found = datasets.load_dataset("parquet", data_files=f"{folder}/log.parquet", split="train", streaming=True)
    yield from by_hand(found.with_format("arrow").iter(BATCH))


class Model:
    """DLRM of `make demo`, its rows on the device, trained by Adagrad and Adam."""

    def __init__(self, folder: str):
        from dlrm import DLRM, OneEmbLookup
        from kuairand import Field
        from kuairand_dlrm import make_optimizers

        torch.manual_seed(0)
        fields = [Field(name, 1) for name in (*STRINGS, *INTEGERS)]
        self.embedding = embedding = oneemb.MultiTableEmbedding(
            "demo", 16, torch.float32, torch.int64, [oneemb.make_table()] * len(fields),
            oneemb.make_device_mem_store_options(f"{folder}/rows"),
        )  # fmt: skip
        self.model = DLRM(OneEmbLookup(embedding, fields), len(fields), len(FLOATS), 16)
        self.optimizers = make_optimizers(self.model)

    def close(self) -> None:
        self.embedding.clear()  # The rows may go.
        self.embedding.close()

    def train(self, batches: Batches) -> Batches:
        for batch in itertools.islice(batches, TRAINED):
            logit = self.model(batch["dense"], batch["ids"])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, batch["label"])
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            yield batch


def seconds_of(batches: Batches) -> tuple[float, float]:
    """(seconds of processors, seconds of the clock) of a row."""
    processor, clock = time.process_time(), time.perf_counter()
    rows = sum(len(batch["label"]) for batch in batches)
    return (time.process_time() - processor) / rows, (time.perf_counter() - clock) / rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", help="file of the results")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)  # as in the demo
    about = machine()
    print(json.dumps(about), flush=True)
    with tempfile.TemporaryDirectory(prefix="oneemb-bench-") as folder:
        write_log(folder, options.rows)
        calls: dict[str, Callable[[], Batches]] = {
            "oneemb": lambda: by_loader(folder),
            "oneemb, shuffle=100_000": lambda: by_loader(folder, shuffle=100_000),
            "oneemb, workers=1": lambda: by_loader(folder, workers=1),
            "loop over pyarrow": lambda: by_pyarrow(folder),
        }
        if importlib.util.find_spec("datasets") is None:
            print("datasets is not installed, and left out: pip install 'oneemb[bench]'", flush=True)
        else:
            calls["datasets"] = lambda: by_datasets(folder)
        model = Model(folder)
        calls["step of the demo's model"] = lambda: model.train(by_pyarrow(folder))
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for turn in range(-1, options.turns):
            for name, call in calls.items():
                seconds = seconds_of(call())
                if turn >= 0:
                    spent[name].append(seconds)
        model.close()
    # A step's own time is without that of the loop that gives it batches.
    loop, step = (
        [one[0] for one in spent[name]] for name in ("loop over pyarrow", "step of the demo's model")
    )  # fmt: skip
    training = statistics.median(max(b - a, 1e-9) for a, b in zip(loop, step, strict=True))
    results = []
    for name, seconds in spent.items():
        processor = training if name.startswith("step") else statistics.median(one[0] for one in seconds)
        clock = statistics.median(one[1] for one in seconds)
        results.append({
            "loader": name, "rows_per_processor_s": round(1 / processor), "rows_per_s": round(1 / clock),
            "of_step": round(training / processor, 2),
        })  # fmt: skip
        print(json.dumps(results[-1]), flush=True)
    save_results(options.out, about, results)
    print(table(list(results[0]), [[str(value) for value in result.values()] for result in results]))


if __name__ == "__main__":
    main()
