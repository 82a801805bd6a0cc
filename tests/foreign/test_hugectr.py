"""Sparse models of HugeCTR, made here as its sources describe them: no file was made by HugeCTR itself."""

import os
import re

import numpy as np
import pytest
import torch

import oneemb
from tests.support.foreign import assert_same, make_embedding, rows_in, rows_of

IDS = np.array([0, 7, 2**40, 11, 2**62], np.int64)
DIM = 3
STATES = {
    torch.optim.SGD: (),
    torch.optim.Adam: ("Adam.m", "Adam.v"),
    torch.optim.Adagrad: ("AdaGrad.accm",),
    lambda parameters: oneemb.optim.Ftrl(parameters, lr=0.1): ("Ftrl.n", "Ftrl.z"),
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "films0_sparse_100.model"
    os.mkdir(path)
    draws = np.random.default_rng(1)
    IDS.tofile(path / "key")
    for name in ("emb_vector", "Adam.m", "Adam.v", "AdaGrad.accm", "Ftrl.n", "Ftrl.z"):
        draws.random((len(IDS), DIM), np.float32).tofile(path / name)
    return path


def written(folder, names, keys=IDS):
    arrays = [np.fromfile(folder / name, "<f4").reshape(len(keys), -1) for name in ("emb_vector", *names)]
    return dict(zip(keys.tolist(), np.concatenate(arrays, 1), strict=True))


@pytest.mark.parametrize(("optimizer", "names"), STATES.items(), ids=["SGD", "Adam", "Adagrad", "Ftrl"])
def test_rows_and_state_go_in_and_out_bit_for_bit(tmp_path, folder, optimizer, names):
    embedding = make_embedding(tmp_path / "e", DIM, optimizer)
    report = oneemb.import_foreign(embedding, folder, "hugectr", with_state=bool(names), step=4, batch_size=2)
    assert_same(rows_of(embedding), written(folder, names))
    assert report.step == embedding.stats()["step"] == (4 if names else 0)
    os.mkdir(tmp_path / "out")
    oneemb.export_foreign(embedding, tmp_path / "out", "hugectr", with_state=bool(names))
    assert sorted(os.listdir(tmp_path / "out")) == sorted(["key", "emb_vector", *names])
    assert_same(written(tmp_path / "out", names, np.fromfile(tmp_path / "out/key", "<i8")), written(folder, names))
    embedding.close()


def test_what_stays_behind_is_said(tmp_path, folder):
    np.arange(5, dtype=np.uint64).tofile(folder / "slot_id")
    np.zeros(15, np.float32).tofile(folder / "MomentumSGD.momtentum")
    for name in ("Adam.m", "Adam.v", "AdaGrad.accm", "Ftrl.n", "Ftrl.z"):
        os.remove(folder / name)
    report = str(oneemb.import_foreign(tmp_path / "t", folder, "hugectr", snapshot="s"))
    for words in ("slot_id", "MomentumSGD.momtentum, which has the learning rate", "_opt_sparse_"):
        assert f"not carried over: {words}" in report or words in report
    with pytest.raises(ValueError, match="must have the optimizer's state.*has none; name the optimizer"):
        oneemb.import_foreign(tmp_path / "t", folder, "hugectr", snapshot="t", with_state=True)


def test_the_named_optimizer_decides_where_there_is_state_of_several(tmp_path, folder):
    report = oneemb.import_foreign(
        tmp_path / "t", folder, "hugectr", snapshot="s", with_state=True, optimizer="adagrad"
    )
    assert report.optimizer == "adagrad"
    assert "Adam.m, Adam.v, Ftrl.n, Ftrl.z, which rows of 'adagrad' do not have" in report.not_carried
    assert_same(rows_in(tmp_path / "t", "s"), written(folder, ("AdaGrad.accm",)))
    embedding = make_embedding(tmp_path / "t", DIM, torch.optim.Adagrad)
    embedding.load_snapshot("s")
    assert_same(rows_of(embedding), written(folder, ("AdaGrad.accm",)))
    embedding.close()
    with pytest.raises(ValueError, match="optimizer must be one whose state hugectr keeps"):
        oneemb.import_foreign(tmp_path / "t", folder, "hugectr", snapshot="t", with_state=True, optimizer="lamb")


def test_unsigned_keys_of_32_bits(tmp_path, folder):
    keys = np.array([1, 2**32 - 1, 5, 6, 7], np.uint32)
    keys.tofile(folder / "key")
    oneemb.import_foreign(tmp_path / "t", folder, "hugectr", snapshot="s", key_type="uint32")
    assert_same(rows_in(tmp_path / "t", "s"), written(folder, (), keys))
    with pytest.raises(oneemb.StorageError, match="give the right embedding_dim=... and key_type="):
        oneemb.import_foreign(tmp_path / "t", folder, "hugectr", snapshot="t", embedding_dim=DIM)


@pytest.mark.parametrize("name", ["key", "emb_vector", "Adam.v"])
def test_a_file_that_is_cut_short_is_an_error_that_names_it_and_its_end(tmp_path, folder, name):
    data = (folder / name).read_bytes()
    for size in (0, 1, 8, len(data) - 4, len(data) - 1):
        (folder / name).write_bytes(data[:size])
        with pytest.raises(oneemb.StorageError, match=rf"{re.escape(str(folder / name))}.*offsets? "):
            oneemb.import_foreign(
                tmp_path / "t", folder, "hugectr", snapshot="s", with_state=True, optimizer="adam", embedding_dim=DIM
            )
    os.remove(folder / name)
    with pytest.raises((oneemb.StorageError, ValueError), match=f"has no file {name}|must have the optimizer's state"):
        oneemb.import_foreign(tmp_path / "t", folder, "hugectr", snapshot="s", with_state=True, optimizer="adam")


def test_a_key_that_comes_twice_is_an_error(tmp_path, folder):
    np.array([*IDS[:4], 7]).tofile(folder / "key")
    with pytest.raises(oneemb.StorageError, match="each id must come once, but id 7 of row 4"):
        oneemb.import_foreign(tmp_path / "t", folder, "hugectr", snapshot="s")
    assert not os.path.exists(tmp_path / "t")


def test_a_table_of_no_rows_needs_its_number_of_weights(tmp_path, folder):
    for path in folder.iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="embedding_dim must be given, since .* has no rows"):
        oneemb.import_foreign(tmp_path / "t", folder, "hugectr", snapshot="s")
    assert oneemb.import_foreign(tmp_path / "t", folder, "hugectr", snapshot="s", embedding_dim=DIM).rows == 0


def test_memory_does_not_grow_with_the_weights(tmp_path):
    """A table of 64 MB comes in and goes out within 16 MB of Python's memory."""
    import tracemalloc

    folder, rows, dim = tmp_path / "m", 1 << 16, 256
    os.mkdir(folder)
    np.arange(rows).tofile(folder / "key")
    np.random.default_rng(0).random((rows, dim), np.float32).tofile(folder / "emb_vector")
    os.mkdir(tmp_path / "out")
    peaks = []
    for call in (
        lambda: oneemb.import_foreign(tmp_path / "t", folder, "hugectr", snapshot="s", batch_size=1024),
        lambda: oneemb.export_foreign(tmp_path / "t", tmp_path / "out", "hugectr", snapshot="s", batch_size=1024),
        lambda: oneemb.export_foreign(tmp_path / "t", tmp_path / "out/w.safetensors", "torch", snapshot="s",
                                      batch_size=1024, num_embeddings=2 * rows),
    ):  # fmt: skip
        tracemalloc.start()
        call()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    print(peaks)
    assert max(peaks) < 16 << 20
