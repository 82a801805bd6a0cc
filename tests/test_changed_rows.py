"""Changes between snapshots that need not be a delta of each other, found by the places of rows.

The oracle is a dict of rows for each snapshot, read from the embedding in memory when the snapshot is saved.
"""

import os
import shutil
import tempfile
import uuid
import warnings

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import oneemb
from oneemb.kernels.owner import owner_of
from oneemb.policies import LRU, RowPolicy
from oneemb.storage.errors import CorruptTableError, SnapshotNeededError, StorageError
from oneemb.storage.objects.pull import pull
from oneemb.storage.objects.push import push
from oneemb.storage.snapshots import changed_rows as module
from oneemb.storage.snapshots.changed_rows import changed_rows
from oneemb.storage.snapshots.snapshot_parts import look_at
from oneemb.storage.store_rows import set_rows
from oneemb.storage.table.chunk_files import chunk_paths
from oneemb.storage.table.compact_snapshots import compact_snapshots
from tests.support.state_machines import run_machine
from tests.support.thread_ranks import run_ranks

DIM = 60  # one row a block, so that a chunk has 2048 rows; with 28, two rows a block
IDS = 3000


class Job:
    """An embedding of two tables. `rows`: {name of a snapshot: its rows}, `newest`: names in the order of saves."""

    def __init__(self, folder, store="device", capacity=None, dim=DIM, block=512, ranks=None, seed=3):
        self.folder, self.rows, self.newest, self._ranks = str(folder), {}, [], ranks
        self._store, self._capacity, self.dim, self._block = store, capacity, dim, block
        self._drawn = np.random.default_rng(seed)
        self.open()

    def open(self):
        options = {"physical_block_size": self._block}
        store = {
            "device": lambda: oneemb.make_device_mem_store_options(self.folder, **options),
            "ssd": lambda: oneemb.make_cached_ssd_store_options(1, self.folder, **options),
        }[self._store]()
        policy = None if self._capacity is None else RowPolicy(evict=LRU(), capacity=self._capacity)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "embedding .* starts empty")
            self.embedding = oneemb.MultiTableEmbedding(
                "items", self.dim, torch.float32, torch.int64, [oneemb.make_table()] * 2, store,
                oneemb.make_uniform_initializer(-1.0, 1.0), num_threads=1, policy=policy,
                process_group=self._ranks,
            )  # fmt: skip
        self._optimizer = torch.optim.Adagrad(self.embedding.parameters(), lr=0.1)

    def train(self, ids, table=0):
        """Train rows, which are new or not."""
        for its in torch.tensor(sorted(ids)).split(1000):  # A cache has 2000 rows.
            self._optimizer.zero_grad()
            (
                self.embedding(its, table) * torch.from_numpy(self._drawn.normal(size=(len(its), self.dim)))
            ).sum().backward()
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
        return checked(self.changes(old, new), self.rows[old], self.rows[new])

    def close(self):
        self.embedding.close()


def checked(changed, old_rows, new_rows):
    """Compare changes with the rows of the two snapshots; returns the number of changes."""
    rows, gone = dict(old_rows), list(zip(*(keys.tolist() for keys in changed.gone()), strict=True))
    for key in gone:
        assert key not in new_rows
        del rows[key]
    read = {}
    for table_N, id_N, row_NW in changed.scan(50):
        for table, id, row in zip(table_N.tolist(), id_N.tolist(), row_NW, strict=True):
            assert (table, id) not in read
            read[table, id] = row.tobytes()
    assert rows | read == new_rows
    keys = changed.keys(lambda table_N, id_N: np.ones(len(id_N), np.bool_))
    assert sorted(zip(*(one.tolist() for one in keys), strict=True)) == sorted(read)
    assert len(changed) == len(read)
    return len(read) + len(gone)


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


def test_erased_keys_alone_reach_a_sink(job, tmp_path):
    seen = []

    def take(changes):
        seen.append((changes.is_whole, len(list(changes.batches())), changes.gone()[1].tolist()))

    base = job.save()
    for _ in range(2):
        with oneemb.publish(job.folder, [oneemb.sinks.Function(take, tmp_path / "position")]):
            pass
        if len(seen) == 1:
            job.erase(range(10))
            assert job.check(base, job.save()) == 10
    assert seen[0][0] and (seen[1][:2], sorted(seen[1][2])) == ((False, 0), list(range(10)))


# ---- ranks and copies ------------------------------------------------------------------------------------------------


def test_changes_of_ranks_whose_number_changes(tmp_path, monkeypatch):
    def work(ranks, since, ids):
        job = Job(tmp_path / "job", ranks=ranks)
        job.embedding.store.build()
        if since is not None:
            job.embedding.load_snapshot(since)
        job.newest, id_N = names[:], np.array(ids)
        id_N = id_N[owner_of(np.zeros(len(ids), np.int32), id_N, ranks.size) == ranks.rank]
        row_ND = np.full((len(id_N), DIM), len(names), np.float32)
        set_rows(job.embedding.store, np.zeros(len(id_N), np.int32), id_N, row_ND)
        job.erase(ids[:3])
        name = job.save(since=since if ranks.size == 2 else None)
        job.close()
        return job.rows[name]

    names, rows = [], {}
    monkeypatch.setattr(module, "SHARE_MAX", 0)
    for size, ids in ((2, range(IDS)), (2, range(50, 100)), (3, range(90, 120)), (3, range(5)), (1, range(7))):
        of_ranks = run_ranks(size, work, names[-1] if names else None, ids, patch=monkeypatch)
        names.append(f"v{len(names)}")
        rows[names[-1]] = {key: row for its in of_ranks for key, row in its.items()}
        assert len(rows[names[-1]]) == sum(map(len, of_ranks))
    found = look_at([str(tmp_path / "job")])
    for old in names:
        for new in names:
            count = checked(changed_rows(found.get(old), found.get(new)), rows[old], rows[new])
            assert count or old == new
    assert checked(changed_rows(found.get("v2"), found.get("v3")), rows["v2"], rows["v3"]) == 2  # ids 3 and 4


def test_changes_in_a_copy_to_which_snapshots_are_pulled_one_after_the_other(job, tmp_path):
    url, copy = f"memory://{uuid.uuid4().hex}/items", str(tmp_path / "copy")
    job.save()
    for n in range(6):
        job.train(range(40 * n, 40 * n + 50))
        if n == 3:
            job.embedding.load_snapshot("v1")
            job.train([7])
        job.save(since="v4" if n == 4 else None)
        push(job.folder, url, [job.newest[-1]])
        if n:
            pull(url, copy, [job.newest[-1]])
    found = look_at([copy])
    there = [one.name for one in found.snapshots()]
    assert len(there) > 3
    for old in there:
        for new in there:
            checked(changed_rows(found.get(old), found.get(new)), job.rows[old], job.rows[new])


# ---- removal and damage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["old", "new"])
def test_a_snapshot_that_is_removed_meanwhile_gives_all_rows(job, name, monkeypatch):
    names = {"old": job.save()}
    job.train(range(5))
    names["new"] = job.save()
    assert job.check(names["old"], names["new"]) == 5
    old, new = (job.found(names[one]) for one in ("old", "new"))
    read, calls = module.open_part, []

    def opened(part):
        reader = read(part)
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


@pytest.mark.parametrize("block", [512, 4096])
def test_a_snapshot_file_of_another_table_is_an_error(job, tmp_path, block):
    base, other = job.save(), Job(tmp_path / "other", block=block, seed=4)
    other.train(range(IDS))
    other.save()
    other.train([1])
    other.newest.append("")
    name = other.save()
    other.close()
    (file,) = (one for one in os.listdir(f"{other.folder}/snapshots") if name in one)
    shutil.copy(f"{other.folder}/snapshots/{file}", f"{job.folder}/snapshots/{file}")
    with pytest.raises(StorageError, match="not those that the snapshot was saved with"):
        changed_rows(job.found(base), job.found(name))


# ---- any sequence of calls -------------------------------------------------------------------------------------------


class Walk(RuleBasedStateMachine):
    """A job that saves whole snapshots and deltas, goes back, compacts and deletes, and a sink that follows it."""

    @initialize(
        store=st.sampled_from(["device", "ssd"]), capacity=st.sampled_from([None, 2700]),
        dim=st.sampled_from([DIM, 28]),
    )  # fmt: skip
    def begin(self, store, capacity, dim):
        self.root, self.patch = tempfile.mkdtemp(), pytest.MonkeyPatch()
        self.patch.setattr(module, "SHARE_MAX", 0)
        self.job, self.shown = Job(f"{self.root}/job", store, capacity, dim), {}
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

    @rule(ids=st.sets(st.integers(0, IDS), min_size=1, max_size=20))
    def begin_anew(self, ids):
        self.job.embedding.clear()
        self.job.train(ids)

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
        assert self.shown == {key: row[: 4 * self.job.dim] for key, row in rows.items()}

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
    run_machine(Walk, examples)
