"""A writer whose folder was removed, and perhaps made anew by somebody else, touches nothing that lies there now."""

import gc
import os
import shutil
import threading
import time

import numpy as np
import pytest

from oneemb.foreign.oneflow_reader import OneFlowReader
from oneemb.foreign.oneflow_table import oneflow_snapshots
from oneemb.foreign.oneflow_writer import OneFlowWriter
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import LockedError, StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.table.check import check_table
from oneemb.storage.table.compact_snapshots import compact_snapshots
from oneemb.storage.table.live_rows import LiveRows
from oneemb.storage.table.persistent_table import PersistentTable
from tests.support.inside import in_the_middle_of_a_move
from tests.support.models import make_embedding
from tests.support.table_model import check, put_random


def open_table(path, **options):
    return PersistentTable.open(
        path, row_width=40, physical_block_size=512, chunk_bytes=1, threads=Threads(1), **options
    )


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("background", [True, False])
def test_who_had_the_folder_before_takes_nothing_of_who_has_it_now(tmp_path, saved, background):
    path, rng = tmp_path / "t", np.random.default_rng(0)
    before, rows = open_table(path, background=background), {}
    put_random(before, rows, rng, 3000)
    before.save_snapshot("of both", {})
    put_random(before, rows, rng, 3000)
    shutil.rmtree(path)
    now, own = open_table(path), {}
    put_random(now, own, rng, 4000)
    if saved:
        now.save_snapshot("of both", {})
    for call in (
        lambda: [put_random(before, rows, rng, 3000) for _ in range(20)],
        lambda: before.save_snapshot("other", {}),
        lambda: before.save_snapshot("of both", {}, overwrite=True),
        lambda: before.delete_snapshot("of both"),
    ):
        with pytest.raises(StorageError, match="LOCK was removed, with its folder or alone.*open a new table"):
            call()
    before.clear()
    before.close()
    check(now, own)
    if saved:
        assert check_table(str(path)).problems == []
        now.load_snapshot("of both")
        check(now, own)
    now.close()


def test_a_scan_that_ends_after_its_table_was_closed_removes_nothing(tmp_path):
    path, rows = tmp_path / "t", {}
    with open_table(path) as table:
        put_random(table, rows, np.random.default_rng(0), 3000)
        table.flush()
        scan = table.scan(100)
        next(scan)
    with open_table(path):
        pass
    with open_table(path) as table:
        put_random(table, rows, np.random.default_rng(1), 3000)
        table.save_snapshot("precious", {})
    scan.close()
    assert check_table(str(path)).problems == []


def test_a_table_that_cannot_be_made_gives_its_lock_back(tmp_path, monkeypatch):
    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(LiveRows, "__init__", fail)
        with pytest.raises(MemoryError):
            open_table(tmp_path / "t")
    open_table(tmp_path / "t").close()


def test_a_table_that_the_collector_closes_on_a_thread_of_its_own_is_closed(tmp_path):
    embedding = make_embedding(tmp_path / "e")
    embedding.store.build()
    path, table = embedding.store.plan.persistent_path, embedding.store.rows.bottom_store
    ended = threading.Event()

    def job():
        embedding_of_the_thread.clear()
        gc.collect()
        ended.set()

    embedding_of_the_thread = [embedding]
    del embedding
    with in_the_middle_of_a_move(table, job):
        assert ended.wait(600), "it waits for itself"
    give_up = time.monotonic() + 600
    while any(thread.name == "close" for thread in threading.enumerate()) and time.monotonic() < give_up:
        time.sleep(0.01)  # One that is about to start cannot be joined yet.
    again = make_embedding(path)
    again.store.build()  # not LockedError
    again.close()


def test_a_folder_below_new_ones_is_there_after_a_loss_of_power(tmp_path, monkeypatch):
    synced = []
    sync = LocalFileSystem.sync_directory
    monkeypatch.setattr(
        LocalFileSystem, "sync_directory", lambda fs, path: synced.append(os.path.normpath(path)) or sync(fs, path)
    )
    make_embedding(tmp_path / "a" / "b" / "c").close()
    assert {str(tmp_path / part) for part in (".", "a", "a/b")} <= set(synced)


def test_two_embeddings_of_one_folder_are_told_apart(tmp_path):
    with open_table(tmp_path / "t"), pytest.raises(LockedError, match=f"process {os.getpid()}"):
        open_table(tmp_path / "t")


@pytest.mark.parametrize("end", ["close", "save", "remove_snapshot"])
def test_a_writer_of_oneflows_tables_takes_nothing_of_who_has_the_folder_now(tmp_path, end):
    def writer(name, value):
        made = OneFlowWriter(tmp_path / "t", name, key_bytes=8, value_bytes=8, physical_block_size=512)
        made.put(np.arange(3), np.full((3, 2), value, np.float32))
        return made

    before = writer("before", 1.0)
    if end == "remove_snapshot":
        before.save()
    shutil.rmtree(tmp_path / "t")
    now = writer("now", 2.0)
    now.save()
    holder = (tmp_path / "t" / "LOCK").read_bytes()
    if end != "close":
        with pytest.raises(StorageError, match="LOCK was removed"):
            getattr(before, end)()
    before.close()
    assert (tmp_path / "t" / "LOCK").read_bytes() == holder
    now.close()
    assert oneflow_snapshots(tmp_path / "t") == ["now"]
    ((id_N, value_NV),) = OneFlowReader(tmp_path / "t", "now").scan()
    assert id_N.tolist() == [0, 1, 2] and (value_NV == 2).all()


def test_a_compaction_takes_nothing_of_who_has_the_folder_now(tmp_path):
    path, rng = tmp_path / "t", np.random.default_rng(0)
    with open_table(path, background=False) as table:
        rows = {}
        put_random(table, rows, rng, 3000)
        table.save_snapshot("a", {})
        put_random(table, rows, rng, 1500)
        table.save_snapshot("b", {})
        table.delete_snapshot("a")
    new = []

    def replace(done, total):
        if not new:
            shutil.rmtree(path)
            own = {}
            new.extend((open_table(path, background=False), own))
            put_random(new[0], own, rng, 3000)
            new[0].save_snapshot("b", {})
            put_random(new[0], own, rng, 3000)
            new[0].flush()

    with pytest.raises(StorageError):
        compact_snapshots(path, progress=replace)
    check(*new)
    new[0].close()
