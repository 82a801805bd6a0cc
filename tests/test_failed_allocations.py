"""Memory that runs out anywhere in a call: its allocations of 4 KiB and more fail in turn, in a process of its own."""

import os
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


def run(library, store, folder, stride, *operations, program="failing_allocations"):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(SUPPORT / f"{program}.py"), library, store, folder,
         str(stride), *operations],
        env={
            "LD_PRELOAD": str(library), "PATH": "/usr/bin:/bin", "HOME": str(Path.home()),
            "PYTHONPATH": str(SUPPORT.parents[1]), "OMP_WAIT_POLICY": os.environ["OMP_WAIT_POLICY"],
        },
        capture_output=True, text=True, timeout=3600,  # A guard against a hang.
    )  # fmt: skip
    *wrong, tried = done.stdout.splitlines() or [""]
    assert done.returncode == 0 and not any(wrong), done.stdout + done.stderr[-4000:]
    return [int(word) for word in tried.split() if word.isdigit()]


SOME = {
    "ssd": ["lookup", "prefetch", "step", "erase"], "ssd-index": ["lookup", "step", "erase", "load"],
    "policy": ["step"], "device": ["import_rows"],
}  # fmt: skip


@pytest.mark.parametrize("store", SOME)
def test_memory_that_runs_out_harms_nothing_or_breaks_the_store(library, store, tmp_path):
    failures, broken = run(library, store, tmp_path / "rows", 5, *SOME[store])
    assert failures > 3 * len(SOME[store]) and broken < failures / 2


@pytest.mark.slow
@pytest.mark.parametrize("store", ["device", "host", "ssd", "ssd-index", "ssd-lru", "policy", "ssd-policy", "remote"])
def test_memory_that_runs_out_in_any_call_harms_nothing_or_breaks_the_store(library, store, tmp_path):
    failures, broken = run(library, store, tmp_path / "rows", 1)
    assert failures > 100 and broken < failures / 4


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_memory_that_runs_out_in_a_put_or_an_erasure_does_not_break_a_table_with_its_index_on_disk(
    library, tmp_path, stride
):  # fmt: skip
    (failures,) = run(library, "cold", tmp_path / "rows", stride, program="failing_table")
    assert failures > 40 // stride


# Arrow ends the process (std::bad_alloc) if it gets no memory, so there is no "parquet".
@pytest.mark.parametrize(
    ("kind", "stride"),
    [("table", 12), ("server", 20)]
    + [
        pytest.param(kind, 1, marks=pytest.mark.slow)
        for kind in ("function", "safetensors", "served", "table", "faiss", "usearch", "server")
    ],
)
def test_memory_that_runs_out_in_a_publisher_or_a_server_leaves_a_whole_version(library, kind, stride, tmp_path):
    (failures,) = run(library, kind, tmp_path, stride, program="failing_sinks")
    assert failures > 3
