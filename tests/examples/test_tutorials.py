"""Tutorials: a page has the text and the code of its script, and shows what the script prints.

`test_docs.py` runs each page in a short form, on fewer examples.
"""

import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITER = ROOT / "docs" / "assets" / "write_tutorials.py"
tutorials = runpy.run_path(str(WRITER))
OUTPUT = re.compile(r"\n```text\n(.*?)\n```\n", re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@pytest.mark.parametrize("name", tutorials["SCRIPTS"])
def test_a_page_has_the_text_and_the_code_of_its_script(name):
    page = tutorials["page_of"](name).read_text()
    assert OUTPUT.sub("", page) == tutorials["written"](name, itertools.repeat(""))


def differences(shown, printed):
    """Lines whose words differ, or whose numbers differ by more than a twentieth."""
    for old, new in zip(shown.splitlines(), printed.splitlines(), strict=True):
        numbers = [[float(one.replace(",", "")) for one in NUMBER.findall(line)] for line in (old, new)]
        same_words = NUMBER.sub("", old).split() == NUMBER.sub("", new).split()
        if not same_words or not all(abs(a - b) <= 0.05 * abs(a) + 0.005 for a, b in zip(*numbers, strict=True)):
            yield old, new


def test_an_output_that_differs_is_found():
    assert not list(differences("loss 0.530, 7,518 rows", "loss 0.529, 7,518 rows"))
    assert list(differences("loss 0.530", "loss 0.630")) and list(differences("a 1", "b 1"))


@pytest.mark.slow
@pytest.mark.parametrize("name", tutorials["SCRIPTS"])
def test_a_page_shows_what_its_script_prints(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = OUTPUT.findall(tutorials["page_of"](name).read_text())
    printed = [text.strip() for text in tutorials["outputs_of"](name)]
    assert len(shown) == len([text for text in printed if text])
    for old, new in zip(shown, filter(None, printed), strict=True):
        assert not list(differences(old, new))


@pytest.mark.slow
@pytest.mark.parametrize("name", tutorials["SCRIPTS"])
def test_a_script_runs_as_a_program(name, tmp_path):
    script = ROOT / "examples" / tutorials["SCRIPTS"][name]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
