"""A Redis server for the tests of sinks, one for each module, and a job with one snapshot."""

import pytest

from tests.support.published import Job
from tests.support.redis_process import redis_process


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    with redis_process(tmp_path_factory.mktemp("redis"), appendfsync="no") as process:
        yield process


@pytest.fixture
def job(tmp_path):
    """A job that has saved the snapshot v0."""
    job = Job(tmp_path / "job")
    job.save("v0")
    yield job
    job.close()
