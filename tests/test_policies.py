"""Which rows tables keep, and which leave, against a model in plain Python."""

import contextlib
import copy
import gc
import json
import shutil
import tempfile
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import oneemb
import oneemb.embeddings.embedding
import oneemb.kernels.score_rows
import oneemb.storage.policies.evictions
from oneemb.cli.commands import oneemb as command
from oneemb.embeddings import internals
from oneemb.graph.arguments import Lookup
from oneemb.kernels.score_rows import hashes_of, ties_of
from oneemb.kernels.threads import Threads
from oneemb.policies import (
    LFU,
    LRU,
    AdmitAfter,
    AdmitChance,
    AdmitWhere,
    EpochLFU,
    EpochLRU,
    GivenScore,
    MixedLFU,
    RowPolicy,
    StepLRU,
)  # fmt: skip
from oneemb.rows.reshard import reshard
from oneemb.storage.policies.evictions import Evictions
from oneemb.storage.policies.usage_index import UsageIndex
from oneemb.storage.store_rows import set_rows
from oneemb.storage.tiers.stack import RemotePlan
from tests.support.pairwise import covering

DIM, RATE, KIB = 4, 0.25, 1024
STORES = {
    "device": dict(cache_bytes=None, host_bytes=0),
    "host": dict(cache_bytes=4 * KIB, host_bytes=None),
    "ssd": dict(cache_bytes=4 * KIB, host_bytes=0),
    "ssd, host cache": dict(cache_bytes=4 * KIB, host_bytes=8 * KIB),
    "remote": dict(cache_bytes=4 * KIB, host_bytes=0),
}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def make(path, store, policy, *, tables=1, capacity=None, padding_idx=None, threads=2):
    """An embedding whose rows begin with ones, in a store of this kind with small caches."""
    options = oneemb.make_device_mem_store_options(path, capacity=capacity, physical_block_size=512)
    plan = oneemb.embeddings.embedding.store_plan
    remote = RemotePlan(f"memory://{path}", "rows") if store == "remote" else None
    oneemb.embeddings.embedding.store_plan = lambda *its: replace(plan(*its), **STORES[store], remote=remote)
    try:
        return oneemb.MultiTableEmbedding(
            "rows", DIM, torch.float32, torch.int64, [oneemb.make_table()] * tables, options,
            oneemb.make_constant_initializer(1.0), padding_idx, num_threads=threads, policy=policy,
        )  # fmt: skip
    finally:
        oneemb.embeddings.embedding.store_plan = plan


def sgd(embedding):
    return torch.optim.SGD(embedding.parameters(), lr=RATE)


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def step(embedding, optimizer, its, table_ids=None):
    optimizer.zero_grad()
    rows = embedding(its, table_ids)
    rows.sum().backward()
    optimizer.step()
    return rows.detach()


def known(embedding, up_to=60, tables=1):
    """Keys that have rows."""
    found = set()
    for table in range(tables):
        table_U, id_U = np.full(up_to, table, np.int32), np.arange(up_to)
        _, there_U = embedding.store.policy.scores(table_U, id_U)
        found |= {(table, n) for n in np.flatnonzero(there_U).tolist()}
    assert len(found) == embedding.stats()["rows"]
    return found


def check_records(embedding):
    """What the ledger has side by side of rows that lie still is what their records have, and counts are right."""
    store = embedding.store
    usage, format = store.engine.usage, store.format
    table_N, id_N, place_N = usage.items()
    score_N = usage.scores(place_N)
    keys = list(zip(table_N.tolist(), id_N.tolist(), strict=True))
    known = dict(zip(keys, score_N.tolist(), strict=True))
    recorded = {}
    for table_N, id_N, row_NW in store.rows.rows():
        usage_N2 = np.ascontiguousarray(row_NW[:, format.usage_begin : format.state_begin]).view(np.uint64)
        recorded |= dict(zip(zip(table_N.tolist(), id_N.tolist(), strict=True), usage_N2[:, 0].tolist(), strict=True))
    assert known == recorded
    tables, counts = Counter(table for table, _ in keys), usage.rows_T.tolist()
    assert counts == [tables[t] for t in range(len(counts))]
    assert usage.places.table_P[place_N].tolist() == [table for table, _ in keys]
    assert not usage.places.held_P.any()


def tie(key):
    return int(ties_of(np.array([key[0]], np.int32), np.array([key[1]]), threads=Threads(1))[0])


class Full(Exception):
    pass


class Model:
    """What an embedding with these policies does, row by row."""

    def __init__(self, policies, capacity):
        self.policies, self.capacity = policies, capacity
        self.rows = {}  # key -> [weight, score, step, second]
        self.seen = Counter()  # sightings of keys without a row
        self.step = self.lookups = self.epoch = self.swept = 0

    def expired(self, key, second):
        policy, (_, _, at, moment) = self.policies[key[0]], self.rows[key]
        steps, seconds = policy.expire_after_steps, policy.expire_after_seconds
        return (steps is not None and self.step - at > steps) or (seconds is not None and second - moment > seconds)

    def small(self, key):
        least = self.policies[key[0]].expire_below_norm
        return least is not None and 2 * abs(self.rows[key][0]) < least

    def evict(self, second, tables=(0, 1)):
        gone = {key for key in self.rows if key[0] in tables and self.expired(key, second)}
        small = {key for key in self.rows if key[0] in tables and key not in gone and self.small(key)}
        for key in gone | small:
            del self.rows[key]
        return {name: len(keys) for name, keys in [("expired", gone), ("norm", small)] if keys}

    def leaving(self, new, used):
        """The rows that leave for new keys; every row is looked at in a round."""
        limits = {t: policy.capacity for t, policy in enumerate(self.policies) if policy.capacity is not None}
        excess = {t: sum(key[0] == t for key in [*self.rows, *new]) - limit for t, limit in limits.items()}
        over = {t for t in limits if excess[t] > 0 and any(key[0] == t for key in new)}
        of_all = 0 if self.capacity is None else len(self.rows) + len(new) - self.capacity
        if not over and of_all <= 0 or not new:
            return set()
        free = [key for key in self.rows if key not in used]
        of_table = {t: [key for key in free if key[0] == t] for t in limits}
        if any(self.policies[t].evict is None or len(of_table[t]) < excess[t] for t in over) or (
            of_all > 0 and (self.policies[0].evict is None or len(free) < of_all)
        ):
            raise Full
        leaving = set()
        for t in [t for t in limits if self.policies[t].evict is not None]:
            some, least = len(of_table[t]) // 16, excess[t] if t in over else min(excess[t], 0)
            leaving |= self.least(of_table[t], max(least, min(some, least + some), 0))
        if (of_all := of_all - len(leaving)) > 0:
            free = [key for key in free if key not in leaving]
            leaving |= self.least(free, max(of_all, len(free) // 16))
        return leaving

    def least(self, keys, count):
        return set(sorted(keys, key=lambda key: (self.rows[key][1], tie(key)))[:count])

    def use(self, uses, second):
        if self.step > self.swept and any(policy.sweeps for policy in self.policies):
            self.swept = self.step
            for key in [key for key in self.rows if key not in uses]:
                if self.expired(key, second) or (self.policies[key[0]].sweep_weights and self.small(key)):
                    del self.rows[key]
        unknown = [key for key in uses if key not in self.rows]
        admitted = {key for key in unknown if self.admits(key, uses[key])}
        for key in self.leaving(admitted, uses):
            del self.rows[key]
        self.lookups += 1
        for key in unknown:
            if key not in admitted:
                self.seen[key] += self.sightings(key, uses[key])
            elif getattr(self.policies[key[0]].admit, "sketch_width", None) is None:
                del self.seen[key]
        for key, count in uses.items():
            if key in unknown and key not in admitted:
                continue
            before = self.rows.get(key)
            weight = 1.0 if before is None else before[0]
            self.rows[key] = [weight, self.score(key, before, count), self.step, second]

    def sightings(self, key, count):
        return 1 if getattr(self.policies[key[0]].admit, "per_lookup", True) else count

    def admits(self, key, count):
        seen = self.seen[key] + self.sightings(key, count)
        match self.policies[key[0]].admit:
            case None:
                return True
            case AdmitAfter(sightings):
                return seen >= sightings
            case AdmitWhere(function):
                return bool(function(key[0], np.array([key[1]]), np.array([seen]))[0])
            case AdmitChance(probability, seed):
                salt = (seed * 0x9E3779B97F4A7C15 + (self.lookups + 1) * 0xD1342543DE82EF95) % 2**64
                draw = hashes_of(np.array([key[0]], np.int32), np.array([key[1]]), salt, threads=Threads(1))
                return int(draw[0]) < probability * 2**64

    def score(self, key, before, count):
        was = 0 if before is None else before[1]
        match self.policies[key[0]].evict:
            case None | LRU():
                return self.lookups
            case StepLRU():
                return self.step
            case LFU():
                return was + count
            case EpochLRU():
                return self.epoch * 2**32 + self.lookups
            case EpochLFU():
                return self.epoch * 2**32 + was % 2**32 + count
            case GivenScore(new, on_use):
                return new if before is None or on_use else was

    def train(self, uses, second):
        self.use(uses, second)
        for key, count in uses.items():
            if key in self.rows:
                self.rows[key][0] -= RATE * count
        self.step += 1


EVICTIONS = [None, LRU(), StepLRU(), LFU(), EpochLRU(), EpochLFU(), GivenScore(7), GivenScore(3, on_use=True)]
ADMISSIONS = [
    None, None, AdmitAfter(1), AdmitAfter(3), AdmitAfter(2, per_lookup=True), AdmitAfter(3, sketch_width=1 << 20),
    AdmitChance(0.5, seed=3), AdmitWhere(lambda table, ids, counts: (ids % 2 == table) | (counts >= 3)),
]  # fmt: skip
KEYS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 39)), min_size=1, max_size=14)


class Jobs(RuleBasedStateMachine):
    """A job on two tables, with whatever may come between its steps."""

    @initialize(
        store=st.sampled_from(list(STORES)),
        evict=st.sampled_from(EVICTIONS),
        limits=st.tuples(st.none() | st.integers(15, 30), st.none() | st.integers(15, 30)),
        capacity=st.none() | st.integers(28, 40),
        steps=st.none() | st.integers(1, 4),
        seconds=st.none() | st.integers(1, 50),
        norm=st.none() | st.floats(0.5, 2.0),
        admit=st.tuples(st.sampled_from(ADMISSIONS), st.sampled_from(ADMISSIONS)),
        sweep_weights=st.booleans(),
        evict_at_snapshot=st.tuples(st.booleans(), st.booleans()),
        absent=st.tuples(*[st.sampled_from(["initial", "zeros"])] * 2),
    )
    def begin(
        self, store, evict, limits, capacity, steps, seconds, norm, admit, sweep_weights, evict_at_snapshot, absent
    ):  # fmt: skip
        self.clock = Clock()
        self.policies = [
            RowPolicy(
                evict, limit, expire_after_steps=steps, expire_after_seconds=seconds, expire_below_norm=norm,
                sweep_steps=1, clock=self.clock, admit=its, sweep_weights=sweep_weights, evict_at_snapshot=first,
                absent=reads,
            )
            for limit, its, first, reads in zip(limits, admit, evict_at_snapshot, absent, strict=True)
        ]  # fmt: skip
        self.store, self.capacity, self.folder = store, capacity, tempfile.mkdtemp()
        self.model, self.saved, self.began = Model(self.policies, capacity), {}, self.clock.now
        self.parents, self.points = {}, []
        self.embedding = None
        self.open()

    def open(self):
        if self.embedding is not None:
            self.embedding.close()
        self.embedding = make(
            f"{self.folder}/rows", self.store, self.policies, tables=2, capacity=self.capacity, padding_idx=-1
        )
        self.optimizer = sgd(self.embedding)

    @property
    def second(self):
        return int(self.clock.now - self.began)

    def guarded(self, call, expected):
        """`call` does what the model does, or both find that rows do not fit."""
        before = copy.deepcopy(self.model)
        try:
            expected()
        except Full:
            swept = self.model.swept
            with pytest.raises(oneemb.StoreFullError, match="capacity of"):
                call()
            gone = set(before.rows) - set(self.model.rows)
            self.model, self.model.swept = before, swept
            for key in gone:  # Those that had expired have left before.
                del self.model.rows[key]
        else:
            call()

    @rule(keys=KEYS, prefetch=st.booleans())
    def train(self, keys, prefetch):
        self.train_step(keys, prefetch)

    def train_step(self, keys, prefetch):
        table_ids, its = (torch.tensor(column) for column in zip(*keys, strict=True))
        uses = Counter(keys)
        held = self.embedding.store.prefetch(internals.keys_of(self.embedding, Lookup(its, table_ids)).unique)
        if not prefetch:
            self.embedding.store.unprefetch(held)
        found = []
        self.guarded(
            lambda: found.append(step(self.embedding, self.optimizer, its, table_ids)),
            lambda: self.model.train(uses, self.second),
        )
        self.embedding.store.unprefetch(held)
        for row, key in zip(found[0].tolist() if found else [], keys, strict=False):
            its = self.model.rows.get(key)
            assert row[0] == (self.absent(key[0]) if its is None else its[0] + RATE * uses[key])

    def absent(self, table):
        """What ids without a row read as."""
        return {"initial": 1.0, "zeros": 0.0}[self.policies[table].absent]

    @rule(keys=KEYS)
    def look(self, keys):
        """In training mode, without a gradient: it is a use."""
        table_ids, its = (torch.tensor(column) for column in zip(*keys, strict=True))
        with torch.no_grad():
            self.guarded(lambda: self.embedding(its, table_ids), lambda: self.model.use(Counter(keys), self.second))

    @rule(table=st.integers(0, 1), numbers=st.lists(st.integers(0, 39), max_size=10))
    def erase(self, table, numbers):
        there = {(table, n) for n in numbers} & set(self.model.rows)
        assert self.embedding.erase(ids(*numbers), table) == len(there)
        for key in there:
            del self.model.rows[key]

    @rule(table=st.integers(0, 1), scores=st.dictionaries(st.integers(0, 39), st.integers(0, 2**64 - 1), max_size=6))
    def set_scores(self, table, scores):
        its = torch.from_numpy(np.array(list(scores.values()), np.uint64))
        there = [n for n in scores if (table, n) in self.model.rows]
        assert self.embedding.set_scores(ids(*scores), its, table) == len(there)
        for n in there:
            self.model.rows[table, n][1] = scores[n]

    @rule(more=st.integers(0, 3))
    def set_epoch(self, more):
        self.model.epoch += more
        self.embedding.set_epoch(self.model.epoch)

    @rule()
    def evict(self):
        assert self.embedding.evict() == self.model.evict(self.second)

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule(name=st.sampled_from("ab"))
    def save(self, name):
        self.save_as(name, None, lambda: self.embedding.save_snapshot(name, overwrite=True))

    @rule(name=st.sampled_from("abcd"), batches=st.lists(KEYS, max_size=4), back=st.booleans(), data=st.data())
    def save_delta(self, name, batches, back, data):
        """Of some steps and those before, since one of the last four snapshots saved, or that which was loaded."""
        if not self.points:
            self.save("a")
        since = data.draw(st.sampled_from(self.points))
        for keys in batches:
            self.train_step(keys, False)
        if since == name:
            with pytest.raises(ValueError, match="a name of its own"):
                self.embedding.save_delta(name, since, overwrite=True)
        else:
            self.save_as(name, since, lambda: self.embedding.save_delta(name, since, overwrite=True))
            if back:
                self.load_as_saved(name)

    def save_as(self, name, since, save):
        if name in self.parents.values():  # No row leaves for a save that is refused.
            with pytest.raises(oneemb.StorageError, match="deltas since it"):
                save()
            return
        self.model.evict(self.second, [t for t in range(2) if self.policies[t].evict_at_snapshot])
        save()
        self.parents[name] = since
        self.points = [*(point for point in self.points if point != name), name][-4:]
        self.saved[name] = copy.deepcopy(self.model), self.second

    @precondition(lambda self: self.saved)
    @rule(reopen=st.booleans(), data=st.data())
    def load(self, reopen, data):
        name = data.draw(st.sampled_from(sorted(self.saved)))
        if reopen:
            self.open()
        self.load_as_saved(name)

    def load_as_saved(self, name):
        self.embedding.load_snapshot(name)
        self.points = [name]
        model, second = self.saved[name]
        self.model, self.began = copy.deepcopy(model), self.clock.now - second

    @invariant()
    def same(self):
        if not hasattr(self, "model"):
            return
        embedding, model = self.embedding, self.model
        assert known(embedding, 40, 2) == set(model.rows)
        if self.store == "device" and embedding.store.built:  # Elsewhere to read all rows is to write them down.
            check_records(embedding)
        embedding.eval()
        for table in range(2):
            rows = embedding(torch.arange(40), torch.full((40,), table))
            assert rows[:, 0].tolist() == [model.rows.get((table, n), [self.absent(table)])[0] for n in range(40)]
            assert bool((rows == rows[:, :1]).all())
            scores = embedding.scores(torch.arange(40), table).tolist()
            assert scores == [model.rows.get((table, n), [0, 0])[1] for n in range(40)]
        embedding.train()

    def teardown(self):
        if getattr(self, "embedding", None) is not None:
            self.embedding.close()
            shutil.rmtree(self.folder, ignore_errors=True)


Jobs.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
TestJobs = Jobs.TestCase


@pytest.mark.slow
def test_many_jobs():
    run_state_machine_as_test(
        Jobs, settings=settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=False)
    )


@pytest.mark.parametrize("above", [{"sweep_above_mb": 1}, {"sweep_above": 50}])
def test_sweeps_begin_at_a_mark_of_rows(tmp_path, above):
    embedding = make(tmp_path, "device", [RowPolicy(expire_after_steps=1, sweep_steps=1, **above)] * 2, tables=2)
    optimizer, row_bytes = sgd(embedding), embedding.store.format.row_bytes
    many = above.get("sweep_above", 2**20 // row_bytes)
    embedding.store.build()
    set_rows(embedding.store, np.zeros(many, np.int32), np.arange(many), np.ones((many, DIM), np.float32))
    for n in range(4):  # as many rows as the mark, which is not more
        step(embedding, optimizer, ids(n % 2), ids(1))
        assert embedding.stats()["rows"] == many + min(n + 1, 2)
    step(embedding, optimizer, ids(many + 5), ids(0))
    step(embedding, optimizer, ids(many + 5), ids(0))
    assert embedding.stats()["policy"]["left"] == {"expired": many} and embedding.stats()["rows"] == 3
    step(embedding, optimizer, ids(many + 5), ids(0))
    assert embedding.stats()["rows"] == 3 and embedding.evict() == {"expired": 2}


def test_a_graph_saves_no_rows_that_are_to_leave_before_a_snapshot(tmp_path):
    embedding = make(
        tmp_path / "rows", "device", [RowPolicy(expire_after_steps=1, evict_at_snapshot=True)] * 2, tables=2
    )
    graph = Clicks(embedding, lambda parameters: torch.optim.SGD(parameters, lr=RATE))
    for n in range(4):
        graph(torch.full((4, 2), n), torch.zeros(4))
    graph.save(tmp_path / "checkpoint")
    assert known(embedding, tables=2) == {(0, 3), (1, 3)}
    graph.load(tmp_path / "checkpoint")
    assert known(embedding, tables=2) == {(0, 3), (1, 3)}


def test_snapshots_of_fewer_tables_load_and_those_of_other_rules_are_refused_beforehand(tmp_path):
    one = make(tmp_path, "device", RowPolicy(LRU(), 5))
    step(one, sgd(one), ids(1, 2))
    one.save_snapshot("one")
    one.close()
    two = make(tmp_path, "device", RowPolicy(LRU(), 5), tables=2)
    two.load_snapshot("one")
    assert known(two, tables=2) == {(0, 1), (0, 2)}
    two.close()
    other = make(tmp_path, "device", RowPolicy(LFU(), 5))
    for call in (lambda name: internals.check_fits(other, name), other.load_snapshot):
        with pytest.raises(oneemb.StorageError, match="scores of other rules"):
            call("one")
    step(other, sgd(other), ids(7))
    with pytest.raises(oneemb.StorageError, match="scores of other rules"):
        other.load_snapshot("one")
    assert known(other) == {(0, 7)}


def test_sightings_begin_at_none_once_a_row_has_been_imported(tmp_path):
    embedding = make(tmp_path, "device", RowPolicy(admit=AdmitAfter(3)))
    optimizer = sgd(embedding)
    for _ in range(2):
        step(embedding, optimizer, ids(7))
    set_rows(embedding.store, np.zeros(1, np.int32), np.array([7]), np.ones((1, DIM), np.float32))
    embedding.erase(ids(7))
    for rows in (0, 0, 1):
        step(embedding, optimizer, ids(7))
        assert embedding.stats()["rows"] == rows


def test_a_state_dict_has_uses_that_changed_no_row(tmp_path):
    embedding = make(tmp_path, "device", RowPolicy(LFU(), admit=AdmitAfter(3)))
    with torch.no_grad():
        embedding(ids(1, 1, 2))
    state = embedding.state_dict()
    with torch.no_grad():
        embedding(ids(1, 1, 1, 1))
    later = embedding.state_dict()
    embedding.load_state_dict(state)
    with torch.no_grad():
        embedding(ids(2, 2))
    assert known(embedding) == {(0, 2)}
    embedding.load_state_dict(later)
    assert known(embedding) == {(0, 1)}


def test_histograms_of_scores_between_which_lies_nothing(tmp_path):
    embedding = make(tmp_path, "device", RowPolicy(GivenScore(2**63), 9))
    step(embedding, sgd(embedding), ids(1, 2, 3))
    embedding.save_snapshot("all")
    embedding.close()
    result = CliRunner().invoke(command, ["inspect", str(tmp_path), "--histogram", "all", "--json"])
    assert json.loads(result.output)["tables"]["0"]["score"] == {"edges": [2.0**63] * 2, "rows": [3]}


# ---- the same on every store, prefetched or not ----------------------------------------------------------------------


class Clicks(oneemb.TrainGraph):
    def __init__(self, embedding, optimizer):
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(optimizer(embedding.parameters()))

    def build(self, its, label):
        loss = torch.nn.functional.mse_loss(self.embedding(its).sum((1, 2)), label)
        loss.backward()
        return loss.detach()


def clicks(steps, seed=0):
    """Batches whose ids drift, so that rows come and go."""
    generator = torch.Generator().manual_seed(seed)
    for t in range(steps):
        its = (torch.rand(20, 2, generator=generator) ** 2 * 150).long() + 3 * t
        yield its, torch.rand(20, generator=generator)


def everything(embedding):
    rows = {}
    for table_N, id_N, row_NW in embedding.store.rows.rows():
        rows |= {(t, n): row.tobytes() for t, n, row in zip(table_N.tolist(), id_N.tolist(), row_NW, strict=True)}
    return rows


@pytest.mark.parametrize(
    "evict, admit",
    [
        (LFU(half_life=3.0), None),
        (LRU(), AdmitAfter(2)),
        (MixedLFU(2), None),
        *(
            pytest.param(*its, marks=pytest.mark.slow)
            for its in ((LRU(), None), (EpochLFU(), None), (LFU(), AdmitAfter(2)))
        ),
    ],
    ids=str,
)
def test_no_number_depends_on_stores_threads_or_prefetching(tmp_path, monkeypatch, evict, admit):
    monkeypatch.setattr(oneemb.kernels.score_rows, "_SHARE_MIN", 4)  # so that threads have their shares
    monkeypatch.setattr(oneemb.storage.policies.evictions, "_ROUND_ROWS", 40)
    policy = RowPolicy(evict, expire_after_steps=9, sweep_steps=5, admit=admit)
    found = []
    for way, (store, threads) in enumerate([("device", 1), *((store, 2) for store in STORES)]):
        for depth in (None, 2):
            path = tmp_path / f"{way} {depth}"
            embedding = make(path, store, policy, tables=2, capacity=120, threads=threads)
            graph = Clicks(embedding, lambda its: torch.optim.Adagrad(its, lr=0.1))
            batches = list(clicks(30))
            if depth is None:
                losses = [graph(*batch) for batch in batches]
            else:
                losses = list(graph.run(batches, prefetch_depth=depth))
            found.append((torch.stack(losses).tolist(), everything(embedding), embedding.stats()["policy"]["left"]))
            embedding.close()
    assert all(one == found[0] for one in found)
    assert admit is not None or (
        found[0][2]["capacity"] > 20 and (isinstance(evict, LRU) or half_life_of(evict) or found[0][2]["expired"] > 20)
    )


def half_life_of(evict):
    return getattr(evict, "half_life", None)


def test_a_sweep_looks_at_every_row_once_in_its_steps(tmp_path):
    embedding = make(tmp_path, "device", RowPolicy(expire_after_steps=3, sweep_steps=8))
    optimizer = sgd(embedding)
    with torch.no_grad():
        embedding(torch.arange(2000))
    rows = []
    for _ in range(13):
        step(embedding, optimizer, ids(5000))
        rows.append(embedding.stats()["rows"])
    assert rows[:4] == [2001] * 4, "nothing has expired before step 4"
    assert rows[-1] == 1 and all(100 < a - b < 400 for a, b in zip(rows[4:11], rows[5:12], strict=True))


def test_a_sweep_may_take_more_steps_than_there_are_parts(tmp_path):
    embedding = make(tmp_path, "device", RowPolicy(expire_after_steps=1, sweep_steps=600))
    optimizer = sgd(embedding)
    with torch.no_grad():
        embedding(torch.arange(2000))
    rows = []
    for _ in range(603):
        step(embedding, optimizer, ids(5000))
        rows.append(embedding.stats()["rows"])
    assert rows[-1] == 1 and 1000 - 200 < rows[300] < 1000 + 200 and rows[580] > 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sweeps_look_at_weights_where_they_are_told_to(tmp_path, dtype):
    found = []
    for sweeps in (False, True):
        policy = RowPolicy(expire_below_norm=1.5, sweep_steps=4, sweep_weights=sweeps)
        embedding = oneemb.MultiTableEmbedding(
            "rows", DIM, dtype, torch.int64, [oneemb.make_table()],
            oneemb.make_device_mem_store_options(tmp_path / str(sweeps)), oneemb.make_constant_initializer(1.0),
            policy=policy,
        )  # fmt: skip
        optimizer = sgd(embedding)
        with torch.no_grad():
            embedding(torch.arange(100))
        step(embedding, optimizer, torch.arange(50))  # weights of 0.75, a norm of 1.5
        step(embedding, optimizer, torch.arange(20))  # of 0.5
        for _ in range(4):
            step(embedding, optimizer, ids(200))
        found.append(embedding.stats()["rows"])
    assert found == [101, 81]


def test_a_capacity_in_mebibytes_is_that_of_rows_with_their_state(tmp_path):
    embedding = make(tmp_path, "device", RowPolicy(LRU(), capacity_mb=1))
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
    step(embedding, optimizer, ids(1))
    most = 2**20 // embedding.store.format.row_bytes
    assert embedding.store.format.row_bytes == 4 * (DIM + 4 + 2 * DIM)
    with torch.no_grad():
        for n in range(0, 2 * most, 4000):
            embedding(torch.arange(n, n + 4000))
            assert embedding.stats()["rows"] <= most
    assert embedding.stats()["rows"] > most * 14 // 16


def test_uses_of_long_ago_count_less(tmp_path):
    embedding = make(tmp_path, "device", RowPolicy(LFU(half_life=10.0)), capacity=20)
    optimizer = sgd(embedding)
    for _ in range(8):
        step(embedding, optimizer, ids(1, 2, 3, 4))
    for _ in range(60):
        step(embedding, optimizer, ids(5, 6))
    for n in range(10, 30):
        step(embedding, optimizer, ids(n))
    assert {(0, 5), (0, 6)} <= known(embedding) and not known(embedding) & {(0, n) for n in (1, 2, 3, 4)}
    scores = embedding.scores(ids(5)).numpy().view(np.float64)
    uses = sum(2 ** -((87 - at) / 10) for at in range(8, 68))
    np.testing.assert_allclose(2 ** (scores - 87 / 10), [uses], rtol=1e-9)


def test_mixed_scores_know_uses_to_a_power_of_two(tmp_path):
    embedding = make(tmp_path, "device", RowPolicy(MixedLFU(new_power=0)))
    optimizer = sgd(embedding)
    for _ in range(64):
        step(embedding, optimizer, torch.arange(500))
    power = embedding.scores(torch.arange(500)).numpy() >> np.uint64(32)
    # Morris' counter: the mean of 2^power - 1 is the number of uses after the first.
    assert abs(float((2.0**power - 1).mean()) - 63) < 12
    assert (embedding.scores(torch.arange(500)).numpy() & np.uint64(0xFFFFFFFF) == 63).all()


# ---- who gets a row --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_ids_that_get_no_row_are_trained_for_nothing_and_take_no_room(tmp_path, store):
    embedding = make(tmp_path, store, RowPolicy(LRU(), admit=AdmitAfter(2)), capacity=10)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=RATE)
    step(embedding, optimizer, ids(1, 1, 2, 2))
    nbytes = None
    for n in range(100, 1100, 20):
        rows = step(embedding, optimizer, torch.cat([torch.arange(n, n + 20), ids(1, 2)]))
        assert bool((rows[:20] == 1.0).all())
        nbytes = nbytes or embedding.stats()["device"]["bytes"]
    stats = embedding.stats()
    assert stats["rows"] == 2 and stats["device"]["pinned"] == 0
    assert (stats["policy"]["admitted"], stats["policy"]["refused"]) == (2, 1000)
    assert stats["device"]["bytes"] == nbytes, "what was lent is used again"
    assert known(embedding) == {(0, 1), (0, 2)}
    embedding.save_snapshot("two")
    assert embedding.store.snapshots.info("two").rows == 2
    embedding.load_snapshot("two")
    assert embedding.stats()["policy"]["refused"] == 1000


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("store", STORES)
def test_an_id_that_gets_a_row_in_a_step_is_trained_by_all_of_its_gradients(tmp_path, store, attached):
    embedding = make(tmp_path, store, RowPolicy(admit=AdmitAfter(2)))
    optimizer = sgd(embedding)
    if attached:
        step(embedding, optimizer, ids(50, 50))
    optimizer.zero_grad()
    first, second = embedding(ids(1, 5)), embedding(ids(1))
    (first.sum() + second.sum()).backward()
    optimizer.step()
    assert embedding.eval()(ids(1, 5))[:, 0].tolist() == [1 - 2 * RATE, 1.0]
    embedding.train()
    optimizer.zero_grad()
    for _ in range(4):  # gradients that accumulate: a row from the second one on
        embedding(ids(7)).sum().backward()
    optimizer.step()
    assert embedding.eval()(ids(7))[:, 0].tolist() == [1 - 4 * RATE]
    dropped = embedding.train()(ids(7, 8))  # and never stepped
    del first, second, dropped
    assert embedding.stats()["device"]["pinned"] == 0


def test_a_lookup_that_lends_too_many_rows_counts_nothing(tmp_path):
    embedding = make(tmp_path, "ssd", RowPolicy(admit=AdmitAfter(3)))
    optimizer = sgd(embedding)
    with pytest.raises(oneemb.StoreFullError, match="the device tier has .* slots"):
        embedding(torch.arange(1000))
    assert embedding.store.hot.pinned == 0 and embedding.stats()["policy"]["refused"] == 0
    for _ in range(3):
        assert embedding.stats()["rows"] == 0
        step(embedding, optimizer, ids(1))
    assert embedding.stats()["rows"] == 1


def test_sightings_of_the_ids_that_were_seen_last_are_counted(tmp_path):
    embedding = make(tmp_path, "device", RowPolicy(admit=AdmitAfter(2, counters=20)))
    with torch.no_grad():
        for n in range(100):
            embedding(ids(n))
        embedding(ids(*range(90, 100), *range(10)))
    assert known(embedding, 100) == {(0, n) for n in range(90, 100)}
    with torch.no_grad():  # More than can be counted in one lookup: some are.
        embedding(torch.arange(1000, 1100))
        embedding(torch.arange(1000, 1100))
    assert 10 + 10 < embedding.stats()["rows"] <= 10 + 20
    assert embedding.stats()["policy"]["bytes"] < 200_000


def test_a_sketch_counts_never_too_few(tmp_path):
    width, sightings = 200, 5
    embedding = make(tmp_path, "device", RowPolicy(admit=AdmitAfter(sightings, sketch_width=width)))
    exact, rng, early = Counter(), np.random.default_rng(0), 0
    with torch.no_grad():
        for _ in range(30):
            batch = rng.integers(0, 300, 8)
            before = {key[1] for key in known(embedding, 300)}
            embedding(torch.from_numpy(batch))
            exact.update(batch.tolist())
            after = {key[1] for key in known(embedding, 300)}
            assert {n for n in set(batch.tolist()) - before if exact[n] >= sightings} <= after
            early += sum(exact[n] < sightings for n in after - before)
    assert early <= 15


@pytest.mark.parametrize("by", ["steps", "seconds"])
@pytest.mark.parametrize(("expire_after", "sweep_steps"), [(3, 1), (5, 7), (2, 150)])
def test_a_table_holds_rows_of_the_last_steps_that_they_may_rest_and_those_of_a_sweep(
    tmp_path, by, expire_after, sweep_steps
):
    now, each = 0, 4
    policy = RowPolicy(sweep_steps=sweep_steps, clock=lambda: now, **{f"expire_after_{by}": expire_after})
    embedding = make(tmp_path, "device", policy)
    optimizer, rng, used_at, held_S = sgd(embedding), np.random.default_rng(0), {}, []
    for now in range(expire_after + sweep_steps + 40):
        its = {each * now + n for n in range(each)} | {int(rng.integers(each * now + 1))}  # new ones, and an old one
        step(embedding, optimizer, ids(*sorted(its)))
        used_at |= dict.fromkeys(its, now)
        held = {id for _, id in known(embedding, up_to=each * (now + 1))}
        held_S.append(len(held))
        young = {id for id, at in used_at.items() if now - at <= expire_after}
        assert young <= held, "none leaves that has not expired"
        assert held <= {id for id, at in used_at.items() if now - at < expire_after + sweep_steps} | young
    mean = np.mean(held_S[expire_after + sweep_steps :])
    assert mean > each * (expire_after + sweep_steps // 2) * 0.9, "half of a sweep on average: docs/policies.md"
    embedding.evict()
    assert {id for _, id in known(embedding, up_to=each * (now + 1))} <= young


def test_by_chance_the_same_ids_get_a_row_again_and_after_a_load(tmp_path):
    policy = RowPolicy(admit=AdmitChance(0.3, seed=7))
    found = []
    for way in ("straight", "loaded"):
        embedding = make(tmp_path / way, "device", policy)
        for n in range(6):
            if way == "loaded" and n == 3:
                embedding.save_snapshot("three")
                embedding.close()
                embedding = make(tmp_path / way, "device", policy)
                embedding.load_snapshot("three")
            with torch.no_grad():
                embedding(torch.arange(200 * n, 200 * n + 250))
        found.append(known(embedding, 1300))
    assert found[0] == found[1] and 350 < len(found[0]) < 550


def test_what_is_imported_gets_a_row(tmp_path):
    embedding = make(tmp_path, "device", RowPolicy(admit=AdmitAfter(9)))
    oneemb.import_rows(embedding, [np.arange(5), np.full((5, DIM), 2.0, np.float32)])
    assert embedding.stats()["rows"] == 5 and embedding(ids(3, 7))[:, 0].tolist() == [2.0, 1.0]


def test_functions_that_admit_are_checked_before_anything_changes(tmp_path):
    wrong = [lambda table, its, counts: 1 / 0, lambda table, its, counts: counts]
    for n, (function, message) in enumerate(zip(wrong, ["raised ZeroDivisionError", "must give bool"], strict=True)):
        embedding = make(tmp_path / str(n), "device", RowPolicy(admit=AdmitWhere(function)))
        with pytest.raises(ValueError, match=f"admit= of table 0 {message}"):
            embedding(ids(1, 2))
        assert embedding.stats()["rows"] == 0 and embedding.store.hot.pinned == 0
    rule = AdmitWhere(lambda table, its, counts: np.ones(len(its), bool) if its[0] < 5 else 1 / 0)
    embedding = make(tmp_path / "expiring", "device", RowPolicy(expire_after_steps=2, sweep_steps=1, admit=rule))
    optimizer = sgd(embedding)
    for n in (1, 2, 2):
        step(embedding, optimizer, ids(n))
    for its, rows in [(ids(9), 2), (ids(2), 1)]:  # What has expired leaves with the next lookup that is made.
        with pytest.raises(ValueError, match="ZeroDivisionError") if rows == 2 else contextlib.nullcontext():
            embedding(its)
        assert embedding.stats()["rows"] == rows


def test_sightings_are_in_copies_and_begin_anew_where_they_were_counted_otherwise(tmp_path):
    embedding = make(tmp_path / "first", "device", RowPolicy(admit=AdmitAfter(2)))
    embedding(ids(1, 2))
    copied = embedding.copy_to(tmp_path / "copy")
    embedding.save_snapshot("one sighting")
    embedding.clear()
    for one in (embedding, copied):
        one(ids(1))
    assert embedding.stats()["rows"] == 0 and copied.stats()["rows"] == 1
    embedding.close()
    for n, (admit, rows) in enumerate([(AdmitAfter(2), 1), (AdmitAfter(2, sketch_width=64), 0), (None, 1)]):
        shutil.copytree(tmp_path / "first", tmp_path / str(n))
        other = make(tmp_path / str(n), "device", RowPolicy(admit=admit))
        other.load_snapshot("one sighting")
        other(ids(1))
        assert other.stats()["rows"] == rows


def test_sightings_are_in_each_part_of_a_snapshot_that_was_resharded(tmp_path):
    embedding = make(tmp_path / "one", "device", RowPolicy(LFU(), admit=AdmitAfter(3)))
    embedding(ids(1, 1, 2, 3, 3, 3))
    embedding.save_snapshot("all")
    embedding.close()
    reshard(tmp_path / "one", "all", 3, tmp_path / "three")
    reshard(tmp_path / "three", "all", 1, tmp_path / "again")
    for folder in ("three", "again"):
        other = make(tmp_path / folder, "device", RowPolicy(LFU(), admit=AdmitAfter(3)))
        other.load_snapshot("all")
        other(ids(1, 2))
        assert known(other) == {(0, 1), (0, 3)}
        other.close()


# ---- what stays ------------------------------------------------------------------------------------------------------


def test_rows_that_a_lookup_holds_stay(tmp_path):
    embedding = make(tmp_path, "ssd", RowPolicy(LRU()), capacity=6)
    optimizer = sgd(embedding)
    held = embedding(ids(1, 2, 3))
    step(embedding, optimizer, ids(4, 5, 6))
    optimizer.zero_grad()
    rows = embedding(ids(7, 8))  # Two of 4, 5 and 6 leave.
    assert {(0, n) for n in (1, 2, 3, 7, 8)} < known(embedding)
    with pytest.raises(oneemb.StorageError, match="2 of the rows to erase are in use by a lookup"):
        embedding.erase(ids(2, 3, 9))
    with pytest.raises(oneemb.StoreFullError, match="of the store is 6 rows; 6 are kept, 5 of them are in use.*or use"):
        embedding(ids(10, 11))
    (held.sum() + rows.sum()).backward()
    optimizer.step()
    assert embedding.eval()(ids(1, 7))[:, 0].tolist() == [1 - RATE, 1 - RATE]


def test_a_step_of_more_rows_than_fit_changes_nothing(tmp_path):
    embedding = make(tmp_path, "device", RowPolicy(LRU()), capacity=6)
    optimizer = sgd(embedding)
    step(embedding, optimizer, ids(1, 2, 3))
    before = everything(embedding)
    with pytest.raises(oneemb.StoreFullError, match="3 are kept, 0 of them are in use.*capacity of at least 7"):
        embedding(torch.arange(10, 17))
    assert everything(embedding) == before
    step(embedding, optimizer, torch.arange(10, 16))
    assert known(embedding) == {(0, n) for n in range(10, 16)}


def test_a_lookup_that_does_not_fit_in_the_cache_lets_no_row_leave(tmp_path):
    embedding = make(tmp_path, "ssd", RowPolicy(LRU()), capacity=400)
    optimizer = sgd(embedding)
    for n in range(0, 400, 20):
        step(embedding, optimizer, torch.arange(n, n + 20))
    before, shard = everything(embedding), embedding.store.engine.usage.clock.shard
    with pytest.raises(oneemb.StoreFullError, match="the device tier has .* slots"):
        embedding(torch.arange(1000, 1390))
    assert everything(embedding) == before and embedding.store.engine.usage.clock.shard == shard
    assert embedding.store.hot.pinned == 0
    step(embedding, optimizer, ids(1000))
    assert embedding.stats()["rows"] < 400


def test_what_was_prefetched_gives_way_before_a_lookup_is_refused(tmp_path):
    embedding = make(tmp_path, "ssd", RowPolicy(LRU()), capacity=400)
    optimizer = sgd(embedding)
    for n in range(0, 400, 20):
        step(embedding, optimizer, torch.arange(n, n + 20))
    keys = internals.keys_of(embedding, Lookup(torch.arange(300, 340))).unique
    held = embedding.store.prefetch(keys)
    assert held.held
    step(embedding, optimizer, torch.arange(1000, 1040))
    assert not held.held


@pytest.mark.parametrize("tables, capacity", [(1, None), (4, None), (4, 4000)], ids=str)
def test_rounds_of_a_part_of_the_rows_let_the_oldest_leave(monkeypatch, tables, capacity):
    """An eighth of the rows is looked at in a round; each table gets as many new ids as the others, in turns."""
    limit, kept = 1000, {}
    monkeypatch.setattr(oneemb.storage.policies.evictions, "_ROUND_ROWS", limit * tables // 8)
    policy = RowPolicy(LRU(), limit if capacity is None else None)
    usage = UsageIndex([policy] * tables, capacity, Threads(1))
    for n in range(4 * limit):
        table_U = np.full(4, n % tables, np.int32)
        id_U = np.arange(4) + 4 * n
        place_U = usage.find(table_U, id_U)
        for gone in Evictions(usage, Threads(1)).make_room(table_U[place_U < 0], [place_U]):
            for key in zip(gone.table_V.tolist(), gone.id_V.tolist(), strict=True):
                del kept[key]
            usage.forget(*gone)
        usage.use(table_U, id_U, place_U, np.ones(4, np.int64), n, 0)
        kept |= {(n % tables, its): n for its in id_U.tolist()}
        if capacity is None:
            assert sum(key[0] == n % tables for key in kept) <= limit
        assert len(kept) == len(usage) <= limit * tables
    ages = 4 * limit - np.array(list(kept.values()))
    assert np.all(ages < 1.3 * limit * tables / 4), "each of the rows that are kept is among the youngest, nearly"
    assert len(kept) > 0.9 * limit * tables


@pytest.mark.parametrize("capacity", [None, 300], ids=str)
def test_many_rounds_for_one_lookup_let_no_row_leave_twice(monkeypatch, capacity):
    monkeypatch.setattr(oneemb.storage.policies.evictions, "_ROUND_ROWS", 4)
    monkeypatch.setattr(
        oneemb.storage.policies.evictions, "_ROUND_SHARE", 1.0
    )  # so few shards a round that they come round again
    usage, kept = UsageIndex([RowPolicy(LRU(), 300 if capacity is None else None)], capacity, Threads(1)), set()
    for n in range(12):
        id_U = np.arange(n * 250, n * 250 + 250)
        table_U, place_U = np.zeros(250, np.int32), np.full(250, -1)
        for gone in Evictions(usage, Threads(1)).make_room(table_U, [place_U]):
            leaving = set(gone.id_V.tolist())
            assert len(leaving) == len(gone.id_V) and leaving <= kept
            kept -= leaving
            usage.forget(*gone)
        usage.use(table_U, id_U, place_U, np.ones(250, np.int64), n, 0)
        kept |= set(id_U.tolist())
        assert len(kept) == len(usage) <= 300


def test_a_table_that_was_loaded_with_too_many_rows_is_brought_to_its_capacity(tmp_path):
    embedding = make(tmp_path, "device", RowPolicy(LRU()), tables=2)
    for n in range(50):
        embedding(ids(n), ids(0))
    embedding.save_snapshot("all")
    embedding.close()
    embedding = make(tmp_path, "device", [RowPolicy(LRU(), 20), RowPolicy()], tables=2)
    embedding.load_snapshot("all")
    assert embedding.stats()["rows"] == 50
    assert embedding.evict() == {"capacity": 30} and embedding.evict() == {}
    assert known(embedding, tables=2) == {(0, n) for n in range(30, 50)}
    embedding.close()
    embedding = make(tmp_path, "device", RowPolicy(LRU(), 45, expire_where=lambda t, its, _: its < 10), tables=2)
    embedding.load_snapshot("all")
    assert embedding.evict() == {"where": 10}, "fewer than fit are left then"


def test_an_error_of_a_users_function_changes_nothing(tmp_path):
    clock, wrong = Clock(), [KeyError("typo")]

    def where(table, its, weights):
        raise wrong[0]

    def now():
        if isinstance(clock.now, Exception):
            raise clock.now
        return clock.now

    policy = RowPolicy(LRU(), expire_after_seconds=5, expire_where=where, clock=now)
    embedding = make(tmp_path, "device", policy, capacity=10)
    optimizer = sgd(embedding)
    step(embedding, optimizer, ids(1, 2))
    with pytest.raises(ValueError, match=r"expire_where of table 0 raised KeyError\('typo'\); no row has left"):
        embedding.evict()
    for bad in (RuntimeError("no clock"), float("nan"), "later"):
        before, clock.now = clock.now, bad
        with pytest.raises(ValueError, match="the clock of a policy must give seconds"):
            embedding(ids(1, 3))
        clock.now = before
    assert known(embedding) == {(0, 1), (0, 2)} and embedding.scores(ids(1, 2, 3)).tolist() == [1, 1, 0]
    step(embedding, optimizer, ids(1, 3))
    assert embedding.erase(ids(1, 3)) == 2
    clock.now += 1e12  # as a clock in nanoseconds would
    step(embedding, optimizer, ids(4))
    embedding.save_snapshot("late")
    embedding.load_snapshot("late")


def test_an_erased_row_begins_anew_and_snapshots_keep_theirs(tmp_path):
    for store in STORES:
        embedding = make(tmp_path / store, store, None)
        optimizer = torch.optim.Adagrad(embedding.parameters(), lr=RATE)
        step(embedding, optimizer, ids(1, 2, 3))
        embedding.save_snapshot("before")
        assert embedding.erase(ids(2, 2, 7)) == 1 and embedding.erase(ids(2)) == 0 and embedding.erase(ids()) == 0
        assert embedding.stats()["rows"] == 2
        step(embedding, optimizer, ids(2))  # Adagrad's state is that of a new row, too.
        assert embedding.eval()(ids(1, 2))[:, 0].tolist() == [0.75, 0.75]
        embedding.load_snapshot("before")
        assert embedding.stats()["rows"] == 3
        embedding.close()


def test_averages_of_erased_rows_are_erased(tmp_path):
    embedding = make(tmp_path / "rows", "device", None)
    averaged = oneemb.AveragedEmbedding(embedding, tmp_path / "averages", decay=0.5)
    optimizer = sgd(embedding)
    averaged.update_rows()
    step(embedding, optimizer, ids(1, 2))
    averaged.update_rows()
    assert averaged(ids(1, 2))[:, 0].tolist() == [0.875, 0.875]
    embedding.erase(ids(1))
    assert averaged(ids(1, 2))[:, 0].tolist() == [1.0, 0.875]
    with pytest.raises(ValueError, match="must have no policy, since a policy evicts rows"):
        oneemb.AveragedEmbedding(make(tmp_path / "others", "device", RowPolicy(LRU())), tmp_path / "more")


# ---- in and out ------------------------------------------------------------------------------------------------------


def trained(path, store, policy, optimizer=torch.optim.Adam):
    embedding = make(path, store, policy)
    made = optimizer(embedding.parameters(), lr=0.1)
    for n in (1, 2, 2):
        step(embedding, made, torch.arange(10 * n, 10 * n + 20))
    return embedding, made


@pytest.mark.parametrize("store", ["device", "ssd"])
@pytest.mark.parametrize("kinds", [(None, LFU()), (LFU(), None)], ids=str)
def test_a_snapshot_is_loaded_with_a_policy_or_without(tmp_path, kinds, store):
    was, now = (None if kind is None else RowPolicy(kind) for kind in kinds)
    first, _ = trained(tmp_path / "rows", store, was)
    first.save_snapshot("all")
    rows = first.eval()(torch.arange(50)).clone()
    first.train().close()
    second = make(tmp_path / "rows", store, now)
    second.load_snapshot("all")
    assert torch.equal(second.eval()(torch.arange(50)), rows)
    optimizer = torch.optim.Adam(second.parameters(), lr=0.1)
    straight, other = trained(tmp_path / "straight", store, None)
    for embedding, its in [(second.train(), optimizer), (straight, other)]:
        step(embedding, its, torch.arange(15, 35))
    assert torch.equal(second.eval()(torch.arange(50)), straight.eval()(torch.arange(50)))
    if now is not None:  # They count as used once, and in the last lookup again.
        assert second.scores(ids(12, 20, 5)).tolist() == [1, 2, 0]


@pytest.mark.parametrize("store", ["device", "ssd"])
def test_rows_that_lack_scores_have_them_from_the_load_on(tmp_path, store):
    first = make(tmp_path / "rows", store, None)
    optimizer = sgd(first)
    for n in range(20):
        step(first, optimizer, ids(n))
    first.save_snapshot("plain")
    first.close()
    policy = RowPolicy(LFU(), expire_after_steps=4, sweep_steps=1)
    second = make(tmp_path / "rows", store, policy)
    second.load_snapshot("plain")
    second.save_snapshot("scored")
    second.load_snapshot("scored")
    assert second.scores(ids(0, 19, 20)).tolist() == [1, 1, 0]
    optimizer = sgd(second)
    for _ in range(4):
        step(second, optimizer, ids(3))
    assert second.stats()["rows"] == 20 and second.scores(ids(3)).tolist() == [5]
    for _ in range(2):
        step(second, optimizer, ids(3))
    assert known(second) == {(0, 3)}
    second.save_snapshot("one")
    second.close()
    other = make(tmp_path / "rows", store, RowPolicy(LFU(half_life=3.0)))
    with pytest.raises(oneemb.StorageError, match="scores of other rules than this embedding's evict="):
        other.load_snapshot("one")


@pytest.mark.parametrize("store", STORES)
def test_scores_stay_where_rows_get_state_or_are_copied(tmp_path, store):
    embedding = make(tmp_path / "rows", store, RowPolicy(LFU(), capacity=4))
    for _ in range(3):
        embedding(ids(1, 2, 2))
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
    step(embedding, optimizer, ids(2))
    expected = [3, 7, 0]
    assert embedding.scores(ids(1, 2, 3)).tolist() == expected
    copied = embedding.copy_to(tmp_path / "copy")
    assert copied.scores(ids(1, 2, 3)).tolist() == expected and copied.policies == embedding.policies
    weights = embedding.copy_to(tmp_path / "weights", weights_only=True)
    assert weights.scores(ids(1, 2, 3)).tolist() == expected
    embedding.detach_optimizer("drop")
    torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    assert embedding.scores(ids(1, 2, 3)).tolist() == expected
    embedding(ids(4, 4, 4, 4, 5, 5))
    embedding(ids(6))
    embedding(ids(7, 8))
    assert known(embedding) == {(0, 2), (0, 4), (0, 7), (0, 8)} and embedding.scores(ids(2, 7)).tolist() == [7, 1]


def test_an_embedding_that_is_closed_holds_no_slab(tmp_path):
    embedding = make(tmp_path / "rows", "device", RowPolicy(LRU()))
    embedding(ids(1))
    slab = weakref.ref(embedding.store.row_SW.base)
    embedding.close()
    gc.collect()
    assert slab() is None


def test_rows_are_exported_and_imported_without_scores(tmp_path):
    first, _ = trained(tmp_path / "first", "ssd", RowPolicy(LFU()))
    oneemb.export_rows(first, tmp_path / "rows.npz")
    second = make(tmp_path / "second", "device", RowPolicy(LFU()))
    torch.optim.Adam(second.parameters(), lr=0.1)
    oneemb.import_rows(second, tmp_path / "rows.npz")
    assert torch.equal(second.eval()(torch.arange(50)), first.eval()(torch.arange(50)))
    assert second.scores(ids(10, 25, 5)).tolist() == [1, 1, 0]
    full = make(tmp_path / "full", "device", RowPolicy(LFU()), capacity=7)
    oneemb.import_rows(full, tmp_path / "rows.npz")
    assert full.stats()["rows"] == 7


@pytest.mark.parametrize("policies", [(LFU(), None), (LFU(), LFU()), (None, LFU())], ids=str)
def test_rows_are_exported_and_imported_with_their_state(tmp_path, policies):
    was, now = (None if evict is None else RowPolicy(evict) for evict in policies)
    first, made = trained(tmp_path / "first", "ssd", was)
    oneemb.export_rows(first, tmp_path / "rows.npz", with_state=True)
    second = make(tmp_path / "second", "device", now)
    other = torch.optim.Adam(second.parameters(), lr=0.1)
    step(second, other, ids(100))
    second.detach_optimizer("keep")
    oneemb.import_rows(second, tmp_path / "rows.npz", with_state=True)
    first.erase(ids(*range(35, 50)))
    rows = [{n: row for (_, n), row in everything(embedding).items()} for embedding in (first, second)]
    for n in rows[0]:
        ours, theirs = (np.frombuffer(its[n], np.float32) for its in rows)
        np.testing.assert_array_equal(ours[:DIM], theirs[:DIM])
        np.testing.assert_array_equal(ours[-2 * DIM :], theirs[-2 * DIM :])
    again = [f"{tmp_path}/again", "all"]
    oneemb.import_rows(again[0], tmp_path / "rows.npz", with_state=True, snapshot=again[1])
    third = make(again[0], "ssd", now)
    third.load_snapshot("all")
    assert torch.equal(third.eval()(torch.arange(30)), first.eval()(torch.arange(30)))


def test_tools_read_snapshots_of_a_policy(tmp_path):
    first, _ = trained(tmp_path / "rows", "ssd", RowPolicy(LFU()))
    first.save_snapshot("all")
    rows = first.eval()(torch.arange(10, 30)).detach()
    first.close()
    for words in (["check"], ["inspect"], ["compact"]):
        done = CliRunner().invoke(command, [*words, str(tmp_path / "rows")])
        assert done.exit_code == 0, done.output
    with oneemb.make_persistent_table_reader([str(tmp_path / "rows")], "all", torch.int64, torch.float32) as reader:
        found = {key: row for keys, values in reader for key, row in zip(keys.tolist(), values, strict=True)}
    assert torch.equal(torch.from_numpy(np.stack([found[n] for n in range(10, 30)]))[:, :DIM], rows)


@pytest.mark.parametrize("evict", [LFU(), LFU(half_life=10.0), None], ids=str)
def test_inspect_shows_how_scores_ages_and_norms_are_spread(tmp_path, evict):
    embedding = make(tmp_path, "ssd", None if evict is None else RowPolicy(evict), tables=2)
    optimizer = sgd(embedding)
    for n in range(20):
        step(embedding, optimizer, torch.arange(n + 1).tile(2), ids(0, 1).repeat_interleave(n + 1))
    embedding.save_snapshot("all")
    tables = embedding.store.engine.usage.rules() if evict else None
    embedding.close()
    done = CliRunner().invoke(command, ["inspect", "--histogram", "all", "--json", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)["tables"]
    weights = 1 - RATE * np.arange(1, 21)  # of ids 19 to 0
    expected = {"norm": 2 * np.abs(weights)}
    if evict is not None:
        expected |= {"age": np.ones(20), "score": np.arange(1, 21)}
        if evict.half_life is not None:
            uses = [sum(2 ** ((at - 19) / 10) for at in range(first, 20)) for first in range(20)]
            expected["score"] = np.log2(uses) + 19 / 10
        assert [rule[0] for rule in tables]
    assert list(found) == ["0", "1"] and found["0"] == found["1"] and found["0"].keys() == expected.keys()
    for name, numbers in expected.items():
        rows, edges = np.histogram(numbers, 10)
        np.testing.assert_allclose(found["0"][name]["edges"], edges, rtol=1e-6)
        assert sum(found["0"][name]["rows"]) == 20 and (
            evict == LFU(half_life=10.0) or found["0"][name]["rows"] == rows.tolist()
        )
    done = CliRunner().invoke(command, ["inspect", "--histogram", "all", str(tmp_path)])
    assert done.exit_code == 0 and "table 1, norm:" in done.output and "####" in done.output
    done = CliRunner().invoke(command, ["inspect", "--histogram", "none", str(tmp_path)])
    assert done.exit_code == 2 and "there are: 'all'" in done.output


@pytest.mark.parametrize(
    ("how", "evict", "store"),
    covering(
        ["dropped", "weights only", "copied", "copied weights", "no scores"],
        [LRU(), StepLRU(), LFU(half_life=5.0)],
        ["device", "ssd"],
    ),
    ids=str,
)
def test_where_steps_begin_anew_the_rows_that_leave_are_the_same(tmp_path, how, evict, store):
    policy = RowPolicy(evict, expire_after_steps=20, sweep_steps=1)
    embedding = make(tmp_path / "rows", store, policy if how != "no scores" else None, capacity=12)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
    for n in range(6):
        step(embedding, optimizer, ids(n))
    for n in (1, 3):
        step(embedding, optimizer, ids(n))
    if how == "dropped":
        embedding.detach_optimizer("drop")
    elif how in ("weights only", "no scores"):
        embedding.save_snapshot("all")
        embedding.close()
        embedding = make(tmp_path / "rows", store, policy, capacity=12)
        embedding.load_snapshot("all", weights_only=True)
    else:
        embedding = embedding.copy_to(tmp_path / "copy", weights_only=how == "copied weights")
    assert embedding.stats()["step"] == (8 if how == "copied" else 0)
    optimizer = sgd(embedding) if how != "copied" else torch.optim.Adam(embedding.parameters(), lr=0.1)
    for n in range(100, 110):
        step(embedding, optimizer, ids(n))
    # Rows without scores count as used at the load: as the first row of a step that is the same, or uses that are.
    later = range(100 if how != "no scores" or isinstance(evict, LRU) else 101, 110)
    assert {key for key in known(embedding, 200) if key[1] >= later.start} == {(0, n) for n in later}
    if how != "no scores":  # Of equal ones a hash says which.
        assert {key for key in known(embedding, 200) if key[1] < 100} == {(0, 1), (0, 3)}
    for _ in range(25):
        step(embedding, optimizer, ids(100))
    assert known(embedding, 200) == {(0, 100)}


def test_a_ledger_that_was_not_read_whole_is_none(tmp_path, monkeypatch):
    embedding, _ = trained(tmp_path, "ssd", RowPolicy(LFU()))
    embedding.save_snapshot("all")
    with monkeypatch.context() as patch:

        def stop(*_):
            raise KeyboardInterrupt

        patch.setattr(embedding.store.engine.usage, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            embedding.load_snapshot("all")
    with pytest.raises(oneemb.StorageError, match="load_snapshot"):
        embedding(ids(1))
    embedding.load_snapshot("all")
    assert embedding.scores(ids(12, 25)).tolist() == [1, 3]


@pytest.mark.parametrize("change", [{"lookups": -1}, {"lookups": "1"}, {"more": 1}, None], ids=str)
def test_what_no_ledger_says_is_an_error_before_rows_are_replaced(tmp_path, monkeypatch, change):
    embedding, _ = trained(tmp_path, "device", RowPolicy(LFU()))
    said = embedding.store.engine.usage.to_meta()["ledger"]
    with monkeypatch.context() as patch:
        patch.setattr(
            embedding.store.engine.usage, "to_meta", lambda: {"ledger": [] if change is None else {**said, **change}}
        )
        embedding.save_snapshot("bad")
    before = everything(embedding)
    with pytest.raises(oneemb.StorageError, match="'bad' has an invalid entry for the clock"):
        embedding.load_snapshot("bad")
    assert everything(embedding) == before and embedding.scores(ids(12)).tolist() == [1]


# ---- what users may say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: RowPolicy("lru"), TypeError, r"one of oneemb.policies, such as LRU\(\), got 'lru'"),
        (lambda: RowPolicy(LRU), TypeError, "such as LRU"),
        (lambda: RowPolicy(capacity=0), ValueError, "capacity must be an int from 1 to"),
        (lambda: RowPolicy(capacity_mb=0.5), ValueError, "capacity_mb must be an int from 1 to"),
        (lambda: RowPolicy(capacity=3, capacity_mb=3), ValueError, "a capacity or a capacity_mb, got both"),
        (lambda: RowPolicy(expire_after_steps=1.5), ValueError, "expire_after_steps must be an int"),
        (lambda: RowPolicy(expire_below_norm=-1), ValueError, "expire_below_norm must be a number above 0"),
        (lambda: RowPolicy(expire_where=3), TypeError, "expire_where must be a function"),
        (lambda: RowPolicy(sweep_steps=0), ValueError, "sweep_steps must be an int"),
        (lambda: RowPolicy(admit=3), TypeError, "admit must be one of oneemb.policies"),
        (lambda: AdmitAfter(0), ValueError, "sightings must be an int from 1"),
        (lambda: AdmitAfter(2, counters=0), ValueError, "counters must be an int from 1"),
        (lambda: AdmitAfter(2, sketch_width=-1), ValueError, "sketch_width must be an int from 1"),
        (lambda: AdmitChance(1.5), ValueError, "1 at most"),
        (lambda: AdmitChance(0.5, seed=-1), ValueError, "seed must be an int from 0"),
        (lambda: AdmitWhere(3), TypeError, "function must be a function"),
        (lambda: RowPolicy(capacity=2**50), ValueError, "capacity must be an int from 1 to 1099511627776"),
        (lambda: RowPolicy(sweep_weights=1), TypeError, "sweep_weights must be True or False"),
        (lambda: LFU(half_life=1e-300), ValueError, "half_life must be from 0.001"),
        (lambda: LFU(half_life=0), ValueError, "half_life must be a number above 0"),
        (lambda: LFU(half_life=10**400), ValueError, "half_life must be a number above 0"),
        (lambda: MixedLFU(new_power=40), ValueError, "from 0 to 31"),
        (lambda: GivenScore(new=-1), ValueError, "from 0 to 2"),
    ],
)
def test_policies_that_cannot_be_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_arguments_of_calls_are_checked(tmp_path):
    plain = make(tmp_path / "plain", "device", None)
    with pytest.raises(ValueError, match="no policy, so that its rows have no scores"):
        plain.scores(ids(1))
    embedding = make(tmp_path / "rows", "device", RowPolicy(GivenScore()), tables=2)
    embedding(ids(1, 2), ids(0, 1))
    with pytest.raises(TypeError, match="ids must be torch.int64 of any shape, got torch.int32"):
        embedding.erase(ids(1).int())
    with pytest.raises(ValueError, match="table must be an int from 0 to 1, got 2"):
        embedding.erase(ids(1), 2)
    with pytest.raises(TypeError, match=r"uint64 or int64 of the shape of ids, \[1\], got torch.float32 \[1\]"):
        embedding.set_scores(ids(1), torch.ones(1))
    with pytest.raises(ValueError, match="0 or more, got -1"):
        embedding.set_scores(ids(1), ids(-1))
    with pytest.raises(ValueError, match="ids must be distinct.*some ids repeat"):
        embedding.set_scores(ids(1, 1), ids(3, 4))
    embedding.set_epoch(3)
    for epoch in (1.5, True, "4", np.int64(4)):
        with pytest.raises(TypeError, match="an epoch must be an int"):
            embedding.set_epoch(epoch)
    for epoch in (2, 2**32):
        with pytest.raises(ValueError, match="not before the present one, 3"):
            embedding.set_epoch(epoch)
    with pytest.raises(ValueError, match="one for each of 2, got 1"):
        make(tmp_path / "a", "device", [RowPolicy()], tables=2)
    with pytest.raises(TypeError, match="policy must be a oneemb.policies.RowPolicy"):
        make(tmp_path / "b", "device", [RowPolicy(), LRU()], tables=2)
    with pytest.raises(ValueError, match="must have the same evict="):
        make(tmp_path / "c", "device", [RowPolicy(LRU()), RowPolicy(LFU())], tables=2, capacity=10)
    with pytest.raises(ValueError, match="must have the same clock="):
        make(tmp_path / "d", "device", [RowPolicy(expire_after_seconds=1, clock=Clock()) for _ in "ab"], tables=2)
    decayed = make(tmp_path / "e", "device", RowPolicy(LFU(half_life=3.0)))
    decayed(ids(1))
    with pytest.raises(ValueError, match="bits of finite float64"):
        decayed.set_scores(ids(1), ids(2**63 - 1))
    with pytest.raises(ValueError, match="bits of finite float64"):
        decayed.set_scores(ids(1), torch.from_numpy(np.array([-1.5]).view(np.uint64)))
    great = torch.from_numpy(np.array([1e308]).view(np.uint64))
    decayed.set_scores(ids(1), great)
    decayed(ids(1))
    assert torch.equal(decayed.scores(ids(1)), great)


def test_rows_leave_by_what_a_function_says(tmp_path):
    embedding = make(tmp_path, "ssd", RowPolicy(expire_where=lambda table, its, weights: its % 2 == 1))
    optimizer = sgd(embedding)
    step(embedding, optimizer, torch.arange(10))
    optimizer.zero_grad()
    held = embedding(ids(3))
    assert embedding.evict() == {"where": 4}
    assert known(embedding) == {(0, n) for n in (0, 2, 3, 4, 6, 8)}
    held.sum().backward()
    optimizer.step()
    assert embedding.evict() == {"where": 1} and embedding.evict() == {}
    wrong = make(tmp_path / "wrong", "device", RowPolicy(expire_where=lambda table, its, weights: its))
    wrong(ids(1, 2))
    with pytest.raises(ValueError, match=r"bool \[2\], one for each row, got int64 \[2\]"):
        wrong.evict()
    assert wrong.stats()["rows"] == 2


def test_a_snapshot_asks_the_functions_of_the_tables_that_it_is_to_evict_from(tmp_path):
    asked = []
    policies = [
        RowPolicy(expire_where=lambda t, its, _: bool(asked.append(t)) | (its == 1), evict_at_snapshot=table == 0)
        for table in range(2)
    ]
    embedding = make(tmp_path, "ssd", policies, tables=2)
    embedding(ids(1, 2, 1, 2), ids(0, 0, 1, 1))
    embedding.save_snapshot("all")
    assert asked == [0] and known(embedding, tables=2) == {(0, 2), (1, 1), (1, 2)}


def test_a_row_that_leaves_for_two_reasons_is_counted_once(tmp_path):
    clock = Clock()
    embedding = make(tmp_path, "device", RowPolicy(expire_after_seconds=1, expire_below_norm=0.5, clock=clock))
    for _ in range(4):
        step(embedding, sgd(embedding) if embedding.optimizer is None else embedding.optimizer, ids(0))
    clock.now += 10
    assert embedding.evict() == {"expired": 1} == embedding.stats()["policy"]["left"]


def test_seconds_are_counted_while_there_is_a_job(tmp_path):
    clock = Clock()
    policy = RowPolicy(expire_after_seconds=10, sweep_steps=1, clock=clock)
    embedding = make(tmp_path, "device", policy)
    optimizer = sgd(embedding)
    step(embedding, optimizer, ids(1))
    clock.now += 8
    embedding.save_snapshot("eight")
    embedding.close()
    clock.now += 1e6  # The job stands still.
    embedding = make(tmp_path, "device", policy)
    embedding.load_snapshot("eight")
    optimizer = sgd(embedding)
    clock.now += 2
    step(embedding, optimizer, ids(2))
    assert known(embedding) == {(0, 1), (0, 2)}
    clock.now += 1
    step(embedding, optimizer, ids(2))
    assert known(embedding) == {(0, 2)}
