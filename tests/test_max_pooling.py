"""Bags pooled by their maximum against torch.nn.EmbeddingBag(mode="max"): values, and whose row gets the gradient."""

import numpy as np
import pytest
import torch

import oneemb
from tests.support.models import make_embedding
from tests.support.pairwise import covering

TABLES, DIM, IDS, PADDING = 2, 20, 30, 7
VALUES = {
    "distinct": None,
    "ties": [-1.0, 0.0, -0.0, 1.0],
    "nan": [-1.0, float("nan"), 1.0, float("-inf")],
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def some_values(kind, dtype=torch.float32):
    """[TABLES, IDS, DIM]"""
    generator = torch.Generator().manual_seed(1)
    if VALUES[kind] is None:
        return torch.randn(TABLES, IDS, DIM, generator=generator).to(dtype)
    return torch.tensor(VALUES[kind])[torch.randint(0, 4, (TABLES, IDS, DIM), generator=generator)].to(dtype)


def make(path, values, **options):
    """An embedding with these rows, and torch's module with the same, table after table, and a last row for padding."""
    embedding = make_embedding(path, tables=TABLES, dim=DIM, dtype=values.dtype, **options)
    for table in range(TABLES):
        oneemb.import_rows(
            embedding, (np.arange(IDS), values[table].float().numpy()), table=table, allow_nonfinite=True
        )
    weight = torch.cat([values.reshape(-1, DIM), torch.full((1, DIM), 9, dtype=values.dtype)])
    module = torch.nn.EmbeddingBag.from_pretrained(
        weight, freeze=False, mode="max", include_last_offset=True, padding_idx=TABLES * IDS
    )
    return embedding, module


def bags(samples=40, seed=0, every=False):
    """ids [N] and offsets [P + 1]: some bags are empty, some ids come twice. `every`: the last sample has all ids."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randint(0, IDS, (int(size),), generator=generator)
        for size in torch.randint(0, 7, (samples * TABLES,), generator=generator)
    ]
    parts += [torch.randperm(IDS, generator=generator) for _ in range(TABLES if every else 0)]
    return torch.cat(parts), torch.tensor([0, *map(len, parts)]).cumsum(0)


def of_torch(ids, offsets, padding_idx=None):
    """The same ids as rows of torch's module."""
    table_P = torch.arange(len(offsets) - 1) % TABLES
    rows = ids + IDS * table_P.repeat_interleave(offsets.diff())
    return rows if padding_idx is None else torch.where(ids == padding_idx, TABLES * IDS, rows)


def bits(values):
    return values.detach().contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def dense_grad(embedding):
    """What torch's module has as its gradient: [TABLES * IDS + 1, DIM]"""
    table_U, id_U = embedding.weight.grad.row_keys()
    dense = torch.zeros(TABLES * IDS + 1, DIM)
    dense[IDS * table_U + id_U] = embedding.weight.grad.row_values()
    return dense


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padding_idx", [None, PADDING])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", VALUES)
def test_values_and_gradients_are_those_of_embedding_bag(tmp_path, kind, dtype, padding_idx, training):
    embedding, module = make(tmp_path, some_values(kind, dtype), padding_idx=padding_idx)
    embedding.train(training)
    ids, offsets = bags()
    out = embedding(ids, offsets=offsets, pooling="max")
    expected = module(of_torch(ids, offsets, padding_idx), offsets)
    assert torch.equal(bits(out.reshape(-1, DIM)), bits(expected))
    # Whole numbers, whose sums are exact in any order and format.
    grad = torch.randint(-4, 5, expected.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    out.backward(grad.reshape(out.shape), retain_graph=True)
    expected.backward(grad, retain_graph=True)
    assert torch.equal(dense_grad(embedding), module.weight.grad.float())
    out.backward(grad.reshape(out.shape).flip(0))
    expected.backward(grad.reshape(out.shape).flip(0).reshape(expected.shape))
    assert torch.equal(dense_grad(embedding), module.weight.grad.float())


def test_tables_of_bags_may_be_given(tmp_path):
    embedding, module = make(tmp_path, some_values("ties"))
    ids, offsets = bags()
    table_P = torch.arange(len(offsets) - 1) % TABLES
    out, expected = embedding(ids, table_P, offsets, pooling="max"), module(of_torch(ids, offsets), offsets)
    assert torch.equal(bits(out), bits(expected))
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(dense_grad(embedding), module.weight.grad)


def test_the_comparison_notices_a_gradient_of_the_last_of_equal_weights(tmp_path):
    embedding, module = make(tmp_path, some_values("ties"))
    ids, offsets = bags()
    last_first = torch.cat([ids[a:b].flip(0) for a, b in zip(offsets[:-1], offsets[1:], strict=True)])
    embedding(last_first, offsets=offsets, pooling="max").sum().backward()
    module(of_torch(ids, offsets), offsets).sum().backward()
    assert not torch.equal(dense_grad(embedding), module.weight.grad)


@pytest.mark.parametrize(
    "make_optimizer",
    [lambda ps: torch.optim.SGD(ps, lr=0.3, momentum=0.5), lambda ps: torch.optim.Adam(ps, lr=0.05)],
    ids=["sgd", "adam"],
)
def test_rows_train_as_embedding_bag_does(tmp_path, make_optimizer):
    embedding, module = make(tmp_path, some_values("distinct"))
    optimizers = [make_optimizer(one.parameters()) for one in (embedding, module)]
    before = module.weight.detach().clone()
    for step in range(20):
        ids, offsets = bags(seed=step, every=True)  # torch's optimizers step every row
        target = torch.randn(len(offsets) - 1, DIM, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [
            torch.nn.functional.mse_loss(out.reshape(-1, DIM), target, reduction="sum")
            for out in (embedding(ids, offsets=offsets, pooling="max"), module(of_torch(ids, offsets), offsets))
        ]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(*losses)
    every = torch.arange(IDS)[:, None].expand(-1, TABLES)
    rows = embedding.eval()(every).detach().transpose(0, 1).reshape(-1, DIM)
    assert (rows - before[:-1]).abs().min() > 1e-6
    torch.testing.assert_close(rows, module.weight.detach()[:-1], rtol=1e-4, atol=1e-5)


def test_the_gradient_goes_to_the_maximum_at_the_lookup(tmp_path):
    embedding, _ = make(tmp_path, torch.arange(TABLES * IDS * DIM).reshape(TABLES, IDS, DIM).float())
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    offsets, table = torch.tensor([0, 3]), torch.tensor(0)
    out = embedding(torch.tensor([1, 3, 2]), table, offsets, pooling="max")
    (embedding(torch.tensor([3]), table) * 1e4).sum().backward()
    optimizer.step()  # id 3 has the least weights now
    optimizer.zero_grad()
    out.sum().backward()
    grads = dense_grad(embedding)
    assert torch.equal(grads[3], torch.ones(DIM)) and grads.count_nonzero() == DIM


class Train(oneemb.TrainGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(torch.optim.Adam(embedding.parameters(), lr=0.1))

    def build(self, ids, offsets, target):
        out = self.embedding(ids, offsets=offsets, pooling="max")
        (out - target).square().sum().backward()
        return out.detach()


class Eager(torch.nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.optimizer = oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), lr=0.1), [embedding])

    def forward(self, *batch):
        out = Train.build(self, *batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return out


class Score(oneemb.EvalGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def build(self, ids, offsets):
        return self.embedding(ids, offsets=offsets, pooling="max")


@pytest.mark.parametrize(
    ("store", "make_step", "threads"),
    covering(["device", "host", "ssd", "ssd, host cache"], [Train, Eager], [1, 3]),
)
def test_numbers_do_not_depend_on_store_graph_or_threads(tmp_path, store, make_step, threads):
    def run(path, store, make_step, threads):
        embedding = make_embedding(path, store=store, tables=TABLES, dim=DIM, seed=3, num_threads=threads)
        step, score, found = make_step(embedding), Score(embedding), []
        generator = torch.Generator().manual_seed(4)
        for _ in range(6):
            size_P = torch.randint(0, 9, (250 * TABLES,), generator=generator)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), size_P.cumsum(0)])
            ids = torch.randint(0, 9000, (int(offsets[-1]),), generator=generator)
            target = torch.randn(250, TABLES, DIM, generator=generator)
            found += [step(ids, offsets, target), score(ids, offsets)]
            with torch.no_grad():
                assert torch.equal(embedding(ids, offsets=offsets, pooling="max"), found[-1])
        evicted = embedding.stats()["device"]["evicted"]
        assert (evicted > 0) == (store != "device")
        embedding.close()
        return found

    expected = run(tmp_path / "expected", "device", Eager, 2)
    found = run(tmp_path / "found", store, make_step, threads)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
