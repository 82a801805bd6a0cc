"""Faults of sinks and kills: a sink shows the version before or the new one, completely, and goes on."""

import errno
import functools
import json
import os
import shutil
import threading
import time
from collections import Counter

import numpy as np
import pytest
import redis

import oneemb
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.new_files import NewFile
from tests.support.published import (
    KINDS,
    PREFIX,
    Job,
    Place,
    publishing,
    read_redis,
    read_redis_at_once,
)
from tests.support.redis_process import Proxy, redis_process
from tests.support.waits import ended

PATIENCE_S = 600
ON_DISK = [kind for kind in KINDS if not kind.startswith("redis")]
CHANGING = ["create", "write", "sync", "rename", "remove", "truncate", "sync_directory", "make_directories"]


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "job")
    job.save("v0")
    job.save("v1")
    yield job
    job.close()


def flush(job, sink):
    """Publish the newest version, and close the sink."""
    publisher = publishing(job, sink)
    try:
        publisher.flush()
    finally:
        publisher.close()


class Calls:
    """Counts calls that change files or are sent to a server, and does something before the call of a number.

    Args:
        patch: a pytest monkeypatch.
        at: number of the call, from 0; None = none.
        fault: what to do before that call, and before each later one if it returns.
    """

    def __init__(self, patch, at, fault):
        self.count, self._at, self._fault = 0, at, fault
        for name in CHANGING:
            patch.setattr(LocalFileSystem, name, self._counted(getattr(LocalFileSystem, name)))
        for name in ("send_packed_command",):
            patch.setattr(redis.Connection, name, self._counted(getattr(redis.Connection, name)))
        stream = NewFile.stream.fget
        patch.setattr(NewFile, "stream", property(lambda new: _Stream(stream(new), self)))

    def _counted(self, real):
        def call(*arguments, **options):
            self.next()
            return real(*arguments, **options)

        return call

    def next(self):
        if self._at is not None and self.count >= self._at:
            self._fault()
        self.count += 1


class _Stream:
    """A file object whose writes are counted."""

    def __init__(self, stream, calls):
        self._stream, self._calls = stream, calls

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, data):
        self._calls.next()
        return self._stream.write(data)


def killed_at(place, job, at):
    """Publish in a child of fork that is killed before call number `at`. Returns whether the child came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.MonkeyPatch.context() as patch:
                Calls(patch, at, lambda: os._exit(9))
                flush(job, place.make())
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 0


def places_of_kills(kind, job, folder, redis_server):
    """Places as a publisher leaves them that is killed before each of its calls, the last one as at its end."""
    n, ended = 0, kind in ON_DISK
    while not ended:
        place = Place(kind, folder, redis_server)
        with publishing(job, place.make(), version="v0"):
            pass
        ended = killed_at(place, job, n)
        yield place
        n += 1
    if kind not in ON_DISK:
        return
    # The state of a sink on disk is its files: a copy of them before a call is what a kill there leaves.
    copies = []

    def copy():
        copies.append(folder / f"before call {len(copies)}")
        shutil.copytree(folder / "its", copies[-1])

    for name in ("killed", "its"):
        place = Place(kind, folder / name, None)
        with publishing(job, place.make(), version="v0"):
            pass
        if name == "killed":
            assert not killed_at(place, job, 3)
            yield place
    with pytest.MonkeyPatch.context() as patch:
        Calls(patch, 0, copy)
        flush(job, place.make())
    copy()
    for one in copies:
        yield Place(kind, one, None)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "function"])
def test_a_publisher_killed_at_any_call_leaves_a_whole_version_and_the_next_goes_on(kind, job, tmp_path, redis_server):
    seen = []
    for place in places_of_kills(kind, job, tmp_path / "sinks", redis_server):
        seen.append(place.read()[0])
        if seen[-1] is None:
            assert kind == "redis in pieces"
        else:
            place.check(job, seen[-1])
        flush(job, place.make())
        place.check(job, "v1")
    assert len(seen) > 4 and seen[0] == "v0" and seen[-1] == "v1"


def shown(place, job):
    """Name of the version that a sink shows, whose rows are compared; "error" if it cannot be read."""
    try:
        name, rows = place.read()
    except Exception:
        return "error"
    if name is None:
        assert not rows
    else:
        place.check(job, name)
    return name


@pytest.mark.parametrize("kind", ON_DISK)
def test_a_flipped_bit_of_a_sinks_files_is_an_error_or_changes_nothing(kind, job, tmp_path):
    folder, aside, seen = tmp_path / "its", tmp_path / "aside", Counter()
    place = Place(kind, folder, None)
    for name in ("v0", "v1"):
        with publishing(job, place.make(), version=name):
            pass
    job.save("v2")
    shutil.copytree(folder, aside)
    for path in [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "LOCK"]:
        data = path.read_bytes()
        for n in range(0, len(data), max(1, len(data) // 60)):
            path.write_bytes(data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :])
            seen[shown(place, job)] += 1
        for n in range(0, len(data), len(data) // 3):
            path.write_bytes(data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :])
            try:
                flush(job, place.make())
            except oneemb.StorageError:
                pass
            else:
                seen["goes on"] += 1
            assert shown(place, job) in ("error", "v2", "v1", None)
            shutil.rmtree(folder)
            shutil.copytree(aside, folder)
    # A table whose newest snapshot is damaged has the one before.
    assert seen.keys() <= {"error", "v1", "goes on"} | ({"v0"} if kind == "table" else set())
    assert seen["error"] or kind == "function"


# Kinds begin at different calls, so that those with the same code take turns.
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ON_DISK)
def test_a_disk_that_is_full_at_any_call_is_an_error_and_the_next_call_goes_on(
    kind, stride, job, tmp_path, monkeypatch
):  # fmt: skip
    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    n, ended = KINDS.index(kind) % stride, False
    while not ended:
        place = Place(kind, tmp_path / f"sinks{n}", None)
        with publishing(job, place.make(), version="v0"):
            pass
        publisher = publishing(job, place.make())
        with monkeypatch.context() as patch:
            calls = Calls(patch, n, full)
            try:
                publisher.flush()
                ended = calls.count <= n
            except oneemb.PublishError as error:
                assert "No space left" in str(error) or "ENOSPC" in str(error), error
        if kind != "function":
            place.check(job, place.read()[0])
        publisher.flush()
        place.check(job, "v1")
        publisher.close()
        n += stride
    assert n > 1


# ---- Redis -----------------------------------------------------------------------------------------------------------


def redis_sink(port, **options):
    timeout = options.pop("timeout", "500ms")
    return oneemb.sinks.Redis(f"redis://127.0.0.1:{port}?prefix={PREFIX}&&timeout={timeout}", **options)


def check_redis(client, job, name):
    assert read_redis(client) == (name, job.rows[name])


def test_a_server_that_is_gone_is_an_error_until_it_is_back(job, tmp_path):
    with redis_process(tmp_path / "redis") as process:
        publisher = publishing(job, redis_sink(process.port))
        publisher.flush()
        process.kill()
        job.save("v2")
        job.save("v3")
        with pytest.raises(oneemb.PublishError, match="the connection failed"):
            publisher.flush()
        (stats,) = publisher.stats().values()
        assert (stats["backlog_versions"], stats["version"], stats["errors"]) == (2, "v1", 1)
        assert stats["backlog_rows"] > 0 and stats["lag_s"] > 0 and "ServerError" in stats["error"]
        assert process.start()
        publisher.flush()
        assert publisher.stats().popitem()[1]["error"] is None
        check_redis(process.admin(), job, "v3")
        publisher.close()


def test_a_slow_server_stops_neither_training_nor_other_sinks(job, tmp_path):
    seen = []
    with redis_process(tmp_path / "redis") as process:
        slow = redis_sink(process.port, timeout="200ms")
        with oneemb.publish(job.folder, [slow, lambda changes: seen.append(changes.version.name)], seconds=0.01) as its:
            wait_for(lambda: its.stats()[slow.name]["version"] == "v1")
            process.pause()
            for n in range(2, 5):
                job.save(f"v{n}")
            wait_for(lambda: seen and seen[-1] == "v4")
            wait_for(lambda: its.stats()[slow.name]["errors"] > 0)
            assert its.stats()[slow.name]["backlog_versions"] == 3
            assert "ServerTimeoutError" in its.stats()[slow.name]["error"]
            process.resume()
            wait_for(lambda: its.stats()[slow.name]["version"] == "v4")
        check_redis(process.admin(), job, "v4")


def wait_for(what, seconds=PATIENCE_S):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_transaction_that_is_carried_out_late_changes_nothing(job, tmp_path):
    with redis_process(tmp_path / "redis") as process:
        proxy = Proxy(process.port)
        flush(job, redis_sink(process.port))
        job.save("v2")
        publisher = publishing(job, redis_sink(proxy.port, timeout="200ms"))
        publisher.stats()
        proxy.let_through.clear()
        with pytest.raises(oneemb.PublishError, match="no answer in time"):
            publisher.flush()
        job.save("v3")
        flush(job, redis_sink(process.port))
        proxy.let_through.set()
        publisher.flush()
        check_redis(process.admin(), job, "v3")
        publisher.close()
        proxy.close()


@pytest.mark.parametrize("cut", range(0, 400, 40))
def test_a_connection_that_breaks_after_any_bytes_of_answers_loses_no_row(job, redis_server, cut):
    client = redis.Redis(port=redis_server.port)
    client.flushall()
    proxy = Proxy(redis_server.port)
    sink = redis_sink(proxy.port)
    publisher = publishing(job, sink, version="v0")
    publisher.flush()
    proxy.cut_after = cut
    try:
        publisher.show(None)
    except oneemb.PublishError:
        pass
    proxy.cut_after = None
    shown, rows = read_redis(client)
    assert rows == job.rows[shown]
    publisher.flush()
    check_redis(client, job, "v1")
    publisher.close()
    proxy.close()


def test_a_server_without_memory_refuses_a_whole_version(job, tmp_path):
    with redis_process(tmp_path / "redis") as process:
        client = process.admin()
        flush(job, redis_sink(process.port))
        client.config_set("maxmemory", 1)
        client.config_set("maxmemory-policy", "noeviction")
        job.save("v2")
        publisher = publishing(job, redis_sink(process.port))
        with pytest.raises(oneemb.PublishError, match="at its memory limit"):
            publisher.flush()
        check_redis(client, job, "v1")
        client.config_set("maxmemory", 0)
        publisher.flush()
        check_redis(client, job, "v2")
        publisher.close()


@pytest.mark.parametrize(
    "wrong", [b"", b"{", b"[]", b'"v1"', b'{"version": {"name": 3}}', b'{"version": "v"}', b"\xff"]
)
def test_a_wrong_answer_about_the_version_is_an_error_that_names_the_key(job, redis_server, wrong):
    client = redis.Redis(port=redis_server.port)
    client.flushall()
    flush(job, redis_sink(redis_server.port))
    right = client.getset(f"{PREFIX}_version", wrong)
    publisher = publishing(job, redis_sink(redis_server.port))
    with pytest.raises(oneemb.PublishError, match=rf"key {PREFIX}_version must hold"):
        publisher.flush()
    client.set(f"{PREFIX}_version", right)
    publisher.flush()
    publisher.close()
    check_redis(client, job, "v1")


def test_two_publishers_of_one_prefix_are_found(job, redis_server, monkeypatch):
    client = redis.Redis(port=redis_server.port)
    client.flushall()
    sink, real = redis_sink(redis_server.port, atomic_bytes=0), oneemb.sinks.Changes.batches

    def beside(changes, *arguments, **options):
        for batch in real(changes, *arguments, **options):
            client.set(f"{PREFIX}_version", json.dumps({"version": None, "piece": "another"}))
            yield batch

    publisher = publishing(job, sink)
    with monkeypatch.context() as patch:
        patch.setattr(oneemb.sinks.Changes, "batches", beside)
        with pytest.raises(oneemb.PublishError, match="another publisher has changed it"):
            publisher.flush()
    publisher.flush()
    publisher.close()
    check_redis(client, job, "v1")


def test_readers_of_the_server_see_one_version_at_any_time(job, redis_server):
    client = redis.Redis(port=redis_server.port)
    client.flushall()
    flush(job, redis_sink(redis_server.port))
    done, torn, seen = threading.Event(), [], set()

    def read():
        while not done.is_set():
            name, rows = read_redis_at_once(client)
            seen.add(name)
            if rows != job.rows[name]:
                torn.append(name)

    reader = threading.Thread(target=read)
    reader.start()
    with publishing(job, redis_sink(redis_server.port)) as publisher:
        for n in range(2, 12):
            job.save(f"v{n}", whole=n == 6)
            publisher.flush()
    done.set()
    ended(reader)
    assert not torn and len(seen) > 1


# ---- indexes ---------------------------------------------------------------------------------------------------------


LIBRARIES = {
    "Flat": functools.partial(oneemb.sinks.Faiss, index="Flat"),
    "HNSW16": functools.partial(oneemb.sinks.Faiss, index="HNSW16"),
    "IVF2,Flat": functools.partial(oneemb.sinks.Faiss, index="IVF2,Flat"),
    "usearch": functools.partial(oneemb.sinks.Usearch, expansion_search=512),
}


def rows_of_index(job, name):
    rows = {id: np.frombuffer(row, np.float32) for (table, id), row in job.rows[name].items() if table == 1}
    return np.array(list(rows)), np.array(list(rows.values()))


def nearest(ids, rows, query, k):
    return [ids[np.argsort(((rows - one) ** 2).sum(1), kind="stable")[:k]].tolist() for one in query]


@pytest.mark.parametrize("index", LIBRARIES)
def test_searches_give_the_live_ids_of_one_version(job, tmp_path, index):
    sink = LIBRARIES[index](tmp_path / "index", table=1, inner_product=False, rebuild=0.9)
    query = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
    with publishing(job, sink) as publisher:
        for n in range(2, 8):
            job.save(f"v{n}")
            publisher.flush()
            if index.startswith("IVF"):
                sink.view.index.nprobe = 2
            score, found, version = sink.search(query, 7)
            ids, rows = rows_of_index(job, f"v{n}")
            assert version.name == f"v{n}"
            assert found.tolist() == nearest(ids, rows, query, 7)
            if "HNSW" not in index:
                score, found, _ = sink.search(query, 100)
                assert all(sorted(one[: len(ids)]) == sorted(ids.tolist()) for one in found.tolist())
                assert (found[:, len(ids) :] == -1).all() and np.isposinf(score[:, len(ids) :]).all()
        assert publisher.stats().popitem()[1]["wholes"] == 1
        assert not sink.view.live_P.all()


@pytest.mark.parametrize("index", ["Flat", "usearch"])
def test_a_search_by_the_inner_product_gives_absent_rows_a_score_of_minus_infinity(job, index):
    sink = LIBRARIES[index](None, table=1)
    with publishing(job, sink) as publisher:
        publisher.flush()
        count = len(sink.view.live_P)
        score, found, _ = sink.search(np.ones((2, 4), np.float32), count + 3)
    assert np.isfinite(score[:, :count]).all()
    assert np.isneginf(score[:, count:]).all() and (found[:, count:] == -1).all()


@pytest.mark.parametrize("index", ["Flat", "usearch"])
def test_an_index_with_many_dead_positions_is_built_anew(job, tmp_path, index):
    sink = LIBRARIES[index](tmp_path / "index", table=1, inner_product=False, rebuild=0.3)
    with publishing(job, sink) as publisher:
        publisher.flush()
        built = [sink.view.index]
        for n in range(2, 10):
            job.save(f"v{n}")
            publisher.flush()
            assert sink.view.live_P.sum() == len(rows_of_index(job, f"v{n}")[0])
            assert sink.view.live_P.mean() >= 0.7
            if sink.view.index is not built[-1]:
                built.append(sink.view.index)
        assert 1 < len(built) < 9


@pytest.mark.parametrize("index", ["Flat", "usearch"])
@pytest.mark.parametrize("error", [MemoryError, RuntimeError("std::bad_alloc")])
def test_an_index_that_runs_out_of_memory_answers_with_the_version_before(job, tmp_path, error, index):
    sink = LIBRARIES[index](tmp_path / "index", table=1, inner_product=False)
    query = np.zeros((1, 4), np.float32)
    publisher = publishing(job, sink)
    publisher.flush()
    real, before = sink.view.index, sink.search(query, 50)
    job.save("v2")

    def fails(*arrays, **options):
        add(*(array[: len(array) // 2] for array in arrays), **options)
        raise error

    add, real.add = real.add, fails
    with pytest.raises(oneemb.PublishError):
        publisher.flush()
    after = sink.search(query, 50)
    assert after[1].tolist() == before[1].tolist() and after[2].name == "v1"
    publisher.flush()
    ids, rows = rows_of_index(job, "v2")
    assert sink.search(query, 7)[1].tolist() == nearest(ids, rows, query, 7)
    assert sink.view.index is not real, "an index that failed is not used again"
    publisher.close()


@pytest.mark.parametrize("index", ["Flat", "usearch"])
def test_a_damaged_index_is_an_error_that_names_the_file(job, tmp_path, index):
    folder, make = tmp_path / "index", LIBRARIES[index]
    flush(job, make(folder))
    for suffix in (".usearch" if index == "usearch" else ".faiss", ".ids"):
        (path,) = folder.glob(f"*{suffix}")
        data = path.read_bytes()
        for n in range(0, len(data), 41):
            path.write_bytes(data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :])
            with pytest.raises(oneemb.CorruptTableError, match=path.name):
                make(folder).refresh()
        path.write_bytes(data[:-1])
        with pytest.raises(oneemb.CorruptTableError, match=path.name):
            make(folder).refresh()
        path.write_bytes(data)
    assert make(folder).refresh().name == "v1"


@pytest.mark.parametrize("index", ["Flat", "usearch"])
@pytest.mark.parametrize("opened", [0, 1])
def test_a_version_that_a_publisher_replaces_while_it_is_loaded_is_no_error(job, tmp_path, monkeypatch, index, opened):
    make = functools.partial(LIBRARIES[index], tmp_path / "index", table=1, inner_product=False, keep=1)
    flush(job, make())
    paths = []

    def racing(path, *mode):
        paths.append(path)
        if len(paths) == opened + 1:
            job.save("v2")
            flush(job, make())
        return open(path, *mode)

    monkeypatch.setattr("oneemb.sinks.index_sink.open", racing, raising=False)
    sink = make()
    names = {sink.refresh().name, sink.refresh().name}
    assert sink.view.version.name == "v2" and names <= {"v1", "v2"}
    ids, rows = rows_of_index(job, "v2")
    query = np.zeros((1, 4), np.float32)
    assert sink.search(query, 7)[1].tolist() == nearest(ids, rows, query, 7)


@pytest.mark.parametrize("index", ["HNSW16", "usearch"])
def test_searches_go_on_while_versions_are_added(job, index):
    sink = LIBRARIES[index](None, table=1, inner_product=False)
    query, wrong, seen = np.zeros((3, 4), np.float32), [], set()
    with publishing(job, sink) as publisher:
        publisher.flush()
        done = threading.Event()

        def search():
            while not done.is_set():
                _, found, version = sink.search(query, 5)
                seen.add(version.name)
                ids, rows = rows_of_index(job, version.name)
                if found.tolist() != nearest(ids, rows, query, 5):
                    wrong.append(version.name)

        threads = [threading.Thread(target=search) for _ in range(2)]
        for thread in threads:
            thread.start()
        for n in range(2, 12):
            job.save(f"v{n}")
            publisher.flush()
        done.set()
        ended(*threads)
    assert not wrong and len(seen) > 1


# ---- backlog ---------------------------------------------------------------------------------------------------------


def test_a_backlog_that_is_too_large_is_an_error_or_a_pause(job, caplog):
    go, taken = threading.Event(), []

    def slow(changes):
        go.wait(PATIENCE_S)
        taken.append(changes.version.name)

    def fails(changes):
        raise ValueError("no room in the shop")

    with oneemb.publish(job.folder, [slow], seconds=0.01, max_versions=1) as its:
        go.set()
        its.flush()
        its.check()
        go.clear()
        job.save("v2")
        its.check()
        job.save("v3")
        with pytest.raises(oneemb.PublishError, match="slow is 2 versions of .* behind; the limit is 1 versions"):
            its.check()
        go.set()
    taken.clear()
    go.clear()
    with oneemb.publish(job.folder, [slow], seconds=0.01, max_bytes=0, when_full="pause") as its:
        timer = threading.Timer(0.2, go.set)
        timer.start()
        its.check()
        assert taken == ["v3"] and "training waits for sinks" in caplog.text
        ended(timer)
    its = publishing(job, fails, max_versions=0)
    with pytest.raises(oneemb.PublishError, match="ValueError: no room in the shop"):
        its.flush()
    with pytest.raises(oneemb.PublishError, match="1 versions of .* behind .ValueError: no room in the shop"):
        its.check()
    its.close()
    with pytest.raises(oneemb.StorageError, match="the publisher is closed"):
        its.check()


def test_a_connection_that_is_lost_before_the_version_is_read_is_said_to_be_lost(job, redis_server, monkeypatch):
    redis.Redis(port=redis_server.port).flushall()
    sink = redis_sink(redis_server.port)
    publisher = publishing(job, sink, version="v0")

    def get(pipe, key):  # as redis-py raises it
        raise redis.WatchError("A ConnectionError occurred while watching one or more keys")

    with monkeypatch.context() as patch:
        patch.setattr(redis.client.Pipeline, "get", get)
        with pytest.raises(oneemb.PublishError, match="the connection was lost"):
            publisher.flush()
    publisher.flush()
    publisher.close()
