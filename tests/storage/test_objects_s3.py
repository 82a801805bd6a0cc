"""Snapshots and checkpoints in S3, spoken to by s3fs: a server of moto in a thread of this process."""

import importlib.util
import uuid

import fsspec
import pytest
import torch

import oneemb
from oneemb.storage.errors import StorageError
from oneemb.storage.objects import push as push_module
from oneemb.storage.objects.deletion import clean_store, delete_stored
from oneemb.storage.objects.manifests import names_in
from oneemb.storage.objects.object_store import ObjectStore
from oneemb.storage.objects.pull import pull
from oneemb.storage.objects.push import push
from tests.storage.test_backups import held_at
from tests.storage.test_objects import saved_table
from tests.test_train_graph_checkpoint import IDS, graph_at, state_of

pytestmark = [
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("s3fs", "moto", "flask")),
        reason="needs s3fs and moto, whose dependencies contradict those of other tests: make test-s3 has them",
    ),
    pytest.mark.filterwarnings("ignore:embedding 'items' starts empty"),
]


@pytest.fixture(scope="module")
def endpoint():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def url(endpoint, monkeypatch):
    """A URL in a new bucket, with what s3fs needs in fsspec's configuration."""
    monkeypatch.setattr(push_module, "_PIECE_BYTES", 3000)
    monkeypatch.setattr("oneemb.storage.objects.object_store._WAIT_S", 0.05)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": "k", "secret": "s", "endpoint_url": endpoint})
    bucket = f"bucket-{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/items"


def test_what_is_pulled_is_what_was_pushed_bit_for_bit(tmp_path, url):
    held = saved_table(tmp_path / "live")
    pushed = push(tmp_path / "live", url)
    assert sorted(pushed.pushed) == ["a", "b", "c"]
    pull(url, tmp_path / "copy")
    assert held_at(tmp_path / "copy") == held
    assert push(tmp_path / "live", url).bytes_uploaded == 0
    delete_stored(url, "c")
    assert clean_store(url, 0).objects > 0
    pull(url, tmp_path / "fewer")
    assert held_at(tmp_path / "fewer") == {name: held[name] for name in "ab"}
    assert names_in(ObjectStore(url)) == ["a", "b"]


def test_a_graph_goes_on_bit_for_bit_from_a_checkpoint_in_s3(tmp_path, url):
    graph = graph_at(tmp_path / "rows")
    for step in range(3):
        graph(IDS + step)
        graph.save(f"{url}/c.pt", keep=1)
    expected = [graph(IDS + step) for step in range(4)], state_of(graph), graph.steps
    graph.embedding.close()
    again = graph_at(tmp_path / "new")
    torch.manual_seed(99)
    again.load(f"{url}/c.pt")
    assert ([again(IDS + step) for step in range(4)], state_of(again), again.steps) == expected
    again.embedding.close()
    assert len(names_in(ObjectStore(f"{url}/c.pt.rows/embedding"))) == 1


def test_a_bucket_that_is_not_there_and_a_server_that_is_not_there_are_told(tmp_path, url, monkeypatch):
    saved_table(tmp_path / "live", "a")
    with pytest.raises(StorageError, match="could not be .*"):
        oneemb.push(tmp_path / "live", f"s3://no-{uuid.uuid4().hex}/items")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(StorageError, match="could not be .*"):
        oneemb.push(tmp_path / "live", url)
