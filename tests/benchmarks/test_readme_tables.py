"""Tables of docs/ are made of results, and of nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import draw_results
import pytest
from readme_tables import TABLES, TableError, filled, main

ROOT = Path(__file__).parents[2]

ABOUT = {"cpu": "CPU", "cores": 2, "python": "3.11.7", "torch": "2.13.0"}
CASE = {"ids": 12_288, "ms_one": 0.5, "ms_two": 0.25, "two_over_one": 0.5}

MADE = """before

<!-- table: lookup_threads -->

| ids | one thread, ms | two threads, ms | two / one |
| --- | --- | --- | --- |
| 12,288 | 0.500 | 0.250 | 0.50 |

CPU, 2 cores, Python 3.11.7, torch 2.13.0.

<!-- end of table -->

after
"""
EMPTY = "before\n\n<!-- table: lookup_threads -->\n<!-- end of table -->\n\nafter\n"


@pytest.fixture
def results(tmp_path):
    (tmp_path / "lookup_threads.json").write_text(json.dumps({"about": ABOUT, "cases": [CASE]}))
    return tmp_path


def test_a_table_is_made_between_its_markers_and_made_anew_it_is_the_same(results):
    assert filled(EMPTY, results) == MADE
    assert filled(MADE, results) == MADE
    assert filled(EMPTY + MADE, results) == MADE + MADE
    assert filled("no table", results) == "no table"


def test_check_finds_a_figure_that_its_results_do_not_say_and_writes_nothing(results, capsys):
    page = results / "page.md"
    page.write_text(MADE)
    arguments = [str(page), "--results", str(results)]
    assert main([*arguments, "--check"]) == 0
    page.write_text(MADE.replace("0.250", "0.150"))
    assert main([*arguments, "--check"]) == 1
    assert "page.md: a table differs from its results" in capsys.readouterr().err
    assert "0.150" in page.read_text()
    assert main(arguments) == 0 and page.read_text() == MADE


@pytest.mark.parametrize(
    "text, message",
    [
        ("<!-- table: lookup_threads -->\n", "each marker"),
        ("<!-- table: lookup_threads -->\n" + EMPTY, "each marker"),
        (EMPTY + "<!-- end of table -->\n", "each marker"),
        (EMPTY.replace("lookup_threads", "unheard"), "there is no table 'unheard'; there are embedding_step, "),
        (EMPTY.replace("lookup_threads", "small_step"), "small_step.json, which is not there"),
        (EMPTY.replace("lookup_threads", "dense_share"), "dense_share.json has no 'system'"),
    ],
)
def test_a_table_that_cannot_be_made_is_told(results, text, message):
    (results / "dense_share.json").write_text(json.dumps({"about": ABOUT, "cases": [CASE]}))
    with pytest.raises(TableError, match=message):
        filled(text, results)


def test_the_tables_of_this_tree_are_what_their_results_say():
    assert main(["--check"]) == 0


TINY = {
    "embedding_step": ["--tables", "2", "--rows", "500", "--batch", "8", "--runs", "1", "--peers"],
    "batch_sizes": ["--optimizer", "sgd", "--batch", "1", "16", "--tables", "2", "--rows", "500", "--runs", "1",
                    "--peers", "oneemb_graph", "torch"],
    "small_step": ["--turns", "1"],
    "lookup_threads": ["--rows", "500", "--ids", "26", "--turns", "1"],
    "dense_share": ["--rows", "500", "--batch", "8", "--turns", "1"],
    "longest_steps": ["--slots", "20000", "--batch", "16", "--steps", "3"],
    "loader": ["--rows", "5000", "--turns", "1"],
    "publish": ["--rows", "2000", "--turns", "1"],
    "gpu_host": ["--tables", "3", "--runs", "20"],
    "serving_lag": ["--rows", "20000", "--deltas", "2", "--calls", "200"],
    "persistent_table": ["--rows", "150000", "--rounds", "2", "--blocks", "4096", "--puts", "9",
                         "--peers"],
    "train_step": ["--tables", "8", "--rows", "3000", "--batch", "64", "--rounds", "1", "--steps", "3", "--warm", "2"],
    "scale_out": ["--ranks", "1", "--tables", "2", "--rows", "100", "--batch", "16", "--rounds", "1", "--steps", "2"],
}  # fmt: skip
"""Sizes at which each benchmark runs to its end in seconds."""


QUICK = ("lookup_threads",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TINY])
def test_each_benchmark_writes_what_its_table_is_made_of(name, tmp_path):
    bench = "embedding_step" if name == "batch_sizes" else name
    out = tmp_path / f"{name}.json"
    command = [sys.executable, ROOT / "benchmarks" / f"bench_{bench}.py", *TINY[name], "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if "no C compiler" in done.stdout:
        pytest.skip(done.stdout.strip())
    made = filled(f"<!-- table: {name} -->\n<!-- end of table -->\n", tmp_path)
    cases = json.loads(out.read_text())["cases"]
    assert made.count("\n| ") == 2 + len(cases) and cases
    assert set(TINY) | {"gpu"} == set(TABLES)


def test_the_figures_are_drawn_of_the_results(tmp_path):
    assert draw_results.main(["--check"]) == 0
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f"assets/{name}" in page for name, _ in draw_results.figures(ROOT / "benchmarks" / "results"))
    assert draw_results.main(["--check", "--figures", str(tmp_path)]) == 1


def test_a_figure_of_other_results_is_found(tmp_path):
    for name in draw_results.FIGURES:
        results = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        results["about"]["cpu"] = "another"
        (tmp_path / f"{name}.json").write_text(json.dumps(results))
    assert draw_results.main(["--check", "--results", str(tmp_path)]) == 1
