"""Tests of the CUDA loops: in numba's simulator (NUMBA_ENABLE_CUDASIM=1), or on a GPU (ONEEMB_TEST_GPU=1).

Either is a process of its own, since numba reads its variable once: `make test` and `make gpu-test` start them. Any
other run of pytest leaves this folder out.

In the simulator loops are Python, so the branches of each that were taken are noted, and in the end all are asked for.
"""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import coverage
import pytest
import torch

import oneemb.kernels
from tests.cuda.branches import missing_branches

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
ON_GPU = os.environ.get("ONEEMB_TEST_GPU") == "1"

if SIMULATED:
    from tests.cuda import simulator

    simulator.install()

SOURCES = str(Path(oneemb.kernels.__path__[0]) / "*.py")
NOTES = pytest.StashKey[str]()

collect_ignore_glob = [] if SIMULATED or ON_GPU else ["*.py"]


@pytest.fixture(scope="session")
def gpu():
    from oneemb.kernels.launch import gpu_at

    try:
        return gpu_at(torch.device("cuda"))  # The object that loops count their launches on.
    except (ImportError, RuntimeError) as error:  # said once, not by every test
        pytest.exit(f"there is no GPU to test on: {error}", returncode=1)


@pytest.fixture
def late(monkeypatch):
    """`now`: whether numbers from the device have not come yet: they come when the host waits for them. `times`: how
    often the host has asked for numbers that had not come."""
    from oneemb.kernels.later import Later

    late, values = SimpleNamespace(now=False, times=0), Later.values

    def values_late(later, *, wait=True):
        if late.now and not wait:
            late.times += 1
            return None
        return values(later, wait=wait)

    monkeypatch.setattr(Later, "values", values_late)
    return late


@pytest.fixture(scope="session", autouse=True)
def loops_compiled_ahead():
    """Fails a launch of a loop with types that `oneemb warmup` does not compile."""
    from tests.support.launched_types import check_launches

    with check_launches():
        yield


@pytest.fixture(scope="session", autouse=True)
def branches_taken(request):
    """Notes the lines and branches of loops which the simulator's threads run, for `pytest_sessionfinish`."""
    if not SIMULATED:
        yield
        return
    worker = getattr(request.config, "workerinput", {"workerid": "alone"})
    taken = coverage.Coverage(
        data_file=str(_notes(request.config) / worker["workerid"]), branch=True, include=[SOURCES], config_file=False
    )
    taken.start()
    yield
    taken.stop()
    taken.save()


def pytest_configure(config):
    if SIMULATED and not hasattr(config, "workerinput"):
        config.stash[NOTES] = tempfile.mkdtemp()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):  # of pytest-xdist: a process that is about to run tests
    if SIMULATED:
        node.workerinput["notes"] = node.config.stash[NOTES]


def _notes(config):
    worker = getattr(config, "workerinput", None)
    return Path(config.stash[NOTES] if worker is None else worker["notes"])


def pytest_sessionfinish(session, exitstatus):
    """Fail if the whole folder has run, in one process or in several, and lines or branches of loops have not."""
    config = session.config
    whole = [Path(arg).resolve() for arg in config.args] == [Path(__file__).parent] and not config.option.keyword
    whole = whole and config.option.markexpr in ("", "not slow")  # The tests of `make test` take every branch.
    if not SIMULATED or hasattr(config, "workerinput") or exitstatus != 0 or not whole:
        return
    noted = coverage.Coverage(data_file=str(_notes(config) / "all"), branch=True, include=[SOURCES], config_file=False)
    noted.combine([str(path) for path in _notes(config).iterdir()])
    missing = missing_branches(noted, _notes(config) / "report.json")
    if missing:
        print("\nlines and branches of loops that did not run:", *missing, sep="\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
