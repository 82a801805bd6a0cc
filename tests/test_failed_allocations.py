"""Memory that runs out anywhere in a call: its allocations of 4 KiB and more fail in turn, in a process of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent / "support"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the library that fails allocations needs cc")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    target = tmp_path_factory.mktemp("library") / "failing_malloc.so"
    source = SUPPORT / "failing_malloc.c"
    subprocess.run(["cc", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-o", str(target), str(source)], check=True)
    return target


def run(library, store, folder, stride, *operations):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(SUPPORT / "failing_allocations.py"), library, store, folder,
         str(stride), *operations],
        env={
            "LD_PRELOAD": str(library), "PATH": "/usr/bin:/bin", "HOME": str(Path.home()),
            "PYTHONPATH": str(SUPPORT.parents[1]),
        },
        capture_output=True, text=True, timeout=3600,  # A guard against a hang.
    )  # fmt: skip
    *wrong, tried = done.stdout.splitlines() or [""]
    assert done.returncode == 0 and not any(wrong), done.stdout + done.stderr[-4000:]
    failures, broken = (int(word) for word in tried.split() if word.isdigit())
    return failures, broken


SOME = {
    "ssd": ["lookup", "prefetch", "step", "erase"], "ssd-index": ["lookup", "step", "erase"], "policy": ["step"],
    "device": ["import_rows"],
}  # fmt: skip


@pytest.mark.parametrize("store", SOME)
def test_memory_that_runs_out_harms_nothing_or_breaks_the_store(library, store, tmp_path):
    failures, broken = run(library, store, tmp_path / "rows", 3, *SOME[store])
    assert failures > 3 * len(SOME[store]) and broken < failures / 2


@pytest.mark.slow
@pytest.mark.parametrize("store", ["device", "host", "ssd", "ssd-index", "ssd-lru", "policy", "ssd-policy", "remote"])
def test_memory_that_runs_out_in_any_call_harms_nothing_or_breaks_the_store(library, store, tmp_path):
    failures, broken = run(library, store, tmp_path / "rows", 1)
    assert failures > 100 and broken < failures / 4
