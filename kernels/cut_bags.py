"""Cuts bags of ids into parts, one for each rank that owns ids of a bag.

N ids, P bags, U unique keys, R ranks, S parts.

    bags          a b a c,  c d          keys a, c have places 0, 1 at rank 0; keys b, d have places 0, 1 at rank 1
    for rank 0    key_N  0 0 1  1        size_S  3 1        bag_S  0 1
    for rank 1    key_N  0      1        size_S  1 1        bag_S  0 1

The loops go through the bags in batch order, so the parts of a rank, and the ids of a part, are in batch order too.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import cpu
from oneemb.kernels.jit_code import keep_rolled, natural

_PLACE_BITS = np.int64(32)
_PLACE_MASK = np.int64((1 << 32) - 1)


def places_at_ranks(order_U: np.ndarray, count_R: list[int]) -> np.ndarray:
    """Rank and place of each key in one number, rank << 32 | place: int64 [U]. The place counts the keys of the rank.
    `order_U` lists the keys, those of rank 0 first; `count_R` is the number of keys of each rank."""
    at_U, end = np.empty(len(order_U), np.int64), 0
    for r, count in enumerate(count_R):
        end += count
        at_U[order_U[end - count : end]] = np.arange(r << 32, (r << 32) + count)
    return at_U


@cpu
def _count_parts_cpu(
    inverse_N: Array, offset_P1: Array, row_P: Array, at_U: Array, last_R: Array, parts_R: Array, ids_R: Array,
    ids_P: Array,
) -> None:  # fmt: skip
    for p in range(natural(len(offset_P1) - 1)):
        known = 0
        for n in range(natural(offset_P1[p]), natural(offset_P1[p + natural(1)])):
            keep_rolled()
            if inverse_N[n] >= 0:
                r = natural(at_U[natural(inverse_N[n])] >> _PLACE_BITS)
                parts_R[r] += last_R[r] != np.int64(p)
                last_R[r] = np.int64(p)
                ids_R[r] += 1
                known += 1
        ids_P[p if row_P is None else natural(row_P[p])] = known


def count_parts(
    inverse_N: np.ndarray, offset_P1: np.ndarray, row_P: np.ndarray | None, at_U: np.ndarray, ranks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of parts and of ids for each rank, int64 [R], and the number of ids of each bag, int64 [P].

    Args:
        inverse_N: the key of each id; -1 for padding, which is in no part.
        offset_P1, row_P: as in `oneemb.kernels.arrays.Bags`.
        at_U: rank and place of each key, from `places_at_ranks`.
    """
    last_R, parts_R, ids_R = np.full(ranks, -1), np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    ids_P = np.empty(len(offset_P1) - 1, np.int64)
    _count_parts_cpu(inverse_N, offset_P1, row_P, at_U, last_R, parts_R, ids_R, ids_P)
    return parts_R, ids_R, ids_P


@cpu
def _cut_bags_cpu(
    inverse_N: Array, offset_P1: Array, row_P: Array, at_U: Array, last_R: Array, part_R: Array, id_R: Array,
    key_N: Array, begin_S: Array, bag_S: Array,
) -> None:  # fmt: skip
    """Write the parts. begin_S: first id of each part. part_R, id_R: index of the next part and next id of each
    rank."""
    for p in range(natural(len(offset_P1) - 1)):
        for n in range(natural(offset_P1[p]), natural(offset_P1[p + natural(1)])):
            keep_rolled()
            if inverse_N[n] >= 0:
                at = at_U[natural(inverse_N[n])]
                r = natural(at >> _PLACE_BITS)
                i = natural(id_R[r])
                if last_R[r] != np.int64(p):
                    last_R[r] = np.int64(p)
                    s = natural(part_R[r])
                    bag_S[s] = p if row_P is None else natural(row_P[p])
                    # The begin, not a count of ids: each id would have to read the count that the id before has
                    # written.
                    begin_S[s] = i
                    part_R[r] += 1
                key_N[i] = at & _PLACE_MASK
                id_R[r] = i + natural(1)


def cut_bags(
    inverse_N: np.ndarray, offset_P1: np.ndarray, row_P: np.ndarray | None, at_U: np.ndarray, parts_R: np.ndarray,
    ids_R: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Cut bags into parts, those of rank 0 first. The arguments are those of `count_parts` and its first two results.

    Returns:
        key_N: int32, place of each id's key at its rank. size_S, bag_S: int32, number of ids, and bag, of each part.
    """
    ids, parts, last_R = int(ids_R.sum()), int(parts_R.sum()), np.full(len(parts_R), -1)
    key_N, begin_S, bag_S = (np.empty(size, np.int32) for size in (ids, parts, parts))
    part_R, id_R = np.cumsum(parts_R) - parts_R, np.cumsum(ids_R) - ids_R
    _cut_bags_cpu(inverse_N, offset_P1, row_P, at_U, last_R, part_R, id_R, key_N, begin_S, bag_S)
    return key_N, np.diff(begin_S, append=np.int32(ids)), bag_S
