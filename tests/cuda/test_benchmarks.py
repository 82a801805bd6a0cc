"""The benchmarks for a GPU run to their end at tiny sizes, so that time on a machine that has one is not lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from readme_tables import filled

from tests.cuda.conftest import SIMULATED

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not SIMULATED, reason="make gpu-bench runs them whole")
@pytest.mark.parametrize(
    "bench, arguments",
    [
        ("bench_gpu_index.py", ["--dim", "8"]),
        ("bench_gpu_step.py", ["--store", "device", "cache 0.8", "no HBM"]),
        ("bench_gpu_bus.py", ["--dim", "8"]),
    ],
)
def test_a_benchmark_runs_in_the_simulator_and_writes_its_results(bench, arguments, tmp_path):
    out = tmp_path / "results" / "gpu.json"
    command = [sys.executable, ROOT / "benchmarks" / bench, "--tiny", "--out", out, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert results["about"]["simulated"] and results["about"]["torch"] and len(results["cases"]) >= cases(arguments)
    assert all(case["bench"] == bench.removeprefix("bench_").removesuffix(".py") for case in results["cases"])
    made = filled("<!-- table: gpu -->\n<!-- end of table -->\n", out.parent)
    assert made.count("\n| ") == 2 + (len(results["cases"]) if "step" in bench else 0)
    again = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert again.returncode == 0, again.stderr
    assert len(json.loads(out.read_text())["cases"]) == 2 * len(results["cases"])


def cases(arguments):
    return 2 * (len(arguments) - 1) if arguments[0] == "--store" else 1
