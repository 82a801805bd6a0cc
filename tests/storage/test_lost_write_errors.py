"""The system fails to write back what was written, and another process's fsync is told of it, before each file call of
each writer: what a call has announced is on the device, or the call has raised.

Linux reports such a failure once to each descriptor that was open then, and to one that is opened later only if nobody
has been told before. So an error can be lost for good where a file is closed and opened again to be synced.
"""

import fcntl
import os
import stat
import threading

import numpy as np
import pytest
import torch

import oneemb
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError, StorageError
from oneemb.storage.remote.file_server import FileServer
from oneemb.storage.remote.parameter_server import ServerError
from oneemb.storage.snapshots.unfinished import mark, marks_at
from oneemb.storage.table import chunk_files
from oneemb.storage.table.compact_snapshots import compact_snapshots
from tests.remote.test_file_server import IDS, rows, values_of
from tests.serving import test_served_file as served
from tests.storage import (
    test_compact_snapshots as compacted,
    test_dynamicemb_files as dumps,
    test_oneflow_table_crash as oneflow,
    test_persistent_table_crash as crash,
)
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.graph_models import make_graph
from tests.support.inside import chunk_files_of
from tests.support.table_model import check, got, put_random, scanned


class TellsOthers:
    """The `fail` of a file system: before the call of this number it loses what is not synced, and tells others."""

    def __init__(self, fs, number):
        self.fs, self.number = fs, number

    def __call__(self, call, path):
        if call not in ("open", "read") and len(self.fs.calls) - 1 == self.number:
            self.fs.writeback_fails(others_ask=True)


# Writers: begin(fs) makes a past and gives what `write` needs, `found` tells what a disk holds.


class Table:
    begin = crash.World

    def write(self, fs, world):
        for _ in range(3):
            world.put(150)  # Chunks are full, and left for others.
        world.save("c")

    def found(self, disk):
        with crash.open_table(disk) as table:
            return {info.name: (table.load_snapshot(info.name)["n"], scanned(table)) for info in table.snapshots()}


class Deletion(Table):
    def write(self, fs, world):
        world.delete("b")


class Compaction(Table):
    def write(self, fs, world):
        world.put(400)
        world.table.compact()
        world.save("a", overwrite=True)


class CompactedSnapshots:
    def begin(self, fs):
        return compacted.make_table(fs=fs, saves=1)

    def write(self, fs, saved):
        compact_snapshots("/t", fs=fs)

    def found(self, disk):
        return compacted.found_in(fs=disk)


class Server:
    def begin(self, fs):
        server = FileServer("/rows", fs=fs, background=False)
        server.push("t", IDS, rows(1, 3))
        return server

    def write(self, fs, server):
        server.push("t", IDS, rows(2, 3))

    def found(self, disk):
        server = FileServer("/rows", fs=disk, background=False)
        values = values_of(server, 3)
        server.close()
        return values


class Dump:
    def begin(self, fs):
        fs.make_directories("/d")
        dumps.write_dump("/d", [dumps.rows_of(dumps.KEYS[:3], 0, seed=1)], fs=fs)

    def write(self, fs, _):
        dumps.write_dump("/d", [dumps.rows_of(dumps.KEYS, 0, seed=2)], fs=fs)

    def found(self, disk):
        try:
            return dumps.read("/d", fs=disk)[1]
        except (SnapshotNotFoundError, CorruptTableError):
            return None  # The former dump is removed before the new one has its names.
        except AssertionError:
            return "some of the rows"


class OneFlow:
    def begin(self, fs):
        oneflow.save(fs, "first")

    def write(self, fs, _):
        oneflow.save(fs, "second")

    def found(self, disk):
        return oneflow.found(disk, "first"), oneflow.found(disk, "second")


class Served:
    def begin(self, fs):
        fs.make_directories("/served")
        served.write(served.PATH, fs)

    def write(self, fs, _):
        served.write(served.PATH, fs, 2000)

    def found(self, disk):
        return bytes(disk.entries[served.PATH].now)


class Marks:
    def begin(self, fs):
        fs.make_directories("/t")
        mark(fs, "/t", ["0" * 32])

    def write(self, fs, _):
        mark(fs, "/t", ["1" * 32])

    def found(self, disk):
        return marks_at(disk, "/t")


WRITERS = [Table, Deletion, Compaction, CompactedSnapshots, Server, Dump, OneFlow, Served, Marks]


def lost(writer, make_fs=FaultyFileSystem, stop_at_first=False):
    """What was announced and is not there after a loss of power, and how many calls have raised."""
    fs = make_fs()
    its = writer.begin(fs)
    before, begun = writer.found(on_disk(fs)), len(fs.calls)
    writer.write(fs, its)
    after, calls = writer.found(on_disk(fs)), fs.calls[begun:]
    assert before != after or writer.__class__ is CompactedSnapshots
    wrong, raised = [], 0
    for number, call in enumerate(calls):
        fs = make_fs()
        its = writer.begin(fs)
        fs.fail = TellsOthers(fs, begun + number)
        allowed = [after]
        try:
            writer.write(fs, its)
        except (StorageError, ServerError):
            allowed, raised = [before, after, None], raised + 1
        try:
            if writer.found(on_disk(fs)) not in allowed:
                wrong.append(f"{call}: other rows")
        except StorageError as error:
            wrong.append(f"{call}: {error}")
        if wrong and stop_at_first:
            break
    return wrong, raised


def on_disk(fs):
    """What the machine has after a loss of power."""
    return fs.survivors(torn=0)[0][1]


@pytest.mark.parametrize("writer", WRITERS, ids=lambda its: its.__name__)
def test_what_was_announced_is_on_the_device_though_others_were_told_of_the_error(writer):
    wrong, raised = lost(writer())
    assert not wrong and (raised or writer is Deletion)


class SyncsAnotherDescriptor(FaultyFileSystem):
    def _sync(self, file):
        again = self._opened(*self._open[file])
        try:
            super()._sync(again)
        finally:
            self.close(again)


@pytest.mark.parametrize("writer", [w for w in WRITERS if w is not Deletion], ids=lambda its: its.__name__)
def test_a_writer_that_opens_a_file_again_to_sync_it_is_found_out(writer):
    assert lost(writer(), SyncsAnotherDescriptor, stop_at_first=True)[0]


def test_a_save_that_has_failed_for_that_is_made_good_by_the_next_one():
    fs = FaultyFileSystem()
    world = crash.World(fs)
    world.put(150)
    world.table.flush()
    fs.writeback_fails(others_ask=True)
    with pytest.raises(StorageError, match="could not sync /t/chunks/.*EIO"):
        world.save("c")
    world.save("c")
    check(world.table, world.rows)
    assert Table().found(on_disk(fs)) == world.saved


@pytest.mark.parametrize(("spare", "most"), [(4, 64), (1 << 10, 2)])
def test_many_full_chunks_are_synced_before_too_many_files_are_open(spare, most, monkeypatch):
    fs = FaultyFileSystem()
    world = crash.World(fs)
    fs.spare_files = lambda: spare
    monkeypatch.setattr(chunk_files, "_UNSYNCED_MAX", most)
    for _ in range(6):
        world.put(170)
        world.table.flush()
    unsynced = chunk_files_of(world.table).unsynced
    assert len(unsynced) == 2 and world.table.stats()["chunks"] > 5
    oldest = next(iter(unsynced))
    fs.writeback_fails(others_ask=True)
    for _ in range(3):
        world.put(170)
        world.table.flush()
    assert oldest.suspect and got(world.table, world.rows) == list(world.rows.values())
    world.save("c")  # Rows of suspect chunks have moved.
    assert Table().found(on_disk(fs)) == world.saved
    assert not chunk_files_of(world.table).unsynced


class StuckSyncs(FaultyFileSystem):
    """The thread that syncs full chunks stands still at each sync until `go_on` is set."""

    def __init__(self):
        super().__init__()
        self.reached, self.go_on, self.synced_there = threading.Event(), threading.Event(), 0

    @property
    def files_open(self):
        return len(self._open)

    def sync(self, file):
        if threading.current_thread().name.startswith("oneemb-fsync"):
            self.reached.set()
            assert self.go_on.wait(600)
            self.synced_there += file in self._open
        super().sync(file)


@pytest.mark.parametrize("then", ["save", "clear", "close", "fail"])
def test_full_chunks_are_synced_beside_the_calls(then, monkeypatch):
    fs, rows, rng = StuckSyncs(), {}, np.random.default_rng(0)
    monkeypatch.setattr(chunk_files, "_UNSYNCED_MAX", 2)
    table = crash.open_table(fs, background=True, max_space_amplification=50.0)
    unsynced = chunk_files_of(table).unsynced
    for _ in range(100):
        if len(unsynced) < 3:  # The thread syncs one of them, and no put has waited for it.
            put_random(table, rows, rng, 60, ids=2000)
            table.flush()
    assert len(unsynced) == 3 and fs.reached.wait(600) and fs.synced_there == 0
    check(table, rows)
    if then == "fail":
        oldest = next(iter(unsynced))
        fs.writeback_fails(others_ask=True)
        fs.go_on.set()
        with pytest.raises(StorageError, match="could not (sync /t/chunks/.*EIO|be written to the device earlier)"):
            for n in range(100):
                table.save_snapshot(f"failed{n}", {})
                assert not table.snapshots()
        assert oldest.suspect
    else:
        threading.Timer(0.1, fs.go_on.set).start()
    if then == "clear":
        table.clear()
        rows = {}
        put_random(table, rows, rng, 60, ids=2000)
    if then == "close":
        table.close()
        assert not fs.files_open and fs.synced_there == 2  # Two files a chunk.
        return
    table.save_snapshot("s", {"n": 1})
    assert fs.synced_there >= 2 and Table().found(on_disk(fs)) == {"s": (1, rows)}
    check(table, rows)
    table.close()


def test_every_file_of_this_machine_is_synced_on_a_descriptor_that_may_write_it(tmp_path, monkeypatch):
    """As for what does not go through a `FileSystem`: checkpoints, and files of rows."""
    synced, fsync = [], os.fsync

    def note(file):
        if stat.S_ISREG(os.fstat(file).st_mode):
            path = os.readlink(f"/proc/self/fd/{file}")
            synced.append(path)
            assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY, path
        fsync(file)

    monkeypatch.setattr(os, "fsync", note)
    table, store = oneemb.make_table(), oneemb.make_cached_ssd_store_options(1, tmp_path / "rows")
    embedding = oneemb.MultiTableEmbedding("rows", 4, torch.float32, torch.int64, [table], store)

    def build(graph, ids):
        loss = graph.embedding(ids).sum()
        loss.backward()
        return loss

    graph = make_graph({"embedding": embedding}, build, lambda graph: [torch.optim.SGD(graph.parameters(), 0.1)])
    graph(torch.arange(50))
    embedding.save_snapshot("s")
    graph.save(tmp_path / "model.checkpoint")
    for name in ("rows.npz", "rows.safetensors", "rows.parquet"):
        oneemb.export_rows(embedding, tmp_path / name)
    oneemb.InferenceEmbedding.open(tmp_path / "rows", "s").close()
    kinds = (
        ".rows",
        ".keys",
        ".snapshot",
        "model.checkpoint",
        ".saving",
        ".npz",
        ".safetensors",
        ".parquet",
        "serving",
    )
    assert not [kind for kind in kinds if not any(kind in path for path in synced)]
