"""Rows in a real Redis server, and what its URL says."""

import subprocess
import sys

import numpy as np
import pytest
import redis

from oneemb.storage.remote.parameter_server import Erases, ServerError
from oneemb.storage.remote.redis_url import read_redis_url
from oneemb.storage.remote.servers import open_server
from tests.support.forks import ended_well, in_child
from tests.support.parameter_server_suite import SUITE, check_pull, push, random_ids, random_part, run_check

OPTIONS = ["", "&&num_threads=3&&chunk_size=5", "&&chunk_size=100000"]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_a_redis_server_keeps_rows(check, options, redis_place):
    run_check(check, lambda: open_server(redis_place + options))


@pytest.fixture
def opened(redis_place):
    server = open_server(redis_place)
    yield server
    server.close()


def client_of(place):
    url = read_redis_url(*place.split("://"))
    return redis.Redis(port=url.port), url.prefix


def test_keys_and_values_are_those_of_torchrec_dynamic_embedding_with_all_digits(opened, redis_place):
    rows = np.array([[1, -0.5], [2, np.inf]], np.float32)
    opened.push("emb.t1", np.array([7, -(2**63)]), [rows, rows[:, :1]])
    client, prefix = client_of(redis_place)
    kept = {key: client.get(key) for key in client.keys(f"{prefix}_*")}
    begin, smallest = (
        f"{prefix}_table_emb.t1_gid_7_cid_0_osid_",
        f"{prefix}_table_emb.t1_gid_-9223372036854775808_cid_0",
    )
    assert kept == {
        f"{begin}0".encode(): rows[0].tobytes(),
        f"{begin}1".encode(): rows[0, :1].tobytes(),
        f"{smallest}_osid_0".encode(): rows[1].tobytes(),
        f"{smallest}_osid_1".encode(): rows[1, :1].tobytes(),
    }


def test_two_hundred_thousand_ids_are_not_mixed_up(opened):
    print("seed 20")
    rng = np.random.default_rng(20)
    ids = random_ids(rng, 199_000)
    ids = np.unique(np.concatenate([ids, ids[:300] ^ 2**32, ids[:300] ^ 2**63 - 1, [0, -1, 2**63 - 1, -(2**63)]]))
    ids = rng.permutation(ids)
    for begin in range(0, len(ids), 8192):
        some = ids[begin : begin + 8192]
        opened.push("t", some, [some.view(np.float32).reshape(-1, 2)])
    asked = rng.permutation(ids)
    parts, found_NP = opened.pull("t", asked, [2])
    assert found_NP.all() and (parts[0].view(np.int64)[:, 0] == asked).all()


def test_prefixes_and_databases_are_apart(redis_host):
    places = ["?prefix=a", "?prefix=a_b", "?db=1", "?db=2&&prefix=a", "3?prefix=a"]
    rng, ids = np.random.default_rng(21), np.array([1, 2])
    models = [{} for _ in places]
    for place, model in zip(places, models, strict=True):
        server = open_server(f"redis://{redis_host}/{place}")
        check_pull(server, {}, "b_t", ids, [2])
        push(server, model, "b_t", ids, [random_part(rng, 2, 2)])
        server.close()
    for place, model in zip(places, models, strict=True):
        server = open_server(f"redis://{redis_host}/{place}")
        check_pull(server, model, "b_t", ids, [2])
        server.close()


def test_a_value_of_another_type_is_not_taken_for_a_row_that_is_missing(opened, redis_place):
    client, prefix = client_of(redis_place)
    client.lpush(f"{prefix}_table_t_gid_5_cid_0_osid_0", "something")
    with pytest.raises(ServerError, match=r"gid_5_cid_0_osid_0 of a row of table 't' has a value of type list"):
        opened.pull("t", np.array([4, 5, 6]), [2])
    check_pull(opened, {}, "t", np.array([4, 6]), [2])


def test_parts_of_another_shape_or_type_are_refused(opened):
    ids = np.array([1, 2])
    for part in (np.ones((2, 3)), np.ones((3, 2), np.float32), np.ones(2, np.float32), np.ones((2, 0), np.float32)):
        with pytest.raises(ValueError, match="part 1 must"):
            opened.push("t", ids, [np.ones((2, 1), np.float32), part])
    check_pull(opened, {}, "t", ids, [1])


def test_rows_wider_than_a_request_come_back(opened):
    rng, values = np.random.default_rng(22), {}
    push(opened, values, "t", np.array([1, 2, 3]), [random_part(rng, 3, 2**19)])
    check_pull(opened, values, "t", np.array([3, 4, 1]), [2**19])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_child_of_fork_does_not_share_the_connections_of_its_parent(threads, redis_place):
    server = open_server(f"{redis_place}&&num_threads={threads}&&chunk_size=10")
    rng, values = np.random.default_rng(23), {}
    ids = random_ids(rng, 500)
    push(server, values, "t", ids, [random_part(rng, 500, 4)])

    def work():
        for _ in range(20):
            check_pull(server, values, "t", ids, [4])
        server.close()
        return True

    children = [in_child(work) for _ in range(2)]
    for _ in range(20):
        check_pull(server, values, "t", ids, [4])
    assert [ended_well(child) for child in children] == [True, True]
    check_pull(server, values, "t", ids, [4])
    server.close()


def test_a_closed_server_connects_anew_when_it_is_called(opened):
    rng, values, ids = np.random.default_rng(24), {}, np.array([1])
    push(opened, values, "t", ids, [random_part(rng, 1, 4)])
    opened.close()
    check_pull(opened, values, "t", ids, [4])
    assert isinstance(opened, Erases)


def test_nothing_loads_the_client_before_a_redis_server_is_opened():
    code = """
import sys
from oneemb.storage.remote.servers import open_server
open_server("memory://a")
assert "redis" not in sys.modules
sys.modules["redis"] = None
try:
    open_server("rediss://127.0.0.1")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "rediss:// needs redis: pip install 'oneemb[redis]'"


# ---- URLs -----------------------------------------------------------------------------------------------------------


def test_a_url_says_who_where_and_how():
    url = read_redis_url(
        "redis", "ann:p%40%3A%3F@db.example:7000/?num_threads=4&&db=2&prefix=m_1&&timeout=1.5s&&heartbeat=2m&&"
        "retry_limit=0&&chunk_size=9",
    )  # fmt: skip
    assert (url.host, url.port, url.user, url.password, url.tls) == ("db.example", 7000, "ann", "p@:?", False)
    assert (url.num_threads, url.db, url.prefix, url.retry_limit, url.chunk_size) == (4, 2, "m_1", 0, 9)
    assert (url.timeout_s, url.heartbeat_s, url.cluster) == (1.5, 120, False)
    assert url.name == (
        "redis://ann:***@db.example:7000/?num_threads=4&&db=2&prefix=m_1&&timeout=1.5s&&heartbeat=2m&&retry_limit=0"
        "&&chunk_size=9"
    )
    plain = read_redis_url("redis", "[::1]")
    assert (plain.host, plain.port, plain.db, plain.prefix, plain.timeout_s) == ("::1", 6379, 0, "", 10)
    assert read_redis_url("redis", "h?timeout=250ms").timeout_s == 0.25
    tls = read_redis_url("rediss", ":p@h:1/3?verify=false&&ca_certs=/a%26b.pem")
    assert (tls.tls, tls.verify, tls.ca_certs, tls.user, tls.password, tls.db) == (
        True, False, "/a&b.pem", None, "p", 3
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rest", "told"),
    [
        ("", "host"),
        ("h:0", "port 1 to 65535"),
        ("h:65536", "port 1 to 65535"),
        ("a b", "host"),
        ("h:1:2", "host"),
        ("secret@h", "user:password"),
        ("u:@h", "user:password"),
        ("u:secret@h/?what=1", "no option 'what'"),
        ("u:se?cret@h", "%3F"),
        ("u:1?secret=2@h", "%3F"),
        ("u:secret:x@secret@h?db", "no option 'db'"),
        ("h/x", "`db` must be the number of a database"),
        ("h/?db=-1", "`db` must be the number of a database, 0 or more, got '-1'"),
        ("h/1?db=1", "`db` is given twice"),
        ("h?num_threads=0", "1 to 64"),
        ("h?chunk_size=0", "a number of values"),
        ("h?retry_limit=many", "a number of times"),
        ("h?timeout=5", "1.5s, 200ms or 2m"),
        ("h?timeout=0s", "a time above zero"),
        ("h?heartbeat=1h", "1.5s, 200ms or 2m"),
        ("h?prefix=a-b", "an identifier"),
        ("h?prefix=a_table", "without `_table_`"),
        ("h?prefix=a_table_b", "without `_table_`"),
        ("h?cluster=yes", "true or false"),
        ("h?cluster=true&&db=1", "one database"),
        ("h?verify=false&&ca_certs=x", "`ca_certs`, `verify` is for TLS"),
    ],
)
def test_a_url_that_says_something_else_is_refused_without_its_password(rest, told):
    with pytest.raises(ValueError, match="redis://") as caught:
        open_server(f"redis://{rest}")
    assert told in str(caught.value)
    assert "secret" not in str(caught.value) and "se?cret" not in str(caught.value)


def test_an_unknown_scheme_is_told_without_the_password():
    with pytest.raises(ValueError, match="got redsi") as caught:
        open_server("redsi://u:secret@h")
    assert "secret" not in str(caught.value)
