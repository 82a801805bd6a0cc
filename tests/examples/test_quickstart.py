"""The quickstart runs, its loss falls, and its snapshot is there."""

import re
import runpy
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_quickstart(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = runpy.run_path(str(EXAMPLES / "quickstart.py"))
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert losses[0] > 0.6 and losses[-1] < 0.3
    assert names["embedding"].snapshots() == ["trained"]
    names["embedding"].close()
