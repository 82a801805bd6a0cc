"""A checkpoint is everything the next step depends on, in one file, whole or not at all."""

import os
import random

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import oneemb
from tests.support.graph_models import make_graph, rows_of, weights_of

IDS = torch.tensor([[1, 2], [3, 4], [1, 4]])


class Normed(torch.nn.Module):
    """Dense layers with a buffer, dropout, and a generator of each kind."""

    def __init__(self, width=8):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(width)
        self.linear = torch.nn.Linear(width, 1)
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x):
        return self.linear(self.dropout(self.norm(x))) * (1 + random.random() + np.random.rand())


def build(self, ids):
    loss = self.dense(self.embedding(ids).flatten(1)).square().mean()
    loss.backward()
    return loss.detach()


def optimizers(owner):
    optimizer = torch.optim.Adam(owner.parameters(), lr=0.01)
    return [(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))]


def graph_at(path, width=8, **kwargs):
    torch.manual_seed(0)
    embedding = oneemb.MultiTableEmbedding(
        "items", width // 2, torch.float32, torch.int64, [oneemb.make_table()] * 2,
        oneemb.make_cached_ssd_store_options(1, str(path)),
    )  # fmt: skip
    graph = make_graph({"embedding": embedding, "dense": Normed(width)}, build, kwargs.pop("optimizers", optimizers))
    graph.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3))
    return graph


def state_of(graph):
    return (
        rows_of(graph.embedding),
        [w.tolist() for w in weights_of(graph.dense)],
        graph.dense.norm.running_mean.tolist(),
    )


@pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", ["file", "dcp"])
def test_a_loaded_graph_goes_on_bit_for_bit(tmp_path, way):
    graph = graph_at(tmp_path / "rows")
    random.seed(1)
    np.random.seed(2)
    for step in range(3):
        graph(IDS + step)
    if way == "file":
        graph.save(tmp_path / "checkpoint")
    else:
        dcp.save({"graph": graph.state()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    expected = [graph(IDS + step) for step in range(4)], state_of(graph), graph.steps, graph._scaler.get_scale()
    graph.embedding.close()

    again = graph_at(tmp_path / "rows")
    torch.manual_seed(99)
    if way == "file":
        again.load(tmp_path / "checkpoint")
    else:
        dcp.load({"graph": again.state()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert again.steps == 3
    got = [again(IDS + step) for step in range(4)], state_of(again), again.steps, again._scaler.get_scale()
    assert got == expected


def test_snapshots_of_the_checkpoint_that_is_replaced_are_deleted(tmp_path):
    graph = graph_at(tmp_path / "rows")
    for step in range(4):
        graph(IDS + step)
        graph.save(tmp_path / "last")
        if step == 1:
            graph.save(tmp_path / "kept")
    assert len(graph.embedding.snapshots()) == 2
    graph.load(tmp_path / "kept")
    assert graph.steps == 2
    assert sorted(os.listdir(tmp_path)) == ["kept", "last", "rows"]


def test_a_snapshot_that_a_state_dict_names_is_not_touched(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(tmp_path / "c")
    state = graph.state_dict()
    graph(IDS)
    graph.save(tmp_path / "c")
    rows = rows_of(graph.embedding)
    graph.load_state_dict(state)
    assert rows_of(graph.embedding) != rows


@pytest.mark.parametrize("what", ["the snapshot", "the file"])
def test_a_failed_save_leaves_the_checkpoint_before(tmp_path, monkeypatch, what):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(tmp_path / "c")
    snapshots, rows = graph.embedding.snapshots(), rows_of(graph.embedding)
    graph(IDS)

    replace = os.replace

    def fail(source, target):
        if what == "the snapshot" or str(target).endswith("/c"):
            raise OSError("no space")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises((OSError, oneemb.StorageError), match="no space"):
            graph.save(tmp_path / "c")
    assert graph.embedding.snapshots() == snapshots and sorted(os.listdir(tmp_path)) == ["c", "rows"]
    graph.load(tmp_path / "c")
    assert rows_of(graph.embedding) == rows and graph.steps == 1


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(tmp_path / "c")
    other = graph_at(tmp_path / "other", width=4)
    other(IDS)
    before = state_of(other)
    with pytest.raises(ValueError, match=r"dense.linear.weight is \(\(1, 8\)"):
        other.load(tmp_path / "c")
    same = graph_at(tmp_path / "third", optimizers=lambda owner: [torch.optim.SGD(owner.parameters(), lr=0.1)])
    with pytest.raises(ValueError, match="Adam"):
        same.load(tmp_path / "c")
    empty = graph_at(tmp_path / "fourth")
    with pytest.raises(oneemb.StorageError, match="checkpoint-"):
        empty.load(tmp_path / "c")
    (tmp_path / "bad").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a checkpoint"):
        other.load(tmp_path / "bad")
    assert state_of(other) == before


def test_saving_in_the_middle_of_an_accumulation_is_refused(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph.config.accumulation_steps = 2
    graph(IDS)
    with pytest.raises(RuntimeError, match="1 of 2 micro-batches"):
        graph.save(tmp_path / "c")
    assert graph.embedding.snapshots() == [] and not os.path.exists(tmp_path / "c")


def test_a_graph_that_never_ran_is_saved_and_loaded(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph.save(tmp_path / "c")
    graph(IDS)
    graph.load(tmp_path / "c")
    assert graph.embedding.stats()["rows"] == 0 and graph.steps == 0
