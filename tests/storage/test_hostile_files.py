"""Files whose checksums are right and whose contents are nonsense: a clear error, in little memory, before any use."""

import json
import struct
import tracemalloc

import numpy as np
import pytest

from oneemb.kernels.checksum import xxh64
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows
from oneemb.storage.table import chunk_damage, chunk_scan
from oneemb.storage.table.check import check_table
from oneemb.storage.table.compact_snapshots import compact_snapshots
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import SnapshotReader, read_snapshot_info
from oneemb.storage.table.table_info import table_info
from oneemb.storage.table.writer_lock import known_snapshots
from tests.storage.test_persistent_table_damage import open_table, small_table
from tests.support.table_model import scanned

SNAPSHOT, KEYS, ROWS = "/t/snapshots/s.snapshot", "/t/chunks/000000000001.keys", "/t/chunks/000000000001.rows"
HUGE = 1 << 60
MEMORY_MAX = 64 << 20


def sum_of(data):
    return xxh64(bytes(data)).to_bytes(8, "little")


def copy_of(fs):
    return next(disk for fate, disk in fs.survivors(torn=0) if fate == "kept")


def manifest_of(data):
    size = int.from_bytes(data[40:48], "little")
    return json.loads(data[128 : 128 + size])


def write_manifest(data, manifest, numbers=None):
    """A snapshot file with another manifest, every checksum right."""
    lists = data[128 + int.from_bytes(data[40:48], "little") + 8 :]
    body = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    body += b" " * (-len(body) % 8)
    header = bytearray(data[:120])
    header[40:48] = len(body).to_bytes(8, "little")
    for at, number in (numbers or {}).items():
        header[at : at + 8] = number.to_bytes(8, "little")
    data[:] = header + sum_of(header) + body + sum_of(body) + lists


def all_ways_of_reading(fs):
    """Each way to read the rows of a snapshot "s" whose files are wrong."""

    def load():
        with open_table(fs) as table:
            table.load_snapshot("s")
            scanned(table)

    def scan():
        with SnapshotReader.open("/t", "s", fs=fs) as reader:
            for _ in reader.scan():
                pass

    def get():
        with SnapshotReader.open("/t", "s", fs=fs) as reader:
            ids = np.arange(400) - 200
            reader.get(np.zeros(400, np.int32), ids, np.empty((400, reader.row_width), np.float32))

    return load, scan, get


@pytest.fixture
def little_memory(monkeypatch):
    """Fails the test when it takes much memory at once, aligned or not."""

    def bounded(size):
        assert size <= MEMORY_MAX, f"{size} bytes were asked for"
        return honest(size)

    honest = chunk_scan.aligned_bytes
    for module in (chunk_scan, chunk_damage):
        monkeypatch.setattr(module, "aligned_bytes", bounded)
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * MEMORY_MAX


def must_be_refused(fs, path, *, when_listed):
    """Every reader says that this file is corrupt; one that lists goes on without it."""
    for read in all_ways_of_reading(fs):
        with pytest.raises(CorruptTableError) as caught:
            read()
        assert path in str(caught.value), caught.value
    problems = check_table("/t", fs=fs).problems
    assert problems and any(path in problem for problem in problems)
    info = table_info("/t", fs=fs)
    if when_listed:
        with pytest.raises(CorruptTableError, match=f"{path}.*offset"):
            read_snapshot_info("/t", "s", fs=fs)
        assert read_snapshot_info("/t", fs=fs) == [] and list(info.damaged) == ["s"] and info.snapshots == []
        with open_table(fs) as table:
            assert list(table.recovery.damaged) == ["s"] and table.snapshots() == []
        with pytest.raises(CorruptTableError):
            compact_snapshots("/t", fs=fs)


NOT_NUMBERS = [None, "7", 7.5, True, [], {}, -1]
FIELDS = {
    "name": [None, 7, "t", [], {}],
    "sequence": [*NOT_NUMBERS, HUGE * 16],
    "created": [None, "now", [], -1, 1e300, 10**400, float("nan"), float("inf"), True],
    "bytes": [*NOT_NUMBERS, HUGE * 16],
    "row_width": [*NOT_NUMBERS, 0, 1 << 40, HUGE],
    "physical_block_size": [*NOT_NUMBERS, 0, 7, 1024, HUGE],
    "blocks_per_chunk": [*NOT_NUMBERS, 0, 63, 100, 1 << 22, HUGE],
    "meta": [None, 7, "{}", []],
    "chunks": [None, 7, "", {}, [7], [[]], ["123456"], [[1, 1, 1, "0" * 16, 1]]],
}


@pytest.mark.parametrize("name", [*FIELDS, "missing fields", "not an object"])
def test_a_manifest_with_nonsense_in_a_field_is_refused(name, little_memory):
    sound, _ = small_table()
    manifest = manifest_of(sound.entries[SNAPSHOT].now)
    if name == "missing fields":
        hostile = [{key: value for key, value in manifest.items() if key != gone} for gone in FIELDS]
    elif name == "not an object":
        hostile = [b"7", b"[]", b'"x"', b"null", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 100_000, b""]
    else:
        hostile = [manifest | {name: value} for value in FIELDS[name]]
    for one in hostile:
        fs = copy_of(sound)
        write_manifest(fs.entries[SNAPSHOT].now, one)
        must_be_refused(fs, SNAPSHOT, when_listed=True)


CHUNK_FIELDS = {
    "number": [None, "1", 1.0, True, -1, 10**12, 2],
    "blocks": [None, "1", 1.0, True, -1, 0, 65, HUGE],
    "keys_bytes": [None, "1", -1, 0, 128, HUGE],
    "keys_sum": [None, 7, "", "0" * 15, "0" * 17, "-" + "1" * 15, "0x" + "1" * 14, "g" * 16, " " + "1" * 15],
    "rows": [None, "1", 1.0, True, -1, HUGE],
    "bits_sum": [None, 7, "", "z" * 16, "1_1" + "1" * 13],
}


@pytest.mark.parametrize("name", CHUNK_FIELDS)
def test_a_manifest_with_nonsense_about_a_chunk_is_refused(name, little_memory):
    sound, _ = small_table()
    manifest = manifest_of(sound.entries[SNAPSHOT].now)
    for value in CHUNK_FIELDS[name]:
        fs = copy_of(sound)
        chunks = [list(chunk) for chunk in manifest["chunks"]]
        chunks[0][list(CHUNK_FIELDS).index(name)] = value
        write_manifest(fs.entries[SNAPSHOT].now, manifest | {"chunks": chunks})
        must_be_refused(fs, SNAPSHOT, when_listed=True)


@pytest.mark.parametrize(
    "numbers", [{40: HUGE}, {40: 0}, {40: 7}, {40: 2**64 - 8}, {48: HUGE}, {48: 0}, {48: 2**64 - 1}]
)
def test_a_header_with_nonsense_lengths_is_refused(numbers, little_memory):
    fs, _ = small_table()
    data = fs.entries[SNAPSHOT].now
    write_manifest(data, manifest_of(data), numbers)
    must_be_refused(fs, SNAPSHOT, when_listed=True)


def test_lists_of_rows_that_are_not_there_or_go_beyond_the_blocks_are_refused(little_memory):
    sound, _ = small_table()
    fs = copy_of(sound)
    del fs.entries[SNAPSHOT].now[-8:]
    must_be_refused(fs, SNAPSHOT, when_listed=True)
    fs = copy_of(sound)
    data, manifest = fs.entries[SNAPSHOT].now, manifest_of(fs.entries[SNAPSHOT].now)
    chunk = manifest["chunks"][-1]
    data[-1] |= 0x80
    size = -(-chunk[1] * 14 // 64) * 8  # 14 rows of 9 words fill a block of 512 bytes.
    chunk[4], chunk[5] = chunk[4] + 1, f"{xxh64(bytes(data[-size:])):016x}"
    assert chunk[1] * 14 % 64, "the last bit is one of the padding"
    write_manifest(data, manifest)
    must_be_refused(fs, SNAPSHOT, when_listed=False)


def signed_keys(fs, change):
    """Change the runs of a keys file, and make every checksum right, that of the snapshot too."""
    data = fs.entries[KEYS].now
    seed, offset = xxh64(bytes(data[:128])), 128
    while offset < len(data):
        _, n, m = struct.unpack_from("<3Q", data, offset)
        end = offset + 24 + -(-(12 * n + 4 * m) // 8) * 8
        change(data, offset, n, m)
        seed = xxh64(bytes(data[offset:end]), seed)
        data[end : end + 8] = seed.to_bytes(8, "little")
        offset = end + 8
    manifest = manifest_of(fs.entries[SNAPSHOT].now)
    manifest["chunks"][0][3] = f"{seed:016x}"
    write_manifest(fs.entries[SNAPSHOT].now, manifest)


@pytest.mark.parametrize("table", [1 << 23, 1 << 24, 2**31 - 1, -1])
def test_keys_of_tables_that_an_index_cannot_hold_are_refused(table, little_memory):
    fs, _ = small_table()

    def change(data, offset, n, m):
        struct.pack_into("<i", data, offset + 24 + 8 * n + 4 * (n // 2), table)

    signed_keys(fs, change)
    must_be_refused(fs, KEYS, when_listed=False)


def test_keys_that_are_signed_again_unchanged_are_read():
    fs, rows = small_table()
    signed_keys(fs, lambda *run: None)
    with SnapshotReader.open("/t", "s", fs=fs) as reader:
        assert scanned(reader) == rows


@pytest.mark.parametrize("at", [0, 8, 16], ids=["first", "n", "m"])
@pytest.mark.parametrize("value", [HUGE, 2**64 - 1, 1 << 31, 70])
def test_a_run_of_keys_with_nonsense_numbers_is_refused(at, value, little_memory):
    fs, _ = small_table()
    data = fs.entries[KEYS].now
    struct.pack_into("<Q", data, 128 + at, value)
    must_be_refused(fs, KEYS, when_listed=False)


@pytest.mark.parametrize("path", [KEYS, ROWS])
@pytest.mark.parametrize("at", [40, 48, 56, 64])
def test_a_chunks_header_with_nonsense_numbers_is_refused(path, at, little_memory):
    fs, _ = small_table()
    data = fs.entries[path].now
    struct.pack_into("<Q", data, at, HUGE)
    data[120:128] = sum_of(data[:120])
    must_be_refused(fs, path, when_listed=False)


def test_rows_that_are_wider_than_their_file_are_refused(little_memory):
    sound, _ = small_table()
    for width in (10, 1000, 1 << 20, 1 << 28):
        fs = copy_of(sound)
        data, manifest = fs.entries[SNAPSHOT].now, manifest_of(fs.entries[SNAPSHOT].now)
        manifest["row_width"] = width
        write_manifest(data, manifest)
        for read in all_ways_of_reading(fs):
            with pytest.raises(StorageError):
                read()
        assert check_table("/t", fs=fs).problems


ROWS_META = {
    "layout": {"dim": 4, "dtype": "float32", "state_width": 1},
    "optimizer": "Adagrad",
    "state": [0.5],
    "step": 3,
}


def test_what_rows_are_is_read_from_meta():
    assert SnapshotRows.of_meta({"rows": ROWS_META}, "s").to_meta({}) == {
        "rows": ROWS_META | {"state": (0.5,)}, "embedding": {}
    }  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        None, 7, [], {}, *({**ROWS_META, key: value} for key, values in {
            "layout": [None, [], {}, {"dim": 4, "dtype": "float32"}, ROWS_META["layout"] | {"more": 1}],
            "optimizer": [7, [], {}],
            "state": [None, 7, "0", [], [0.5, 0.5], ["x"], [None], {}],
            "step": [None, -1, 1.5, "3", True, HUGE * 16],
        }.items() for value in values),
        *({**ROWS_META, "layout": {**ROWS_META["layout"], key: value}} for key, values in {
            "dim": [None, 0, -4, 4.0, "4", True, HUGE],
            "dtype": [None, 7, "float64", [], "torch.float32"],
            "state_width": [None, -1, 1.0, "1", True, HUGE],
        }.items() for value in values),
    ],
    ids=repr,
)  # fmt: skip
def test_nonsense_about_what_rows_are_is_refused(wrong):
    with pytest.raises(CorruptTableError, match="snapshot 's'"):
        SnapshotRows.of_meta({"rows": wrong}, "s")


@pytest.mark.parametrize("wrong", [None, 7, [], [0], [0, 1, 2], [1, 1], [-1, 2], [0, 0], ["0", 1], [0.0, 1], {}])
def test_nonsense_about_shards_is_refused(wrong):
    from oneemb.storage.snapshots.snapshot_rows import shard_of

    assert shard_of({}, "s") == (0, 1) and shard_of({"shard": [2, 5]}, "s") == (2, 5)
    with pytest.raises(CorruptTableError, match="snapshot 's'"):
        shard_of({"shard": wrong}, "s")


@pytest.mark.parametrize("number", ["1e999", "-1", "1" * 400, "true", "null", "[1]"])
@pytest.mark.parametrize("field", ["sequence", "count", "lost_more", "keep_below"])
def test_numbers_of_a_record_in_lock_are_not_believed(tmp_path, field, number):
    path = tmp_path / "t"
    with PersistentTable.open(path, row_width=4, threads=Threads(1)) as table:
        table.save_snapshot("s", {})
    lock = path / "LOCK"
    data = lock.read_bytes()
    for begin in (512, 2048):
        text = data[begin : begin + 1528]
        if text.strip(b"\0 "):
            fields = json.dumps({**json.loads(text), field: "?"}).replace('"?"', number).encode().ljust(1528)
            data = data[:begin] + fields + struct.pack("<Q", xxh64(fields)) + data[begin + 1536 :]
    lock.write_bytes(data)
    assert known_snapshots(LocalFileSystem(), str(lock)) is None
    with PersistentTable.open(path, row_width=4, threads=Threads(1)) as table:
        assert [info.name for info in table.snapshots()] == ["s"]
        table.delete_snapshot("s")
    assert known_snapshots(LocalFileSystem(), str(lock)).names == ()
