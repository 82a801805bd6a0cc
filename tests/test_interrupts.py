"""Ctrl-C at any line: a call has done all or nothing, and whoever goes on ends with the numbers of a run without it.

What cannot be held back (an exception that another thread puts into a line) may break a store, which then says so and
is mended by a load; a value is never wrong.
"""

import copy
import gc

import numpy as np
import pytest
import torch

import oneemb
from oneemb.storage.errors import BrokenStoreError
from tests.support.interrupts import WAYS, count_lines, each_line, interrupted, some_lines
from tests.support.keys import distinct
from tests.support.models import make_embedding
from tests.support.pairwise import covering

IDS = 300
BATCHES = [torch.from_numpy(np.random.default_rng(t).integers(0, IDS, (40, 2))) for t in range(7)]
STOPPED = 4  # the batch whose step is stopped
STORES = {
    "device": lambda path: oneemb.make_device_mem_store_options(path),
    "ssd": lambda path: oneemb.make_cached_ssd_store_options(1, path),
}


class Graph(oneemb.TrainGraph):
    def __init__(self, model):
        super().__init__()
        self.embedding, self.dense = model.embedding, model.dense
        self.add_optimizer(model.torch_optimizer)

    def build(self, ids):
        loss = self.dense(self.embedding(ids).flatten(1)).square().sum()
        loss.backward()
        return loss


class Model:
    """An embedding of 1,024 weights and a dense layer, both with Adam's state: the cache of 1 MiB holds 84 rows."""

    def __init__(self, path, store, compiled=False):
        torch.manual_seed(0)
        self.embedding = oneemb.MultiTableEmbedding(
            "stopped", 1024, torch.float32, torch.int64, [oneemb.make_table()] * 2, STORES[store](str(path)),
            num_threads=2,
        )  # fmt: skip
        self.dense = torch.nn.Linear(2048, 1)
        parameters = [*self.embedding.parameters(), *self.dense.parameters()]
        self.torch_optimizer = torch.optim.Adam(parameters, lr=0.01)
        if compiled:
            self.graph = Graph(self)
            (self.optimizer,) = self.graph.optimizers
        else:
            self.graph = None
            self.optimizer = oneemb.Optimizer(self.torch_optimizer, [self.embedding])

    def step(self, ids):
        if self.graph is not None:
            self.graph(ids)
            assert self.graph.steps == self.embedding.stats()["step"]
            return
        self.dense(self.embedding(ids).flatten(1)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        """All rows, dense weights, and the steps made: known ids that hold their initial values are as unknown ones."""
        self.embedding.eval()
        try:
            rows = self.embedding(torch.arange(IDS)[:, None].expand(IDS, 2).contiguous()).detach().numpy().tobytes()
        finally:
            self.embedding.train()
        dense = [parameter.detach().numpy().tobytes() for parameter in self.dense.parameters()]
        return rows, dense, self.embedding.stats()["step"]

    def pinned(self):
        """Rows that nobody can release any more."""
        self.optimizer.zero_grad()
        gc.collect()
        self.embedding.store.release(self.embedding.store.acquire(distinct([], []))[0])
        return self.embedding.stats()["device"]["pinned"]


@pytest.fixture
def states(tmp_path, store):
    """The state after each step of a run that nobody stops."""
    model = Model(tmp_path / "reference", store)
    found = [model.state()]
    for ids in BATCHES:
        model.step(ids)
        found.append(model.state())
    model.embedding.close()
    return found


def check_steps(tmp_path, store, states, how, way, number, seed=0):
    model = Model(tmp_path / "rows", store, how == "graph")
    for ids in BATCHES[:STOPPED]:
        model.step(ids)
    model.embedding.save_snapshot("before")
    dense = copy.deepcopy((model.dense.state_dict(), model.optimizer.state_dict()))

    def go_back():
        model.optimizer.zero_grad()
        model.embedding.load_snapshot("before")
        model.dense.load_state_dict(dense[0])
        model.optimizer.load_state_dict(copy.deepcopy(dense[1]))
        if model.graph is not None:
            model.graph.steps = STOPPED

    go_back()

    def step():
        model.step(BATCHES[STOPPED])

    lines = each_line(step, way) if number is None else some_lines(count_lines(step, way), number, seed)
    done_before = done_after = broken = 0
    for at in lines:
        go_back()
        stopped, place = interrupted(step, at, way)
        if way == "raise" and model.graph is not None:  # what nothing holds back may come before the count
            model.graph.steps = model.embedding.store.step
        done = False
        try:
            assert torch.is_grad_enabled(), place
            model.optimizer.zero_grad()
            done = model.state() == states[STOPPED + 1]
            assert done or model.state() == states[STOPPED], place
            for ids in BATCHES[STOPPED + done :]:
                model.step(ids)
            assert model.state() == states[-1], place
            assert model.pinned() == 0, place
        except BrokenStoreError:
            assert way == "raise", place
            broken += 1
        done_before += stopped and not done
        done_after += stopped and done
    assert done_before and (way == "raise" or not broken)
    if number is None:  # Few lines may all lie before the moment that counts.
        assert (broken if way == "raise" else done_after) > 0
    go_back()
    assert model.state() == states[STOPPED] and model.pinned() == 0
    model.embedding.close()


@pytest.mark.parametrize(("store", "how", "way"), covering([*STORES], ["eager", "graph"], WAYS))
def test_a_step_that_is_stopped_is_done_or_not(tmp_path, store, states, how, way, seed):
    check_steps(tmp_path, store, states, how, way, 6, seed)


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_step_that_is_stopped_at_each_line_is_done_or_not(tmp_path, store, states, how, way):
    check_steps(tmp_path, store, states, how, way, None)


def check_snapshots(tmp_path, store, states, way, number, seed=0):
    """Saving, loading, state dicts, attaching an optimizer: stopped at a line and gone on from."""
    model = Model(tmp_path / "rows", store)
    embedding = model.embedding
    for ids in BATCHES[:2]:
        model.step(ids)
    embedding.save_snapshot("old")
    for ids in BATCHES[2:STOPPED]:
        model.step(ids)
    embedding.save_snapshot("new")
    embedding.save_delta("delta", "old")
    rows = {name: states[step][0] for name, step in (("old", 2), ("new", STOPPED))}

    def save():
        embedding.save_snapshot("saved", overwrite=True)

    def load():
        embedding.load_snapshot("old")

    def save_delta():
        embedding.save_delta("saved", "old", overwrite=True)

    def load_delta():
        embedding.load_snapshot("delta")

    def prepare(call):
        embedding.load_snapshot("new" if call is load else "old")
        for ids in BATCHES[2:STOPPED] if call is save_delta else ():
            model.step(ids)

    for call in (save, load, save_delta, load_delta):
        embedding.load_snapshot("new")
        embedding.save_snapshot("saved", overwrite=True)
        prepare(call)
        lines = each_line(call, way) if number is None else some_lines(count_lines(call, way), number, seed)
        for at in lines:
            embedding.load_snapshot("saved")
            was = model.state()[0]
            prepare(call)
            before = model.state()[0]
            _, place = interrupted(call, at, way)
            try:
                now = model.state()[0]
                assert now in ([before] if call in (save, save_delta) else rows.values()), place
                assert sorted(set(embedding.snapshots()) - {"saved"}) == ["delta", "new", "old"], place
                embedding.load_snapshot("saved")
                assert model.state()[0] in ((was, before) if call in (save, save_delta) else (was,)), place
                model.step(BATCHES[0])
            except BrokenStoreError:
                # A load may be stopped where that takes long: it says so.
                assert way == "raise" or call in (load, load_delta), place
            embedding.load_snapshot("new")
            assert model.state()[0] == rows["new"], place
    assert model.pinned() == 0
    embedding.close()


@pytest.mark.parametrize(("store", "way"), covering([*STORES], WAYS, strength=1))
def test_snapshots_that_are_stopped_are_there_or_not(tmp_path, store, states, way, seed):
    check_snapshots(tmp_path, store, states, way, 5, seed)


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("way", WAYS)
def test_snapshots_that_are_stopped_at_each_line_are_there_or_not(tmp_path, store, states, way):
    check_snapshots(tmp_path, store, states, way, None)


def test_an_optimizer_whose_adding_is_interrupted_is_added_or_not(tmp_path):
    class Graph(oneemb.TrainGraph):
        def __init__(self, n):
            super().__init__()
            self.embedding = make_embedding(tmp_path / f"rows{n}", num_threads=1)

        def build(self, ids):
            loss = self.embedding(ids).square().sum()
            loss.backward()
            return loss

    def add():
        graph.add_optimizer(torch.optim.SGD(graph.parameters(), lr=1.0))

    graph = Graph(0)
    lines = count_lines(add, "signal")
    for n, at in enumerate(some_lines(lines, 12), 1):
        graph.embedding.close()
        graph = Graph(n)
        _, place = interrupted(add, at, "signal")
        if not graph.optimizers:
            add()
        assert len(graph.optimizers) == 1, place
        graph(torch.tensor([[1]]))
        assert graph.steps == 1, place
    graph.embedding.close()
