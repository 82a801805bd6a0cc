"""Settings of every test."""

import itertools
import signal

import pytest
from hypothesis import settings

from tests.support.rank_pool import RankPool

# A shell that starts the tests in the background has Ctrl-C ignored, which they are about.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, so that a failure is the change's and not the day's; those of the slow tests differ
# from run to run. Compiling a loop takes seconds, so no example has a deadline.
settings.register_profile("same", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("same")


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
