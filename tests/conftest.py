"""Settings of every test."""

import itertools
import signal
import zlib

import hypothesis
import pytest
from hypothesis import settings

from tests.support.rank_pool import RankPool

# A shell that starts the tests in the background has Ctrl-C ignored, which they are about.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, so that a failure is the change's and not the day's; those of the slow tests differ
# from run to run. Compiling a loop takes seconds, so no example has a deadline.
settings.register_profile("same", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("drawn", parent=settings.get_profile("same"), derandomize=False)
settings.load_profile("same")


def pytest_addoption(parser):
    parser.addoption(
        "--seed", type=int, help="seed of tests that draw, those of Hypothesis included; default: each test's own"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "drawn: draws from the fixture `seed`; --seed gives it another")
    if (seed := config.getoption("--seed")) is not None:
        settings.load_profile("drawn")
        hypothesis.core.global_force_seed = seed


def pytest_itemcollected(item):
    callspec = getattr(item, "callspec", None)
    if "seed" in getattr(item, "fixturenames", ()) and (callspec is None or "seed" not in callspec.params):
        item.add_marker(pytest.mark.drawn)


@pytest.fixture
def seed(request):
    """Seed of a test that draws: of its name, or of the name and the number that `--seed` gives."""
    drawn = zlib.crc32(f"{request.node.nodeid} {request.config.getoption('--seed')}".encode())
    print(f"seed {drawn}, replayed by --seed {request.config.getoption('--seed')}")
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
    """A URL of that server under which nothing is kept yet."""
    return f"redis://{redis_host}/?prefix=test_{next(_numbers)}"
