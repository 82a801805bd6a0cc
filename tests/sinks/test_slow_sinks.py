"""Sinks that are slower than the saves, that give wrong answers, or whose place another program uses."""

import threading

import pytest
import redis

import oneemb
from oneemb.kernels.threads import Threads
from oneemb.storage.table.persistent_table import PersistentTable
from tests.support.published import PREFIX, Place, publishing, read_redis
from tests.support.waits import came, ended


def test_training_waits_for_a_sink_that_is_slower_and_no_version_is_left_out(job):
    may_take, taken, behind = threading.Semaphore(0), [], []

    def slow(changes):
        assert may_take.acquire(timeout=60)
        taken.append(changes.version.name)

    with oneemb.publish(job.folder, [slow], seconds=0.001, max_versions=2, when_full="pause") as publisher:
        for n in range(1, 9):
            job.save(f"v{n}")
            behind.append(publisher.stats().popitem()[1]["backlog_versions"])
            if n > 2:
                may_take.release(2 if n == 3 else 1)
            publisher.check()
        may_take.release(9)
    # A sink without a position gets all rows of the version that is the newest when it begins.
    assert taken[-7:] == [f"v{n}" for n in range(2, 9)] and max(behind) <= 3


@pytest.mark.parametrize("fails", [True, False])
def test_a_close_ends_the_wait_of_training_for_a_sink(job, fails):
    begun, goes_on, ends = threading.Event(), threading.Event(), []

    def sink(changes):
        begun.set()
        if fails:
            raise ValueError("no room")
        came(goes_on)

    publisher = oneemb.publish(job.folder, [sink], seconds=0.001, max_versions=0, when_full="pause")
    came(begun)

    def check():
        try:
            publisher.check()
        except oneemb.StorageError as error:
            ends.append(str(error))

    training = threading.Thread(target=check)
    training.start()
    closing = threading.Thread(target=publisher.close)
    closing.start()
    ended(training)
    goes_on.set()
    ended(closing)
    assert len(ends) == 1 and "the publisher is closed" in ends[0]


def test_a_close_waits_for_one_batch_of_a_slow_sink_and_the_next_publisher_gives_all_again(job):
    read, closed, begun = [], threading.Event(), threading.Event()

    def slow(changes):
        for batch in changes.batches(3):
            read.append(len(batch.id_N))
            begun.set()
            came(closed)

    publisher = oneemb.publish(job.folder, [slow], seconds=0.001)
    came(begun)
    closing = threading.Thread(target=publisher.close)
    closing.start()
    with pytest.raises(oneemb.StorageError, match="the publisher is closed"):
        while True:
            publisher.check()
    closed.set()
    ended(closing)
    assert len(read) == 1
    with publishing(job, slow):
        pass
    assert sum(read[1:]) == len(job.rows["v0"])


@pytest.mark.parametrize("answer", [[], [None, None], [True]])
@pytest.mark.parametrize("is_done", [True, False])
def test_a_wrong_answer_to_a_write_is_an_error_and_the_next_call_goes_on(
    job, redis_server, monkeypatch, answer, is_done
):  # fmt: skip
    place = Place("redis", None, redis_server)
    publisher = publishing(job, place.make())
    publisher.flush()
    job.save("v1")
    execute = redis.client.Pipeline.execute

    def wrong(pipe, *options):
        if is_done:
            execute(pipe, *options)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(redis.client.Pipeline, "execute", wrong)
        with pytest.raises(oneemb.PublishError, match="the server must answer to each write, it answered"):
            publisher.flush()
    assert read_redis(redis.Redis(port=redis_server.port)) == (shown := "v1" if is_done else "v0", job.rows[shown])
    publisher.flush()
    place.check(job, "v1")
    publisher.close()


def test_a_sink_that_shows_another_version_after_a_write_is_an_error(job, redis_server):
    client = redis.Redis(port=redis_server.port)
    place = Place("redis", None, redis_server)

    class Beside:
        """A Redis sink beside which another program replaces the version."""

        def __init__(self, sink):
            self._sink = sink

        def __getattr__(self, name):
            return getattr(self._sink, name)

        def apply(self, changes):
            former = client.get(f"{PREFIX}_version")
            self._sink.apply(changes)
            client.set(f"{PREFIX}_version", former)

    publishing(job, place.make()).close()
    with publishing(job, place.make()):
        pass
    job.save("v1")
    publisher = publishing(job, Beside(place.make()))
    with pytest.raises(oneemb.PublishError, match="must show 'v1' .* after it was applied"):
        publisher.flush()
    publisher.close()
    with publishing(job, place.make()):
        pass
    place.check(job, "v1")


def test_a_table_that_another_program_has_open_is_an_error_until_it_is_closed(job, tmp_path):
    place = Place("table", tmp_path, None)
    with publishing(job, place.make()):
        pass
    job.save("v1")
    other = PersistentTable.open(str(tmp_path / "table"), row_width=4, threads=Threads(1))
    publisher = publishing(job, place.make())
    with pytest.raises(oneemb.PublishError, match="LockedError"):
        publisher.flush()
    place.check(job, "v0")
    other.close()
    publisher.flush()
    place.check(job, "v1")
    publisher.close()
