"""Power is lost at every file call of every operation: each snapshot is found whole, as before or as after."""

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.table.persistent_table import PersistentTable
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.power_losses import power_losses
from tests.support.table_model import check, put_random, scanned

THREADS = Threads(1)


def open_table(fs, **options):
    options = dict(background=False) | options
    return PersistentTable.open(
        "/t", row_width=40, physical_block_size=512, chunk_bytes=1, threads=THREADS, fs=fs, **options
    )


class World:
    """A table with a past, what it holds, and what its snapshots hold."""

    def __init__(self, fs):
        self.fs, self.rng, self.rows, self.saved, self.count = fs, np.random.default_rng(7), {}, {}, 0
        self.table = open_table(fs)
        for name in ("a", "b"):
            self.put(170)
            self.save(name)
        self.put(170)
        self.table.flush()

    def put(self, size):
        put_random(self.table, self.rows, self.rng, size, ids=150)

    def save(self, name, overwrite=False):
        self.count += 1
        self.table.save_snapshot(name, {"n": self.count}, overwrite=overwrite)
        self.saved[name] = (self.count, dict(self.rows))

    def delete(self, name):
        self.table.delete_snapshot(name)
        del self.saved[name]


def put(world):
    world.put(300)
    world.table.flush()


def save(world):
    world.put(50)
    world.save("c")


def overwrite(world):
    world.put(50)
    world.save("a", overwrite=True)


def load(world):
    world.table.load_snapshot("a")
    world.rows = dict(world.saved["a"][1])
    world.put(60)


def delete(world):
    world.table.clear()
    world.rows = {}
    world.delete("b")
    assert world.table.stats()["bytes_removed"] > 0


def compact(world):
    world.put(400)
    assert world.table.compact().rows_moved > 0
    check(world.table, world.rows)


def clear_and_save(world):
    world.table.clear()
    world.rows = {}
    world.save("b", overwrite=True)


def recover(world):
    world.fs.power_off()
    world.table = open_table(world.fs)
    assert world.table.recovery.truncated and world.table.recovery.removed


OPERATIONS = [put, save, overwrite, load, delete, compact, clear_and_save, recover]


def contradictions(fs, allowed):
    """What is wrong with the table on this disk. `allowed` are the states of the snapshots that may be found."""
    try:
        with open_table(fs) as table:
            recovery = table.recovery
            if recovery.damaged or recovery.lost or recovery.lost_more or recovery.kept:
                return f"what a crash does not do: {recovery}"
            found = {}
            for info in table.snapshots():
                meta = table.load_snapshot(info.name)
                found[info.name] = (meta["n"], scanned(table))
            if found not in allowed:
                return f"snapshots {[(name, n, len(rows)) for name, (n, rows) in found.items()]}"
            # Nothing but the snapshots is left, and the table works.
            if not found and fs.names("/t/chunks"):
                return f"left behind: {fs.names('/t/chunks')}"
            rows, rng = {}, np.random.default_rng(1)
            table.clear()
            put_random(table, rows, rng, 30)
            table.save_snapshot("after", {})
            table.load_snapshot("after")
            check(table, rows)
            for name, (_, expected) in found.items():
                table.load_snapshot(name)
                if scanned(table) != expected:
                    return f"{name} changed after recovery"
    except Exception as error:
        return repr(error)
    return None


def failures(operation, make_fs=FaultyFileSystem, torn=2, stop_at_first=False):
    """Every contradiction after a loss of power at any call of the operation, and the number of disks looked at."""
    world = World(whole := make_fs())
    before, first = dict(world.saved), len(whole.calls)
    operation(world)
    after, end = dict(world.saved), len(whole.calls)
    world, found = World(fs := make_fs()), []
    assert len(fs.calls) == first, "the past is not the same twice"

    def look(disk, call, half, fate):
        wrong = contradictions(disk, [after] if call == end else [before, after])
        if wrong:
            at = whole.calls[call] if call < end else "the end"
            found.append(f"{operation.__name__}: power lost at call {call - first} ({at}), {fate}: {wrong}")
        return bool(found) and stop_at_first

    return found, power_losses(fs, lambda: operation(world), look, torn=torn)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.__name__)
def test_power_loss_at_any_call_leaves_every_snapshot_whole(operation):
    found, disks = failures(operation)
    assert disks >= 4
    assert not found, "\n".join(found[:10])


class NoSync(FaultyFileSystem):
    def sync(self, file):
        self._alive()


class NoDirectorySync(FaultyFileSystem):
    def sync_directory(self, path):
        self._alive()


class NoSyncOfKeys(FaultyFileSystem):
    def sync(self, file):
        if not self._open[file][1].endswith(".keys"):
            super().sync(file)


class CopyInsteadOfRename(FaultyFileSystem):
    def rename(self, source, target):
        data = bytes(self.entries[source].now)
        if target in self.entries:
            self.remove(target)
        file = self.create(target)
        self.write(file, data, 0)
        self.sync(file)
        self.close(file)
        self.remove(source)


@pytest.mark.parametrize("saboteur", [NoSync, NoDirectorySync, NoSyncOfKeys, CopyInsteadOfRename])
def test_a_table_that_skips_a_step_is_found_out(saboteur):
    found, _ = failures(overwrite, saboteur, stop_at_first=True)
    assert found


def test_a_table_that_frees_chunks_before_the_snapshot_is_gone_is_found_out(monkeypatch):
    from oneemb.storage.table.snapshot_store import SnapshotStore

    def delete(self, name):
        self._forget(name)
        self.files.remove(name)

    monkeypatch.setattr(SnapshotStore, "delete", delete)
    found, _ = failures(globals()["delete"], stop_at_first=True)
    assert found


def test_a_table_that_takes_a_snapshot_off_its_list_after_removing_it_is_found_out(monkeypatch):
    from oneemb.storage.table.snapshot_store import SnapshotStore

    def delete(self, name):
        self.files.remove(name)
        self._durable.discard(name)
        self._record()
        self._forget(name)

    monkeypatch.setattr(SnapshotStore, "delete", delete)
    found, _ = failures(globals()["delete"], stop_at_first=True)
    assert found and "are gone" in found[0]


class NoSyncOfLock(FaultyFileSystem):
    def sync(self, file):
        if not self._open[file][1].endswith("LOCK"):
            super().sync(file)


def test_a_table_that_does_not_sync_its_list_of_snapshots_is_found_out():
    found, _ = failures(delete, NoSyncOfLock, stop_at_first=True)
    assert found and "what a crash does not do" in found[0]
