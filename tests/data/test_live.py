"""Live queues: each row once, however rows come, loops end, ranks change; lost rows are an error."""

import copy
import json
import os
import threading
import time

import pytest
from hypothesis import given, settings, strategies as st

from oneemb.data import BadRowError, ChangedSourceError, GrowingFile, Ids, KafkaTopic, Lists, Loader, RedisStream
from tests.support.redis_process import redis_process

pa = pytest.importorskip("pyarrow")
redis = pytest.importorskip("redis")

SCHEMA = {"user": "string", "n": "int64", "tags": pa.list_(pa.string())}
COLUMNS = {"ids": Ids("user"), "n": "n", "tags": Lists("tags", missing=True)}
DRAINED = {"end_after_s": 0.0, "max_wait_s": 0.0}
PATIENCE_S = 120


def row_of(n):
    return {"user": f"u{n}", "n": n, "tags": ["t"] * (n % 3), "more": None}


def line_of(n):
    return json.dumps(row_of(n)).encode() + b"\n"


def numbers_of(batches):
    return [int(n) for batch in batches for n in batch["n"].tolist()]


def loaders_of(source, world_size=1, batch_size=4, **options):
    return [
        Loader(source, batch_size, COLUMNS, rank=rank, world_size=world_size, **{**DRAINED, **options})
        for rank in range(world_size)
    ]


def load(loaders, states):
    for loader in loaders:
        loader.load_state_dict(copy.deepcopy(states))


def wait_until(holds):
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


# ---- a file ----------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=8)
def test_lines_that_come_in_any_parts_are_given_once_on_any_ranks(tmp_path_factory, monkeypatch_class, data):
    monkeypatch_class("oneemb.data.growing_file._BLOCK", data.draw(st.sampled_from([16, 64, 4096])))
    path = tmp_path_factory.mktemp("file") / "rows"
    path.touch()
    whole, written, seen, states = b"".join(map(line_of, range(60))), 0, [], None
    for _ in range(data.draw(st.integers(1, 5))):
        size = data.draw(st.integers(0, 1000))
        with open(path, "ab") as file:
            file.write(whole[written : written + size])
        written += size
        options = {"shuffle": data.draw(st.sampled_from([0, 7, 100])), "workers": data.draw(st.integers(0, 2))}
        loaders = loaders_of(GrowingFile(path, SCHEMA), data.draw(st.integers(1, 3)), **options)
        if states is not None:
            load(loaders, states)
        for loader in loaders:
            for _, batch in zip(range(data.draw(st.integers(0, 5))), loader, strict=False):
                seen += numbers_of([batch])
        states = [loader.state_dict() for loader in loaders]
    with open(path, "ab") as file:
        file.write(whole[written:])
    seen += numbers_of(batch for loader in loaders for batch in loader)
    assert sorted(seen) == list(range(60))
    # The same rows again, from the state, in the same order.
    for loader, state in zip(loaders, states, strict=True):
        loader.load_state_dict(state)
        first = numbers_of(loader)
        loader.load_state_dict(state)
        assert numbers_of(loader) == first


@pytest.fixture(scope="module")
def monkeypatch_class():
    """Sets a name for the rest of the module."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch.setattr


def test_a_line_is_given_when_it_is_whole_and_a_long_line_too(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(line_of(0) + line_of(1)[:-1])
    (loader,) = loaders_of(GrowingFile(path, SCHEMA))
    assert numbers_of(loader) == [0] and numbers_of(loader) == []
    long = json.dumps({"n": 2, "user": "u" * 3_000_000}).encode()
    with open(path, "ab") as file:
        file.write(b"\n" + long + b"\n" + line_of(3))
    assert numbers_of(loader) == [1, 2, 3]


def test_lines_longer_than_the_limit_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("oneemb.data.growing_file._LINE_BYTES_MAX", 1 << 20)
    path = tmp_path / "rows"
    path.write_bytes(line_of(0) + b"x" * (3 << 20))
    (loader,) = loaders_of(GrowingFile(path, SCHEMA))
    with pytest.raises(BadRowError, match="rows, byte .*: a line must have at most"):
        list(loader)


CHANGES = {
    "truncated": lambda path: os.truncate(path, 10),
    "rotated": lambda path: (path.rename(path.with_suffix(".1")), path.write_bytes(b"")),
    "gone": lambda path: path.unlink(),
    "other": lambda path: path.write_bytes(path.read_bytes().replace(b"u1", b"v1")),
    "other end": lambda path: path.write_bytes(path.read_bytes()[:-1] + b" \n"),
}


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_does_not_only_grow_is_an_error(tmp_path, change, running):
    path = tmp_path / "rows"
    path.write_bytes(b"".join(map(line_of, range(8))))
    (loader,) = loaders_of(GrowingFile(path, SCHEMA), end_after_s=PATIENCE_S)
    loop = iter(loader)
    assert numbers_of([next(loop), next(loop)]) == list(range(8))
    state = loader.state_dict()
    if change == "other end" and running:
        with open(path, "ab") as file:  # A growing file is no change.
            file.write(line_of(8) * 4)
        assert numbers_of([next(loop)]) == [8] * 4
        return
    CHANGES[change](path)
    if not running:
        (loader,) = loaders_of(GrowingFile(path, SCHEMA))
        loader.load_state_dict(state)
        loop = iter(loader)
    with pytest.raises(ChangedSourceError, match="must only grow, and was read up to byte"):
        next(loop)


@pytest.mark.parametrize("size", [1 << 10, 1 << 21])
def test_a_file_that_is_copied_truncated_and_grows_past_the_place_is_an_error(tmp_path, size):
    """Rotation of logs by "copytruncate", while a long step runs."""
    path = tmp_path / "rows"
    line = len(line_of(0))
    path.write_bytes(line_of(0) * (size // line))
    (loader,) = loaders_of(GrowingFile(path, SCHEMA), end_after_s=PATIENCE_S, batch_size=10)
    loop, seen = iter(loader), 0
    seen += len(next(loop)["n"])
    path.write_bytes(line_of(1) * (2 * size // line))
    with pytest.raises(ChangedSourceError, match="it has another beginning"):
        for batch in loop:
            seen += len(batch["n"])
            assert set(numbers_of([batch])) == {0}


def test_an_unfinished_line_may_be_written_again(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(line_of(0) + line_of(1)[:14])
    (loader,) = loaders_of(GrowingFile(path, SCHEMA))
    assert numbers_of(loader) == [0]
    os.truncate(path, len(line_of(0)))
    with open(path, "ab") as file:
        file.write(line_of(2))
    assert numbers_of(loader) == [2]


def test_lines_of_a_rotated_file_are_read_before_its_error(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(line_of(0) * 40_000)
    (loader,) = loaders_of(GrowingFile(path, SCHEMA), end_after_s=PATIENCE_S, batch_size=1000)
    loop, seen = iter(loader), 0
    next(loop)
    path.rename(path.with_suffix(".1"))
    path.write_bytes(line_of(1))
    with pytest.raises(ChangedSourceError, match="it was replaced"):
        for batch in loop:
            seen += len(batch["n"])
    assert seen == 39_000


def test_a_loop_waits_for_rows_gives_few_in_time_and_ends_when_it_is_stopped(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(line_of(0))
    (loader,) = loaders_of(GrowingFile(path, SCHEMA), end_after_s=None, max_wait_s=0.05)
    seen = []
    thread = threading.Thread(target=lambda: [seen.append(numbers_of([batch])) for batch in loader])
    thread.start()
    wait_until(lambda: seen == [[0]])
    with open(path, "ab") as file:
        file.write(line_of(1) + line_of(2))
    wait_until(lambda: sum(seen, []) == [0, 1, 2])
    loader.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    with open(path, "ab") as file:
        file.write(line_of(3))
    (again,) = loaders_of(GrowingFile(path, SCHEMA))
    again.load_state_dict(loader.state_dict())
    assert numbers_of(again) == [3]


def test_a_live_loader_has_no_length(tmp_path):
    path = tmp_path / "rows"
    path.touch()
    with pytest.raises(TypeError, match="has no length"):
        len(loaders_of(GrowingFile(path, SCHEMA))[0])


# ---- Redis -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_process(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def stream(server, request):
    """(client, source of fields, key)."""
    key = request.node.name
    client = server.admin()
    client.delete(key)
    yield client, RedisStream(f"redis://{server.host}/0", key, {"user": "string", "n": "int64"}), key
    client.close()


def add(client, key, numbers, **options):
    pipe = client.pipeline()
    for n in numbers:
        pipe.xadd(key, {"user": f"u{n}", "n": n, "more": "x"}, **options)
    return pipe.execute()


FIELDS = {"ids": Ids("user"), "n": "n"}


def readers(source, world_size=1, **options):
    return [
        Loader(source, 4, FIELDS, rank=rank, world_size=world_size, **{**DRAINED, **options})
        for rank in range(world_size)
    ]


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_entries_are_given_once_on_any_ranks(server, monkeypatch_class, data):
    monkeypatch_class("oneemb.data.redis_stream._ENTRIES", data.draw(st.sampled_from([3, 8192])))
    client = server.admin()
    client.delete("drawn")
    source = RedisStream(f"redis://{server.host}/0", "drawn", {"user": "string", "n": "int64"})
    total, seen, states = 0, [], None
    for _ in range(data.draw(st.integers(1, 4))):
        more = data.draw(st.integers(0, 25))
        add(client, "drawn", range(total, total + more))
        total += more
        loaders = readers(source, data.draw(st.integers(1, 3)), shuffle=data.draw(st.sampled_from([0, 7, 100])))
        if states is not None:
            load(loaders, states)
        for loader in loaders:
            for _, batch in zip(range(data.draw(st.integers(0, 4))), loader, strict=False):
                seen += numbers_of([batch])
        states = [loader.state_dict() for loader in loaders]
    seen += numbers_of(batch for loader in loaders for batch in loader)
    assert sorted(seen) == list(range(total))
    client.close()


def test_one_rank_reads_entries_in_order_and_waits(stream):
    client, source, key = stream
    (loader,) = readers(source, end_after_s=None)
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(n for batch in loader for n in numbers_of([batch])))
    thread.start()
    for n in range(0, 30, 10):
        add(client, key, range(n, n + 10))
        wait_until(lambda n=n: seen == list(range(n + 10)))
    loader.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_trimmed_entries_are_missed_if_they_were_not_read(stream):
    client, source, key = stream
    add(client, key, range(40))
    oldest = client.xrange(key)[3][0]  # Nobody has begun: the first entry is the oldest.
    client.xtrim(key, minid=oldest, approximate=False)
    (loader,) = readers(source, shuffle=8)
    loop = iter(loader)
    assert sorted(numbers_of([next(loop), next(loop), next(loop)]))[:1] >= [3]
    state = loader.state_dict()
    ids = [one[0] for one in client.xrange(key)]
    client.xtrim(key, minid=ids[8], approximate=False)  # The open window needs the entries behind it.
    (again,) = readers(source, shuffle=8)
    again.load_state_dict(state)
    rest = numbers_of(again)
    assert len(rest) == 37 - 12 and len(set(rest)) == len(rest)
    client.xtrim(key, minid=ids[9], approximate=False)
    again.load_state_dict(state)
    with pytest.raises(ChangedSourceError, match="1 entries behind .* were trimmed before they were read"):
        list(again)
    client.xtrim(key, maxlen=0, approximate=False)  # All of them are read.
    state = loader.state_dict()
    loader.load_state_dict({**state, "open": []})
    with pytest.raises(ChangedSourceError, match="were trimmed"):
        list(loader)


def test_entries_that_were_read_may_be_trimmed_to_the_last(stream):
    client, source, key = stream
    add(client, key, range(10))
    (loader,) = readers(source)
    assert numbers_of(loader) == list(range(10))
    client.xtrim(key, maxlen=0, approximate=False)
    assert numbers_of(loader) == []
    add(client, key, range(10, 13))
    assert numbers_of(loader) == [10, 11, 12]


@pytest.mark.parametrize("anew", [0, 3, 100])
def test_a_stream_that_is_deleted_is_an_error(stream, anew):
    client, source, key = stream
    add(client, key, range(10))
    (loader,) = readers(source)
    assert len(numbers_of(loader)) == 10
    client.delete(key)
    add(client, key, range(anew))
    with pytest.raises(ChangedSourceError, match="another one" if anew else "the stream is gone"):
        for _ in loader:
            raise AssertionError("rows of the other stream are given")


def test_large_entries_are_read_a_few_at_a_time(stream, monkeypatch):
    """Entries of the answers of the server, which are in memory together."""
    client, source, key = stream
    pipe = client.pipeline()
    for n in range(400):
        pipe.xadd(key, {"user": "u" * (1 << 18), "n": n})
    pipe.execute()
    counts, xrange = [], redis.client.Pipeline.xrange

    def counted(self, name, least, most, count):
        counts.append(count)
        return xrange(self, name, least, most, count)

    monkeypatch.setattr(redis.client.Pipeline, "xrange", counted)
    (loader,) = readers(source)
    assert numbers_of(loader) == list(range(400))
    assert max(counts) == 64 and min(counts) == 63, "16 MiB"
    client.delete(key)
    add(client, key, range(5000))
    del counts[:]
    (loader,) = readers(source)
    assert numbers_of(loader) == list(range(5000)) and counts[:2] == [64, 8192]


def test_entries_with_other_fields_in_other_orders_or_without_are_read(stream):
    client, source, key = stream
    rows = [{"user": "a", "n": 0}, {"n": 1, "user": "b"}, {"n": 2}, {"user": "d", "n": "three"}, {"user": "e", "n": 4}]
    for row in rows:
        client.xadd(key, row)
    (loader,) = readers(source, bad_rows="drop")
    assert numbers_of(loader) == [0, 1, 4] and loader.dropped == 2
    (loader,) = readers(source)
    entry = client.xrange(key)[2][0].decode()
    with pytest.raises(BadRowError, match=f"entry {entry}: column 'user' has no value"):
        list(loader)


def test_a_field_of_json(server):
    client, url = server.admin(), f"redis://{server.host}/0"
    for n in range(9):
        client.xadd("json", {"data": json.dumps(row_of(n), indent=1), "time": n})
    client.xadd("json", {"time": 9})
    client.xadd("json", {"data": "{"})
    loader = Loader(RedisStream(url, "json", SCHEMA, json_field="data"), 4, COLUMNS, bad_rows="drop", **DRAINED)
    batches = list(loader)
    assert numbers_of(batches) == list(range(9)) and loader.dropped == 2
    assert batches[0]["tags"][1].tolist() == [0, 0, 1, 3, 3]
    with pytest.raises(BadRowError, match="it has no field 'dat'"):
        list(Loader(RedisStream(url, "json", SCHEMA, json_field="dat"), 4, COLUMNS, **DRAINED))
    client.set("text", 1)
    with pytest.raises(Exception, match="WRONGTYPE"):
        list(Loader(RedisStream(url, "text", SCHEMA), 4, COLUMNS, **DRAINED))


# ---- Kafka -----------------------------------------------------------------------------------------------------------


class Broker:
    """A topic on the mock broker of librdkafka, which speaks Kafka's protocol."""

    partitions = 4  # The broker makes a topic when a message comes.

    def __init__(self):
        kafka = pytest.importorskip("confluent_kafka")
        self._producer = kafka.Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
        (broker,) = self._producer.list_topics(timeout=PATIENCE_S).brokers.values()
        self.config = {"bootstrap.servers": f"{broker.host}:{broker.port}"}

    def add(self, numbers, **more):
        for n in numbers:
            self._producer.produce("rows", json.dumps({**row_of(n), **more}).encode(), partition=n % self.partitions)
        assert self._producer.flush(PATIENCE_S) == 0

    @property
    def source(self):
        return KafkaTopic("rows", self.config, SCHEMA)


def some_batches(loader, count):
    batches = []
    for batch in loader if count else ():
        batches.append(batch)
        if len(batches) == count:
            break
    return batches


@pytest.mark.parametrize("shuffle", [0, 30])
def test_messages_are_given_once_on_any_ranks(shuffle):
    broker = Broker()
    broker.add(range(400))
    seen, states = [], None
    for number, world_size in enumerate([2, 1, 3]):
        loaders = loaders_of(broker.source, world_size, shuffle=shuffle, end_after_s=None)
        if states is not None:
            load(loaders, states)
        for loader in loaders:
            seen += numbers_of(some_batches(loader, 3))
        states = [loader.state_dict() for loader in loaders]
        broker.add(range(400 + 10 * number, 410 + 10 * number))
    for loader, state in zip(loaders, states, strict=True):
        count = sum(one["end"] - one["begin"] for one in state["open"])
        seen_again = []
        for _ in range(2):  # The open window has the same rows in the same order each time.
            loader.load_state_dict(copy.deepcopy(state))
            seen_again.append(numbers_of(some_batches(loader, -(-count // 4)))[:count])
        assert seen_again[0] == seen_again[1]
    load(loaders, states)
    threads = [threading.Thread(target=lambda one=one: [seen.extend(numbers_of([b])) for b in one]) for one in loaders]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(seen) >= 430)
    for loader in loaders:
        loader.stop()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(seen) == list(range(430))


def test_messages_that_are_gone_and_topics_with_few_partitions_are_errors():
    broker = Broker()
    broker.add(range(10))
    with pytest.raises(ValueError, match="must have a partition for each of 5 ranks, and has 4"):
        loaders_of(broker.source, 5)[2].state_dict()
    (loader,) = loaders_of(broker.source, end_after_s=60.0)
    state = loader.state_dict()
    state["next"][1][1] = 1000
    loader.load_state_dict(state)
    with pytest.raises(ChangedSourceError, match="partition 1 must have the messages behind"):
        list(loader)
    with pytest.raises(RuntimeError, match="must exist"):
        loaders_of(KafkaTopic("none", {**broker.config, "allow.auto.create.topics": False}, SCHEMA))[0].state_dict()
