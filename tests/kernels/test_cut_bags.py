import numpy as np
import pytest

from oneemb.kernels.cut_bags import count_parts, cut_bags, places_at_ranks


def cut_one_by_one(bags, rank_U, ranks, rows):
    """Sizes of bags by row, and of each rank the places of ids, the sizes and the bags of its parts."""
    place_U, size_P = {}, [0] * len(bags)
    for r in range(ranks):
        place_U |= {u: place for place, u in enumerate(np.flatnonzero(rank_U == r).tolist())}
    places, sizes, rows_of = ([[] for _ in range(ranks)] for _ in range(3))
    for bag, row in zip(bags, rows, strict=True):
        known = [key for key in bag if key >= 0]
        size_P[row] = len(known)
        for r in range(ranks):
            its = [place_U[key] for key in known if rank_U[key] == r]
            if its:
                places[r] += its
                sizes[r].append(len(its))
                rows_of[r].append(row)
    return size_P, places, sizes, rows_of


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("keys, bags, longest", [(1, 0, 1), (7, 40, 1), (60, 300, 12), (3, 50, 30)])
@pytest.mark.parametrize("columns", [1, 5])
def test_parts_are_those_of_a_walk_bag_by_bag(ranks, keys, bags, longest, columns):
    """Bags of every length, some empty, some of padding (-1) alone; rows of several columns are in another order."""
    rng = np.random.default_rng(keys + bags + ranks)
    size_P = rng.integers(0, longest + 1, bags)
    inverse_N = rng.integers(-1, keys, size_P.sum()).astype(np.int32)
    offset_P1 = np.concatenate([[0], np.cumsum(size_P)])
    row_P = None if columns == 1 else np.arange(bags, dtype=np.int32).reshape(columns, -1).T.ravel().argsort()
    rank_U = rng.integers(0, ranks, keys)
    count_R = np.bincount(rank_U, minlength=ranks).tolist()
    lists = [its.tolist() for its in np.split(inverse_N, offset_P1[1:-1])][:bags]
    rows = list(range(bags)) if row_P is None else row_P.tolist()
    ids_P, places, sizes, rows_of = cut_one_by_one(lists, rank_U, ranks, rows)

    at_U = places_at_ranks(np.argsort(rank_U, kind="stable"), count_R)
    parts_R, ids_R, its_ids_P = count_parts(inverse_N, offset_P1, row_P, at_U, ranks)
    key_N, size_S, bag_S = cut_bags(inverse_N, offset_P1, row_P, at_U, parts_R, ids_R)

    assert parts_R.tolist() == [len(its) for its in sizes] and ids_R.tolist() == [len(its) for its in places]
    assert its_ids_P.tolist() == ids_P
    assert key_N.tolist() == sum(places, [])
    assert size_S.tolist() == sum(sizes, []) and bag_S.tolist() == sum(rows_of, [])
    assert key_N.dtype == size_S.dtype == bag_S.dtype == np.int32
