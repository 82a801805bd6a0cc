"""Host time of a step and of an eval lookup on a GPU, without the GPU's own: what Python and torch take to launch them.

    python benchmarks/bench_gpu_host.py

On a machine without a GPU, on a driver that does nothing (tests/support/null_driver.c), with a batch so small that
torch's ops, which then run on the CPU, take no longer than they take to be called. `torch` is the time within torch,
by the profiler; `oneemb` is all other time, launches of loops included; `loops` are these.
"""

import argparse
import cProfile
import importlib.util
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from _machine import machine, save_results, table

import oneemb
from oneemb.kernels import launch

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
TORCH = os.path.dirname(torch.__file__) + os.sep
# Compiled functions as the profiler names them: torch's without torch's name, and those that only read a tensor.
OF_TORCH = "<built-in method apply>", "<built-in method _make_wrapper_subclass>"
READS = "data_ptr", "is_contiguous"
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--batch", type=int, default=4096 if torch.cuda.is_available() else 8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--null", action="store_true", help="the driver that does nothing has been built")
    parser.add_argument("--out", help="file of the results")
    options = parser.parse_args()
    if torch.cuda.is_available():
        gpu, place = launch.gpu_at(torch.device("cuda")), torch.cuda.get_device_name()
    elif options.null:
        gpu, place = null_gpu().NullGpu(unique=options.tables), "a driver that does nothing"
        null_gpu().make_default(gpu)
    else:
        raise SystemExit(on_null_driver())
    about = machine() | {"gpu": place}
    results = measure(gpu, options)
    for result in results:
        print(json.dumps(about | result), flush=True)
    save_results(options.out, about, results)
    keys = ["what", "host_us", "torch_us", "oneemb_us", "loops_us", "launches", "waits"]
    print(table(keys, [[str(result[key]) for key in keys] for result in results]))
    for result in results:
        print(table([f"loop of {result['what']}", "us"], [[name, str(us)] for name, us in result["loop_us"].items()]))


def null_gpu() -> Any:
    """The module tests/support/null_gpu.py."""
    if "null_gpu" not in sys.modules:
        spec = importlib.util.spec_from_file_location("null_gpu", SUPPORT / "null_gpu.py")
        assert spec is not None and spec.loader is not None
        sys.modules["null_gpu"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["null_gpu"])
    return sys.modules["null_gpu"]


def on_null_driver() -> int:
    """Run this benchmark again where the driver that does nothing is found; returns the exit code."""
    if null_gpu().compiler() is None:
        print("left out: there is no GPU, and no C compiler for a driver that does nothing")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run([sys.executable, *sys.argv, "--null"], env=null_gpu().build(folder)).returncode


def measure(gpu: launch.Gpu, options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        embedding = oneemb.MultiTableEmbedding(
            "bench", options.dim, torch.float32, torch.int64, [oneemb.make_table()] * options.tables,
            oneemb.make_device_mem_store_options(folder),
        )  # fmt: skip
        if gpu.device.type == "cuda":
            embedding.to(gpu.device)
        else:
            embedding.store.form.move_to(torch.device("cuda"))
        optimizer = oneemb.Optimizer(
            OPTIMIZERS[options.optimizer]([embedding.weight]), [embedding], check_in_step=False
        )
        ids = torch.arange(options.batch * options.tables, device=gpu.device).reshape(options.batch, options.tables)
        ids = ids % options.tables
        grad = torch.ones(options.batch, options.tables, options.dim, device=gpu.device)

        def step() -> None:
            embedding(ids).backward(grad)
            optimizer.step()
            optimizer.zero_grad()

        def evaluate() -> None:
            with torch.no_grad():
                embedding(ids)

        for _ in range(3):
            step()
        if hasattr(gpu, "stop_writing"):
            gpu.stop_writing()  # From now on a GPU that does nothing writes nothing.
        found = [timed(gpu, "step", step, options.runs)]
        embedding.eval()
        found.append(timed(gpu, "eval", evaluate, options.runs))
        embedding.clear()  # The rows may go.
        embedding.close()
    return found


def least(times: list[float]) -> float:
    """The tenth part of the times is below this: other processes only add."""
    return statistics.quantiles(times, n=10)[0]


def timed(gpu: launch.Gpu, what: str, call: Callable[[], None], runs: int) -> dict[str, Any]:
    for _ in range(10):
        call()
    before = gpu.launches, gpu.waits
    call()
    counts = {"launches": gpu.launches - before[0], "waits": gpu.waits - before[1]}
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    host_us, loop_us = least(times) * 1e6, microseconds_of_loops(gpu, call)
    torch_us = microseconds_of_torch(call, host_us)
    return {
        "what": what, "host_us": round(host_us), "torch_us": round(torch_us), "oneemb_us": round(host_us - torch_us),
        "loops_us": round(sum(loop_us.values())), **counts,
        "loop_us": {name: round(us, 1) for name, us in loop_us.items()},
    }  # fmt: skip


def microseconds_of_loops(gpu: launch.Gpu, call: Callable[[], None], runs: int = 100) -> dict[str, float]:
    """Host time of each loop of a call, by name, all its launches together."""
    found: dict[str, list[float]] = defaultdict(list)
    launched, own = gpu.run_in_turn, vars(gpu).get("run_in_turn")

    def clocked(loops: Callable[[], launch.Loops], *args: tuple, shapes: Hashable) -> None:
        start = time.perf_counter()
        launched(loops, *args, shapes=shapes)
        end = time.perf_counter()
        found[", ".join(loop.__name__ for loop, _ in loops())].append((end - start) * 1e6)

    vars(gpu)["run_in_turn"] = clocked
    try:
        for _ in range(runs):
            call()
    finally:
        del vars(gpu)["run_in_turn"]
        if own is not None:
            vars(gpu)["run_in_turn"] = own
    return {name: least(times) * len(times) / runs for name, times in found.items()}


def microseconds_of_torch(call: Callable[[], None], host_us: float, runs: int = 100) -> float:
    """Time within torch of a call that takes `host_us`: in torch's Python files, and in its compiled functions but for
    those that only read a tensor's address or layout.

    The profiler says how much. From the time of each compiled function the profiler's own cost of a call is taken off:
    the time that it finds in a function that does nothing. Python's instructions take longer under the profiler, so
    the rest of `host_us` is divided in the proportion of the times in torch's Python files and in all others.
    """
    call_us, found = least([microseconds_of_nothing() for _ in range(100)]), []
    for _ in range(runs):
        us: dict[tuple[bool, bool], float] = defaultdict(float)  # {(is compiled, is of torch): time}
        for (file, _, name), (_, calls, seconds, *_) in profiled(call).items():
            if file == "~":
                of_torch = name in OF_TORCH or "torch" in name and not any(read in name for read in READS)
                us[True, of_torch] += seconds * 1e6 - calls * call_us
            else:
                us[False, file.startswith(TORCH)] += seconds * 1e6
        compiled_us, python_us = us[True, True] + us[True, False], us[False, True] + us[False, False]
        found.append(us[True, True] + (host_us - compiled_us) * us[False, True] / python_us)
    return least(found)


def microseconds_of_nothing(calls: int = 100) -> float:
    """Time that the profiler finds in a call of a compiled function that does nothing."""
    nothing = [].copy
    rows = profiled(lambda: [nothing() for _ in range(calls)]).values()
    return 1e6 * next(row[2] for row in rows if row[1] == calls) / calls


def profiled(call: Callable[[], object]) -> dict[tuple[str, int, str], tuple[Any, ...]]:
    """{(file, "~" for a compiled function; line; name): (_, number of calls, seconds within the function, ...)}"""
    profile = cProfile.Profile()
    profile.runcall(call)
    return pstats.Stats(profile).stats  # type: ignore[attr-defined,no-any-return]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
