"""How rows that miss come to a GPU: gathered by the host and copied, or read in place over the bus.

    python benchmarks/bench_gpu_bus.py [--out benchmarks/results/gpu.json]

1,048,576 rows at random places of 4 GiB of page-locked memory, as many as a lookup may miss; gigabytes a second.
`host gather and copy` is what the device tier does; `in place` lets the loop that gathers read the host's memory, 16
bytes a thread; `copy` is the bus itself, for rows that lie side by side.
"""

import argparse
import json

import numpy as np
import torch
from _gpu import about, milliseconds, open_gpu, write
from _machine import table

from oneemb.kernels.gather import gather
from oneemb.kernels.gather_cuda import gather_cuda
from oneemb.kernels.threads import Threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="sizes for the simulator, to see that it runs")
    parser.add_argument("--out", help="file to add results to")
    options = parser.parse_args()
    gpu = open_gpu(options.tiny)
    if gpu is None:
        return
    rows, slab_bytes, runs = (64, 2**16, 1) if options.tiny else (1 << 20, 1 << 32, options.runs)
    on_gpu, threads = gpu.device.type == "cuda", Threads(None)
    results, lines = [], []
    for dim in options.dim:
        slots = slab_bytes // (4 * dim)
        slab_SW = torch.zeros(slots, dim, pin_memory=on_gpu)
        buffer_UW = torch.zeros(rows, dim, pin_memory=on_gpu)
        out_UW = gpu.empty(rows, dim, dtype=torch.float32)
        every = np.arange(rows)
        slot_U = np.random.default_rng(0).integers(0, slots, rows)
        slots_there, every_there = gpu.put(slot_U), gpu.put(every)

        def copied(run: int, slab_SW=slab_SW, buffer_UW=buffer_UW, out_UW=out_UW, slot_U=slot_U, every=every) -> None:
            gather(slab_SW.numpy(), slot_U, every, buffer_UW.numpy(), threads=threads)
            out_UW.copy_(buffer_UW, non_blocking=True)

        calls = {
            "host gather and copy": copied,
            "in place": lambda run, args=(slab_SW, slots_there, every_there, out_UW): gather_cuda(*args, gpu=gpu),
            "copy": lambda run, out_UW=out_UW, buffer_UW=buffer_UW: out_UW.copy_(buffer_UW, non_blocking=True),
        }
        found = {name: rows * dim * 4 / ms / 1e6 for name, ms in milliseconds(gpu, calls, runs).items()}
        result = {"bench": "gpu_bus", "rows": rows, "dim": dim} | {f"{name}, GB/s": one for name, one in found.items()}
        print(json.dumps(result), flush=True)
        results.append(result)
        lines.append([str(dim), *(f"{one:.2f}" for one in found.values())])
    threads.close()
    write(options.out, about(gpu), results)
    print(table(["dim", *(f"{name}, GB/s" for name in found)], lines))


if __name__ == "__main__":
    main()
