"""Run a core of the suite with the oldest and the newest packages that oneemb accepts, for each interpreter.

    python -m tests.versions                                      all six; each takes some GB of downloads and minutes
    python -m tests.versions --python 3.13 --packages newest      one of them
    python -m tests.versions --table docs/versions.md             and write the table of that page

An environment is made for each combination in a temporary folder, and goes again. First a wheel and a source archive of
this tree are installed in it and train rows, and tests of the unpacked archive run; `--installs` leaves it at that.
Interpreters are `python3.11` to `python3.13` on the PATH, or those of pyenv. A combination whose interpreter is missing
is passed over and named. Exit code 1 if a combination cannot be installed or a test fails.
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

from tests.support.archives import ROOT, TRAINS, built, run

__all__ = ["CORE", "PACKAGES", "Outcome", "filled", "main"]

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

UNPACKED = ("tests/test_hashing.py", "tests/test_pooling.py", "tests/examples/test_quickstart.py")
"""Test files that run from the unpacked source archive."""

_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")

_BEGIN, _END = "<!-- versions -->\n", "<!-- end of versions -->"


@dataclasses.dataclass
class Outcome:
    """A combination and how it went."""

    python: str
    packages: str
    versions: dict[str, str]
    """Versions of torch, numba and numpy that were installed; empty if they could not be."""
    said: str
    """The test runner's closing line, or the end of the output of what failed; "" if the core was not run."""
    passed: bool
    installs: str = ""
    """Archives that were installed and trained rows."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS)
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=tuple(PACKAGES))
    parser.add_argument("--installs", action="store_true", help="only install archives; run no core of the suite")
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
                outcomes.append(tried(interpreter, python, packages, Path(folder), options.processes, options.installs))
            one = outcomes[-1]
            print(f"Python {python}, {packages}: {one.versions} {one.installs}: {one.said}", flush=True)
    if options.table and outcomes:
        options.table.write_text(filled(options.table.read_text(), outcomes))
    return 0 if outcomes and all(outcome.passed for outcome in outcomes) else 1


def interpreter_of(python: str) -> str | None:
    """Path of an interpreter of this version; None = there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    made_by_pyenv = sorted(pyenv.glob(f"{python}.*/bin/python{python}"))
    return str(made_by_pyenv[-1]) if made_by_pyenv else shutil.which(f"python{python}")


def tried(
    interpreter: str, python: str, packages: str, folder: Path, processes: int, installs_only: bool = False
) -> Outcome:
    """Install the combination in `folder`, try the archives of this tree there, and run the core of the suite."""
    own = folder / "bin" / "python"
    outcome = Outcome(python, packages, {}, "", passed=False)
    try:
        run(folder, interpreter, "-m", "venv", folder)
        asked = [f"{name}=={version}" for name, version in PACKAGES[packages][python].items()]
        try_archives(own, folder, [*asked, *TESTING])
    except AssertionError as error:
        outcome.said = str(error)
        return outcome
    outcome.versions, outcome.installs, outcome.passed = versions_of(own), "wheel, sdist", True
    if not installs_only:
        core = [own, *_PYTEST, "-n", str(processes), *CORE]
        done = subprocess.run(core, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            print(done.stdout, done.stderr[-4_000:], flush=True)
        outcome.said, outcome.passed = (done.stdout.strip().splitlines() or [""])[-1], done.returncode == 0
    return outcome


def try_archives(own: Path, folder: Path, requirements: Sequence[str]) -> None:
    """Install a wheel and a source archive of this tree by the interpreter `own`, train rows with each, run tests of
    the unpacked archive; in the end the tree itself is installed. Raises AssertionError if any of it fails."""
    pip = (own, "-m", "pip", "install", "-q")
    run(folder, *pip, "setuptools>=77")
    wheel, source = (built(folder, kind, own) for kind in ("wheel", "sdist"))
    run(folder, *pip, wheel, *requirements, timeout=3000)
    site = run(folder, own, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A program that is started in the clone takes the clone's package.
    for archive, place, package in ((wheel, folder, site), (wheel, ROOT, ROOT), (source, folder, site)):
        if archive == source:
            run(folder, own, "-m", "pip", "uninstall", "-q", "-y", "oneemb")
            run(folder, *pip, "--no-deps", source)
        trained = run(place, own, "-c", TRAINS).split()
        assert trained == ["2", str(package)], f"{archive.name} in {place}: {trained}"
    run(folder, "tar", "-xf", source)
    run(folder / source.name.removesuffix(".tar.gz"), own, *_PYTEST, *UNPACKED)
    run(folder, *pip, "--no-deps", "-e", ROOT)


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
        combination = outcome.python, outcome.packages
        counts = re.sub(r"\s*in [\d.]+s.*|=+", "", outcome.said).strip() if outcome.versions else "not installed"
        if not counts and combination in rows:  # The core was not run.
            counts = rows[combination][-1]
        versions = (outcome.versions.get(name, "") for name in ("torch", "numba", "numpy"))
        rows[combination] = (*combination, *versions, outcome.installs, counts)
    head = ("Python", "packages", "torch", "numba", "numpy", "installs from", "tests of the core")
    order = sorted(rows, key=lambda key: (PYTHONS.index(key[0]), list(PACKAGES).index(key[1])))
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *(rows[key] for key in order))]
    return f"{text[:begin]}\n" + "\n".join(lines) + f"\n\n{text[end:]}"


if __name__ == "__main__":
    sys.exit(main())
