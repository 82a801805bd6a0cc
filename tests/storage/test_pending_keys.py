"""Keys that puts have noted and the index has not taken in yet: nothing shows of that."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage import compact_index, hash_index
from oneemb.storage.compact_index import BlockMemory, CompactIndex
from oneemb.storage.errors import IndexMemoryError, StorageError
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.table import pending_keys
from oneemb.storage.table.pending_keys import PendingKeys
from oneemb.storage.table.persistent_table import PersistentTable
from tests.storage.test_persistent_table_states import TableMachine, run
from tests.support.pairwise import covering
from tests.support.table_model import check, got, put, put_random, random_rows

THREADS = Threads(1)


def open_table(path, **options):
    options = {"row_width": 3, "chunk_bytes": 1 << 16, "threads": THREADS} | options
    return PersistentTable.open(path, **options)


def batch(first, size, rng, width=3):
    id_U = np.arange(first, first + size)
    return (id_U % 3).astype(np.int32), id_U, random_rows(rng, size, width)


def short_lists(monkeypatch, most):
    """Lists of so many keys at most, in indexes of any size."""
    monkeypatch.setattr(pending_keys, "_LIST_MAX", most)
    monkeypatch.setattr(pending_keys, "_LISTS_MIN", 1)
    monkeypatch.setattr(pending_keys, "_LIST_MIN", 1)


@pytest.fixture(params=[1, 64, 1000])
def limit(request, monkeypatch):
    short_lists(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("beside", [False, True])
def test_equal_keys_of_many_lists_end_as_in_a_dict(limit, beside):
    rng, model, taken, noted = np.random.default_rng(0), {}, {}, 0

    def take(table_N, id_N, place_N):
        taken.update(zip(zip(table_N.tolist(), id_N.tolist(), strict=True), place_N.tolist(), strict=True))

    with ThreadPoolExecutor(1) as pool:
        keys = PendingKeys(HashIndex(THREADS, 4000), pool if beside else None)
        for n in range(300):
            size = int(rng.integers(0, 1200))
            table_U, id_U = rng.integers(0, 2, size, dtype=np.int32), rng.integers(0, 300, size)
            place_U = rng.integers(0, 1 << 40, size)
            if keys.make_room(table_U, id_U, take):
                keys.note(table_U, id_U, place_U)
                model.update(zip(zip(table_U.tolist(), id_U.tolist(), strict=True), place_U.tolist(), strict=True))
                noted += size
            else:
                assert size > limit // 2  # A list has a power of two of keys.
            if n % 7 == 0:
                keys.put_pending(take)
                assert taken == model
    assert noted or limit == 1


@pytest.mark.parametrize("beside", [False, True])
def test_keys_that_could_not_go_in_stay_and_go_in_later(monkeypatch, beside):
    short_lists(monkeypatch, 8)
    taken, room = [], [False]

    def take(table_N, id_N, place_N):
        if not room[0]:
            raise MemoryError
        taken.extend(id_N.tolist())

    def note(id_N):
        table_N, id_N = np.zeros(len(id_N), np.int32), np.array(id_N)
        assert keys.make_room(table_N, id_N, take)
        keys.note(table_N, id_N, id_N)

    with ThreadPoolExecutor(1) as pool:
        keys = PendingKeys(HashIndex(THREADS), pool if beside else None)
        note(range(8))
        if beside:
            note(range(8, 16))
        for _ in range(2):
            with pytest.raises(MemoryError):
                note(range(50, 58))
            with pytest.raises(MemoryError):
                keys.put_pending(take)
        room[0] = True
        note(range(16, 20))
        keys.put_pending(take)
        keys.put_pending(take)
    assert taken == [*range(8), *(range(8, 16) if beside else ()), *range(16, 20)]


@pytest.mark.parametrize("background", [False, True])
def test_rows_are_those_of_a_dict_at_any_moment(tmp_path, limit, background):
    rng, rows = np.random.default_rng(1), {}
    with open_table(tmp_path, background=background) as table:
        for n in range(60):
            for _ in range(int(rng.integers(1, 5))):
                put_random(table, rows, rng, int(rng.integers(1, 90)), ids=200)
            some = [*rows][:: n + 1]
            if n % 3 == 0:
                assert got(table, some) == [rows[key] for key in some]
            elif n % 3 == 1:
                assert len(table) == table.stats()["rows"] == len(rows)
            else:
                assert table.contains(*(np.array(part, kind) for part, kind in zip(
                    zip(*some, strict=True), (np.int32, np.int64), strict=True
                ))).all()  # fmt: skip
        check(table, rows)


@pytest.mark.parametrize("background", [False, True])
def test_what_is_done_with_noted_keys_sees_them(tmp_path, monkeypatch, background):
    short_lists(monkeypatch, 256)
    rng, rows = np.random.default_rng(2), {}
    with open_table(tmp_path, background=background) as table:
        for begin in range(0, 3000, 100):
            put(table, rows, *batch(begin % 700, 100, rng))
        table.save_snapshot("s", {})
        saved = dict(rows)
        for begin in range(0, 500, 100):
            put(table, rows, *batch(begin, 100, rng))
        table.compact()
        put(table, rows, *batch(100, 100, rng))
        check(table, rows)
        put(table, rows, *batch(200, 100, rng))
        table.load_snapshot("s")
        check(table, saved)
        put(table, {}, *batch(0, 100, rng))
        table.clear()
        check(table, {})
        put(table, {}, *batch(0, 100, rng))
    with open_table(tmp_path) as table:
        table.load_snapshot("s")
        check(table, saved)


class NoMemory:
    """Refuses cells and blocks from the given growth on, this many times, or for good."""

    def __init__(self, monkeypatch, fails_at, times=10**9):
        self.calls, self.fails_at, self.times, self.refused = 0, fails_at, times, 0
        for where, name in ((hash_index, "_new_cells"), (BlockMemory, "take")):
            monkeypatch.setattr(where, name, self.refusing(getattr(where, name)))

    def refusing(self, real):
        def made(*args):
            self.calls += 1
            if self.fails_at < self.calls and self.refused < self.times:
                self.refused += 1
                raise MemoryError
            return real(*args)

        return made


def growths(monkeypatch, tmp_path, puts):
    """How often the index grows while these keys are put."""
    with monkeypatch.context() as patch:
        with open_table(tmp_path / "whole", background=False) as table:
            memory = NoMemory(patch, 10**9)
            for id_U in puts:
                table.put(np.zeros(len(id_U), np.int32), id_U, np.zeros((len(id_U), 3), np.float32))
        return memory.calls


@pytest.mark.parametrize(("small", "most", "background"), covering([8, 192], [1, 64, 1000], [False, True]))
def test_without_memory_for_the_index_what_was_put_is_read_saved_and_loaded(
    tmp_path, monkeypatch, small, most, background
):
    short_lists(monkeypatch, most)
    monkeypatch.setattr(compact_index, "_SMALL", small)
    rng = np.random.default_rng(3)
    puts = [rng.choice(4000, int(rng.integers(1, 200)), replace=False) for _ in range(40)]
    many, refused = growths(monkeypatch, tmp_path, puts), 0
    assert many > 5
    for fails_at in sorted({*range(0, many, max(2, many // 5)), many - 1}):
        rows = {}
        with monkeypatch.context() as patch, open_table(tmp_path / str(fails_at), background=background) as table:
            memory = NoMemory(patch, fails_at)
            for n, id_U in enumerate(puts):
                table_U, row_UW = np.zeros(len(id_U), np.int32), random_rows(rng, len(id_U), 3)
                try:
                    put(table, rows, table_U, id_U, row_UW)
                except MemoryError as error:
                    assert isinstance(error, StorageError) and f"it holds {len(rows)} keys in " in str(error)
                    refused += 1
                if n % 9 == 0:
                    assert got(table, [*rows, (5, 5)]) == [*rows.values(), None] and len(table) == len(rows)
            check(table, rows)
            table.compact()
            table.save_snapshot("s", {})
            check(table, rows)
            known = np.array([id for _, id in rows], np.int64)[:150]
            if len(known):  # Rows that are here are overwritten without any memory.
                put(table, rows, np.zeros(len(known), np.int32), known, random_rows(rng, len(known), 3))
                check(table, rows)
            assert memory.refused > 0
            memory.times = 0
            saved = dict(rows)
            put_random(table, rows, rng, 500)
            check(table, rows)
            table.load_snapshot("s")
            assert len(table) == len(saved)
    assert refused > 0


@pytest.mark.parametrize("background", [False, True])
def test_memory_that_is_short_for_a_moment_costs_that_put_and_no_other(tmp_path, monkeypatch, background):
    short_lists(monkeypatch, 64)
    rng, rows = np.random.default_rng(4), {}
    with open_table(tmp_path, background=background) as table:
        memory, failed = NoMemory(monkeypatch, 5, times=3), 0
        for begin in range(0, 4000, 50):
            try:
                put(table, rows, *batch(begin, 50, rng))
            except MemoryError:
                failed += 1
        assert memory.refused == 3 and failed <= 2, "a list that finds no memory gives way to single puts"
        check(table, rows)


def test_cells_are_made_beside_the_caller_once_lists_are_long(tmp_path, monkeypatch):
    short_lists(monkeypatch, 256)
    monkeypatch.setattr(pending_keys, "_LISTS_MIN", 16)
    rng, rows, beside = np.random.default_rng(4), {}, []
    real = BlockMemory.take

    def take(self, blocks):
        beside.append(threading.current_thread().name.startswith("oneemb-index"))
        return real(self, blocks)

    with open_table(tmp_path) as table:
        put(table, rows, *batch(0, 80000, rng))
        put(table, rows, *batch(80000, 256, rng))
        monkeypatch.setattr(BlockMemory, "take", take)
        for begin in range(80256, 100000, 128):
            put(table, rows, *batch(begin, 128, rng))
        assert len(beside) > 20 and sum(beside) >= 0.9 * len(beside)
        check(table, rows)


def test_an_index_says_how_much_memory_it_needs(monkeypatch):
    index, id_U = HashIndex(THREADS), np.arange(5000)
    index.put(np.zeros(5000, np.int32), id_U, id_U)
    NoMemory(monkeypatch, 0)
    with pytest.raises(IndexMemoryError, match=rf"holds 5000 keys in {index.nbytes} bytes and must allocate \d+ more"):
        index.put(np.zeros(50000, np.int32), np.arange(50000), np.arange(50000))
    assert len(index) == 5000 and np.array_equal(index.find(np.zeros(5000, np.int32), id_U), id_U)


def test_rows_can_be_got_while_the_index_takes_in_a_list(tmp_path, monkeypatch):
    short_lists(monkeypatch, 300)
    index_put, go, waiting = CompactIndex.replace, threading.Event(), threading.Event()

    def slow(self, *keys):
        if threading.current_thread().name.startswith("oneemb-index"):
            waiting.set()
            assert go.wait(600)
        return index_put(self, *keys)

    rng, rows = np.random.default_rng(4), {}
    with open_table(tmp_path) as table:
        monkeypatch.setattr(CompactIndex, "replace", slow)
        for begin in range(0, 400, 100):
            put(table, rows, *batch(begin, 100, rng))
        assert waiting.wait(600), "a full list goes in beside the caller"
        threading.Timer(0.05, go.set).start()
        assert got(table, rows) == [*rows.values()]
        check(table, rows)


@pytest.mark.parametrize("most", [1, 50])
def test_any_sequence_of_operations_agrees_with_a_dict_with_short_lists(monkeypatch, most):
    short_lists(monkeypatch, most)
    run(TableMachine, examples=20, steps=30)


@pytest.mark.parametrize("rows", [50_000, 66_000, 100_000, 131_072])
def test_keys_that_come_in_the_order_of_an_index_go_in(tmp_path, rows):
    # Shard after shard: a batch of them fills few shards.
    first = HashIndex(THREADS)
    id_N = np.arange(rows)
    first.put(np.zeros(rows, np.int32), id_N, id_N)
    with open_table(str(tmp_path / "t")) as table:
        for table_N, some_N, _ in first.items(8192):
            table.put(table_N, some_N, np.repeat(some_N[:, None], 3, 1).astype(np.float32))
        assert len(table) == rows
        out_UW = np.empty((rows, 3), np.float32)
        assert not table.get(np.zeros(rows, np.int32), id_N, out_UW).any()
        assert np.array_equal(out_UW[:, 0], id_N)


def test_keys_of_one_shard_have_room_before_they_are_noted(monkeypatch):
    index = HashIndex(THREADS, 200_000)
    id_N = np.arange(400_000)
    index.put(np.zeros(100_000, np.int32), id_N[:100_000], id_N[:100_000])
    other = HashIndex(THREADS)
    other.put(np.zeros(300_000, np.int32), id_N[100_000:], id_N[100_000:])
    ordered_N = np.concatenate([some_N for _, some_N, _ in other.items()])[:1500]  # of one shard or two
    keys = PendingKeys(index, None)
    taken = []

    def take(table_N, id_N, place_N):
        with monkeypatch.context() as patch:
            patch.setattr(hash_index, "_new_cells", no_memory)
            taken.append(len(index.replace(table_N, id_N, place_N)))

    def no_memory(cells_G):
        raise MemoryError

    for begin in range(0, len(ordered_N), 100):
        some_N = ordered_N[begin : begin + 100]
        table_N = np.zeros(len(some_N), np.int32)
        assert keys.make_room(table_N, some_N, take)
        keys.note(table_N, some_N, some_N)
    keys.put_pending(take)
    assert sum(taken) == len(ordered_N) and len(index) == 100_000 + len(ordered_N)
