"""File calls fail, each in turn, once or until space is freed: clear errors, no lost row, no harmed snapshot."""

import errno
import itertools
import os
import shutil

import numpy as np
import pytest

from oneemb.storage.errors import StorageError
from oneemb.storage.table import row_writer
from oneemb.storage.table.chunk_files import ChunkFile
from tests.storage.test_persistent_table_crash import (
    World,
    clear_and_save,
    compact,
    contradictions,
    delete,
    load,
    open_table,
    overwrite,
    put,
    save,
)
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.inside import check_chunk_totals
from tests.support.table_model import check, got, put_random, scanned


class Failing:
    """Fails the counted call of this number, or all that need space from it on."""

    def __init__(self, fs, number, code, until_freed):
        self.fs, self.number, self.code, self.until_freed = fs, len(fs.calls) + number, code, until_freed
        self.failed = None

    def __call__(self, call, path):
        if call in ("open", "read"):
            return
        now = len(self.fs.calls) - 1
        again = self.until_freed and now > self.number and call in ("create", "write")
        if now == self.number or again:
            self.failed = self.failed or f"{call} {os.path.basename(path)}"
            raise OSError(self.code, os.strerror(self.code))


def put_pending(world, attempted):
    """After a failed operation: each row is the old one or one that was put, and the model learns which."""
    for key, row in zip(world.rows | attempted, got(world.table, world.rows | attempted), strict=True):
        assert row in (world.rows.get(key), attempted.get(key)), f"{key} is neither the old row nor the new one"
        if row is not None:
            world.rows[key] = row
    check(world.table, world.rows)


class Attempts(World):
    """Notes what a put tries before it can fail."""

    attempted: dict = {}

    def put(self, size):
        self.attempted = {}

        class Noting:
            row_width = self.table.row_width

            def put(_, table_U, id_U, row_UW):
                for t, i, row in zip(table_U.tolist(), id_U.tolist(), row_UW, strict=True):
                    self.attempted[t, i] = row.tobytes()
                self.table.put(table_U, id_U, row_UW)

        put_random(Noting(), self.rows, self.rng, size, ids=150)


def failed_call(operation, code, until_freed, number):
    """Run the operation with one call failing, and check the table. Returns the call; None if there are fewer calls."""
    fs = FaultyFileSystem()
    world = Attempts(fs)
    before, rows_before = dict(world.saved), dict(world.rows)
    fs.fail = failing = Failing(fs, number, code, until_freed)
    raised = None
    try:
        operation(world)
    except StorageError as error:
        raised = error
        assert os.strerror(code) in str(error) and "/t/" in str(error), f"an error that does not say what: {error}"
    if failing.failed is None:
        assert raised is None
        return None
    if raised is not None:
        if operation in (load, clear_and_save):
            world.rows = scanned(world.table)
            whole = [rows_before, dict(before["a"][1]), *([{}] if operation is clear_and_save else [])]
            assert world.rows in whole, f"after {failing.failed}: some of the rows, and not others"
        else:
            put_pending(world, world.attempted)
    # Space is free again: everything works, and the snapshots of before are there.
    fs.fail = None
    check_chunk_totals(world.table)
    check(world.table, world.rows)
    held = {info.name: (info.meta["n"], None) for info in world.table.snapshots()}
    assert set(before) <= set(held) | ({"b"} if operation is delete else set())
    world.put(100)
    world.save("z")
    check(world.table, world.rows)
    world.table.load_snapshot("z")
    check_chunk_totals(world.table)
    check(world.table, world.rows)
    expected = {}
    for info in world.table.snapshots():
        n = world.table.load_snapshot(info.name)["n"]
        expected[info.name] = (n, scanned(world.table))
        for known in (before.get(info.name), world.saved.get(info.name)):
            if known is not None and known[0] == n:
                assert known[1] == expected[info.name][1], f"{info.name} changed"
    world.table.load_snapshot("z")
    for fate, disk in fs.survivors(torn=1, seed=number):
        wrong = contradictions(disk, [expected])
        assert not wrong, f"power lost after recovery from {failing.failed}, {fate}: {wrong}"
    return failing.failed


OPERATIONS = [put, save, overwrite, load, delete, compact, clear_and_save]


@pytest.mark.parametrize(
    "operation, code, until_freed, first",
    [(operation, *how) for operation in OPERATIONS for how in [(errno.EIO, False, 0), (errno.ENOSPC, True, 1)]],
    ids=lambda its: getattr(its, "__name__", str(its)),
)
def test_a_failed_call_harms_nothing(operation, code, until_freed, first):
    """Calls 0, 2, 4 ... fail once (EIO), calls 1, 3, 5 ... fail until space is freed (ENOSPC)."""
    assert check_failures(operation, code, until_freed, first, 2) or operation is load


@pytest.mark.slow
@pytest.mark.parametrize("until_freed", [False, True], ids=["once", "until freed"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_any_failed_call_harms_nothing(operation, code, until_freed):
    assert check_failures(operation, code, until_freed, 0, 1) or operation is load


def check_failures(operation, code, until_freed, first, every):
    """Let each `every`-th call fail, in a run of its own; returns how many did."""
    for times, number in enumerate(itertools.count(first, every)):
        if failed_call(operation, code, until_freed, number) is None:
            return times


def test_a_table_that_trusts_a_chunk_after_a_failed_sync_is_found_out(monkeypatch):
    monkeypatch.setattr(ChunkFile, "suspect", property(lambda self: False, lambda self, value: None), raising=False)
    with pytest.raises(AssertionError, match="power lost after recovery from sync"):
        for number in range(100):
            assert failed_call(save, errno.EIO, False, number) is not None


def test_rows_whose_write_fails_beside_the_caller_stay_and_are_written_later(monkeypatch):
    monkeypatch.setattr(row_writer, "_RUN_BYTES", 4096)
    fs, rows, rng = FaultyFileSystem(), {}, np.random.default_rng(0)
    with open_table(fs, background=True) as table:
        put_random(table, rows, rng, 60)
        fs.fail = lambda call, path: os_error(errno.ENOSPC) if call == "write" else None
        failed = 0
        for _ in range(40):
            try:
                put_random(table, rows, rng, 7)
            except StorageError as error:
                assert "ENOSPC" in str(error)
                failed += 1
            check_readable(table, rows)
        assert failed > 20
        fs.fail = None
        put_random(table, rows, rng, 100)
        table.save_snapshot("s", {})
        check(table, rows)
    for _, disk in fs.survivors():
        with open_table(disk) as table:
            table.load_snapshot("s")
            check(table, rows)


def os_error(code):
    raise OSError(code, os.strerror(code))


def check_readable(table, rows):
    assert got(table, rows) == list(rows.values()) and len(table) == len(rows)


@pytest.mark.parametrize("code", [errno.EIO])
def test_a_read_that_fails_names_the_file_and_works_again(code):
    fs = FaultyFileSystem()
    world = World(fs)

    def fail(call, path):
        if call == "read" and path.endswith(".rows"):
            raise OSError(code, os.strerror(code))

    fs.fail = fail
    with pytest.raises(StorageError, match=r"could not read rows from /t/chunks/\d+.rows at offset \d+: EIO"):
        got(world.table, world.rows)
    fs.fail = None
    check(world.table, world.rows)


def test_a_directory_that_was_deleted_is_a_clear_error(tmp_path):
    from tests.storage.test_persistent_table import open_table as open_on_disk

    rows, rng = {}, np.random.default_rng(0)
    with open_on_disk(tmp_path / "t") as table:
        put_random(table, rows, rng, 1000)
        table.flush()
        shutil.rmtree(tmp_path / "t")
        with pytest.raises(StorageError, match="LOCK was removed, with its folder or alone"):
            for _ in range(100):
                put_random(table, rows, rng, 1000)
                table.save_snapshot("s", {}, overwrite=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_path_that_cannot_be_written_is_a_clear_error(tmp_path):
    from tests.storage.test_persistent_table import open_table as open_on_disk

    tmp_path.chmod(0o555)
    with pytest.raises(StorageError, match="EACCES.*right to write"):
        open_on_disk(tmp_path / "t")
