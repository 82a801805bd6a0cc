"""The server in memory, which stands in for others, is one."""

import numpy as np
import pytest

from oneemb.storage.remote.parameter_server import Erases, ServerError
from oneemb.storage.remote.servers import open_server


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
    with pytest.raises(ServerError, match=r"part 0 of row -1 of table 't' is 8 bytes long, and not 12"):
        server.pull("t", ids[1:], [3])


def test_a_url_that_names_no_server_is_told():
    for url in ("memory", "redsi://host", ""):
        with pytest.raises(ValueError, match="begins with one of memory://"):
            open_server(url)
