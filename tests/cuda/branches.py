"""Which lines of CUDA loops have not run in the simulator, and which branches were not taken both ways."""

import json
from pathlib import Path

from tests.cuda.loops import all_loops


def missing_branches(noted, report_path):
    """The same as text, one of each, from what a `coverage.Coverage` has noted."""
    noted.json_report(outfile=str(report_path))
    report = json.loads(report_path.read_text())
    reported = {f"{Path(path).stem}.{name}" for path, found in report["files"].items() for name in found["functions"]}
    assert reported >= set(all_loops())
    return untaken(report, all_loops())


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
