"""Embeddings without a path: a temporary folder that goes with them, whatever ends first."""

import gc
import multiprocessing.util
import os
import subprocess
import sys
import tempfile

import pytest
import torch

import oneemb
from oneemb.options import from_json, to_json
from tests.support.forks import ended_well, in_child

STORES = {
    "device": oneemb.make_device_mem_store_options,
    "host": lambda: oneemb.make_cached_host_mem_store_options(1),
    "ssd": lambda: oneemb.make_cached_ssd_store_options(1),
}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make(kind="ssd", **options):
    return oneemb.MultiTableEmbedding(
        "trial", 4, torch.float32, torch.int64, [oneemb.make_table()] * 2, STORES[kind](), **options
    )


def folders_in(path):
    return list(path.glob("oneemb-*"))  # torch has one of its own.


def train(embedding, ids):
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    embedding(ids).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", STORES)
def test_rows_are_trained_and_the_folder_goes_with_close(temporary, kind):
    ids = torch.arange(20).reshape(10, 2)
    with make(kind) as embedding:
        train(embedding, ids)
        (folder,) = embedding.store_options.persistent_path
        assert os.path.dirname(folder) == str(temporary) and embedding.num_rows == 20
    assert folders_in(temporary) == []
    embedding.close()  # Closing twice is fine.


def test_two_embeddings_have_folders_of_their_own():
    with make() as one, make() as other:
        assert one.store_options.persistent_path != other.store_options.persistent_path


def test_the_folder_goes_with_the_object(temporary):
    embedding = make()
    train(embedding, torch.arange(4).reshape(2, 2))
    del embedding
    gc.collect()
    assert folders_in(temporary) == []


def test_the_folder_goes_with_the_process(temporary):
    code = (
        "import torch, oneemb\n"
        "kept = oneemb.MultiTableEmbedding('a', 4, torch.float32, torch.int64, [oneemb.make_table()],"
        " oneemb.make_cached_ssd_store_options(1))\n"
        "kept(torch.arange(5))\n"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
    assert folders_in(temporary) == []


def test_a_child_of_fork_leaves_the_folder(temporary):
    held = [make()]
    train(held[0], torch.arange(4).reshape(2, 2))

    def ends():
        held.clear()
        gc.collect()
        multiprocessing.util._exit_function()
        return True

    assert ended_well(in_child(ends))
    assert len(folders_in(temporary)) == 1 and held[0].contains(torch.arange(0, 4, 2)).all()
    held[0].close()
    assert folders_in(temporary) == []


def test_a_snapshot_there_is_warned_of_and_loads_while_it_lasts():
    with make() as embedding:
        train(embedding, torch.arange(4).reshape(2, 2))
        rows = embedding.read(torch.arange(4).reshape(2, 2))
        with pytest.warns(UserWarning, match="temporary folder, which is removed with the embedding"):
            embedding.save_snapshot("now")
        train(embedding, torch.arange(4).reshape(2, 2))
        embedding.load_snapshot("now")
        assert torch.equal(embedding.read(torch.arange(4).reshape(2, 2)), rows)


def test_a_copy_has_the_path_that_is_given(tmp_path):
    with make("device") as embedding:
        train(embedding, torch.arange(4).reshape(2, 2))
        copy = embedding.copy_to(tmp_path / "copy")
    assert copy.num_rows == 4
    copy.save_snapshot("kept")  # without a warning
    copy.close()


def test_options_without_a_path_come_back_from_json():
    for make_options in STORES.values():
        assert from_json(to_json(make_options())) == make_options()
    with pytest.raises(TypeError, match="must name a folder"):
        oneemb.make_device_mem_store_options([])
    with pytest.raises(TypeError, match="must name a folder"):
        oneemb.make_device_mem_store_options("")
