"""Servers that the tests of this folder share."""

import itertools

import pytest

from tests.support.redis_process import redis_process

_numbers = itertools.count()


@pytest.fixture(scope="session")
def redis_host(tmp_path_factory):
    """`host:port` of a Redis server."""
    with redis_process(tmp_path_factory.mktemp("redis"), appendonly="no") as server:
        yield server.host


@pytest.fixture
def redis_place(redis_host):
    """A URL of that server under which nothing is kept yet."""
    return f"redis://{redis_host}/?prefix=test_{next(_numbers)}"
