"""Files for serving: written on disks that fail, by processes that are killed, and read with whatever is in them."""

import errno
import itertools
import json
import os
import signal
import tracemalloc
from dataclasses import fields

import numpy as np
import pytest

from oneemb.kernels.checksum import xxh64
from oneemb.kernels.frozen_rows import MISSING, PADDING
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.serving.served_file import SERVED_MAGIC, ServedFile, ServedInfo, row_bytes_of
from oneemb.storage.serving.served_writer import RecordWindows, write_served_file
from oneemb.storage.table.file_header import pack_header
from tests.support.faulty_fs import FaultyFileSystem, PowerLoss
from tests.support.served_reader import ServedReader

DIM, ROWS = 5, 700
PATH = "/served/one.serving"
THREADS = Threads(1)


def rows_of(version, chunks=((0, 300), (300, ROWS))):
    """Chunks of rows: of ids 0 to 699 in tables 0 and 1, whose every weight is the version and the id."""
    for begin, end in chunks:
        id_N = np.arange(begin, end, dtype=np.int64)
        yield (id_N % 2).astype(np.int32), id_N, np.repeat(version + id_N, DIM).reshape(-1, DIM).astype(np.float32)


def unwritten(tables=(0, 1), dim=DIM, weights="float32"):
    """What is known of a file before it has rows."""
    return ServedInfo(
        name="one", identity="0" * 32, sequence=1, trained="float32", weights=weights, dim=dim,
        row_bytes=row_bytes_of(weights, dim), rows=0, salt=0, num_tables=max(tables) + 1, tables=tables,
        rows_of_tables=(), slots_of_tables=(), embedding={}, error_max=0.0, error_rms=0.0, sums="",
    )  # fmt: skip


def write(path, fs=None, version=1000, rows=None, window_bytes=8192):
    id_S = np.arange(ROWS)
    keys = (id_S % 2).astype(np.int32), id_S
    return write_served_file(
        path, unwritten(), keys, rows or rows_of(version), threads=THREADS, fs=fs, window_bytes=window_bytes
    )


def version_in(path):
    """The version whose rows the file has, all of them."""
    file = ServedFile(path, threads=THREADS)
    file.verify()
    out_ND, id_N = np.empty((ROWS, DIM), np.float32), np.arange(ROWS)
    place_N = file.read((id_N % 2).astype(np.int32), id_N, None, out_ND, threads=THREADS)
    assert (place_N >= 0).all() and len(np.unique(out_ND - id_N[:, None])) == 1
    return int(out_ND[0, 0])


def calls_of_a_write():
    fs = FaultyFileSystem()
    fs.make_directories("/served")
    write(PATH, fs)
    fs.calls.clear()
    write(PATH, fs, 2000)
    return len(fs.calls)


@pytest.mark.parametrize("call", range(calls_of_a_write()))
def test_after_a_loss_of_power_the_file_is_the_former_or_the_new_one(tmp_path, call):
    fs = FaultyFileSystem()
    fs.make_directories("/served")
    write(PATH, fs)
    fs.calls.clear()
    fs.crash_at = call
    with pytest.raises(PowerLoss):
        write(PATH, fs, 2000)
    for fate, disk in fs.survivors(torn=4):
        (tmp_path / "file").write_bytes(bytes(disk.entries[PATH].now))
        assert version_in(tmp_path / "file") in (1000, 2000), fate


@pytest.mark.parametrize("call", range(calls_of_a_write()))
def test_a_call_that_fails_is_an_error_that_leaves_the_former_file_and_no_other(tmp_path, call):
    fs = FaultyFileSystem()
    fs.make_directories("/served")
    write(PATH, fs)
    begin = len(fs.calls)

    def fail(call_name, path):
        if len(fs.calls) - begin == call + 1 and call_name not in ("open", "read"):
            raise OSError(errno.ENOSPC, "no space left")

    fs.fail = fail
    removes = False
    try:
        write(PATH, fs, 2000)
    except StorageError as error:
        assert PATH in str(error) and "ENOSPC" in str(error)
    else:
        removes = True  # of the temporary name, after the rename
    fs.fail = None
    (tmp_path / "file").write_bytes(bytes(fs.entries[PATH].now))
    assert version_in(tmp_path / "file") in ((2000,) if removes else (1000, 2000))
    write(PATH, fs, 3000)
    assert fs.names("/served") == ["one.serving"]


def killed_while_writing(path, chunks):
    """Let a child write the file, and kill it when so many chunks are written."""
    read, wrote = os.pipe()
    child = os.fork()
    if child == 0:
        try:

            def one_by_one():
                yield from rows_of(2000, [(n, n + 1) for n in range(chunks)])
                os.write(wrote, b"x")
                signal.pause()

            write(path, rows=one_by_one())
        finally:
            os._exit(1)
    os.read(read, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(wrote)


@pytest.mark.parametrize("chunks", [0, 1, 250])
def test_what_a_killed_writer_has_left_goes_with_the_next_write_of_that_file(tmp_path, chunks):
    path = str(tmp_path / "one.int8")
    write(path)
    killed_while_writing(path, chunks)
    assert version_in(path) == 1000 and len(os.listdir(tmp_path)) == 2
    write(str(tmp_path / "other.int8"))
    assert len(os.listdir(tmp_path)) == 3
    write(path, version=3000)
    assert sorted(os.listdir(tmp_path)) == ["one.int8", "other.int8"] and version_in(path) == 3000


def test_what_another_writes_to_is_not_taken_for_a_leftover(tmp_path):
    path = str(tmp_path / "one.int8")

    def rows():
        write(path, version=2000)  # another writer of the same file, whole, in the midst of this one
        yield from rows_of(3000)

    write(path, rows=rows())
    assert version_in(path) == 3000 and os.listdir(tmp_path) == ["one.int8"]


# ---- records in the order of their slots -----------------------------------------------------------------------------


def keys_of(counts, seed=0):
    """Keys of tables, {table: rows}, shuffled: int32 and int64."""
    random = np.random.default_rng(seed)
    table_S = np.repeat(np.array(list(counts), np.int32), list(counts.values()))
    id_S = np.concatenate([random.choice(1 << 50, count, replace=False) - (1 << 49) for count in counts.values()])
    order_S = random.permutation(len(id_S))
    return table_S[order_S], id_S[order_S]


def write_keys(path, keys, dim=DIM, chunk=997, tables=None, **options):
    """Write rows whose weights are their number and that plus 1, 2, ..."""
    table_S, id_S = keys
    weight_SD = np.arange(len(id_S), dtype=np.float32)[:, None] + np.arange(dim, dtype=np.float32)
    chunks = [slice(n, n + chunk) for n in range(0, len(id_S), chunk)]
    rows = ((table_S[its], id_S[its], weight_SD[its]) for its in chunks)
    info = unwritten(tables or tuple(np.unique(table_S).tolist()), dim)
    write_served_file(str(path), info, keys, rows, threads=THREADS, **options)
    return weight_SD


@pytest.mark.parametrize("counts", [{0: 1}, {0: 700, 2: 1, 5: 300}, {1: 66_000, 3: 10}], ids=str)
def test_a_reader_of_the_format_finds_every_row_and_no_other(tmp_path, counts):
    keys, path = keys_of(counts), tmp_path / "file"
    weight_SD = write_keys(path, keys, tables=(0, 1, 2, 3, 5))
    reader, file = ServedReader(path), ServedFile(path, threads=THREADS)
    assert path.stat().st_size == file.info.manifest_begin + len(file.info.packed())
    few = slice(0, 3000)
    for table, id, weight_D in zip(keys[0][few].tolist(), keys[1][few].tolist(), weight_SD[few], strict=True):
        assert reader.row_of(table, id) == weight_D.tobytes()
        assert reader.row_of(table, id ^ 1) is None and reader.row_of((table + 1) % 4, id) is None
    assert (reader.all_slots, reader.record_bytes) == (file.info.slots, file.info.record_bytes)
    file.verify()
    for table, id, slot in list(zip(*(array.tolist() for array in file.keys()), strict=True))[few]:
        assert reader.slot_of(table, id) == slot and reader.record(slot)[1] == id


@pytest.mark.parametrize("window_bytes", [1, 50_000, 200_000])
def test_small_windows_and_chunks_make_the_same_file(tmp_path, window_bytes):
    keys = keys_of({0: 30_000, 1: 0, 2: 777, 3: 70_000} if window_bytes > 1 else {0: 3000, 2: 777})
    write_keys(tmp_path / "whole", keys, chunk=1 << 20)
    sizes = []

    class Watched(LocalFileSystem):
        def write(self, file, data, offset):
            super().write(file, data, offset)
            sizes.append(offset + data.nbytes if hasattr(data, "nbytes") else offset + len(data))

    for chunk in (1 << 20, 3000):
        write_keys(tmp_path / "windows", keys, chunk=chunk, window_bytes=window_bytes, fs=Watched())
        assert (tmp_path / "windows").read_bytes() == (tmp_path / "whole").read_bytes()
    assert max(sizes) > (tmp_path / "whole").stat().st_size  # what did not fit was beyond the end


def test_windows_hold_three_times_their_bytes_of_memory_at_most(tmp_path):
    window, size, slots, fs = 1 << 20, 256, 65_536, LocalFileSystem()
    file, chunk = fs.lock(str(tmp_path / "file")), 512
    slot_S = np.random.default_rng(0).permutation(slots)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    windows = RecordWindows(fs, file, 0, slots, size, window)
    for n in range(0, slots, chunk):
        its_N = slot_S[n : n + chunk]
        windows.put(its_N, np.repeat(its_N.astype(np.int64)[:, None], size // 8, 1).view(np.uint8))
    for first, record_SX, taken_S in windows.windows():
        wanted_S = np.arange(first, first + len(taken_S))
        assert taken_S.all() and np.array_equal(record_SX.view(np.int64)[:, 0], wanted_S)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    fs.unlock(file)
    assert windows.is_beyond and peak < 3.5 * window < slots * size / 4


def test_what_cannot_be_read_back_while_a_file_is_made_is_an_error(tmp_path):
    class Short(LocalFileSystem):
        def read_into(self, file, out, offset):
            return super().read_into(file, out[: len(out) // 2], offset)

    with pytest.raises(StorageError, match="cannot be read"):
        write(str(tmp_path / "one.serving"), fs=Short(), window_bytes=1)
    assert os.listdir(tmp_path) == []


def test_rows_that_fit_in_memory_while_their_slots_do_not(tmp_path):
    # One slot in twenty is empty, and long records are hardly more than their rows.
    keys, dim = keys_of({0: 1000}), 1000
    write_keys(tmp_path / "whole", keys, dim=dim)
    for part in (0.99, 1.01, 1.03, 1.06):
        write_keys(tmp_path / "windows", keys, dim=dim, window_bytes=int(part * 1000 * (4 * dim + 16)))
        assert (tmp_path / "windows").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.slow
def test_verifying_takes_memory_that_does_not_grow_with_the_rows(tmp_path):
    peaks = []
    for rows in (100_000, 1_500_000, 3_000_000):
        write_keys(tmp_path / "file", (np.zeros(rows, np.int32), np.arange(rows)), dim=1, chunk=rows)
        file = ServedFile(tmp_path / "file", threads=THREADS)
        tracemalloc.start()
        file.verify()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.2 * peaks[1] < 40 << 20 and len(file.keys()[0]) == rows


def test_records_that_are_longer_than_blocks(tmp_path):
    keys = keys_of({0: 60, 1: 9})
    weight_SD = write_keys(tmp_path / "file", keys, dim=3001, chunk=7, window_bytes=100_000)
    file, out_ND = ServedFile(tmp_path / "file", threads=THREADS), np.empty((69, 3001), np.float32)
    assert (file.read(*keys, None, out_ND, threads=THREADS) >= 0).all() and np.array_equal(out_ND, weight_SD)
    data = (tmp_path / "file").read_bytes()
    slot = ServedReader(tmp_path / "file").slot_of(int(keys[0][5]), int(keys[1][5]))
    middle = 4096 + slot * file.info.record_bytes + 6000  # in a block that has neither its begin nor its end
    (tmp_path / "bad").write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    file = ServedFile(tmp_path / "bad", threads=THREADS)
    with pytest.raises(CorruptTableError, match=f"block of rows is damaged, at offset {middle // 4096 * 4096}"):
        file.read(keys[0][5:6], keys[1][5:6], None, out_ND[:1], threads=THREADS)
    with pytest.raises(CorruptTableError, match=f"block of rows is damaged, at offset {middle // 4096 * 4096}"):
        bags = np.array([0, 1]), None, False
        file.pool(keys[0][5:6], keys[1][5:6], None, bags, out_ND[:1], threads=THREADS)


def test_the_errors_of_a_file_are_those_of_all_its_weights(tmp_path):
    weight_ND = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
    keys = np.zeros(ROWS, np.int32), np.arange(ROWS)
    rows = [(keys[0][its], keys[1][its], weight_ND[its]) for its in (slice(0, 300), slice(300, ROWS))]
    info = write_served_file(str(tmp_path / "file"), unwritten((0,), DIM, "float16"), keys, rows, threads=THREADS)
    error_ND = np.abs(weight_ND.astype(np.float16).astype(np.float64) - weight_ND)
    assert info.error_max == error_ND.max()
    assert info.error_rms == pytest.approx(np.sqrt(np.square(error_ND).mean()), rel=1e-9)


def test_ids_of_tables_without_rows_are_looked_up_nowhere(tmp_path):
    keys = np.full(500, 1, np.int32), np.arange(500)
    write_keys(tmp_path / "file", keys, tables=(0, 1, 3))
    file = ServedFile(tmp_path / "file", threads=THREADS)
    id_N = np.arange(-5000, 5000)
    for table in (0, 2, 3):
        out_ND = np.ones((len(id_N), DIM), np.float32)
        place_N = file.read(np.full(len(id_N), table, np.int32), id_N, None, out_ND, threads=THREADS)
        assert (place_N == MISSING).all() and not out_ND.any()


def test_the_padding_reads_as_zeros_in_rows_and_bags_though_it_has_a_row(tmp_path):
    keys = np.zeros(9, np.int32), np.arange(9)
    weight_SD = write_keys(tmp_path / "file", keys)
    file, out_ND = ServedFile(tmp_path / "file", threads=THREADS), np.ones((9, DIM), np.float32)
    place_N = file.read(*keys, 4, out_ND, threads=THREADS)
    assert place_N[4] == PADDING and np.flatnonzero(place_N < 0).tolist() == [4]
    weight_SD[4] = 0
    assert np.array_equal(out_ND, weight_SD)
    for is_mean, count in ((False, 1), (True, 8)):
        out_PD = np.ones((3, DIM), np.float32)
        bags = np.array([0, 0, 9, 9]), None, is_mean
        place_N, has_missing = file.pool(*keys, 4, bags, out_PD, threads=THREADS)
        assert place_N[4] == PADDING and not has_missing and not out_PD[[0, 2]].any()
        assert np.allclose(out_PD[1], weight_SD.sum(0) / count)


class Shares:
    """Threads that do work in shares of one size, one after the other."""

    def __init__(self, size):
        self._size = size

    def run(self, loop, size, *arguments, share_min):
        for begin in range(0, size, self._size):
            loop(begin, min(begin + self._size, size), *arguments)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 95, 97, 700])  # beside groups of 32 ids
def test_bags_are_their_rows_wherever_shares_and_groups_end(tmp_path, count, size):
    keys = np.zeros(900, np.int32), np.arange(900)
    weight_SD = np.concatenate([write_keys(tmp_path / "file", keys, dim=19), np.zeros((300, 19), np.float32)])
    file, random = ServedFile(tmp_path / "file", threads=THREADS), np.random.default_rng(count)
    id_N, out_ND = random.integers(0, 1200, count), np.full((count, 19), 7, np.float32)
    table_N = np.zeros(count, np.int32)
    file.read(table_N, id_N, None, out_ND, threads=Shares(size))
    assert np.array_equal(out_ND, weight_SD[id_N])
    for bags in (1, 2, 60):
        offset_P1 = np.sort(np.concatenate([[0], random.integers(0, count + 1, bags - 1), [count]]))
        offset_P1[1:-1][:: bags // 4 + 1] = offset_P1[:-2][:: bags // 4 + 1]  # some empty ones
        out_PD = np.full((bags, 19), 7, np.float32)
        place_N, has_missing = file.pool(
            table_N, id_N, None, (offset_P1, None, False), out_PD, threads=Shares(size)
        )  # fmt: skip
        want_PD = [weight_SD[id_N[begin:end]].sum(0) for begin, end in itertools.pairwise(offset_P1)]
        assert np.array_equal(out_PD, np.stack(want_PD))  # whole numbers, so that their order does not matter
        assert has_missing == (id_N >= 900).any() and np.array_equal(place_N == MISSING, id_N >= 900)


@pytest.mark.parametrize("n", [0, 50, 199])
def test_one_id_without_a_row_is_noted_wherever_it_is(tmp_path, n):
    write_keys(tmp_path / "file", (np.zeros(900, np.int32), np.arange(900)))
    file, id_N = ServedFile(tmp_path / "file", threads=THREADS), np.arange(200)
    id_N[n] = 1000
    bags = np.array([0, 100, 200]), None, False
    assert file.pool(np.zeros(200, np.int32), id_N, None, bags, np.empty((2, DIM), np.float32), threads=THREADS)[1]


@pytest.mark.parametrize("dim", [DIM, 5000])  # also where a record is longer than a block
def test_a_file_without_rows_is_read(tmp_path, dim):
    write_keys(tmp_path / "none", (np.empty(0, np.int32), np.empty(0, np.int64)), dim=dim, tables=(0, 1))
    file = ServedFile(tmp_path / "none", threads=THREADS)
    file.verify()
    out_ND = np.ones((9, dim), np.float32)
    assert (file.read(np.zeros(9, np.int32), np.arange(9), None, out_ND, threads=THREADS) == MISSING).all()
    assert not out_ND.any() and ServedReader(tmp_path / "none").row_of(0, 1) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda: rows_of(0, [(0, 300)]), "changed while it was read"),
        (lambda: rows_of(0, [(0, 300), (301, ROWS)]), "changed while it was read"),
        (lambda: rows_of(0, [(0, 300), (300, ROWS - 1), (5000, 5001)]), "changed while it was read"),
        (lambda: rows_of(0, [(0, 300), (200, ROWS)]), "changed while it was read"),
        (lambda: iter(()), "changed while it was read"),
    ],
)
@pytest.mark.parametrize("window_bytes", [None, 1])
def test_rows_that_are_not_those_of_the_keys_make_no_file(tmp_path, rows, message, window_bytes):
    with pytest.raises(StorageError, match=message):
        write(str(tmp_path / "one.serving"), rows=rows(), window_bytes=window_bytes)
    assert os.listdir(tmp_path) == []


def test_a_key_that_comes_twice_is_an_error_that_names_it(tmp_path):
    keys = np.array([0, 1, 0], np.int32), np.array([7, 7, 7])
    with pytest.raises(CorruptTableError, match="id 7 of table 0 twice"):
        write_keys(tmp_path / "file", keys)
    assert os.listdir(tmp_path) == []


# ---- what is in a file -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "one.serving"
    return path, write(str(path)), path.read_bytes()


def with_manifest(good, body):
    """The file with another manifest and right checksums."""
    path, info, data = good
    body += b" " * (-len(body) % 8)
    data = bytearray(data[: info.manifest_begin]) + body + xxh64(body).to_bytes(8, "little")
    data[:128] = pack_header(SERVED_MAGIC, (info.manifest_begin, len(body), len(data), 0))
    other = path.with_suffix(".other")
    other.write_bytes(bytes(data))
    return other


WRONG = [None, True, -1, 1.5, float("nan"), float("inf"), 1 << 40, 1 << 64, 10**400, "x", [], [0, 0], [2], {}]


@pytest.mark.parametrize(
    "key", [key for key in (field.name for field in fields(ServedInfo)) if key not in ("name", "identity")]
)
def test_a_manifest_with_a_wrong_number_is_refused_with_file_and_offset(good, key):
    right = json.loads(good[1].packed()[:-8])
    ServedFile(with_manifest(good, json.dumps(right).encode()), threads=THREADS)
    harmless = {"sequence": (1 << 40,), "embedding": ({},), "error_max": (1.5, 1 << 40, 1 << 64)}
    harmless["error_rms"], harmless["max_rows"] = harmless["error_max"], (1 << 40,)
    for value in [*WRONG, *([float(right[key])] if type(right.get(key)) is int else [])]:
        path = with_manifest(good, json.dumps({**right, key: value}).encode())
        if value in harmless.get(key, ()) and type(value) is not bool:
            continue
        with pytest.raises(CorruptTableError, match="offset") as error:
            ServedFile(path, threads=THREADS)
        assert str(path) in str(error.value), value
    if key in ("since", "max_rows"):  # Only layers, and files with a cap, have them.
        return
    path = with_manifest(good, json.dumps({k: v for k, v in right.items() if k != key}).encode())
    with pytest.raises(CorruptTableError, match="offset"):
        ServedFile(path, threads=THREADS)


@pytest.mark.parametrize(
    "body", [b"null", b"[]", b"\xff\xfe", b"9" * 100_000, b"[" * 100_000, b'{"a":' * 100_000, b"{}", b"NaN"]
)
def test_a_manifest_of_another_kind_is_refused(good, body):
    with pytest.raises(CorruptTableError, match="manifest"):
        ServedFile(with_manifest(good, body), threads=THREADS)


def test_a_manifest_that_would_take_much_memory_is_refused_before_it_is_read(good):
    path = with_manifest(good, b"[" + b"[]," * 8_000_000 + b"[]]")
    with pytest.raises(CorruptTableError, match="a manifest of"):
        ServedFile(path, threads=THREADS)
    path.unlink()


def test_every_flipped_byte_of_header_pilots_sums_and_manifest_is_found(good):
    path, info, data = good
    other = path.with_suffix(".flipped")
    for offset in [*range(128), 128, 3000, 4095, *range(info.pilots_begin, len(data))]:
        other.write_bytes(data[:offset] + bytes([data[offset] ^ 0x55]) + data[offset + 1 :])
        with pytest.raises(StorageError) as error:
            ServedFile(other, threads=THREADS)
        assert str(other) in str(error.value), offset
