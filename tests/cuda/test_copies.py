"""Gather, copies of rows and pooled lookups on the GPU: bits against NumPy's indexing, sums against the CPU's order."""

import numpy as np
import pytest
import torch

from oneemb.kernels.gather_cuda import copy_rows_in_cuda, copy_rows_out_cuda, gather_cuda, pool_cuda
from oneemb.kernels.launch import vector_width
from tests.support.row_updates import to_bits

DTYPES = {"float32": torch.float32, "float16": torch.uint16, "bfloat16": torch.int16}


def from_bits(array, dtype):
    if dtype == "float32":
        return array
    return torch.from_numpy(array.view(np.int16)).view(getattr(torch, dtype)).float().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 8, 48])
def test_gathered_bits_are_the_slabs(gpu, dim, dtype):
    rng = np.random.default_rng(dim)
    width = -(-dim // 8) * 8 + 8
    weight_SX = rng.integers(0, 1 << 15, (20, width)).astype(np.float32)
    weight_SX = (
        weight_SX if dtype == "float32" else weight_SX.astype({"float16": np.uint16, "bfloat16": np.int16}[dtype])
    )
    slot_U, inverse_N = rng.permutation(20)[:9], rng.integers(-1, 9, 30)
    inverse_N[:2] = -1, 8
    slab, out = gpu.put(weight_SX), gpu.full(30, dim, value=7, dtype=torch.int16 if dtype != "float32" else torch.int32)
    out = out.view(DTYPES[dtype])
    vectors = {"float32": 4, "float16": 8, "bfloat16": 8}[dtype]
    assert vector_width(dim, slab, out) == (vectors if dim % 8 == 0 else 1)
    gather_cuda(slab, gpu.put(slot_U), gpu.put(inverse_N), out, gpu=gpu)
    expected = np.where((inverse_N < 0)[:, None], 0, weight_SX[slot_U[inverse_N], :dim]).astype(weight_SX.dtype)
    assert out.cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("width, slab_width", [(5, 5), (5, 8), (8, 8), (12, 16)])
def test_rows_go_in_and_out_bit_for_bit(gpu, width, slab_width):
    rng = np.random.default_rng(1)
    slab = rng.integers(0, 1 << 32, (9, slab_width), np.uint32).view(np.float32)
    rows = rng.integers(0, 1 << 32, (4, width), np.uint32).view(np.float32)
    slot_U = np.array([8, 0, 3, 5])
    device = gpu.put(slab)
    copy_rows_in_cuda(device, gpu.put(slot_U), gpu.put(rows), gpu=gpu)
    slab[slot_U, :width] = rows
    assert device.cpu().numpy().tobytes() == slab.tobytes()
    out_UW = copy_rows_out_cuda(device, gpu.put(slot_U[::-1].copy()), width, gpu=gpu)
    assert out_UW.cpu().numpy().tobytes() == rows[::-1].tobytes()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dim, dtype", [(3, "float32"), (8, "float32"), (8, "float16"), (8, "bfloat16")])
def test_a_pooled_bag_is_its_rows_summed_in_order(gpu, dim, dtype, mean, weighted):
    rng = np.random.default_rng(2)
    weight_SX = to_bits(rng.normal(0, 1, (10, dim)).astype(np.float32), dtype)
    slot_U = rng.permutation(10)[:5]
    inverse_N = np.array([0, 1, 2, -1, 3, 3, -1, -1, 4, 0, 0, 1])
    begin_P1 = np.array([0, 3, 3, 6, 8, 12])  # the second bag is empty, the fourth is padding alone
    scale_N = rng.normal(0, 1, 12).astype(np.float32) if weighted else None
    expected = np.zeros((5, dim), np.float32)
    rows_SD = from_bits(weight_SX, dtype)
    for p in range(5):
        count = 0
        for n in range(begin_P1[p], begin_P1[p + 1]):
            if inverse_N[n] >= 0:
                scale = np.float32(1) if scale_N is None else scale_N[n]
                expected[p] = expected[p] + scale * rows_SD[slot_U[inverse_N[n]]]
                count += 1
        if mean and count:
            expected[p] /= np.float32(count)
    out_PD = gpu.empty(5, dim, dtype=DTYPES[dtype])
    scale = None if scale_N is None else gpu.put(scale_N)
    pool_cuda(
        gpu.put(weight_SX), gpu.put(slot_U), gpu.put(inverse_N), gpu.put(begin_P1), scale, out_PD, mean=mean, gpu=gpu
    )
    found = from_bits(out_PD.cpu().numpy(), dtype)
    if dtype == "float32":
        assert found.tobytes() == expected.tobytes()
    else:
        np.testing.assert_allclose(found, expected, rtol=2.0**-7, atol=1e-3)
    assert (found[[1, 3]] == 0).all()
