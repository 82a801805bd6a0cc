"""A Redis server for the tests of sinks, one for each module."""

import pytest

from tests.support.redis_process import redis_process


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    with redis_process(tmp_path_factory.mktemp("redis"), appendfsync="no") as process:
        yield process
