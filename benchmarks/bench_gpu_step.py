"""One training step of embedding tables on a GPU beside torch.nn.EmbeddingBag, in the shape dynamicemb publishes.

    python benchmarks/bench_gpu_step.py [--out benchmarks/results/gpu.json]

10 tables, 104,857 ids each of a power law of exponent 1.05, 128 float32 weights a row; lookup, backward and update.
`device` holds all rows on the GPU; `cache 0.8` and `cache 1.0` hold that share of the rows the run touches, over rows
in the host's memory. dynamicemb's own rows are in its repository (NVIDIA/recsys-examples), on an H100.
"""

import argparse
import json
import tempfile

import torch
from _gpu import about, copy_bandwidth, milliseconds, open_gpu, write
from _machine import table

import oneemb
from oneemb.kernels import launch

TABLES = 10
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, eps=1e-8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--store", nargs="+", default=["device", "cache 1.0", "cache 0.8"])
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
    results = [
        about(gpu)
        | {"bench": "gpu_step", "tables": TABLES, "batch": batch, "dim": dim, "rows_per_table": rows,
           "unique_per_step": unique, "copy_gb_per_s": bandwidth / 1e9}
    ]  # fmt: skip
    lines = []
    for optimizer in options.optimizer:
        peers = {} if launch.SIMULATED else bags(gpu, optimizer, batches, rows, dim, runs)
        for store in options.store:
            ms, launches = step(gpu, store, optimizer, batches, dim, runs)
            result = {"bench": "gpu_step", "store": store, "optimizer": optimizer, "oneemb_ms": ms,
                      "loops_launched": launches, **peers}  # fmt: skip
            print(json.dumps(result), flush=True)
            results.append(result)
            lines.append([store, optimizer, f"{ms:.3f}", str(launches), *(f"{one:.3f}" for one in peers.values())])
    write(options.out, results)
    print(table(["store", "optimizer", "oneemb ms", "loops", *peers], lines))


def make_ids(gpu, batch: int, rows: int, seed: int) -> torch.Tensor:
    """[batch, TABLES] of a power law of exponent 1.05 over 0 .. rows - 1."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(batch, TABLES, generator=generator, dtype=torch.float64)
    power = 1 - 1.05
    ids = (u * ((rows + 1.0) ** power - 1) + 1) ** (1 / power)
    return (ids.long() - 1).clamp(0, rows - 1).to(gpu.device)


def step(gpu, store: str, optimizer: str, batches: list[torch.Tensor], dim: int, runs: int) -> tuple[float, int]:
    """Milliseconds of a step once every row is known, and the loops it launches."""
    with tempfile.TemporaryDirectory() as folder:
        options = oneemb.make_device_mem_store_options(folder)
        if store.startswith("cache"):
            keys = sum(len(torch.unique(torch.cat(batches)[:, t])) for t in range(TABLES))
            words = dim * (3 if optimizer == "adam" else 1)
            budget_mb = max(1, int(float(store.split()[1]) * keys * (4 * words + 57) / 2**20))
            options = oneemb.make_cached_host_mem_store_options(budget_mb, folder)
        embedding = oneemb.MultiTableEmbedding(
            "bench", dim, torch.float32, torch.int64, [oneemb.make_table()] * TABLES, options
        )
        embedding.store.move_to(gpu)
        if not launch.SIMULATED:
            embedding.to(gpu.device)
        rows_optimizer = oneemb.Optimizer(OPTIMIZERS[optimizer]([embedding.weight]), [embedding])
        grad = torch.randn(*batches[0].shape, dim, device=gpu.device)

        def one(run: int) -> None:
            embedding(batches[run % len(batches)]).backward(grad)
            rows_optimizer.step()

        for run in range(len(batches)):
            one(run)
        before = gpu.launches
        one(0)
        launches = gpu.launches - before
        ms = milliseconds(gpu, one, runs)
        embedding.close()
    return ms, launches


def bags(gpu, optimizer: str, batches: list[torch.Tensor], rows: int, dim: int, runs: int) -> dict[str, float]:
    """Milliseconds of the same step of torch.nn.EmbeddingBag, ids being offsets into one table of all rows."""
    found = {}
    offset = torch.arange(TABLES, device=gpu.device) * rows
    grad = torch.randn(batches[0].numel(), dim, device=gpu.device)
    for name, sparse in (("EmbeddingBag dense ms", False), ("EmbeddingBag sparse ms", True)):
        bag = torch.nn.EmbeddingBag(TABLES * rows, dim, mode="sum", sparse=sparse, device=gpu.device)
        kind = torch.optim.SparseAdam if sparse and optimizer == "adam" else None
        torch_optimizer = kind(bag.parameters(), lr=0.1) if kind else OPTIMIZERS[optimizer](bag.parameters())

        def one(run: int, bag=bag, torch_optimizer=torch_optimizer) -> None:
            ids = (batches[run % len(batches)] + offset).reshape(-1, 1)
            bag(ids).backward(grad)
            torch_optimizer.step()
            torch_optimizer.zero_grad(set_to_none=True)

        found[name] = milliseconds(gpu, one, max(3, runs // 4))
        del bag, torch_optimizer
        torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    main()
