"""The command that runs all parts on a GPU machine goes on after a part that fails or is too slow."""

import json
import sys

import pytest

from tests import on_gpu


@pytest.fixture
def parts(monkeypatch):
    """Commands in place of those of make."""
    commands = {
        "gpu-test": "print('tested'); raise SystemExit(3)",
        "gpu-bench": "import time; time.sleep(60)",
        "gpu-sanitize-quick": "print('clean')",
    }
    run = on_gpu.run

    def run_instead(command, log, limit_s):
        _, part, interpreter = command
        assert interpreter == f"RUN={sys.executable}" and limit_s == on_gpu.PARTS[part]
        return run([sys.executable, "-c", commands[part]], log, 1.0 if part == "gpu-bench" else 60)

    monkeypatch.setattr(on_gpu, "run", run_instead)


def test_each_part_runs_and_is_in_the_summary(parts, tmp_path, monkeypatch):
    results = tmp_path / "gpu.json"
    results.write_text("{}")
    monkeypatch.setattr(on_gpu, "RESULTS", results)
    out = tmp_path / "out"
    assert on_gpu.main(["--out", str(out)]) == 1
    summary = json.loads((out / "summary.json").read_text())
    assert [one["exit_code"] for one in summary.values()] == [3, None, 0] and list(summary) == list(on_gpu.PARTS)
    assert (out / "gpu-test.log").read_text() == "tested\n" and (out / "gpu.json").read_text() == "{}"
    assert on_gpu.main(["--out", str(out), "--parts", "gpu-sanitize-quick"]) == 0


def test_all_parts_take_less_than_eight_minutes():
    assert sum(on_gpu.PARTS.values()) < 8 * 60
