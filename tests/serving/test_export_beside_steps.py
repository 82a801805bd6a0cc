"""Steps of another thread while an export traces: they do not wait for it, and neither changes the other."""

import threading

import pytest
import torch

import oneemb
from oneemb.training import scaling
from tests.support.export_models import Click
from tests.support.waits import ended

IDS = torch.arange(33 * 3).reshape(33, 3) % 70
LABEL = torch.ones(33)

scaler_of_module = None
"""A GradScaler that `OfModule.build` names."""


class Shared:
    """A list that a copy of a graph shares with it."""

    def __init__(self):
        self.items = []
        self.append = self.items.append


class Traced(Click):
    """Has another thread make a step while it is traced."""

    beside = None
    waits = 60.0

    def __init__(self, folder):
        super().__init__(folder)
        self.stepping, self.waited = Shared(), Shared()

    def build(self, ids, label):
        if self.beside is not None and threading.current_thread() is threading.main_thread():
            step = threading.Thread(target=self.beside)
            step.start()
            step.join(self.waits)
            self.stepping.append(step)
            self.waited.append(step.is_alive())
        logit = self.mlp(self.norm(self.embedding(ids).flatten(1))).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        self.scaled(loss).backward()
        return loss, logit

    def scaled(self, loss):
        return loss


class OfGraph(Traced):
    """Scales by a GradScaler of its own."""

    def __init__(self, folder):
        super().__init__(folder)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.own = self.optimizers[0].optimizer

    def build(self, ids, label):
        found = super().build(ids, label)
        self.scaler.unscale_(self.own)
        return found

    def scaled(self, loss):
        return self.scaler.scale(loss)


class OfModule(Traced):
    """Scales by a GradScaler that is a global of this module."""

    def scaled(self, loss):
        return scaler_of_module.scale(loss)


@pytest.fixture(autouse=True)
def _scaler_of_module(monkeypatch):
    monkeypatch.setitem(globals(), "scaler_of_module", torch.amp.GradScaler("cpu", init_scale=8.0))


def export_beside_a_step(graph, path, **options):
    """Whether a step was made during the export, and the weights that it has left."""
    made = []
    graph.beside = lambda: made.append(graph(IDS, LABEL)[0].item())
    graph.export(path, IDS, LABEL, **options)
    graph.beside = None
    ended(*graph.stepping.items)
    return made, {name: one.tolist() for name, one in graph.mlp.state_dict().items()}


@pytest.mark.parametrize("format", ["export", "torchscript"])
@pytest.mark.parametrize("kind", [Traced, OfGraph, OfModule])
def test_a_step_is_made_while_a_graph_is_traced_and_is_that_of_a_graph_that_is_not(tmp_path, kind, format):
    graph, other = (kind(tmp_path / name) for name in ("graph", "other"))
    made, weights = export_beside_a_step(graph, tmp_path / "program", format=format)
    assert graph.waited.items == [False] * (2 if format == "torchscript" else 1), "it waits for the export"
    assert [other(IDS, LABEL)[0].item() for _ in made] == made
    assert {name: one.tolist() for name, one in other.mlp.state_dict().items()} == weights
    for scaler in (*scaling.scalers_in(vars(graph).values()), scaler_of_module):
        assert type(scaler) is torch.amp.GradScaler and not {"scale", "update", "unscale_"} & {*vars(scaler)}
        assert scaler._scale is None or isinstance(scaler._scale, torch.Tensor) and scaler.get_scale() == 8.0


def test_numbers_that_a_trace_draws_are_drawn_between_steps(tmp_path):
    class Draws(Traced):
        def scaled(self, loss):
            return loss * torch.rand_like(loss)

    graph, other = Draws(tmp_path / "graph"), Draws(tmp_path / "other")
    graph.waits = 0.5
    torch.manual_seed(3)
    made, weights = export_beside_a_step(graph, tmp_path / "program", format="torchscript")
    assert graph.waited.items == [False, True] and len(made) == 2  # torch.export computes nothing, a trace does.
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert [other(IDS, LABEL)[0].item() for _ in made] == made and torch.equal(torch.rand(3), drawn)


def test_threads_other_than_the_exports_use_the_scaler_itself():
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=4.0), []
    ends = [scaling.set_apart(scaler), scaling.set_apart(scaler)]
    assert scaler.scale(torch.ones(1)).item() == 4.0
    scaler.update(2.0)

    def use():
        seen.extend([scaler._scale, scaler.scale(torch.ones(1)).item(), scaler.get_scale()])
        scaler.update(2.0)

    thread = threading.Thread(target=use)
    thread.start()
    ended(thread)
    assert seen == [None, 4.0, 4.0] and scaler.get_scale() == 4.0
    ends[0]()  # That of the class below the other one.
    assert scaler.get_scale() == 4.0
    ends[1]()
    assert type(scaler) is torch.amp.GradScaler and scaler.get_scale() == 2.0


def test_a_scaler_of_a_graph_without_rows_is_as_before(tmp_path):
    class Dense(oneemb.EvalGraph):
        def __init__(self):
            super().__init__()
            self.scalers = {"own": torch.amp.GradScaler("cpu")}

        def build(self, x):
            return self.scalers["own"].scale(x)

    graph = Dense()
    graph.export(tmp_path / "program", torch.ones(3))
    assert graph.scalers["own"]._scale is None
    assert torch.export.load(tmp_path / "program").module()(torch.ones(2)).tolist() == [65536.0] * 2
