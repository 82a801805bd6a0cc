"""The source archive holds documents, examples and tests, and its tests run."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HELD = ("benchmarks", "constraints", "docs", "examples", "tests")


def run(folder, *command, **more):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, **more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the list of files is git's")
def test_the_source_archive_holds_what_the_repository_has_and_its_tests_run(tmp_path):
    # In a copy: setuptools writes beside the sources.
    source, built = tmp_path / "source", tmp_path / "built"
    source.mkdir()
    named = [name for name in run(ROOT, "git", "ls-files", "-z").split("\0") if name]
    for name in filter(lambda name: os.path.lexists(ROOT / name), named):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    build = f"import setuptools.build_meta as backend; backend.build_sdist({str(built)!r})"
    run(source, sys.executable, "-c", build)
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    tree = tmp_path / archive.name.removesuffix(".tar.gz")
    assert [name for name in named if name.startswith(HELD) and not (tree / name).exists()] == []
    shown = run(
        tree, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/examples/test_quickstart.py",
        "tests/test_hashing.py", env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert "passed" in shown
