"""An object store that gives no answer holds up neither a close, nor Ctrl-C, nor the end of a program."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid

import fsspec
import pytest

import oneemb
from oneemb.serving import following
from oneemb.storage.objects.manifests import current_of
from oneemb.storage.objects.object_store import ObjectStore
from oneemb.storage.objects.push import push
from oneemb.storage.snapshots.snapshot_parts import look_at
from tests.serving.test_model import IDS, Scorer, Training
from tests.storage.test_objects import embedding_at, train
from tests.support.interrupts import interrupt_soon

FILES = type(fsspec.filesystem("memory"))


class Silent:
    """A store whose reads, of `kind` of objects, give no answer until `answers` is set."""

    def __init__(self, monkeypatch, kind=""):
        self.asked, self.answers, original = threading.Event(), threading.Event(), FILES.cat_file

        def silent(fs, path, *args):
            if kind in path:
                self.asked.set()
                assert self.answers.wait(300)
            return original(fs, path, *args)

        monkeypatch.setattr(FILES, "cat_file", silent)


@pytest.fixture
def job(tmp_path):
    embedding = embedding_at(tmp_path / "job")
    train(embedding, IDS, 0.5)
    embedding.save_snapshot("a")
    yield embedding
    embedding.close()


@pytest.fixture
def url(tmp_path, job):
    url = f"memory://{uuid.uuid4().hex}/items"
    push(tmp_path / "job", url)
    return url


def opened(kind, url, tmp_path):
    """(object that follows a store, call that starts its thread)."""
    if kind == "publisher":
        publisher = oneemb.publish(url, [take], folder=tmp_path / "copy", seconds=0.01)
        return publisher, lambda: None
    if kind == "server":
        served = oneemb.InferenceEmbedding.open(url, folder=tmp_path / "copy", absent="zeros")
        return served, lambda: served.follow(0.01)
    trained = Training(Scorer(tmp_path / "trained"))
    trained(IDS)
    trained.save(f"{url}/model.pt")
    served = oneemb.serve_model(f"{url}/model.pt", lambda: Scorer(tmp_path / "nowhere"), folder=tmp_path / "copies")
    trained(IDS)
    trained.save(f"{url}/model.pt")
    trained.model.close()
    return served, lambda: served.follow(0.01)


def take(changes):
    """A sink that reads nothing."""


def ends_soon(call):
    """Whether a call returns, although the store gives no answer."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


@pytest.mark.parametrize("kind", ["publisher", "server", "model"])
def test_a_close_leaves_a_call_that_gives_no_answer_and_names_it(kind, url, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(following, "_LATE_S", 0.1)
    followed, start = opened(kind, url, tmp_path)
    with monkeypatch.context() as patched:
        store = Silent(patched)
        start()
        assert store.asked.wait(60)
        (thread,) = [one for one in threading.enumerate() if one.name == "oneemb-follow"]
        try:
            assert ends_soon(followed.close) and thread.is_alive()
            (told,) = [record.message for record in caplog.records if "has not answered" in record.message]
            assert url in told and ("newest.json is read" in told) == (kind != "model")
        finally:
            store.answers.set()
        thread.join(60)
        assert not thread.is_alive()


def test_one_interrupt_ends_a_close_and_a_pull_that_wait_for_a_store(url, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        store = Silent(patched, "/objects/")
        for wait in ("close", "open"):
            with pytest.raises(KeyboardInterrupt):
                if wait == "close":
                    publisher = oneemb.publish(url, [take], folder=tmp_path / wait, seconds=0.01)
                    assert store.asked.wait(60)
                interrupt_soon()
                if wait == "close":
                    publisher.close()
                else:
                    oneemb.InferenceEmbedding.open(url, folder=tmp_path / wait)
        threads = [one for one in threading.enumerate() if one.name in ("oneemb-follow", "oneemb-objects")]
        assert {one.name for one in threads} == {"oneemb-follow", "oneemb-objects"}
        store.answers.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "open", absent="zeros") as served:
        assert served.version.name == "a"


def test_a_signal_whose_handler_ends_the_program_ends_a_pull_that_waits_for_a_store(url, tmp_path, monkeypatch):
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    try:
        with monkeypatch.context() as patched:
            store = Silent(patched, "/objects/")
            limit = threading.Timer(60, store.answers.set)
            limit.start()
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(SystemExit):
                oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving")
            assert not store.answers.is_set(), "the pull has waited for the store"
            store.answers.set()
            limit.cancel()
            for thread in threading.enumerate():
                if thread.name == "oneemb-objects":
                    thread.join(60)
                    assert not thread.is_alive()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_figures_of_a_sink_know_the_newest_version_of_a_store_that_is_not_downloaded(job, url, tmp_path, monkeypatch):
    with oneemb.publish(url, [take], folder=tmp_path / "copy", seconds=1000.0) as publisher:
        publisher.flush()
        assert [publisher.stats().popitem()[1][key] for key in ("lag_s", "backlog_versions")] == [0.0, 0]
        train(job, IDS, 0.5)
        job.save_snapshot("b")
        push(tmp_path / "job", url, ["b"])
        created = look_at([str(tmp_path / "job")]).get("b").info.created
        with monkeypatch.context() as patched:
            store = Silent(patched, "/objects/")
            thread = threading.Thread(target=publisher.flush, daemon=True)
            thread.start()
            assert store.asked.wait(60)
            found, begun = [], time.time()
            try:
                assert ends_soon(lambda: found.append(publisher.stats().popitem()[1]))
                assert found[0]["version"] == "a" and found[0]["backlog_versions"] == 1
                assert begun - created <= found[0]["lag_s"] <= time.time() - created
            finally:
                store.answers.set()
            thread.join(60)
            assert not thread.is_alive()
        assert [publisher.stats().popitem()[1][key] for key in ("version", "lag_s")] == ["b", 0.0]


def test_texts_of_a_store_that_do_not_say_when_a_snapshot_was_saved_are_read(job, url, tmp_path):
    """Earlier releases have written such texts."""
    store = ObjectStore(url)
    for key in store.keys("snapshots/"):
        store.put_text(key, {field: value for field, value in store.get_text(key).items() if field != "created"})
    assert current_of(store, "a").created == 0.0
    with oneemb.publish(url, [take], folder=tmp_path / "copy", seconds=1000.0) as publisher:
        publisher.flush()
        assert [publisher.stats().popitem()[1][key] for key in ("version", "lag_s")] == ["a", 0.0]


PROGRAM = """
import sys
from pathlib import Path
import pytest
from tests.serving.test_silent_store import *

with pytest.MonkeyPatch.context() as patched:
    job = embedding_at(Path(sys.argv[1]) / "job")
    train(job, IDS, 0.5)
    job.save_snapshot("a")
    push(Path(sys.argv[1]) / "job", "memory://here/items")
    store = Silent(patched, "/objects/")
    publisher = oneemb.publish("memory://here/items", [take], folder=Path(sys.argv[1]) / "copy", seconds=0.01)
    assert store.asked.wait(60)
"""


def test_a_program_ends_although_a_store_gives_no_answer(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
