import numpy as np
import pytest

from oneemb.kernels.shard_rows import keys_in_cells, rows_of_shards
from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import HashIndex

ALL = range(256)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows, shards", [(0, ALL), (1, ALL), (60_000, ALL), (60_000, range(7, 9))], ids=str)
@pytest.mark.parametrize("first", [0, 3])
def test_rows_of_shards_are_those_that_are_not_held_with_their_numbers(threads, rows, shards, first):
    rng, threads = np.random.default_rng(0), Threads(threads)
    index, slots = HashIndex(threads), rows + 10
    table_N, id_N = rng.integers(0, 3, rows).astype(np.int32), rng.permutation(rows) - rows // 2
    slot_N = rng.permutation(slots)[:rows]
    index.put(table_N, id_N, slot_N)
    word_SW = rng.integers(0, 2**32, (slots, 5), np.uint32)
    held_S = rng.random(slots) < 0.3

    address_P, cells_P = (array[shards.start : shards.stop] for array in index.shards)
    cell_N, number_N = rows_of_shards(address_P, cells_P, word_SW, first, held_S, threads=threads)

    wanted = np.flatnonzero(np.isin(index.shards_of(table_N, id_N), shards) & ~held_S[slot_N])
    expected = {
        (int(table_N[n]), int(id_N[n])): (
            int(slot_N[n]),
            int(word_SW[slot_N[n], first]) + (int(word_SW[slot_N[n], first + 1]) << 32),
        )
        for n in wanted
    }
    found = zip(*(array.tolist() for array in (*keys_in_cells(cell_N), number_N)), strict=True)
    assert {(table, id): (slot, number) for table, id, slot, number in found} == expected
    assert len(cell_N) == len(number_N) == len(expected)
