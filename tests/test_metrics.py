"""Figures for loggers, against what was looked up; pretrained rows against torch.nn.Embedding."""

import pytest
import torch

import oneemb
from tests.support.models import STORES, make_embedding


@pytest.mark.parametrize("kind", STORES)
def test_shares_are_of_the_lookups_since_the_last_call(tmp_path, kind):
    embedding = make_embedding(tmp_path, store=kind)
    first = embedding.metrics()
    assert first["hit_rate"] == first["served_without_disk"] == 1.0 and first["rows"] == 0
    embedding(torch.arange(10))
    new = embedding.metrics()
    assert new["rows"] == 10 and new["hit_rate"] == 0.0 and new["served_without_disk"] == 1.0
    embedding(torch.arange(20).repeat(2))
    assert embedding.metrics()["hit_rate"] == pytest.approx(0.5)
    known = embedding.metrics()
    assert known["hit_rate"] == 1.0 and known["memory_bytes"] > 0
    assert all(isinstance(value, int | float) for value in known.values())
    embedding.close()


def test_rows_from_the_disk_are_counted(tmp_path):
    embedding = make_embedding(tmp_path, store="ssd", dim=64)
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    for begin in range(0, 12_000, 1000):  # more than the cache has room for
        embedding(torch.arange(begin, begin + 1000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    embedding.metrics()
    embedding(torch.arange(1000))
    found = embedding.metrics()
    assert found["served_without_disk"] == pytest.approx(found["hit_rate"], abs=0.01) and found["hit_rate"] < 0.9
    assert found["rows_evicted"] > 0 and found["rows_written"] > 0 and found["disk_bytes"] > 0
    embedding.close()


def test_rows_that_are_given_read_as_those_of_torchs_embedding(seed):
    weight = torch.randn(20, 4, generator=torch.Generator().manual_seed(seed))
    module = torch.nn.Embedding.from_pretrained(weight)
    with oneemb.MultiTableEmbedding.from_pretrained(weight) as embedding:
        ids = torch.randint(0, 20, (3, 7))
        assert torch.equal(embedding(ids), module(ids))
        assert not embedding.weight.requires_grad and not embedding(ids).requires_grad
    ids = torch.randperm(10_000)[:20] - 5000
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        with oneemb.MultiTableEmbedding.from_pretrained(weight.to(dtype), ids, freeze=False) as embedding:
            assert torch.equal(embedding(ids), weight.to(dtype)) and embedding.num_rows == 20
            embedding(ids).float().sum().backward()
            torch.optim.SGD(embedding.parameters(), lr=0.5).step()
            torch.testing.assert_close(embedding(ids), (weight.to(dtype).float() - 0.5).to(dtype))


def test_tables_have_rows_of_their_own():
    one, two = torch.eye(3), 2 * torch.eye(3)[:2]
    with oneemb.MultiTableEmbedding.from_pretrained(
        [one, two], [torch.tensor([5, 6, 7]), torch.tensor([7, 9])]
    ) as both:
        assert torch.equal(
            both(torch.tensor([[7, 7], [5, 9]])),
            torch.stack([torch.stack([one[2], two[0]]), torch.stack([one[0], two[1]])]),
        )


def test_rows_of_columns_are_given_side_by_side():
    weight = torch.arange(12.0).reshape(2, 6)
    make = oneemb.MultiTableMultiColumnEmbedding.from_pretrained
    with make(weight, embedding_dim=[2, 4]) as columns, make(weight) as whole:
        assert columns.column_dims == (2, 4) and whole.column_dims == (6,)
        assert torch.equal(columns(torch.tensor([1, 0])), weight[[1, 0]])
        assert torch.equal(whole(torch.tensor([1, 0])), weight[[1, 0]])
    with pytest.raises(ValueError, match="embedding_dim must be 6"):
        make(weight, embedding_dim=[2, 2])


def test_an_embedding_whose_rows_cannot_come_is_closed(tmp_path):
    options = oneemb.make_device_mem_store_options(tmp_path)
    with pytest.raises(ValueError, match="must be finite") as caught:
        oneemb.MultiTableEmbedding.from_pretrained(torch.tensor([[1.0], [float("inf")]]), store_options=options)
    made = [frame.frame.f_locals.get("embedding") for frame in caught.traceback]
    made = [one for one in made if isinstance(one, oneemb.MultiTableEmbedding)]
    with pytest.raises(oneemb.StorageError, match="is closed"):
        made[0].stats()


REFUSED = [
    (dict(weight=torch.ones(3)), TypeError, "weight must be float32, float16 or bfloat16"),
    (dict(weight=[[1.0]]), TypeError, "weight must be float32, float16 or bfloat16"),
    (dict(weight=torch.ones(3, 2, dtype=torch.float64)), TypeError, "got torch.float64"),
    (dict(weight=[torch.ones(3, 2), torch.ones(3, 4)]), TypeError, "the same dtype and D for all tables"),
    (dict(weight=torch.ones(3, 2), ids=torch.arange(2)), ValueError, "one for each row"),
    (dict(weight=torch.ones(2, 2), ids=torch.tensor([1, 1])), ValueError, "one for each row, and distinct"),
    (dict(weight=torch.ones(2, 2), ids=torch.ones(2)), TypeError, "int64 or int32"),
    (
        dict(weight=torch.ones(2, 2), ids=[0, 1]),
        TypeError,
        "got list for table 0; call torch.as_tensor",
    ),
    (dict(weight=[torch.ones(2, 2)], tables=[oneemb.make_table()] * 2), ValueError, "tables must be 1, .* got 2"),
    (dict(weight=torch.ones(2, 3), embedding_dim=4), ValueError, "embedding_dim must be 3, the width of weight"),
    (dict(weight=[torch.ones(2, 2)], ids=[]), ValueError, "one tensor for each table, got 1 weights and 0 ids"),
    (dict(weight=torch.tensor([[float("nan")]])), ValueError, "must be finite"),
]


@pytest.mark.parametrize("arguments, error, words", REFUSED)
def test_what_is_no_table_is_refused_in_words(arguments, error, words):
    with pytest.raises(error, match=words):
        oneemb.MultiTableEmbedding.from_pretrained(**arguments)
