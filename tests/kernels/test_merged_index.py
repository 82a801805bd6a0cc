"""Keys of several indexes found in one loop, against a dict for each."""

import numpy as np
import pytest

from oneemb.kernels.hash_index import find_each
from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import HashIndex


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", [[5], [0, 3, 0], [2000, 1, 700, 0, 4000]])
def test_every_key_is_found_in_its_own_index(sizes, threads):
    rng = np.random.default_rng(0)
    threads = Threads(threads)
    indexes, known = [], []
    for size in sizes:
        index = HashIndex(threads)
        id_N = rng.choice(10_000, size, replace=False) - 5000
        table_N, place_N = rng.integers(0, 3, size, np.int32), rng.permutation(size)
        index.put(table_N, id_N, place_N)
        indexes.append(index)
        known.append(dict(zip(zip(table_N.tolist(), id_N.tolist(), strict=True), place_N.tolist(), strict=True)))
    asked = [rng.integers(0, 1500, len(sizes)).tolist()[m] for m in range(len(sizes))]
    begin_M1 = np.cumsum([0, *asked])
    table_U, id_U = rng.integers(0, 3, begin_M1[-1], np.int32), rng.integers(-5000, 5000, begin_M1[-1])
    address_MP, cells_MP = (np.array([index.shards[i] for index in indexes]) for i in (0, 1))
    place_U = find_each(address_MP, cells_MP, begin_M1, table_U, id_U, threads=threads)
    member_U = np.repeat(np.arange(len(sizes)), asked)
    keys = zip(member_U.tolist(), table_U.tolist(), id_U.tolist(), strict=True)
    assert place_U.tolist() == [known[m].get((table, id), -1) for m, table, id in keys]
