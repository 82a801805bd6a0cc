"""Keys that puts have noted and the index has not taken in yet: nothing shows of that."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage import pending_keys
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.pending_keys import PendingKeys
from oneemb.storage.persistent_table import PersistentTable
from tests.storage.test_persistent_table_states import TableMachine, run
from tests.support.table_model import check, got, put, put_random, random_rows

THREADS = Threads(1)


def open_table(path, **options):
    options = {"row_width": 3, "chunk_bytes": 1 << 16, "threads": THREADS} | options
    return PersistentTable.open(path, **options)


def batch(first, size, rng, width=3):
    id_U = np.arange(first, first + size)
    return (id_U % 3).astype(np.int32), id_U, random_rows(rng, size, width)


@pytest.fixture(params=[1, 64, 1000])
def limit(request, monkeypatch):
    monkeypatch.setattr(pending_keys, "PENDING_MAX", request.param)
    return request.param


@pytest.mark.parametrize("beside", [False, True])
def test_equal_keys_of_many_lists_end_as_in_a_dict(limit, beside):
    rng, model, taken = np.random.default_rng(0), {}, {}

    def take(table_N, id_N, place_N):
        taken.update(zip(zip(table_N.tolist(), id_N.tolist(), strict=True), place_N.tolist(), strict=True))

    with ThreadPoolExecutor(1) as pool:
        keys = PendingKeys(pool if beside else None)
        for n in range(300):
            size = int(rng.integers(0, 1200))
            table_U, id_U = rng.integers(0, 2, size, dtype=np.int32), rng.integers(0, 300, size)
            place_U = rng.integers(0, 1 << 40, size)
            if keys.make_room(size, take):
                keys.note(table_U, id_U, place_U)
                model.update(zip(zip(table_U.tolist(), id_U.tolist(), strict=True), place_U.tolist(), strict=True))
            else:
                assert size > limit
            if n % 7 == 0:
                keys.settle(take)
                assert taken == model


@pytest.mark.parametrize("beside", [False, True])
def test_keys_that_could_not_go_in_stay_and_go_in_later(monkeypatch, beside):
    monkeypatch.setattr(pending_keys, "PENDING_MAX", 10)
    taken, room = [], [False]

    def take(table_N, id_N, place_N):
        if not room[0]:
            raise MemoryError
        taken.extend(id_N.tolist())

    def note(id_N):
        table_N, id_N = np.zeros(len(id_N), np.int32), np.array(id_N)
        assert keys.make_room(len(id_N), take)
        keys.note(table_N, id_N, id_N)

    with ThreadPoolExecutor(1) as pool:
        keys = PendingKeys(pool if beside else None)
        note(range(8))
        if beside:
            note(range(8, 16))
        for _ in range(2):
            with pytest.raises(MemoryError):
                note(range(50, 58))
            with pytest.raises(MemoryError):
                keys.settle(take)
        room[0] = True
        note(range(16, 20))
        keys.settle(take)
        keys.settle(take)
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
    monkeypatch.setattr(pending_keys, "PENDING_MAX", 256)
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


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("fails_at", [0, 1, 2, 5])
def test_without_memory_for_the_index_no_row_is_lost(tmp_path, monkeypatch, background, fails_at):
    monkeypatch.setattr(pending_keys, "PENDING_MAX", 300)
    index_put, calls, failed = HashIndex.replace, [0], []

    def failing(self, table_U, id_U, place_U):
        calls[0] += 1
        if fails_at < calls[0] <= fails_at + 3:
            raise MemoryError("no memory for the cells")
        return index_put(self, table_U, id_U, place_U)

    rng, rows = np.random.default_rng(3), {}
    with open_table(tmp_path, background=background) as table:
        monkeypatch.setattr(HashIndex, "replace", failing)
        for begin in range(0, 4000, 100):
            table_U, id_U, row_UW = batch(begin % 1300, 100, rng)
            try:
                put(table, rows, table_U, id_U, row_UW)
            except MemoryError:
                failed.append(begin)
        for _ in range(3):
            try:
                len(table)
            except MemoryError:
                failed.append(-1)
        assert len(failed) == 3
        check(table, rows)
        put_random(table, rows, rng, 500)
        table.save_snapshot("s", {})
        table.load_snapshot("s")
        check(table, rows)


def test_rows_can_be_got_while_the_index_takes_in_a_list(tmp_path, monkeypatch):
    monkeypatch.setattr(pending_keys, "PENDING_MAX", 300)
    index_put, go, waiting = HashIndex.replace, threading.Event(), threading.Event()

    def slow(self, *keys):
        if threading.current_thread().name.startswith("oneemb-settle"):
            waiting.set()
            assert go.wait(30)
        return index_put(self, *keys)

    rng, rows = np.random.default_rng(4), {}
    with open_table(tmp_path) as table:
        monkeypatch.setattr(HashIndex, "replace", slow)
        for begin in range(0, 500, 100):
            put(table, rows, *batch(begin, 100, rng))
        assert waiting.wait(30), "a full list goes in beside the caller"
        threading.Timer(0.05, go.set).start()
        assert got(table, rows) == [*rows.values()]
        check(table, rows)


@pytest.mark.parametrize("most", [1, 50])
def test_any_sequence_of_operations_agrees_with_a_dict_with_short_lists(monkeypatch, most):
    monkeypatch.setattr(pending_keys, "PENDING_MAX", most)
    run(TableMachine, examples=40, steps=30)
