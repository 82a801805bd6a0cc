"""The examples of docs/torchrec.md and docs/dynamicemb.md run as they are written, from the first to the last."""

import re
import socket
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchrec")

DOCS = Path(__file__).resolve().parents[2] / "docs"


def run(name, smaller=()):
    """What the examples of a document have defined in the end.

    Args:
        smaller: what stands for numbers that would take the memory of a real table.
    """
    code = "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL))
    for large, small in smaller:
        assert large in code
        code = code.replace(large, small)
    names = {}
    exec(compile(code, name, "exec"), names)
    return names


@pytest.fixture
def one_rank(monkeypatch):
    """What torchrun tells the only rank of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}
    for name, value in said.items():
        monkeypatch.setenv(name, str(value))
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_examples_of_torchrec(one_rank, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run("torchrec.md", [("1_000_000", "1_000"), ("cache_budget_mb=4096", "cache_budget_mb=16")])
    assert "Sharded" not in type(names["ebc"]).__name__ and (tmp_path / "rows").is_dir()
    assert names["program"](names["features"]).shape == (2, 3 * 64)
    names["ebc"].close()


def test_the_examples_of_dynamicemb(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    names = run("dynamicemb.md")
    import dynamicemb.planner

    assert dynamicemb.planner.DynamicEmbeddingShardingPlanner is names["DynamicEmbeddingShardingPlanner"]
    for name in [name for name in sys.modules if name.split(".")[0] == "dynamicemb"]:
        monkeypatch.delitem(sys.modules, name)
