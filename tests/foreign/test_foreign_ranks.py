"""Tables of other libraries on several ranks: each rank keeps its rows, and an error on one rank is one on all."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import oneemb
from oneemb.graph.ranks import RankError
from oneemb.kernels.owner import owner_of
from tests.support.foreign import assert_same, rows_in
from tests.support.thread_ranks import run_ranks

HERE = Path(__file__).parent / "tfra"
pytestmark = pytest.mark.filterwarnings("ignore:embedding .* starts empty")


def make(ranks, path, **options):
    embedding = oneemb.MultiTableEmbedding(
        "items", 4, torch.float32, torch.int64, [oneemb.make_table()] * 2,
        oneemb.make_device_mem_store_options(str(path)), num_threads=1, process_group=ranks, **options,
    )  # fmt: skip
    embedding.store.form.attach("adagrad", np.zeros(4, np.float32))
    return embedding


def bring(embedding, source=HERE / "adagrad/model-1", **options):
    return oneemb.import_foreign(embedding, source, "tfra", name="items", table=1, with_state=True, **options)


def test_each_rank_keeps_its_rows_and_all_go_out_again(tmp_path, monkeypatch):
    oneemb.import_foreign(tmp_path / "one", HERE / "adagrad", "tfra", name="items", snapshot="s", table=1,
                          with_state=True)  # fmt: skip
    wanted = rows_in(tmp_path / "one", "s", 1)
    os.mkdir(tmp_path / "out")

    def job(ranks):
        policy = oneemb.policies.RowPolicy(evict=oneemb.policies.LFU(), capacity=100)
        embedding = make(ranks, tmp_path / "ranks", policy=policy)
        report = bring(embedding, with_scores=True, batch_size=2)
        rows = embedding.stats()["rows"]
        ids = torch.tensor([*wanted]) if ranks.rank == 0 else torch.tensor([7])
        scores = dict(zip(ids.tolist(), embedding.scores(ids, table=1).tolist(), strict=True))
        out = oneemb.export_foreign(embedding, tmp_path / "out", "hugectr", table=1, with_state=True)
        embedding.close()
        return report.rows, report.step, report.scores, rows, out.rows, scores

    found = run_ranks(2, job, patch=monkeypatch)
    assert [one[:3] for one in found] == [(6, 3, 5), (6, 3, 5)]
    owners = owner_of(np.ones(6, np.int32), np.array([*wanted]), 2)
    assert [one[3] for one in found] == [int((owners == rank).sum()) for rank in range(2)]
    assert {one[4] for one in found} == {6}
    with np.load(HERE / "adagrad/expected.npz") as arrays:
        counts = dict(zip(arrays["items/frequency:keys"].tolist(), arrays["items/frequency:values"][:, 0], strict=True))
    assert {key: found[0][5][key] for key in counts} == counts
    keys = np.fromfile(tmp_path / "out/key", "<i8")
    columns = [np.fromfile(tmp_path / "out" / name, "<f4").reshape(6, 4) for name in ("emb_vector", "AdaGrad.accm")]
    assert_same(dict(zip(keys.tolist(), np.concatenate(columns, 1), strict=True)), wanted)


def test_a_source_that_one_rank_cannot_read_is_an_error_on_all(tmp_path, monkeypatch):
    def job(ranks):
        embedding = make(ranks, tmp_path / "ranks")
        with pytest.raises((oneemb.StorageError, RankError), match="no file .*none.index"):
            bring(embedding, HERE / ("adagrad/model-1" if ranks.rank == 0 else "adagrad/none"))
        embedding.clear()
        rows = bring(embedding).rows
        embedding.close()
        return rows

    assert run_ranks(2, job, patch=monkeypatch) == [6, 6]
