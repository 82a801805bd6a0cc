"""What ids read as that get no row, tables that refuse rows where they are full, scores that are given, and times."""

import errno
import os
import time

import numpy as np
import pytest
import torch

import oneemb
from oneemb.policies import LFU, LRU, AdmitAfter, AdmitWhere, GivenScore, MixedLFU, RowPolicy, StepLRU
from oneemb.storage.errors import BrokenStoreError
from oneemb.storage.fs import LocalFileSystem
from tests.test_policies import RATE, STORES, everything, ids, known, make, sgd, step

ZERO, SEVEN = oneemb.make_constant_initializer(0.0), oneemb.make_constant_initializer(7.0)


def values(rows):
    return rows[:, 0].tolist()


# ---- ids without a row -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    "absent, refused, evaluated, trained",
    [
        ("initial", None, 1, 1),
        ("zeros", None, 0, 0),
        ("zeros", "initial", 0, 1),
        (SEVEN, None, 7, 7),
        (SEVEN, ZERO, 7, 0),
        ("initial", SEVEN, 1, 7),
    ],
)
def test_ids_read_as_a_policy_says_in_eval_mode_and_where_they_are_refused(
    tmp_path, store, absent, refused, evaluated, trained
):
    policy = RowPolicy(admit=AdmitAfter(2), absent=absent, refused=refused)
    embedding = make(tmp_path / "rows", store, policy)
    optimizer = sgd(embedding)
    assert values(embedding.eval()(ids(5))) == [evaluated]  # before there are tiers, and after
    embedding.train()
    assert values(step(embedding, optimizer, ids(5))) == [trained]
    assert values(embedding.eval()(ids(5, 6))) == [evaluated] * 2
    assert values(embedding.read(ids(5))) == [evaluated]
    embedding.train()
    assert values(step(embedding, optimizer, ids(5))) == [1] and known(embedding) == {(0, 5)}
    assert values(embedding.read(ids(5, 6))) == [0.75, evaluated]


def test_what_rows_begin_with_stays_that_of_the_table(tmp_path):
    tables = [oneemb.make_table(oneemb.make_normal_initializer()), oneemb.make_table(oneemb.options.IdInitializer(10))]
    policies = [RowPolicy(absent=SEVEN), RowPolicy(absent="zeros")]
    options = oneemb.make_device_mem_store_options(tmp_path / "rows")
    plain = oneemb.MultiTableEmbedding(
        "rows", 3, torch.float32, torch.int64, tables, oneemb.make_device_mem_store_options(tmp_path / "plain")
    )
    embedding = oneemb.MultiTableEmbedding("rows", 3, torch.float32, torch.int64, tables, options, policy=policies)
    assert torch.equal(embedding(ids(3, 4), ids(0, 1)), plain(ids(3, 4), ids(0, 1)))
    assert embedding.read(ids(8, 8, 3), ids(0, 1, 0))[:2].tolist() == [[7.0] * 3, [0.0] * 3]


def test_a_row_may_begin_as_its_id(tmp_path):
    embedding = oneemb.MultiTableEmbedding(
        "rows", 3, torch.float32, torch.int64, [oneemb.make_table(oneemb.options.IdInitializer(1000))],
        oneemb.make_device_mem_store_options(tmp_path / "rows"),
    )  # fmt: skip
    its = [0, 7, 123456, -1, 2**63 - 1, -(2**63)]
    assert embedding(ids(*its)).tolist() == [[n % 1000] * 3 for n in its]


# ---- tables that are full --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_a_full_table_refuses_what_comes_last(tmp_path, store):
    policy = RowPolicy(capacity=3, when_full="refuse", refused=SEVEN)
    embedding = make(tmp_path / "rows", store, [policy, RowPolicy(capacity=2)], tables=2)
    optimizer = sgd(embedding)
    rows = step(embedding, optimizer, ids(4, 4, 9, 2, 8, 9, 1), ids(*[0] * 7))
    assert values(rows) == [1, 1, 1, 1, 7, 1, 7]
    assert known(embedding, tables=2) == {(0, 4), (0, 9), (0, 2)}
    assert embedding.stats()["policy"]["turned_away"] == 2
    assert values(step(embedding, optimizer, ids(8, 2), ids(0, 0))) == [7, 0.75]
    with pytest.raises(oneemb.StoreFullError, match="capacity of table 1 is 2 rows"):
        embedding(ids(1, 2, 3), ids(1, 1, 1))
    assert embedding.stats()["device"]["pinned"] == 0


@pytest.mark.parametrize("store", STORES)
def test_rows_that_may_leave_make_room_before_any_is_refused(tmp_path, store):
    embedding = make(tmp_path / "rows", store, RowPolicy(LRU(), capacity=4, when_full="refuse", refused=SEVEN))
    optimizer = sgd(embedding)
    step(embedding, optimizer, ids(0, 1, 2, 3))
    assert values(step(embedding, optimizer, ids(0, 10, 11))) == [0.75, 1, 1]
    assert known(embedding) > {(0, 0), (0, 10), (0, 11)} and len(known(embedding)) == 4
    # Of six that are used at a time four fit, the known one among them.
    assert values(step(embedding, optimizer, ids(20, 21, 0, 22, 23, 24))) == [1, 1, 0.5, 1, 7, 7]
    assert known(embedding) == {(0, 0), (0, 20), (0, 21), (0, 22)}


def test_what_is_refused_for_want_of_room_is_counted_as_seen(tmp_path):
    policy = RowPolicy(LRU(), capacity=1, when_full="refuse", admit=AdmitAfter(2))
    embedding = make(tmp_path / "rows", "device", policy)
    optimizer = sgd(embedding)
    step(embedding, optimizer, ids(1, 2))
    step(embedding, optimizer, ids(1, 2))
    assert known(embedding) == {(0, 1)}
    step(embedding, optimizer, ids(2))
    assert known(embedding) == {(0, 2)}


# ---- scores that are given -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_uses_give_the_score_of_the_moment(tmp_path, store):
    policies = [RowPolicy(GivenScore(on_use=True), capacity=3), RowPolicy(GivenScore(4))]
    embedding = make(tmp_path / "rows", store, policies, tables=2)
    embedding.give_score(10)
    embedding(ids(1, 2, 1), ids(0, 0, 1))
    embedding.give_score(2**64 - 1)
    embedding.give_score(6, table=1)
    embedding(ids(2, 3, 1, 2), ids(0, 0, 1, 1))
    assert embedding.scores(ids(1, 2, 3)).tolist() == [10, 2**64 - 1, 2**64 - 1]
    assert embedding.scores(ids(1, 2), 1).tolist() == [4, 6]
    embedding.give_score(11)
    embedding(ids(4), ids(0))
    assert known(embedding, tables=2) >= {(0, 2), (0, 3), (0, 4)} and (0, 1) not in known(embedding, tables=2)


def test_scores_are_given_where_they_mean_something(tmp_path):
    embedding = make(tmp_path / "rows", "device", [RowPolicy(GivenScore()), RowPolicy(LRU())], tables=2)
    for call, message in [
        (lambda: embedding.give_score(1, 1), "table 1 must have a policy with evict=GivenScore"),
        (lambda: embedding.give_score(1, 2), "table 2 must have"),
        (lambda: embedding.give_score(-1), "an int from 0 to"),
        (lambda: embedding.give_score(1.0), "an int from 0 to"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


# ---- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("evict", [LRU(), LFU(), GivenScore(on_use=True), None])
def test_rows_note_the_time_of_their_last_use(tmp_path, store, evict):
    embedding = make(tmp_path / "rows", store, RowPolicy(evict, timestamps=True))
    optimizer = sgd(embedding)
    begin = time.time_ns()
    step(embedding, optimizer, ids(*range(10)))
    between = embedding.store.policy.timestamp()
    step(embedding, optimizer, ids(3, 20))
    end = embedding.store.policy.timestamp()
    id_N, _, time_N = embedding.store.policy.uses(0)
    times = dict(zip(id_N.tolist(), time_N.tolist(), strict=True))
    assert sorted(times) == [*range(10), 20]
    assert all(between < times[n] < end for n in (3, 20))
    assert all(begin <= times[n] < between for n in range(10) if n != 3)
    embedding.save_snapshot("all")
    before = everything(embedding)
    embedding.clear()
    embedding.load_snapshot("all")
    assert everything(embedding) == before
    id_N, _, time_N = embedding.store.policy.uses(0)
    assert dict(zip(id_N.tolist(), time_N.tolist(), strict=True)) == times
    embedding.close()
    plain = make(tmp_path / "rows", store, RowPolicy(evict))
    with pytest.raises(oneemb.StorageError, match="saved with timestamps=True, and this embedding's policy says"):
        plain.load_snapshot("all")


def test_times_go_on_from_those_that_were_loaded(tmp_path):
    embedding = make(tmp_path / "rows", "device", RowPolicy(LRU(), timestamps=True))
    embedding(ids(1))
    ahead = np.array([time.time_ns() + 10**12], np.uint64)
    key = np.array([0], np.int32), np.array([1])
    embedding.store.policy.set_scores(*key, np.array([5], np.uint64), ahead)
    embedding.save_snapshot("all")
    embedding.load_snapshot("all")
    embedding(ids(2))
    times = dict(zip(*(array.tolist() for array in embedding.store.policy.uses(0)[::2]), strict=True))
    assert times[1] == int(ahead[0]) < times[2] < embedding.store.policy.timestamp()
    assert embedding.scores(ids(1)).tolist() == [5]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: RowPolicy(absent=3), 'absent must be "initial", "zeros" or an initializer'),
        (lambda: RowPolicy(refused="ones"), 'refused must be "initial", "zeros" or an initializer'),
        (lambda: RowPolicy(absent=None), "absent must be"),
        (lambda: RowPolicy(when_full="wait"), 'when_full must be "raise" or "refuse"'),
        (lambda: RowPolicy(LRU(), when_full="refuse"), "needs a capacity or a capacity_mb"),
        (lambda: RowPolicy(StepLRU(), timestamps=True), "timestamps take the place"),
        (lambda: RowPolicy(LFU(5.0), timestamps=True), "timestamps take the place"),
        (lambda: RowPolicy(MixedLFU(), timestamps=True), "timestamps take the place"),
        (lambda: RowPolicy(LRU(), expire_after_seconds=3, timestamps=True), "timestamps take the place"),
        (lambda: oneemb.options.IdInitializer(0), "modulus must be an int from 1"),
        (lambda: oneemb.options.IdInitializer(2**24 + 1), "modulus must be an int from 1"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_tables_note_times_alike(tmp_path):
    with pytest.raises(ValueError, match="must have the same timestamps="):
        make(tmp_path / "rows", "device", [RowPolicy(timestamps=True), RowPolicy()], tables=2)


# ---- what fails half-way ---------------------------------------------------------------------------------------------


class Stopping:
    """A clock that raises when it is told to."""

    fails = False

    def __call__(self):
        if self.fails:
            raise OSError("no clock")
        return 5.0


def test_a_clock_that_fails_changes_nothing(tmp_path):
    clock = Stopping()
    embedding = make(tmp_path / "rows", "device", RowPolicy(LRU(), expire_after_seconds=9, clock=clock))
    embedding(ids(1, 2))
    embedding.save_snapshot("two")
    embedding(ids(3))
    before = everything(embedding)
    clock.fails = True
    for call in (embedding.clear, lambda: embedding.load_snapshot("two"), embedding.evict, lambda: embedding(ids(9))):
        with pytest.raises(ValueError, match="clock of a policy must give seconds"):
            call()
    clock.fails = False
    assert everything(embedding) == before and known(embedding) == {(0, 1), (0, 2), (0, 3)}
    embedding.load_snapshot("two")
    assert known(embedding) == {(0, 1), (0, 2)}


def test_rows_that_left_for_a_lookup_whose_disk_fails_stay_gone_and_nothing_else_changes(tmp_path, monkeypatch):
    embedding = make(tmp_path / "rows", "ssd", RowPolicy(LRU()), capacity=400)
    optimizer = sgd(embedding)
    for n in range(0, 400, 20):
        step(embedding, optimizer, torch.arange(n, n + 20))
    embedding.save_snapshot("all")  # so that rows are in files, and in no buffer
    before, scores = everything(embedding), embedding.scores(torch.arange(400))

    def fail(self, file, out, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    asked = torch.cat([torch.arange(150, 170), torch.arange(1000, 1010)])  # some on the disk, some new
    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "read_into", fail)
        patched.setattr("oneemb.storage.table.aio_reader.AioReader.read", lambda *its: fail(*its[:4]))
        with pytest.raises(oneemb.StorageError, match="could not read rows from .*EIO"):
            embedding(asked)
    after = everything(embedding)
    kept = {n: row for n, row in before.items() if n in after}
    assert after == kept and len(before) - len(after) == embedding.stats()["policy"]["left"]["capacity"] >= 10
    assert not {(0, n) for n in asked.tolist()} & (before.keys() - after.keys())
    left = torch.tensor([(0, n) in after for n in range(400)])
    assert torch.equal(embedding.scores(torch.arange(400))[left].view(torch.int64), scores[left].view(torch.int64))
    assert {(0, n) for n in range(400) if left[n]} == known(embedding, 1100) and embedding.store.hot.pinned == 0
    assert embedding(asked).detach()[:, 0].tolist() == [1 - RATE] * 20 + [1.0] * 10
    assert embedding.stats()["rows"] == len(after) + 10


def test_a_clock_may_leap_farther_than_a_number_says(tmp_path):
    now = [-1e308]
    embedding = make(tmp_path / "rows", "device", RowPolicy(expire_after_seconds=9, clock=lambda: now[0]))
    embedding(ids(1, 2))
    now[0] = 1e308
    assert embedding.evict() == {"expired": 2}


def test_no_lookup_comes_between_choosing_rows_and_letting_them_leave(tmp_path, monkeypatch):
    embedding = make(tmp_path / "rows", "device", RowPolicy(expire_after_steps=1))
    optimizer = sgd(embedding)
    for its in (ids(1, 2), ids(3), ids(4)):
        step(embedding, optimizer, its)
    evict, held = embedding.store.policy.evict, []

    def after_another_thread(*to_evict):
        held.append(embedding(ids(1)))
        return evict(*to_evict)

    monkeypatch.setattr(embedding.store.policy, "evict", after_another_thread)
    assert embedding.evict() == {"expired": 2} and known(embedding) == {(0, 1), (0, 4)}
    held[0].sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["", "x" * 300, 5])
def test_rows_stay_where_a_name_is_none(tmp_path, name):
    embedding = make(tmp_path / "rows", "device", RowPolicy(expire_after_steps=1, evict_at_snapshot=True))
    optimizer = sgd(embedding)
    step(embedding, optimizer, ids(1))
    for _ in range(3):
        step(embedding, optimizer, ids(2))
    there = known(embedding)
    with pytest.raises((ValueError, TypeError), match="name must"):
        embedding.save_snapshot(name)
    assert known(embedding) == there
    embedding.save_snapshot("good")
    assert known(embedding) == {(0, 2)}


@pytest.mark.parametrize("where", ["admit", "expire_where"])
def test_a_function_that_calls_the_embedding_is_told(tmp_path, where):
    calls = []

    def asks(table, its, other):
        calls.append(embedding(ids(77)))
        return np.ones(len(its), np.bool_)

    how = {"admit": AdmitWhere(asks)} if where == "admit" else {"expire_where": asks}
    embedding = make(tmp_path / "rows", "device", RowPolicy(**how))
    with pytest.raises(ValueError, match="must not call the embedding"):
        embedding(ids(1))
        embedding.evict()
    assert not calls and known(embedding) == (set() if where == "admit" else {(0, 1)})


def test_evict_lets_those_leave_that_are_too_many_and_no_others(tmp_path):
    big = make(tmp_path / "rows", "device", [RowPolicy(LRU())] * 2, tables=2)
    big(ids(*range(110)), torch.zeros(110, dtype=torch.int64))
    big(ids(*range(97)), torch.ones(97, dtype=torch.int64))
    big(ids(*range(50)), torch.zeros(50, dtype=torch.int64))
    big.save_snapshot("all")
    big.close()
    embedding = make(tmp_path / "rows", "device", [RowPolicy(LRU(), capacity=100)] * 2, tables=2)
    embedding.load_snapshot("all")
    assert embedding.evict() == {"capacity": 10}
    there = known(embedding, 120, 2)
    assert len(there) == 197 and {(0, n) for n in range(50)} <= there and {(1, n) for n in range(97)} <= there


def test_a_thread_that_asks_whether_uses_are_counted_has_no_part_in_a_move_of_rows(tmp_path, monkeypatch):
    embedding = make(tmp_path / "rows", "device", RowPolicy(LFU()))
    embedding(ids(1, 2, 2))
    store, usage = embedding.store, embedding.store.engine.usage
    relayout, asked = store.rows.relayout, []

    def asked_meanwhile(*its):
        asked.append(store.policy.counts_uses)  # As by a thread that announces a batch, which has no turn.
        assert not usage.in_rows and len(usage) == 2
        relayout(*its)

    monkeypatch.setattr(store.rows, "relayout", asked_meanwhile)
    torch.optim.Adam(embedding.parameters(), lr=0.1)
    embedding.detach_optimizer("drop")
    assert asked == [True] and embedding.scores(ids(1, 2)).tolist() == [1, 2]


def test_memory_that_is_out_in_the_middle_of_a_lookup_breaks_the_embedding(tmp_path, monkeypatch):
    embedding = make(tmp_path / "rows", "device", RowPolicy(LRU()))
    embedding(ids(1))
    embedding.save_snapshot("one")

    def out_of_memory(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("oneemb.storage.policies.usage_index.score_uses", out_of_memory)
        with pytest.raises(MemoryError):
            embedding(ids(2, 3))
    with pytest.raises(BrokenStoreError):
        embedding(ids(4))
    embedding.load_snapshot("one")
    assert known(embedding) == {(0, 1)}
