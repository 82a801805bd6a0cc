"""Rows and gradients that are rounded on their way between ranks."""

import pytest
import torch

import oneemb

DIM = 3


def make(path, group=None, dtype=torch.float32, comm_dtype=torch.float32):
    return oneemb.MultiTableEmbedding(
        "items", DIM, dtype, torch.int64, [oneemb.make_table(oneemb.make_normal_initializer(0, 1))],
        oneemb.make_device_mem_store_options(path), num_threads=1, process_group=group, gradients_of_ranks="sum",
        comm_dtype=comm_dtype,
    )  # fmt: skip


def batch_of(rank):
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 9, (20,), generator=generator)
    return ids, torch.randn(20, DIM, generator=generator)


def step_once(group, path, dtype, comm_dtype):
    """The rows of a lookup; then one step of SGD with a rate of 1, saved."""
    embedding = make(path, group, dtype, comm_dtype)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids, scale = batch_of(group.rank())
    rows = embedding(ids)
    (rows.float() * scale).sum().backward()
    optimizer.step()
    embedding.save_snapshot("stepped")
    embedding.close()
    return rows.detach()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("comm_dtype", [torch.bfloat16, torch.float16])
def test_rows_and_gradients_are_rounded_once_and_summed_in_float32(tmp_path, rank_pool, ranks, comm_dtype):
    looked_up = rank_pool(ranks, step_once, str(tmp_path / "ranks"), torch.float32, comm_dtype)
    one = make(str(tmp_path / "one"))
    before = one.eval()(torch.arange(9)).detach()
    expected = before.clone()
    for rank, rows in enumerate(looked_up):
        ids, scale = batch_of(rank)
        assert torch.equal(rows, before.to(comm_dtype).float()[ids])
        sums = torch.zeros(9, DIM).index_add_(0, ids, scale)
        expected -= sums.to(comm_dtype).float()
    loaded = make(str(tmp_path / "ranks"))
    loaded.load_snapshot("stepped")
    torch.testing.assert_close(loaded.eval()(torch.arange(9)).detach(), expected, rtol=1e-6, atol=1e-6)
    one.close()
    loaded.close()


def test_rows_that_are_no_wider_travel_as_they_are(tmp_path, rank_pool):
    (rows,) = rank_pool(1, step_once, str(tmp_path / "rank"), torch.float16, torch.bfloat16)
    one = make(str(tmp_path / "one"), dtype=torch.float16)
    assert torch.equal(rows, one.eval()(batch_of(0)[0]))
    one.close()


def overflows(group, path):
    embedding = make(path, group, comm_dtype=torch.float16)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    (embedding(torch.tensor([group.rank()])).sum() * (1e6 if group.rank() == 1 else 1.0)).backward()
    with pytest.raises(oneemb.NonFiniteGradientError):
        optimizer.step()
    embedding.close()


def test_a_gradient_beyond_float16_is_refused_by_all(tmp_path, rank_pool):
    rank_pool(2, overflows, str(tmp_path))


def travels_otherwise(group, path):
    embedding = make(path, group, comm_dtype=torch.float32 if group.rank() else torch.bfloat16)
    try:
        embedding(torch.arange(3))
    except oneemb.RankError as error:
        return str(error)
    finally:
        embedding.close()


def test_ranks_that_round_otherwise_are_told(tmp_path, rank_pool):
    for said in rank_pool(2, travels_otherwise, str(tmp_path)):
        assert "rank 0: look up 'items' in training mode, comm_dtype torch.bfloat16; rank 1:" in said


def test_other_dtypes_are_refused(tmp_path, rank_pool):
    rank_pool(1, is_refused, str(tmp_path))


def is_refused(group, path):
    with pytest.raises(ValueError, match="comm_dtype must be torch.float32, torch.float16 or torch.bfloat16, got"):
        make(path, group, comm_dtype=torch.float64)


def step_both(group, path, comm_dtypes):
    """The gradients of one step of two embeddings, with the rows that this rank owns, by `comm_dtype`."""
    both = [make(f"{path}/{dtype}", group, comm_dtype=dtype) for dtype in comm_dtypes]
    optimizer = torch.optim.SGD([embedding.weight for embedding in both], lr=1.0)
    ids, scale = batch_of(group.rank())
    sum((embedding(ids) * scale).sum() for embedding in both).backward()
    optimizer.step()
    grads = [embedding.weight.grad for embedding in both]
    found = {dtype: (grad.row_keys()[1], grad.row_values()) for dtype, grad in zip(comm_dtypes, grads, strict=True)}
    for embedding in both:
        embedding.close()
    return found


@pytest.mark.parametrize("comm_dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_gradients_of_several_embeddings_are_rounded_as_each_says(tmp_path, rank_pool, comm_dtypes):
    results = rank_pool(2, step_both, str(tmp_path), comm_dtypes)
    for dtype in comm_dtypes:
        expected, found = torch.zeros(9, DIM), torch.zeros(9, DIM)
        for rank, of_rank in enumerate(results):
            ids, scale = batch_of(rank)
            expected += torch.zeros(9, DIM).index_add_(0, ids, scale).to(dtype).float()
            owned, values = of_rank[dtype]
            found[owned] = values
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
