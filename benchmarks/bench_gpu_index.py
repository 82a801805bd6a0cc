"""The device tier's index and rows on a GPU, in the shapes in which HierarchicalKV publishes its own.

    python benchmarks/bench_gpu_index.py [--out benchmarks/results/gpu.json]

1,048,576 keys an op, rows of 8, 32 and 64 float32, half full and full; billions of keys a second. `find` gives places,
`find and gather` the rows too, with the fraction of the bandwidth of a plain copy measured in the same run;
`torch gather` reads the same rows by torch.embedding, where nothing has to be found; `insert and evict` brings new keys
into a full tier, whose oldest rows go down to a store that forgets them, by way of the host. A load is that of the
tier's slots; its index is at most 7 tenths full whatever the load. HierarchicalKV's own rows are at
https://github.com/NVIDIA-Merlin/HierarchicalKV, on an A100.
"""

import argparse
import json

import numpy as np
import torch
from _gpu import about, copy_bandwidth, milliseconds, open_gpu, write
from _machine import table

from oneemb.kernels.cuda_backend import CudaBackend
from oneemb.kernels.gather_cuda import copy_rows_out_cuda
from oneemb.storage.tiers.device_tier import DeviceTier


class Forgetful:
    """A store below a cache that has no row and keeps none."""

    def __init__(self, row_width: int):
        self.row_width = row_width

    def __len__(self) -> int:
        return 0

    def get(self, table_U, id_U, out_UW):
        return np.ones(len(id_U), np.bool_)

    def put(self, table_U, id_U, row_UW):
        pass

    def contains(self, table_U, id_U):
        return np.zeros(len(id_U), np.bool_)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="sizes for the simulator, to see that it runs")
    parser.add_argument("--out", help="file to add results to, one JSON line each")
    options = parser.parse_args()
    gpu = open_gpu(options.tiny)
    if gpu is None:
        return
    keys, slots, runs = (64, 256, 1) if options.tiny else (1 << 20, 1 << 26, options.runs)
    bandwidth = copy_bandwidth(gpu, options.tiny)
    shape = {"bench": "gpu_index", "keys": keys, "slots": slots, "copy_gb_per_s": bandwidth / 1e9}
    results, rows = [], []
    for dim in options.dim:
        for load in options.load:
            found, index_load = measure(gpu, dim, load, keys, slots, runs)
            result = shape | {"dim": dim, "load": load, "index_load": index_load}
            result |= {f"{name}, billion keys/s": keys / ms / 1e6 for name, ms in found.items()}
            moved_bytes = keys * (8 + 4 + 16 + 2 * 4 * dim)
            result["of_copy_bandwidth"] = moved_bytes / (found["find and gather"] / 1e3) / bandwidth
            print(json.dumps(result), flush=True)
            results.append(result)
            rows.append([str(dim), f"{load:.2f}", *(f"{keys / ms / 1e6:.3f}" for ms in found.values()),
                         f"{result['of_copy_bandwidth']:.0%}"])  # fmt: skip
    write(options.out, about(gpu), results)
    print(table(["dim", "load", *found, "of copy"], rows))


def measure(gpu, dim: int, load: float, keys: int, slots: int, runs: int) -> tuple[dict[str, float], float]:
    """Milliseconds of each op on `keys` keys in a tier of `slots` slots that is filled to `load`; how full its index
    is."""
    backend = CudaBackend(gpu)
    tier = DeviceTier(
        "device",
        row_width=dim,
        slots=slots,
        below=Forgetful(dim),
        resident=False,
        init=lambda *_: None,
        backend=backend,
    )
    generator = torch.Generator(device=gpu.device).manual_seed(0)

    def some(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Distinct ids in random order: an odd multiple of distinct numbers, modulo 2^64.
        n = torch.randint(first, max(first + 1, end - keys), (1,), generator=generator, device=gpu.device)
        id_U = (torch.arange(keys, device=gpu.device) + n) * -7046029254386353131
        return torch.zeros(keys, dtype=torch.int32, device=gpu.device), id_U

    def fresh(run: int) -> tuple[torch.Tensor, torch.Tensor]:
        return some(10 * slots + run * keys, 10 * slots + run * keys)

    def acquire(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        tier.release(tier.acquire(backend.distinct_keys(*batch))[0])

    filled = int(slots * load)
    for first in range(0, filled, keys):
        acquire(some(first, first))
    batches = [some(0, filled) for _ in range(8)]

    def find_and_gather(run: int) -> None:
        slot_U = tier._index.find(*batches[run % 8])
        copy_rows_out_cuda(tier.row_SW, slot_U.clamp(min=0), dim, gpu=gpu)

    index_load = len(tier._index) / len(tier._index.cell_C2)
    slot_U = tier._index.find(*batches[0])
    found = milliseconds(
        gpu,
        {
            "find": lambda run: tier._index.find(*batches[run % 8]),
            "find and gather": find_and_gather,
            "torch gather": lambda run: torch.nn.functional.embedding(slot_U, tier.row_SW),
            "find or insert": lambda run: acquire(batches[run % 8]),
        },
        runs,
    )
    # Last, since it takes the keys of the others away.
    found |= milliseconds(gpu, {"insert and evict": lambda run: acquire(fresh(run))}, runs)
    tier.close()
    return found, index_load


if __name__ == "__main__":
    main()
