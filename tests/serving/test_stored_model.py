"""A model served from the URL of a checkpoint: dense weights and rows of one save, taken over as a job goes on."""

import io
import shutil
import uuid

import fsspec
import pytest
import torch

import oneemb
from oneemb.storage.errors import StorageError
from oneemb.storage.objects.deletion import delete_stored
from tests.serving.test_following import wait_for
from tests.serving.test_model import IDS, Scorer, Training, answers


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setattr("oneemb.storage.objects.object_store._WAIT_S", 0)
    return f"memory://{uuid.uuid4().hex}/job/model.pt"


@pytest.fixture
def job(tmp_path, url):
    torch.manual_seed(0)
    graph = Training(Scorer(tmp_path / "job"))
    graph(IDS)
    graph.save(url, keep=2)
    yield graph
    graph.model.close()


def serve(url, tmp_path, **options):
    return oneemb.serve_model(url, lambda: Scorer(tmp_path / "nowhere"), folder=tmp_path / "copies", **options)


def object_at(url, content=None):
    fs, path = fsspec.url_to_fs(url)
    if content is not None:
        fs.pipe_file(path, content)
    return fs.cat_file(path)


def test_a_model_at_a_url_follows_the_job_without_its_disk(job, url, tmp_path):
    first, changes = answers(job.model), []
    with serve(url, tmp_path, on_change=lambda served: changes.append(served.error)) as served:
        assert torch.equal(served(IDS), first) and not served.refresh()
        served.follow(0.01)
        for _ in range(3):
            job(IDS)
            want = answers(job.model)
            job.save(url, keep=2)
            assert wait_for(lambda want=want: torch.equal(served(IDS), want))
        assert served.error is None and not any(changes)
        assert all(one.name.startswith("checkpoint-000000000004-") for one in served.current.snapshots.values())
    assert not (tmp_path / "nowhere").exists()
    shutil.rmtree(tmp_path / "job", ignore_errors=True)
    with serve(url, tmp_path, dtype="float16") as served:  # the copies are there
        assert torch.allclose(served(IDS), want, atol=0.01)


def test_the_names_of_embeddings_are_those_of_the_graph_and_each_has_a_folder(job, url, tmp_path):
    with serve(url, tmp_path, prefix="model"):
        pass
    for name in "pairs", "bags":
        assert sorted(one.name for one in (tmp_path / "copies" / name).iterdir() if one.suffix != ".serving") == [
            "LOCK", "rows",
        ]  # fmt: skip


def test_an_older_checkpoint_is_refused_while_the_store_has_the_newer_rows(job, url, tmp_path):
    older, want = object_at(url), answers(job.model)
    job(IDS)
    job.save(url, keep=2)
    with serve(url, tmp_path) as served:
        now = answers(job.model)
        object_at(url, older)
        with pytest.raises(StorageError, match=r"older than .*; refresh\(older=True\) takes it"):
            served.refresh()
        assert torch.equal(served(IDS), now)
        assert served.refresh(older=True) and torch.equal(served(IDS), want)


def test_a_checkpoint_of_a_job_that_lost_its_newer_saves_is_taken(job, url, tmp_path):
    older, want = object_at(url), answers(job.model)
    job(IDS)
    job.save(url, keep=2)
    with serve(url, tmp_path) as served:
        object_at(url, older)
        for name, version in served.current.snapshots.items():
            delete_stored(f"{url}.rows/model.{name}", version.name)
        assert served.refresh() and torch.equal(served(IDS), want)


@pytest.mark.parametrize("damaged", ["checkpoint", "rows", "network"])
def test_a_store_that_fails_leaves_the_version_that_serves(job, url, tmp_path, monkeypatch, damaged):
    want = answers(job.model)
    with serve(url, tmp_path) as served:
        job(IDS)
        job.save(url, keep=2)
        if damaged == "checkpoint":
            object_at(url, object_at(url)[:-50])
        elif damaged == "rows":
            fs, path = fsspec.url_to_fs(f"{url}.rows")
            for one in fs.find(path):
                if "/objects/" in one:
                    fs.rm_file(one)
        else:
            failing = pytest.MonkeyPatch()
            failing.setattr(type(fsspec.filesystem("memory")), "cat_file", _raise_timeout)
        error = {"checkpoint": "is not a checkpoint", "rows": "is missing", "network": "the network is down"}[damaged]
        with pytest.raises((ValueError, StorageError), match=error):
            served.refresh()
        assert torch.equal(served(IDS), want) and error in str(served.error)
        if damaged == "network":
            failing.undo()
            assert served.refresh() and torch.equal(served(IDS), answers(job.model)) and served.error is None


def _raise_timeout(*args, **options):
    raise TimeoutError("the network is down")


def test_what_a_server_of_a_url_needs_is_told(job, url, tmp_path):
    with pytest.raises(ValueError, match="folder must name a folder on this machine for the rows of"):
        oneemb.serve_model(url, job.model, missing_ok=True)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        serve(f"{url}.absent", tmp_path)
    with serve(f"{url}.absent", tmp_path, missing_ok=True) as served:
        with pytest.raises(StorageError, match="no version serves yet"):
            served(IDS)
        job.save(f"{url}.absent")
        assert served.refresh() and torch.equal(served(IDS), answers(job.model))
    state = io.BytesIO()
    torch.save(job.model.state_dict(), state)
    object_at(f"{url}.state", state.getvalue())
    with pytest.raises(ValueError, match="must be a checkpoint of graph.save"):
        serve(f"{url}.state", tmp_path)
