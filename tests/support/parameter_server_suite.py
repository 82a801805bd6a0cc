"""What every `ParameterServer` must do, as checks that run on any of them.

A new server is done when each check of SUITE passes on it: `run_check(check, open_server)`, where `open_server` opens a
server on one place that is empty when the check begins, as often as it is called. No check has two of them open at
once. The oracle is a dict. What a server does when it fails (timeouts, cut connections, passwords) is its own tests'.
"""

import numpy as np
import pytest

from oneemb.storage.remote.parameter_server import Erases, ServerError

INT64 = np.iinfo(np.int64)
SUITE = []


def _in_suite(function):
    SUITE.append(function)
    return function


def run_check(check, open_server):
    """One check of SUITE; what it opens is closed."""
    servers = []

    def opened():
        for server in servers:
            server.close()
        servers.append(open_server())
        return servers[-1]

    try:
        check(opened)
    finally:
        for server in servers:
            server.close()


# ---- the oracle -----------------------------------------------------------------------------------------------------


def random_part(rng, size, width):
    """float32 [size, width] of any bits: NaNs of all kinds, negative zeros, denormal numbers."""
    return rng.integers(0, 2**32, (size, width), dtype=np.uint32).view(np.float32)


def random_ids(rng, size, among=None):
    """Distinct ids: of all int64, or of as many as `among` around zero."""
    if among is None:
        return np.unique(rng.integers(INT64.min, INT64.max, 2 * size + 8, endpoint=True))[:size][rng.permutation(size)]
    return rng.permutation(among)[:size].astype(np.int64) - among // 2


def push(server, values, table, id_N, parts):
    """Push rows, and note them in the model `values`: bytes by (table, id, part)."""
    server.push(table, id_N, parts)
    for p, part in enumerate(parts):
        for id, row in zip(id_N.tolist(), part, strict=True):
            values[table, id, p] = row.tobytes()


def check_pull(server, values, table, id_N, widths):
    """What a pull gives is what the model has, bit for bit, in the types of the contract."""
    parts, found_NP = server.pull(table, id_N, widths)
    assert found_NP.dtype == np.bool_ and found_NP.shape == (len(id_N), len(widths))
    assert [(part.dtype, part.shape) for part in parts] == [(np.float32, (len(id_N), width)) for width in widths]
    for p, part in enumerate(parts):
        expected = [values.get((table, id, p)) for id in id_N.tolist()]
        assert found_NP[:, p].tolist() == [value is not None for value in expected]
        got = [row.tobytes() if value is not None else None for row, value in zip(part, expected, strict=True)]
        assert got == expected


# ---- the suite ------------------------------------------------------------------------------------------------------


@_in_suite
def an_empty_place_has_no_row(open_server):
    check_pull(open_server(), {}, "t", np.array([0, -1, 5]), [3, 1])


@_in_suite
def values_come_back_bit_for_bit_in_the_order_that_is_asked(open_server):
    print("seed 0")
    rng, values, server = np.random.default_rng(0), {}, open_server()
    for size in (1, 2, 300, 7):
        ids = random_ids(rng, size)
        push(server, values, "t", ids, [random_part(rng, size, 5), random_part(rng, size, 1)])
        check_pull(server, values, "t", ids, [5, 1])
        check_pull(server, values, "t", ids[rng.permutation(size)], [5, 1])
    push(server, values, "t", ids, [np.zeros((size, 5), np.float32), np.full((size, 1), -0.0, np.float32)])
    check_pull(server, values, "t", ids, [5, 1])


@_in_suite
def every_int64_is_an_id(open_server):
    rng, values, server = np.random.default_rng(1), {}, open_server()
    ids = np.array([0, -1, 1, INT64.min, INT64.max, INT64.min + 1, INT64.max - 1, 2**32, -(2**32), 10**18, -(10**18)])
    push(server, values, "t", ids, [random_part(rng, len(ids), 4)])
    check_pull(server, values, "t", ids, [4])


@_in_suite
def ids_that_are_equal_modulo_2_to_the_32_share_no_value(open_server):
    rng, values, server = np.random.default_rng(2), {}, open_server()
    ids = np.concatenate([np.arange(-50, 50) + n * 2**32 for n in (0, 1, -1, 2**20)])
    for some in (ids[::2].copy(), ids[1::4].copy()):
        push(server, values, "t", some, [random_part(rng, len(some), 2)])
        check_pull(server, values, "t", ids, [2])


@_in_suite
def tables_of_any_name_share_no_value(open_server):
    rng, values, server = np.random.default_rng(3), {}, open_server()
    names = ["t", "T", "", "a.b", "a b", "a/b", "../t", "%s%d", "{t}", "t*", "ä\n", "t_gid_1_cid_0_osid_0", "_", "t\0"]
    ids = np.array([1, -1, 0])
    for width, name in enumerate(names, 1):
        push(server, values, name, ids[: 1 + width % 3].copy(), [random_part(rng, 1 + width % 3, width)])
    for width, name in enumerate(names, 1):
        check_pull(server, values, name, ids, [width])


@_in_suite
def a_push_takes_the_place_of_the_values_before(open_server):
    rng, values, server = np.random.default_rng(4), {}, open_server()
    ids = random_ids(rng, 60)
    for size in (60, 20, 60):
        push(server, values, "t", ids[:size].copy(), [random_part(rng, size, 3), random_part(rng, size, 3)])
        check_pull(server, values, "t", ids, [3, 3])


@_in_suite
def parts_of_a_row_are_found_one_by_one(open_server):
    rng, values, server = np.random.default_rng(5), {}, open_server()
    ids = random_ids(rng, 30)
    push(server, values, "t", ids[:20].copy(), [random_part(rng, 20, 4)])
    push(server, values, "t", ids[10:].copy(), [random_part(rng, 20, 4), random_part(rng, 20, 2)])
    check_pull(server, values, "t", ids, [4, 2, 7])
    check_pull(server, values, "t", ids, [4])


@_in_suite
def calls_without_ids_or_parts_do_nothing(open_server):
    rng, values, server = np.random.default_rng(6), {}, open_server()
    none = np.empty(0, np.int64)
    for _ in range(2):
        server.push("t", none, [np.empty((0, 3), np.float32)])
        check_pull(server, values, "t", none, [3, 1])
        ids = random_ids(rng, 9)
        server.push("t", ids, [])
        check_pull(server, values, "t", ids, [])
        push(server, values, "t", ids, [random_part(rng, 9, 3), random_part(rng, 9, 1)])
        check_pull(server, values, "t", ids, [3, 1])


@_in_suite
def a_value_of_another_length_is_an_error_that_names_it(open_server):
    rng, values, server = np.random.default_rng(7), {}, open_server()
    push(server, values, "books", np.array([7, -8]), [random_part(rng, 2, 4), random_part(rng, 2, 2)])
    for widths, part in (([4, 3], 1), ([3, 2], 0), ([5, 2], 0)):
        with pytest.raises(ServerError) as caught:
            server.pull("books", np.array([100, -8, 200]), widths)
        assert "books" in str(caught.value) and "-8" in str(caught.value) and f"part {part}" in str(caught.value)
    check_pull(server, values, "books", np.array([7, -8]), [4, 2])


@_in_suite
def what_is_given_and_taken_is_a_copy(open_server):
    rng, values, server = np.random.default_rng(8), {}, open_server()
    ids, parts = random_ids(rng, 40), [random_part(rng, 40, 6), random_part(rng, 40, 1)]
    asked = ids.copy()
    push(server, values, "t", ids, parts)
    ids[:], parts[0][:], parts[1][:] = 0, 1, 2
    check_pull(server, values, "t", asked, [6, 1])
    pulled, found_NP = server.pull("t", asked, [6, 1])
    pulled[0][:], pulled[1][:], found_NP[:] = 3, 4, False
    check_pull(server, values, "t", asked, [6, 1])


@_in_suite
def parts_may_be_views_of_wider_rows(open_server):
    rng, values, server = np.random.default_rng(9), {}, open_server()
    ids, rows = random_ids(rng, 50), random_part(rng, 50, 10)
    push(server, values, "t", ids, [rows[:, :7], rows[:, 7:]])
    check_pull(server, values, "t", ids[::-1], [7, 3])


@_in_suite
def rows_outlive_the_server_that_pushed_them(open_server):
    rng, values = np.random.default_rng(10), {}
    ids = random_ids(rng, 100)
    for n in range(3):
        server = open_server()
        check_pull(server, values, "t", ids, [2])
        push(server, values, "t", ids[n * 30 :].copy(), [random_part(rng, 100 - n * 30, 2)])
        server.close()
    check_pull(open_server(), values, "t", ids, [2])


@_in_suite
def many_rows_of_one_call_are_not_mixed_up(open_server):
    print("seed 11")
    rng, server = np.random.default_rng(11), open_server()
    ids = random_ids(rng, 20_000)
    parts = [np.repeat(ids.view(np.float32).reshape(-1, 2), width // 2, 0).reshape(-1, width) for width in (64, 2)]
    server.push("t", ids, parts)
    asked = rng.permutation(np.concatenate([ids, random_ids(rng, 5_000)]))
    pulled, found_NP = server.pull("t", asked, [64, 2])
    known_N = np.isin(asked, ids)
    assert (found_NP == known_N[:, None]).all()
    for part in pulled:
        told = np.ascontiguousarray(part[known_N]).view(np.int64)
        assert (told == asked[known_N, None]).all()


@_in_suite
def erased_ids_are_gone_and_no_others(open_server):
    rng, values, server = np.random.default_rng(12), {}, open_server()
    if not isinstance(server, Erases):
        pytest.skip(f"{server.name} does not erase")
    ids = random_ids(rng, 300)
    for table in ("t", "u"):
        push(server, values, table, ids[:200].copy(), [random_part(rng, 200, 3), random_part(rng, 200, 1)])
    server.erase("t", np.empty(0, np.int64), 2)
    for begin in (0, 50, 150):  # some that are gone already, and some that never were
        server.erase("t", ids[begin : begin + 100].copy(), 2)
        for id in ids[begin : begin + 100].tolist():
            values.pop(("t", id, 0), None), values.pop(("t", id, 1), None)
        check_pull(server, values, "t", ids, [3, 1])
    check_pull(server, values, "u", ids, [3, 1])
    push(server, values, "t", ids, [random_part(rng, 300, 3), random_part(rng, 300, 1)])
    check_pull(server, values, "t", ids, [3, 1])


@_in_suite
def many_calls_in_any_order_agree_with_a_dict(open_server):
    print("seed 13")
    rng, values, server = np.random.default_rng(13), {}, open_server()
    erases = isinstance(server, Erases)
    for _ in range(100):
        table, ids = rng.choice(["t", "u"]).item(), random_ids(rng, int(rng.integers(0, 60)), among=200)
        call = rng.choice(["push", "push part", "pull", "erase", "open"], p=[0.3, 0.1, 0.4, 0.15, 0.05])
        if call == "push":
            push(server, values, table, ids, [random_part(rng, len(ids), 3), random_part(rng, len(ids), 1)])
        elif call == "push part":
            push(server, values, table, ids, [random_part(rng, len(ids), 3)])
        elif call == "pull":
            check_pull(server, values, table, ids, [3, 1])
        elif call == "erase" and erases:
            server.erase(table, ids, 2)
            for id in ids.tolist():
                values.pop((table, id, 0), None), values.pop((table, id, 1), None)
        elif call == "open":
            server = open_server()
    for table in ("t", "u"):
        check_pull(server, values, table, np.arange(-100, 100), [3, 1])


@_in_suite
def closing_twice_is_fine(open_server):
    server = open_server()
    push(server, {}, "t", np.array([1]), [np.ones((1, 2), np.float32)])
    server.close()
    server.close()
