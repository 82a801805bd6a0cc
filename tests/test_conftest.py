"""A test run leaves no folder behind."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rank_pool import FailedOnRank, RankPool

ROOT = Path(__file__).parent.parent

MAKES_FOLDERS = """
import multiprocessing.util, pytest, subprocess, sys, tempfile

@pytest.fixture(autouse=True, scope="session")
def _garbage_of_one_test_does_not_warn_in_another():
    pass  # That of conftest.py imports torch.

@pytest.mark.parametrize("n", range(4))
def test_makes_folders(n, tmp_path):
    tempfile.mkdtemp(), multiprocessing.util.get_temp_dir()
    subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkdtemp()"], check=True)
    (tmp_path / "of a test that fails").touch()
    assert n
"""


@pytest.mark.parametrize("processes", [0, 2])
def test_a_run_removes_temporary_folders_and_keeps_those_of_failed_tests(tmp_path, processes):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "test_folders.py").write_text(MAKES_FOLDERS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntmp_path_retention_policy = failed\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-n", str(processes)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, tmp_path / "test_folders.py"],
        cwd=ROOT, env=environment | {"TMPDIR": str(temporary)}, capture_output=True, text=True,
    )  # fmt: skip
    assert "1 failed, 3 passed" in done.stdout and "Traceback" not in done.stderr, done.stdout + done.stderr
    (left,) = temporary.iterdir()
    assert left.name.startswith("pytest-of-")
    assert len(list(left.rglob("of a test that fails"))) == 1


def test_collections_pass_over_what_was_there_before_the_first_test():
    assert gc.get_freeze_count() > 10_000 and gc.isenabled()


def test_a_process_of_tests_does_not_collect_the_imports_of_the_server_of_forks():
    assert "tests.support.rank_imports" not in sys.modules


def give(group, value):
    return value


def end(group):
    os._exit(1)


def test_ranks_that_have_died_are_named_and_the_pool_starts_others():
    pool = RankPool()
    try:
        assert pool(2, give, 5) == [5, 5]
        folder = Path(pool.folder)
        pool.processes[1][0].kill()
        pool.processes[1][0].join()
        with pytest.raises(FailedOnRank, match="rank 1 of 2 has died"):
            pool(2, give, 6)
        assert not folder.exists()
        assert pool(2, give, 7) == [7, 7]
        with pytest.raises(FailedOnRank, match="rank 0 of 1 has died"):
            pool(1, end)
    finally:
        pool.close()
