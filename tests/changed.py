"""The tests nearest to a change, as many as fit into some seconds.

    python -m tests.changed [--base main] [--seconds 180] [--list] [-- arguments of pytest]
    python -m tests.changed --record report.xml [more.xml ...]

A change is what differs from the merge base with `--base`, committed or not, and files that git does not know yet. A
test file is as far from it as imports lead from the file to a changed one; names that `oneemb` loads lazily count as
imports of their modules. The nearest files run first, the quickest among equals; what no longer fits is named, and
`make test` runs it. Seconds of each test file are in tests/seconds.json, which `--record` writes from the reports that
`pytest --junitxml=report.xml -o junit_family=xunit1` makes.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import oneemb

__all__ = ["distances", "imports", "main", "nearest"]

ROOT = Path(__file__).parent.parent
SECONDS = ROOT / "tests" / "seconds.json"
FOLDERS = ["oneemb", "graph", "storage", "kernels", "tests", "benchmarks", "examples"]
PATHS = [ROOT, *(ROOT / folder for folder in ("tests/support", "tests/kernels", "benchmarks"))]
"""Where imports of tests lead; see pythonpath in pyproject.toml."""

UNKNOWN_S = 3.0
"""Seconds of a test file that has never been recorded."""

ENVIRONMENTS = {"tests/cuda/": {"NUMBA_ENABLE_CUDASIM": "1"}, "tests/cuda_compile/": {"ONEEMB_TEST_COMPILE": "1"}}
"""Folders whose tests need a process of their own."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main", help="revision that the change began from; default: main")
    parser.add_argument("--seconds", type=float, default=180, help="of the processes together; default: 180")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="name the files and run nothing")
    parser.add_argument(
        "--record", nargs="+", type=Path, metavar="REPORT", help="write tests/seconds.json, and no more"
    )
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args(arguments)
    if options.record:
        SECONDS.write_text(json.dumps(recorded(options.record), indent=0, sort_keys=True) + "\n")
        return 0
    far = distances(changed_files(options.base), {name: imports(ROOT / name) for name in source_files()})
    tests = {name: distance for name, distance in far.items() if is_test(name)}
    seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    chosen = nearest(tests, seconds, options.seconds * options.processes)
    for name in chosen:
        print(f"{tests[name]}  {seconds.get(name, UNKNOWN_S):6.1f} s  {name}")
    if left_out := len(tests) - len(chosen):
        print(f"{left_out} more test files depend on the change and do not fit into {options.seconds:g} s: make test")
    if options.list or not chosen:
        return 0
    return max(run(group, environment, options) for group, environment in grouped(chosen))


def changed_files(base: str) -> list[str]:
    def git(*command: str) -> list[str]:
        return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
            "\n"
        )

    fork = git("merge-base", base, "HEAD")[0]
    return [name for name in {*git("diff", "--name-only", fork), *git("ls-files", "-o", "--exclude-standard")} if name]


def source_files() -> list[str]:
    return [str(path.relative_to(ROOT)) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def is_test(name: str) -> bool:
    return name.startswith("tests/") and Path(name).name.startswith("test_")


def imports(path: Path) -> set[str]:
    """Files of the tree that a file imports, relative to the root."""
    tree = ast.parse(path.read_text())
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "oneemb":
            modules.add(f"oneemb.{node.attr}")
    return {found for module in modules for found in files_of(module)}


def files_of(module: str) -> Iterator[str]:
    if module.startswith("oneemb."):
        module = oneemb._WHERE.get(module.removeprefix("oneemb."), module)
        inner = module.removeprefix("oneemb.")
        if inner.split(".")[0] in ("graph", "storage", "kernels"):
            module = inner
    for folder in PATHS:
        place = folder.joinpath(*module.split("."))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.exists() and path != ROOT / "oneemb" / "__init__.py":
                yield str(path.relative_to(ROOT))


def distances(changed: Iterable[str], imports_of: Mapping[str, set[str]]) -> dict[str, int]:
    """How many imports lead from each file to a changed one; files from which none lead are left out."""
    importers: dict[str, list[str]] = {}
    for name, imported in imports_of.items():
        for one in imported:
            importers.setdefault(one, []).append(name)
    found = {name: 0 for name in changed if name in imports_of}
    front, distance = set(found), 0
    while front:
        distance += 1
        front = {importer for name in front for importer in importers.get(name, ()) if importer not in found}
        found |= dict.fromkeys(front, distance)
    return found


def nearest(tests: Mapping[str, int], seconds: Mapping[str, float], budget_s: float) -> list[str]:
    """Test files in the order of their distance, as many as fit; one that was changed itself always does."""
    chosen, spent = [], 0.0
    for name in sorted(tests, key=lambda name: (tests[name], seconds.get(name, UNKNOWN_S), name)):
        cost = seconds.get(name, UNKNOWN_S)
        if tests[name] == 0 or spent + cost <= budget_s:
            chosen.append(name)
            spent += cost
    return chosen


def grouped(names: list[str]) -> Iterator[tuple[list[str], dict[str, str]]]:
    rest = list(names)
    for folder, environment in ENVIRONMENTS.items():
        if group := [name for name in rest if name.startswith(folder)]:
            rest = [name for name in rest if name not in group]
            yield group, environment
    if rest:
        yield rest, {}


def run(names: list[str], environment: dict[str, str], options: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(options.processes), "--dist", "worksteal"]
    done = subprocess.run([*command, *options.pytest, *names], cwd=ROOT, env={**os.environ, **environment})
    return 0 if done.returncode == 5 else done.returncode  # 5: all tests of these files are slow ones


def recorded(reports: list[Path]) -> dict[str, float]:
    """Seconds of each test file in pytest's reports."""
    seconds: Counter[str] = Counter()
    for report in reports:
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            name = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
            seconds[name] += float(case.get("time", 0))
    return {name: round(spent, 1) for name, spent in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
