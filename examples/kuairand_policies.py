"""What a click model loses where ids must deserve their rows, or rows must leave: AUC, rows and bytes on KuaiRand-Pure,
beside the same model with a row for every id.

    python examples/kuairand_policies.py                 # every policy, an epoch each
    python examples/kuairand_policies.py --share 0.1     # a tenth of the rows, not a quarter

Data and options are those of kuairand_dlrm.py. What must stay true: all models see the same batches, and differ in
their policy alone.
"""

import argparse
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from dlrm import DLRM, OneEmbLookup
from kuairand import ClickLog
from kuairand_dlrm import (
    REPOSITORY,
    TABLES,
    TrainStep,
    hold,
    load,
    make_embedding,
    make_optimizers,
    make_parser,
    predict,
    scores,
    train_epoch,
)

from oneemb.policies import LFU, LRU, AdmitAfter, RowPolicy


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Run the script. Returns the figures of each policy."""
    parser = make_parser("Train a DLRM on a click log with policies for its rows.", REPOSITORY / "build/policies")
    parser.add_argument(
        "--share", type=float, default=0.25, help="of the rows that a table without policy comes to have"
    )
    parser.set_defaults(epochs=1, store="device")
    arguments = parser.parse_args(argv)
    with hold(arguments.workdir):
        log = load(arguments)
        found = {"a row for every id": train(log, arguments)}
        capacity = max(1, int(found["a row for every id"]["rows"] * arguments.share))
        policies: dict[str, Mapping[str, Any]] = {
            "a row from the 2nd sighting on": {"policy": RowPolicy(admit=AdmitAfter(2))},
            "a row from the 5th sighting on": {"policy": RowPolicy(admit=AdmitAfter(5))},
            f"LRU, {arguments.share:.0%} of the rows": {"policy": RowPolicy(LRU()), "capacity": capacity},
            f"LFU, {arguments.share:.0%} of the rows": {"policy": RowPolicy(LFU()), "capacity": capacity},
            f"2nd sighting and LFU, {arguments.share:.0%}": {
                "policy": RowPolicy(LFU(), admit=AdmitAfter(2)), "capacity": capacity,
            },
        }  # fmt: skip
        found |= {name: train(log, arguments, **policy) for name, policy in policies.items()}
    print(f"{'':34} AUC     logloss      rows    MiB")
    for name, figures in found.items():
        print(
            f"{name:34} {figures['auc']:.4f}  {figures['logloss']:.4f}  {figures['rows']:8,.0f}"
            f"  {figures['bytes'] / 2**20:5.1f}"
        )
    return found


def train(log: ClickLog, arguments: argparse.Namespace, **policy: Any) -> dict[str, float]:
    """The figures of a model whose embedding has this policy."""
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    shutil.rmtree(arguments.workdir / TABLES, ignore_errors=True)
    embedding = make_embedding(arguments, len(log.fields), **policy)
    model = DLRM(OneEmbLookup(embedding, log.fields), len(log.fields), log.numeric_EX.shape[1], arguments.dim)
    optimizers = make_optimizers(model)
    step = TrainStep(model, optimizers)
    for epoch in range(arguments.epochs):
        train_epoch(step, optimizers, log, epoch, arguments)
    stats, found = embedding.stats(), scores(log, predict(model, log))
    # With what a policy knows of each row; the index and the marks are in these, too.
    nbytes = stats["device"]["bytes"] + stats.get("policy", {}).get("bytes", 0)
    embedding.close()
    return {**found, "rows": stats["rows"], "bytes": nbytes}


if __name__ == "__main__":
    main()
