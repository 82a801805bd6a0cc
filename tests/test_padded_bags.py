"""Bags that are the last dimension of ids, and offsets without the last one: against EmbeddingBag, in every form."""

import pytest
import torch

import oneemb
from tests.support.models import make_embedding

VOCABULARY, DIM, PAD = 30, 4, 0
MODES = ["sum", "mean", "max"]


def padded(shape, seed):
    """Ids of bags, some short, some empty, filled with PAD."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, shape, generator=generator)
    lengths = torch.randint(0, shape[-1] + 1, shape[:-1], generator=generator)
    return torch.where(torch.arange(shape[-1]) < lengths[..., None], ids, PAD)


def bag_module(embedding, table, mode):
    every = torch.arange(VOCABULARY)
    weight = embedding.read(every, torch.full_like(every, table))
    return torch.nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode=mode, padding_idx=PAD)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tables", [1, 3])
def test_bags_of_the_last_dimension_are_those_of_embedding_bag(tmp_path, mode, tables, seed):
    embedding = make_embedding(tmp_path, tables=tables, padding_idx=PAD)
    ids = padded((8, tables, 5), seed)
    modules = [bag_module(embedding, table, mode) for table in range(tables)]
    expected = torch.stack([module(ids[:, t]) for t, module in enumerate(modules)], 1)
    rows = embedding(ids if tables > 1 else ids[:, 0], pooling=mode)
    assert rows.shape == ((8, 3, DIM) if tables > 1 else (8, DIM))
    torch.testing.assert_close(rows.reshape(expected.shape), expected)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed))
    rows.backward(grad.reshape(rows.shape))
    expected.backward(grad)
    torch.optim.SGD(embedding.parameters(), lr=0.5).step()
    for table, module in enumerate(modules):
        torch.optim.SGD(module.parameters(), lr=0.5).step()
        after = embedding.read(torch.arange(1, VOCABULARY), torch.tensor(table))
        torch.testing.assert_close(after, module.weight.detach()[1:])
    embedding.close()


def test_tables_and_scales_of_bags_of_any_shape(tmp_path, seed):
    embedding = make_embedding(tmp_path, tables=2)
    generator = torch.Generator().manual_seed(seed)
    ids, scales = torch.randint(0, VOCABULARY, (3, 2, 2, 4), generator=generator), torch.rand(3, 2, 2, 4)
    table_ids = torch.tensor([0, 1])
    rows = embedding(ids, table_ids, per_sample_weights=scales, pooling="sum")
    every = embedding.read(ids, table_ids[:, None])
    torch.testing.assert_close(rows, (every * scales[..., None]).sum(-2))
    assert rows.shape == (3, 2, 2, DIM)
    torch.testing.assert_close(
        embedding(ids, torch.tensor(1), pooling="mean"), embedding.read(ids, torch.tensor(1)).mean(-2)
    )
    embedding.close()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("mode", MODES)
def test_no_bags_and_bags_of_no_ids(tmp_path, shape, mode):
    embedding = make_embedding(tmp_path)
    rows = embedding(torch.empty(shape, dtype=torch.int64), pooling=mode)
    assert torch.equal(rows, torch.zeros(shape[0], DIM))
    rows.sum().backward()
    torch.optim.SGD(embedding.parameters(), lr=0.5).step()
    embedding.close()


@pytest.mark.parametrize("mode", MODES)
def test_offsets_without_the_last_one_are_those_of_embedding_bag(tmp_path, mode, seed):
    embedding = make_embedding(tmp_path)
    ids = torch.randint(1, VOCABULARY, (9,), generator=torch.Generator().manual_seed(seed))
    offsets = torch.tensor([0, 2, 2, 5, 9])  # The second bag and the last one are empty.
    module = bag_module(embedding, 0, mode)
    rows = embedding(ids, offsets=offsets, pooling=mode, include_last_offset=False)
    torch.testing.assert_close(rows, module(ids, offsets))
    whole = embedding(ids, offsets=torch.cat([offsets, torch.tensor([9])]), pooling=mode)
    assert torch.equal(rows, whole)
    embedding.close()


class Bags(oneemb.TrainGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(torch.optim.Adagrad(embedding.parameters(), lr=0.1))

    def build(self, ids):
        loss = self.embedding(ids, pooling="mean").square().sum()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("depth", [None, 0, 2])
def test_a_graph_gives_the_bits_of_an_eager_loop(tmp_path, depth, seed):
    batches = [padded((6, 2, 4), seed + step) for step in range(6)]
    eager = make_embedding(tmp_path / "eager", tables=2, padding_idx=PAD)
    optimizer = torch.optim.Adagrad(eager.parameters(), lr=0.1)
    expected = []
    for ids in batches:
        loss = eager(ids, pooling="mean").square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())
    graph = Bags(make_embedding(tmp_path / "graph", tables=2, padding_idx=PAD))
    losses = [graph(ids) for ids in batches] if depth is None else list(graph.run([(ids,) for ids in batches], depth))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    ids = eager.ids()
    assert torch.equal(graph.embedding.ids(), ids)
    assert torch.equal(graph.embedding.read(ids, torch.tensor(0)), eager.read(ids, torch.tensor(0)))
    eager.close()
    graph.embedding.close()


class Scores(oneemb.EvalGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def build(self, ids):
        return self.embedding(ids, pooling="sum")


def test_served_exported_and_averaged_rows_pool_alike(tmp_path, seed):
    embedding = make_embedding(tmp_path / "rows", tables=2, padding_idx=PAD)
    ids = padded((5, 2, 3), seed)
    embedding(ids, pooling="sum").sum().backward()
    torch.optim.SGD(embedding.parameters(), lr=0.1).step()
    averaged = oneemb.AveragedEmbedding(embedding, tmp_path / "averages")
    averaged.update_rows()
    expected = embedding.eval()(ids, pooling="sum")
    torch.testing.assert_close(averaged(ids, pooling="sum"), expected)
    scores = Scores(embedding)
    assert torch.equal(scores(ids), expected)
    scores.export(tmp_path / "scores.pt2", ids)
    program = torch.export.load(tmp_path / "scores.pt2").module()
    for batch in (ids, ids[:1], ids[:0], padded((9, 2, 3), seed + 1)):
        torch.testing.assert_close(program(batch), embedding(batch, pooling="sum"))
    embedding.save_snapshot("now")
    with oneemb.InferenceEmbedding.open(tmp_path / "rows", snapshot="now") as served:
        for mode in MODES:
            assert torch.equal(served(ids, pooling=mode), embedding(ids, pooling=mode))
        flat, offsets = ids.reshape(-1), torch.arange(10) * 3
        assert torch.equal(served(flat, offsets=offsets, include_last_offset=False), embedding(ids, pooling="sum"))
    averaged.close()
    embedding.close()


REFUSED = [
    (dict(ids=torch.zeros(4, 5, dtype=torch.int64)), r"ids of bags must be of shape \[B, 2, L\]"),
    (dict(ids=torch.zeros(4, 3, 5, dtype=torch.int64)), r"ids of bags must be of shape \[B, 2, L\].*got \[4, 3, 5\]"),
    (dict(ids=torch.zeros(4, 5, dtype=torch.int64), table_ids=torch.zeros(3, dtype=torch.int64)), "one for each bag"),
    (
        dict(ids=torch.zeros(4, 2, 5, dtype=torch.int64), per_sample_weights=torch.ones(4, 2)),
        "must have the shape of ids",
    ),
    (dict(ids=torch.zeros(4, dtype=torch.int64), table_ids=torch.tensor(0)), "got no offsets"),
    (dict(ids=torch.zeros(4, 2, 5, dtype=torch.int64), columns=[0, 1]), "offsets"),
]


@pytest.mark.parametrize("arguments, words", REFUSED)
def test_shapes_that_do_not_fit_are_refused_in_words(tmp_path, arguments, words):
    embedding = make_embedding(tmp_path, tables=2)
    with pytest.raises(ValueError, match=words):
        embedding(**arguments, pooling="sum")
    assert embedding.num_rows == 0
    embedding.close()


def test_ids_that_are_no_tensor_are_refused_as_ever(tmp_path):
    embedding = make_embedding(tmp_path)
    with pytest.raises(TypeError, match="ids must be a tensor"):
        embedding([1, 2], offsets=torch.tensor([0]), include_last_offset=False)
    embedding.close()


class Weighted(oneemb.EvalGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def build(self, ids, offsets, weights):
        return self.embedding(ids, offsets=offsets, per_sample_weights=weights)


def test_a_graph_that_evaluates_gives_weights_of_ids_their_gradient(tmp_path):
    embedding = make_embedding(tmp_path)
    ids, offsets = torch.arange(5), torch.tensor([0, 2, 5])
    graph = Weighted(embedding)
    for _ in range(3):
        weights = torch.rand(5, requires_grad=True)
        rows = graph(ids, offsets, weights)
        expected = embedding.eval()(ids, offsets=offsets, per_sample_weights=weights)
        assert torch.equal(rows, expected)
    embedding.close()
