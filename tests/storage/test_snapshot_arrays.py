"""Arrays that snapshots hold beside their rows: whole, checked, and kept by every tool."""

import json

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.table import snapshot_manifest
from oneemb.storage.table.check import check_table
from oneemb.storage.table.compact_snapshots import compact_snapshots
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_reader import SnapshotReader
from tests.support.table_model import put_random, scanned

ARRAYS = {
    "counts": np.arange(-5, 16).reshape(7, 3),
    "marks": np.arange(10, dtype=np.uint32),
    "bytes": np.frombuffer(b"hello", np.uint8),
    "nothing": np.empty((0, 4), np.float32),
}


def open_table(path):
    return PersistentTable.open(
        str(path), row_width=3, physical_block_size=512, chunk_bytes=1, threads=Threads(1), background=False
    )


@pytest.fixture
def table_path(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path / "t") as table:
        put_random(table, rows, rng, 60, ids=50)
        table.save_snapshot("with", {}, arrays=ARRAYS)
        put_random(table, rows, rng, 60, ids=50)
        table.save_snapshot("without", {})
    return tmp_path / "t"


def read(path, name):
    with SnapshotReader.open(path, name) as reader:
        return {array: reader.array(array) for array in reader.arrays}, scanned(reader)


def same(found):
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


def test_arrays_are_read_as_they_were_written(table_path):
    same(read(table_path, "with")[0])
    assert read(table_path, "without")[0] == {}
    assert check_table(table_path).problems == []
    with open_table(table_path) as table:  # as one that is open knows them, too
        table.load_snapshot("with")
        table.save_snapshot("with", {}, overwrite=True)
    assert read(table_path, "with")[0] == {}


def test_compaction_keeps_arrays(table_path):
    before = read(table_path, "with")[1]
    with open_table(table_path) as table:
        table.delete_snapshot("without")
    compact_snapshots(table_path)
    arrays, rows = read(table_path, "with")
    same(arrays)
    assert rows.keys() == before.keys() and check_table(table_path).problems == []


def test_every_byte_of_an_array_is_checked(table_path):
    path = table_path / "snapshots" / "with.snapshot"
    data = path.read_bytes()
    record = SnapshotFiles(LocalFileSystem(), str(path.parent)).read("with")
    begin = min(array.offset for array in record.arrays.values())
    for at in range(begin, len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(CorruptTableError, match="array '.*' at offset .* has checksum"):
            read(table_path, "with")
        assert len(check_table(table_path).problems) == 1
    for size in range(begin, len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptTableError, match="or the file ends before"):
            read(table_path, "with")


@pytest.mark.parametrize(
    "arrays",
    [3, [3], [["a", "<i8", [1]]], [[1, "<i8", [1], "0" * 16]], [["a", "O", [1], "0" * 16]],
     [["a", "<i8", [-1], "0" * 16]], [["a", "<i8", [], "0" * 16]], [["a", "<i8", [2**40, 2**40], "0" * 16]],
     [["a", "<i8", [1], 5]],
     [["a", "<i8", [0], "0" * 16], ["a", "<i8", [0], "0" * 16]]],
    ids=str,
)  # fmt: skip
def test_a_manifest_that_makes_no_sense_is_refused(table_path, monkeypatch, arrays):
    def changed(its):
        return json.dumps({**its, "arrays": arrays} if "chunks" in its else its)

    monkeypatch.setattr(snapshot_manifest, "to_json", changed)
    with open_table(table_path) as table:
        table.save_snapshot("odd", {})
    monkeypatch.undo()
    with pytest.raises(CorruptTableError, match="arrays|array|sums of 16"):
        SnapshotFiles(LocalFileSystem(), str(table_path / "snapshots")).read("odd")
