"""The device index against a dict."""

import os

import numpy as np
import pytest
import torch

from oneemb.kernels.hash_index_cuda import erase_loop, find_loop, home, insert_loop, rehash_loop
from oneemb.storage.tiers.device_index import DeviceIndex

INT64 = np.iinfo(np.int64)
EDGES = [0, -1, 1, INT64.min, INT64.max, INT64.min + 1, 2**32, -(2**32)]


def keys_of(gpu, keys):
    return gpu.put(np.array([t for t, _ in keys], np.int32)), gpu.put(np.array([i for _, i in keys], np.int64))


def check(gpu, index, expected, absent=()):
    assert len(index) == len(expected)
    keys = [*expected, *absent]
    assert index.find(*keys_of(gpu, keys)).tolist() == [*expected.values(), *(-1 for _ in absent)]
    table_N, id_N, place_N = (part.tolist() for part in index.items())
    assert dict(zip(zip(table_N, id_N, strict=True), place_N, strict=True)) == expected
    assert place_N == sorted(place_N)


def insert(gpu, index, expected, keys, first_place):
    places = list(range(first_place, first_place + len(keys)))
    index.insert(*keys_of(gpu, keys), gpu.put(np.array(places, np.int64)))
    expected.update(zip(keys, places, strict=True))


def test_every_int64_is_a_key_in_every_table(gpu):
    index, expected = DeviceIndex(gpu), {}
    insert(gpu, index, expected, [(t, i) for t in (0, 1, 2**23 - 1) for i in EDGES], 2**40 - 2 - 3 * len(EDGES))
    check(gpu, index, expected, absent=[(2, i) for i in EDGES])


def test_random_calls_agree_with_a_dict_through_growth_and_cells_given_up(gpu):
    print("seed 0")
    rng = np.random.default_rng(0)
    index, expected, cells = DeviceIndex(gpu), {}, set()
    place = 0
    for _ in range(40):
        ids = [int(i) for i in rng.choice(150, int(rng.integers(0, 40)), replace=False)]
        keys = [(int(rng.integers(0, 2)), i) for i in ids]
        if rng.random() < 0.55:
            new = [key for key in keys if key not in expected]
            insert(gpu, index, expected, new, place)
            place += len(new)
        else:
            old = index.erase(*keys_of(gpu, keys)).tolist()
            assert old == [expected.pop(key, -1) for key in keys]
        check(gpu, index, expected, absent=[(0, 1000), (1, -1)])
        cells.add(len(index.cell_C2))
    assert len(cells) > 2, "the index has not grown"
    index.clear()
    check(gpu, index, {}, absent=[(0, 1)])


def colliding(cells, count, at):
    """Keys whose home in an index of so many cells is `at`."""
    return [(0, i) for i in range(100 * cells) if home(np.int32(0), np.int64(i), np.int64(cells)) == at][:count]


@pytest.mark.parametrize("at", [0, 63], ids=["at the first cell", "around the end"])
def test_keys_of_one_home_are_told_apart(gpu, at):
    index, expected = DeviceIndex(gpu), {}
    assert len(index.cell_C2) == 64
    keys = colliding(64, 12, at)
    insert(gpu, index, expected, keys[:10], 0)
    assert len(index.cell_C2) == 64
    check(gpu, index, expected, absent=keys[10:])
    assert index.erase(*keys_of(gpu, keys[2:5])).tolist() == [expected.pop(key) for key in keys[2:5]]
    check(gpu, index, expected, absent=keys[2:5])
    insert(gpu, index, expected, keys[10:] + keys[2:5], 50)
    check(gpu, index, expected)


def test_cells_given_up_are_taken_again_before_new_ones(gpu):
    index, expected = DeviceIndex(gpu), {}
    keys = colliding(64, 4, 5)
    insert(gpu, index, expected, keys, 0)
    index.erase(*keys_of(gpu, keys))
    count_2 = gpu.full(2, value=0, dtype=torch.int64)
    gpu.run(insert_loop, 4, index.cell_C2, *keys_of(gpu, keys), gpu.put(np.arange(4)), count_2)
    assert count_2.tolist() == [0, 0], "no cell was taken for the first time, and there was one for each"


@pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") != "1", reason="a race that a GPU cannot be told to have")
@pytest.mark.parametrize("now", [5, -1], ids=["taken", "given up"])
def test_a_cell_that_another_thread_took_between_two_looks_is_let_go(gpu, now):
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    from oneemb.kernels import jit_cuda

    class Stale(FakeCUDAArray):
        looks = 0

        def __getitem__(self, place):
            value = super().__getitem__(place)
            if isinstance(place, tuple) and place[1] == 1:
                self.looks += 1
                return 0 if self.looks == 1 else value
            return value

    cells = np.zeros((64, 2), np.int64)
    ((table, id),) = colliding(64, 1, 9)
    cells[9] = 77, now
    arrays = [np.array([table], np.int32), np.array([id]), np.array([3])]
    count_2 = np.zeros(2, np.int64)
    jit_cuda.kernel_of(insert_loop)[1, 1](Stale(cells), *arrays, count_2)
    expected = 9 if now < 0 else 10
    assert cells[expected].tolist() == [id, 4] and count_2.tolist() == [int(now > 0), 0]
    assert now < 0 or cells[9].tolist() == [77, 5]


def test_loops_end_in_an_index_that_is_full(gpu):
    cell_C2 = gpu.full(5, 2, value=0, dtype=torch.int64)
    keys = keys_of(gpu, [(0, i) for i in range(7)])
    count_2 = gpu.full(2, value=0, dtype=torch.int64)
    gpu.run(insert_loop, 7, cell_C2, *keys, gpu.put(np.arange(7)), count_2)
    assert count_2.tolist() == [5, 2], "five cells taken, two keys without one"
    place_U = gpu.empty(7, dtype=torch.int64)
    gpu.run(find_loop, 7, cell_C2, *keys, gpu.full(1, value=7, dtype=torch.int64), place_U)
    assert sorted(place_U.tolist())[:2] == [-1, -1] and sorted(place_U.tolist())[2] >= 0
    old_U = gpu.empty(7, dtype=torch.int64)
    gpu.run(erase_loop, 7, cell_C2, *keys, old_U)
    assert old_U.tolist() == place_U.tolist() and (cell_C2[:, 1] == -1).all()


def test_a_rehash_into_too_few_cells_says_so(gpu):
    index, expected = DeviceIndex(gpu), {}
    insert(gpu, index, expected, [(0, i) for i in range(6)], 0)
    few_C2, count_2 = gpu.full(4, 2, value=0, dtype=torch.int64), gpu.full(2, value=0, dtype=torch.int64)
    gpu.run(rehash_loop, len(index.cell_C2), index.cell_C2, few_C2, count_2)
    assert count_2.tolist() == [4, 2]


def test_an_index_that_has_lost_a_key_says_so(gpu):
    index, expected = DeviceIndex(gpu), {}
    insert(gpu, index, expected, [(0, i) for i in range(6)], 0)
    assert index.inserted_2.tolist() == [6, 0]
    index.reserve = lambda more: None
    index.cell_C2 = gpu.full(4, 2, value=0, dtype=torch.int64)
    insert(gpu, index, {}, [(1, i) for i in range(6)], 0)
    with pytest.raises(AssertionError, match="2 keys found no cell in an index of 4 cells"):
        index.check_inserted(index.inserted_2.tolist()[1])
