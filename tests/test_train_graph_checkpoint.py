"""A checkpoint is everything the next step depends on, in one file, whole or not at all."""

import errno
import glob
import json
import os
import random
import shutil
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import oneemb
from oneemb.checkpoints import checkpoint
from oneemb.graph.one_rank import ALONE
from oneemb.storage.errors import BrokenStoreError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.new_files import is_held
from tests.support.forks import run_code
from tests.support.graph_models import make_graph, rows_of, weights_of
from tests.support.inside import train_state_of
from tests.support.interrupts import count_lines, interrupted, some_lines

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
    expected = (
        [graph(IDS + step) for step in range(4)],
        state_of(graph),
        graph.steps,
        train_state_of(graph).scaler.get_scale(),
    )
    graph.embedding.close()

    again = graph_at(tmp_path / "rows")
    torch.manual_seed(99)
    if way == "file":
        again.load(tmp_path / "checkpoint")
    else:
        dcp.load({"graph": again.state()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert again.steps == 3
    got = (
        [again(IDS + step) for step in range(4)],
        state_of(again),
        again.steps,
        train_state_of(again).scaler.get_scale(),
    )
    assert got == expected


def test_the_scaler_of_build_is_saved_and_loaded(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    graph.save(tmp_path / "checkpoint")
    graph.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    graph.load(tmp_path / "checkpoint")
    assert graph.scaler.get_scale() == 2.0**7
    del graph.scaler
    with pytest.raises(ValueError, match=r"GradScalers of build are \['scaler'\] there, \[\] in the graph"):
        graph.load(tmp_path / "checkpoint")


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(tmp_path / "checkpoint")
    whole = (tmp_path / "checkpoint").read_bytes()
    graph(IDS + 1)
    before, refused = state_of(graph), 0
    for place in range(0, len(whole), max(1, len(whole) // 150)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        (tmp_path / "flipped").write_bytes(flipped)
        try:
            graph.load(tmp_path / "flipped")
        except ValueError as error:
            assert str(tmp_path / "flipped") in str(error)
            assert state_of(graph) == before
            refused += 1
        else:  # What lies between the records, to align them, has no checksum.
            loaded = state_of(graph)
            graph.load(tmp_path / "checkpoint")
            assert state_of(graph) == loaded
            before = loaded
    assert refused > 50
    flipped = bytearray(whole)
    flipped[whole.rindex(b"PK\x06\x06") + 50] ^= 0x80  # The directory would lie before the file's begin.
    (tmp_path / "flipped").write_bytes(flipped)
    with pytest.raises(ValueError, match="flipped is not a checkpoint of a TrainGraph, or is damaged"):
        graph.load(tmp_path / "flipped")
    for size in (0, 10, len(whole) // 2, len(whole) - 3):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut is not a checkpoint of a TrainGraph, or is damaged"):
            graph.load(tmp_path / "cut")


def test_a_copy_of_a_checkpoint_is_loaded_after_later_saves_to_its_path(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(tmp_path / "latest")
    shutil.copy(tmp_path / "latest", tmp_path / "best")
    expected = state_of(graph)
    for step in range(3):
        graph(IDS + step)
        graph.save(tmp_path / "latest")
    assert len(graph.embedding.snapshots()) == 4
    graph.load(tmp_path / "best")
    assert state_of(graph) == expected and graph.steps == 1
    assert sorted(os.listdir(tmp_path)) == ["best", "latest", "rows"]


def test_as_many_snapshots_of_a_path_are_kept_as_asked_for(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(tmp_path / "another")
    for step in range(4):
        graph(IDS + step)
        graph.save(tmp_path / "latest", keep=2)
        if step == 2:
            shutil.copy(tmp_path / "latest", tmp_path / "before")
    assert len(graph.embedding.snapshots()) == 3
    # The copy was not saved here: what it names is the other path's.
    graph.save(tmp_path / "before", keep=1)
    assert len(graph.embedding.snapshots()) == 4
    graph(IDS)
    graph.save(tmp_path / "latest", keep=1)
    assert len(graph.embedding.snapshots()) == 3
    for name, steps in (("another", 1), ("latest", 6), ("before", 5)):
        graph.load(tmp_path / name)
        assert graph.steps == steps


@pytest.mark.parametrize("keep", [0, -1, True, 1.0])
def test_how_many_to_keep_is_a_number_from_one_up(tmp_path, keep):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    with pytest.raises(ValueError, match="keep must be"):
        graph.save(tmp_path / "c", keep=keep)
    assert graph.embedding.snapshots() == []


def test_many_snapshots_of_one_path_are_told_of(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            graph.save(tmp_path / "c")
        for _ in range(12):
            graph.save(tmp_path / "kept", keep=10)
    assert [str(one.message)[:11] for one in caught] == ["8 snapshots"]


@pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")
@pytest.mark.parametrize("keep", [None, 1])
def test_a_run_in_a_fresh_folder_with_the_old_file_keeps_what_it_saves(tmp_path, keep):
    first = graph_at(tmp_path / "one")
    first(IDS)
    first.save(tmp_path / "c", keep=keep)
    shutil.copy(tmp_path / "c", tmp_path / "c-of-the-first")
    expected = state_of(first)
    second = graph_at(tmp_path / "two")
    second(IDS + 5)
    second.save(tmp_path / "c", keep=keep)
    assert len(second.embedding.snapshots()) == 1 == len(first.embedding.snapshots())
    second(IDS)
    second.load(tmp_path / "c")
    assert second.steps == 1
    first.load(tmp_path / "c-of-the-first")
    assert state_of(first) == expected


@pytest.mark.parametrize("way", ["file", "state dict"])
def test_another_runs_snapshot_of_the_same_name_is_refused(tmp_path, way):
    mine, others = graph_at(tmp_path / "mine"), graph_at(tmp_path / "others")
    mine(IDS)
    others(IDS + 7)
    if way == "file":
        mine.save(tmp_path / "c")
        (name,) = mine.embedding.snapshots()
    else:
        state = mine.embedding.state_dict()
        name = oneemb.snapshot_name(state["_extra_state"])
    others.embedding.save_snapshot(name)
    others(IDS)
    before = state_of(others)
    with pytest.raises(oneemb.StorageError, match=f"{name}.*another run's: .*saved .* by process {os.getpid()}"):
        others.load(tmp_path / "c") if way == "file" else others.embedding.load_state_dict(state)
    assert state_of(others) == before


def test_a_save_that_is_stopped_leaves_no_snapshot_that_no_file_names(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(tmp_path / "c", keep=1)

    def save():
        graph.save(tmp_path / "c", keep=1)

    for at in some_lines(count_lines(save, "signal"), 40):
        _, place = interrupted(save, at, "signal")
        named = torch.load(tmp_path / "c")
        named = {one["embedding"]["oneemb_snapshot"] for one in (named["embeddings"], *named["earlier"])}
        assert set(graph.embedding.snapshots()) <= named, place
        assert sorted(os.listdir(tmp_path)) == ["c", "rows"], place
    graph.save(tmp_path / "c", keep=1)  # takes with it what those that were stopped at the end have left
    assert len(graph.embedding.snapshots()) == 1 and sorted(os.listdir(tmp_path)) == ["c", "rows"]
    graph.load(tmp_path / "c")


def test_something_else_at_the_path_is_not_written_over(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    (tmp_path / "text").write_text("notes")
    torch.save({"weights": 1}, tmp_path / "other")
    (tmp_path / "folder").mkdir()
    for name, error in (("text", ValueError), ("other", ValueError), ("folder", OSError)):
        with pytest.raises(error, match=name):
            graph.save(tmp_path / name)
        with pytest.raises(error, match=name):
            graph.load(tmp_path / name)
    assert (tmp_path / "text").read_text() == "notes" and graph.embedding.snapshots() == []


def test_a_save_to_a_folder_that_is_not_there_says_so_and_saves_nothing(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    with pytest.raises(
        oneemb.StorageError, match="could not write the checkpoint .*/gone/c: ENOENT.* make it"
    ) as error:
        graph.save(tmp_path / "gone" / "c")
    assert "table anew" not in str(error.value) and graph.embedding.snapshots() == []


def test_a_snapshot_that_a_state_dict_names_is_not_touched(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(tmp_path / "c", keep=1)
    state = graph.state_dict()
    graph(IDS)
    graph.save(tmp_path / "c", keep=1)
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
    with pytest.raises(RuntimeError, match="no micro-batch may wait for its update in a save, but 1 of 2 do"):
        graph.save(tmp_path / "c")
    assert graph.embedding.snapshots() == [] and not os.path.exists(tmp_path / "c")


def test_a_graph_that_never_ran_is_saved_and_loaded(tmp_path):
    graph = graph_at(tmp_path / "rows")
    graph.save(tmp_path / "c")
    graph(IDS)
    graph.load(tmp_path / "c")
    assert graph.embedding.stats()["rows"] == 0 and graph.steps == 0


class Two(oneemb.TrainGraph):
    """Two embeddings, whose optimizers' options are given, and a dense layer."""

    def __init__(self, path, momentum=0.9, groups=1):
        super().__init__()
        torch.manual_seed(0)
        for name in ("a", "b"):
            options = oneemb.make_device_mem_store_options(str(path / name))
            module = oneemb.MultiTableEmbedding(
                name, 4, torch.float32, torch.int64, [oneemb.make_table()], options, num_threads=1
            )
            setattr(self, name, module)
        self.dense = torch.nn.Linear(8, 1)
        self.add_optimizer(torch.optim.SGD([self.a.weight], lr=0.1, momentum=0.9))
        rest = [self.b.weight, *self.dense.parameters()]
        parts = [rest] if groups == 1 else [rest[:1], rest[1:]]
        self.add_optimizer(torch.optim.SGD([{"params": one} for one in parts], lr=0.1, momentum=momentum))

    def build(self, ids):
        loss = self.dense(torch.cat([self.a(ids), self.b(ids)], 1)).square().sum()
        loss.backward()
        return loss

    def state(self):
        assert self.a.stats()["step"] == self.b.stats()["step"] == self.steps
        return [rows_of(self.a), rows_of(self.b), [w.tolist() for w in weights_of(self.dense)], self.steps]

    def close(self):
        self.a.close()
        self.b.close()


TWO_IDS = torch.tensor([1, 2, 3, 2])


@pytest.mark.filterwarnings("ignore:embedding")
@pytest.mark.parametrize("other", [{"momentum": 0.0}, {"groups": 2}])
def test_a_checkpoint_of_other_options_is_refused_before_anything_has_changed(tmp_path, other):
    graph = Two(tmp_path)
    for _ in range(3):
        graph(TWO_IDS)
    graph.save(tmp_path / "c")
    graph.close()
    graph = Two(tmp_path, **other)
    graph(TWO_IDS + 5)
    before = graph.state()
    with pytest.raises((ValueError, oneemb.StorageError), match="optimizer attached|param group"):
        graph.load(tmp_path / "c")
    assert graph.state() == before
    graph(TWO_IDS)
    graph.close()


@pytest.mark.filterwarnings("ignore:embedding")
def test_a_load_that_is_stopped_is_done_or_not_or_says_so(tmp_path):
    graph = Two(tmp_path)
    graph(TWO_IDS)
    graph.save(tmp_path / "old")
    old = graph.state()
    graph(TWO_IDS)
    graph.save(tmp_path / "new")
    new = graph.state()

    def load():
        graph.load(tmp_path / "new")

    for at in some_lines(count_lines(load, "signal"), 25):
        graph.load(tmp_path / "old")
        _, place = interrupted(load, at, "signal")
        try:
            assert graph.state() in (old, new), place
        except BrokenStoreError:
            with pytest.raises(BrokenStoreError, match=r"load_snapshot\(name\) goes on from one"):
                graph(TWO_IDS)
    graph.load(tmp_path / "new")
    assert graph.state() == new
    # The rows of the first are another checkpoint's when the second's turn out to be damaged.
    graph.load(tmp_path / "old")
    for keys in (tmp_path / "b" / "chunks").glob("*.keys"):
        keys.write_bytes(keys.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(oneemb.StorageError):
        load()
    with pytest.raises(BrokenStoreError):
        graph(TWO_IDS)
    graph.close()


def test_what_a_killed_save_has_left_goes_with_the_next_one(tmp_path):
    code = f"""
import os, sys
sys.path.insert(0, {os.getcwd()!r})
from tests.test_train_graph_checkpoint import IDS, graph_at
graph = graph_at({str(tmp_path / "rows")!r})
graph(IDS)
graph.save({str(tmp_path / "c")!r}, keep=1)
graph(IDS)
os.replace = lambda *paths: replace(*paths) if "checkpoint-" in paths[1] else os._exit(3)
graph.save({str(tmp_path / "c")!r}, keep=1)
"""
    code = code.replace("os.replace = lambda", "replace = os.replace\nos.replace = lambda")
    assert run_code(code).returncode == 3
    assert len(os.listdir(tmp_path)) == 4, "the file, the folder, the file's successor and what it was to name"
    graph = graph_at(tmp_path / "rows")
    assert len(graph.embedding.snapshots()) == 2
    graph.load(tmp_path / "c")
    assert graph.steps == 1
    graph.save(tmp_path / "c", keep=1)
    assert sorted(os.listdir(tmp_path)) == ["c", "rows"] and len(graph.embedding.snapshots()) == 1
    # What lies there and was not written by a save is no reason to delete anything.
    for text in ('["checkpoint"]', '{"snapshots": 7}', '{"host": null, "snapshots": {"embedding": "c"}}', "{", "\0"):
        (tmp_path / "c.01234567.saving").write_text(text)
        graph.save(tmp_path / "c", keep=1)
        assert len(graph.embedding.snapshots()) == 1, text
    graph.embedding.close()


def test_what_a_killed_save_of_a_path_that_begins_alike_has_left_is_kept_for_the_next_one_there(tmp_path):
    graph, other = graph_at(tmp_path / "rows"), graph_at(tmp_path / "rows of another")
    for one in (graph, other):
        one(IDS)
    other.embedding.store.snapshots.save("checkpoint-000000000001-deadbeef", {})
    named = {"embedding": {"oneemb_snapshot": "checkpoint-000000000001-deadbeef", "oneemb_identity": None}}
    left = tmp_path / "c.best.0123abcd.saving"
    left.write_text(json.dumps({"snapshots": named}) + "\n")
    graph.save(tmp_path / "c", keep=1)
    assert left.exists()
    other.save(tmp_path / "c.best", keep=1)
    assert not left.exists() and len(other.embedding.snapshots()) == 1
    graph.embedding.close(), other.embedding.close()


def test_the_file_before_is_not_read_but_for_what_it_names(tmp_path, monkeypatch):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(tmp_path / "c")
    load, mapped = torch.load, []
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: mapped.append(kwargs["mmap"]) or load(*args, **kwargs))
    graph.save(tmp_path / "c")
    assert mapped == [True]
    graph.embedding.close()


def test_a_snapshot_that_could_not_be_looked_at_for_a_moment_is_not_forgotten(tmp_path, monkeypatch):
    graph = graph_at(tmp_path / "rows")
    for _ in range(3):
        graph(IDS)
        graph.save(tmp_path / "c", keep=2)
    before = graph.embedding.snapshots()
    open_file = LocalFileSystem.open

    def fail(fs, path, **kwargs):
        if path.endswith(".snapshot"):
            raise OSError(errno.EMFILE, "Too many open files", path)
        return open_file(fs, path, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "open", fail)
        with pytest.raises(oneemb.StorageError, match="EMFILE"):
            graph.save(tmp_path / "c", keep=2)
    assert graph.embedding.snapshots() == before
    graph(IDS)
    graph.save(tmp_path / "c", keep=2)
    assert len(graph.embedding.snapshots()) == 2
    graph.embedding.close()


def test_a_failed_save_whose_traces_stay_says_why_it_failed_and_the_next_one_takes_them_away(tmp_path, monkeypatch):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(tmp_path / "c", keep=1)

    def full(intent, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    def broken(name):
        raise oneemb.StorageError("the device fails for a moment")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.Intent, "put_in_place", full)
        patched.setattr(graph.embedding.store.snapshots, "delete", broken)
        for _ in range(2):  # in one process, whose number does not change
            with pytest.raises(oneemb.StorageError, match="ENOSPC|for a moment"):
                graph.save(tmp_path / "c", keep=1)
    assert len(graph.embedding.snapshots()) >= 2
    graph.save(tmp_path / "c", keep=1)
    assert sorted(os.listdir(tmp_path)) == ["c", "rows"] and len(graph.embedding.snapshots()) == 1
    graph.embedding.close()


def test_a_checkpoint_that_was_moved_before_its_save_was_seen_to_have_ended_keeps_its_snapshot(tmp_path):
    """Killed between the file's rename and the removal of what the save had noted."""
    code = f"""
import os, sys
sys.path.insert(0, {os.getcwd()!r})
from tests.test_train_graph_checkpoint import IDS, graph_at
graph = graph_at({str(tmp_path / "rows")!r})
graph(IDS)
os.remove = lambda path: os._exit(9)
graph.save({str(tmp_path / "c")!r})
"""
    assert run_code(code).returncode == 9
    os.rename(tmp_path / "c", tmp_path / "best")
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(tmp_path / "c", keep=1)
    assert sorted(os.listdir(tmp_path)) == ["best", "c", "rows"]
    graph.load(tmp_path / "best")
    assert graph.steps == 1
    graph.embedding.close()


def test_what_another_save_is_about_to_make_is_left_to_it(tmp_path, monkeypatch):
    """Of another process, or thread: it goes on."""
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    found = []

    def put_in_place(intent, data):
        found.append(graph.embedding.snapshots())
        other = checkpoint.Intent(str(tmp_path / "c"), {}, {}, ALONE, "save").__enter__()
        left = glob.glob(f"{tmp_path}/c.*.saving")
        assert len(left) == 2 and all(is_held(LocalFileSystem(), one) for one in left)
        other.__exit__(None, None, None)
        assert not is_held(LocalFileSystem(), other.path)
        os.unlink(other.path)
        honest(intent, data)

    honest = checkpoint.Intent.put_in_place
    monkeypatch.setattr(checkpoint.Intent, "put_in_place", put_in_place)
    graph.save(tmp_path / "c")
    assert len(found) == 1 and graph.embedding.snapshots() == found[0]
    graph.embedding.close()


def test_a_child_does_not_hold_what_a_save_of_its_parent_is_about_to_make(tmp_path):
    go_on, told = os.pipe()
    with checkpoint.Intent(str(tmp_path / "c"), {}, {}, ALONE, "save") as intent:
        child = os.fork()
        if child == 0:
            os.close(told)
            os.read(go_on, 1)
            os._exit(0)
        assert is_held(LocalFileSystem(), intent.path)
        intent.fs.unlock(intent.lock)  # as the system does when the parent is killed
        end = time.monotonic() + 600
        while is_held(LocalFileSystem(), intent.path):
            assert time.monotonic() < end, "the child, which lives, has not let go of it"
            time.sleep(0.01)
    os.close(told)
    os.waitpid(child, 0)


class Wider(Normed):
    """The same with a layer more, in front of the others."""

    def __init__(self, width=8):
        super().__init__(width)
        self.added = torch.nn.Linear(width, width)

    def forward(self, x):
        return super().forward(x + self.added(x))


def graph_of(path, dense, more=()):
    torch.manual_seed(1)
    modules = {
        name: oneemb.MultiTableEmbedding(
            name, 4, torch.float32, torch.int64, [oneemb.make_table()] * 2,
            oneemb.make_device_mem_store_options(f"{path}/{name}"),
        )
        for name in ("embedding", *more)
    }  # fmt: skip
    return make_graph({**modules, "dense": dense}, build_of_any, optimizers)


def build_of_any(self, ids):
    rows = [module(ids).flatten(1) for module in self.children() if isinstance(module, oneemb.MultiTableEmbedding)]
    loss = self.dense(sum(rows)).square().mean()
    loss.backward()
    return loss.detach()


def adam_of(graph):
    (optimizer,) = graph.optimizers
    state = optimizer.optimizer.state
    return {name: state[p]["exp_avg"].tolist() for name, p in graph.named_parameters() if state.get(p)}


def grown(path, more=()):
    return graph_of(path, Wider(), more)


@pytest.mark.filterwarnings("ignore:embedding '.*' starts empty")
def test_an_added_layer_and_embedding_are_passed_over_where_a_load_is_not_strict(tmp_path):
    graph = graph_of(tmp_path, Normed())
    for ids in (IDS, IDS + 1):
        graph(ids)
    graph.save(tmp_path / "checkpoint")
    rows, weights, moments = rows_of(graph.embedding), dict(graph.dense.state_dict()), adam_of(graph)
    graph.embedding.close()
    again = grown(tmp_path, more=["new"])
    added = again.dense.added.weight.tolist()
    with pytest.raises(ValueError, match="dense.added.bias is None there"):
        again.load(tmp_path / "checkpoint")
    assert again.steps == 0 and again.embedding.stats()["rows"] == 0
    missing, unexpected = again.load(tmp_path / "checkpoint", strict=False)
    assert (missing, unexpected) == (["dense.added.bias", "dense.added.weight", "new"], [])
    assert rows_of(again.embedding) == rows and again.new.stats()["rows"] == 0 and again.steps == 2
    assert all(torch.equal(again.dense.state_dict()[name], value) for name, value in weights.items())
    assert again.dense.added.weight.tolist() == added and adam_of(again) == moments
    assert again.optimizers[0].param_groups[0]["lr"] == graph.optimizers[0].param_groups[0]["lr"]
    again(IDS)
    again.save(tmp_path / "wider")
    missing, unexpected = again.load(tmp_path / "wider")
    assert missing == unexpected == []
    rows, moments = rows_of(again.embedding), adam_of(again)
    again.embedding.close()
    again.new.close()
    narrow = graph_of(tmp_path, Normed())
    missing, unexpected = narrow.load(tmp_path / "wider", strict=False)
    assert (missing, unexpected) == ([], ["dense.added.bias", "dense.added.weight", "new"])
    assert rows_of(narrow.embedding) == rows
    assert adam_of(narrow) == {name: its for name, its in moments.items() if "added" not in name}
    narrow(IDS)


@pytest.mark.filterwarnings("ignore:embedding '.*' starts empty")
def test_a_load_that_is_not_strict_refuses_what_does_not_fit_and_takes_older_files(tmp_path):
    graph = graph_of(tmp_path, Normed())
    graph(IDS)
    graph.save(tmp_path / "checkpoint")
    before = state_of(graph)
    file = torch.load(tmp_path / "checkpoint", weights_only=False)
    torch.save({**file, "tensors": {**file["tensors"], "dense.linear.bias": torch.ones(2)}}, tmp_path / "other")
    with pytest.raises(ValueError, match="dense.linear.bias is"):
        graph.load(tmp_path / "other", strict=False)
    torch.save({**file, "optimizer_classes": ["SGD"]}, tmp_path / "other")
    with pytest.raises(ValueError, match="the optimizer is SGD there, Adam in the graph"):
        graph.load(tmp_path / "other", strict=False)
    assert state_of(graph) == before
    del file["optimizer_names"]
    torch.save(file, tmp_path / "older")
    graph.load(tmp_path / "older")
    graph.embedding.close()
    again = grown(tmp_path)
    missing, _ = again.load(tmp_path / "older", strict=False)
    assert missing == ["dense.added.bias", "dense.added.weight", "optimizers.0"] and adam_of(again) == {}
    assert rows_of(again.embedding) == before[0]
    again(IDS)
