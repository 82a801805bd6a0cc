"""Run the test files nearest to a change, within a limit of time.

    python -m tests.changed [--base main] [--seconds 180] [--list] [-- arguments of pytest]
    python -m tests.changed --record report.xml [more.xml ...]

A change is what differs from the merge base with `--base`, committed or not, and files that git does not know yet. The
distance of a test file is the number of imports that lead from it to a changed file. Names that `oneemb` loads lazily
count as imports of their modules, and a test file imports each conftest.py above it. The nearest files are chosen
first, the quickest among equals. How many do not fit is printed, and which changed files no test imports: `make test`
runs all. Seconds of each test file are in tests/seconds.json, which `--record` writes from the reports that
`pytest --junitxml=report.xml -o junit_family=xunit1` makes.
"""

import argparse
import ast
import functools
import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
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
    parser.add_argument("--seconds", type=float, default=180, help="of the run; default: 180")
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
    changed = changed_files(options.base)
    imports_of = {name: imports(ROOT / name) for name in source_files()}
    tests = {name: distance for name, distance in distances(changed, imports_of).items() if is_test(name)}
    seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    chosen = nearest(tests, seconds, options.seconds * options.processes)
    for name in chosen:
        print(f"{tests[name]}  {seconds.get(name, UNKNOWN_S):6.1f} s  {name}")
    if left_out := len(tests) - len(chosen):
        print(f"{left_out} more test files depend on the change and do not fit into {options.seconds:g} s: make test")
    for name in sorted(changed):
        if not any(map(is_test, distances([name], imports_of))):
            print(f"no test imports {name}, which has changed: make test")
    if options.list:
        return 0
    codes = [run(group, environment, options) for group, environment in grouped(chosen)]
    return next((code for code in codes if code != 0), 0)


def changed_files(base: str) -> list[str]:
    """Files that differ from the merge base with `base`, and files that git does not know."""
    (fork,) = git(
        "merge-base", base, "HEAD", failed=f"no common commit with {base!r} is here: fetch it, or give --base"
    )
    return sorted({*git("diff", "--name-only", fork), *git("ls-files", "-o", "--exclude-standard")})


def git(*command: str, failed: str = "") -> list[str]:
    """Lines that a git command prints; the program ends with git's words and `failed` if the command fails."""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit("\n".join(filter(None, [done.stderr.strip(), failed])))
    return done.stdout.splitlines()


def source_files() -> list[str]:
    return [str(path.relative_to(ROOT)) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def is_test(name: str) -> bool:
    return name.startswith("tests/") and Path(name).name.startswith("test_")


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Files of the tree that a file imports, relative to the root, and the conftest.py that pytest loads before it."""
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
    above = {folder / "conftest.py" for folder in path.parents if folder.is_relative_to(ROOT / "tests")} - {path}
    found = frozenset(str(file.relative_to(ROOT)) for file in above if file.exists())
    return found.union(*map(files_of, modules))


@functools.cache
def files_of(module: str) -> frozenset[str]:
    if module.startswith("oneemb."):
        module = oneemb._WHERE.get(module.removeprefix("oneemb."), module)
        inner = module.removeprefix("oneemb.")
        if inner.split(".")[0] in ("graph", "storage", "kernels"):
            module = inner
    places = [folder.joinpath(*module.split(".")) for folder in PATHS]
    paths = [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py")]
    own = ROOT / "oneemb" / "__init__.py"
    return frozenset(str(path.relative_to(ROOT)) for path in paths if path != own and path.exists())


def distances(changed: Iterable[str], imports_of: Mapping[str, Collection[str]]) -> dict[str, int]:
    """Number of imports from each file to the nearest changed file; unreachable files are absent."""
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
            # The class name of a test in a class ends with that of the class, of which no file is named.
            modules = [part for part in case.get("classname", "").split(".") if not part[:1].isupper()]
            name = case.get("file") or "/".join(modules) + ".py"
            if not name.startswith(".."):  # Hypothesis' own file is that of state machines.
                seconds[name] += float(case.get("time", 0))
    return {name: round(spent, 1) for name, spent in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
