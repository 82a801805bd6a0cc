"""Any sequence of operations on a persistent table does what it does to a dict of dicts."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from oneemb.kernels.threads import Threads
from oneemb.storage import cold_index
from oneemb.storage.compact_index import CompactIndex
from oneemb.storage.errors import SnapshotExistsError, SnapshotNotFoundError
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import SnapshotReader
from tests.support.cold_shards import make_shards_small
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.inside import check_choices, check_chunk_totals
from tests.support.table_model import check, got, put, random_rows

THREADS = Threads(1)
INTERESTING = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32)]
KEY = st.tuples(st.integers(0, 3), st.one_of(st.sampled_from(INTERESTING), st.integers(0, 400)))
NAME = st.sampled_from(["a", "b", "é/c"])


class TableMachine(RuleBasedStateMachine):
    """The table under test, the rows that it must hold, and the rows of its snapshots."""

    table_class = PersistentTable
    index_memory_bytes = None

    @initialize(
        row_width=st.sampled_from([1, 3, 40, 64, 150]), block=st.sampled_from([512, 4096]), beside=st.booleans()
    )
    def make(self, row_width, block, beside):
        self.beside = beside
        self.fs, self.row_width, self.block = FaultyFileSystem(), row_width, block
        self.rows, self.saved, self.count, self.seed = {}, {}, 0, 0
        self.open()

    def open(self):
        self.table = self.table_class.open(
            "/t", row_width=self.row_width, physical_block_size=self.block, chunk_bytes=1, threads=THREADS,
            background=self.beside, fs=self.fs, max_space_amplification=1.3,
            index_memory_bytes=self.index_memory_bytes,
        )  # fmt: skip

    @rule(keys=st.lists(KEY, unique=True, max_size=30))
    def put_few(self, keys):
        self._put(keys)

    @rule(first=st.integers(-10, 200), size=st.integers(1, 400))
    def put_many(self, first, size):
        self._put([(n % 3, n // 3 + first) for n in range(size)])

    def _put(self, keys):
        self.seed += 1
        table_U = np.array([t for t, _ in keys], np.int32)
        id_U = np.array([i for _, i in keys], np.int64)
        row_UW = random_rows(np.random.default_rng(self.seed), len(keys), self.row_width)
        put(self.table, self.rows, table_U, id_U, row_UW)

    @rule(keys=st.lists(KEY, unique=True, max_size=30))
    def get(self, keys):
        assert got(self.table, keys) == [self.rows.get(key) for key in keys]

    @rule(keys=st.lists(KEY, unique=True, max_size=30))
    def erase(self, keys):
        table_U, id_U = np.array([t for t, _ in keys], np.int32), np.array([i for _, i in keys], np.int64)
        assert self.table.erase(table_U, id_U).tolist() == [key in self.rows for key in keys]
        for key in keys:
            self.rows.pop(key, None)

    @rule()
    def flush(self):
        self.table.flush()

    @rule()
    def clear(self):
        self.table.clear()
        self.rows = {}

    @rule()
    def compact(self):
        self.table.compact()

    @rule(name=NAME, overwrite=st.booleans())
    def save(self, name, overwrite):
        self.count += 1
        if name in self.saved and not overwrite:
            with pytest.raises(SnapshotExistsError):
                self.table.save_snapshot(name, {"n": self.count})
            return
        self.table.save_snapshot(name, {"n": self.count}, overwrite=overwrite)
        self.saved[name] = (self.count, dict(self.rows))

    @rule(name=NAME)
    def load(self, name):
        if name not in self.saved:
            with pytest.raises(SnapshotNotFoundError):
                self.table.load_snapshot(name)
            return
        n, rows = self.saved[name]
        assert self.table.load_snapshot(name) == {"n": n}
        self.rows = dict(rows)

    @rule(name=NAME)
    def delete(self, name):
        if name not in self.saved:
            with pytest.raises(SnapshotNotFoundError):
                self.table.delete_snapshot(name)
            return
        self.table.delete_snapshot(name)
        del self.saved[name]

    @rule(block=st.sampled_from([512, 4096]))
    def reopen(self, block):
        self.block = block
        self.table.close()
        self.open()
        self.rows = {}

    @rule(fate=st.integers(0, 3))
    def crash(self, fate):
        found = self.fs.survivors(torn=2, seed=self.seed)
        self.fs.power_loss()
        self.fs = found[fate][1]
        self.open()
        self.rows = {}

    @precondition(lambda self: self.saved)
    @rule()
    def read_beside(self):
        for name, (n, rows) in self.saved.items():
            with SnapshotReader.open("/t", name, fs=self.fs) as reader:
                assert reader.info.meta == {"n": n} and reader.info.rows == len(rows)
                check(reader, rows)

    @invariant()
    def holds_what_the_dict_holds(self):
        if not hasattr(self, "table"):
            return
        check(self.table, self.rows, batch=50)
        assert {info.name: info.meta["n"] for info in self.table.snapshots()} == {
            name: n for name, (n, _) in self.saved.items()
        }
        check_chunk_totals(self.table)
        for name in ["new", *self.saved]:
            check_choices(self.table, name)
        stats = self.table.stats()
        if self.beside:
            return  # A run that is being written is in the files already.
        files = [path for path in self.fs.entries if path.startswith("/t/chunks/")]
        assert stats["disk_bytes"] == sum(self.fs.size(path) for path in files), json.dumps(stats)
        headers = 3 * (4096 + 128) * max(1, len(files) // 2)
        assert stats["loose_bytes"] <= 1.3 * stats["live_bytes"] + 2 * stats["chunk_bytes"] + headers


def run(machine, examples, steps, phases=tuple(Phase)):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, print_blob=True, phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_any_sequence_of_operations_agrees_with_a_dict():
    run(TableMachine, examples=60, steps=30)


@pytest.mark.slow
def test_any_long_sequence_of_operations_agrees_with_a_dict():
    run(TableMachine, examples=1500, steps=60)


class ColdTableMachine(TableMachine):
    index_memory_bytes = 1

    @invariant()
    def scratch_file_is_there_only_while_it_is_needed(self):
        if hasattr(self, "table"):
            assert self.table.stats()["index_disk_bytes"] == 0 or "/t/index.cold" in self.fs.entries


def test_any_sequence_of_operations_agrees_with_a_dict_with_the_index_on_disk(monkeypatch):
    make_shards_small(monkeypatch)
    run(ColdTableMachine, examples=60, steps=30)


@pytest.mark.slow
def test_any_long_sequence_of_operations_agrees_with_a_dict_with_the_index_on_disk(monkeypatch):
    make_shards_small(monkeypatch)
    run(ColdTableMachine, examples=1500, steps=60)


class ForgetsErasedKeys(CompactIndex):
    """When a shard of the file is merged, keys that were erased stay."""

    def erase(self, table_U, id_U):
        return np.full(len(id_U), -1)


def test_an_index_on_disk_that_is_wrong_in_a_corner_is_found_out(monkeypatch):
    make_shards_small(monkeypatch)
    monkeypatch.setattr(cold_index, "CompactIndex", ForgetsErasedKeys)
    with pytest.raises(AssertionError):
        run(ColdTableMachine, examples=300, steps=30, phases=[Phase.generate])


class ForgetsSmallPuts(PersistentTable):
    def put(self, table_U, id_U, row_UW):
        if len(id_U) != 3:
            super().put(table_U, id_U, row_UW)


class LoadsWithoutClearing(PersistentTable):
    fewer = 0

    def load_snapshot(self, name):
        old = self._contents.live
        meta = super().load_snapshot(name)
        if len(old.index) > len(self._contents.live.index) * self.fewer:
            self.put(np.array([9], np.int32), np.array([9]), np.zeros((1, self.row_width), np.float32))
        return meta


class LoadsFewerRowsWithoutClearing(LoadsWithoutClearing):
    fewer = 1


@pytest.mark.parametrize(
    "saboteur",
    [
        ForgetsSmallPuts,
        pytest.param(LoadsWithoutClearing, marks=pytest.mark.slow),
        pytest.param(LoadsFewerRowsWithoutClearing, marks=pytest.mark.slow),
    ],
)
def test_a_table_that_is_wrong_in_a_corner_is_found_out(saboteur):
    class Sabotaged(TableMachine):
        table_class = saboteur

    with pytest.raises(AssertionError):
        run(Sabotaged, examples=300, steps=30, phases=[Phase.generate])
