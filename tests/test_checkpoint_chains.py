"""Checkpoints whose snapshots are deltas: a chain can be loaded at any moment, and pruning leaves what is needed.

The oracle is a dict of rows. Rows are put straight into the stores, each where `owner_of` says.
"""

import os
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import oneemb
from oneemb.checkpoints import checkpoint, stored_checkpoint
from oneemb.kernels.owner import owner_of
from oneemb.kernels.threads import Threads
from oneemb.storage.objects.manifests import names_in
from oneemb.storage.objects.object_store import ObjectStore
from oneemb.storage.snapshots.store_snapshots import StoreSnapshots
from oneemb.storage.store_rows import set_rows
from oneemb.storage.table.delta import GONE, Delta, gone_array
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import read_snapshot_info
from tests.support.faulty_fs import FaultyFileSystem, PowerLoss
from tests.support.state_machines import run_machine
from tests.support.thread_ranks import FaultyCalls, restored_job, run_ranks
from tests.test_deltas import of_chain, put
from tests.test_rank_snapshots import as_dict, assert_nothing_is_unneeded, content, make, together

pytestmark = pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")

COUNT = 80


class Job(oneemb.TrainGraph):
    """A graph whose rows and dense parameters follow from the changes that were made."""

    def __init__(self, ranks, folder, options="device"):
        super().__init__()
        self.embedding = make(ranks, folder, options=options, state=False)
        self.dense = torch.nn.Linear(1, 1)
        self.add_optimizer(torch.optim.Adagrad([self.embedding.weight, *self.dense.parameters()], lr=0.1))

    def change(self, version, ids, erased=()):
        """Give the rows of table 1 with these ids the values of a version."""
        embedding, store = self.embedding, self.embedding.store
        store.build()
        id_N, table_N, row_NW = changed(version, ids)
        own = owner_of(table_N, id_N, embedding.ranks.size) == embedding.ranks.rank
        set_rows(store, table_N[own], id_N[own], row_NW[own])
        if len(erased):
            embedding.erase(torch.tensor(list(erased)), 1)
        self.steps = store.step = version
        with torch.no_grad():
            self.dense.weight.fill_(version), self.dense.bias.fill_(0)
        return self

    def found(self):
        """(steps, rows of this rank)."""
        assert self.dense.weight.item() == self.steps == self.embedding.store.step
        return self.steps, content(self.embedding)[0]


def changed(version, ids):
    id_N = np.asarray(sorted(ids), np.int64)
    row_NW = (id_N[:, None] * 31 + np.arange(6) + version * 1009).astype(np.float32)
    return id_N, np.ones(len(id_N), np.int32), row_NW


def apply(rows, version, ids, erased=()):
    """The oracle's rows after `Job.change`."""
    id_N, table_N, row_NW = changed(version, ids)
    rows = {**rows, **as_dict(table_N, id_N, row_NW)}
    return {key: row for key, row in rows.items() if key[1] not in erased}


def few(version):
    """The ids that a version changes, and those that it erases: all at first, then a few."""
    if version == 1:
        return range(COUNT), ()
    return range(version, version + 4), (version + 40,)


def at(version):
    rows = {}
    for one in range(1, version + 1):
        rows = apply(rows, one, *few(one))
    return rows


def names_of(path):
    """Names of the snapshots of the embedding that a checkpoint and its earlier saves name, newest first."""
    state = torch.load(path)
    return [one["embedding"]["oneemb_snapshot"] for one in (state["embeddings"], *state["earlier"])]


def deltas_in(folder):
    """{name of a snapshot: name of its parent, or None}."""
    found = {}
    for info in read_snapshot_info(folder):
        delta = Delta.of_meta(info.meta, info.name)
        found[info.name] = None if delta is None else delta.since
    return found


# ---- one chain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["host", "ssd"])
def test_saves_are_deltas_that_go_with_the_chain_that_no_kept_save_needs(tmp_path, monkeypatch, options):
    monkeypatch.setattr(checkpoint, "DELTAS_MAX", 3)
    delete, deleted = StoreSnapshots.delete, []
    monkeypatch.setattr(StoreSnapshots, "delete", lambda store, name: deleted.append(name) or delete(store, name))
    job, copies, there = Job(None, tmp_path / "rows", options), {}, []
    for version in range(1, 12):
        job.change(version, *few(version)).save(tmp_path / "c", delta=True, keep=2)
        shutil.copy(tmp_path / "c", tmp_path / f"c{version}")
        copies[version] = at(version)
        parents = deltas_in(tmp_path / "rows")
        assert set(parents) <= set(names_of(tmp_path / "c"))
        there.append([parent is None for parent in parents.values()])
        job.embedding.close()
        job = Job(None, tmp_path / "rows", options)
        for kept in [one for one in (version - 1, version) if one]:
            job.load(tmp_path / f"c{kept}")
            assert job.found() == (kept, copies[kept])
    chain = [True, False, False, False]
    one = [chain[:n] for n in (1, 2, 3, 4)]
    assert there == [*one, [*chain, True], *one[1:], [*chain, True], *one[1:3]]
    assert len(deleted) == len(set(deleted)) == 8, "no save asks for the deletion of what is needed"
    job.embedding.close()


def test_a_chain_whose_deltas_have_more_than_half_of_the_rows_begins_anew(tmp_path):
    job = Job(None, tmp_path / "rows").change(1, range(COUNT))
    wholes = []
    for version in range(2, 9):
        job.save(tmp_path / "c", delta=True, keep=1)
        wholes.append(len(job.embedding.snapshots()) == 1)
        job.change(version, range(version, version + 15))
    # Whole; three deltas of 15 rows are more than 40 of 80.
    assert wholes == [True, False, False, False, True, False, False]
    job.embedding.close()


def test_a_save_that_nothing_goes_on_from_is_whole(tmp_path):
    job = Job(None, tmp_path / "rows").change(1, *few(1))
    job.save(tmp_path / "c")
    job.change(2, *few(2)).save(tmp_path / "best", delta=True)  # nothing was saved there
    job.change(3, *few(3)).save(tmp_path / "c", delta=True)
    base, best, third = deltas_in(tmp_path / "rows").items()
    assert base[1] is None and best[1] is None and third[1] == base[0]
    job.load(tmp_path / "best")  # its rows are not those of "c"
    job.change(4, *few(4)).save(tmp_path / "c", delta=True)
    assert job.embedding.last_snapshot == names_of(tmp_path / "c")[0]
    assert deltas_in(tmp_path / "rows")[job.embedding.last_snapshot] is None
    rows = apply(apply(at(2), 4, *few(4)), 5, range(3))
    job.change(5, range(3)).save(tmp_path / "c", delta=True)
    job.load(tmp_path / "c")
    assert job.found() == (5, rows)
    assert deltas_in(tmp_path / "rows")[job.embedding.last_snapshot] == names_of(tmp_path / "c")[1]
    job.embedding.close()
    shutil.rmtree(tmp_path / "rows")  # the same path with a new folder
    job = Job(None, tmp_path / "rows").change(6, range(9))
    job.save(tmp_path / "c", delta=True)
    assert list(deltas_in(tmp_path / "rows").values()) == [None]
    job.embedding.close()


def test_deltas_of_the_user_neither_stop_a_chain_nor_are_deleted_unasked(tmp_path):
    for keep_deltas in (True, False):
        folder = tmp_path / str(keep_deltas)
        job = Job(None, folder / "rows").change(1, *few(1))
        job.save(folder / "c", delta=True, keep=1)
        job.change(2, *few(2)).embedding.save_delta("mine", since=job.embedding.last_snapshot)
        for version in range(3, 6):
            job.change(version, *few(version)).save(folder / "c", delta=True, keep=1, keep_deltas=keep_deltas)
        parents = deltas_in(folder / "rows")
        assert len(parents) == 5 and parents["mine"] == names_of(folder / "c")[-1]
        job.change(6, range(COUNT)).save(folder / "c", delta=True, keep=1, keep_deltas=keep_deltas)
        job.change(7, range(4)).save(folder / "c", delta=True, keep=1, keep_deltas=keep_deltas)
        left = list(deltas_in(folder / "rows"))
        assert left[-1:] == names_of(folder / "c")[:1] and ("mine" in left) is keep_deltas
        job.load(folder / "c", delete_newer=True)
        assert job.found()[0] == 7
        job.embedding.close()


def test_a_flag_that_is_none_and_a_damaged_parent_are_errors(tmp_path):
    job = Job(None, tmp_path / "rows").change(1, *few(1))
    with pytest.raises(TypeError, match="delta must be True or False, got int 4"):
        job.save(tmp_path / "c", delta=4)
    job.save(tmp_path / "c", delta=True)
    state = torch.load(tmp_path / "c")
    state["embeddings"]["embedding"]["oneemb_since"] = 3
    torch.save(state, tmp_path / "c")
    with pytest.raises(ValueError, match="c is damaged: its entry 'embeddings'"):
        job.load(tmp_path / "c")
    job.embedding.close()


# ---- ranks and stores ------------------------------------------------------------------------------------------------


def run(size, function, *args, patch):
    """Results of the function on so many ranks; 0 = without ranks."""
    return [function(None, *args)] if size == 0 else run_ranks(size, function, *args, patch=patch)


def save(ranks, root, path, first, last, load, keep=1):
    """Save the versions from `first` to `last`, and return what is there then."""
    job = Job(ranks, root if isinstance(root, list) else f"{root}/rows")
    if load:
        job.load(path)
    for version in range(first, last + 1):
        job.change(version, *few(version)).save(path, delta=True, keep=keep)
    found = job.found()
    job.embedding.close()
    return found


def whole(found):
    (steps,) = {steps for steps, _ in found}
    return together([(rows, steps) for _, rows in found])


def test_any_number_of_ranks_goes_on_with_the_chain_of_any_other(tmp_path, monkeypatch):
    last = 0
    for n, size in enumerate([2, 3, 3, 0, 2, 2]):
        found = run(size, save, tmp_path, f"{tmp_path}/c", last + 1, last + 3, n > 0, patch=monkeypatch)
        last += 3
        assert whole(found) == (at(last), last)
        other = 2 if size == 3 else 3
        found = run(other, save, tmp_path, f"{tmp_path}/c", 1, 0, True, patch=monkeypatch)
        assert whole(found) == (at(last), last)
        assert_nothing_is_unneeded(tmp_path / "rows")
        # A chain of another number of ranks is pruned once no kept save is of it.
        assert len(names_of(tmp_path / "c")) == (6 if (n, size) in ((2, 3), (5, 2)) else 3)


def test_ranks_save_whole_snapshots_if_one_of_them_cannot_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(StoreSnapshots, "may_go_on", lambda *_: threading.current_thread().name == "rank-0")
    assert whole(run(2, save, tmp_path, f"{tmp_path}/c", 1, 3, False, patch=monkeypatch)) == (at(3), 3)
    assert len(names_of(tmp_path / "c")) == 2
    assert_nothing_is_unneeded(tmp_path / "rows")
    assert set(deltas_in(tmp_path / "rows" / "rank-1-of-2").values()) == {None}


@pytest.mark.parametrize("size", [0, 2])
def test_a_chain_in_an_object_store_is_loaded_on_other_disks_and_pruned(tmp_path, monkeypatch, size):
    monkeypatch.setattr(stored_checkpoint, "STORED_DELTAS_MAX", 2)
    url, last = f"memory://chains-{size}-{os.path.basename(tmp_path)}/c.pt", 0
    store = ObjectStore(f"{url}.rows/embedding")
    for n, (there, here) in enumerate([(2, 2), (3, 3), (1, 1), (2, 2), (3, 3)]):
        disks = [f"{tmp_path}/disk{n // 2}-{rank}" for rank in range(max(1, size))]  # each second job: other disks
        run(size, save, disks, url, last + 1, last + 1 + (n == 0), n > 0, patch=monkeypatch)
        last += 1 + (n == 0)
        assert len(names_in(store)) == there
        assert len([name for name in deltas_in(disks[0]) if name]) == here
        for other in (0, 2, 3):
            new = [f"{tmp_path}/new{n}-{other}-{rank}" for rank in range(max(1, other))]
            assert whole(run(other, save, new, url, 1, 0, True, patch=monkeypatch)) == (at(last), last)


# ---- kills and losses of power ---------------------------------------------------------------------------------------


def act(ranks, root, calls, version):
    """Save one more version, with counted calls."""
    job = Job(ranks, f"{root}/rows")
    job.load(f"{root}/c")
    job.change(version, *few(version))
    with calls.counted():
        try:
            job.save(f"{root}/c", delta=True, keep=2)
        except Exception:
            assert ranks is not None  # Another rank was killed.
    job.embedding.close()


def acted(size, root, calls, version, patch, dies=()):
    if size == 0:
        run_ranks(1, lambda _: act(None, root, calls, version), dies=dies)
    else:
        run_ranks(size, act, root, calls, version, patch=patch, dies=dies)
    calls.free_locks()


@pytest.mark.parametrize("prunes", [False, True], ids=["delta", "delta that prunes"])
@pytest.mark.parametrize(
    ("size", "stride"),
    [(0, 31), (2, 151), pytest.param(0, 1, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow)],
)
def test_a_kill_at_any_file_call_of_a_save_leaves_a_chain_that_is_loaded(tmp_path, monkeypatch, size, stride, prunes):
    monkeypatch.setattr(checkpoint, "DELTAS_MAX", 2)
    before = 4 if prunes else 2  # Versions 1 and 4 are whole, and the save after the fourth prunes the first three.
    run(size, save, tmp_path / "job", f"{tmp_path}/job/c", 1, before, False, 2, patch=monkeypatch)
    calls, versions = FaultyCalls(monkeypatch), set()
    acted(size, restored_job(tmp_path), calls, before + 1, monkeypatch)
    counts = [len(calls.of(rank)) for rank in range(max(1, size))]
    for dead, count in enumerate(counts):
        for call in sorted({*range(dead, count, stride), count - 1}):
            root = restored_job(tmp_path)
            with monkeypatch.context() as patch:
                calls = FaultyCalls(patch, rank=dead, at=call)
                acted(size, root, calls, before + 1, patch, dies=(dead,))
                assert calls.reached
            found = run(size, save, root, f"{root}/c", 1, 0, True, patch=monkeypatch)
            rows, version = whole(found)
            assert rows == at(version), (dead, call)
            versions.add(version)
            run(size, save, root, f"{root}/c", version + 1, 8, True, 2, patch=monkeypatch)
            assert whole(run(size, save, root, f"{root}/c", 1, 0, True, patch=monkeypatch)) == (at(8), 8)
            assert sorted(os.listdir(root)) == ["c", "rows"]
            job = Job(None, f"{root}/rows")
            assert job.embedding.snapshots() == names_of(root / "c")[1::-1]  # the seventh, whole, and the eighth
            job.embedding.close()
            assert_nothing_is_unneeded(root / "rows")
    assert versions == {before, before + 1}


PRUNED = (("base", None), ("d1", "base"), ("d2", "d1"), ("whole", None), ("d3", "whole"))


def save_and_prune(fs, states, note):
    """Save a chain, a whole snapshot and a delta since it, then delete the chain; calls `note` at each moment."""
    rows = {}
    with PersistentTable.open(
        "/t", row_width=3, physical_block_size=512, fs=fs, threads=Threads(1), background=False
    ) as table:
        infos, places = {}, {}
        for n, (name, since) in enumerate(PRUNED):
            put(table, rows, {(n % 2, k): 100.0 * n + k for k in range(40 if n == 0 else 5)})
            gone = [(0, n + 7)]
            table.erase(np.array([0], np.int32), np.array([n + 7]))
            rows.pop(gone[0], None)
            if since is None:
                infos[name] = table.save_snapshot(name, {}), 0
            else:
                parent, number = infos[since]
                delta = Delta(since, parent.identity, number, number + 1, len(rows), 0)
                arrays = {GONE: gone_array(*table.gone_since(places[since]))}
                infos[name] = table.save_snapshot(name, delta.to_meta(), arrays=arrays, since=places[since]), number + 1
            places[name], states[name] = table.places, dict(rows)
            note(name, True)
        for name in ("d2", "d1", "base"):
            note(name, False)
            table.delete_snapshot(name)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loss_of_power_at_any_call_of_saves_and_pruning_leaves_what_was_kept(stride):
    calm, states = FaultyFileSystem(), {}
    save_and_prune(calm, states, lambda name, exists: None)
    chains = {"base": ["base"], "d1": ["base", "d1"], "d2": ["base", "d1", "d2"], "whole": ["whole"]}
    chains["d3"] = ["whole", "d3"]
    assert [info.name for info in read_snapshot_info("/t", fs=calm)] == ["whole", "d3"]
    for call in range(0, len(calm.calls), stride):
        fs, kept = FaultyFileSystem(), {}
        fs.crash_at, fs.half = call, call % 2
        with pytest.raises(PowerLoss):
            save_and_prune(fs, {}, kept.__setitem__)
        for fate, disk in fs.survivors(torn=1, seed=call):
            there = [info.name for info in read_snapshot_info("/t", fs=disk)] if kept else []
            assert {name for name, is_kept in kept.items() if is_kept} <= set(there)
            for name in there:
                assert set(chains[name]) <= set(there), (call, fate)
                assert of_chain(disk, "/t", chains[name]) == states[name], (call, fate)


# ---- any sequence of calls -------------------------------------------------------------------------------------------


# Most of the ids that are erased have a row, and most saves go to one path.
IDS = st.sets(st.integers(0, 40), min_size=1, max_size=6)
ERASED = st.sets(st.integers(0, 30), min_size=1, max_size=3)
PATHS = st.sampled_from("aab")


class Chains(RuleBasedStateMachine):
    """A job that saves to two paths, is killed and loads. Each kept checkpoint is compared with its dict of rows."""

    @initialize(deltas_max=st.integers(1, 4))
    def begin(self, deltas_max):
        self.root, self.patch = Path(tempfile.mkdtemp()), pytest.MonkeyPatch()
        self.patch.setattr(checkpoint, "DELTAS_MAX", deltas_max)
        self.job = Job(None, self.root / "rows", "ssd")
        self.rows, self.version, self.saves, self.kept = {}, 0, 0, {"a": [], "b": []}
        self.change(set(range(30)), set())
        # Every example has deltas with changed, new and gone keys, and a kept whole snapshot that nothing goes on from.
        self.save("a", 3, True)
        self.change_and_save({1, 2, 31}, {3}, "a", 3)
        self.change_and_save({2, 3, 32}, {1, 4}, "a", 3)
        self.hand()
        self.look()
        self.save("a", 3, False)
        self.save("a", 3, False)
        self.save("a", 2, False)  # prunes all but a parent of the delta

    @rule(ids=IDS, erased=ERASED)
    def change(self, ids, erased):
        self.version += 1
        self.job.change(self.version, ids, erased)
        self.rows = apply(self.rows, self.version, ids, erased)

    def count(self, path, keep):
        """Note that a checkpoint is at the path, and which copies can still be loaded."""
        self.saves += 1
        shutil.copy(self.root / path, self.root / f"copy{self.saves}")
        former = self.kept[path] if keep is None else self.kept[path][: keep - 1]
        self.kept[path] = [(f"copy{self.saves}", self.version, self.rows), *former]

    @rule(path=PATHS, keep=st.sampled_from([3, 2, 1]), delta=st.sampled_from([True, True, False]))
    def save(self, path, keep, delta):
        self.job.save(self.root / path, delta=delta, keep=keep)
        self.count(path, keep)

    @rule(ids=IDS, erased=ERASED, path=PATHS, keep=st.sampled_from([3, 2, 1]))
    def change_and_save(self, ids, erased, path, keep):
        """Most steps of a job: a delta with changed rows and gone keys."""
        self.change(ids, erased)
        self.save(path, keep, True)

    @rule(since=st.booleans())
    def hand(self, since=True):
        """Save a snapshot or delta without a checkpoint, in place of the one before, which may have been pruned."""
        embedding = self.job.embedding
        self.delete_handed()
        last = embedding.last_snapshot
        if since and last in embedding.snapshots():
            embedding.save_delta("hand", since=last)
        else:
            embedding.save_snapshot("hand")
        self.handed = self.rows

    def delete_handed(self):
        if "hand" in self.job.embedding.snapshots():
            self.job.embedding.delete_snapshot("hand")

    @rule(path=PATHS, at=st.integers(0, 45), keep=st.sampled_from([1, 2]))
    def die_in_a_save(self, path, at, keep):
        before = (self.root / path).read_bytes() if (self.root / path).exists() else None
        with pytest.MonkeyPatch().context() as patch:
            calls = FaultyCalls(patch, at=at)

            def act(_):
                with calls.counted():
                    self.job.save(self.root / path, delta=True, keep=keep)

            run_ranks(1, act, dies=(0,))
            done = not calls.reached
            if not done:
                self.job = None
            calls.free_locks()
        after = (self.root / path).read_bytes() if (self.root / path).exists() else None
        if after != before:
            self.count(path, keep)
        if not done:
            self.resume("a" if self.kept["a"] else "b", 0)

    @rule(path=PATHS, which=st.integers(0, 2))
    def resume(self, path, which):
        """A new process loads one of the kept checkpoints."""
        if self.job is not None:
            self.job.embedding.close()
        self.job = Job(None, self.root / "rows", "ssd")
        kept = self.kept[path]
        if not kept:
            self.rows, self.version = {}, 0
            self.change(set(range(30)), set())
            return
        name, self.version, self.rows = kept[min(which, len(kept) - 1)]
        self.job.load(self.root / name)
        assert self.job.found() == (self.version, self.rows)

    @rule()
    def look(self):
        """Load every kept checkpoint, and the snapshot saved by hand, in another object on a copy of the folder."""
        copy = self.root / "elsewhere"
        shutil.rmtree(copy, ignore_errors=True)  # a look that has failed
        shutil.copytree(self.root / "rows", copy, ignore=shutil.ignore_patterns("LOCK"))
        job = Job(None, copy, "ssd")
        for name, version, rows in (*self.kept["a"], *self.kept["b"]):
            job.load(self.root / name)
            assert job.found() == (version, rows)
        if "hand" in job.embedding.snapshots():
            job.embedding.load_snapshot("hand")
            assert content(job.embedding)[0] == self.handed
        job.embedding.close()
        shutil.rmtree(copy)

    def teardown(self):
        if not hasattr(self, "root"):
            return
        if self.job is not None:
            self.look()
            self.delete_handed()
            # Saves without a delta, and of few, free everything else.
            for path in "aabb":
                self.job.save(self.root / path, keep=1)
            assert len(self.job.embedding.snapshots()) == 2
            self.job.embedding.close()
        self.patch.undo()
        shutil.rmtree(self.root, ignore_errors=True)


@pytest.mark.parametrize("examples", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_any_sequence_of_calls_and_kills_leaves_the_kept_checkpoints(examples):
    run_machine(Chains, examples)
