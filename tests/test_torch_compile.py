"""An eager model around an embedding may be compiled by torch: it goes around the lookup, to the same numbers."""

import warnings

import pytest
import torch
import torch._dynamo

import oneemb
from oneemb.optim import RowWiseAdagrad
from tests.support.graph_models import make_embedding, rows_of, weights_of


class Sum(torch.nn.Module):
    """Lookups one after another, without a loop, in which a graph break would give up the whole frame."""

    def __init__(self, count):
        super().__init__()
        self.embedding = make_embedding(f"e{count}", seed=count)
        self.rest = Sum(count - 1) if count > 1 else None

    def forward(self, ids):
        rows = self.embedding(ids * 1).flatten(1)
        return rows if self.rest is None else rows + self.rest(ids)


class Model(torch.nn.Module):
    def __init__(self, embeddings=1):
        super().__init__()
        torch.manual_seed(0)
        self.lookups = Sum(embeddings)
        self.mlp = torch.nn.Linear(8, 1)

    @property
    def embeddings(self):
        return [one for one in self.modules() if isinstance(one, oneemb.MultiTableEmbedding)]

    def forward(self, ids):
        return self.mlp(self.lookups(ids)).squeeze(1)


def trained(model, forward, steps=3):
    optimizer = oneemb.Optimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.embeddings)
    outputs = []
    for i in range(steps):
        outputs.append(forward(torch.tensor([[1, 2], [3, 4]]) + i))
        outputs[-1].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [one.detach() for one in outputs], [rows_of(one) for one in model.embeddings], weights_of(model.mlp)


@pytest.fixture(autouse=True)
def dynamo_begins_anew():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [True, False])
def test_a_lookup_is_one_graph_break(training):
    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.mlp = make_embedding(), torch.nn.Linear(8, 1)

        def forward(self, ids):
            return self.mlp(self.embedding(ids * 1).flatten(1))

    model = Flat().train(training)
    explained = torch._dynamo.explain(model)(torch.tensor([[1, 2], [3, 4]]))
    assert explained.graph_break_count == 1 and explained.graph_count == 2


@pytest.mark.parametrize("embeddings", [1, 12])
def test_a_compiled_model_trains_as_an_eager_one_without_warnings(embeddings):
    eager, compiled = Model(embeddings), Model(embeddings)
    expected = trained(eager, eager)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forward = torch.compile(compiled, backend="eager")
        outputs, rows, weights = trained(compiled, forward)
        compiled.eval()
        read = forward(torch.tensor([[1, 2], [9, 9]]))
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected[0], strict=True)) and rows == expected[1]
    assert all(torch.equal(a, b) for a, b in zip(weights, expected[2], strict=True))
    assert torch.equal(read, eager.eval()(torch.tensor([[1, 2], [9, 9]])))
    # What torch says of the interpreter itself is not ours: 3.13.0 has slower guards.
    assert [said for one in caught if not (said := str(one.message)).startswith("Guards may run slower")] == []
    (why,) = torch._dynamo.utils.counters["graph_break"]
    assert "TableEmbedding.forward" in why


def test_a_compiled_step_goes_around_the_optimizer():
    eager, compiled = Model(), Model()
    steps = []
    for model in (eager, compiled):
        optimizer = oneemb.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.embeddings)

        def step(ids, model=model, optimizer=optimizer):
            loss = model(ids).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        steps.append(step)
    compiled_step = torch.compile(steps[1], backend="eager")
    for i in range(3):
        ids = torch.tensor([[1, 2], [3, 4]]) + i
        assert torch.equal(compiled_step(ids), steps[0](ids))
    assert rows_of(compiled.embeddings[0]) == rows_of(eager.embeddings[0])


def trained_by(optimizer_class, compiled, steps=4):
    """Rows and a dense module, whose numbers torch.compile may round otherwise, trained beside each other."""
    torch.manual_seed(0)
    embedding, dense = make_embedding("rows"), torch.nn.Linear(2, 1)
    optimizer = optimizer_class([embedding.weight, *dense.parameters()], lr=0.1)
    step = torch.compile(optimizer.step, backend="eager") if compiled == "step" else optimizer.step

    def train(ids):
        loss = embedding(ids).square().sum() + dense(ids.float()).square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_value_([embedding.weight, *dense.parameters()], 1e-2)
        step()
        optimizer.zero_grad()

    train = torch.compile(train, backend="eager") if compiled == "whole" else train
    for i in range(steps):
        train(torch.tensor([[1, 2], [3, 4]]) + i % 2)
        optimizer.param_groups[0]["lr"] *= 0.9
    assert embedding.stats()["step"] == steps and embedding.stats()["device"]["pinned"] == 0
    return rows_of(embedding), weights_of(dense)


@pytest.mark.parametrize("compiled", ["step", "whole"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, RowWiseAdagrad])
def test_a_compiled_step_of_torchs_optimizers_trains_rows_as_an_uncompiled_one(optimizer_class, compiled):
    expected, weights = trained_by(optimizer_class, None)
    rows, dense = trained_by(optimizer_class, compiled)
    assert rows == expected
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(dense, weights, strict=True))


def test_a_compiled_step_that_raises_leaves_gradients_and_rows_as_they_are():
    embedding = make_embedding("rows")
    optimizer = torch.optim.Adam([embedding.weight], lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    ids = torch.tensor([[1, 2]])
    embedding(ids).sum().mul(float("inf")).backward()
    before = embedding.read(ids)
    with pytest.raises(oneemb.NonFiniteGradientError):
        step()
    assert (
        torch.equal(embedding.read(ids), before)
        and embedding.stats()["step"] == 0
        and embedding.weight.grad is not None
    )
    optimizer.zero_grad()
    embedding(ids).sum().backward()
    step()
    assert not torch.equal(embedding.read(ids), before) and embedding.stats()["step"] == 1


def test_many_compiled_models_and_optimizers_reach_no_limit_of_compilations(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    torch._dynamo.reset()
    for number in range(6):
        embedding, dense = make_embedding(f"many{number}"), torch.nn.Linear(8, 1)
        optimizer = torch.optim.Adagrad([*embedding.parameters(), *dense.parameters()])
        loss = torch.compile(lambda ids, e=embedding, d=dense: d(e(ids).flatten(1)).square().sum(), backend="eager")
        step = torch.compile(lambda o=optimizer: o.step(), backend="eager")
        for k in range(5):
            optimizer.zero_grad()
            loss(torch.arange(2 * (3 + k % 2)).reshape(-1, 2)).backward()
            step()
        assert embedding.stats()["step"] == 5
