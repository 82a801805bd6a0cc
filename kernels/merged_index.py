"""Finds keys of several hash indexes in one loop.  M indexes, P shards of each, U keys.

Keys of one index lie side by side: those of index m from begin_M1[m] to begin_M1[m + 1] - 1.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index import cells_find
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.threads import Threads


@cpu
def _find_each_cpu(
    begin: Number, end: Number, address_MP: Array, cells_MP: Array, begin_M1: Array, table_U: Array, id_U: Array,
    place_U: Array,
) -> None:  # fmt: skip
    for m in range(len(begin_M1) - 1):
        first, last = max(begin, begin_M1[m]), min(end, begin_M1[m + 1])
        if first < last:
            cells_find(first, last, address_MP[m], cells_MP[m], table_U, id_U, place_U)


def find_each(
    address_MP: np.ndarray,
    cells_MP: np.ndarray,
    begin_M1: np.ndarray,
    table_U: np.ndarray,
    id_U: np.ndarray,
    *,
    threads: Threads,
) -> np.ndarray:
    """The place of each key in its index, -1 for a key that is not there: int64 [U].

    Args:
        address_MP, cells_MP: int64, the address and number of cells of each shard, see oneemb.kernels.hash_index.
        begin_M1: int64.
        table_U, id_U: the keys, tables as each index knows them: int32 and int64.
    """
    place_U = np.empty(len(id_U), np.int64)
    threads.run(_find_each_cpu, len(id_U), address_MP, cells_MP, begin_M1, table_U, id_U, place_U)
    return place_U
