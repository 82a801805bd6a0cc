"""Which rows tables keep, and which leave, against a model in plain Python."""

import copy
import shutil
import tempfile
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import oneemb
import oneemb.embedding
from oneemb.kernels.score_rows import ties_of
from oneemb.kernels.threads import Threads
from oneemb.policies import LFU, LRU, EpochLFU, EpochLRU, GivenScore, MixedLFU, RowPolicy, StepLRU

DIM, RATE, KIB = 4, 0.25, 1024
STORES = {
    "device": dict(cache_bytes=None, host_bytes=0),
    "host": dict(cache_bytes=4 * KIB, host_bytes=None),
    "ssd": dict(cache_bytes=4 * KIB, host_bytes=0),
    "ssd, host cache": dict(cache_bytes=4 * KIB, host_bytes=8 * KIB),
}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def make(path, store, policy, *, tables=1, capacity=None, padding_idx=None, threads=2):
    """An embedding whose rows begin with ones, in a store of this kind with small caches."""
    options = oneemb.make_device_mem_store_options(path, capacity=capacity, physical_block_size=512)
    plan = oneemb.embedding.store_plan
    oneemb.embedding.store_plan = lambda *its: replace(plan(*its), **STORES[store])
    try:
        return oneemb.MultiTableEmbedding(
            "rows", DIM, torch.float32, torch.int64, [oneemb.make_table()] * tables, options,
            oneemb.make_constant_initializer(1.0), padding_idx, num_threads=threads, policy=policy,
        )  # fmt: skip
    finally:
        oneemb.embedding.store_plan = plan


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
        _, there_U = embedding.store.scores(table_U, id_U)
        found |= {(table, n) for n in np.flatnonzero(there_U).tolist()}
    assert len(found) == embedding.stats()["rows"]
    return found


def tie(key):
    return int(ties_of(np.array([key[0]], np.int32), np.array([key[1]]), threads=Threads(1))[0])


class Full(Exception):
    pass


class Model:
    """What an embedding with these policies does, row by row."""

    def __init__(self, policies, capacity):
        self.policies, self.capacity = policies, capacity
        self.rows = {}  # key -> [weight, score, step, second]
        self.step = self.lookups = self.epoch = self.swept = 0

    def expired(self, key, second):
        policy, (_, _, at, moment) = self.policies[key[0]], self.rows[key]
        steps, seconds = policy.expire_after_steps, policy.expire_after_seconds
        return (steps is not None and self.step - at > steps) or (seconds is not None and second - moment > seconds)

    def evict(self, second):
        gone = {key for key in self.rows if self.expired(key, second)}
        small = {
            key for key, its in self.rows.items()
            if key not in gone and (least := self.policies[key[0]].expire_below_norm) and 2 * abs(its[0]) < least
        }  # fmt: skip
        for key in gone | small:
            del self.rows[key]
        return {name: len(keys) for name, keys in [("expired", gone), ("norm", small)] if keys}

    def choose(self, table, limit, new, used, leaving):
        scope = [key for key in self.rows if key not in leaving and table in (None, key[0])]
        excess = len(scope) + new - limit
        if excess <= 0:
            return set()
        free = [key for key in scope if key not in used]
        if self.policies[table or 0].evict is None or len(free) < excess:
            raise Full
        count = max(excess, len(free) // 32)
        return set(sorted(free, key=lambda key: (self.rows[key][1], tie(key)))[:count])

    def use(self, uses, second):
        if self.step > self.swept and any(
            policy.expire_after_steps or policy.expire_after_seconds for policy in self.policies
        ):
            self.swept = self.step
            for key in [key for key in self.rows if key not in uses and self.expired(key, second)]:
                del self.rows[key]
        new, leaving = [key for key in uses if key not in self.rows], set()
        for t, policy in enumerate(self.policies):
            of_table = sum(key[0] == t for key in new)
            if policy.capacity is not None and of_table:
                leaving |= self.choose(t, policy.capacity, of_table, uses, leaving)
        if self.capacity is not None and new:
            leaving |= self.choose(None, self.capacity, len(new), uses, leaving)
        for key in leaving:
            del self.rows[key]
        self.lookups += 1
        for key, count in uses.items():
            before = self.rows.get(key)
            weight = 1.0 if before is None else before[0]
            self.rows[key] = [weight, self.score(key, before, count), self.step, second]

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
            self.rows[key][0] -= RATE * count
        self.step += 1


EVICTIONS = [None, LRU(), StepLRU(), LFU(), EpochLRU(), EpochLFU(), GivenScore(7), GivenScore(3, on_use=True)]
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
    )
    def begin(self, store, evict, limits, capacity, steps, seconds, norm):
        self.clock = Clock()
        self.policies = [
            RowPolicy(
                evict, limit, expire_after_steps=steps, expire_after_seconds=seconds, expire_below_norm=norm,
                sweep_steps=1, clock=self.clock,
            )
            for limit in limits
        ]  # fmt: skip
        self.store, self.capacity, self.folder = store, capacity, tempfile.mkdtemp()
        self.model, self.saved, self.began = Model(self.policies, capacity), {}, self.clock.now
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
        table_ids, its = (torch.tensor(column) for column in zip(*keys, strict=True))
        uses = Counter(keys)
        held = self.embedding.store.prefetch(self.embedding.keys_of(its, table_ids, None, None, "sum").unique)
        if not prefetch:
            self.embedding.store.unprefetch(held)
        self.guarded(
            lambda: step(self.embedding, self.optimizer, its, table_ids), lambda: self.model.train(uses, self.second)
        )
        self.embedding.store.unprefetch(held)

    @rule(keys=KEYS)
    def look(self, keys):
        """In training mode, without a gradient: it is a use."""
        table_ids, its = (torch.tensor(column) for column in zip(*keys, strict=True))
        with torch.no_grad():
            self.guarded(
                lambda: self.embedding(its, table_ids), lambda: self.model.use(Counter(keys), self.second)
            )

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
        self.embedding.save_snapshot(name, overwrite=True)
        self.saved[name] = copy.deepcopy(self.model), self.second

    @precondition(lambda self: self.saved)
    @rule(reopen=st.booleans(), data=st.data())
    def load(self, reopen, data):
        name = data.draw(st.sampled_from(sorted(self.saved)))
        if reopen:
            with pytest.warns(UserWarning, match="starts empty"):
                self.open()
        self.embedding.load_snapshot(name)
        model, second = self.saved[name]
        self.model, self.began = copy.deepcopy(model), self.clock.now - second

    @invariant()
    def same(self):
        if not hasattr(self, "model"):
            return
        embedding, model = self.embedding, self.model
        assert known(embedding, 40, 2) == set(model.rows)
        embedding.eval()
        for table in range(2):
            rows = embedding(torch.arange(40), torch.full((40,), table))
            assert rows[:, 0].tolist() == [model.rows.get((table, n), [1.0])[0] for n in range(40)]
            assert bool((rows == rows[:, :1]).all())
            scores = embedding.scores(torch.arange(40), table).tolist()
            assert scores == [model.rows.get((table, n), [0, 0])[1] for n in range(40)]
        embedding.train()

    def teardown(self):
        if getattr(self, "embedding", None) is not None:
            self.embedding.close()
            shutil.rmtree(self.folder, ignore_errors=True)


Jobs.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestJobs = Jobs.TestCase
