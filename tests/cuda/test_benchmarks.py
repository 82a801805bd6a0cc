"""The benchmarks for a GPU run to their end at tiny sizes, so that time on a machine that has one is not lost."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from _gpu import about, open_gpu
from readme_tables import filled

from oneemb.kernels import launch
from tests.cuda.conftest import SIMULATED

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(not SIMULATED, reason="make gpu-bench runs them whole")
@pytest.mark.parametrize(
    "bench, arguments, cases",
    [
        ("bench_gpu_index.py", ["--dim", "8"], 1),
        ("bench_gpu_step.py", ["--optimizer", "adam", "--store", "device", "cache 0.8", "no HBM"], 3),
        pytest.param(
            "bench_gpu_step.py", ["--optimizer", "sgd", "--store", "cache 1.0", "no HBM"], 2, marks=pytest.mark.slow
        ),
        ("bench_gpu_bus.py", ["--dim", "8"], 1),
    ],
)
def test_a_benchmark_runs_in_the_simulator_and_adds_its_results(bench, arguments, cases, tmp_path, monkeypatch):
    out = tmp_path / "results" / "gpu.json"
    out.parent.mkdir()
    before = {"bench": "an earlier one"}
    out.write_text(json.dumps({"about": about(open_gpu(tiny=True)), "cases": [before]}))
    monkeypatch.setattr(launch, "simulated_gpu", None)
    monkeypatch.setattr(sys, "argv", [bench, "--tiny", "--out", str(out), *arguments])
    runpy.run_path(str(BENCHMARKS / bench), run_name="__main__")
    results = json.loads(out.read_text())
    assert results["about"]["simulated"] and results["about"]["torch"] and results["cases"][0] == before
    assert len(results["cases"]) >= 1 + cases
    name = bench.removeprefix("bench_").removesuffix(".py")
    assert all(case["bench"] == name for case in results["cases"][1:])
    made = filled("<!-- table: gpu -->\n<!-- end of table -->\n", out.parent)
    assert made.count("\n| ") == 2 + (len(results["cases"]) - 1 if "step" in bench else 0)
