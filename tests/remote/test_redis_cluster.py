"""Rows in a cluster of three Redis servers."""

import subprocess

import numpy as np
import pytest

from oneemb.storage.remote.parameter_server import ServerError
from oneemb.storage.remote.servers import open_server
from tests.support.forks import ended_well, in_child
from tests.support.parameter_server_suite import SUITE, check_pull, push, random_ids, random_part, run_check
from tests.support.redis_process import PATIENCE_S, RedisProcess, free_port

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    nodes = []
    try:
        for n in range(3):
            port = free_port()
            while port + 10_000 >= 2**16:  # of the cluster's own bus
                port = free_port()
            nodes.append(RedisProcess(tmp_path_factory.mktemp(f"node{n}"), port, cluster_enabled="yes"))
        hosts = [node.host for node in nodes]
        made = subprocess.run(
            ["redis-cli", "--cluster", "create", *hosts, "--cluster-yes"], capture_output=True, text=True
        )
        assert made.returncode == 0, made.stdout + made.stderr
        for node in nodes:
            for _ in range(PATIENCE_S * 100):
                if node.admin().execute_command("CLUSTER INFO")["cluster_state"] == "ok":
                    break
                node.admin().execute_command("WAIT", 1, 10)  # 10 ms: there is no replica
        yield nodes
    finally:
        for node in nodes:
            node.stop()


@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_a_cluster_keeps_rows(check, nodes):
    place = f"redis://{nodes[0].host}/?prefix={check.__name__}&&cluster=true"
    run_check(check, lambda: open_server(place))


def test_rows_lie_on_all_nodes_and_a_child_of_fork_has_connections_of_its_own(nodes):
    server = open_server(f"redis://{nodes[1].host}/?prefix=spread&&cluster=true")
    rng, values = np.random.default_rng(40), {}
    ids = random_ids(rng, 300)
    push(server, values, "t", ids, [random_part(rng, 300, 2)])
    counts = [len(node.admin().keys("spread_*")) for node in nodes]
    assert sum(counts) == 300 and min(counts) > 50

    def work():
        check_pull(server, values, "t", ids, [2])
        return True

    child = in_child(work)
    check_pull(server, values, "t", ids, [2])
    assert ended_well(child) is True
    check_pull(server, values, "t", ids, [2])
    server.close()


def test_what_is_no_cluster_or_one_without_being_said_to_be_is_told(nodes, redis_host):
    with pytest.raises(ServerError, match="is no cluster, remove `cluster=true` from the URL"):
        open_server(f"redis://{redis_host}/?cluster=true")
    single = open_server(f"redis://{nodes[0].host}")
    with pytest.raises(ServerError, match="add `cluster=true` to the URL"):
        single.pull("t", np.arange(100), [2])
    single.close()


def test_a_node_that_is_gone_is_told(nodes):
    server = open_server(f"redis://{nodes[0].host}/?prefix=gone&&cluster=true&&timeout=500ms")
    rng, values = np.random.default_rng(41), {}
    ids = random_ids(rng, 300)
    push(server, values, "t", ids, [random_part(rng, 300, 2)])
    nodes[2].kill()
    with pytest.raises(ServerError, match="redis://"):
        server.pull("t", ids, [2])
    assert nodes[2].start()
    for _ in range(PATIENCE_S * 100):
        if all(node.admin().execute_command("CLUSTER INFO")["cluster_state"] == "ok" for node in nodes):
            break
        nodes[0].admin().execute_command("WAIT", 1, 10)
    check_pull(server, values, "t", ids, [2])
    server.close()
