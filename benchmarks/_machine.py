"""What a benchmark says about the machine it ran on, and what every measurement shares."""

import ctypes
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["copy_bandwidth", "interleaved", "keep_freed_memory", "load_results", "machine", "save_results", "table"]


# Before each measurement: the OpenMP threads of the system before go on spinning for some milliseconds after its call,
# on the cores that the next one is to use.
_PAUSE_S = 0.01


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory and versions."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, up to 32 MiB a block, as it comes to do by itself for one system at a time.

    Systems that run in turn upset its guesses: memory goes back to the kernel and comes again as page faults, which
    would be most of what is measured.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, 2**25)


def copy_bandwidth(size_bytes: int = 2**28, runs: int = 9) -> float:
    """Bytes read plus bytes written per second by torch's copy of a large tensor, on torch's threads."""
    import torch  # Not above: what compares revisions of small trees runs without it.

    source, target = torch.ones(size_bytes // 4), torch.empty(size_bytes // 4)
    return 2 * size_bytes / statistics.median(_seconds(lambda: target.copy_(source)) for _ in range(runs))


def interleaved(calls: Mapping[str, Callable[[int], Any]], runs: int, warm: int) -> dict[str, list[float]]:
    """Seconds of each call, taken in turn: whatever slows the machine for a while slows all of them.

    Args:
        calls: each is called with the number of the run, which says which batch to take.
        warm: runs that are not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(-warm, runs):
        for name, call in calls.items():
            time.sleep(_PAUSE_S)
            spent = _seconds(lambda call=call, run=run: call(run + warm))
            if run >= 0:
                seconds[name].append(spent)
    return seconds


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    result = call()
    spent = time.perf_counter() - begin
    del result  # Freed outside the measured time, for every system alike.
    return spent


def table(head: list[str], rows: list[list[str]]) -> str:
    """Rows in columns of equal width."""
    widths = [max(len(row[c]) for row in [head, *rows]) for c in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def save_results(path: str | None, about: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of results in place of the one before: {"about": machine and versions, "cases": [...]}, a line each.

    `benchmarks/readme_tables.py` makes the tables of docs/benchmarks.md of those in benchmarks/results.
    """
    if path is None:
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(case) for case in cases)
    Path(path).write_text(f'{{"about": {json.dumps(about)},\n"cases": [\n{lines}\n]}}\n')


def load_results(path: str) -> list[Mapping[str, Any]]:
    """The cases of such a file."""
    return json.loads(Path(path).read_text())["cases"]
