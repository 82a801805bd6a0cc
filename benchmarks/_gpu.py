"""What the benchmarks on a GPU share: the clock, the machine, where results go."""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from _machine import machine

from oneemb.kernels.launch import SIMULATED, Gpu, gpu_at

__all__ = ["about", "copy_bandwidth", "milliseconds", "open_gpu", "write"]


def open_gpu(tiny: bool) -> Gpu | None:
    """The GPU, the simulated one for tiny sizes, or None with a line that says why there is none."""
    if SIMULATED and not tiny:
        print("the simulator runs with --tiny only")
        return None
    try:
        return gpu_at(torch.device("cuda"))
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


def milliseconds(gpu: Gpu, calls: Mapping[str, Callable[[int], Any]], runs: int, warm: int = 3) -> dict[str, float]:
    """Median time of each call on the device's stream, launches and waits of the host included.

    Calls take turns, so that whatever slows the machine for a while slows all of them; run r is given r.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(-warm, runs):
        for name, call in calls.items():
            spent = _milliseconds(gpu, call, run + warm)
            if run >= 0:
                times[name].append(spent)
    return {name: statistics.median(some) for name, some in times.items()}


def _milliseconds(gpu: Gpu, call: Callable[[int], Any], run: int) -> float:
    if gpu.device.type != "cuda":
        start = time.perf_counter()
        call(run)
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(gpu.device)
    begin.record()
    call(run)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copy_bandwidth(gpu: Gpu, tiny: bool) -> float:
    """Bytes read plus bytes written per second by torch's copy on the device."""
    size = 2**16 if tiny else 2**30
    source, target = gpu.full(size, value=1, dtype=torch.float32), gpu.empty(size, dtype=torch.float32)
    return 2 * 4 * size / (milliseconds(gpu, {"copy": lambda _: target.copy_(source)}, 9)["copy"] / 1e3)


def write(path: str | None, about: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    """Add cases to a file of results, one JSON document: {"about": machine and versions, "cases": [...]}."""
    if path is None:
        return
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(file.read_text()) if file.exists() else {"about": about, "cases": []}
    if found["about"] != about:
        raise SystemExit(f"{path} holds results of another machine, or of other versions; name another file")
    found["cases"] += cases
    file.write_text(json.dumps(found, indent=1) + "\n")
