"""What becomes of calls when a real Redis server, or the way to it, fails: an error that says so, or the right rows."""

import contextlib
import threading

import numpy as np
import pytest
import trustme

from oneemb.storage.remote.parameter_server import ServerError, ServerTimeoutError
from oneemb.storage.remote.servers import open_server
from tests.support.parameter_server_suite import check_pull, push, random_ids, random_part
from tests.support.redis_process import Proxy, RedisProcess, redis_process

RNG = np.random.default_rng(30)
IDS = random_ids(RNG, 2000)


@pytest.fixture
def process(tmp_path):
    with redis_process(tmp_path / "redis") as process:
        yield process


@contextlib.contextmanager
def opened(host, options="", scheme="redis", timeout="500ms"):
    server = open_server(f"{scheme}://{host}/?prefix=m&&timeout={timeout}{options}")
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def proxied(port):
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


def part(width=16):
    return random_part(RNG, len(IDS), width)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_server_that_was_killed_and_started_again_is_found_by_the_next_call(threads, process):
    values = {}
    with opened(process.host, f"&&num_threads={threads}&&chunk_size=50&&retry_limit=0", timeout="10s") as server:
        push(server, values, "t", IDS, [part()])
        process.kill()
        assert process.start()
        check_pull(server, values, "t", IDS, [16])  # the old connections are found to be closed before they are used
        process.kill()
        for call in (lambda: server.pull("t", IDS, [16]), lambda: server.push("t", IDS, [part()])):
            with pytest.raises(ServerError, match=r"the connection failed .*next call works"):
                call()
        assert process.start()
        check_pull(server, values, "t", IDS, [16])
        push(server, values, "t", IDS, [part()])
        check_pull(server, values, "t", IDS, [16])


@pytest.mark.parametrize("threads", [1, 3])
def test_calls_in_which_the_server_is_killed_and_started_again_go_through(threads, process):
    values, stop = {}, threading.Event()

    def kill_and_start():
        while not stop.wait(0.15):
            process.kill()
            assert process.start()

    killer = threading.Thread(target=kill_and_start)
    with opened(process.host, f"&&num_threads={threads}&&chunk_size=20&&retry_limit=20", timeout="10s") as server:
        killer.start()
        try:
            for _ in range(12):
                push(server, values, "t", IDS, [part()])
                check_pull(server, values, "t", IDS, [16])
        finally:
            stop.set()
            killer.join()
        check_pull(server, values, "t", IDS, [16])


def test_a_server_that_stays_away_is_tried_as_often_as_was_said(tmp_path):
    with redis_process(tmp_path / "redis") as process, proxied(process.port) as proxy:
        with opened(f"127.0.0.1:{proxy.port}", "&&retry_limit=2") as server:
            process.kill()
            before = proxy.connections
            with pytest.raises(ServerError, match="after 3 tries in a row"):
                server.pull("t", IDS, [16])
            assert proxy.connections - before <= 3
    with pytest.raises(ServerError, match=r"redis://u:\*\*\*@127.0.0.1.*the connection failed"):
        open_server(f"redis://u:secret@{process.host}?retry_limit=0")


def test_a_write_that_was_given_up_on_the_way_does_not_land_on_a_newer_one(process):
    values, ids = {}, IDS[:20]
    with proxied(process.port) as slow, opened(f"127.0.0.1:{slow.port}") as server:
        push(server, values, "t", ids, [part()[:20]])
        slow.let_through.clear()
        with pytest.raises(ServerTimeoutError):
            server.push("t", ids, [part()[:20]])
        hold, slow.let_through = slow.let_through, threading.Event()
        slow.let_through.set()  # for connections that are new: the one before still waits
        push(server, values, "t", ids, [part()[:20]])
        before = process.admin().info("commandstats")["cmdstat_mset"]["calls"]
        hold.set()
        slow.close()  # once everything has been passed on
        assert process.admin().info("commandstats")["cmdstat_mset"]["calls"] == before == 2
    with opened(process.host) as server:
        check_pull(server, values, "t", ids, [16])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_server_that_is_paused_is_a_timeout_and_works_when_it_goes_on(threads, process):
    values = {}
    with opened(process.host, f"&&num_threads={threads}&&chunk_size=30") as server:
        push(server, values, "t", IDS, [part()])
        for _ in range(3):
            process.pause()
            with pytest.raises(ServerTimeoutError, match="no answer in time"):
                server.push("t", IDS, [part()])
            with pytest.raises(ServerTimeoutError):
                server.pull("t", IDS, [16])
            process.resume()
            push(server, values, "t", IDS, [part()])
            check_pull(server, values, "t", IDS, [16])
        assert len(process.admin().client_list()) <= threads + 1, "connections that were given up are gone"


def test_a_connection_is_told_apart_from_that_of_a_server_before(tmp_path):
    """After a start the numbers of connections begin anew: whoever has the old number now is left alone."""
    with redis_process(tmp_path / "redis", appendonly="no") as process, opened(process.host) as server:
        number = max(int(client["id"]) for client in process.admin().client_list() if client["cmd"] == "client|info")
        process.pause()
        with pytest.raises(ServerTimeoutError):
            server.push("t", IDS, [part()])
        process.kill()
        assert process.start()
        with contextlib.ExitStack() as others:
            admin = process.admin()  # which has to live as long as its clients
            clients = [others.enter_context(admin.client()) for _ in range(40)]
            numbers = [client.client_id() for client in clients]
            assert number in numbers
            push(server, {}, "t", IDS, [part()])
            assert [client.client_id() for client in clients] == numbers


def test_writes_that_a_server_does_not_forget_are_told(process):
    process.admin().acl_setuser("narrow", enabled=True, passwords=["+p"], keys="*", commands=["+@all", "-client|kill"])
    with opened(f"narrow:p@{process.host}") as server:
        values = {}
        push(server, values, "t", IDS, [part()])
        process.pause()
        with pytest.raises(ServerTimeoutError):
            server.pull("t", IDS, [16])
        process.resume()
        check_pull(server, values, "t", IDS, [16])  # nothing was written
        process.pause()
        with pytest.raises(ServerTimeoutError):
            server.push("t", IDS, [part()])
        process.resume()
        for _ in range(2):
            with pytest.raises(ServerError, match="may still be carried out"):
                server.push("t", IDS, [part()])


def test_commands_that_wait_longer_than_the_timeout_are_a_timeout(process):
    values = {}
    with opened(process.host) as server:
        push(server, values, "t", IDS, [part()])
        admin = process.admin()
        admin.client_pause(1500, all=True)
        with pytest.raises(ServerTimeoutError):
            server.pull("t", IDS, [16])
        admin.ping()  # which waits as well
        check_pull(server, values, "t", IDS, [16])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_connection_that_is_cut_anywhere_in_an_answer_gives_no_part_of_a_value(threads, process):
    values = {}
    with proxied(process.port) as proxy:
        with opened(f"127.0.0.1:{proxy.port}", f"&&num_threads={threads}&&chunk_size=100") as server:
            push(server, values, "t", IDS, [part(), part(width=3)])
            for after in (1, 7, 100, 101, 5_000, 50_000, 99_999):
                proxy.cut_after = after
                check_pull(server, values, "t", IDS, [16, 3])
                proxy.cut_after = after % 60
                push(server, values, "t", IDS, [part(), part(width=3)])
                check_pull(server, values, "t", IDS, [16, 3])
            assert proxy.cuts == 14, "every one was in the middle of a call"
        with opened(f"127.0.0.1:{proxy.port}", "&&retry_limit=0") as server:
            check_pull(server, values, "t", IDS, [16, 3])
            proxy.cut_after = 5_000
            with pytest.raises(ServerError, match="the connection failed"):
                server.pull("t", IDS, [16, 3])
            check_pull(server, values, "t", IDS, [16, 3])


def test_an_answer_that_stops_in_the_middle_is_a_timeout(process):
    values = {}
    with proxied(process.port) as proxy, opened(f"127.0.0.1:{proxy.port}") as server:
        push(server, values, "t", IDS, [part()])
        proxy.stall_after = 3_000
        with pytest.raises(ServerTimeoutError):
            server.pull("t", IDS, [16])
        proxy.stall_after = None
        check_pull(server, values, "t", IDS, [16])


def test_a_server_at_its_memory_limit_refuses_writes_and_keeps_what_it_has(tmp_path):
    values = {}
    with redis_process(tmp_path / "redis", maxmemory="4mb", maxmemory_policy="noeviction") as process:
        with opened(process.host) as server:
            push(server, values, "t", IDS, [part()])
            with pytest.raises(ServerError, match=r"at its memory limit .* raise `maxmemory`"):
                for table in range(100):
                    server.push(f"full{table}", IDS, [part(width=64)])
            check_pull(server, values, "t", IDS, [16])
            process.admin().config_set("maxmemory", "100mb")
            push(server, values, "t", IDS, [part()])
            check_pull(server, values, "t", IDS, [16])


def test_a_replica_takes_no_writes_and_gives_rows(process, tmp_path):
    values = {}
    with opened(process.host) as server:
        push(server, values, "t", IDS, [part()])
        with redis_process(tmp_path / "replica", replicaof=f"127.0.0.1 {process.port}") as replica:
            in_step = replica.admin()
            while in_step.info("replication")["master_link_status"] != "up":
                pass
            with opened(replica.host) as second:
                check_pull(second, values, "t", IDS, [16])
                with pytest.raises(ServerError, match="is a replica, which takes no writes"):
                    second.push("t", IDS, [part()])
                check_pull(second, values, "t", IDS, [16])


def test_a_wrong_password_is_told_without_it(tmp_path):
    with redis_process(tmp_path / "redis", password="right") as process:
        with opened(f":right@{process.host}") as server:
            values = {}
            push(server, values, "t", IDS, [part()])
            check_pull(server, values, "t", IDS, [16])
        for login in (":secret@", "default:secret@", "ann:secret@", ""):
            with pytest.raises(ServerError, match="wants another user or password") as caught:
                open_server(f"redis://{login}{process.host}")
            assert "secret" not in str(caught.value) and "secret" not in str(caught.value.__cause__)


def test_a_user_who_may_not_write_is_told(process):
    process.admin().acl_setuser("reader", enabled=True, passwords=["+p"], keys="*", commands=["+@all", "-@write"])
    with opened(f"reader:p@{process.host}") as server:
        check_pull(server, {}, "t", IDS, [16])
        with pytest.raises(ServerError, match="the user may not do this"):
            server.push("t", IDS, [part()])
        check_pull(server, {}, "t", IDS, [16])


def test_a_database_that_is_not_there_is_told(process):
    with pytest.raises(ServerError, match="no such database"):
        open_server(f"redis://{process.host}/99")


def test_a_server_that_evicts_or_forgets_rows_says_that_they_are_missing(process):
    with opened(process.host) as server:
        server.push("t", IDS, [part()])
        process.admin().flushall()
        check_pull(server, {}, "t", IDS, [16])


def test_an_idle_connection_that_the_server_has_closed_is_made_anew(process):
    values = {}
    with opened(process.host, "&&retry_limit=0&&heartbeat=1ms") as server:
        push(server, values, "t", IDS, [part()])
        for _ in range(3):
            process.admin().client_kill_filter(_type="normal", skipme=True)
            check_pull(server, values, "t", IDS, [16])


def test_a_call_that_ctrl_c_ends_leaves_no_answer_for_the_next(process):
    values = {}
    with opened(process.host, "&&chunk_size=10") as server:
        push(server, values, "t", IDS, [part()])
        keys, calls = server._keys, []

        def interrupted(*arguments):
            calls.append(arguments)
            process.pause()  # the answers to the first two are still to come
            if len(calls) == 3:
                raise KeyboardInterrupt
            return keys(*arguments)

        server._keys = interrupted
        with pytest.raises(KeyboardInterrupt):
            server.pull("t", IDS, [16])
        server._keys = keys
        process.resume()
        check_pull(server, values, "t", IDS[::-1], [16])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Paths of an authority, and of the certificate and key of 127.0.0.1 that it has made."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    made.cert_chain_pems[0].write_to_path(str(folder / "server.pem"))
    made.private_key_pem.write_to_path(str(folder / "server.key"))
    return folder


def test_tls_is_spoken_and_certificates_are_checked(tmp_path, certificates):
    files = {"tls_cert_file": certificates / "server.pem", "tls_key_file": certificates / "server.key"}
    files |= {"tls_ca_cert_file": certificates / "ca.pem", "tls_auth_clients": "optional"}
    try:
        process = RedisProcess(tmp_path / "redis", tls=True, **files)
    except RuntimeError as error:
        pytest.skip(f"this redis-server has no TLS: {error}")
    values = {}
    client = f"&&certfile={certificates}/server.pem&&keyfile={certificates}/server.key"
    try:
        for options in (f"&&ca_certs={certificates}/ca.pem", "&&verify=false", f"&&verify=false{client}"):
            with opened(process.host, f"{options}&&num_threads=2&&chunk_size=100", "rediss") as server:
                push(server, values, "t", IDS, [part()])
                check_pull(server, values, "t", IDS, [16])
        with pytest.raises(ServerError, match="certificate verify failed"):
            open_server(f"rediss://{process.host}?retry_limit=0")
        with pytest.raises(ServerError, match="TLS takes rediss://"):
            open_server(f"redis://{process.host}?retry_limit=0")
    finally:
        process.stop()
