"""Bags that lie column by column: against the same bags sample by sample, bit for bit, and torch.nn.EmbeddingBag."""

import numpy as np
import pytest
import torch

import oneemb
from tests.support.models import make_embedding, rows_of

DIM, VOCABULARY, SAMPLES = 20, 40, 50
POOLINGS = ["sum", "mean", "max", "weighted"]


def batch(columns, most=6, seed=0):
    """ids [N], offsets [C * B + 1] and weights [N]: bags column by column, some of them empty."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most, (columns * SAMPLES,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, VOCABULARY, (int(offsets[-1]),), generator=generator)
    return ids, offsets, torch.rand(len(ids), generator=generator)


def by_sample(ids, offsets, weights, columns):
    """The same bags, sample by sample."""
    order = torch.arange(columns * SAMPLES).view(columns, SAMPLES).T.reshape(-1).tolist()
    places = [torch.arange(int(offsets[p]), int(offsets[p + 1])) for p in order]
    at = torch.cat(places)
    return ids[at], torch.tensor(np.append(0, np.cumsum([len(place) for place in places]))), weights[at]


def pooled(how, weights):
    return {"per_sample_weights": weights} if how == "weighted" else {"pooling": how}


@pytest.mark.parametrize("how", POOLINGS)
@pytest.mark.parametrize("threads", [1, 2])
def test_columns_have_the_bits_of_bags_sample_by_sample(tmp_path, how, threads):
    ids, offsets, weights = batch(3)
    found = []
    for way in ("columns", "samples"):
        embedding = make_embedding(tmp_path / way, dim=DIM, tables=3, num_threads=threads)
        optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
        given = (ids, offsets, weights) if way == "columns" else by_sample(ids, offsets, weights, 3)
        scales = given[2].clone().requires_grad_()
        more = {"columns": [0, 1, 2]} if way == "columns" else {}
        outs = []
        for step in range(3):
            optimizer.zero_grad()
            out = embedding(given[0], offsets=given[1], **pooled(how, scales), **more)
            assert out.shape == (SAMPLES, 3, DIM)
            (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(step))).sum().backward()
            optimizer.step()
            outs.append(out.detach())
        grad = torch.zeros(0) if scales.grad is None else scales.grad
        if way == "columns" and len(grad):
            grad = by_sample(ids, offsets, grad, 3)[2]
        found.append((*outs, grad, *(rows_of(embedding, range(VOCABULARY), t) for t in range(3))))
        embedding.close()
    for columns, samples in zip(*found, strict=True):
        assert torch.equal(columns, samples)


@pytest.mark.parametrize("how", ["sum", "mean", "max"])
def test_several_columns_of_one_table_equal_embedding_bag(tmp_path, how):
    embedding = make_embedding(tmp_path, dim=DIM, tables=4)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    columns = [0, 0, 2, 2, 2, 3]
    ids, offsets, _ = batch(len(columns))
    every = torch.arange(VOCABULARY)[:, None].expand(-1, 4)
    weight = torch.cat([rows_of(embedding, every[:, t], t) for t in range(4)])
    module = torch.nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode=how, include_last_offset=True)
    table_P = torch.tensor(columns).repeat_interleave(SAMPLES)
    expected = module(ids + VOCABULARY * table_P.repeat_interleave(offsets.diff()), offsets)
    expected = expected.view(len(columns), SAMPLES, DIM).transpose(0, 1)
    out = embedding(ids, offsets=offsets, pooling=how, columns=columns)
    torch.testing.assert_close(out, expected)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad)
    expected.backward(grad)
    optimizer.step()
    with torch.no_grad():
        module.weight -= 0.5 * module.weight.grad
    for t in range(4):
        rows = rows_of(embedding, range(VOCABULARY), t)
        torch.testing.assert_close(rows, module.weight.detach()[VOCABULARY * t :][:VOCABULARY])


def test_no_samples_and_no_ids(tmp_path):
    embedding = make_embedding(tmp_path, dim=DIM, tables=3)
    none, no_bags, empty_bags = (
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(7).long(),
    )
    for offsets, samples in [(no_bags, 0), (empty_bags, 3)]:
        out = embedding(none, offsets=offsets, columns=[0, 2])
        assert out.shape == (samples, 2, DIM) and not out.any()
        out.sum().backward()


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"columns": [1, 0]}, ValueError, "in ascending order"),
        ({"columns": [0, 3]}, ValueError, "from 0 to 2"),
        ({"columns": [-1, 0]}, ValueError, "from 0 to 2"),
        ({"columns": []}, TypeError, "the table of each column"),
        ({"columns": [0, 1.0]}, TypeError, "the table of each column"),
        ({"columns": [0, 0, 1, 1]}, ValueError, "the same number of bags for each of 4 columns, got 6"),
        ({"columns": [0, 1], "table_ids": torch.zeros(6).long()}, ValueError, "pass only one of them"),
        ({"columns": [0, 1], "offsets": None}, ValueError, "need offsets"),
        ({"columns": [0, 1], "offsets": torch.tensor([0, 2, 1, 3, 4, 4, 4])}, ValueError, "never fall"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, arguments, error, message):
    embedding = make_embedding(tmp_path, dim=DIM, tables=3)
    offsets = torch.tensor([0, 1, 2, 2, 3, 4, 4])
    with pytest.raises(error, match=message):
        embedding(torch.arange(4), **{"offsets": offsets, **arguments})
    assert embedding.stats()["rows"] == 0


class _Step(oneemb.TrainGraph):
    """Two embeddings of one width, which are merged: one with a bag a sample, the other column by column."""

    def __init__(self, path, how):
        super().__init__()
        self.users = make_embedding(path / "users", dim=DIM, name="users")
        self.items = make_embedding(path / "items", dim=DIM, tables=3, name="items")
        self.how = how
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1))

    def build(self, ids, offsets, weights, users, every):
        of_users = self.users(users, offsets=every)
        bags = self.items(ids, offsets=offsets, **pooled(self.how, weights), columns=(0, 1, 1, 2))
        loss = (bags.sum(1) * of_users).square().sum()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("how", POOLINGS)
def test_a_graph_has_the_bits_of_the_eager_step(tmp_path, how):
    batches = []
    for seed in range(5):
        batches.append((*batch(4, seed=seed), torch.randint(0, 30, (2 * SAMPLES,)), torch.arange(0, 101, 2)))
    graphs = {way: _Step(tmp_path / way, how) for way in ("called", "run", "eager")}
    losses = {"called": [graphs["called"](*b) for b in batches], "run": list(graphs["run"].run(batches)), "eager": []}
    eager = graphs["eager"]
    optimizer = torch.optim.Adagrad(eager.parameters(), lr=0.1)
    for embedding in (eager.items, eager.users):
        embedding.detach_optimizer()
    for one in batches:
        optimizer.zero_grad()
        losses["eager"].append(eager.build(*one))
        optimizer.step()
    assert "unique_merged_keys" in str(graphs["called"].compiled()) and "(0, 1, 1, 2)" in str(
        graphs["called"].compiled()
    )
    for way in ("called", "run"):
        assert torch.equal(torch.stack(losses[way]), torch.stack(losses["eager"]))
        for t in range(3):
            its = rows_of(graphs[way].items, range(VOCABULARY), t)
            assert torch.equal(its, rows_of(eager.items, range(VOCABULARY), t))


def test_an_average_is_looked_up_column_by_column(tmp_path):
    embedding = make_embedding(tmp_path / "rows", dim=DIM, tables=2)
    average = oneemb.AveragedEmbedding(embedding, tmp_path / "average")
    ids, offsets, _ = batch(2)
    embedding(ids, offsets=offsets, columns=[0, 1])
    average.update_rows()
    found = average(ids, offsets=offsets, columns=[0, 1])
    assert torch.equal(found, embedding.eval()(ids, offsets=offsets, columns=[0, 1]))


def trains(group, path, way, most):
    embedding = make_embedding(path, dim=DIM, tables=3, process_group=group)
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    for step in range(4):
        its = [batch(4, most, seed=10 * step + r) for r in (range(2) if group is None else [rank])]
        optimizer.zero_grad()
        for ids, offsets, weights in its:
            out = embedding(ids, offsets=offsets, **pooled(way, weights), columns=[0, 1, 1, 2])
            (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(step))).sum().div(
                2 // size
            ).backward()
        optimizer.step()
    rows = [rows_of(embedding, range(VOCABULARY), t) for t in range(3)]
    embedding.close()
    return torch.stack(rows)


@pytest.mark.parametrize("most", [4, 60], ids=["rows move", "owners sum parts"])
@pytest.mark.parametrize("how", ["sum", "mean", "weighted"])
def test_ranks_look_up_column_by_column(tmp_path, rank_pool, how, most):
    expected = trains(None, tmp_path / "alone", how, most)
    for found in rank_pool(2, trains, str(tmp_path / "ranks"), how, most):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
