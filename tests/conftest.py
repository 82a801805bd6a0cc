"""Settings of every test."""

import gc
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import zlib
from multiprocessing.util import Finalize

import hypothesis
import pytest
from hypothesis import settings

from tests.support.rank_pool import RankPool

# This module asserts that its process has one thread; a process that runs tests may have more.
collect_ignore = ["support/rank_imports.py"]

# Tests compare scores of a job and of its server. They are equal only if the order of MKL's sums does not depend on the
# address of an array.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

# Torch's threads otherwise spin while they wait for each other. With more processes than cores, that took a third of
# the CPU time of the tests of models.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts the tests in the background ignores SIGINT, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, so that a failure is caused by the change and not by chance; `--seed` draws others,
# and four slow tests draw by themselves. Compiling a loop takes seconds, so no example has a deadline.
settings.register_profile("same", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("drawn", parent=settings.get_profile("same"), derandomize=False)
settings.load_profile("same")


def pytest_addoption(parser):
    parser.addoption(
        "--seed", type=int, help="seed of tests that draw, those of Hypothesis included; default: each test's own"
    )


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # Processes of pytest-xdist inherit the variables.
        _put_folders_into_one_that_is_removed()
    config.addinivalue_line("markers", "drawn: draws from the fixture `seed`; --seed gives it another")
    if (seed := config.getoption("--seed")) is not None:
        settings.load_profile("drawn")
        hypothesis.core.global_force_seed = seed


def _put_folders_into_one_that_is_removed():
    """Delete the temporary folders of this run and of its children when this process ends, except `tmp_path`."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    tempfile.tempdir = os.environ["TMPDIR"] = folder = tempfile.mkdtemp(prefix="oneemb-tests-")
    os.chmod(folder, 0o711)  # A child that is another user has folders in it.
    # After the folder of multiprocessing in it, whose priority is -100. A child of fork does not run it.
    Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-200)


def pytest_itemcollected(item):
    callspec = getattr(item, "callspec", None)
    if "seed" in getattr(item, "fixturenames", ()) and (callspec is None or "seed" not in callspec.params):
        item.add_marker(pytest.mark.drawn)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Freeze the objects that exist before the first test: the garbage collector then skips them.

    Torch, TorchRec and numba alone are half a million; each `gc.collect()` in a test would take 0.2 s and more. The
    first optimizer of torch imports torch._dynamo, with another 100,000.
    """
    gc.disable()
    try:
        result = yield
        if session.testscollected > 100 and "torch" in sys.modules:
            import torch._dynamo  # noqa: F401
        return result
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _garbage_of_one_test_does_not_warn_in_another():
    from oneemb.embeddings import unsaved_rows

    unsaved_rows.warns_of_garbage = False


@pytest.fixture
def seed(request):
    """Seed of a test that draws: a hash of its name and of the number that `--seed` gives, if any."""
    number = request.config.getoption("--seed")
    drawn = zlib.crc32(f"{request.node.nodeid} {number}".encode())
    print(f"seed {drawn}, the same in each run" if number is None else f"seed {drawn}, replayed by --seed {number}")
    return drawn


@pytest.fixture(scope="session")
def rank_pool():
    """Runs a function on ranks; see tests/support/rank_pool.py."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def redis_host(tmp_path_factory):
    """`host:port` of a Redis server."""
    from tests.support.redis_process import redis_process  # Not every test's environment has the client.

    with redis_process(tmp_path_factory.mktemp("redis"), appendonly="no") as server:
        yield server.host


_numbers = itertools.count()


@pytest.fixture
def redis_place(redis_host):
    """URL of an unused prefix of keys on the Redis server."""
    return f"redis://{redis_host}/?prefix=test_{next(_numbers)}"


@pytest.fixture(autouse=True)
def _threads_of_followers_end():
    """A test leaves no thread that follows snapshots: tests that count or join such threads would see the thread."""
    yield
    for thread in threading.enumerate():
        if thread.name == "oneemb-follow":
            thread.join(60)
            assert not thread.is_alive(), "the test leaves a publisher or a server open"
