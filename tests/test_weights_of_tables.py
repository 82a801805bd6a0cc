"""A weight for each table: options and freezing table by table, against a torch.nn.EmbeddingBag for each table."""

import pytest
import torch

import oneemb
from oneemb.embeddings import internals
from tests.support.models import make_embedding, rows_of

DIM, VOCABULARY, TABLES = 6, 30, 3
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.3),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
}


def batch(seed, samples=8):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 4, (TABLES * samples,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randint(0, VOCABULARY, (int(offsets[-1]),), generator=generator), offsets


class Ours(torch.nn.Module):
    """Tables of one embedding, each with its weight."""

    def __init__(self, path, **options):
        super().__init__()
        self.embedding = make_embedding(path, dim=DIM, tables=TABLES, **options)
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(0, DIM)) for _ in range(TABLES))
        internals.stand_for_rows(self.embedding, self.weights)

    def forward(self, ids, offsets):
        return self.embedding(ids, offsets=offsets, columns=range(TABLES))

    def rows(self):
        return [rows_of(self.embedding, range(VOCABULARY), t) for t in range(TABLES)]


class Torchs(torch.nn.Module):
    """A torch.nn.EmbeddingBag for each table, with the same rows."""

    def __init__(self, ours):
        super().__init__()
        bags = [torch.nn.EmbeddingBag.from_pretrained(rows, False, mode="sum", include_last_offset=True)
                for rows in ours.rows()]  # fmt: skip
        self.bags = torch.nn.ModuleList(bags)
        self.weights = [bag.weight for bag in bags]

    def forward(self, ids, offsets):
        samples = (len(offsets) - 1) // TABLES
        outs = []
        for t, bag in enumerate(self.bags):
            own = offsets[t * samples : (t + 1) * samples + 1]
            outs.append(bag(ids[own[0] : own[-1]], own - own[0]))
        return torch.stack(outs, 1)

    def rows(self):
        return [weight.detach() for weight in self.weights]


def pair(path, **options):
    ours = Ours(path, **options)
    return ours, Torchs(ours)


def step(model, optimizer, seed, *, clip=None, scale=1.0):
    optimizer.zero_grad()
    out = model(*batch(seed))
    loss = (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))).square().sum() * scale
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.weights, clip)
    optimizer.step()
    return loss.detach()


def check(ours, torchs):
    for t, (its, expected) in enumerate(zip(ours.rows(), torchs.rows(), strict=True)):
        torch.testing.assert_close(its, expected, rtol=1e-4, atol=1e-5, msg=lambda text, t=t: f"table {t}: {text}")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_one_group_of_all_tables(  # all rows have a gradient: torch's dense optimizers would move others too
    tmp_path, name, clip, monkeypatch
):
    monkeypatch.setattr("tests.test_weights_of_tables.batch", every_row)
    ours, torchs = pair(tmp_path)
    optimizers = [OPTIMIZERS[name](model.weights) for model in (ours, torchs)]
    for seed in range(6):
        losses = [
            step(model, optimizer, seed, clip=clip) for model, optimizer in zip((ours, torchs), optimizers, strict=True)
        ]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    check(ours, torchs)
    assert ours.embedding.stats()["step"] == 6


def every_row(seed, samples=8):
    """A batch in which every row of every table occurs."""
    ids, generator = [], torch.Generator().manual_seed(seed)
    for _ in range(TABLES):
        ids.append(torch.randperm(VOCABULARY, generator=generator))
    begins = torch.arange(0, VOCABULARY, VOCABULARY // 5)
    offsets = torch.cat([begins + t * VOCABULARY for t in range(TABLES)] + [torch.tensor([TABLES * VOCABULARY])])
    return torch.cat(ids), offsets


def test_every_table_may_have_a_group(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_weights_of_tables.batch", every_row)
    ours, torchs = pair(tmp_path)
    optimizers = [
        torch.optim.Adam([{"params": [weight], "lr": 0.1 * (t + 1)} for t, weight in enumerate(model.weights)])
        for model in (ours, torchs)
    ]
    for seed in range(6):
        for model, optimizer in zip((ours, torchs), optimizers, strict=True):
            optimizer.param_groups[1]["lr"] = 0.01 * (seed + 1)
            step(model, optimizer, seed, clip=2.0)
    check(ours, torchs)
    assert ours.embedding.stats()["step"] == 6, "all tables together are one step"


@pytest.mark.parametrize("frozen", [[0], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("how", ["torch", "oneemb"])
def test_a_frozen_table_rests(tmp_path, frozen, how):
    ours, torchs = pair(tmp_path)
    for model in (ours, torchs):
        for t in frozen:
            model.weights[t].requires_grad_(False)
    left = [t for t in range(TABLES) if t not in frozen]
    if not left:
        assert not ours(*batch(0)).requires_grad
        return
    optimizers = [torch.optim.Adagrad(model.weights, lr=0.3) for model in (ours, torchs)]
    if how != "torch":
        optimizers[0] = oneemb.Optimizer(optimizers[0], [ours.embedding])
    for seed in range(4):
        for model, optimizer in zip((ours, torchs), optimizers, strict=True):
            step(model, optimizer, seed)
    check(ours, torchs)


def test_gradients_are_those_of_each_table(tmp_path):
    ours, torchs = pair(tmp_path)
    for model in (ours, torchs):
        for seed in (0, 1):
            model(*batch(seed)).square().sum().backward()
    for t, (its, expected) in enumerate(zip(ours.weights, torchs.weights, strict=True)):
        tables, ids = its.grad.row_keys()
        assert set(tables.tolist()) == {t}
        dense = torch.zeros(VOCABULARY, DIM).index_add(0, ids, its.grad.row_values())
        torch.testing.assert_close(dense, expected.grad)
        torch.testing.assert_close(torch.linalg.vector_norm(its.grad), torch.linalg.vector_norm(expected.grad))
    for model in (ours, torchs):
        model.weights[1].grad = None  # what is zeroed of one table is that of no other
        model.weights[2].grad.mul_(0.5)
        model(*batch(2)).square().sum().backward()
    for its, expected in zip(ours.weights, torchs.weights, strict=True):
        _, ids = its.grad.row_keys()
        dense = torch.zeros(VOCABULARY, DIM).index_add(0, ids, its.grad.row_values())
        torch.testing.assert_close(dense, expected.grad)
    for model in (ours, torchs):
        torch.optim.SGD(model.weights, lr=0.1).step()
    check(ours, torchs)


def test_a_scaler_unscales_each_table(tmp_path):
    ours, torchs = pair(tmp_path)
    for model in (ours, torchs):
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(model.weights, lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            scaler.scale(model(*batch(seed)).square().sum()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.weights, 1.0)
            scaler.step(optimizer)
            scaler.update()
    check(ours, torchs)


class Graph(oneemb.TrainGraph):
    def __init__(self, path):
        super().__init__()
        self.ours = Ours(path)
        self.other = make_embedding(f"{path} other", dim=DIM, name="other")
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.3))

    def build(self, ids, offsets, others):
        loss = (self.ours(ids, offsets).sum(1) * self.other(others)).square().sum()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("frozen", [[], [1]])
def test_a_graph_has_the_bits_of_the_eager_step(tmp_path, frozen):
    batches = [(*batch(seed), torch.randint(0, 9, (8,))) for seed in range(5)]
    found = []
    for way in ("called", "run", "eager"):
        graph = Graph(tmp_path / way)
        for t in frozen:
            graph.ours.weights[t].requires_grad_(False)
        if way == "eager":
            optimizer, losses = torch.optim.Adagrad([*graph.ours.weights, graph.other.weight], lr=0.3), []
            for embedding in (graph.ours.embedding, graph.other):
                embedding.detach_optimizer()
            for one in batches:
                optimizer.zero_grad()
                losses.append(graph.build(*one))
                optimizer.step()
        else:
            losses = [graph(*one) for one in batches] if way == "called" else list(graph.run(batches))
        found.append(torch.cat([torch.stack(losses), *(rows.view(-1) for rows in graph.ours.rows())]))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])


def test_what_tables_of_one_embedding_cannot_have(tmp_path):
    ours = Ours(tmp_path)
    ours(*batch(0)).sum().backward()
    with pytest.raises(ValueError, match=r"not those of \[1, 2\]; add these weights, or freeze them"):
        torch.optim.SGD(ours.weights[:1], lr=0.1).step()
    groups = [{"params": ours.weights[:1], "momentum": 0.9}, {"params": ours.weights[1:]}]
    with pytest.raises(ValueError, match="options need different state"):
        torch.optim.SGD(groups, lr=0.1).step()
    with pytest.raises(ValueError, match="leave it out for embeddings whose tables have several weights"):
        oneemb.Optimizer(torch.optim.SGD(ours.weights, lr=0.1), fused=True)
    before = ours.rows()
    torch.optim.SGD(ours.weights, lr=0.1).step()
    assert not torch.equal(ours.rows()[0], before[0])


@pytest.mark.parametrize("first", ["old", "new"])
def test_a_weight_that_an_embedding_had_before_may_stay_in_the_optimizer(first, tmp_path):
    embedding = make_embedding(tmp_path / "rows", dim=DIM)
    weights = [embedding.weight, torch.nn.Parameter(torch.empty(0, DIM))]
    internals.stand_for_rows(embedding, torch.nn.ParameterList(weights[1:]))
    before = rows_of(embedding, [1])
    optimizer = oneemb.Optimizer(torch.optim.SGD(weights if first == "old" else weights[::-1], lr=0.5), [embedding])
    embedding(torch.tensor([[1]])).sum().backward()
    optimizer.step()
    assert torch.equal(rows_of(embedding, [1]), before - 0.5)
