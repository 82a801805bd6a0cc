"""Last of all: every line of every CUDA loop has run in the simulator, and every branch was taken both ways."""

import json
from pathlib import Path

import pytest

from tests.cuda.conftest import SIMULATED
from tests.cuda.loops import all_loops


def untaken(report, loops):
    """The lines of loops that did not run, and the branches (line, line after it) that were not taken, as text."""
    missing = []
    for path, found in report["files"].items():
        source = Path(path).read_text().splitlines()
        for name, function in found["functions"].items():
            if f"{Path(path).stem}.{name}" in loops:
                missing += [f"{path}:{line}: {source[line - 1].strip()}" for line in function["missing_lines"]]
                missing += [
                    f"{path}:{begin}: {source[begin - 1].strip()} -> line {abs(end)}"
                    for begin, end in function["missing_branches"]
                ]
    return missing


@pytest.mark.skipif(not SIMULATED, reason="a GPU does not tell which lines it ran")
def test_every_branch_of_every_loop_has_run(request, branches_taken, tmp_path):
    folder = request.path.parent
    run = {item.path for item in request.session.items}
    if run < set(folder.glob("test_*.py")) or request.config.option.keyword:
        pytest.skip("only a part of the folder was run")
    branches_taken.stop()
    branches_taken.json_report(outfile=str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    reported = {f"{Path(path).stem}.{name}" for path, found in report["files"].items() for name in found["functions"]}
    assert reported >= set(all_loops())
    missing = untaken(report, all_loops())
    assert not missing, "\n".join(missing)


def test_what_was_not_taken_is_told(tmp_path):
    path = tmp_path / "some.py"
    path.write_text("def loop(x):\n    if x:\n        x = 1\n    return x\n")
    functions = {"loop": {"missing_lines": [3], "missing_branches": [[2, 3]]}, "other": {"missing_lines": [1]}}
    report = {"files": {str(path): {"functions": functions}}}
    assert untaken(report, {"some.loop": None}) == [f"{path}:3: x = 1", f"{path}:2: if x: -> line 3"]
