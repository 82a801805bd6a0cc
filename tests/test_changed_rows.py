"""Changes between snapshots that need not be a delta of each other, found by the places of rows.

The oracle is a dict of rows for each snapshot, read from the embedding in memory when the snapshot is saved.
"""

import os
import shutil
import tempfile
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import oneemb
from oneemb.policies import LRU, RowPolicy
from oneemb.storage.errors import CorruptTableError, SnapshotNeededError, StorageError
from oneemb.storage.snapshots import changed_rows as module
from oneemb.storage.snapshots.changed_rows import changed_rows
from oneemb.storage.snapshots.snapshot_parts import look_at
from oneemb.storage.store_rows import set_rows
from oneemb.storage.table.chunk_files import chunk_paths
from oneemb.storage.table.compact_snapshots import compact_snapshots

DIM = 60  # one row a block, so that a chunk has 2048 rows
IDS = 3000


class Job:
    """An embedding of two tables. `rows`: {name of a snapshot: its rows}, `newest`: names in the order of saves."""

    def __init__(self, folder, store="device", capacity=None):
        self.folder, self.rows, self.newest = str(folder), {}, []
        self._store, self._capacity, self._drawn = store, capacity, np.random.default_rng(3)
        self.open()

    def open(self):
        options = {"physical_block_size": 512}
        store = {
            "device": lambda: oneemb.make_device_mem_store_options(self.folder, **options),
            "ssd": lambda: oneemb.make_cached_ssd_store_options(1, self.folder, **options),
        }[self._store]()
        policy = None if self._capacity is None else RowPolicy(evict=LRU(), capacity=self._capacity)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "embedding .* starts empty")
            self.embedding = oneemb.MultiTableEmbedding(
                "items", DIM, torch.float32, torch.int64, [oneemb.make_table()] * 2, store,
                oneemb.make_uniform_initializer(-1.0, 1.0), num_threads=1, policy=policy,
            )  # fmt: skip
        self._optimizer = torch.optim.Adagrad(self.embedding.parameters(), lr=0.1)

    def train(self, ids, table=0):
        """Train rows, which are new or not."""
        for its in torch.tensor(sorted(ids)).split(1000):  # A cache has 2000 rows.
            self._optimizer.zero_grad()
            (self.embedding(its, table) * torch.from_numpy(self._drawn.normal(size=(len(its), DIM)))).sum().backward()
            self._optimizer.step()

    def again(self, ids):
        """Write the rows of some ids of table 0 as they are."""
        its = torch.tensor(sorted(ids))
        its = its[self.embedding.contains(its, 0)]
        row_ND = self.embedding.read(its, torch.tensor(0)).numpy()
        set_rows(self.embedding.store, np.zeros(len(its), np.int32), its.numpy(), row_ND)

    def erase(self, ids, table=0):
        self.embedding.erase(torch.tensor(sorted(ids)), table)

    def save(self, since=None):
        name = f"v{len(self.newest)}"
        if since is None:
            self.embedding.save_snapshot(name)
        else:
            self.embedding.save_delta(name, since)
        self.newest.append(name)
        self.rows[name] = dict(self._live())
        return name

    def _live(self):
        store = self.embedding.store
        for table_N, id_N, row_NW in store.rows.hot.scan():
            for table, id, row in zip(
                table_N.tolist(), id_N.tolist(), row_NW[:, : store.format.row_width], strict=True
            ):
                yield (table, id), row.tobytes()

    def found(self, name):
        return look_at([self.folder]).get(name)

    def changes(self, old, new):
        return changed_rows(self.found(old), self.found(new))

    def check(self, old, new):
        """Compare the changes from one snapshot to another with the rows of both; returns the number of changes."""
        changed, rows = self.changes(old, new), dict(self.rows[old])
        gone = list(zip(*(keys.tolist() for keys in changed.gone()), strict=True))
        for key in gone:
            assert key not in self.rows[new]
            del rows[key]
        read = {}
        for table_N, id_N, row_NW in changed.scan(50):
            for table, id, row in zip(table_N.tolist(), id_N.tolist(), row_NW, strict=True):
                assert (table, id) not in read
                read[table, id] = row.tobytes()
        assert rows | read == self.rows[new], (old, new)
        keys = changed.keys(lambda table_N, id_N: np.ones(len(id_N), np.bool_))
        assert sorted(zip(*(one.tolist() for one in keys), strict=True)) == sorted(read)
        assert len(changed) == len(read)
        return len(read) + len(gone)

    def close(self):
        self.embedding.close()


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "job")
    job.train(range(IDS))
    yield job
    job.close()


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_a_whole_snapshot_after_deltas_gives_the_changed_rows_alone(job):
    base = job.save()
    job.train(range(5))
    last = job.save(since=base)
    job.train(range(3, 9))
    job.erase([200, 0])
    whole = job.save()
    assert job.check(last, whole) == 8
    assert job.check(base, whole) == 8 + 2  # ids 1 and 2
    assert job.check(whole, base) == 11 - 1  # ids 0 to 8, of which 3 to 8 were written twice, and 200
    assert job.check(whole, whole) == 0


def test_a_row_that_another_branch_has_written_is_changed_back(job):
    base = job.save()
    job.train(range(5))
    job.erase([9])
    branch = job.save(since=base)
    job.embedding.load_snapshot(base)
    job.train([100])
    whole = job.save()
    assert job.check(branch, whole) == 7
    assert {key for key in job.rows[whole] if job.rows[whole][key] != job.rows[branch].get(key)} == {
        (0, id) for id in (0, 1, 2, 3, 4, 9, 100)
    }


def test_more_than_half_of_the_rows_are_all_rows(job):
    base = job.save()
    job.train(range(100))
    assert job.check(base, job.save()) == 100
    job.train(range(IDS // 2 + 1))
    assert job.changes(base, job.save()) is None


# ---- removal and damage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["old", "new"])
def test_a_snapshot_that_is_removed_meanwhile_gives_all_rows(job, name, monkeypatch):
    names = {"old": job.save()}
    job.train(range(5))
    names["new"] = job.save()
    assert job.check(names["old"], names["new"]) == 5
    old, new = (job.found(names[one]) for one in ("old", "new"))
    read, calls = module.open_part, []

    def opened(part, fs):
        reader = read(part, fs)
        calls.append(part)
        if len(calls) == 2:
            job.embedding.delete_snapshot(names[name])
        return reader

    monkeypatch.setattr(module, "open_part", opened)
    assert changed_rows(old, new) is None and len(calls) >= 2


def test_changes_are_those_of_the_compared_files_though_places_move(job):
    base = job.save()
    job.train(range(5))
    whole = job.save()
    changed = job.changes(base, whole)
    job.train(range(0, IDS, 2))
    job.embedding.delete_snapshot(base)
    job.close()
    compact_snapshots(job.folder)
    try:
        found = {int(id) for _, id_N, _ in changed.scan() for id in id_N}
    except StorageError:
        found = set(range(5))  # The files are gone.
    assert found == set(range(5))
    job.open()
    job.embedding.load_snapshot(whole)


def test_damage_is_an_error(job):
    base = job.save()
    job.train(range(5))
    last = job.save(since=base)
    job.train(range(70, 76))
    whole = job.save()
    assert job.check(last, whole) == 6
    folder, errors = f"{job.folder}/chunks", 0
    for name in sorted(os.listdir(f"{job.folder}/snapshots")):
        errors += damaged(job, f"{job.folder}/snapshots/{name}", last, whole)
    for chunk in numbers(folder):
        errors += damaged(job, chunk_paths(folder, chunk)[1], last, whole)
    assert errors > 50


def numbers(folder):
    return sorted({int(name.split(".")[0]) for name in os.listdir(folder)})


def damaged(job, path, old, new):
    """Flip bytes of a file one after the other: each is an error, or the changes are right. Returns the errors."""
    data, errors, snapshots = bytearray(open(path, "rb").read()), 0, (job.found(old), job.found(new))
    for place in range(0, len(data), max(1, len(data) // 40)):
        data[place] ^= 64
        open(path, "wb").write(data)
        try:
            changed = changed_rows(*snapshots)
            assert changed is not None
            keys = {int(id) for _, id_N, _ in changed.scan() for id in id_N}
            assert keys == set(range(70, 76)) and not len(changed.gone()[1])
        except CorruptTableError:
            errors += 1
        data[place] ^= 64
    open(path, "wb").write(data)
    return errors


# ---- any sequence of calls -------------------------------------------------------------------------------------------


class Walk(RuleBasedStateMachine):
    """A job that saves whole snapshots and deltas, goes back, compacts and deletes, and a sink that follows it."""

    @initialize(store=st.sampled_from(["device", "ssd"]), capacity=st.sampled_from([None, 2700]))
    def begin(self, store, capacity):
        self.root, self.patch = tempfile.mkdtemp(), pytest.MonkeyPatch()
        self.patch.setattr(module, "SHARE_MAX", 0)
        self.job, self.shown = Job(f"{self.root}/job", store, capacity), {}
        self.sinks = [oneemb.sinks.Function(self.take, f"{self.root}/position")]
        self.job.train(range(2600))
        self.job.train(range(400), 1)
        self.job.save()
        self.job.train([1, 2])

    def take(self, changes):
        rows = {} if changes.is_whole else dict(self.shown)
        for key in zip(*(keys.tolist() for keys in changes.gone()), strict=True):
            del rows[key]
        for batch in changes.batches(60):
            for table, id, row in zip(batch.table_N.tolist(), batch.id_N.tolist(), batch.weight_ND, strict=True):
                rows[table, id] = row.tobytes()
        self.shown = rows

    @property
    def there(self):
        return [one.name for one in look_at([self.job.folder]).snapshots()]

    @rule(ids=st.sets(st.integers(0, IDS), min_size=1, max_size=20), table=st.sampled_from([0, 1]))
    def train(self, ids, table):
        self.job.train(ids, table)

    @rule(begin=st.integers(0, IDS), count=st.integers(100, 1500))
    def train_many(self, begin, count):
        self.job.train(range(begin, begin + count))

    @rule(ids=st.sets(st.integers(0, IDS), min_size=1, max_size=20))
    def again(self, ids):
        self.job.again(ids)

    @rule(ids=st.sets(st.integers(0, IDS), min_size=1, max_size=20), table=st.sampled_from([0, 1]))
    def erase(self, ids, table):
        self.job.erase(ids, table)

    @rule()
    def save(self):
        self.job.save()

    @rule(back=st.sampled_from([0, 0, 0, 1, 2]))
    def delta(self, back):
        there = self.there
        if there:
            try:
                self.job.save(since=there[-1 - min(back, len(there) - 1)])
            except StorageError as error:
                assert "a delta must be since" in str(error)

    @precondition(lambda self: self.there)
    @rule(which=st.integers(0, 10))
    def load(self, which):
        there = self.there
        self.job.embedding.load_snapshot(there[which % len(there)])

    @rule(ids=st.sets(st.integers(0, IDS), min_size=1, max_size=20))
    def go_back(self, ids):
        """Leave a delta on a branch of its own, and go on from its parent."""
        parent = self.job.save()
        self.job.train(ids)
        self.job.save(since=parent)
        self.job.embedding.load_snapshot(parent)
        self.job.save()

    @precondition(lambda self: len(self.there) > 3)
    @rule(which=st.integers(0, 10))
    def delete(self, which):
        there = self.there
        try:
            self.job.embedding.delete_snapshot(there[which % len(there)])
        except SnapshotNeededError:
            pass

    @rule()
    def compact(self):
        if self.job.embedding.store.rows.bottom_store is not None:
            self.job.embedding.store.rows.bottom_store.compact()

    @precondition(lambda self: self.there)
    @rule(which=st.integers(0, 10))
    def compact_files(self, which):
        self.job.close()
        compact_snapshots(self.job.folder)
        self.job.open()
        self.load(which)

    @precondition(lambda self: self.there)
    @rule()
    def publish(self):
        with oneemb.publish(self.job.folder, self.sinks, seconds=1000.0):
            pass
        rows = self.job.rows[self.there[-1]]
        assert self.shown == {key: row[: 4 * DIM] for key, row in rows.items()}

    @rule()
    def look(self):
        for old in self.there:
            for new in self.there:
                self.job.check(old, new)

    def teardown(self):
        if hasattr(self, "job"):
            self.look()
            self.job.close()
            self.patch.undo()
            shutil.rmtree(self.root, ignore_errors=True)


@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_changes_between_any_two_snapshots_are_the_difference_of_their_rows(examples):
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=examples, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
