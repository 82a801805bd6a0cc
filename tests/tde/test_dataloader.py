"""Loaders of cache ids: every batch once, with its rows, whatever fails and whoever leaves."""

import contextlib
import dataclasses
import gc
import subprocess
import sys
import threading
import typing

import numpy as np
import pytest
import torch

from oneemb.storage.remote.parameter_server import LostRowsError, ServerError
from oneemb.tde.steps import NoRoomError
from tests.tde.tables import FaultyServer, Tables, kjt_of

ROWS = 6
DEPTHS = [0, 1, 2, 3]
SLOW = pytest.mark.slow


def batches_of(seed, count=40, most=3):
    rng = np.random.default_rng(seed)
    ids = np.concatenate([np.arange(-9, 9), np.arange(-9, 9) + 2**32, [2**63 - 1, -(2**63)]])
    return [kjt_of(*(rng.choice(ids, rng.integers(0, most)) for _ in range(3))) for _ in range(count)]


def threads():
    return [its for its in threading.enumerate() if its.name == "oneemb-tde"]


@pytest.fixture(autouse=True)
def no_threads_of_others():
    if threads():
        gc.collect()
    assert not threads()


def train(tables, loader, batches, begin=0):
    step = begin
    for step, cache in enumerate(loader, begin):
        tables.step(batches[step].to_dict(), cache.to_dict(), step)
    return step + 1


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("seed", range(4))
def test_every_batch_finds_its_rows_as_the_last_step_left_them(depth, seed, monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), batches_of(seed)
    assert train(tables, tables.loader(batches, depth), batches) == len(batches)
    assert {call for call, _ in tables.server.calls} == {"pull", "push"}
    assert not threads()


def test_the_check_of_rows_sees_one_that_was_read_before_its_step(monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), batches_of(0)
    loader = tables.loader(batches, 2)
    monkeypatch.setattr(type(tables.collection.tables[0].transformer), "pin", lambda self, cache: None)
    monkeypatch.setattr(type(tables.collection.tables[0].transformer), "unpin", lambda self, cache: None)
    with pytest.raises(AssertionError):
        train(tables, loader, batches)


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_a_loader_raises_comes_at_its_batch_and_the_loader_goes_on(depth, monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), batches_of(1, count=8)

    class Loader:
        def __iter__(self):
            self.at = -1
            return self

        def __next__(self):
            self.at += 1
            if self.at == 5:
                raise OSError("a bad file")
            if self.at == len(batches):
                raise StopIteration
            return batches[self.at]

    iterator, given = iter(tables.loader(Loader(), depth)), []
    for step in range(len(batches)):
        if step == 5:
            with pytest.raises(OSError, match="a bad file") as caught:
                next(iterator)
            assert "__next__" in [entry.name for entry in caught.traceback][-1]
            continue
        cache = next(iterator)
        tables.step(batches[step].to_dict(), cache.to_dict(), step)
        given.append(step)
    assert len(given) == 7
    with pytest.raises(StopIteration):
        next(iterator)
    assert not threads()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("call", ["pull", "push"])
def test_what_a_server_raises_comes_at_a_batch_that_can_be_asked_for_again(depth, call, monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), batches_of(2)
    iterator, failures, step = iter(tables.loader(batches, depth)), 0, 0
    rng = np.random.default_rng(7)
    while step < len(batches):
        if rng.random() < 0.4:
            tables.server.fail = {call}
        try:
            cache = next(iterator)
        except ServerError as error:
            assert "told to fail" in str(error)
            failures += 1
            tables.server.fail = set()
            continue
        tables.step(batches[step].to_dict(), cache.to_dict(), step)
        step += 1
    assert failures > 2


@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
def test_whoever_leaves_early_leaves_no_thread_and_the_next_pass_finds_all_rows(depth, monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), batches_of(3)
    loader, step = tables.loader(batches, depth), 0
    for stop in (3, 7, 1, 0, 12):
        iterator = iter(loader)
        for at in range(stop):
            step += 1
            tables.step(batches[at].to_dict(), next(iterator).to_dict(), step)
        assert len(threads()) == (1 if depth else 0)
        if stop % 2:
            del iterator
            gc.collect()
            assert not threads()
    train(tables, loader, batches)
    assert not threads()
    assert not any(table.transformer._pins_S.any() for table in tables.collection.tables)


@pytest.mark.parametrize("of", ["loop", "loader", "server", "room"])
def test_after_an_error_the_thread_has_ended_without_a_garbage_collection(of, monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), batches_of(3)
    if of == "room":
        batches[5] = kjt_of(range(9), [], [])

    def source():
        yield from batches[:10]
        if of == "loader":
            raise ValueError("from the loader")
        yield from batches[10:]

    def loop():
        for step, _ in enumerate(tables.loader(source(), 2)):
            tables.server.fail = {"push"} if of == "server" else set()
            if of == "loop" and step == 4:
                raise ValueError("from the loop")

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ValueError, ServerError, NoRoomError):
            loop()
        assert not threads()
    finally:
        gc.enable()


def test_a_pass_that_begins_ends_the_one_before(monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), batches_of(3)
    loader = tables.loader(batches, 1)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(StopIteration):
        next(first)
    next(second)
    assert len(threads()) == 1
    second.close()


@pytest.mark.parametrize("depth", DEPTHS)
def test_at_most_so_many_batches_and_one_are_read_ahead(depth, monkeypatch):
    tables, batches, read = Tables(64, monkeypatch), batches_of(4, count=20), []
    source = (read.append(n) or batch for n, batch in enumerate(batches))
    for given, _ in enumerate(tables.loader(source, depth), 1):
        for _ in range(20):  # what the thread may still be doing
            assert len(read) <= given + depth + (1 if depth else 0)
    assert read == list(range(20))


def test_rows_of_the_next_batch_are_pulled_while_this_one_trains(monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), [kjt_of([n], [], []) for n in range(4)]
    pulled = threading.Event()
    tables.server.before = lambda call: threading.current_thread().name == "oneemb-tde" and pulled.set()
    iterator = iter(tables.loader(batches, 1))
    next(iterator)
    assert pulled.wait(600)
    next(iterator)
    assert [its for call, its in tables.server.calls if call == "pull"][:2] == [[0], [1]]
    iterator.close()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_batch_that_has_no_room_is_an_error_that_says_so_and_the_next_one_goes_on(depth, monkeypatch):
    tables = Tables(ROWS, monkeypatch)
    batches = [kjt_of([1], [2], []), kjt_of(range(7), [], [1]), kjt_of([3], [], [4])]
    iterator = iter(tables.loader(batches, depth))
    tables.step(batches[0].to_dict(), next(iterator).to_dict(), 0)
    with pytest.raises(NoRoomError, match=r"table 'one' of module 'ebc' has 6 rows .* 7 distinct ids"):
        next(iterator)
    tables.step(batches[2].to_dict(), next(iterator).to_dict(), 2)


@pytest.mark.parametrize("depth", DEPTHS)
def test_batches_that_fill_the_table_wait_for_each_other(depth, monkeypatch):
    tables = Tables(ROWS, monkeypatch)
    batches = [kjt_of(range(5 * n, 5 * n + 6), [], []) for n in range(12)] * 2
    assert train(tables, tables.loader(batches, depth), batches) == len(batches)


def test_saving_pushes_what_was_used_since_and_nothing_else(monkeypatch):
    tables, batches = Tables(64, monkeypatch), [kjt_of([1, 2], [3], [1]), kjt_of([2, 4], [], []), kjt_of([5], [], [])]
    iterator = iter(tables.loader(batches, 0))

    def saved():
        tables.server.calls.clear()
        tables.steps.save()
        return [its for _, its in tables.server.calls]

    for step in range(2):
        tables.step(batches[step].to_dict(), next(iterator).to_dict(), step)
    assert saved() == [[1, 2, 3, 4], [1]]
    # The batch that was given last may still be trained: its rows count as used until the next one is asked for.
    tables.step(batches[2].to_dict(), next(iterator).to_dict(), 2)
    assert saved() == [[2, 4, 5]]
    iterator.close()
    again = Tables(64, monkeypatch, tables.server)
    again.rows = tables.rows
    train(again, again.loader(batches, 0), batches, 0)


def test_a_save_that_fails_can_be_made_again(monkeypatch):
    tables, batches = Tables(64, monkeypatch), batches_of(5)
    train(tables, tables.loader(batches, 2), batches)
    tables.server.fail = {"push"}
    with pytest.raises(ServerError):
        tables.steps.save()
    tables.server.fail = set()
    tables.steps.save()
    again = Tables(64, monkeypatch, tables.server)
    again.rows = tables.rows
    train(again, again.loader(batches, 1), batches)


# ---- what batches look like ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sample:
    label: int
    ids: object


class Pair(typing.NamedTuple):
    ids: object
    label: int


KJT = kjt_of([5, 6], [], [7])
CACHE = [0, 1, 0]


@pytest.mark.parametrize(
    ("batch", "of", "data_info"),
    [
        (KJT, lambda batch: batch, None),
        ((1, KJT), lambda batch: batch[1], None),
        ([KJT, "x"], lambda batch: batch[0], {0: "ebc"}),
        ({"a": {"b": [KJT]}}, lambda batch: batch["a"]["b"][0], None),
        ({"a": KJT, "b": 2}, lambda batch: batch["a"], {"a": "ebc"}),
        (Sample(1, KJT), lambda batch: batch.ids, None),
        (Sample(1, KJT), lambda batch: batch.ids, {"ids": "ebc"}),
        (Sample(1, KJT), lambda batch: batch.ids, {1: "ebc"}),
        (Pair(KJT, 1), lambda batch: batch.ids, {0: "ebc"}),
        (Pair(KJT, 1), lambda batch: batch.ids, None),
    ],
)
def test_jagged_tensors_are_found_wherever_they_are(batch, of, data_info, monkeypatch):
    (found,) = Tables(ROWS, monkeypatch).loader([batch], 0, data_info=data_info)
    assert type(found) is type(batch) and of(found).values().tolist() == CACHE
    assert of(batch).values().tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("batch", "data_info", "words"),
    [
        ((1, 2), None, "got 0; pass data_info"),
        ((KJT, KJT), None, "got 2; pass data_info"),
        ((1, KJT), {0: "ebc"}, "must be a KeyedJaggedTensor, .* got int"),
        ((1, KJT), {4: "ebc"}, "does not have"),
        ({"a": KJT}, {"b": "ebc"}, "does not have"),
    ],
)
def test_batches_of_other_jagged_tensors_are_refused(batch, data_info, words, monkeypatch):
    with pytest.raises(ValueError, match=words):
        list(Tables(ROWS, monkeypatch).loader([batch], 0, data_info=data_info))


def test_paths_and_depths_that_make_no_sense_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="'other'"):
        Tables(ROWS, monkeypatch).loader([], 0, data_info={0: "other"})
    with pytest.raises(ValueError, match="num_prefetch"):
        Tables(ROWS, monkeypatch).loader([], -1)


def test_what_is_no_id_stays_as_it_is(monkeypatch):
    from torchrec import KeyedJaggedTensor

    kjt = KeyedJaggedTensor(
        keys=["h", "other", "g", "f"], values=torch.tensor([9, 1000, 8, 8, 9], dtype=torch.int32),
        lengths=torch.tensor([1, 0, 1, 0, 1, 0, 2, 0]), weights=torch.arange(5.0),
    )  # fmt: skip
    (found,) = Tables(ROWS, monkeypatch).loader([kjt], 0)
    assert found.values().tolist() == [0, 1000, 0, 0, 1] and found.values().dtype == torch.int32
    assert found.keys() == kjt.keys() and found.stride() == 2
    assert torch.equal(found.weights(), kjt.weights()) and torch.equal(found.lengths(), kjt.lengths())


def test_a_feature_that_is_not_there_is_named(monkeypatch):
    from torchrec import KeyedJaggedTensor

    kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"lacks the features \['g'\]"):
        list(Tables(ROWS, monkeypatch).loader([kjt], 0))


def test_an_interpreter_ends_while_a_thread_waits_for_a_batch():
    code = """
import threading
from unittest import mock
from tests.tde.tables import Tables, kjt_of

class Patch:
    def setattr(self, name, value):
        mock.patch(name, value).start()

def batches():
    for n in range(100):
        yield kjt_of([n], [], [])

iterator = iter(Tables(6, Patch()).loader(batches(), 2))
next(iterator)
next(iterator)
print("two were given")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "two were given\n", done.stderr


def test_an_interrupted_call_leaves_tables_that_say_so(monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), batches_of(6)
    iterator = iter(tables.loader(batches, 0))
    next(iterator)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tables.steps, "_fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    with pytest.raises(RuntimeError, match="was interrupted"):
        next(iterator)


def test_a_server_with_half_a_row_is_an_error(monkeypatch):
    server = FaultyServer()
    server.server.push("ebc.one", np.array([3]), [np.ones((1, 2), np.float32)])
    tables = Tables(ROWS, monkeypatch, server)
    with pytest.raises(ServerError, match="row 3 of table 'ebc.one' must have 2 parts .* the server has 1"):
        list(tables.loader([kjt_of([3], [], [])], 0))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("older", [False, True])
def test_a_server_that_has_lost_rows_is_noticed_before_one_begins_anew(depth, older, monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), batches_of(8)
    iterator, step, copy = iter(tables.loader(batches, depth)), 0, None
    with pytest.raises(LostRowsError, match="restarted empty or from an older copy"):
        for step in range(len(batches)):
            tables.step(batches[step].to_dict(), next(iterator).to_dict(), step)
            if step == 10:
                copy = dict(tables.server.kept)
            if step == 20:
                assert copy != tables.server.kept
                tables.server.kept.clear()
                tables.server.kept.update(copy if older else {})
    assert step > 20


def test_a_job_goes_on_with_a_server_that_another_one_has_filled(monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), batches_of(9)
    for _ in range(3):
        train(tables, tables.loader(batches, 1), batches)
        tables.steps.save()
        rows, tables = tables.rows, Tables(ROWS, monkeypatch, tables.server)
        tables.rows = rows


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_server_that_loses_what_an_earlier_job_pushed_is_noticed_before_this_one_has_pushed(depth, monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), batches_of(9)
    train(tables, tables.loader(batches, depth), batches)
    tables.steps.save()
    tables = Tables(ROWS, monkeypatch, tables.server)
    few = [kjt_of([id], [], []) for id in range(ROWS)]  # none leaves, and not all are pulled at once
    iterator = iter(tables.loader(few, depth))
    next(iterator)
    tables.server.kept.clear()
    with pytest.raises(LostRowsError, match="the server says 0"):
        list(iterator)


def test_a_job_that_only_reads_may_be_beside_one_that_pushes(monkeypatch):
    tables, few = Tables(ROWS, monkeypatch), [kjt_of([id], [], []) for id in range(4)]
    beside = Tables(ROWS, monkeypatch, tables.server)
    reading = iter(beside.loader(few, 0))
    for batch in tables.loader(few, 0):
        del batch
        tables.steps.save()
        next(reading)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("when", range(6))
def test_a_batch_is_not_lost_to_an_interrupt_while_it_is_waited_for(depth, when, monkeypatch):
    tables, batches = Tables(ROWS, monkeypatch), batches_of(10, count=8)
    main, asked = threading.current_thread(), []
    gather = tables.steps.gather

    def interrupted(kjts):
        asked.append(threading.current_thread() is main)
        if len(asked) == when + 1:
            raise KeyboardInterrupt
        return gather(kjts)

    monkeypatch.setattr(tables.steps, "gather", interrupted)
    iterator, step = iter(tables.loader(batches, depth)), 0
    while step < len(batches):
        with contextlib.suppress(KeyboardInterrupt):
            tables.step(batches[step].to_dict(), next(iterator).to_dict(), step)
            step += 1
    assert next(iterator, None) is None and all(asked)
