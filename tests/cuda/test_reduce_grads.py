"""Sums of gradients on the GPU: the CPU's bits up to a part, a bound beyond, no float atomics but by choice."""

import numpy as np
import pytest
import torch

from oneemb.kernels.reduce_grads import Segments, sum_segments
from oneemb.kernels.reduce_grads_cuda import PART, reduce_grads_cuda, segments_of, sum_grads_cuda
from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_keys import unique_keys
from tests.support.row_updates import to_bits

ONE = Threads(1)


def reduced(gpu, grad_NX, inverse_N, keys):
    segments = segments_of(gpu.put(grad_NX), gpu.put(inverse_N.astype(np.int32)), keys, gpu=gpu)
    assert segments.shape == (keys, grad_NX.shape[1])
    grad_UD, finite_1 = reduce_grads_cuda(segments, gpu=gpu)
    return grad_UD.cpu().numpy(), finite_1.tolist()


def on_cpu(grad_NX, id_N, padding):
    unique = unique_keys(np.zeros(len(id_N), np.int32), id_N, padding_id=padding)
    return unique.inverse_N, *sum_segments(Segments(grad_NX, *unique.occurrences()), threads=ONE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [1, 3, 8])
@pytest.mark.parametrize("ids", ["few", "one", "all different", "padded"])
def test_up_to_a_part_sums_have_the_cpus_bits(gpu, ids, dim, dtype):
    rng = np.random.default_rng(3)
    id_N = {
        "few": rng.integers(0, 5, 60), "one": np.full(PART, 7), "all different": rng.permutation(30),
        "padded": rng.integers(-1, 3, 40),
    }[ids]  # fmt: skip
    grad_NX = to_bits(rng.normal(0, 1, (len(id_N), dim)).astype(np.float32), dtype)
    inverse_N, expected_UD, finite_U = on_cpu(grad_NX, id_N, -1)
    found_UD, finite_1 = reduced(gpu, grad_NX, inverse_N, len(expected_UD))
    assert found_UD.tobytes() == expected_UD.tobytes()
    assert finite_1 == [1] and finite_U.all()


def in_turn(row_ND):
    return np.add.accumulate(row_ND)[-1]


def in_parts(row_ND):
    """The sums of parts, one after the other."""
    return np.stack([in_turn(part) for part in np.split(row_ND, range(PART, len(row_ND), PART))])


def summed_at_once(gpu, grad_NX, inverse_N, keys):
    return sum_grads_cuda(gpu.put(grad_NX), gpu.put(inverse_N.astype(np.int32)), keys, gpu=gpu)[0].cpu().numpy()


@pytest.mark.parametrize("most", [3 * PART + 1, PART * PART, PART * PART + 1, 2 * PART * PART + PART + 1])
def test_a_hot_key_is_summed_in_parts_within_the_bound_and_always_to_the_same_bits(gpu, most):
    rng = np.random.default_rng(4)
    id_N = np.array([0] * most + [1] * (PART + 1) + [2] * PART + [3])
    id_N = id_N[rng.permutation(len(id_N))]
    grad_ND = rng.normal(0, 1, (len(id_N), 4)).astype(np.float32)
    inverse_N, expected_UD, _ = on_cpu(grad_ND, id_N, None)
    found_UD, _ = reduced(gpu, grad_ND, inverse_N, 4)
    assert found_UD.tobytes() == summed_at_once(gpu, grad_ND, inverse_N, 4).tobytes()
    for u in range(4):
        terms = grad_ND[inverse_N == u].astype(np.float64)
        bound = len(terms) * 2.0**-24 * np.abs(terms).sum(0)
        assert (np.abs(found_UD[u] - terms.sum(0)) <= bound).all()
        if len(terms) <= PART:
            assert found_UD[u].tobytes() == expected_UD[u].tobytes()
        else:
            parts_PD = in_parts(grad_ND[inverse_N == u])
            if len(parts_PD) > PART:
                parts_PD = in_parts(parts_PD)
            assert found_UD[u].tobytes() == in_turn(parts_PD).tobytes()


def test_batches_of_many_sizes_in_turn_are_summed_in_the_same_memory(gpu, monkeypatch):
    rng = np.random.default_rng(5)
    batches = []
    for k in range(40):
        inverse_N = np.append(rng.integers(0, 5, 30 + 9 * k), np.arange(5 + k % 3))
        grad_ND = rng.normal(0, 1, (len(inverse_N), 1 + k % 4)).astype(np.float32)
        batches.append((grad_ND, inverse_N, 5 + k % 3))
    expected = [reduced(gpu, *batch)[0].tobytes() for batch in batches]
    summed_at_once(gpu, *batches[-1])  # the largest one
    monkeypatch.setattr(gpu, "empty", None)
    for k in [*rng.permutation(len(batches)), *range(len(batches)), *range(8), *range(8)]:
        assert summed_at_once(gpu, *batches[k]).tobytes() == expected[k]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_sum_that_is_not_finite_turns_the_number_0(gpu, bad):
    grad_ND = np.ones((6, 5), np.float32)
    grad_ND[3, 4] = bad
    inverse_N = np.array([0, 1, 2, 1, 0, 2])
    assert reduced(gpu, grad_ND, inverse_N, 3)[1] == [0]
    grad_ND[3, 4], grad_ND[[0, 4], 0] = 1, 3e38
    assert reduced(gpu, grad_ND, inverse_N, 3)[1] == [0], "a sum may overflow"
    segments = segments_of(gpu.put(np.ones((6, 5), np.float32)), gpu.put(inverse_N.astype(np.int32)), 3, gpu=gpu)
    for before in (0, 1):
        given = gpu.put(np.array([before]))
        assert reduce_grads_cuda(segments, given, gpu=gpu)[1] is given and given.tolist() == [before]


def test_no_key_is_no_sum(gpu):
    grad_ND, inverse_N = np.ones((3, 2), np.float32), np.full(3, -1)
    grad_UD, finite_1 = reduced(gpu, grad_ND, inverse_N, 0)
    assert grad_UD.shape == (0, 2) and finite_1 == [1]
    grad_UD, finite_1 = sum_grads_cuda(gpu.put(grad_ND), gpu.put(inverse_N.astype(np.int32)), 0, gpu=gpu)
    assert grad_UD.shape == (0, 2) and finite_1.tolist() == [1]


@pytest.mark.parametrize("ids", [PART, 5 * PART])
@pytest.mark.parametrize("in_bags", [False, True])
def test_sums_in_one_go_are_those_of_segments(gpu, in_bags, ids):
    rng = np.random.default_rng(8)
    key_N = np.where(rng.random(ids) < 0.7, 0, rng.integers(-1, 5, ids))
    inverse_N = gpu.put(np.concatenate([np.arange(5), key_N[5:]]).astype(np.int32))
    bags = (gpu.put(np.arange(ids) // 2), gpu.put(rng.normal(0, 1, ids).astype(np.float32))) if in_bags else ()
    rows = gpu.put(rng.normal(0, 1, ids * 4 + 1).astype(np.float32))
    # Rows that begin elsewhere than torch's memory are read one weight at a time, whatever was launched before.
    for grad_NX in (rows[:-1].view(ids, 4), rows[1:].view(ids, 4)):
        expected, _ = reduce_grads_cuda(segments_of(grad_NX, inverse_N, 7, *bags, gpu=gpu), gpu=gpu)  # 2 keys of room
        for finite in (1, 0):
            given = gpu.put(np.array([finite]))
            found, finite_1 = sum_grads_cuda(grad_NX, inverse_N, 7, *(bags or (None, None)), given, gpu=gpu)
            assert torch.equal(found[:5], expected[:5]) and finite_1 is given and given.tolist() == [finite]


def test_each_key_of_several_parts_has_places_of_its_own(gpu):
    rng = np.random.default_rng(5)
    counts = [1, PART, PART + 1, 2 * PART, 3, 2 * PART + 1, 5 * PART + 3]
    inverse_N = rng.permutation(np.concatenate([np.full(5, -1), np.repeat(np.arange(7), counts)])).astype(np.int32)
    grad_N = np.arange(len(inverse_N))
    found = segments_of(gpu.put(grad_N.astype(np.float32)[:, None]), gpu.put(inverse_N), 9, gpu=gpu)  # 2 keys of room
    begin_U1, order_N, part_U = (one.tolist() for one in (found.begin_U1, found.order_N, found.part_U))
    assert begin_U1[7:] == [len(inverse_N)] * 3
    places = []
    for u in range(7):
        assert order_N[begin_U1[u] :][: counts[u]] == np.flatnonzero(inverse_N == u).tolist()
        if counts[u] > PART:
            first, parts = divmod(part_U[u], 1 << 26)
            assert parts == -(-counts[u] // PART)
            places += range(first, first + parts)
            own_N = np.split(grad_N[inverse_N == u], range(PART, counts[u], PART))
            assert found.part_PD[first : first + parts, 0].tolist() == [part.sum() for part in own_N]
    assert sorted(places) == list(range(len(places))) and len(places) <= len(found.part_PD)
