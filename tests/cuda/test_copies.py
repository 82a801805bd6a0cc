"""Gather and copies of rows on the GPU: bits against NumPy's indexing."""

import numpy as np
import pytest
import torch

from oneemb.kernels.arrays import vector_width
from oneemb.kernels.gather_cuda import copy_rows_in_cuda, copy_rows_out_cuda, gather_cuda

DTYPES = {"float32": torch.float32, "float16": torch.uint16, "bfloat16": torch.int16}


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
    gather_cuda(slab, gpu.put(slot_U), gpu.put(inverse_N.astype(np.int32)), out, gpu=gpu)
    expected = np.where((inverse_N < 0)[:, None], 0, weight_SX[slot_U[inverse_N], :dim]).astype(weight_SX.dtype)
    assert out.cpu().numpy().tobytes() == expected.tobytes()


def test_a_slab_that_is_not_aligned_is_gathered_one_weight_at_a_time(gpu):
    words, slot_U = gpu.put(np.arange(41, dtype=np.float32)), gpu.put(np.array([3, 1]))
    inverse_N = gpu.put(np.arange(2, dtype=np.int32))
    for slab in (words[:-1].view(5, 8), words[1:].view(5, 8)):  # of the same shape, one after the other
        out = gpu.full(2, 8, value=-1, dtype=torch.float32)
        gather_cuda(slab, slot_U, inverse_N, out, gpu=gpu)
        assert torch.equal(out, slab[slot_U])


@pytest.mark.parametrize("width, slab_width", [(5, 5), (5, 8), (8, 8), (12, 16)])
def test_rows_go_in_and_out_bit_for_bit(gpu, width, slab_width):
    rng = np.random.default_rng(1)
    slab = rng.integers(0, 1 << 32, (9, slab_width), np.uint32).view(np.float32)
    rows = rng.integers(0, 1 << 32, (4, width), np.uint32).view(np.float32)
    slot_U = np.array([8, 0, 3, 5])
    device = gpu.put(slab)
    copy_rows_in_cuda(device, gpu.put(np.array([8, -1, 3, -1])), gpu.put(rows), gpu=gpu)
    slab[[8, 3], :width] = rows[[0, 2]]
    assert device.cpu().numpy().tobytes() == slab.tobytes()
    copy_rows_in_cuda(device, gpu.put(slot_U), gpu.put(rows), gpu=gpu)
    slab[slot_U, :width] = rows
    assert device.cpu().numpy().tobytes() == slab.tobytes()
    out_UW = copy_rows_out_cuda(device, gpu.put(slot_U[::-1].copy()), width, gpu=gpu)
    assert out_UW.cpu().numpy().tobytes() == rows[::-1].tobytes()
