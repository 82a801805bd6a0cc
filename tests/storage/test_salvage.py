"""Salvage: every row whose checksum holds is in the new table, with its bytes; the report counts the others."""

import errno
import os
import shutil

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.table.check import check_table
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.salvage import salvage_table
from oneemb.storage.table.snapshot_reader import SnapshotReader, read_snapshot_info
from tests.support.table_model import put_random, scanned

THREADS = Threads(1)
SNAPSHOTS = ("a", "b", "c")


def open_table(path, row_width=3):
    return PersistentTable.open(
        str(path), row_width=row_width, physical_block_size=512, chunk_bytes=1, threads=THREADS, background=False
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A table of several chunks and three snapshots that share them, and what each snapshot holds."""
    path = tmp_path_factory.mktemp("saved") / "t"
    rng, rows, truth = np.random.default_rng(0), {}, {}
    with open_table(path) as table:
        for name in SNAPSHOTS:
            for _ in range(4):
                put_random(table, rows, rng, 1200, ids=2000)
                table.flush()
            table.save_snapshot(name, {"of": name})
            truth[name] = dict(rows)
    return path, truth


@pytest.fixture
def table(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "t")
    return tmp_path / "t"


def held(path):
    """{snapshot: its rows}."""
    found = {}
    for info in read_snapshot_info(path):
        with SnapshotReader.open(path, info.name) as reader:
            found[info.name] = scanned(reader)
            assert len(found[info.name]) == len(reader)
    return found


def check(table, to, truth):
    """Salvage, and compare with what the snapshots held; returns the report."""
    before = {file: file.read_bytes() for file in table.rglob("*.*") if file.is_file()}
    result = salvage_table(str(table), str(to))
    assert {file: file.read_bytes() for file in table.rglob("*.*") if file.is_file()} == before
    assert check_table(to).problems == []
    damage = check_table(table)
    assert result.by_snapshot == damage.by_snapshot
    found = held(to)
    for name, rows in truth.items():
        report = result.by_snapshot.get(name)
        if report is None or "file" in report.unreadable:
            assert name not in found
            continue
        assert found[name].items() <= rows.items()
        assert report.rows == len(rows) and len(rows) - len(found[name]) == report.rows_lost
        assert report.whole == (report.rows_lost == 0 and not report.unreadable)
        lost = [key for key in rows if key not in found[name]]
        for table_id, count in report.lost.items():
            assert sum(key[0] == table_id for key in lost) >= count
    return result


def test_a_sound_table_is_copied_bit_for_bit(table, tmp_path, saved):
    result = check(table, tmp_path / "new", saved[1])
    assert result.rows_lost == 0 and held(tmp_path / "new") == saved[1]
    old = {info.name: info for info in read_snapshot_info(table)}
    for info in read_snapshot_info(tmp_path / "new"):
        assert (info.identity, info.sequence, info.meta) == (
            old[info.name].identity, old[info.name].sequence, old[info.name].meta,
        )  # fmt: skip


@pytest.mark.parametrize("every", [pytest.param(61, marks=pytest.mark.slow), 30011])
def test_a_flipped_byte_costs_the_rows_that_it_is_in(table, tmp_path, saved, every):
    n = 0
    for file in sorted(f for f in table.rglob("*.*") if f.is_file()):
        data = file.read_bytes()
        for at in range(n % 1000, len(data), every):
            file.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
            n += 1
            result = check(table, tmp_path / f"new-{n}", saved[1])
            shutil.rmtree(tmp_path / f"new-{n}")
            if file.suffix == ".rows":
                assert all(report.rows_lost <= 42 for report in result.by_snapshot.values())  # rows of a block
            if file.suffix == ".keys":  # A run, or none where its checksum or the header is what is damaged.
                assert all(report.rows_lost < report.rows for report in result.by_snapshot.values())
        file.write_bytes(data)
    assert n >= 9


@pytest.mark.parametrize("suffix", [".rows", ".keys", ".snapshot"])
def test_a_file_that_is_missing_or_cut_off(table, tmp_path, saved, suffix):
    for n, file in enumerate(sorted(f for f in table.rglob(f"*{suffix}"))[:2]):
        data = file.read_bytes()
        file.unlink()
        result = check(table, tmp_path / f"missing-{n}", saved[1])
        assert result.problems
        file.write_bytes(data[: len(data) // 2])
        check(table, tmp_path / f"cut-{n}", saved[1])
        file.write_bytes(data)


class _BadSectors(LocalFileSystem):
    """Reads that touch a bad sector fail with EIO, as those of a failing disk do."""

    def __init__(self, path, *offsets):
        super().__init__()
        self._bad, self._offsets, self._files = str(path), offsets, set()

    def open(self, path, **how):
        file = super().open(path, **how)
        self._files.discard(file)
        if path == self._bad:
            self._files.add(file)
        return file

    def read_into(self, file, out, offset):
        if file in self._files and any(offset <= bad < offset + len(out) for bad in self._offsets):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_into(file, out, offset)


@pytest.mark.parametrize("suffix", [".rows", ".keys"])
def test_what_a_failing_disk_cannot_read_costs_only_the_rows_there(table, tmp_path, saved, suffix):
    file = max(table.rglob(f"*{suffix}"), key=lambda file: file.stat().st_size)
    fs = _BadSectors(file, *range(5000, file.stat().st_size, 7001))
    result = salvage_table(str(table), str(tmp_path / "new"), fs=fs)
    assert result.by_snapshot == check_table(table, fs=fs).by_snapshot
    found = held(tmp_path / "new")
    assert 0 < result.rows_lost < sum(map(len, saved[1].values())) / 2
    for name in SNAPSHOTS:
        assert found[name].items() <= saved[1][name].items()
        assert len(found[name]) == len(saved[1][name]) - result.by_snapshot[name].rows_lost


def test_all_rows_are_found_without_any_snapshot(table, tmp_path, saved):
    for file in (table / "snapshots").iterdir():
        data = bytearray(file.read_bytes())
        data[140] ^= 1  # A byte of the manifest's JSON: its checksum fails.
        file.write_bytes(data)
    result = salvage_table(str(table), str(tmp_path / "new"), unlisted=("all", "0" * 32, {}))
    assert all("file" in result.by_snapshot[name].unreadable for name in SNAPSHOTS)
    found = held(tmp_path / "new")
    assert found.keys() == {"all"} and found["all"] == saved[1]["c"]  # No row was moved or erased.
    (info,) = read_snapshot_info(tmp_path / "new")
    assert info.meta["salvaged"] == {"from_chunks": True} and info.identity == "0" * 32
    assert check_table(tmp_path / "new").problems == []


def test_a_damaged_block_is_left_out_of_all_rows_and_no_older_row_takes_its_place(table, tmp_path, saved):
    file = max(table.rglob("*.rows"), key=lambda file: file.name)
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    file.write_bytes(data)
    result = salvage_table(str(table), str(tmp_path / "new"), unlisted=("all", "0" * 32, {}))
    found = held(tmp_path / "new")["all"]
    assert found.items() <= saved[1]["c"].items()
    assert 0 < len(saved[1]["c"]) - len(found) == result.by_snapshot["all"].rows_lost <= 42


@pytest.mark.parametrize("at", [0, 5000, -100])
def test_a_snapshot_file_that_the_disk_cannot_read_costs_that_snapshot_or_a_part_of_it(table, tmp_path, saved, at):
    file = table / "snapshots" / "b.snapshot"
    fs = _BadSectors(file, at % file.stat().st_size)
    result = salvage_table(str(table), str(tmp_path / "new"), fs=fs, unlisted=("all", "0" * 32, {}))
    assert {name: one.whole for name, one in result.by_snapshot.items()} == {
        "a": True,
        "b": False,
        "c": True,
        "all": True,
    }
    assert not check_table(table, fs=fs).by_snapshot["b"].whole
    found = held(tmp_path / "new")
    assert all(found[name] == saved[1][name] for name in "ac") and found.get("b", {}).items() <= saved[1]["b"].items()


def files_of_another_chunk(path, of):
    """A table of two snapshots, one a chunk; keys of the first chunk have newer rows in the second one. Then both files
    of the first chunk are replaced: by those of the second chunk (which gets those of the first), or by those of
    another table. Returns the rows that each snapshot had."""
    truth = {}

    def make(path, ids_of, value):
        rows = {}
        for n, (name, ids) in enumerate(zip("ab", ids_of, strict=True)):
            with open_table(path) as table:
                if n:
                    table.load_snapshot("a")
                row_NW = np.full((len(ids), 3), value + n, np.float32)
                table.put(np.zeros(len(ids), np.int32), np.array(ids, np.int64), row_NW)
                table.save_snapshot(name, {})
            rows = rows | {(0, id): row.tobytes() for id, row in zip(ids, row_NW, strict=True)}
            truth[name] = rows

    make(path.parent / "other", (range(200, 330), range(500, 550)), 7)
    make(path, (range(100), [*range(50), *range(100, 150)]), 1)
    one, other = sorted((path / "chunks").glob("*.keys"))[:2]
    if of == "another table":
        other = path.parent / "other" / "chunks" / one.name
    for suffix in (".keys", ".rows"):
        files = one.with_suffix(suffix), other.with_suffix(suffix)
        data = [file.read_bytes() for file in files]
        files[0].write_bytes(data[1])
        files[1].write_bytes(data[0])
    return truth


@pytest.mark.parametrize("of", ["the table", "another table"])
def test_no_row_is_taken_from_the_files_of_another_chunk(tmp_path, of):
    """The checksums in such files hold, but the lists of the snapshots are of other rows."""
    truth = files_of_another_chunk(tmp_path / "t", of)
    result = check(tmp_path / "t", tmp_path / "new", truth)
    assert result.by_snapshot["a"].lost_unknown == 100


def test_a_snapshot_file_of_another_table_costs_the_rows_of_that_snapshot_alone(tmp_path):
    truth = {}
    for name, size in (("t", 100), ("other", 300), ("third", 40)):
        with open_table(tmp_path / name) as table:
            put_random(table, rows := {}, np.random.default_rng(size), size)
            table.save_snapshot(name, {})
        truth[name] = rows
    for name in ("other", "third"):  # One is of a longer chunk of this number, one of a shorter one.
        shutil.copy(tmp_path / name / "snapshots" / f"{name}.snapshot", tmp_path / "t" / "snapshots")
    result = check(tmp_path / "t", tmp_path / "new", truth)
    assert result.by_snapshot["t"].whole and held(tmp_path / "new")["t"] == truth["t"]
    assert all(result.by_snapshot[name].lost_unknown == len(truth[name]) for name in ("other", "third"))
