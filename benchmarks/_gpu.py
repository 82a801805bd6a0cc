"""What the benchmarks on a GPU share: the clock, the machine, where results go."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _machine import machine

from oneemb.kernels.launch import SIMULATED, Gpu

__all__ = ["about", "copy_bandwidth", "milliseconds", "open_gpu", "write"]


def open_gpu(tiny: bool) -> Gpu | None:
    """The GPU, the simulated one for tiny sizes, or None with a line that says why there is none."""
    if SIMULATED and not tiny:
        print("the simulator runs with --tiny only")
        return None
    try:
        return Gpu()
    except (ImportError, RuntimeError) as error:
        print(f"left out: {error}")
        return None


def about(gpu: Gpu) -> dict[str, Any]:
    """Machine, device and versions."""
    import numba

    found = machine() | {"numba": numba.__version__, "simulated": SIMULATED}
    if not SIMULATED:
        import numba_cuda

        properties = torch.cuda.get_device_properties(gpu.device)
        found |= {
            "gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30),
            "cuda": torch.version.cuda, "numba_cuda": numba_cuda.__version__,
        }  # fmt: skip
    return found


def milliseconds(gpu: Gpu, call: Callable[[int], Any], runs: int, warm: int = 3) -> float:
    """Median time of a call on the device's stream, launches and waits of the host included; run r is given r."""
    times = []
    for run in range(-warm, runs):
        if gpu.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(gpu.device)
            begin.record()
            call(run + warm)
            end.record()
            end.synchronize()
            spent = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            call(run + warm)
            spent = (time.perf_counter() - start) * 1e3
        if run >= 0:
            times.append(spent)
    return statistics.median(times)


def copy_bandwidth(gpu: Gpu, tiny: bool) -> float:
    """Bytes read plus bytes written per second by torch's copy on the device."""
    size = 2**16 if tiny else 2**30
    source, target = gpu.full(size, value=1, dtype=torch.float32), gpu.empty(size, dtype=torch.float32)
    return 2 * 4 * size / (milliseconds(gpu, lambda _: target.copy_(source), 9) / 1e3)


def write(path: str | None, results: list[dict[str, Any]]) -> None:
    """Add one JSON line a case to a file of results."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)
