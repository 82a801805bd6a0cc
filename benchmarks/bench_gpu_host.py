"""Host time of a step and of an eval lookup on a GPU, without the GPU's own: what Python and torch take to launch them.

    python benchmarks/bench_gpu_host.py

On a machine without a GPU, on a driver that does nothing (tests/support/null_driver.c), with a batch so small that
torch's ops, which then run on the CPU, take no longer than they take to be called. `torch` is the time of torch's
calls without oneemb, made again between the steps; `oneemb` is all other time; `loops` is the part of it in which loops
are launched.
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
        alone = TorchAlone(ids, grad)
        found = [timed(gpu, "step", step, alone, options.runs)]
        embedding.eval()
        found.append(timed(gpu, "eval", evaluate, alone.eval(), options.runs))
        embedding.clear()  # The rows may go.
        embedding.close()
    return found


def least(times: list[float]) -> float:
    """The first decile of times, since other processes only add time."""
    return statistics.quantiles(times, n=10)[0]


def timed(gpu: launch.Gpu, what: str, call: Callable[[], None], alone: "TorchAlone", runs: int) -> dict[str, Any]:
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
    check_same_calls(call, alone)
    torch_us = microseconds_of_torch(call, alone, runs)
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


class EmptyGrad(torch.Tensor):
    """A gradient of a class of its own without elements, as a `RowGrad` is."""

    @staticmethod
    def of(dim: int) -> "EmptyGrad":
        return torch.Tensor._make_wrapper_subclass(EmptyGrad, (0, dim), dtype=torch.float32, device=torch.device("cpu"))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> "EmptyGrad":
        return EmptyGrad.of(args[0].shape[1])


class Backward(torch.autograd.Function):
    """The calls of torch of a backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: tuple[torch.Tensor], alone: "TorchAlone", weight: torch.Tensor) -> torch.Tensor:
        ctx.alone = alone
        return rows[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        alone = ctx.alone
        grads[0].view(-1, alone.dim)
        torch.sort(alone.inverse_N, stable=True)
        alone.make(torch.float32)
        return None, None, EmptyGrad.of(alone.dim)


APPLY: Any = super(torch.autograd.Function, Backward).apply  # as lookups call it


class TorchAlone(torch.nn.Module):
    """The calls of torch of a step or an eval lookup, with arrays of the same kind, and no code of oneemb's."""

    def __init__(self, ids: torch.Tensor, grad: torch.Tensor):
        super().__init__()
        self.ids, self.grad, self.dim, self.size = ids, grad, grad.shape[-1], ids.numel()
        self.inverse_N = ids.reshape(-1).to(torch.int32)
        self.weight = torch.nn.Parameter(torch.zeros(0, self.dim))
        self.empties = 0

    def make(self, *dtypes: torch.dtype) -> None:
        for dtype in dtypes:
            torch.empty(self.size, dtype=dtype, device=self.ids.device)
        self.empties += len(dtypes)

    def forward(self) -> torch.Tensor:
        self.ids.view(-1)
        if self.training:
            for dtype, alike in ((torch.int32, 1), (torch.int64, 2)):
                made = torch.empty(self.size, dtype=dtype, device=self.ids.device)
                for _ in range(alike):
                    torch.empty_like(made)
            self.empties += 5
        else:
            torch.empty(2, self.size, dtype=torch.int64, device=self.ids.device).unbind()
            self.empties += 1
        self.empties += 1
        rows = torch.empty(*self.ids.shape, self.dim, dtype=torch.float32, device=self.ids.device)
        rows.view(-1, self.dim)
        return APPLY((rows,), self, self.weight) if self.training else rows

    def run(self) -> None:
        """Make the calls."""
        if self.training:
            self().backward(self.grad)
            self.weight.grad = None
        else:
            with torch.no_grad():
                self()


def check_same_calls(call: Callable[[], None], alone: TorchAlone) -> None:
    """Raise AssertionError if `alone` does not make as many arrays as `call`, whose code has changed then."""
    profile, alone.empties = cProfile.Profile(), 0
    profile.runcall(call)
    calls = {name: row[1] for (_, _, name), row in pstats.Stats(profile).stats.items()}  # type: ignore[attr-defined]
    alone.run()
    made = calls["<built-in method torch.empty>"] + calls.get("<built-in method torch.empty_like>", 0)
    assert made == alone.empties, f"oneemb makes {made} arrays, and TorchAlone {alone.empties}: write them there"


def microseconds_of_torch(call: Callable[[], None], alone: TorchAlone, runs: int) -> float:
    """Time of the calls of `alone`, made right after `call`: the processor's caches then hold other code, as within
    `call`."""

    def both() -> None:
        call()
        alone.run()

    times: dict[Callable[[], None], list[float]] = {call: [], both: []}
    for _ in range(runs):
        for one, found in times.items():
            start = time.perf_counter()
            one()
            found.append(time.perf_counter() - start)
    return 1e6 * (least(times[both]) - least(times[call]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
