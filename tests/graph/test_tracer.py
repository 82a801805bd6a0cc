"""Tracing: what is recorded, what is a leaf, what is refused; that it runs nothing and leaves nothing behind."""

import builtins
import threading

import pytest
import torch
from torch import fx

import oneemb
from oneemb.graph.build_error import BuildError
from oneemb.graph.modules import embeddings_in
from oneemb.graph.text import graph_text
from oneemb.graph.tracer import trace
from tests.support.models import make_embedding


@pytest.fixture
def made(tmp_path):
    every = []

    def make(name="items", **options):
        every.append(make_embedding(tmp_path / f"{name}{len(every)}", name=name, tables=2, **options))
        return every[-1]

    yield make
    for embedding in every:
        embedding.close()


def root_of(build, **modules):
    root = torch.nn.Module()
    for name, module in modules.items():
        setattr(root, name, module)
    root.__class__ = type("Root", (torch.nn.Module,), {"build": build})
    return root


def traced(build, **modules):
    return graph_text(trace(root_of(build, **modules)).graph)


class Tower(torch.nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.mlp = embedding, torch.nn.Sequential(torch.nn.Linear(4, 2), AnyPython())
        self.register_buffer("shift", torch.ones(2))

    def forward(self, ids, scale):
        return self.mlp(self.embedding(ids)) * scale + self.shift


class AnyPython(torch.nn.Module):
    def forward(self, x):
        raise AssertionError("a leaf is not run while it is traced")


def test_modules_without_an_embedding_are_leaves_and_those_with_one_are_traced_through(made):
    def build(self, ids):
        return self.tower(ids, 2.0)

    assert (
        traced(build, tower=Tower(made()))
        == """\
inputs: ids
tower_embedding = tower.embedding(ids)
tower_mlp = tower.mlp(tower_embedding)
mul = tower_mlp * 2.0
add = mul + tower.shift
return add"""
    )


def test_tracing_runs_and_inserts_nothing(made):
    embedding, calls = made(), []
    state = torch.get_rng_state()

    def build(self, ids):
        calls.append(ids)
        loss = self.embedding(ids).sum() + torch.rand(3).sum()
        loss.backward()
        print("the loss is", loss)
        return loss

    trace(root_of(build, embedding=embedding))
    assert len(calls) == 1 and isinstance(calls[0], fx.Proxy)
    assert not embedding.store.built and torch.equal(torch.get_rng_state(), state)


def test_an_embedding_that_is_shared_has_one_name(made):
    shared = made()
    root = root_of(lambda self, ids: self.one(ids, 1) + self.two(ids, 2), one=Tower(shared), two=Tower(shared))
    assert list(embeddings_in(root)) == ["one.embedding"]
    text = graph_text(trace(root).graph)
    assert text.count("one.embedding(ids)") == 2 and "two.embedding" not in text


def test_embeddings_are_found_by_name_and_dense_modules_are_not(made):
    root = root_of(None, a=made(), b=torch.nn.ModuleList([torch.nn.Linear(1, 1), Tower(made())]))
    assert list(embeddings_in(root)) == ["a", "b.1.embedding"]
    assert embeddings_in(torch.nn.Embedding(3, 3)) == {}


def test_functions_of_no_traced_value_are_recorded(made):
    def build(self, ids):
        noise = torch.rand(4) + torch.randn(2, ids.shape[0]) + torch.zeros(1)
        return self.embedding(ids) * noise * torch.tensor([1.0, 2.0]) + torch.nn.functional.dropout(torch.ones(3))

    text = traced(build, embedding=made())
    for call in ("rand(4)", "randn(2, getitem)", "zeros(1)", "tensor([1.0, 2.0])", "ones(3)", "dropout(ones"):
        assert call in text


def test_parameters_and_buffers_are_named_and_not_copied(made):
    def build(self, ids):
        return self.embedding(ids) @ self.linear.weight + self.linear.bias * 2

    text = traced(build, embedding=made(), linear=torch.nn.Linear(4, 4))
    assert "embedding @ linear.weight" in text and "linear.bias" in text and "constant" not in text


def test_blocks_are_recorded_as_they_nest(made):
    def build(self, ids):
        with torch.no_grad():
            with torch.enable_grad():
                a = ids + 1
            b = ids + 2
        with torch.set_grad_enabled(True), torch.autocast("cpu", torch.bfloat16):
            c = ids + 3
        return a, b, c

    lines = [line.split(" = ")[-1] for line in traced(build, embedding=made()).splitlines()]
    kinds = [line.split("(")[0] for line in lines[1:-1]]
    assert kinds == [
        "enter_grad_mode", "enter_grad_mode", "ids + 1", "exit_context", "ids + 2", "exit_context",
        "enter_grad_mode", "enter_autocast", "ids + 3", "exit_context", "exit_context",
    ]  # fmt: skip
    assert lines[1] == "enter_grad_mode(False)" and lines[2] == "enter_grad_mode(True)"
    assert "bfloat16" in next(line for line in lines if line.startswith("enter_autocast"))


def test_nodes_remember_the_line_they_are_from(made):
    def build(self, ids):
        rows = self.embedding(ids)
        loss = rows.sum()  # here
        loss.backward()
        return loss

    graph = trace(root_of(build, embedding=made())).graph
    (node,) = [node for node in graph.nodes if node.target == "sum"]
    first = build.__code__.co_firstlineno
    assert node.meta["line"] == f" at {__file__}:{first + 2}: loss = rows.sum()  # here"


def test_an_assert_on_a_traced_value_is_checked_at_every_step(made):
    def build(self, ids):
        assert ids.min() >= 0, "ids must not be negative"
        return self.embedding(ids)

    assert "_assert(" in traced(build, embedding=made())


# ---- what is refused -------------------------------------------------------------------------------------------------


def branch(self, ids):
    return ids * 2 if ids.sum() > 0 else ids


def loop(self, ids):
    while ids.sum() > 0:
        ids = ids - 1
    return ids


def boolean(self, ids):
    return ids.any() and ids


def length(self, ids):
    return ids / len(ids)


def integer(self, ids):
    return [0][int(ids.sum())]


def index(self, ids):
    return [1, 2][ids[0, 0]]


def text(self, ids):
    return f"{ids.sum():.3f}"


def numpy(self, ids):
    import numpy as np

    return np.asarray(ids)


def gradient(self, ids):
    loss = self.embedding(ids).sum()
    loss.backward()
    return sum(parameter.grad.sum() for parameter in self.linear.parameters())


def hooks(self, ids):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return self.embedding(ids)


def inference(self, ids):
    with torch.inference_mode():
        return self.embedding(ids)


def seed(self, ids):
    torch.manual_seed(1)
    return ids


def attribute(self, ids):
    self.count = ids.sum()
    return ids


def late_zero_grad(self, ids):
    self.embedding(ids).sum().backward()
    self.zero_grad()
    return ids


REFUSED = [
    branch, loop, boolean, length, integer, index, text, numpy, gradient, hooks, inference, seed, attribute,
    late_zero_grad,
]  # fmt: skip


@pytest.mark.parametrize("build", REFUSED, ids=[build.__name__ for build in REFUSED])
def test_what_tracing_would_freeze_or_lose_is_refused_at_its_line(made, build):
    root = root_of(build, embedding=made(), linear=torch.nn.Linear(1, 1))
    first = build.__code__.co_firstlineno
    last = max(line for _, _, line in build.__code__.co_lines() if line)
    with pytest.raises(BuildError) as error:
        trace(root)
    lines = [f"{__file__}:{line}:" for line in range(first + 1, last + 1)]
    assert any(line in str(error.value) for line in lines), str(error.value)


def test_a_mistake_of_the_user_is_raised_as_it_is(made):
    def type_error(self, ids):
        return "a" + 1

    def value_error(self, ids):
        raise ValueError("mine")

    with pytest.raises(TypeError, match="can only concatenate str"):
        trace(root_of(type_error, embedding=made()))
    with pytest.raises(ValueError, match="mine"):
        trace(root_of(value_error, embedding=made()))


# ---- nothing stays ---------------------------------------------------------------------------------------------------


def surroundings():
    """What tracing puts something else in place of."""
    grad_mode, autocast = torch.autograd.grad_mode, torch.amp.autocast_mode.autocast
    clip = torch.nn.utils.clip_grad_norm_
    return [
        builtins.print, torch.manual_seed, torch.autograd.backward, torch.autograd.grad, torch.rand, torch.zeros,
        autocast.__enter__, autocast.__exit__, grad_mode.no_grad.__enter__, grad_mode.enable_grad.__enter__,
        grad_mode.set_grad_enabled.__init__, grad_mode.inference_mode.__enter__, torch.nn.Module.__setattr__,
        torch.nn.Module.__call__, torch.nn.Module.zero_grad, torch.optim.Optimizer.zero_grad,
        torch.amp.GradScaler.scale, *(cell.cell_contents for cell in clip.__closure__),
    ]  # fmt: skip


@pytest.mark.parametrize("build", [branch, inference, seed, attribute, lambda self, ids: self.embedding(ids)])
def test_nothing_stays_in_place_after_tracing(made, build):
    before = surroundings()
    try:
        trace(root_of(build, embedding=made(), linear=torch.nn.Linear(1, 1)))
    except BuildError:
        pass
    assert all(one is two for one, two in zip(surroundings(), before, strict=True))
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert torch.overrides._get_current_function_mode_stack() == []


def test_other_threads_go_on_as_they_were_while_a_build_is_traced(made):
    results = {}

    def load():
        torch.manual_seed(3)
        with torch.no_grad():
            results["size"] = torch.zeros(3).sum().item()
        linear = torch.nn.Linear(1, 1)
        linear.extra = 5
        linear(torch.ones(1)).backward()
        linear.zero_grad()
        results["extra"] = linear.extra

    def build(self, ids):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        return self.embedding(ids)

    text = traced(build, embedding=made())
    assert results == {"size": 0.0, "extra": 5}
    assert text == "inputs: ids\nembedding = embedding(ids)\nreturn embedding"


def test_a_train_graph_may_be_compiled_inside_no_grad(made):
    class Graph(oneemb.TrainGraph):
        def __init__(self):
            super().__init__()
            self.embedding = made()
            self.add_optimizer(torch.optim.SGD(self.parameters(), lr=0.1))

        def build(self, ids):
            loss = self.embedding(ids).sum()
            loss.backward()
            return loss

    graph = Graph()
    with torch.no_grad():
        graph.compiled()
    graph(torch.zeros(1, 2, dtype=torch.int64))
    assert graph.embedding.stats()["step"] == 1
