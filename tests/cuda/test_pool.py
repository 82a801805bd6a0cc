"""Pooled lookups on the GPU: the CPU's bits in the loops, and the CPU's losses, rows and gradients through a model."""

import numpy as np
import pytest
import torch

import oneemb
from oneemb.kernels import pool as cpu
from oneemb.kernels.arrays import Bags, rows_of_columns
from oneemb.kernels.pool_cuda import (
    bags_of_cuda,
    mean_scales_cuda,
    pool_cuda,
    pool_max_cuda,
    scale_grads_cuda,
    spread_max_grads_cuda,
)
from oneemb.kernels.reduce_grads import Segments, sum_segments
from oneemb.kernels.reduce_grads_cuda import PART, reduce_grads_cuda, segments_of
from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_keys import occurrences
from tests.cuda.conftest import SIMULATED
from tests.cuda.test_train import OPTIMIZERS, on_gpu
from tests.support.models import make_embedding
from tests.support.row_updates import to_bits

ONE = Threads(1)
DTYPES = {"float32": torch.float32, "float16": torch.uint16, "bfloat16": torch.int16}

# Shares of a value: in the simulator the same bits.
APART = 0.0 if SIMULATED else 1e-5


def from_bits(array, dtype):
    if dtype == "float32":
        return array
    return torch.from_numpy(array.view(np.int16)).view(getattr(torch, dtype)).float().numpy()


def some_bags(seed=2, bags=7, keys=5, most=5, dim=8, dtype="float32"):
    """weight_SX, slot_U, inverse_N and offset_P1: the first bag is empty, the second is padding alone."""
    rng = np.random.default_rng(seed)
    weight_SX = to_bits(rng.normal(0, 1, (2 * keys, dim)).astype(np.float32), dtype)
    lengths = rng.integers(0, most, bags)
    lengths[:2] = 0, 2
    offset_P1 = np.concatenate([[0], np.cumsum(lengths)])
    inverse_N = rng.integers(-1, keys, offset_P1[-1]).astype(np.int32)
    inverse_N[:2] = -1
    return weight_SX, rng.permutation(2 * keys)[:keys], inverse_N, offset_P1


@pytest.mark.parametrize("scales", ["none", "weights", "mean"])
@pytest.mark.parametrize("dim, dtype", [(3, "float32"), (8, "float32"), (8, "float16"), (8, "bfloat16")])
def test_a_pooled_bag_is_its_rows_summed_in_order(gpu, dim, dtype, scales):
    weight_SX, slot_U, inverse_N, offset_P1 = some_bags(dim=dim, dtype=dtype)
    rows_SD = from_bits(weight_SX, dtype)
    scale_N = np.random.default_rng(3).normal(0, 1, len(inverse_N)).astype(np.float32)
    expected = np.zeros((len(offset_P1) - 1, dim), np.float32)
    for p in range(len(expected)):
        known = [n for n in range(offset_P1[p], offset_P1[p + 1]) if inverse_N[n] >= 0]
        for n in known:
            scale = {"none": np.float32(1), "weights": scale_N[n], "mean": np.float32(1) / np.float32(len(known))}
            expected[p] = expected[p] + scale[scales] * rows_SD[slot_U[inverse_N[n]]]
    offsets, inverse = gpu.put(offset_P1), gpu.put(inverse_N)
    scale = {"none": None, "weights": gpu.put(scale_N), "mean": mean_scales_cuda(offsets, inverse, gpu=gpu)}[scales]
    out_PD = gpu.empty(*expected.shape, dtype=DTYPES[dtype])
    rows = gpu.put(weight_SX), gpu.put(slot_U), inverse
    pool_cuda(*rows, Bags(offsets), scale, out_PD, gpu=gpu)
    found = out_PD.cpu().numpy().copy()  # which in the simulator is a view
    assert found.tobytes() == to_bits(expected, dtype).tobytes() and not found[:2].any()
    row_P = np.arange(len(expected), dtype=np.int32)[::-1].copy()
    pool_cuda(*rows, Bags(offsets, None, gpu.put(row_P)), scale, out_PD, gpu=gpu)
    assert out_PD.cpu().numpy()[row_P].tobytes() == found.tobytes()


@pytest.mark.parametrize("dim, dtype", [(3, "float32"), (40, "float32"), (8, "float16"), (8, "bfloat16")])
def test_maxima_of_bags_and_their_gradients_have_the_cpus_bits(gpu, dim, dtype):
    weight_SX, slot_U, inverse_N, offset_P1 = some_bags(dim=dim, dtype=dtype, bags=9, most=7)
    # Few values, so that the first of several has to be found; NaN, which nothing is greater than.
    values = np.random.default_rng(5).choice(np.array([-1, -0.0, 0.0, 2, np.nan], np.float32), weight_SX.shape)
    weight_SX[:] = to_bits(values, dtype)
    grad_PX = to_bits(np.random.default_rng(6).normal(0, 1, (9, dim)).astype(np.float32), dtype)
    expected_PX, argmax = np.empty((9, dim), weight_SX.dtype), np.empty((9, dim), np.int32)
    cpu.pool_max(weight_SX, slot_U, inverse_N, Bags(offset_P1), expected_PX, argmax, threads=ONE)
    assert (argmax[:2] == -1).all() and argmax.max() > 1
    offsets, out_PD = gpu.put(offset_P1), gpu.empty(9, dim, dtype=DTYPES[dtype])
    argmax_PD = gpu.empty(9, dim, dtype=torch.int32)
    rows = map(gpu.put, (weight_SX, slot_U, inverse_N))
    pool_max_cuda(*rows, Bags(offsets), out_PD, argmax_PD, gpu=gpu)
    np.testing.assert_array_equal(argmax_PD.cpu().numpy(), argmax)
    found, expected = (from_bits(array, dtype) for array in (out_PD.cpu().numpy(), expected_PX))
    np.testing.assert_array_equal(found, expected)
    assert (np.signbit(found) == np.signbit(expected))[~np.isnan(expected)].all()
    expected_NX = np.empty((len(inverse_N), dim), weight_SX.dtype)
    cpu.spread_max_grads(Bags(offset_P1), argmax, grad_PX, expected_NX, threads=ONE)
    grad_NX = gpu.empty(*expected_NX.shape, dtype=DTYPES[dtype])
    spread_max_grads_cuda(Bags(offsets), argmax_PD, gpu.put(grad_PX), grad_NX, gpu=gpu)
    assert grad_NX.cpu().numpy().tobytes() == expected_NX.tobytes()
    row_P = rows_of_columns(9, 3)
    moved = [np.empty_like(array) for array in (expected_PX, argmax, grad_PX)]
    for array, at_rows in zip((expected_PX, argmax, grad_PX), moved, strict=True):
        at_rows[row_P] = array
    bags = Bags(offsets, None, gpu.put(row_P))
    pool_max_cuda(*map(gpu.put, (weight_SX, slot_U, inverse_N)), bags, out_PD, argmax_PD, gpu=gpu)
    np.testing.assert_array_equal(argmax_PD.cpu().numpy(), moved[1])
    np.testing.assert_array_equal(from_bits(out_PD.cpu().numpy(), dtype), from_bits(moved[0], dtype))
    spread_max_grads_cuda(bags, argmax_PD, gpu.put(moved[2]), grad_NX, gpu=gpu)
    assert grad_NX.cpu().numpy().tobytes() == expected_NX.tobytes()


@pytest.mark.parametrize("dim, dtype", [(3, "float32"), (40, "float32"), (16, "float16"), (17, "bfloat16")])
def test_gradients_of_scales_have_the_cpus_bits(gpu, dim, dtype):
    weight_SX, slot_U, inverse_N, offset_P1 = some_bags(dim=dim, dtype=dtype, bags=9)
    grad_PX = to_bits(np.random.default_rng(4).normal(0, 1, (9, dim)).astype(np.float32), dtype)
    bag_N = np.repeat(np.arange(9, dtype=np.int32), np.diff(offset_P1))
    expected = cpu.scale_grads(weight_SX, slot_U, inverse_N, bag_N, grad_PX, threads=ONE)
    found = scale_grads_cuda(*map(gpu.put, (weight_SX, slot_U, inverse_N, bag_N.astype(np.int64), grad_PX)), gpu=gpu)
    assert found.cpu().numpy().tobytes() == expected.tobytes()
    by_hand = (from_bits(weight_SX, dtype)[slot_U[inverse_N]] * from_bits(grad_PX, dtype)[bag_N]).astype(float).sum(1)
    np.testing.assert_allclose(found.cpu(), np.where(inverse_N < 0, 0, by_hand), rtol=1e-4, atol=1e-5)


def test_bags_and_tables_of_ids(gpu):
    offset_P1, table_P = np.array([0, 0, 3, 3, 4, 9, 9]), np.array([1, 0, 0, 2, 1, 1], np.int32)
    bag_N = np.repeat(np.arange(6), np.diff(offset_P1))
    for tables, given, expected in [(3, table_P, table_P[bag_N]), (2, None, bag_N % 2)]:
        size_2 = gpu.full(2, value=0, dtype=torch.int64)
        given = None if given is None else gpu.put(given)
        found, table_N = bags_of_cuda(gpu.put(offset_P1), given, None, tables, 9, size_2, gpu=gpu)
        assert found.tolist() == bag_N.tolist() and table_N.tolist() == expected.tolist()
        assert size_2.tolist() == [0, 0]


@pytest.mark.parametrize(
    "offsets, tables",
    [
        ([1, 2, 4], None), ([0, 3, 2, 4], None), ([0, 2, 3], None), ([0, 2, 5], None), ([0], None), ([-1, 4], None),
        ([0, 9, 4], None), ([0, 2, 4], [0, 2]), ([0, 4, 4], [0, -1]),
    ],
    ids=str,
)  # fmt: skip
def test_offsets_and_tables_that_are_wrong_are_noted_and_read_nothing_out_of_range(gpu, offsets, tables):
    size_2 = gpu.full(2, value=0, dtype=torch.int64)
    table_P = None if tables is None else gpu.put(np.array(tables, np.int32))
    bag_N, _ = bags_of_cuda(gpu.put(np.array(offsets)), table_P, None, 2, 4, size_2, gpu=gpu)
    assert int(size_2[1]) == 1 and all(0 <= bag < max(1, len(offsets) - 1) for bag in bag_N.tolist())


@pytest.mark.parametrize("dim, dtype", [(3, "float32"), (8, "float16")])
def test_scaled_sums_of_bags_gradients_have_the_cpus_bits_up_to_a_part(gpu, dim, dtype):
    _, _, inverse_N, offset_P1 = some_bags(bags=40, keys=6, dim=dim)
    rng = np.random.default_rng(6)
    grad_PX = to_bits(rng.normal(0, 1, (40, dim)).astype(np.float32), dtype)
    bag_N = np.repeat(np.arange(40, dtype=np.int32), np.diff(offset_P1))
    scale_N = rng.normal(0, 1, len(inverse_N)).astype(np.float32)
    assert np.bincount(inverse_N[inverse_N >= 0]).max() <= PART
    for scales in (None, scale_N):
        expected, _ = sum_segments(
            Segments(grad_PX, *occurrences(inverse_N.astype(np.int32), 6, bag_N, scales)), threads=ONE
        )
        given = None if scales is None else gpu.put(scales)
        bags = gpu.put(bag_N.astype(np.int64))
        segments = segments_of(gpu.put(grad_PX), gpu.put(inverse_N), 6, bags, given, gpu=gpu)
        found, _ = reduce_grads_cuda(segments, gpu=gpu)
        assert found.cpu().numpy().tobytes() == expected.tobytes()


def test_a_hot_key_of_many_bags_is_summed_in_scaled_parts(gpu):
    rng = np.random.default_rng(7)
    inverse_N = np.where(rng.random(3 * PART) < 0.9, 0, 1).astype(np.int32)
    bag_N, scale_N = np.arange(3 * PART) // 3, rng.normal(0, 1, 3 * PART).astype(np.float32)
    grad_PD = rng.normal(0, 1, (PART, 4)).astype(np.float32)
    segments = segments_of(
        gpu.put(grad_PD), gpu.put(inverse_N), 2, gpu.put(bag_N), gpu.put(scale_N), gpu=gpu
    )  # fmt: skip
    found, _ = reduce_grads_cuda(segments, gpu=gpu)
    for u in range(2):
        terms = (grad_PD[bag_N] * scale_N[:, None])[inverse_N == u].astype(np.float64)
        assert (np.abs(found[u].cpu().numpy() - terms.sum(0)) <= len(terms) * 2.0**-23 * np.abs(terms).sum(0)).all()


class Pooled(oneemb.TrainGraph):
    """Two tables pooled by weights that are trained, by their mean and by their maximum, in one step."""

    def __init__(self, path, store, optimizer, **options):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = make_embedding(path, store=store, tables=2, dim=4, seed=7, padding_idx=11, **options)
        self.weigh = torch.nn.Embedding(40, 1)
        self.top = torch.nn.Linear(8, 1)
        self.add_optimizer(OPTIMIZERS[optimizer](self.parameters()))

    def build(self, ids, offsets, label):
        mean = self.embedding(ids, offsets=offsets, pooling="mean")
        scales = self.weigh(ids).squeeze(1)
        summed = self.embedding(ids, offsets=offsets, per_sample_weights=scales)
        maximum = self.embedding(ids, offsets=offsets, pooling="max")
        by_column = self.embedding(ids, offsets=offsets, pooling="mean", columns=(0, 1))
        greatest = self.embedding(ids, offsets=offsets, pooling="max", columns=(1, 1))
        pooled = mean + summed + maximum + by_column + greatest
        logit = self.top(pooled.float().flatten(1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        loss.backward()
        return loss


def bag_batches(steps=4, samples=6):
    generator = torch.Generator().manual_seed(9)
    for _ in range(steps):
        offsets = torch.cat([torch.zeros(1), torch.randint(0, 4, (2 * samples,), generator=generator).cumsum(0)]).long()
        ids = torch.randint(0, 40, (int(offsets[-1]),), generator=generator)
        yield ids, offsets, torch.randint(0, 2, (samples,), generator=generator).float()


def train_pooled(path, store, optimizer, gpu=None, prefetch_depth=0, **options):
    graph = Pooled(path, store, optimizer, **options)
    try:
        if gpu is None:
            return losses_and_rows(graph, list(bag_batches()), prefetch_depth)
        with on_gpu(gpu, graph):
            batches = [tuple(part.to(gpu.device) for part in batch) for batch in bag_batches()]
            return losses_and_rows(graph, batches, prefetch_depth)
    finally:
        graph.embedding.close()


def losses_and_rows(graph, batches, prefetch_depth):
    losses = [loss.item() for loss in graph.run(batches, prefetch_depth=prefetch_depth)]
    graph.eval()
    ids, offsets, _ = batches[0]
    peeked = [
        graph.embedding(ids + 20, offsets=offsets, pooling="mean"),  # of which some are known and some are not
        graph.embedding(ids + 20, offsets=offsets, pooling="max"),
        graph.embedding(ids, offsets=offsets, per_sample_weights=torch.ones(len(ids), device=ids.device) / 3),
        graph.embedding(torch.arange(40, device=ids.device)[:, None].expand(-1, 2)),
    ]
    assert graph.embedding.stats()["device"]["pinned"] == 0
    return losses, [one.detach().float().cpu() for one in [*peeked, graph.weigh.weight]]


@pytest.mark.parametrize("store, optimizer, depth", [
    ("device", "sgd", 0), ("device", "adagrad", 2), ("host", "adam", 2), ("ssd", "row-wise adagrad", 0),
    ("device", "smart decay adam", 0),
])  # fmt: skip
def test_a_graph_of_pooled_lookups_trains_as_on_the_cpu(gpu, store, optimizer, depth, tmp_path):
    expected, expected_rows = train_pooled(tmp_path / "cpu", store, optimizer)
    found, rows = train_pooled(tmp_path / "gpu", store, optimizer, gpu, depth)
    apart = 1e-5 if optimizer == "row-wise adagrad" else APART
    np.testing.assert_allclose(found, expected, rtol=apart, atol=apart)
    for one, other in zip(rows, expected_rows, strict=True):
        np.testing.assert_allclose(one, other, rtol=max(apart, 10 * APART), atol=max(apart, 10 * APART))


def test_half_width_bags_are_those_of_the_cpu(gpu, tmp_path):
    expected, _ = train_pooled(tmp_path / "cpu", "device", "adagrad", dtype=torch.bfloat16)
    found, _ = train_pooled(tmp_path / "gpu", "device", "adagrad", gpu, dtype=torch.bfloat16)
    np.testing.assert_allclose(found, expected, rtol=0 if SIMULATED else 1e-2)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(offsets=[1, 2, 4]), "offsets must begin with 0, never fall, and end with the number of ids, 4"),
        (dict(offsets=[0, 3, 2, 4, 4]), "never fall"),
        (dict(offsets=[0, 2, 4], table_ids=[0, 2]), "table_ids must be from 0 to 1, got 0 to 2"),
        (dict(offsets=[0, 4], table_ids=[-1]), "table_ids must be from 0 to 1, got -1 to -1"),
        (dict(table_ids=[0, 1, 2, 1]), "table_ids must be from 0 to 1, got 0 to 2"),
        (dict(table_ids=[0, 1, 1 << 32, 1]), "table_ids must be from 0 to 1, got 0 to 4294967296"),
    ],
    ids=str,
)
def test_what_the_device_finds_wrong_is_refused_by_name_and_changes_nothing(
    gpu, arguments, message, training, tmp_path
):
    embedding = make_embedding(tmp_path, tables=2, dim=3)
    with on_gpu(gpu, embedding):
        known = torch.tensor([[1, 2], [3, 4]], device=gpu.device)
        embedding(known)
        before = embedding.stats()["rows"], embedding.stats()["device"]["hits"]
        arguments = {name: torch.tensor(value, device=gpu.device) for name, value in arguments.items()}
        embedding.train(training)
        with pytest.raises(ValueError, match=message):
            embedding(torch.tensor([1, 2, 3, 50], device=gpu.device), **arguments)
        assert (embedding.stats()["rows"], embedding.stats()["device"]["hits"]) == before
        assert embedding.stats()["device"]["pinned"] <= 4  # of the lookup before, which nothing has released
    embedding.close()


def test_no_bags_and_bags_of_no_ids(gpu, tmp_path):
    embedding = make_embedding(tmp_path, tables=2, dim=3)
    none = torch.zeros(0, dtype=torch.int64, device=gpu.device)
    with on_gpu(gpu, embedding):
        assert embedding(none, offsets=torch.zeros(1, dtype=torch.int64, device=gpu.device)).shape == (0, 2, 3)
        out = embedding(none, offsets=torch.zeros(5, dtype=torch.int64, device=gpu.device), pooling="mean")
        assert out.shape == (2, 2, 3) and not out.any()
        with pytest.raises(ValueError, match="the number of ids, 0"):
            embedding(none, offsets=torch.tensor([0, 0, 1], device=gpu.device))
        with pytest.raises(ValueError, match="the number of ids, 0"):
            embedding.eval()(none, offsets=torch.tensor([0, 0, 1], device=gpu.device))
    embedding.close()
