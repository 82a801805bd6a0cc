"""README.md: its length, its figures and its picture."""

import json
import re
import subprocess
import sys
from pathlib import Path

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
    (disk,) = re.search(r"Random reads of rows on an SSD reach (\S+) of", text).groups()
    assert f"| random read | {disk} " in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_picture_is_what_its_script_draws(tmp_path):
    assets = ROOT / "docs" / "assets"
    script = tmp_path / "draw_overview.py"
    script.write_text((assets / "draw_overview.py").read_text())
    subprocess.run([sys.executable, script], check=True)
    for theme in ("light", "dark"):
        assert (tmp_path / f"overview-{theme}.svg").read_text() == (assets / f"overview-{theme}.svg").read_text()
        assert f"docs/assets/overview-{theme}.svg" in README.read_text()
