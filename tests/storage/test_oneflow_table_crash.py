"""Power is lost at every file call of a writer of OneFlow's tables: a snapshot is there with all rows, or is not."""

import numpy as np
import pytest

from oneemb.foreign.oneflow_reader import OneFlowReader
from oneemb.foreign.oneflow_writer import OneFlowWriter
from oneemb.storage.errors import SnapshotNotFoundError, StorageError
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.power_losses import power_losses

ROWS = {"first": 30, "second": 50}


def save(fs, name):
    size = ROWS[name]
    writer = OneFlowWriter("/t", name, key_bytes=8, value_bytes=8, physical_block_size=512, chunk_bytes=1, fs=fs)
    try:
        writer.put(np.arange(size), np.full((size, 2), size, np.float32))
        writer.put(np.arange(5), np.zeros((5, 2), np.float32))
        writer.save()
    finally:
        writer.close()


def found(fs, name):
    try:
        reader = OneFlowReader("/t", name, fs=fs)
    except SnapshotNotFoundError:
        return None
    return {
        id: value.tolist()
        for id_N, value_NV in reader.scan()
        for id, value in zip(id_N.tolist(), value_NV, strict=True)
    }


def expected(name):
    return {id: [0.0 if id < 5 else float(ROWS[name])] * 2 for id in range(ROWS[name])}


def test_power_is_lost_at_every_call_of_a_second_save():
    whole = FaultyFileSystem()
    save(whole, "first")
    begun = len(whole.calls)
    save(whole, "second")
    calls = [*whole.calls[begun:], "the end"]
    save(fs := FaultyFileSystem(), "first")
    seen = set()

    def look(disk, call, half, fate):
        assert found(disk, "first") == expected("first"), (calls[call - begun], half, fate)
        assert found(disk, "second") in (None, expected("second")), (calls[call - begun], half, fate)
        seen.add(found(disk, "second") is None)
        if found(disk, "second") is None:
            save(disk, "second")
            assert found(disk, "second") == expected("second")

    power_losses(fs, lambda: save(fs, "second"), look)
    assert seen == {True, False}


def test_power_is_lost_at_every_call_of_the_first_save():
    fs = FaultyFileSystem()

    def look(disk, call, half, fate):
        try:
            assert found(disk, "first") in (None, expected("first")), (fs.calls[call:], fate)
        except StorageError as error:
            assert "no table of OneFlow" in str(error) or "must hold a positive number" in str(error)

    power_losses(fs, lambda: save(fs, "first"), look)
    assert found(fs, "first") == expected("first")


def test_the_crash_test_notices_a_list_that_comes_before_its_index(monkeypatch):
    monkeypatch.setattr(FaultyFileSystem, "sync", lambda self, file: None)
    fs = FaultyFileSystem()
    save(fs, "first")
    ((fate, disk), *_) = fs.survivors()
    assert fate == "lost"
    with pytest.raises((StorageError, AssertionError)):
        assert found(disk, "first") == expected("first")


def test_a_full_disk_leaves_the_snapshots_that_are_there():
    fs = FaultyFileSystem()
    save(fs, "first")
    before = set(fs.entries)

    def full(call, path):
        if call == "write" and "value-" in path:
            raise OSError(28, "No space left on device")

    fs.fail = full
    with pytest.raises(StorageError, match="ENOSPC"):
        save(fs, "second")
    fs.fail = None
    assert set(fs.entries) == before
    assert found(fs, "first") == expected("first") and found(fs, "second") is None
    save(fs, "second")
    assert found(fs, "second") == expected("second")
