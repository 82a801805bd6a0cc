"""Slabs of more than 2^31 elements. In the simulator only the pages that are touched take memory."""

import numpy as np
import pytest
import torch

from oneemb.kernels.arrays import Bags
from oneemb.kernels.cuda_backend import CudaBackend
from oneemb.kernels.gather_cuda import copy_rows_in_cuda, copy_rows_out_cuda, gather_cuda
from oneemb.kernels.pool_cuda import pool_cuda
from oneemb.kernels.update_sgd import update_sgd
from tests.cuda.conftest import SIMULATED
from tests.support.row_updates import to_bits

DIM, SLOTS = 8, 2**28 + 8


@pytest.fixture
def slab_SX(gpu):
    if not SIMULATED and gpu.free_bytes() < 6 << 30:
        pytest.skip("the GPU has less than 6 GiB free")
    return gpu.empty(SLOTS, DIM, dtype=torch.int16)


def test_rows_beyond_two_to_the_31_elements_are_read_written_and_updated(gpu, slab_SX):
    assert slab_SX.numel() > 2**31
    slots = np.array([SLOTS - 1, 5, 2**28, 2**28 + 3])
    slot_U = gpu.put(slots)
    rows = np.random.default_rng(1).integers(-8, 9, (4, DIM)).astype(np.float32)
    bits = to_bits(rows, "bfloat16")
    row_SW = slab_SX.view(torch.float32)
    copy_rows_in_cuda(row_SW, slot_U, gpu.put(bits).view(torch.float32), gpu=gpu)
    for place, one in zip(slots, bits, strict=True):
        assert slab_SX[place].cpu().numpy().tobytes() == one.tobytes()
    found = copy_rows_out_cuda(row_SW, slot_U, DIM // 2, gpu=gpu)
    assert found.cpu().numpy().tobytes() == bits.tobytes()
    out_ND = gpu.empty(4, DIM, dtype=torch.int16)
    gather_cuda(slab_SX, slot_U, gpu.put(np.arange(4, dtype=np.int32)), out_ND, gpu=gpu)
    assert out_ND.cpu().numpy().tobytes() == bits.tobytes()
    out_PD = gpu.empty(1, DIM, dtype=torch.int16)
    pool_cuda(
        slab_SX, slot_U, gpu.put(np.arange(4, dtype=np.int32)), Bags(gpu.put(np.array([0, 4]))), None, out_PD, gpu=gpu
    )
    assert out_PD.cpu().numpy().tobytes() == to_bits(rows.sum(0, keepdims=True), "bfloat16").tobytes()
    grad_UD = gpu.full(4, DIM, value=2, dtype=torch.float32)
    options = dict(lr=0.5, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.0)
    update_sgd(slab_SX, row_SW, slot_U, grad_UD, state_begin=DIM // 2, step=1, backend=CudaBackend(gpu), **options)
    assert slab_SX[slot_U].cpu().numpy().tobytes() == to_bits(rows - 1, "bfloat16").tobytes()
