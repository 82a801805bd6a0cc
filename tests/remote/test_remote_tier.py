"""Rows on a parameter server: what it loses or mixes up is noticed, and snapshots bring it back."""

import shutil
import warnings

import numpy as np
import pytest
import torch

import oneemb
from oneemb.kernels.threads import Threads
from oneemb.storage.remote.parameter_server import ServerError
from oneemb.storage.remote.servers import MemoryServer, open_server, register_io
from oneemb.storage.tiers.remote_tier import RemoteTier
from tests.support.models import make_embedding, rows_of
from tests.support.plugins import MEMORY_IO, compile_plugin
from tests.support.row_store_suite import DictStore, keys_of
from tests.support.table_model import got, put_random, random_rows, scanned
from tests.support.training import Job

W, THREADS = 5, Threads(1)


def tier_on(values, below=None, name="t"):
    return RemoteTier(MemoryServer(values), name, row_width=W, below=below, threads=THREADS)


def filled(values, size=200, below=None):
    tier, rows = tier_on(values, below), {}
    put_random(tier, rows, np.random.default_rng(0), size)
    return tier, rows


# ---- what a server does wrong ----------------------------------------------------------------------------------------


def test_rows_that_the_server_has_lost_are_an_error_that_names_one_and_the_others_stay():
    values = {}
    tier, rows = filled(values)
    gone = next(key for key in rows if key[0] == 1)
    del values[f"t.{gone[0]}", gone[1], 0]
    out_UW = np.full((len(rows), W), 7, np.float32)
    with pytest.raises(
        oneemb.LostRowsError, match=rf"memory:// has no rows of 1 of .* 't\.1' \(the first is {gone[1]}\)"
    ):
        tier.get(*keys_of(rows), out_UW)
    assert (out_UW == 7).all()
    others = [key for key in rows if key != gone]
    assert got(tier, others) == [rows[key] for key in others]
    values.clear()
    with pytest.raises(oneemb.LostRowsError, match="has no rows of"):
        list(tier.scan())
    assert len(tier) == len(rows)


def test_rows_that_are_older_than_they_should_be_are_an_error():
    values = {}
    tier, rows = filled(values)
    before = dict(values)
    keys = list(rows)[:20]
    tier.put(*keys_of(keys), random_rows(np.random.default_rng(1), len(keys), W))
    values.update(before)  # as a server does that was restarted with what it had a minute ago
    assert got(tier, list(rows)[20:]) == list(rows.values())[20:]
    for key in keys:
        with pytest.raises(oneemb.LostRowsError, match="other rows than were pushed last of 1 of 1"):
            got(tier, [key])


@pytest.mark.parametrize("width", [1, 4, 5])
def test_a_value_of_which_a_bit_was_changed_is_an_error_and_so_are_two_that_were_swapped(width):
    values = {}
    tier = RemoteTier(MemoryServer(values), "t", row_width=width, below=None, threads=THREADS)
    rows = {(0, id): None for id in range(10)}
    sent = random_rows(np.random.default_rng(0), len(rows), width)
    tier.put(*keys_of(rows), sent)  # in one push, so that all have one number
    out_UW = np.empty((1, width), np.float32)

    def check(id):
        assert not tier.get(*keys_of([(0, id)]), out_UW).any() and out_UW.tobytes() == sent[id].tobytes()

    for id in range(10):
        check(id)
    value = values["t.0", 3, 0]
    for bit in range(8 * len(value)):
        changed = bytearray(value)
        changed[bit // 8] ^= 1 << bit % 8
        values["t.0", 3, 0] = bytes(changed)
        with pytest.raises(oneemb.LostRowsError, match=r"other rows than were pushed last .*the first is 3\)"):
            check(3)
    values["t.0", 3, 0], values["t.0", 4, 0] = values["t.0", 4, 0], value
    for id in (3, 4):
        with pytest.raises(oneemb.LostRowsError, match="other rows than were pushed last"):
            check(id)
    values["t.0", 3, 0], values["t.0", 4, 0] = value, values["t.0", 3, 0]
    for id in range(10):
        check(id)


def test_rows_of_another_job_are_never_taken_for_own_ones():
    values = {}
    tier, rows = filled(values)
    other, its = tier_on(values), {}
    assert len(other) == 0 and not other.contains(*keys_of(rows)).any() and scanned(other) == {}
    assert got(other, rows) == [None] * len(rows)
    put_random(other, its, np.random.default_rng(0), 200)  # the same keys, in as many pushes
    assert scanned(other) == its
    with pytest.raises(oneemb.LostRowsError, match="a prefix of its own"):
        got(tier, rows)


def test_a_push_that_fails_leaves_no_key_that_was_not_there():
    class Full(MemoryServer):
        def push(self, table, id_N, parts):
            super().push(table, id_N[:1], [part[:1] for part in parts])
            raise ServerError("full")

    tier = RemoteTier(Full({}), "t", row_width=W, below=None, threads=THREADS)
    with pytest.raises(ServerError, match="full"):
        tier.put(*keys_of([(0, 1), (0, 2)]), np.ones((2, W), np.float32))
    assert len(tier) == 0 and got(tier, [(0, 1), (0, 2)]) == [None, None]


def test_erased_rows_leave_the_server_and_what_it_cannot_erase_is_counted():
    values = {}
    tier, rows = filled(values)
    some = list(rows)[:50]
    assert tier.erase(*keys_of(some)).all() and len(values) == 150 and tier.stats()["rows_left_behind"] == 0

    class Plain:  # as plugins are
        name = "plain"

        def __init__(self, server):
            self.pull, self.push, self.close = server.pull, server.push, server.close

    tier = RemoteTier(Plain(MemoryServer(values)), "u", row_width=W, below=None, threads=THREADS)
    tier.put(*keys_of(some), random_rows(np.random.default_rng(2), 50, W))
    tier.erase(*keys_of(some))
    assert len(values) == 200 and tier.stats()["rows_left_behind"] == 50 and got(tier, some) == [None] * 50


def test_rows_are_handed_down_once():
    below = DictStore(W)
    tier, rows = filled({}, below=below)
    tier.flush()
    assert below.rows == rows and tier.stats()["dirty"] == 0
    pulled = tier.stats()["rows_pulled"]
    tier.flush()
    key = next(iter(rows))
    tier.put(*keys_of([key]), np.zeros((1, W), np.float32))
    tier.flush()
    assert tier.stats()["rows_pulled"] == pulled + 1 and below.rows == rows | {key: bytes(4 * W)}


def test_a_tier_that_is_dropped_ends_its_connection():
    closed = []

    class Server(MemoryServer):
        def close(self):
            closed.append(True)

    tier = RemoteTier(Server({}), "t", row_width=W, below=None, threads=THREADS)
    del tier
    assert closed == [True]


# ---- embeddings ------------------------------------------------------------------------------------------------------


def test_a_cache_of_few_rows_pushes_and_pulls_them(tmp_path):
    jobs = [Job(tmp_path / store, "adam", store, batch=2000, ids=300_000)
            for store in ("device", "remote")]  # fmt: skip
    assert jobs[0].run(0, 12) == jobs[1].run(0, 12)
    stats = jobs[1].embedding.stats()["remote"]
    assert stats["rows_pulled"] > 1000 and stats["rows_pushed"] > 1000
    assert jobs[0].rows() == jobs[1].rows()


def test_a_snapshot_brings_back_what_the_server_has_lost(tmp_path):
    server = f"memory://{tmp_path}/rows"
    job, twin = (
        Job(tmp_path, "adam", "remote", batch=2000, ids=300_000),
        Job(tmp_path / "twin", "adam", batch=2000, ids=300_000),
    )
    assert job.run(0, 5) == twin.run(0, 5)
    job.save()
    losses = job.run(5, 8)
    assert losses == twin.run(5, 8)
    open_server(server)._values.clear()
    with pytest.raises(oneemb.LostRowsError, match="Load the last snapshot"):
        job.run(8, 12)
    with pytest.raises(oneemb.LostRowsError):
        job.embedding.save_snapshot("after")
    job.optimizer.zero_grad()
    job.load()
    assert job.run(5, 12) == losses + twin.run(8, 12)
    assert job.rows() == twin.rows()


def test_snapshots_are_those_of_any_store(tmp_path):
    job = Job(tmp_path, "adam", "remote")
    losses = job.run(0, 4)
    job.save()
    rows, after = job.rows(), job.run(4, 12)
    job.embedding.close()
    for store in ("ssd", "device", "remote"):
        twin = Job(tmp_path, "adam", store)
        twin.load()
        assert twin.rows() == rows and twin.run(4, 12) == after
        twin.embedding.close()
    assert losses == Job(tmp_path / "new", "adam", "remote").run(0, 4)


def test_an_embedding_begins_without_the_rows_of_an_earlier_job(tmp_path):
    first = make_embedding(tmp_path / "a", store="remote", cache_mb=1)
    first(torch.arange(10))
    rows = rows_of(first, torch.arange(10))
    first.save_snapshot("s")
    first.close()
    again = make_embedding(tmp_path / "a", store="remote")
    with pytest.warns(UserWarning, match="starts empty"):
        again(torch.arange(3))
    assert again.stats()["rows"] == 3
    again.load_snapshot("s")
    assert again.stats()["rows"] == 10 and torch.equal(rows_of(again, torch.arange(10)), rows)


def test_a_password_is_in_no_text(tmp_path):
    with pytest.raises(ValueError, match="got nowhere://") as caught:
        oneemb.make_cached_remote_store_options("nowhere://me:secret@host", 1, tmp_path)
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(oneemb.make_cached_remote_store_options("memory://me:secret@host", 1, tmp_path))
    for url in (5, None, b"memory://"):
        with pytest.raises(TypeError, match="url must be a str"):
            oneemb.make_cached_remote_store_options(url, 1, tmp_path)


# ---- servers that last -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twin_in_memory(tmp_path_factory):
    """Options of a job, its losses and its rows in memory."""
    options = {"batch": 2000, "ids": 300_000}
    twin = Job(tmp_path_factory.mktemp("twin"), "adam", **options)
    return options, twin.run(0, 12), twin.rows()


@pytest.mark.parametrize("kind", ["redis", "file", "plugin"])
def test_a_job_has_the_same_bits_on_servers_that_last(kind, twin_in_memory, tmp_path, request):
    if kind == "redis":
        url = request.getfixturevalue("redis_place")
    elif kind == "file":
        url = f"file://{tmp_path}/server?save_bytes=1000000000&lost=accept"
    else:
        if shutil.which("cc") is None:
            pytest.skip("plugins need a C compiler, cc")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Another test of this process may have registered it.
            register_io(compile_plugin(MEMORY_IO, tmp_path / "memory_io.so"))
        url = "memory-io://rows"
    options, expected, rows = twin_in_memory
    job = Job(tmp_path, "adam", "remote", options={"url": url}, **options)
    losses = job.run(0, 6)
    job.save()
    assert losses + job.run(6, 12) == expected
    assert job.embedding.stats()["remote"]["rows_pulled"] > 1000
    assert job.rows() == rows
    job.load()
    assert job.run(6, 12) == expected[6:]
    job.embedding.close()


class _Graph(oneemb.TrainGraph):
    def __init__(self, embedding):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.dense = embedding, torch.nn.Linear(64, 1)
        self.add_optimizer(torch.optim.Adam(self.parameters(), lr=0.01))

    def build(self, ids, label):
        logit = self.dense(self.embedding(ids).flatten(1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        loss.backward()
        return loss.detach()


def test_graphs_that_are_called_and_run_have_the_bits_that_they_have_in_memory(tmp_path):
    generator = torch.Generator().manual_seed(1)
    batches = [
        ((torch.rand(500, 2, generator=generator) ** 2 * 20_000).long(), torch.rand(500, generator=generator).round())
        for _ in range(30)
    ]
    found = {}
    for way, store in (("called", "device"), ("called", "remote"), ("run", "remote")):
        graph = _Graph(make_embedding(tmp_path / f"{way} {store}", store=store, dim=32, tables=2))
        losses = []
        for begin in (0, 10, 20):
            its = batches[begin : begin + 10]
            losses += [loss.item().hex() for loss in (graph.run(its) if way == "run" else (graph(*b) for b in its))]
            if begin == 0:
                graph.embedding.save_snapshot("whole")
            elif begin == 10:
                graph.embedding.save_delta("delta", since="whole")
        last = rows_of(graph.embedding, batches[0][0][:, 0])
        graph.embedding.load_snapshot("delta")
        found[way, store] = losses, last.tolist(), rows_of(graph.embedding, batches[0][0][:, 0]).tolist()
        if store == "remote":
            assert graph.embedding.stats()["remote"]["rows_pulled"] > 1000
        graph.embedding.close()
    first, *others = found.values()
    assert first[1] != first[2] and all(other == first for other in others)
