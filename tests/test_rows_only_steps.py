"""An optimizer that trains rows alone: torch's own step has nothing to do, and is left out where no hook sees it."""

import functools
import threading

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import _ExperimentalConfig

import oneemb
from tests.support.models import make_embedding, rows_of

IDS = torch.tensor([[1], [2]])


def hooked(register):
    """A function that hooks an optimizer, and gives what counts the hook's calls and what removes it."""

    def watch(optimizer):
        calls = []
        handle = register(optimizer)(lambda one, *_: calls.append(1) if one is optimizer else None)
        return (lambda: len(calls)), handle.remove

    return watch


def of_a_scheduler(optimizer):
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer._opt_called = 0  # the mark that a scheduler has the optimizer's step leave

    def calls():
        made, optimizer._opt_called = calls.before + bool(optimizer._opt_called), 0
        calls.before = made
        return made

    calls.before = 0
    calls.scheduler = scheduler
    return calls, lambda: None


def of_the_object(optimizer):
    calls, step = [], optimizer.step
    optimizer.step = lambda *args: [calls.append(1), step(*args)]
    return (lambda: len(calls)), lambda: None


def of_the_class(optimizer):
    calls, step = [], torch.optim.SGD.step
    wrapped = functools.wraps(step)(lambda self, *args: [calls.append(1), step(self, *args)])
    torch.optim.SGD.step = wrapped
    return (lambda: len(calls)), lambda: setattr(torch.optim.SGD, "step", step)


def of_the_profiler(optimizer):
    profile = torch.profiler.profile().__enter__()
    labels = ("Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad")

    def remove():
        profile.__exit__(None, None, None)
        seen = [event.name for event in profile.events()]
        assert all(seen.count(label) == 3 for label in labels), seen

    return None, remove


WATCHED = {
    "a hook before": hooked(lambda optimizer: optimizer.register_step_pre_hook),
    "a hook after": hooked(lambda optimizer: optimizer.register_step_post_hook),
    "a hook before all": hooked(lambda optimizer: register_optimizer_step_pre_hook),
    "a hook after all": hooked(lambda optimizer: register_optimizer_step_post_hook),
    "a scheduler": of_a_scheduler,
    "the object": of_the_object,
    "the class": of_the_class,
    "the profiler": of_the_profiler,
}


def as_a_loop(embedding, optimizer):
    both = oneemb.Optimizer(optimizer, [embedding])

    def step():
        embedding(IDS).sum().backward()
        both.step()
        both.zero_grad()

    return step


def as_a_graph(embedding, optimizer):
    class Graph(oneemb.TrainGraph):
        def __init__(self):
            super().__init__()
            self.embedding = embedding
            self.add_optimizer(optimizer)

        def build(self, ids):
            self.embedding(ids).sum().backward()

    graph = Graph()
    return lambda: graph(IDS)


@pytest.fixture
def embedding(tmp_path):
    made = make_embedding(tmp_path / "rows", dim=2, tables=1)
    yield made
    made.close()


@pytest.mark.parametrize("way", [as_a_loop, as_a_graph])
@pytest.mark.parametrize("name", WATCHED)
def test_whoever_sees_torchs_step_sees_each(embedding, name, way):
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    step = way(embedding, optimizer)
    step()
    calls, remove = WATCHED[name](optimizer)
    before = 0 if calls is None else calls()
    try:
        for i in range(3):
            step()
            assert calls is None or calls() == before + i + 1
    finally:
        remove()


def test_a_profiler_of_all_threads_sees_the_steps_of_each(embedding):
    step = as_a_loop(embedding, torch.optim.SGD(embedding.parameters(), lr=0.5))
    step()
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=every_thread) as profile:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    seen = [event.name for event in profile.events()]
    assert all(seen.count(f"Optimizer.step#{name}.step") == 1 for name in ("Optimizer", "SGD")), seen


@pytest.mark.parametrize("way", [as_a_loop, as_a_graph])
def test_nobody_sees_it_and_rows_are_trained(embedding, way, monkeypatch):
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    step, made = way(embedding, optimizer), []
    step()
    before = rows_of(embedding, IDS)
    monkeypatch.setattr(torch.optim.SGD, "_init_group", lambda *_: made.append(1))
    step()
    torch.testing.assert_close(rows_of(embedding, IDS), before - 0.5, rtol=0, atol=0)
    assert not made and embedding.stats()["step"] == 2
    assert all(weight.grad is None for weight in embedding.parameters())


@pytest.mark.parametrize("way", [as_a_loop, as_a_graph])
def test_a_dense_gradient_that_comes_later_is_stepped(embedding, way):
    dense = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*embedding.parameters(), dense], lr=0.5)
    step = way(embedding, optimizer)
    step()
    dense.grad = torch.ones(1)
    step()
    assert dense.tolist() == [-0.5] and dense.grad is None


@pytest.mark.parametrize("way", [as_a_loop, as_a_graph])
def test_a_zero_grad_of_the_object_is_called(embedding, way):
    optimizer, calls = torch.optim.SGD(embedding.parameters(), lr=0.5), []
    zero_grad = optimizer.zero_grad
    optimizer.zero_grad = lambda *args, **options: [calls.append(1), zero_grad(*args, **options)]
    step = way(embedding, optimizer)
    step()
    step()
    assert len(calls) == 2
