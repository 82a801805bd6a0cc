"""Every byte of a small table is flipped in turn: what is read is right or an error, never wrong, never a crash."""

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import BrokenStoreError, CorruptTableError, FormatVersionError
from oneemb.storage.table import snapshot_load
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import SnapshotReader
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.table_model import check, got, put_random, scanned

THREADS = Threads(1)


def open_table(fs, background=False):
    return PersistentTable.open(
        "/t", row_width=9, physical_block_size=512, chunk_bytes=1, threads=THREADS, background=background, fs=fs
    )


def small_table():
    """A disk with one snapshot of two chunks, and its rows."""
    fs, rows, rng = FaultyFileSystem(), {}, np.random.default_rng(3)
    with open_table(fs) as table:
        put_random(table, rows, rng, 900, ids=400)
        put_random(table, rows, rng, 10, ids=400)
        table.save_snapshot("s", {"step": 1})
        assert len(fs.names("/t/chunks")) == 4
    return fs, rows


def read_table(fs, rows):
    with open_table(fs) as table:
        assert table.load_snapshot("s") == {"step": 1}
        check(table, rows)


def read_snapshot(fs, rows):
    with SnapshotReader.open("/t", "s", fs=fs) as reader:
        assert reader.info.meta == {"step": 1}
        assert scanned(reader) == rows


def files_of(fs):
    """The files of a table, but for LOCK, which no row depends on."""
    paths = [f"/t/{folder}/{name}" for folder in ("chunks", "snapshots") for name in fs.names(f"/t/{folder}")]
    return [(path, fs.entries[path]) for path in sorted(paths)]


def flips(fs, rows, read, step, rows_step):
    """Flip one bit of each `step`-th byte, of files of rows of each `rows_step`-th.

    Returns how many flips were an error and how many changed nothing.
    """
    detected = harmless = 0
    for path, inode in files_of(fs):
        clean = bytes(inode.now)
        for offset in range(0, len(clean), rows_step if path.endswith(".rows") else step):
            inode.now[offset] ^= 1 << (offset % 8)
            copy = next(disk for fate, disk in fs.survivors(torn=0) if fate == "kept")
            inode.now[offset] ^= 1 << (offset % 8)
            try:
                read(copy, rows)
                harmless += 1
                assert path.endswith(".rows"), f"byte {offset} of {path} was never read"
            except CorruptTableError as error:
                detected += 1
                assert path in str(error), f"byte {offset} of {path}: {error}"
                assert "offset" in str(error)
    return detected, harmless


@pytest.mark.parametrize("read, rows_step", [(read_table, 305), (read_snapshot, 61)])
def test_a_flipped_bit_is_an_error_or_harmless(read, rows_step):
    fs, rows = small_table()
    detected, harmless = flips(fs, rows, read, 61, rows_step)
    print(f"{detected} detected, {harmless} harmless")
    # Harmless are the zeros after the header of a rows file, and blocks without a live row.
    assert detected > 10 * 8 and harmless < detected


@pytest.mark.slow
@pytest.mark.parametrize("read", [read_table, read_snapshot])
def test_every_flipped_byte_is_an_error_or_harmless(read):
    fs, rows = small_table()
    detected, harmless = flips(fs, rows, read, 1, 1)
    total = sum(len(inode.now) for _, inode in files_of(fs))
    print(f"{detected} detected, {harmless} harmless, {total} bytes")
    assert detected + harmless == total and harmless < detected


def test_a_reader_that_compares_nothing_is_found_out():
    fs, rows = small_table()
    with pytest.raises(AssertionError, match="was never read"):
        flips(fs, rows, lambda fs, rows: None, 61, 61)


def test_the_error_names_file_offset_key_and_both_checksums():
    fs, rows = small_table()
    with open_table(fs) as table:
        table.load_snapshot("s")
        path = "/t/chunks/000000000001.rows"
        fs.entries[path].now[4096 + 512 + 40] ^= 4
        wrong = []
        for key, row in rows.items():
            try:
                assert got(table, [key]) == [row]
            except CorruptTableError as error:
                wrong.append((key, str(error)))
        assert wrong
        for (t, i), text in wrong:
            assert path in text and "offset 4608" in text and f"table {t}, id {i}" in text
            assert "written as" in text and "oneemb check" in text


def test_a_damaged_snapshot_keeps_every_chunk_until_it_is_deleted():
    fs, rows = small_table()
    with open_table(fs) as table:
        table.load_snapshot("s")
        table.save_snapshot("t", {})
    before = sorted(fs.names("/t/chunks"))
    fs.entries["/t/snapshots/s.snapshot"].now[300] ^= 1
    with open_table(fs) as table:
        assert list(table.recovery.damaged) == ["s"] and "/t/snapshots/s.snapshot" in table.recovery.damaged["s"]
        assert sorted(fs.names("/t/chunks")) == before
        with pytest.raises(CorruptTableError, match="s.snapshot.*offset 128"):
            table.load_snapshot("s")
        table.load_snapshot("t")
        check(table, rows)
        table.delete_snapshot("t")
        table.clear()
        assert fs.names("/t/chunks"), "chunks that the damaged snapshot may need"
        table.delete_snapshot("s")
        assert not fs.names("/t/chunks") and not table.recovery.damaged


@pytest.mark.parametrize("suffix", [".rows", ".keys"])
@pytest.mark.parametrize("how", ["missing", "short", "swapped"])
def test_a_lost_file_is_an_error_that_names_it(suffix, how):
    fs, rows = small_table()
    path = f"/t/chunks/000000000002{suffix}"
    if how == "missing":
        del fs.entries[path]
    elif how == "short":
        del fs.entries[path].now[-100:]
    else:
        fs.entries[path].now[:] = fs.entries[path.replace("2.", "1.")].now
    for read in (read_table, read_snapshot):
        with pytest.raises(CorruptTableError, match=path.replace(".", r"\.")):
            read(next(disk for fate, disk in fs.survivors(torn=0) if fate == "kept"), rows)


def test_a_file_of_another_format_is_told_from_a_damaged_one():
    from oneemb.kernels.checksum import xxh64

    fs, rows = small_table()
    data = fs.entries["/t/chunks/000000000001.keys"].now
    data[8] = 7
    data[120:128] = xxh64(bytes(data[:120])).to_bytes(8, "little")
    with pytest.raises(FormatVersionError, match=r"000000000001.keys has format 7.*reads format 1"):
        read_table(fs, rows)


def test_a_key_that_is_in_a_snapshot_twice_is_named_and_the_table_stays_as_it_was(monkeypatch):
    fs, _ = small_table()
    honest, repeated = snapshot_load._keys_of, []

    def repeat_first(keys, row_N):
        table_N, id_N = (array.copy() for array in honest(keys, row_N))
        table_N[1:2], id_N[1:2] = table_N[:1], id_N[:1]
        repeated.extend(zip(table_N[:1].tolist(), id_N[:1].tolist(), strict=True))
        return table_N, id_N

    monkeypatch.setattr(snapshot_load, "_keys_of", repeat_first)
    with open_table(fs) as table:
        rows = {}
        put_random(table, rows, np.random.default_rng(0), 50, ids=20)
        with pytest.raises(CorruptTableError, match="is twice in the snapshot 's'; run `oneemb check`") as caught:
            table.load_snapshot("s")
        assert f"table {repeated[0][0]}, id {repeated[0][1]} " in str(caught.value)
        check(table, rows)


def table_with_unsaved_rows(fs, background):
    """A table whose snapshot "s" is damaged, with rows on disk and in memory that are not in it; and these rows."""
    table, rows, rng = open_table(fs, background), {}, np.random.default_rng(1)
    for size in (700, 300, 40):
        put_random(table, rows, rng, size, ids=300)
        if size > 40:
            table.flush()
    gone = list(rows)[::7]
    table.erase(np.array([t for t, _ in gone], np.int32), np.array([i for _, i in gone], np.int64))
    for key in gone:
        del rows[key]
    fs.entries["/t/chunks/000000000002.keys"].now[200] ^= 1  # The first chunk of "s" is sound.
    return table, rows


@pytest.mark.parametrize("background", [False, True])
def test_a_load_that_fails_half_way_leaves_all_rows_those_in_memory_too(background):
    fs, saved = small_table()
    table, rows = table_with_unsaved_rows(fs, background)
    with table:
        for _ in range(2):
            with pytest.raises(CorruptTableError, match=r"000000000002.keys"):
                table.load_snapshot("s")
            check(table, rows)
            put_random(table, rows, np.random.default_rng(2), 500, ids=300)
            check(table, rows)
        assert table.compact().chunks or background, "its thread may have compacted all"
        table.save_snapshot("t", {})
        fs.entries["/t/chunks/000000000002.keys"].now[200] ^= 1
        table.load_snapshot("s")
        check(table, saved)
        table.load_snapshot("t")
        check(table, rows)


def test_a_table_whose_rows_cannot_be_read_again_after_a_failed_load_is_broken_and_says_what_to_do():
    fs, _ = small_table()
    table, rows = table_with_unsaved_rows(fs, False)
    with table:
        table.save_snapshot("t", {})
        for path in fs.entries:
            if path.endswith(".keys") and path > "/t/chunks/000000000003":
                fs.entries[path].now[200] ^= 1
        with pytest.raises(CorruptTableError, match=r"000000000002.keys") as caught:
            table.load_snapshot("s")
        assert "could not be built again" in caught.value.__notes__[0]
        with pytest.raises(BrokenStoreError, match="Its snapshots are complete; close it, open it again and load one"):
            table.get(np.zeros(1, np.int32), np.zeros(1, np.int64), np.empty((1, 9), np.float32))
    for path in fs.entries:
        if path.endswith(".keys") and path > "/t/chunks/000000000003":
            fs.entries[path].now[200] ^= 1
    with open_table(fs) as table:
        table.load_snapshot("t")
        check(table, rows)
