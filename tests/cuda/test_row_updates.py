"""Row updates on the GPU against the CPU's loops, bit for bit but where a bound is stated, and against torch.optim."""

from functools import partial

import numpy as np
import pytest
import torch

from oneemb.graph.row_optimizers import row_optimizer_of
from oneemb.kernels.arrays import BEYOND
from oneemb.kernels.cuda_backend import CudaBackend
from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.reduce_grads_cuda import PART, segments_of
from oneemb.kernels.row_update_cuda import element_update, run_row_update_cuda
from oneemb.kernels.threads import Threads
from oneemb.kernels.update_adagrad import adagrad
from oneemb.optim import Ftrl
from tests.cuda.conftest import SIMULATED
from tests.support.optimizers import MORE, OPTIMIZERS
from tests.support.row_updates import Slab, to_bits

ONE = Threads(1)

ALL = {**OPTIMIZERS, **MORE, "ftrl, another power": partial(Ftrl, lr=0.1, lr_power=-0.7)}

# name -> how far a value may lie from the CPU's, as a share of it. Squares are summed in another order, and powers of
# float32 are another library's on a GPU.
SUMMED = ("row-wise adagrad", "lamb", "lars", "partial row-wise adam")
APART = {name: 4e-6 for name in ALL if name.startswith(SUMMED)} | ({} if SIMULATED else {"ftrl, another power": 1e-5})

DIMS = [
    5,  # no dimension of vectors
    8,  # two vectors of float32, one of half width
]
ODD = [
    ("adagrad", 1),  # one thread a row
    ("adagrad", 40),  # more vectors than a group has threads here, where groups are small
    *((name, 40) for name in SUMMED),
    ("smart decay adam", 40),
]

BITS = {"float32": torch.float32, "float16": torch.uint16, "bfloat16": torch.int16}


def taking_turns(cases, *others):
    """Params of each case with each of `others`; all but one of each case, another from case to case, are slow.

    A case begins with an optimizer's name. Where rows of half width are not compared, that one is of float32.
    """
    params = []
    for n, case in enumerate(cases):
        turns = [(n + n // len(others) + m) % len(others) for m in range(len(others))]
        quick = next(m for m in turns if case[0] not in APART or "float32" in others[m])
        params += [
            pytest.param(*case, *other, marks=() if m == quick else pytest.mark.slow) for m, other in enumerate(others)
        ]
    return params


def on_cpu(optimizer, slab, slot_U, grad_UD, step):
    rows = row_optimizer_of(optimizer, optimizer.param_groups[0])
    rows.run(
        slab.weight_SX, slab.row_SW, slot_U, grad_UD,
        state_begin=slab.state_begin, group=optimizer.param_groups[0], step=step, backend=HostBackend(ONE),
    )  # fmt: skip


def on_gpu(gpu, optimizer, row_SW, slab, slot_U, grad, step):
    rows = row_optimizer_of(optimizer, optimizer.param_groups[0])
    rows.run(
        row_SW.view(BITS[slab.dtype]), row_SW, gpu.put(slot_U), grad,
        state_begin=slab.state_begin, group=optimizer.param_groups[0], step=step, backend=CudaBackend(gpu),
    )  # fmt: skip


def slab_for(optimizer, dim, dtype, *, padded, slots=12):
    rows = row_optimizer_of(optimizer, optimizer.param_groups[0])
    slab = Slab(dim, dtype, rows.initial_state(dim), seed=3, slots=slots)
    if padded:  # rows begin at multiples of 16 bytes, as a device tier lays them out
        width = -(-slab.format.row_width // 4) * 4
        row_SW = np.zeros((slots, width), np.float32)
        row_SW[:, : slab.format.row_width] = slab.row_SW[:, : slab.format.row_width]
        slab.row_SW, slab.weight_SX = row_SW, slab.format.weights(row_SW)
    return slab


def check_rows(found, expected, dim, slab, name):
    if name not in APART:
        assert found.tobytes() == expected.row_SW.tobytes()
        return
    if slab.dtype != "float32":
        return  # a weight one float32 ulp off may round to either neighbour; the float32 case holds the bound
    np.testing.assert_allclose(found[:, : dim + 1], expected.row_SW[:, : dim + 1], rtol=APART[name], atol=1e-7)


@pytest.mark.parametrize(
    "name, dim, dtype",
    taking_turns([*((name, dim) for name in ALL for dim in DIMS), *ODD], *((dtype,) for dtype in BITS)),
)
def test_rows_are_those_of_the_cpu(gpu, name, dim, dtype):
    optimizer = ALL[name]([torch.nn.Parameter(torch.zeros(1))])
    rng = np.random.default_rng(4)
    for padded in (True, False):
        slab = slab_for(optimizer, dim, dtype, padded=padded)
        row_SW = gpu.put(slab.row_SW)
        for step in (1, 2, 6):  # RAdam is rectified from the sixth on
            slot_U = rng.permutation(12)[: 3 + step].astype(np.int64)
            grad_UD = rng.normal(0, 1, (len(slot_U), dim)).astype(np.float32)
            on_cpu(optimizer, slab, slot_U, grad_UD, step)
            on_gpu(gpu, optimizer, row_SW, slab, slot_U, gpu.put(grad_UD), step)
        check_rows(row_SW.cpu().numpy(), slab, dim, slab, name)


def segments(gpu, grad_ND, inverse_N, keys, dtype="float32"):
    return segments_of(gpu.put(to_bits(grad_ND, dtype)), gpu.put(inverse_N.astype(np.int32)), keys, gpu=gpu)


@pytest.mark.parametrize(
    "name, dim, dtype",
    taking_turns([(name,) for name in ALL], (3, "float32"), (8, "float16"), (8, "bfloat16"), (8, "float32")),
)
def test_a_fused_update_is_the_sum_and_then_the_update(gpu, name, dim, dtype):
    optimizer = ALL[name]([torch.nn.Parameter(torch.zeros(1))])
    rng = np.random.default_rng(5)
    slab = slab_for(optimizer, dim, dtype, padded=True)
    row_SW = gpu.put(slab.row_SW)
    inverse_N = np.array([0, 1, 0, 2, 0, -1, 2], np.int64)
    grad_ND = rng.integers(-8, 9, (7, dim)).astype(np.float32)  # of which any sum is exact in any order
    grad_UD = np.stack([grad_ND[inverse_N == u].sum(0) for u in range(3)])
    slot_U = np.array([7, 0, 4])
    on_cpu(optimizer, slab, slot_U, grad_UD, 1)
    on_gpu(gpu, optimizer, row_SW, slab, slot_U, segments(gpu, grad_ND, inverse_N, 3, dtype), 1)
    check_rows(row_SW.cpu().numpy(), slab, dim, slab, name)


@pytest.mark.parametrize("name", ["adagrad", "adam, amsgrad"])  # one of them goes up its gradients
def test_a_fused_update_sums_the_parts_of_a_hot_key(gpu, name):
    optimizer = ALL[name]([torch.nn.Parameter(torch.zeros(1))])
    slab = slab_for(optimizer, 4, "float32", padded=True)
    row_SW = gpu.put(slab.row_SW)
    inverse_N = np.array([0] * (2 * PART + 3) + [1], np.int64)
    grad_ND = np.random.default_rng(6).integers(-8, 9, (len(inverse_N), 4)).astype(np.float32)
    grad_UD = np.stack([grad_ND[inverse_N == u].sum(0) for u in range(2)])
    on_cpu(optimizer, slab, np.array([3, 5]), grad_UD, 1)
    on_gpu(gpu, optimizer, row_SW, slab, np.array([3, 5]), segments(gpu, grad_ND, inverse_N, 2), 1)
    assert row_SW.cpu().numpy().tobytes() == slab.row_SW.tobytes()


@pytest.mark.parametrize("name", ["adagrad", "row-wise adagrad", "partial row-wise adam", "smart decay adam"])
def test_written_rows_are_dirty_and_nothing_is_written_when_the_device_says_so(gpu, name):
    optimizer = ALL[name]([torch.nn.Parameter(torch.zeros(1))])
    slab = slab_for(optimizer, 8, "float32", padded=True)
    row_SW = gpu.put(slab.row_SW)
    rows = row_optimizer_of(optimizer, optimizer.param_groups[0])
    for go in (0, 1):
        dirty_S = gpu.full(len(row_SW), value=False, dtype=torch.bool)
        backend = CudaBackend(gpu).guarded(gpu.filled(1, go), dirty_S)
        rows.run(
            row_SW, row_SW, gpu.put(np.array([3, -1, 0, BEYOND])), gpu.put(np.ones((4, 8), np.float32)),
            state_begin=slab.state_begin, group=optimizer.param_groups[0], step=1, backend=backend,
        )  # fmt: skip
        assert (row_SW.cpu().numpy().tobytes() == slab.row_SW.tobytes()) is (go == 0)
        assert torch.nonzero(dirty_S).reshape(-1).tolist() == ([0, 3] if go else [])


def test_no_rows_are_no_launch(gpu):
    row_SW = gpu.full(4, 8, value=0, dtype=torch.float32)
    before = gpu.launches
    run_row_update_cuda(
        element_update(adagrad, states=1), (), row_SW, row_SW, gpu.empty(0, dtype=torch.int64),
        gpu.empty(0, 4, dtype=torch.float32), 4, gpu=gpu,
    )  # fmt: skip
    assert gpu.launches == before


def test_the_comparison_notices_another_rate(gpu):
    optimizer = ALL["adagrad"]([torch.nn.Parameter(torch.zeros(1))])
    slab = slab_for(optimizer, 8, "float32", padded=True)
    row_SW = gpu.put(slab.row_SW)
    grad_UD = np.ones((1, 8), np.float32)
    on_cpu(optimizer, slab, np.array([2]), grad_UD, 1)
    optimizer.param_groups[0]["lr"] *= 1 + 2e-7
    on_gpu(gpu, optimizer, row_SW, slab, np.array([2]), gpu.put(grad_UD), 1)
    with pytest.raises(AssertionError):
        check_rows(row_SW.cpu().numpy(), slab, 8, slab, "adagrad")
