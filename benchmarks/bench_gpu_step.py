"""One training step of embedding tables on a GPU beside torch.nn.EmbeddingBag, in the shape dynamicemb publishes.

    python benchmarks/bench_gpu_step.py [--out benchmarks/results/gpu.json]

10 tables, 104,857 ids each of a power law of exponent 1.05, 128 float32 weights a row; lookup, backward and update.
`device` holds all rows on the GPU; `cache 0.8` and `cache 1.0` hold that share of the rows the run touches, over rows
in the host's memory; `no HBM` holds those of one step and no more. Peers take turns with oneemb.
dynamicemb's own rows are in its repository (NVIDIA/recsys-examples), on an H100.
"""

import argparse
import json
import tempfile
from typing import Any

import torch
from _gpu import about, copy_bandwidth, milliseconds, open_gpu, write
from _machine import table

import oneemb
from oneemb.kernels import launch
from oneemb.storage.tiers.device_tier import SLOT_OVERHEAD_BYTES

TABLES = 10
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, eps=1e-8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--store", nargs="+", default=["device", "cache 1.0", "cache 0.8", "no HBM"])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="sizes for the simulator, to see that it runs")
    parser.add_argument("--out", help="file to add results to, one JSON line each")
    options = parser.parse_args()
    gpu = open_gpu(options.tiny)
    if gpu is None:
        return
    if launch.SIMULATED:
        launch.simulated_gpu = gpu
    batch, rows, dim, runs = (4, 100, 8, 1) if options.tiny else (104_857, 1_677_721, 128, options.runs)
    batches = [make_ids(gpu, batch, rows, seed) for seed in range(4)]
    unique = sum(int(torch.unique(ids[:, t]).numel()) for ids in batches for t in range(TABLES)) / len(batches)
    bandwidth = copy_bandwidth(gpu, options.tiny)
    shape = {"bench": "gpu_step", "tables": TABLES, "batch": batch, "dim": dim, "rows_per_table": rows,
             "unique_per_step": unique, "copy_gb_per_s": bandwidth / 1e9}  # fmt: skip
    results, lines = [], []
    for optimizer in options.optimizer:
        peers = bags(gpu, optimizer, batches, rows, dim)
        for store in options.store:
            result = shape | {"store": store, "optimizer": optimizer}
            ms, asked = step(gpu, store, optimizer, batches, dim, runs, peers)
            result |= asked | {f"{name}, ms": one for name, one in ms.items()}
            print(json.dumps(result), flush=True)
            results.append(result)
            lines.append([store, optimizer, *map(str, asked.values()), *(f"{one:.3f}" for one in ms.values())])
        del peers
    write(options.out, about(gpu), results)
    print(table(["store", "optimizer", *asked, *(f"{name}, ms" for name in ms)], lines))


def make_ids(gpu, batch: int, rows: int, seed: int) -> torch.Tensor:
    """[batch, TABLES] of a power law of exponent 1.05 over 0 .. rows - 1."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(batch, TABLES, generator=generator, dtype=torch.float64)
    power = 1 - 1.05
    ids = (u * ((rows + 1.0) ** power - 1) + 1) ** (1 / power)
    return (ids.long() - 1).clamp(0, rows - 1).to(gpu.device)


def step(
    gpu, store: str, optimizer: str, batches: list[torch.Tensor], dim: int, runs: int, peers: dict[str, Any]
) -> tuple[dict[str, float], dict[str, int]]:
    """Milliseconds of a step whose rows are all known, and of the peers'; loops it launches and waits of the host."""
    with tempfile.TemporaryDirectory() as folder:
        options = oneemb.make_device_mem_store_options(folder)
        if store != "device":
            together = [torch.cat(batches)] if store.startswith("cache") else batches
            keys = max(sum(len(torch.unique(ids[:, t])) for t in range(TABLES)) for ids in together)
            share = float(store.split()[1]) if store.startswith("cache") else 1.0
            words = dim * (3 if optimizer == "adam" else 1)
            budget_mb = max(1, -int(-share * keys * (4 * words + SLOT_OVERHEAD_BYTES) // 2**20))
            options = oneemb.make_cached_host_mem_store_options(budget_mb, folder)
        embedding = oneemb.MultiTableEmbedding(
            "bench", dim, torch.float32, torch.int64, [oneemb.make_table()] * TABLES, options
        )
        if launch.SIMULATED:
            embedding.store.form.move_to(torch.device("cuda"))  # where the batches are, though torch knows of no GPU
        else:
            embedding.to(gpu.device)
        rows_optimizer = oneemb.Optimizer(OPTIMIZERS[optimizer]([embedding.weight]), [embedding], check_in_step=False)
        grad = torch.randn(*batches[0].shape, dim, device=gpu.device)

        def one(run: int) -> None:
            embedding(batches[run % len(batches)]).backward(grad)
            rows_optimizer.step()
            rows_optimizer.zero_grad()

        for run in range(len(batches)):
            one(run)
        before = gpu.launches, gpu.waits
        one(0)
        asked = {"loops": gpu.launches - before[0], "waits": gpu.waits - before[1]}
        ms = milliseconds(gpu, {"oneemb": one, **peers}, runs)
        embedding.clear()  # The rows may go.
        embedding.close()
    return ms, asked


def bags(gpu, optimizer: str, batches: list[torch.Tensor], rows: int, dim: int) -> dict[str, Any]:
    """The same step of torch.nn.EmbeddingBag, ids being offsets into one table of all rows."""
    offset = torch.arange(TABLES, device=gpu.device) * rows
    grad = torch.randn(batches[0].numel(), dim, device=gpu.device)

    def make(sparse: bool) -> Any:
        bag = torch.nn.EmbeddingBag(TABLES * rows, dim, mode="sum", sparse=sparse, device=gpu.device)
        sparse_adam = sparse and optimizer == "adam"
        torch_optimizer = (torch.optim.SparseAdam if sparse_adam else OPTIMIZERS[optimizer])(bag.parameters())

        def one(run: int) -> None:
            ids = (batches[run % len(batches)] + offset).reshape(-1, 1)
            bag(ids).backward(grad)
            torch_optimizer.step()
            torch_optimizer.zero_grad(set_to_none=True)

        return one

    return {"EmbeddingBag dense": make(False), "EmbeddingBag sparse": make(True)}


if __name__ == "__main__":
    main()
