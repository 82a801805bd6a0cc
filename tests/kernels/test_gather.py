"""Copies of rows against NumPy's indexing, bit for bit."""

import numpy as np
import pytest
import torch

from oneemb.kernels.gather import copy_rows, copy_rows_out, gather
from oneemb.kernels.jit_lanes import bypasses_caches
from oneemb.kernels.threads import Threads
from oneemb.storage.rows.row_format import RowFormat
from tests.support.row_updates import SmallShares

# Dims: one weight; an odd one, which in half width shares its word with padding; whole vectors; one left over.
DIMS = [1, 3, 16, 65]
DTYPES = ["float32", "float16", "bfloat16"]


def random_bits(rng, *shape):
    """float32 of random bits: NaNs of every kind, whose bits a float copy may change, are among them."""
    return rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)


def gather_numpy(weight_SX, slot_U, inverse_N, dim):
    out_ND = weight_SX[slot_U[inverse_N], :dim].copy() if len(slot_U) else np.zeros((len(inverse_N), dim))
    out_ND[inverse_N < 0] = 0
    return out_ND.astype(weight_SX.dtype)


def check_gather(dtype, dim, threads, size=300, slots=50, wrong=None):
    print("seed 0")
    rng = np.random.default_rng(0)
    layout = RowFormat(dim, dtype, None, (0.0, 0.0))
    row_SW = random_bits(rng, slots, layout.row_width)
    before = row_SW.tobytes()
    weight_SX = layout.weights(row_SW)
    slot_U = rng.permutation(slots)[:20].astype(np.int64)
    inverse_N = rng.integers(-1, 20, size)
    out_ND = np.full((size, dim), 77, weight_SX.dtype)
    gather(weight_SX, slot_U, inverse_N, out_ND, threads=threads)
    if wrong:
        wrong(out_ND)
    assert out_ND.tobytes() == gather_numpy(weight_SX, slot_U, inverse_N, dim).tobytes()
    assert row_SW.tobytes() == before, "a gather wrote into the slab"
    return out_ND.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_gather_copies_the_weights_of_each_id(dtype, dim):
    one, two = SmallShares(1), SmallShares(2)
    assert check_gather(dtype, dim, one) == check_gather(dtype, dim, two)
    assert two.shares > one.shares


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim, first, streamed", [(32, 0, True), (64, 0, True), (64, 4, False), (65, 0, False)])
def test_a_large_gather_is_written_past_the_caches(dim, first, streamed, dtype):
    print("seed 0")
    rng, size = np.random.default_rng(0), 150_000
    weight_SX = rng.integers(-(1 << 15), 1 << 15, (500, dim)).astype(np.float32 if dtype == "float32" else np.int16)
    inverse_N, slot_U = rng.integers(-1, 400, size).astype(np.int32), rng.permutation(500)[:400].astype(np.int64)
    memory = torch.full((size * dim + first,), 77, dtype=torch.float32 if dtype == "float32" else torch.int16)
    out_ND = memory[first:].numpy().reshape(size, dim)
    assert bypasses_caches(out_ND) == streamed
    gather(weight_SX, slot_U, inverse_N, out_ND, threads=Threads(2))
    assert np.array_equal(out_ND, gather_numpy(weight_SX, slot_U, inverse_N, dim))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_gather_of_a_few_ids(size):
    check_gather("float32", 16, Threads(1), size=size)


@pytest.mark.parametrize("count", [2, 3])
def test_gather_splits_a_large_batch(count):
    check_gather("float32", 4, Threads(count), size=20_000, slots=5000)


def test_padding_reads_as_zeros_though_there_is_no_row():
    out_ND = np.full((3, 5), 7, np.float32)
    gather(np.zeros((0, 5), np.float32), np.empty(0, np.int64), np.full(3, -1), out_ND, threads=Threads(1))
    assert not out_ND.any()


def test_the_oracle_notices_one_wrong_bit():
    def flip(out_ND):
        out_ND.view(np.uint32)[0, 0] ^= 1

    with pytest.raises(AssertionError):
        check_gather("float32", 16, Threads(1), wrong=flip)


@pytest.mark.parametrize("width", [1, 3, 16, 65, 129])
@pytest.mark.parametrize("count", [1, 2])
def test_whole_rows_come_out_and_go_in_bit_for_bit(width, count):
    print("seed 1")
    rng = np.random.default_rng(1)
    threads = SmallShares(count)
    row_SW, row_UW = random_bits(rng, 40, width), random_bits(rng, 30, width)
    slot_U, from_U = rng.permutation(40)[:25].astype(np.int64), rng.integers(0, 30, 25)
    assert copy_rows_out(row_SW, slot_U, threads=threads).tobytes() == row_SW[slot_U].tobytes()
    expected = row_SW.copy().view(np.uint32)
    expected[slot_U] = row_UW.view(np.uint32)[from_U]
    copy_rows(row_UW, from_U, row_SW, slot_U, threads=threads)
    assert row_SW.tobytes() == expected.tobytes()
    assert threads.shares >= 2 * count


def test_signalling_nans_are_not_quieted():
    signalling = np.full((4, 3), 0x7F800001, np.uint32).view(np.float32)
    slot_U = np.array([3, 1], np.int64)
    assert copy_rows_out(signalling, slot_U, threads=Threads(1)).view(np.uint32).tolist() == [[0x7F800001] * 3] * 2
    row_SW = np.zeros((4, 3), np.float32)
    copy_rows(signalling, np.arange(2), row_SW, slot_U, threads=Threads(1))
    assert row_SW.view(np.uint32)[slot_U].tolist() == [[0x7F800001] * 3] * 2


def test_no_rows_are_copied_for_no_slots():
    row_SW = np.ones((4, 3), np.float32)
    none = np.empty(0, np.int64)
    assert copy_rows_out(row_SW, none, threads=Threads(2)).shape == (0, 3)
    copy_rows(row_SW, none, row_SW, none, threads=Threads(2))
    assert (row_SW == 1).all()
