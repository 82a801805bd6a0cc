"""A whole stream, from files to served rows and sinks, whose processes are killed at random times."""

import pytest

pytest.importorskip("faiss")
pytest.importorskip("pyarrow")
pytest.importorskip("redis")

from tests.support import redis_process, stream_plants, stream_soak


def test_a_stream_with_kills_serves_and_publishes_what_one_without_trains(seed):
    redis_process.need_redis()
    with stream_soak.kept_if_it_fails() as folder:
        print(stream_soak.run(folder / "soak", seed, seconds=4, kills=1, life_s=2))


@pytest.mark.parametrize(
    "plant", [pytest.param(one, marks=[pytest.mark.slow] * (one != "lost_delta")) for one in stream_plants.PLANTS]
)
def test_a_planted_fault_is_found(tmp_path, seed, plant):
    redis_process.need_redis()
    with pytest.raises(AssertionError, match=stream_plants.PLANTS[plant]):
        stream_soak.run(tmp_path / "soak", seed, seconds=1, kills=0, life_s=None, plant=plant)


@pytest.mark.slow
def test_ten_minutes_of_a_stream_with_kills(seed):
    redis_process.need_redis()
    with stream_soak.kept_if_it_fails() as folder:
        print(stream_soak.run(folder / "soak", seed, seconds=600, kills=5, life_s=8))
