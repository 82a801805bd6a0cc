"""Unique keys on the GPU against those of the CPU, and the order of each key's occurrences against its chain."""

import numpy as np
import pytest

from oneemb.kernels import unique_keys_cuda as keys_cuda
from oneemb.kernels.hash_index_cuda import home
from oneemb.kernels.reduce_grads_cuda import segments_of
from oneemb.kernels.unique_keys import unique_keys
from oneemb.kernels.unique_keys_cuda import unique_keys_cuda

RNG = np.random.default_rng(0)
INT64 = np.iinfo(np.int64)


def colliding(size):
    """Different ids that all begin their search at the last cell of the first scratch table for so many ids."""
    cells = np.int64(2 * (1 << (size - 1).bit_length()) + 1)
    ids = [i for i in range(100 * size) if home(np.int32(0), np.int64(i), cells) == cells - 1]
    return np.array((ids * size)[:size], np.int64)


BATCHES = {
    "few keys, often": RNG.integers(-3, 3, 60),
    "all equal": np.full(40, INT64.min),
    "all different": RNG.permutation(40) + 2**62,
    "of every size": np.array([0, -1, 1, INT64.min, INT64.max, 0, INT64.max]),
    "all of one home": colliding(24),
    "one": np.array([5]),
    "none": np.array([], np.int64),
}


@pytest.mark.parametrize("padding", [None, 0], ids=["no padding", "padding"])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("batch", BATCHES)
def test_keys_are_those_of_the_cpu_in_the_same_order(gpu, batch, dtype, padding):
    id_N = BATCHES[batch].astype(dtype)
    table_N = (
        (np.arange(len(id_N)) % 2).astype(np.int32) if batch == "few keys, often" else np.zeros(len(id_N), np.int32)
    )
    expected = unique_keys(table_N, id_N, padding_id=padding)
    gpu.scratch.clear()
    found = unique_keys_cuda(gpu.put(table_N), gpu.put(id_N), padding_id=padding, gpu=gpu)
    keys = int(found.size_2[0])
    assert keys == len(expected.id_U)
    found = found.cut(keys)
    for name in ("table_U", "id_U", "head_U", "inverse_N"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    segments = segments_of(gpu.put(np.ones((len(id_N), 1), np.float32)), found.inverse_N, keys, gpu=gpu)
    order_N, begin_U1 = segments.order_N.tolist(), segments.begin_U1.tolist()
    for u in range(keys):
        assert order_N[begin_U1[u] : begin_U1[u + 1]] == np.flatnonzero(expected.inverse_N == u).tolist()


def test_a_batch_of_nothing_but_padding_has_no_key(gpu):
    found = unique_keys_cuda(gpu.put(np.zeros(4, np.int32)), gpu.put(np.full(4, 9)), padding_id=9, gpu=gpu)
    assert int(found.size_2[0]) == 0 and found.inverse_N.tolist() == [-1] * 4
    segments = segments_of(gpu.put(np.ones((4, 1), np.float32)), found.inverse_N, 0, gpu=gpu)
    assert segments.begin_U1.tolist() == [4]


def test_batches_one_after_the_other_share_scratch_arrays_and_no_keys(gpu, monkeypatch):
    rng = np.random.default_rng(6)
    monkeypatch.setattr(keys_cuda, "_BATCHES_MAX", 3)  # so that numbers of batches begin anew
    gpu.scratch.clear()
    for size in [5, 5, 33, 1, 20, 5, 40, 64, 5, 33]:
        id_N = rng.integers(-4, 5, size)
        table_N = rng.integers(0, 2, size).astype(np.int32)
        expected = unique_keys(table_N, id_N, padding_id=None)
        found = unique_keys_cuda(gpu.put(table_N), gpu.put(id_N), gpu=gpu)
        assert found.size_2.tolist() == [len(expected.id_U), 0]
        found = found.cut(len(expected.id_U))
        for name in ("table_U", "id_U", "head_U", "inverse_N"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name


def test_more_ids_than_int32_can_number_are_refused(gpu):
    ids = gpu.put(np.zeros(1, np.int64)).expand(1 << 30)
    with pytest.raises(ValueError, match=r"at most 1073741823 ids, got 1073741824; divide the batch"):
        unique_keys_cuda(ids, ids, gpu=gpu)
