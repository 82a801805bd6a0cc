"""The benchmarks for a GPU run to their end at tiny sizes, so that time on a machine that has one is not lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.conftest import SIMULATED

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not SIMULATED, reason="make gpu-bench runs them whole")
@pytest.mark.parametrize(
    "bench, arguments",
    [
        ("bench_gpu_index.py", ["--dim", "8"]),
        ("bench_gpu_step.py", ["--store", "device", "cache 0.8"]),
    ],
)
def test_a_benchmark_runs_in_the_simulator_and_writes_its_results(bench, arguments, tmp_path):
    out = tmp_path / "results" / "gpu.json"
    command = [sys.executable, ROOT / "benchmarks" / bench, "--tiny", "--out", out, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert results[0]["simulated"] and len(results) > 2
