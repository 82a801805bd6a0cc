"""New rows on the GPU against the CPU's: one rule, so the same weights for every initializer and column."""

import os

import numpy as np
import pytest
import torch

from oneemb.kernels.init_rows import CONSTANT, NORMAL, TRUNC_NORMAL, UNIFORM, InitialRows, init_rows
from oneemb.kernels.init_rows_cuda import DeviceInitialRows, ListedSlots, init_rows_cuda
from oneemb.kernels.threads import Threads
from oneemb.storage.rows.row_format import RowFormat

BITS = {"float32": torch.float32, "float16": torch.uint16, "bfloat16": torch.int16}
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("end_C", [[1], [7], [16], [2, 9], [4, 5, 40]], ids=str)
def test_new_rows_are_those_of_the_cpu(gpu, end_C, dtype):
    kinds = [CONSTANT, UNIFORM, NORMAL, TRUNC_NORMAL]
    kind_TC = np.array([[kinds[(t + c) % 4] for c in range(len(end_C))] for t in range(4)])
    param_TC4 = np.tile(np.array([0.25, 0.5, 0.1, 0.9]), (4, len(end_C), 1))
    initial = InitialRows(2**63 + 5, kind_TC, param_TC4, np.array(end_C, np.int64))
    state = np.array([0.5, -1.0, 0.0], np.float32)
    layout = RowFormat(end_C[-1], dtype, None, tuple(state))
    table_U = np.array([0, 1, 2, 3, 3], np.int32)
    id_U = np.array([0, -1, 2**63 - 1, -(2**63), 7])
    slot_U = np.array([5, 0, 2, 4, 1])
    row_SW = np.full((6, layout.row_width), 7, np.float32)
    found_SW = gpu.put(row_SW)
    init_rows(
        layout.weights(row_SW), row_SW, slot_U, table_U, id_U, initial, state, state_begin=layout.state_begin,
        threads=Threads(1),
    )  # fmt: skip
    init_rows_cuda(
        found_SW.view(BITS[dtype]), found_SW, gpu.put(slot_U), gpu.put(table_U), gpu.put(id_U),
        DeviceInitialRows(initial, gpu=gpu), gpu.put(state), state_begin=layout.state_begin, gpu=gpu,
    )  # fmt: skip
    found = found_SW.cpu().numpy()
    if SIMULATED or dtype != "float32":
        assert found.tobytes() == row_SW.tobytes()
    else:  # normal draws go through another log
        np.testing.assert_array_max_ulp(found, row_SW, maxulp=1)


@pytest.mark.parametrize("listed", [[], [2], [4, 0, 3]])
def test_of_listed_keys_those_that_the_device_counts_are_written_and_no_others(gpu, listed):
    initial = InitialRows(
        3, np.array([[CONSTANT], [CONSTANT]]), np.array([[[0.25, 0, 0, 0]], [[0.5, 0, 0, 0]]]), np.array([6])
    )
    key_R = np.full(9, 1, np.int64)
    key_R[: len(listed)] = listed
    slots = ListedSlots(
        gpu.put(7 - key_R), gpu.put(key_R), gpu.put(np.array([len(listed), 5, 5])), gpu.none(torch.int64)
    )
    row_SW, table_U, id_U = gpu.put(np.full((8, 8), 7, np.float32)), np.array([0, 1, 1, 0, 1], np.int32), np.arange(5)
    init_rows_cuda(
        row_SW, row_SW, slots, gpu.put(table_U), gpu.put(id_U), DeviceInitialRows(initial, gpu=gpu),
        gpu.put(np.array([9], np.float32)), state_begin=6, gpu=gpu,
    )  # fmt: skip
    expected_SW = np.full((8, 8), 7, np.float32)
    for u in listed:
        expected_SW[7 - u, :7] = [0.5 if table_U[u] else 0.25] * 6 + [9]
    assert row_SW.cpu().numpy().tolist() == expected_SW.tolist()
