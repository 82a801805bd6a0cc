"""Tracebacks where IPython runs, as pytest filters them by the same rule: a local `__tracebackhide__`."""

import gc
import signal
import sys
import types

import pytest
import torch

import oneemb
from tests.support.models import make_embedding


@pytest.fixture(params=[True, False], ids=["in IPython", "elsewhere"])
def ipython(request, monkeypatch):
    if request.param:
        monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    else:
        monkeypatch.delitem(sys.modules, "IPython", raising=False)
    return request.param


class Model(torch.nn.Module):
    def __init__(self, path):
        super().__init__()
        self.items = make_embedding(path)
        self.stop_in_model = False

    def forward(self, ids):
        rows = self.items(ids)
        if self.stop_in_model:
            signal.raise_signal(signal.SIGINT)
        return rows.sum()


class Train(oneemb.TrainGraph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def build(self, ids):
        loss = self.model(ids)
        loss.backward()
        return loss


def eager(model, ids):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids).backward()
    optimizer.step()


def in_graph(model, ids):
    Train(model)(ids)


def in_loop(model, ids):
    for _ in Train(model).run([ids] * 3):
        pass


def in_loop_without_thread(model, ids):
    for _ in Train(model).run([ids] * 3, prefetch_depth=0):
        pass


def interrupted(job, model, kind=KeyboardInterrupt, ids=None):
    with pytest.raises(kind) as caught:
        job(model, torch.arange(5) if ids is None else ids)
    frames = [entry.frame for entry in caught.traceback]
    shown = [entry.frame for entry in caught.traceback.filter(caught)]
    assert all(frame.f_locals for frame in frames if frame.code.name == "look_up")  # `%debug` has their variables.
    return len(frames), [frame.code.name for frame in shown if str(frame.code.path) == __file__], [
        str(frame.code.path) for frame in shown if str(frame.code.path) != __file__
    ]  # fmt: skip


LOOPS = {eager: [], in_graph: ["build"], in_loop: ["build"], in_loop_without_thread: ["build"]}


@pytest.mark.parametrize("job", LOOPS)
def test_ctrl_c_shows_the_users_frames_alone(tmp_path, ipython, job):
    model = Model(tmp_path)
    model.stop_in_model = True
    frames, users, others = interrupted(job, model)
    assert users == ["interrupted", job.__name__, *LOOPS[job], "forward"]
    if ipython and job is not eager:
        assert others == [] and frames > 10
    else:
        assert any("torch" in path for path in others)
        assert (job is eager) == (not any("oneemb" in path for path in others))


@pytest.mark.parametrize("job", LOOPS)
def test_an_error_shows_the_users_frames_alone(tmp_path, ipython, job):
    _, users, others = interrupted(job, Model(tmp_path), TypeError, torch.ones(5))
    assert users == ["interrupted", job.__name__, *LOOPS[job], "forward"]
    ours = [path for path in others if "/graph/" in path or "/embeddings/" in path or "/training/" in path]
    assert bool(ours) != ipython


@pytest.mark.parametrize("job", LOOPS)
def test_ctrl_c_that_waited_for_the_end_of_a_call_shows_it_too(tmp_path, monkeypatch, ipython, job):
    model = Model(tmp_path)
    store = model.items.store
    acquire = store.acquire_locked

    def stopped(*args, **kwargs):
        found = acquire(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)  # Deferred until the store lock is released.
        return found

    monkeypatch.setattr(store, "acquire_locked", stopped)
    _, users, others = interrupted(job, model)
    assert users[:2] == ["interrupted", job.__name__] and users[-1] == "forward"
    ours = [path for path in others if "/storage/" in path or "/graph/" in path or "/embeddings/" in path]
    assert bool(ours) != ipython
    monkeypatch.undo()
    gc.collect()  # The error and its frames refer to each other.
    assert model.items.stats()["device"]["pinned"] == 0
    eager(model, torch.arange(3))
