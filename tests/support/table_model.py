"""What a table must hold, kept in a dict: the oracle of the persistent table's tests."""

import numpy as np

Rows = dict[tuple[int, int], bytes]


def random_rows(rng, size, width):
    """Rows of random bits, NaNs of every kind among them."""
    return rng.integers(0, 2**32, (size, width), dtype=np.uint32).view(np.float32)


def random_keys(rng, size, ids=5000, tables=3):
    """Unique keys from a small range, the ends of int64 among them."""
    n = rng.choice(ids * tables, size, replace=False)
    id_N = (n // tables).astype(np.int64) - ids // 2
    id_N[id_N == ids // 4] = np.iinfo(np.int64).max
    id_N[id_N == ids // 4 + 1] = np.iinfo(np.int64).min
    return (n % tables).astype(np.int32), id_N


def put(table, rows: Rows, table_U, id_U, row_UW):
    table.put(table_U, id_U, row_UW)
    note(rows, table_U, id_U, row_UW)


def note(rows: Rows, table_U, id_U, row_UW):
    for t, i, row in zip(table_U.tolist(), id_U.tolist(), row_UW, strict=True):
        rows[t, i] = row.tobytes()


def put_random(table, rows: Rows, rng, size, **keys):
    table_U, id_U = random_keys(rng, size, **keys)
    put(table, rows, table_U, id_U, random_rows(rng, size, table.row_width))


def scanned(table, batch=1000) -> Rows:
    found: Rows = {}
    for table_N, id_N, row_NW in table.scan(batch):
        assert 0 < len(id_N) <= batch and row_NW.dtype == np.float32
        for t, i, row in zip(table_N.tolist(), id_N.tolist(), row_NW, strict=True):
            assert (t, i) not in found, "scanned twice"
            found[t, i] = row.tobytes()
    return found


def got(table, keys) -> list[bytes | None]:
    """What `get` brings for each key; None where it is missing."""
    keys = list(keys)
    table_U = np.array([t for t, _ in keys], np.int32)
    id_U = np.array([i for _, i in keys], np.int64)
    out_UW = np.full((len(keys), table.row_width), np.nan, np.float32)
    untouched = out_UW[:1].tobytes()
    missing_U = table.get(table_U, id_U, out_UW)
    assert missing_U.dtype == bool and missing_U.shape == (len(keys),)
    for missing, row in zip(missing_U, out_UW, strict=True):
        assert not missing or row.tobytes() == untouched, "the row of a missing key was written"
    return [None if missing else row.tobytes() for missing, row in zip(missing_U, out_UW, strict=True)]


def check(table, rows: Rows, batch=1000):
    """The table holds exactly these rows, by every way of reading it."""
    assert len(table) == len(rows)
    assert scanned(table, batch) == rows
    absent = [(0, 10**15), (7, 0), (2, -(10**15))]
    assert got(table, [*rows, *absent]) == [*rows.values(), *[None] * len(absent)]
