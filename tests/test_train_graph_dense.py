"""config.compile_dense: the same model within rounding, and a fallback that says why."""

import warnings

import pytest
import torch

import oneemb
from oneemb.graph import dense
from tests.support.graph_models import adam, make_embedding, make_graph, weights_of
from tests.support.interrupts import interrupted

IDS, LABEL = torch.tensor([[1, 2], [3, 4], [1, 4]]), torch.tensor([0.0, 1.0, 1.0])


def build(self, ids, label):
    loss = torch.nn.functional.mse_loss(self.dense(self.embedding(ids).flatten(1)).squeeze(1), label)
    loss.backward()
    return loss.detach()


def graph_of(module, compiled):
    graph = make_graph({"embedding": make_embedding(), "dense": module}, build, adam)
    graph.config.compile_dense = compiled
    return graph


def mlp():
    torch.manual_seed(0)
    return oneemb.nn.FusedMLP(8, [8], 1, skip_final_activation=True)


def test_an_interrupt_at_any_line_leaves_nothing_in_the_place_of_a_module_that_does_harm(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **_: lambda *args: calls.append(module) or module(*args))
    calls = []
    graph = graph_of(mlp(), True)
    graph(IDS, LABEL)
    for at in range(1, 100):
        _, place = interrupted(lambda: graph(IDS, LABEL), at, "signal", files=[dense.__file__])
        if place is None:
            break
        calls.clear()
        graph.dense(torch.ones(1, 8))
        assert calls == [], place
        graph(IDS, LABEL)
        assert calls == [graph.dense] and graph.dense._compiled_call_impl is None, place
    assert at > 20


def test_a_compiled_dense_part_agrees_within_rounding(monkeypatch):
    calls = []
    compile = torch.compile

    def spy(module, **kwargs):
        calls.append(kwargs)
        return compile(module, backend="aot_eager", **kwargs)

    monkeypatch.setattr(torch, "compile", spy)
    plain, compiled = graph_of(mlp(), False), graph_of(mlp(), True)
    with warnings.catch_warnings(record=True) as caught:
        for size in (3, 2, 3):
            torch.testing.assert_close(plain(IDS[:size], LABEL[:size]), compiled(IDS[:size], LABEL[:size]))
    assert [str(one.message) for one in caught if "compile_dense" in str(one.message)] == []
    for a, b in zip(weights_of(plain.dense), weights_of(compiled.dense), strict=True):
        torch.testing.assert_close(a, b)
    assert calls == [{"dynamic": True}]


def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(monkeypatch):
    def fails(module, **kwargs):
        def call(*args):
            raise RuntimeError("no compiler here\nand more")

        return call

    monkeypatch.setattr(torch, "compile", fails)
    plain, graph = graph_of(mlp(), False), graph_of(mlp(), True)
    with pytest.warns(UserWarning, match="cannot compile FusedMLP.*no compiler here") as caught:
        assert torch.equal(graph(IDS, LABEL), plain(IDS, LABEL))
    assert len([one for one in caught if "compile_dense" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(graph(IDS, LABEL), plain(IDS, LABEL))


def test_an_error_of_the_module_itself_is_raised(monkeypatch):
    class Fails(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            raise KeyError("mine")

    monkeypatch.setattr(torch, "compile", lambda module, **kwargs: module)
    with pytest.raises(KeyError, match="mine"):
        graph_of(Fails(), True)(IDS, LABEL)
