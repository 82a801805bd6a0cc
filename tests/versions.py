"""Run a core of the suite with the oldest and the newest packages that oneemb accepts, for each interpreter.

    python -m tests.versions                                      all six; each takes some GB of downloads and minutes
    python -m tests.versions --python 3.13 --packages newest      one of them
    python -m tests.versions --table docs/versions.md             and write the table of that page

An environment is made for each combination in a temporary folder, and goes again. Interpreters are `python3.11` to
`python3.13` on the PATH, or those of pyenv. A combination whose interpreter is missing is passed over and named. Exit
code 1 if a combination cannot be installed or a test fails.
"""

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["CORE", "PACKAGES", "Outcome", "filled", "main"]

ROOT = Path(__file__).parent.parent

PYTHONS = ("3.11", "3.12", "3.13")

_OLDEST = {"torch": "2.9.0", "numba": "0.61.0", "click": "8.1.0", "tqdm": "4.66.0"}
PACKAGES: dict[str, dict[str, dict[str, str]]] = {
    "oldest": {
        "3.11": _OLDEST | {"numpy": "1.26.0"},
        "3.12": _OLDEST | {"numpy": "1.26.0"},
        "3.13": _OLDEST | {"numpy": "2.1.0"},  # the first that Python 3.13 has
    },
    "newest": {python: {} for python in PYTHONS},
}
"""Versions that are asked for, by name and interpreter. Packages without one are the newest that fit."""

TESTING = ("hypothesis", "pytest", "pytest-xdist", "safetensors", "scipy", "xxhash")

CORE = (
    "tests/kernels",
    "tests/graph",
    "tests/storage/test_persistent_table.py",
    "tests/storage/test_hot_tier.py",
    "tests/test_deltas.py",
    "tests/test_determinism.py",
    "tests/test_embedding.py",
    "tests/test_forks.py",
    "tests/test_hashing.py",
    "tests/test_optim.py",
    "tests/test_optimizer.py",
    "tests/test_pooling.py",
    "tests/test_ranks_bags.py",
    "tests/test_row_grad.py",
    "tests/test_threads.py",
    "tests/test_torch_compile.py",
    "tests/test_train_graph.py",
    "tests/test_train_graph_amp.py",
    "tests/test_train_graph_build.py",
    "tests/test_train_graph_checkpoint.py",
    "tests/test_train_graph_equal.py",
)
"""Test files of what depends on the versions of torch, numba and numpy: kernels, autograd, optimizers, graphs."""

_BEGIN, _END = "<!-- versions -->\n", "<!-- end of versions -->"


@dataclasses.dataclass
class Outcome:
    """A combination and how it went."""

    python: str
    packages: str
    versions: dict[str, str]
    """Versions of torch, numba and numpy that were installed; empty if they could not be."""
    said: str
    """The test runner's closing line, or the end of the output of what failed."""
    passed: bool


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS)
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=tuple(PACKAGES))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="of the test runner")
    parser.add_argument("--table", type=Path, help="Markdown file whose table is written")
    parser.add_argument("--folder", type=Path, help="where environments are made; default: a temporary folder")
    options = parser.parse_args(arguments)
    outcomes = []
    for python in options.python:
        interpreter = interpreter_of(python)
        if interpreter is None:
            print(f"Python {python}: left out, there is no python{python}", flush=True)
            continue
        for packages in options.packages:
            with tempfile.TemporaryDirectory(prefix="oneemb-versions-", dir=options.folder) as folder:
                outcomes.append(tried(interpreter, python, packages, Path(folder), options.processes))
            print(f"Python {python}, {packages}: {outcomes[-1].versions} {outcomes[-1].said}", flush=True)
    if options.table and outcomes:
        options.table.write_text(filled(options.table.read_text(), outcomes))
    return 0 if outcomes and all(outcome.passed for outcome in outcomes) else 1


def interpreter_of(python: str) -> str | None:
    """Path of an interpreter of this version; None = there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    made_by_pyenv = sorted(pyenv.glob(f"{python}.*/bin/python{python}"))
    return str(made_by_pyenv[-1]) if made_by_pyenv else shutil.which(f"python{python}")


def tried(interpreter: str, python: str, packages: str, folder: Path, processes: int) -> Outcome:
    """Install the combination in `folder` and run the core of the suite with it."""
    own = folder / "bin" / "python"
    asked = [f"{name}=={version}" for name, version in PACKAGES[packages][python].items()]
    for command in (
        [interpreter, "-m", "venv", folder],
        [own, "-m", "pip", "install", "-q", "-e", ROOT, *asked, *TESTING],
    ):
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            return Outcome(python, packages, {}, (done.stdout + done.stderr).strip()[-2000:], passed=False)
    tests = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(processes), *CORE]
    done = subprocess.run(tests, capture_output=True, text=True, cwd=ROOT)
    text = done.stdout.strip()
    if done.returncode:
        print(text[-20_000:], done.stderr[-4_000:], flush=True)
    return Outcome(python, packages, versions_of(own), text.splitlines()[-1] if text else "", done.returncode == 0)


def versions_of(python: Path) -> dict[str, str]:
    """Versions of torch, numba and numpy that this interpreter has."""
    program = "from importlib.metadata import version as v; print(*map(v, ('torch', 'numba', 'numpy')))"
    found = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(("torch", "numba", "numpy"), found, strict=True))


def filled(text: str, outcomes: Sequence[Outcome]) -> str:
    """The page with a row for each combination that was run. Rows of other combinations stay."""
    begin = text.index(_BEGIN) + len(_BEGIN)
    end = text.index(_END, begin)
    found = [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in text[begin:end].split("\n")]
    rows = {cells[:2]: cells for cells in found if cells[0] in PYTHONS}
    for outcome in outcomes:
        counts = re.sub(r"\s*in [\d.]+s.*|=+", "", outcome.said).strip() if outcome.versions else "not installed"
        versions = (outcome.versions.get(name, "") for name in ("torch", "numba", "numpy"))
        rows[outcome.python, outcome.packages] = (outcome.python, outcome.packages, *versions, counts)
    head = ("Python", "packages", "torch", "numba", "numpy", "tests of the core")
    order = sorted(rows, key=lambda key: (PYTHONS.index(key[0]), list(PACKAGES).index(key[1])))
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *(rows[key] for key in order))]
    return f"{text[:begin]}\n" + "\n".join(lines) + f"\n\n{text[end:]}"


if __name__ == "__main__":
    sys.exit(main())
