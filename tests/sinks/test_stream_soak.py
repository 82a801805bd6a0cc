"""A whole stream, from files to served rows and sinks, whose processes are killed at random times."""

import pytest

pytest.importorskip("faiss")
pytest.importorskip("pyarrow")
pytest.importorskip("redis")

from tests.support import redis_process, stream_soak


def test_a_stream_with_kills_serves_and_publishes_what_one_without_trains(tmp_path, seed):
    redis_process.need_redis()
    print(stream_soak.run(tmp_path / "soak", seed, seconds=4, kills=1, life_s=2))


@pytest.mark.slow
def test_ten_minutes_of_a_stream_with_kills(tmp_path, seed):
    redis_process.need_redis()
    print(stream_soak.run(tmp_path / "soak", seed, seconds=600, kills=5, life_s=8))
