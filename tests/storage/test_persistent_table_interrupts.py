"""A call that is stopped at any line has done all or nothing, later saves are whole, and nobody waits for ever."""

import os
import shutil

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import BrokenStoreError
from oneemb.storage.fs import _LockFile
from oneemb.storage.table.aio_reader import AioReader
from oneemb.storage.table.check import check_table
from oneemb.storage.table.chunk_files import ChunkFiles
from oneemb.storage.table.persistent_table import PersistentTable
from tests.support.interrupts import WAYS, count_lines, each_line, interrupted, some_lines
from tests.support.pairwise import covering
from tests.support.table_model import check, got, note, put_random, random_keys, random_rows, scanned

THREADS = Threads(2)


def open_table(path, background, io="pread"):
    # The kernel takes 30 ms to end a context of AIO: only where reads are what is stopped.
    return PersistentTable.open(
        str(path), row_width=40, physical_block_size=512, chunk_bytes=1, threads=THREADS, background=background, io=io
    )


class World:
    """A table of many small chunks, half of them garbage, with two snapshots; and what a call is to change it to."""

    def __init__(self, path, background, io="pread"):
        self.path, self.background, self.rng = path, background, np.random.default_rng(7)
        self.rows, self.saved = {}, {}
        shutil.rmtree(path, ignore_errors=True)
        self.table = open_table(path, background, io)
        for name in ("a", "b"):
            for _ in range(3):
                put_random(self.table, self.rows, self.rng, 170, ids=150)
            self.table.save_snapshot(name, {})
            self.saved[name] = dict(self.rows)
        put_random(self.table, self.rows, self.rng, 300, ids=150)
        # What the calls below bring.
        self.keys = random_keys(self.rng, 400, ids=150)
        self.values = random_rows(self.rng, 400, 40)

    def put(self):
        after = dict(self.rows)
        note(after, *self.keys, self.values)
        return lambda: self.table.put(*self.keys, self.values), after, self.saved

    def flush(self):
        return self.table.flush, self.rows, self.saved

    def get(self):
        out_UW = np.empty((400, 40), np.float32)
        return lambda: self.table.get(*self.keys, out_UW), self.rows, self.saved

    def save(self):
        return lambda: self.table.save_snapshot("c", {}), self.rows, self.saved | {"c": self.rows}

    def overwrite(self):
        return lambda: self.table.save_snapshot("a", {}, overwrite=True), self.rows, self.saved | {"a": self.rows}

    def delete(self):
        return lambda: self.table.delete_snapshot("a"), self.rows, {"b": self.saved["b"]}

    def load(self):
        return lambda: self.table.load_snapshot("a"), self.saved["a"], self.saved

    def compact(self):
        return self.table.compact, self.rows, self.saved

    def clear(self):
        return self.table.clear, {}, self.saved


CALLS = ["put", "flush", "get", "save", "overwrite", "delete", "load", "compact", "clear"]


def snapshots(table):
    """What the snapshots hold; the table's rows are those of the last one then."""
    found = {}
    for info in table.snapshots():
        table.load_snapshot(info.name)
        found[info.name] = scanned(table)
    return found


def check_stopped(tmp_path, call, way, background, number, **which):
    """which: the lines that count, see `AtLine`."""
    io = "auto" if call == "get" else "pread"
    line = World(tmp_path / "t", background, io)
    run = getattr(line, call)()[0]
    lines = each_line(run, way) if number is None else some_lines(count_lines(run, way, **which), number)
    line.table.close()
    stops = broken = 0
    for at in lines:
        world = World(tmp_path / "t", background, io)
        run, after, saved = getattr(world, call)()
        stopped, place = interrupted(run, at, way, **which)
        stops += stopped
        table = world.table
        try:
            now = scanned(table)
            if way == "signal":
                assert now in (world.rows, after), f"{place}: neither before nor after"
            else:  # a put may have kept some of its rows
                keys = world.rows | after
                for key, row in zip(keys, got(table, keys), strict=True):
                    assert row in (world.rows.get(key), after.get(key)), f"{place}: {key}"
            put_random(table, now, world.rng, 200, ids=150)
            check(table, now)
            table.save_snapshot("later", {})
            expected = now
            table.compact()
            check(table, now)
        except BrokenStoreError:
            assert way == "raise", place
            broken += 1
            expected = None
        table.close()
        assert not [name for name in os.listdir(tmp_path / "t" / "snapshots") if name.endswith(".tmp")] or stopped
        problems = check_table(str(tmp_path / "t")).problems
        assert not problems, f"{place}: {problems}"
        with open_table(tmp_path / "t", background) as again:
            found = snapshots(again)
            if expected is not None:
                assert found.pop("later") == expected, place
            assert found in (world.saved, saved), f"{place}: {sorted(found)}"
    assert stops
    assert broken == 0 or way == "raise"


@pytest.mark.parametrize("call, way, background", covering(CALLS, list(WAYS), (False, True)))
def test_a_call_that_is_stopped_is_done_or_not(tmp_path, call, way, background):
    check_stopped(tmp_path, call, way, background, 4)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["alone", "with threads"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_stopped_at_each_line_is_done_or_not(tmp_path, call, way, background):
    check_stopped(tmp_path, call, way, background, None)


@pytest.mark.parametrize("kind", [AioReader, ChunkFiles, _LockFile])
def test_what_is_stopped_before_it_has_anything_is_dropped_without_a_word(kind):
    nothing = kind.__new__(kind)
    del nothing  # what `__del__` raises fails the test
