"""README.md: its length, its figures and its picture."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def test_the_readme_is_read_at_one_go():
    assert len(README.read_text().splitlines()) <= 110


def test_the_figures_of_the_readme_are_those_of_the_benchmarks():
    text = README.read_text()
    cases = json.loads((ROOT / "benchmarks" / "results" / "embedding_step.json").read_text())["cases"]
    (step,) = (its for its in cases if its["case"]["optimizer"] == "sgd" and not its["case"]["pooled"])
    (torch, fbgemm) = re.search(
        r"with SGD on 26 tables takes (\S+) of .*?\sand (\S+) of FBGEMM's", text, re.DOTALL
    ).groups()
    assert (torch, fbgemm) == (f"{step['ratio']['torch']:.2f}", f"{step['ratio']['fbgemm']:.2f}")
    least, most = re.search(r"Random reads of rows on an SSD reach (\S+) to (\S+) of", text).groups()
    cases = json.loads((ROOT / "benchmarks" / "results" / "persistent_table.json").read_text())["cases"]
    reads = sorted(case["of_raw"] for case in cases if case["case"] == "read")
    assert (least, most) == (f"{reads[0]:.2f}", f"{reads[-1]:.2f}")


FIGURES = {"draw_overview.py": ["overview"], "draw_concepts.py": ["lookup", "snapshots"]}
PAGES = {"overview": "README.md", "lookup": "docs/concepts.md", "snapshots": "docs/concepts.md"}


@pytest.mark.parametrize("script", FIGURES)
def test_a_figure_is_what_its_script_draws(script, tmp_path):
    assets = ROOT / "docs" / "assets"
    (tmp_path / script).write_text((assets / script).read_text())
    subprocess.run([sys.executable, tmp_path / script], check=True)
    for figure in FIGURES[script]:
        for theme in ("light", "dark"):
            name = f"{figure}-{theme}.svg"
            assert (tmp_path / name).read_text() == (assets / name).read_text()
            assert f"assets/{name}" in (ROOT / PAGES[figure]).read_text()
