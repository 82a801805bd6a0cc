"""The check of a table: every byte flipped in turn, every file missing, cut or swapped, references that contradict."""

import shutil

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.table.check import check_table
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.salvage import salvage_table
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_reader import SnapshotReader, read_snapshot_info
from oneemb.storage.table.table_info import table_info
from tests.support.table_model import put_random, scanned

THREADS = Threads(1)


def open_table(path, row_width=3):
    return PersistentTable.open(
        str(path), row_width=row_width, physical_block_size=512, chunk_bytes=1, threads=THREADS, background=False
    )


@pytest.fixture
def table_path(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path / "t") as table:
        for name in ("a", "b"):
            put_random(table, rows, rng, 60, ids=50)
            table.save_snapshot(name, {})
    return tmp_path / "t"


def files_of(path):
    return sorted(f for f in path.rglob("*.*") if f.is_file())


def read_all(path):
    """What a reader gives of every snapshot; None where it is refused."""
    found = {}
    for name in SnapshotFiles(LocalFileSystem(), f"{path}/snapshots").names():
        try:
            with SnapshotReader.open(path, name) as reader:
                found[name] = scanned(reader)
        except StorageError:
            found[name] = None
    return found


def test_a_sound_table_has_no_problems(table_path):
    result = check_table(table_path)
    infos = read_snapshot_info(table_path)
    assert result.problems == [] and result.snapshots == ["a", "b"]
    assert result.rows == sum(info.rows for info in infos)
    # Two snapshots of one chunk: its blocks are read once.
    (rows_file,) = (f for f in files_of(table_path) if f.suffix == ".rows")
    assert result.bytes_read == rows_file.stat().st_size - 4096


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 17])
def test_every_flipped_byte_is_found_or_harmless(table_path, every):
    truth = read_all(table_path)
    found = harmless = 0
    for file in files_of(table_path):
        data = file.read_bytes()
        for at in range(0, len(data), every):
            if file.suffix == ".rows" and 256 < at < 4000:
                continue  # Never read; the ends of that gap are flipped.
            file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
            if check_table(table_path).problems:
                found += 1
            else:
                harmless += 1
                assert read_all(table_path) == truth, (file, at)
                assert file.suffix == ".rows" and 128 <= at < 4096
        file.write_bytes(data)
    gaps = [*range(128, 257), *range(4000, 4096)]
    assert found > 2500 // every and harmless == sum(at % every == 0 for at in gaps)
    print(f"{found} flips found, {harmless} harmless")


@pytest.mark.parametrize("bit", [0, 7])
def test_damage_names_file_offset_and_key(table_path, bit):
    (file,) = (f for f in files_of(table_path) if f.suffix == ".rows")
    data = bytearray(file.read_bytes())
    data[4096 + 512 + 100] ^= 1 << bit
    file.write_bytes(data)
    (problem,) = check_table(table_path).problems
    assert str(file) in problem and "block 1 at offset 4608" in problem and "id " in problem


def test_two_damaged_blocks_are_two_problems(table_path):
    (file,) = (f for f in files_of(table_path) if f.suffix == ".rows")
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    data[4096 + 512] ^= 1
    file.write_bytes(data)
    assert len(check_table(table_path).problems) == 2


def test_files_that_are_missing_cut_or_swapped_are_found(table_path, tmp_path):
    with open_table(table_path) as table:
        table.load_snapshot("b")
        put_random(table, {}, np.random.default_rng(3), 60, ids=50)
        table.save_snapshot("c", {})
    pairs = {}
    for file in files_of(table_path):
        pairs.setdefault(file.suffix, []).append(file)
    for file in files_of(table_path):
        changes = [lambda f: f.unlink(), lambda f: f.write_bytes(f.read_bytes()[:-1]), lambda f: f.write_bytes(b"")]
        other = next(f for f in pairs[file.suffix] if f != file)
        changes.append(lambda f, other=other: shutil.copy(other, f))
        for change in changes if file.suffix != ".snapshot" else changes[1:]:
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            shutil.copytree(table_path, tmp_path / "copy")
            change(tmp_path / "copy" / file.relative_to(table_path))
            assert check_table(tmp_path / "copy").problems, file


def forge(path, name, change):
    """Writes a snapshot file whose checksums are right and whose contents are not."""
    files = SnapshotFiles(LocalFileSystem(), f"{path}/snapshots")
    record = files.read(name)
    for part in record.parts:
        part.bit_N = files.read_bits(record, part).copy()
        change(part)
    files.write(record)


def test_references_that_contradict_each_other_are_found(table_path):
    def fewer_rows(part):
        part.rows -= 1

    forge(table_path, "a", fewer_rows)
    (problem,) = check_table(table_path).problems
    assert "chunk 1 must have" in problem


def test_a_row_beyond_the_blocks_is_found(table_path):
    def beyond(part):
        part.bit_N[-1] |= 0x80

    forge(table_path, "a", beyond)
    assert any("names rows beyond" in problem for problem in check_table(table_path).problems)


def test_a_key_that_is_twice_in_a_snapshot_is_found(table_path):
    # The later snapshot's list, with the rows of the earlier one that it has replaced.
    files = SnapshotFiles(LocalFileSystem(), f"{table_path}/snapshots")
    a, b = files.read("a"), files.read("b")
    early = files.read_bits(a, a.parts[0])

    def both(part):
        part.bit_N[: len(early)] |= early
        part.rows = int(np.unpackbits(part.bit_N).sum())

    forge(table_path, "b", both)
    (problem,) = check_table(table_path).problems
    shared = int(np.unpackbits(early).sum()) + b.parts[0].rows - files.read("b").parts[0].rows
    assert f"{a.info.rows - shared} keys of chunk 1 twice" in problem

    with pytest.raises(StorageError, match="twice.* If `oneemb check` says the same of .*, the snapshot there contra"):
        salvage_table(str(table_path), f"{table_path}.new")


def test_files_that_no_snapshot_needs_are_named_and_no_problem(table_path):
    for name in ("chunks/000000000077.rows", "snapshots/x.snapshot.tmp"):
        (table_path / name).write_bytes(b"?")
    result = check_table(table_path)
    assert result.problems == []
    assert result.unneeded == [f"{table_path}/chunks/000000000077.rows", f"{table_path}/snapshots/x.snapshot.tmp"]


def test_beside_a_live_writer_there_is_no_problem(table_path):
    with open_table(table_path) as table:
        table.load_snapshot("a")
        put_random(table, {}, np.random.default_rng(3), 90, ids=50)
        table.flush()
        assert check_table(table_path).problems == []
        table.save_snapshot("c", {})
        assert check_table(table_path).snapshots == ["a", "b", "c"]


@pytest.mark.parametrize("what", ["chunks alone", "deleted", "replaced"])
def test_a_snapshot_that_a_writer_deletes_or_replaces_meanwhile_is_no_problem(table_path, what):
    class Writer(LocalFileSystem):
        done = False

        def open(self, path, *, direct=False):
            if path.endswith(".keys") and not self.done:
                self.done = True
                with open_table(table_path) as table:
                    for name in ("a", "b") if what != "chunks alone" else ():
                        if what == "deleted":
                            table.delete_snapshot(name)
                        else:
                            table.save_snapshot(name, {}, overwrite=True)
                for file in files_of(table_path) if what == "chunks alone" else ():
                    if file.suffix != ".snapshot":
                        file.unlink()
            return super().open(path, direct=direct)

    problems = check_table(table_path, fs=Writer()).problems
    assert bool(problems) == (what == "chunks alone")


def test_progress_ends_with_all_bytes(table_path):
    told = []
    check_table(table_path, progress=lambda *now: told.append(now))
    assert told[-1][0] == told[-1][1] > 0


def test_a_folder_without_a_table_is_an_error_not_a_sound_table(tmp_path):
    for look in (check_table, table_info):
        with pytest.raises(StorageError, match="no table of oneemb"):
            look(tmp_path)


def test_what_lies_at_a_path_is_counted(table_path):
    info = table_info(table_path)
    assert [s.name for s in info.snapshots] == ["a", "b"] and info.holder is None and info.damaged == {}
    assert info.disk_bytes == sum(f.stat().st_size for f in files_of(table_path)) and info.unsaved_bytes == 0
    assert info.missing == {}
    rows = {}
    for found in read_all(table_path).values():
        for key, row in found.items():
            rows.setdefault(key, set()).add(row)
    versions = sum(map(len, rows.values()))
    assert info.live_bytes == int(versions * ((512 + 4) / 42 + 12)) and info.chunks == 1
    assert info.garbage_bytes == info.disk_bytes - info.live_bytes
    with open_table(table_path) as table:
        table.load_snapshot("a")
        put_random(table, {}, np.random.default_rng(3), 90, ids=50)
        table.flush()
        busy = table_info(table_path)
        assert "process" in busy.holder and busy.disk_bytes - busy.unsaved_bytes == info.disk_bytes < busy.disk_bytes
    (file,) = (f for f in files_of(table_path) if f.name == "a.snapshot")
    file.write_bytes(file.read_bytes()[:150])
    assert list(table_info(table_path).damaged) == ["a"]
