"""Cost of a step and a lookup that are too small to be anything but Python, beside nn.Embedding.

    python benchmarks/bench_small_step.py --out benchmarks/results/small_step.json

A step: three tables of 16 weights, a batch of 64, SGD; oneemb in an eager loop and as a graph that is called. A lookup:
one sample, no gradient; an embedding in eval mode, and a served snapshot. All run in turn, some calls a turn, and the
medians of the turns are what is printed, with the calls of Python's and of C's functions in one step or lookup.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from _case import Measured, Timed, count_calls
from _machine import keep_freed_memory, machine, save_results, table
from _small import READS, STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", help="file of the results")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(2)
    about = machine() | {"threads": 2}
    print(json.dumps(about), flush=True)
    results = [*measure("step", STEPS, options.turns), *measure("read", READS, options.turns)]
    for result in results:
        print(json.dumps(result), flush=True)
    save_results(options.out, about, results)
    print(table(["what", "system", "ms", "of nn.Embedding", "calls of Python", "of C"],
                [[str(value) for value in result.values()] for result in results]))  # fmt: skip


def measure(what: str, systems: dict[str, Any], turns: int) -> list[dict[str, Any]]:
    made = {name: system() for name, system in systems.items()}
    timed = {name: Timed(getattr(system, what), system.close) for name, system in made.items()}
    ms: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(turns):
        for name, case in timed.items():
            time.sleep(0.01)  # torch's threads of the system before spin for a while
            ms[name].append(case.sample(case.calls))
    peer = statistics.median(ms["nn.Embedding"])
    calls = {name: count_calls(lambda system=system: getattr(system, what)(0)) for name, system in made.items()}
    for case in timed.values():
        case.close()
    return [
        {
            "what": what, "system": name, "ms": round(statistics.median(samples), 4),
            "ratio": round(statistics.median(samples) / peer, 2), "python_calls": calls[name].python,
            "c_calls": calls[name].c,
        }
        for name, samples in ms.items()
    ]  # fmt: skip


def step(name: str) -> Measured:
    system = STEPS[name]()
    return Timed(system.step, system.close)


def read(name: str) -> Measured:
    system = READS[name]()
    return Timed(system.read, system.close)


def step_calls(name: str) -> Measured:
    """Calls of functions, Python's and C's, in one step."""
    system = STEPS[name]()
    for i in range(3):
        system.step(i)

    def sample(calls: int) -> float:
        counted = count_calls(lambda: system.step(0))
        return counted.python + counted.c

    return Measured(sample, system.close, "calls")


COMPARED = {
    "small/eager": lambda: step("eager"),
    "small/graph": lambda: step("graph"),
    "small/eager/calls": lambda: step_calls("eager"),
    "small/graph/calls": lambda: step_calls("graph"),
    "small/eval": lambda: read("eval"),
    "small/served": lambda: read("served"),
}
"""Cases of compare.py."""


if __name__ == "__main__":
    main()
