"""The server in memory, which stands in for others, is one."""

import numpy as np
import pytest

from oneemb.storage.remote.parameter_server import Erases, ServerError
from oneemb.storage.remote.servers import MemoryServer, open_server
from tests.support.parameter_server_suite import SUITE, run_check


@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_a_server_in_memory_keeps_rows(check):
    values = {}
    run_check(check, lambda: MemoryServer(values))


class HalfIds(MemoryServer):
    """Forgets the upper half of an id."""

    def pull(self, table, id_N, widths):
        return super().pull(table, id_N.astype(np.int32), widths)

    def push(self, table, id_N, parts):
        super().push(table, id_N.astype(np.int32), parts)


class SwappedReplies(MemoryServer):
    """Takes the rows of one piece of a large call for those of another."""

    def pull(self, table, id_N, widths):
        parts, found_NP = super().pull(table, id_N, widths)
        return [np.roll(part, 1000, 0) if len(part) > 2000 else part for part in parts], found_NP


@pytest.mark.parametrize(
    ("server", "checks"),
    [
        (HalfIds, {"every_int64_is_an_id", "ids_that_are_equal_modulo_2_to_the_32_share_no_value"}),
        (SwappedReplies, {"many_rows_of_one_call_are_not_mixed_up"}),
    ],
)
def test_the_suite_finds_a_server_that_mixes_up_rows(server, checks):
    failed = set()
    for check in SUITE:
        values = {}
        try:
            run_check(check, lambda values=values: server(values))
        except AssertionError:
            failed.add(check.__name__)
    assert checks <= failed


def test_what_is_pushed_comes_back_and_is_found_by_who_opens_the_name_again():
    ids = np.array([0, -1, 2**63 - 1, -(2**63), 5, 5 + 2**32])
    weights = np.arange(12, dtype=np.float32).reshape(6, 2)
    sums = np.array([[np.nan], [-0.0], [1e-45], [np.inf], [4], [5]], np.float32)
    open_server("memory://one").push("t", ids, [weights, sums])
    server = open_server("memory://one")
    parts, found_NP = server.pull("t", ids[::-1].copy(), [2, 1])
    assert found_NP.all()
    assert [part.tobytes() for part in parts] == [weights[::-1].tobytes(), sums[::-1].tobytes()]
    assert not server.pull("other", ids, [2])[1].any() and not open_server("memory://two").pull("t", ids, [2])[1].any()
    assert isinstance(server, Erases)
    server.erase("t", ids[:1], 2)
    assert server.pull("t", ids, [2, 1])[1].tolist() == [[False] * 2] + [[True] * 2] * 5
    with pytest.raises(ServerError, match=r"part 0 of row -1 of table 't' must have 12 bytes, has 8"):
        server.pull("t", ids[1:], [3])


def test_a_url_that_names_no_server_is_told():
    for url in ("memory", "redsi://host", ""):
        with pytest.raises(ValueError, match="begins with one of memory://"):
            open_server(url)
