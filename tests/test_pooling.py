"""Pooled lookups against torch.nn.EmbeddingBag: values, gradients of rows and of per-sample weights, updates."""

import numpy as np
import pytest
import torch

import oneemb

TABLES, DIM, VOCABULARY = 3, 20, 40


def make(tmp_path, dtype=torch.float32, tables=TABLES, padding_idx=None, threads=2, lr=0.5):
    embedding = oneemb.MultiTableEmbedding(
        "bags", DIM, dtype, torch.int64, [oneemb.make_table(oneemb.make_normal_initializer(0, 1))] * tables,
        oneemb.make_device_mem_store_options(str(tmp_path)), padding_idx=padding_idx, num_threads=threads,
    )  # fmt: skip
    return embedding, oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=lr), [embedding])


def bags(samples=50, tables=TABLES, most=6, seed=0):
    """ids [N], offsets [P + 1], table of each bag [P]: some bags are empty, some ids come twice in one."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most, (samples * tables,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, VOCABULARY, (int(offsets[-1]),), generator=generator)
    return ids, offsets, torch.arange(samples * tables) % tables


def bag_module(embedding, tables, mode, lr=0.5):
    """torch's EmbeddingBag over the same rows, table after table."""
    every = torch.arange(VOCABULARY)[:, None].expand(-1, tables)
    weight = embedding.eval()(every).detach().float().transpose(0, 1).reshape(-1, DIM)
    embedding.train()
    module = torch.nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, mode=mode, include_last_offset=True)
    return module, torch.optim.SGD(module.parameters(), lr=lr)


def rows_after(embedding, tables):
    return embedding.eval()(torch.arange(VOCABULARY)[:, None].expand(-1, tables)).detach().float()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("threads", [1, 2])
def test_bags_equal_embedding_bag_forward_and_after_a_step(tmp_path, mode, threads):
    embedding, optimizer = make(tmp_path, threads=threads)
    ids, offsets, table_P = bags()
    module, module_optimizer = bag_module(embedding, TABLES, mode)
    flat = ids + VOCABULARY * table_P.repeat_interleave(offsets.diff())
    out, expected = embedding(ids, offsets=offsets, pooling=mode), module(flat, offsets)
    assert out.shape == (50, TABLES, DIM)
    torch.testing.assert_close(out.reshape(-1, DIM), expected)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad.reshape(out.shape))
    expected.backward(grad)
    optimizer.step()
    optimizer.zero_grad()
    module_optimizer.step()
    expected_rows = module.weight.detach().reshape(TABLES, VOCABULARY, DIM).transpose(0, 1)
    torch.testing.assert_close(rows_after(embedding, TABLES), expected_rows)


def test_per_sample_weights_equal_embedding_bag_with_their_gradient(tmp_path):
    embedding, optimizer = make(tmp_path)
    ids, offsets, table_P = bags()
    module, module_optimizer = bag_module(embedding, TABLES, "sum")
    flat = ids + VOCABULARY * table_P.repeat_interleave(offsets.diff())
    ours = torch.randn(len(ids), generator=torch.Generator().manual_seed(2)).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    out = embedding(ids, offsets=offsets, per_sample_weights=ours)
    expected = module(flat, offsets, theirs)
    torch.testing.assert_close(out.reshape(-1, DIM), expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    optimizer.step()
    optimizer.zero_grad()
    module_optimizer.step()
    expected_rows = module.weight.detach().reshape(TABLES, VOCABULARY, DIM).transpose(0, 1)
    torch.testing.assert_close(rows_after(embedding, TABLES), expected_rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_padding_counts_for_nothing(tmp_path, mode):
    embedding, optimizer = make(tmp_path, tables=1, padding_idx=7)
    ids, offsets, _ = bags(tables=1)
    every = torch.arange(VOCABULARY)[:, None]
    weight = embedding.eval()(every).detach()[:, 0]
    embedding.train()
    module = torch.nn.EmbeddingBag.from_pretrained(
        weight, freeze=False, mode=mode, include_last_offset=True, padding_idx=7
    )
    assert (ids == 7).any()
    out, expected = embedding(ids, offsets=offsets, pooling=mode), module(ids, offsets)
    assert out.shape == (50, DIM)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_width_bags_are_summed_in_float32_and_rounded_once(tmp_path, dtype):
    embedding, _ = make(tmp_path, dtype=dtype)
    ids, offsets, table_P = bags(most=20)
    rows = embedding(ids, table_P.repeat_interleave(offsets.diff())).detach().float()
    expected = torch.stack([rows[a:b].sum(0) for a, b in zip(offsets[:-1], offsets[1:], strict=True)])
    out = embedding(ids, table_P, offsets)
    assert out.dtype == dtype and out.shape == (len(table_P), DIM)
    # Half an ulp of the rounding, and a little for the order of the sum.
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), expected, rtol=0.51 * ulp, atol=1e-5)


def test_bags_of_one_id_are_that_id_bit_for_bit(tmp_path):
    embedding, _ = make(tmp_path)
    ids = torch.randint(-(2**63), 2**63 - 1, (30, TABLES))
    out = embedding(ids.reshape(-1), offsets=torch.arange(30 * TABLES + 1))
    assert torch.equal(out, embedding(ids))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_eval_mode_pools_without_inserting(tmp_path, mode):
    embedding, _ = make(tmp_path)
    ids, offsets, _ = bags()
    frozen = embedding.eval()(ids, offsets=offsets, pooling=mode)
    with torch.no_grad():
        peeked = embedding(ids, offsets=offsets, pooling=mode)
    assert embedding.stats()["rows"] == 0
    trained = embedding.train()(ids, offsets=offsets, pooling=mode)
    assert torch.equal(frozen, trained) and torch.equal(peeked, trained)


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_bits_do_not_depend_on_the_number_of_threads(tmp_path, mode):
    ids, offsets, _ = bags(samples=3000)
    after = []
    for threads in (1, 2, 3):
        embedding, optimizer = make(tmp_path / str(threads), threads=threads)
        out = embedding(ids, offsets=offsets, pooling=mode)
        out.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after.append((out.detach(), rows_after(embedding, TABLES)))
    assert all(torch.equal(x, y) for other in after[1:] for x, y in zip(after[0], other, strict=True))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_no_bags_and_empty_bags(tmp_path, mode):
    embedding, _ = make(tmp_path)
    none = torch.zeros(0, dtype=torch.int64)
    assert embedding(none, offsets=torch.zeros(1, dtype=torch.int64), pooling=mode).shape == (0, TABLES, DIM)
    out = embedding(none, offsets=torch.zeros(2 * TABLES + 1, dtype=torch.int64), pooling=mode)
    assert out.shape == (2, TABLES, DIM) and not out.any()
    out.sum().backward()
    assert not len(embedding.weight.grad.row_values())


class _Step(oneemb.TrainGraph):
    def __init__(self, embedding, mode, lr=0.5):
        super().__init__()
        self.embedding, self.mode = embedding, mode
        self.add_optimizer(torch.optim.SGD(embedding.parameters(), lr=lr))

    def build(self, ids, offsets):
        out = self.embedding(ids, offsets=offsets, pooling=self.mode)
        loss = out.square().sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_train_graph_pools_as_the_eager_step_does(tmp_path, mode):
    ids, offsets, _ = bags()
    embedding, optimizer = make(tmp_path / "eager")
    compiled = oneemb.MultiTableEmbedding(
        "bags", DIM, torch.float32, torch.int64, embedding.tables,
        oneemb.make_device_mem_store_options(str(tmp_path / "graph")),
    )  # fmt: skip
    graph = _Step(compiled, mode)
    for _ in range(3):
        loss = embedding(ids, offsets=offsets, pooling=mode).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert graph(ids, offsets).item() == loss.item()
    assert torch.equal(rows_after(embedding, TABLES), rows_after(compiled, TABLES))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(offsets=torch.tensor([0, 2, 4])), "B \\* 3 bags"),
        (dict(offsets=torch.tensor([1, 2, 3, 4])), "begin with 0"),
        (dict(offsets=torch.tensor([0, 3, 2, 4])), "never fall"),
        (dict(offsets=torch.tensor([0, 2, 3])), "pass include_last_offset=False"),
        (dict(offsets=torch.tensor([0, 2, 3, 3])), "end with the number of ids, 4"),
        (dict(offsets=torch.tensor([0.0, 2, 3, 4])), "int64 tensor"),
        (dict(offsets=torch.tensor([0, 1, 2, 4]), pooling="median"), '"sum", "mean" or "max", got \'median\''),
        (dict(table_ids=torch.tensor([0, 1, 1, 2]), pooling="median"), '"sum", "mean" or "max"'),
        (dict(offsets=torch.tensor([0, 1, 2, 4]), per_sample_weights=torch.ones(3)), "each of 4 ids"),
        (dict(offsets=torch.tensor([0, 1, 2, 4]), per_sample_weights=torch.ones(4), pooling="mean"), "summed"),
        (dict(offsets=torch.tensor([0, 1, 2, 4]), per_sample_weights=torch.ones(4), pooling="max"), "summed"),
        (dict(offsets=torch.tensor([0, 2, 4]), table_ids=torch.tensor([0, 3])), "from 0 to 2"),
        (dict(offsets=torch.tensor([0, 2, 4]), table_ids=torch.tensor([0, 1, 1])), "each of 2 bags"),
        (dict(table_ids=torch.tensor([0, 1, 1, 2]), per_sample_weights=torch.ones(4)), "pass offsets"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, arguments, message):
    embedding, _ = make(tmp_path)
    with pytest.raises((TypeError, ValueError), match=message):
        embedding(torch.tensor([1, 2, 3, 4]), **arguments)
    assert embedding.stats()["rows"] == embedding.stats()["device"]["pinned"] == 0


@pytest.mark.parametrize("table_ids", [torch.tensor(1), torch.tensor([1])], ids=["scalar", "of one"])
@pytest.mark.parametrize("empty", [False, True])
def test_one_table_for_all_bags(tmp_path, table_ids, empty):
    embedding, _ = make(tmp_path)
    ids, offsets, _ = bags(samples=4)
    if empty:
        ids, offsets = ids[:0], offsets * 0
    every = torch.ones(len(offsets) - 1, dtype=torch.int64)
    for lookup in (embedding, embedding.eval()):
        assert torch.equal(lookup(ids, table_ids, offsets), lookup(ids, every, offsets))
    assert embedding(ids[:0], torch.tensor(1), torch.tensor([0])).shape == (0, DIM)


def test_the_comparison_notices_a_wrong_mean(tmp_path):
    embedding, _ = make(tmp_path, tables=1)
    ids, offsets, _ = bags(tables=1)
    module, _ = bag_module(embedding, 1, "sum")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(embedding(ids, offsets=offsets, pooling="mean"), module(ids, offsets))


def test_a_gradient_of_a_bag_that_is_not_finite_changes_nothing(tmp_path):
    embedding, optimizer = make(tmp_path)
    ids, offsets, _ = bags()
    before = rows_after(embedding, TABLES)
    embedding.train()
    out = embedding(ids, offsets=offsets)
    grad = torch.ones_like(out)
    grad[int(np.flatnonzero(np.diff(offsets.numpy()))[0]) // TABLES] = float("nan")
    out.backward(grad)
    with pytest.raises(oneemb.NonFiniteGradientError):
        optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(rows_after(embedding, TABLES), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_stops_the_step(tmp_path, bad):
    embedding, optimizer = make(tmp_path, tables=1)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 3])
    # The gradient that reaches the bags is all ones: only the weight makes that of id 2 not finite.
    embedding(ids, offsets=offsets, per_sample_weights=torch.tensor([1.0, bad, 0.5])).sum().backward()
    before = embedding.eval()(ids)
    with pytest.raises(oneemb.NonFiniteGradientError, match="gradients of 1 of 3 rows .* id 2 in table 0"):
        optimizer.step()
    assert torch.equal(embedding(ids), before)


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_what_a_lookup_was_given_may_change_before_its_gradient_comes(tmp_path, mode):
    """torch's EmbeddingBag refuses the backward pass then."""
    ids, offsets, table_P = bags()
    scales = torch.rand(len(ids)) if mode == "weighted" else None
    pooling = "sum" if mode == "weighted" else mode
    found = []
    for change in (False, True):
        embedding, _ = make(tmp_path / str(change))
        given = [tensor if tensor is None else tensor.clone() for tensor in (ids, table_P, offsets, scales)]
        rows = embedding(*given, pooling=pooling)
        if change:
            for tensor in given:
                if tensor is not None:
                    tensor.zero_()
        (rows * torch.arange(1.0, len(rows) + 1)[:, None]).sum().backward()
        found.append([*embedding.weight.grad.row_keys(), embedding.weight.grad.row_values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_pooling_of_ids_in_no_bags_is_an_error(tmp_path, pooling):
    embedding, _ = make(tmp_path / "rows", tables=2)
    ids = torch.tensor([[1, 2], [3, 4]])
    embedding(ids)
    averaged = oneemb.AveragedEmbedding(embedding, tmp_path / "averages")

    class Score(oneemb.EvalGraph):
        def __init__(self):
            super().__init__()
            self.embedding = embedding

        def build(self, ids, **more):
            return self.embedding(ids, **more)

    score = Score()
    for look_up in (embedding, embedding.eval(), averaged, score):
        with pytest.raises(ValueError, match=r"ids of bags must be of shape \[B, 2, L\].*got \[2, 2\]"):
            look_up(ids, pooling=pooling)
        with pytest.raises(ValueError, match=f"pooling='{pooling}' is for bags.*got no offsets"):
            look_up(ids[0], pooling=pooling, table_ids=torch.tensor(0))
        assert look_up(ids).shape == (2, 2, DIM)
        assert look_up(ids.reshape(-1), offsets=torch.arange(5), pooling=pooling).shape == (2, 2, DIM)
        assert torch.equal(
            look_up(ids.reshape(-1), offsets=torch.tensor([0, 0, 2, 3, 4])),
            look_up(ids.reshape(-1), offsets=torch.tensor([0, 0, 2, 3, 4]), pooling="sum"),
        )
