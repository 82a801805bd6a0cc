"""The stacked tiers: rows known and snapshots are the same on every store; what fails leaves the rows as they were."""

import inspect
import warnings

import numpy as np
import pytest
import torch

from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.init_rows import CONSTANT, UNIFORM, InitialRows
from oneemb.kernels.threads import Threads
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import BrokenStoreError, StorageError, StoreFullError
from oneemb.storage.locking import pins as pin_module
from oneemb.storage.rows import store_form
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.tiers import reservation, stack
from oneemb.storage.tiers.hot_tier import HotTier
from oneemb.storage.tiers.memory_limit import MemoryLimit
from oneemb.storage.tiers.stack import StorePlan
from tests.support.inside import reserved_bytes
from tests.support.keys import distinct
from tests.support.pairwise import covering
from tests.support.row_store_suite import DictBottom, keys_of

DIM = 4
KIB = 1 << 10
# A row with 8 values of state takes 48 bytes and 40 beside it: a cache of 4 KiB holds 46 of them.
PLANS = {
    "device": dict(cache_bytes=None, host_bytes=0),
    "host": dict(cache_bytes=4 * KIB, host_bytes=None),
    "ssd": dict(cache_bytes=4 * KIB, host_bytes=0),
    "ssd, host cache": dict(cache_bytes=4 * KIB, host_bytes=16 * KIB),
}
ADAM = "adam", np.zeros(2 * DIM, np.float32)
ADAGRAD = "adagrad", np.full(DIM, 0.1, np.float32)
SGD = "sgd", np.empty(0, np.float32)


@pytest.fixture
def open_store(tmp_path):
    opened = []

    def open_store(
        kind="device", *, seed=1, capacity=None, path="rows", dim=DIM, dtype="float32", threads=2, bottom=None
    ):
        initial = InitialRows(
            seed, np.array([[UNIFORM], [CONSTANT]]), np.array([[[-1, 1, 0, 0]], [[0.5, 0, 0, 0]]], np.float64),
            np.array([dim], np.int64),
        )  # fmt: skip
        plan = StorePlan(str(tmp_path / path), capacity=capacity, physical_block_size=512, **PLANS[kind])
        store = EmbeddingStore(
            dim=dim, dtype=dtype, initial=initial, plan=plan, threads=Threads(threads), bottom=bottom
        )
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()


def keys(*numbers, table=0):
    return distinct(*keys_of([(table, n) for n in numbers]))


def values(store, *numbers, table=0):
    return store.read(keys(*numbers, table=table))[0]


def train(store, *numbers, value=None, table=0):
    """A step that writes random values, or `value`, into all words of these rows."""
    slot_U = store.acquire(keys(*numbers, table=table))[0]
    rng = np.random.default_rng(list(numbers))
    store.row_SW[slot_U] = rng.normal(size=(len(numbers), store.format.row_width)) if value is None else value
    store.mark_dirty(None, slot_U)
    store.release(slot_U)
    store.step += 1


def everything(store, up_to=400):
    return store.stats()["rows"], store.step, store.format.optimizer, values(store, *range(up_to)).tobytes()


def spoil_a_block(path):
    """Flip a bit of the first row in the oldest chunk."""
    chunk = sorted(path.glob("chunks/*.rows"))[0]
    data = bytearray(chunk.read_bytes())
    data[4096 + 5] ^= 1
    chunk.write_bytes(data)


@pytest.mark.parametrize("kind", PLANS)
def test_a_store_holds_no_row_and_no_file_before_it_is_built(kind, open_store, tmp_path):
    store = open_store(kind)
    assert not store.built and store.stats()["rows"] == 0 and store.snapshots.names() == []
    assert list((tmp_path / "rows").iterdir()) == []
    other = open_store(kind)
    other.form.attach(*ADAM)
    initial = values(other, 5, -9)
    assert values(store, 5, -9).tobytes() == np.ascontiguousarray(initial[:, :DIM]).tobytes()
    assert (initial[:, DIM:] == 0).all() and other.stats()["rows"] == 0


@pytest.mark.parametrize("kind", PLANS)
def test_rows_are_the_same_on_every_store(kind, open_store):
    one, two = open_store("device", path="one"), open_store(kind, path="two")
    rng = np.random.default_rng(0)
    for store in (one, two):
        store.form.attach(*ADAGRAD)
    for step in range(40):
        numbers = rng.permutation(300)[:30].tolist()
        for store in (one, two):
            train(store, *numbers, table=step % 2)
        read = rng.permutation(400)[:35].tolist()
        assert values(one, *read, table=step % 2).tobytes() == values(two, *read, table=step % 2).tobytes()
        assert one.stats()["rows"] == two.stats()["rows"] and one.changes == two.changes
    if kind != "device":
        assert two.stats()["device"]["evicted"] > 100
    if kind == "ssd, host cache":
        assert two.stats()["host"]["evicted"] > 100
    assert {name for name in two.stats() if isinstance(two.stats()[name], dict)} == {
        "device": {"device", "persistent"},
        "host": {"device", "host", "persistent"},
        "ssd": {"device", "persistent"},
        "ssd, host cache": {"device", "host", "persistent"},
    }[kind]


@pytest.mark.parametrize("saved_by", PLANS)
@pytest.mark.parametrize("loaded_by", PLANS)
def test_a_snapshot_of_any_store_loads_into_any_other(saved_by, loaded_by, open_store):
    store = open_store(saved_by)
    store.form.attach(*ADAM)
    for begin in range(0, 200, 40):
        train(store, *range(begin, begin + 40))
    store.snapshots.save("s", {"a": 1})
    expected = everything(store)
    train(store, *range(10))
    store.close()
    other = open_store(loaded_by)
    assert other.snapshots.load("s") and everything(other) == expected
    train(other, *range(100, 140))
    other.snapshots.load("s")
    assert everything(other) == expected


@pytest.mark.parametrize("kind", PLANS)
def test_a_read_inserts_nothing_and_changes_nothing(kind, open_store):
    store = open_store(kind)
    store.form.attach(*ADAM)
    train(store, 1, 2)
    changes = store.changes
    assert values(store, 1, 2, 3, 4)[2:].tobytes() == values(store, 3, 4).tobytes()
    assert store.stats()["rows"] == 2 and store.changes == changes


def test_changes_count_what_changes_rows(open_store):
    store = open_store()
    store.form.attach(*ADAM)
    seen = [store.changes]

    def changed():
        seen.append(store.changes)
        return seen[-1] != seen[-2]

    store.release(store.acquire(keys(1, 2))[0])
    assert changed()
    slot_U = store.acquire(keys(1))[0]
    assert not changed()
    store.mark_dirty(None, slot_U)
    assert changed()
    store.release(slot_U)
    store.snapshots.save("s", {})
    assert not changed()
    store.snapshots.load("s")
    assert changed()
    store.clear()
    assert changed()


@pytest.mark.parametrize("call", ["load", "clear"])
def test_slots_of_before_mean_nothing_after_a_load(call, open_store):
    store = open_store()
    store.form.attach(*ADAM)
    store.snapshots.save("s", {})
    generation = store.generation
    store.snapshots.load("s") if call == "load" else store.clear()
    assert store.generation != generation


def test_abandoned_pins_are_released_by_the_next_acquire(open_store):
    store = open_store("ssd")
    store.form.attach(*ADAM)
    store.snapshots.save("before", {})

    class Owner:
        pass

    dropped, kept, of_old_rows = Owner(), Owner(), Owner()
    store.pins.own(of_old_rows, store.acquire(keys(7))[0])
    store.snapshots.load("before")
    store.pins.own(dropped, store.acquire(keys(*range(30)))[0])
    pins = store.pins.own(kept, store.acquire(keys(*range(30, 36)))[0])
    del dropped, of_old_rows
    store.release(store.acquire(keys(*range(100, 140)))[0])
    assert store.stats()["device"]["pinned"] == 6
    store.pins.release(pins)
    store.pins.release(pins)
    assert store.stats()["device"]["pinned"] == 0


@pytest.mark.parametrize("temporary", [False, True])
def test_pins_that_get_no_owner_for_want_of_memory_are_released(temporary, open_store, monkeypatch):
    def no_memory(*arguments):
        raise MemoryError

    store = open_store("ssd")
    store.form.attach(*ADAM)
    key = keys(*range(30))
    slot_U = store.hot.make_temporary(key.table_U, key.id_U) if temporary else store.acquire(key)[0]
    if temporary:  # Each row is pinned twice: for its lookup, and because its slot is in no index.
        store.pins.note_places(slot_U, np.full(30, -1), slot_U)
    monkeypatch.setattr(pin_module, "Pins", no_memory)
    with pytest.raises(MemoryError):
        store.pins.own(pytest, slot_U)
    assert store.stats()["device"]["pinned"] == 0 and store.check_slots() == []


# ---- optimizers that come, stay, and differ --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANS)
def test_rows_begun_before_the_optimizer_get_its_state(kind, open_store):
    # More rows than the cache has slots: they cannot be brought in at once.
    store = open_store(kind)
    store.build()
    for begin in range(0, 300, 30):
        store.release(store.acquire(keys(*range(begin, begin + 30)))[0])
    weights = values(store, *range(300))
    store.form.attach(*ADAGRAD)
    rows = values(store, *range(300))
    assert store.stats()["rows"] == 300
    assert rows[:, :DIM].tobytes() == weights.tobytes() and (rows[:, DIM:] == np.float32(0.1)).all()
    assert store.snapshots.names() == []


@pytest.mark.parametrize("kind", ["device", "host"])
def test_an_optimizer_whose_wider_rows_do_not_fit_leaves_the_rows(kind, open_store, monkeypatch):
    store = open_store(kind)
    store.build()
    for begin in range(0, 500, 25):
        store.release(store.acquire(keys(*range(begin, begin + 25)))[0])
    store.snapshots.save("users", {})
    weights = values(store, *range(500))
    # A row takes 56 bytes now, with state 88.
    monkeypatch.setattr(reservation, "memory_limit", lambda taken: MemoryLimit(500 * 70, "the limit of the test"))
    with pytest.raises(StoreFullError, match="must hold all of 500"):
        store.form.attach(*ADAM)
    assert store.stats()["rows"] == 500 and store.snapshots.names() == ["users"]
    assert values(store, *range(500)).tobytes() == weights.tobytes()
    monkeypatch.undo()
    store.form.attach(*ADAM)
    assert values(store, *range(500))[:, :DIM].tobytes() == weights.tobytes() and store.snapshots.names() == ["users"]


def _rows_and_weights(store, count=500):
    store.build()
    for begin in range(0, count, 25):
        store.release(store.acquire(keys(*range(begin, begin + 25)))[0])
    return values(store, *range(count))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["device", "host"])
def test_a_limit_that_shrinks_while_rows_are_made_wider_breaks_nothing(kind, fails, open_store, monkeypatch):
    store = open_store(kind)
    weights = _rows_and_weights(store)
    before = reserved_bytes()
    limit, close, reload = [1 << 30], HotTier.close, HotTier.reload
    monkeypatch.setattr(reservation, "memory_limit", lambda taken: MemoryLimit(limit[0], "the limit of the test"))

    def close_and_shrink(tier):  # The rows are in no tier any more.
        close(tier)
        limit[0] = 1000

    def fail_once(tier):
        monkeypatch.setattr(HotTier, "reload", reload)
        reload(tier)
        raise StorageError("the disk fails")

    monkeypatch.setattr(HotTier, "close", close_and_shrink)
    if fails:
        monkeypatch.setattr(HotTier, "reload", fail_once)
        with pytest.raises(StorageError, match="the disk fails"):
            store.form.attach(*ADAM)
    else:
        store.form.attach(*ADAM)
    assert limit[0] == 1000
    assert store.stats()["rows"] == 500 and store.snapshots.names() == []
    assert values(store, *range(500))[:, :DIM].tobytes() == weights.tobytes()
    assert not reservation._grants
    assert reserved_bytes() <= before + 500 * 88  # and no grant is left in the book
    with pytest.raises(StoreFullError, match="slots"):
        store.acquire(keys(*range(10_000, 30_000)))


@pytest.mark.parametrize("kind", ["device", "host"])
def test_wider_rows_for_which_others_leave_no_memory_are_refused_before_anything_moves(kind, open_store, monkeypatch):
    store = open_store(kind)
    weights, closed = _rows_and_weights(store), []
    other = reservation.Reservation("other", 10 << 20)
    limit = int((reserved_bytes() + 1000) / 0.9)
    monkeypatch.setattr(reservation, "memory_limit", lambda taken: MemoryLimit(limit, "the limit of the test"))
    monkeypatch.setattr(HotTier, "close", lambda tier: closed.append(tier))
    with pytest.raises(StoreFullError, match="needs 2 MiB; .* of which other tiers have reserved"):
        store.form.attach("adam", np.zeros(1000, np.float32))  # 2 MiB for all, of 10 MiB that another tier has
    assert not closed and store.snapshots.names() == []
    assert values(store, *range(500)).tobytes() == weights.tobytes()
    other.release()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", PLANS)
def test_rows_survive_an_optimizer_that_cannot_be_attached(kind, times, open_store, monkeypatch):
    store = open_store(kind)
    store.build()
    store.release(store.acquire(keys(*range(40)))[0])
    weights = values(store, *range(40))
    reload, left = HotTier.reload, [times]

    def fail(tier):
        if left[0]:
            left[0] -= 1
            raise StorageError("the disk fails")
        reload(tier)

    monkeypatch.setattr(HotTier, "reload", fail)
    with pytest.raises(StorageError, match="the disk fails") as caught:
        store.form.attach(*ADAM)
    if times == 1:
        assert store.snapshots.names() == [] and store.format.state_width == 0
    else:  # There was no way back either: the store says so, and where the rows are.
        (name,) = store.snapshots.names()
        assert any(name in note for note in caught.value.__notes__)
        with pytest.raises(BrokenStoreError, match="load_snapshot"):
            store.acquire(keys(1))[0]
        store.snapshots.load(name)
    assert store.stats()["rows"] == 40 and values(store, *range(40))[:, :DIM].tobytes() == weights.tobytes()


@pytest.mark.parametrize("kind", PLANS)
def test_weights_loaded_before_the_optimizer_are_kept(kind, open_store):
    # Saved under another seed, so that rows begun anew would hold other weights.
    pretrained = open_store(kind, seed=2)
    pretrained.build()
    pretrained.release(pretrained.acquire(keys(1, 2, 3))[0])
    weights = values(pretrained, 1, 2, 3)
    pretrained.snapshots.save("pretrained", {})
    pretrained.close()
    store = open_store(kind, seed=1)
    store.snapshots.load("pretrained")
    store.form.attach(*ADAM)
    assert values(store, 1, 2, 3)[:, :DIM].tobytes() == weights.tobytes()
    assert store.snapshots.names() == ["pretrained"] and store.stats()["rows"] == 3


@pytest.mark.parametrize("kind", PLANS)
def test_weights_loaded_after_the_optimizer_get_its_state(kind, open_store):
    pretrained = open_store(kind, seed=2)
    pretrained.build()
    pretrained.release(pretrained.acquire(keys(1, 2, 3))[0])
    weights = values(pretrained, 1, 2, 3)
    pretrained.snapshots.save("pretrained", {})
    pretrained.close()
    store = open_store(kind)
    store.form.attach(*ADAGRAD)
    train(store, 1, 50)
    assert not store.snapshots.load("pretrained")
    rows = values(store, 1, 2, 3)
    assert rows[:, :DIM].tobytes() == weights.tobytes() and (rows[:, DIM:] == np.float32(0.1)).all()
    assert store.step == 0 and store.stats()["rows"] == 3


def test_a_second_optimizer_is_refused_once_rows_hold_state(open_store):
    store = open_store()
    store.form.attach(*ADAGRAD)
    store.form.attach(*ADAM)  # There is no row yet.
    store.release(store.acquire(keys(1))[0])
    store.form.attach(*ADAM)
    with pytest.raises(StorageError, match=r"'adam' \(8 values a row\).*'adagrad' \(4 values\); attach 'adam'"):
        store.form.attach(*ADAGRAD)
    trained = open_store(path="sgd")
    trained.form.attach(*SGD)
    train(trained, 1)
    with pytest.raises(StorageError, match="'sgd'.*'adam'"):
        trained.form.attach(*ADAM)


def test_a_snapshot_says_whose_state_it_holds(open_store):
    store = open_store()
    store.form.attach(*ADAM)
    train(store, 1, 2)
    store.snapshots.save("s", {})
    expected = everything(store)
    store.close()
    other = open_store()
    other.snapshots.load("s")
    other.form.attach(*ADAM)
    assert everything(other) == expected
    with pytest.raises(StorageError, match="'adam'.*'adagrad'"):
        other.form.attach(*ADAGRAD)


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (dict(dim=DIM + 1), "rows of 4 float32 weights, this embedding has 5 float32"),
        (dict(dtype="bfloat16"), "rows of 4 float32 weights, this embedding has 4 bfloat16"),
        (dict(capacity=20), "capacity is 20 rows, 30 are to be loaded"),
        (dict(optimizer=ADAGRAD), r"state of 'adam' \(8 values a row\), the optimizer attached is 'adagrad' \(4 "),
        (dict(name="t"), "'t'.*'s'"),
    ],
    ids=["dim", "dtype", "capacity", "optimizer", "name"],
)
def test_a_snapshot_that_does_not_fit_changes_nothing(kind, wrong, match, open_store):
    store = open_store(kind)
    store.form.attach(*ADAM)
    train(store, *range(30))
    store.snapshots.save("s", {})
    store.close()
    wrong = dict(wrong)
    name, optimizer = wrong.pop("name", "s"), wrong.pop("optimizer", ADAM)
    other = open_store(kind, **wrong)
    if optimizer == ADAM and "capacity" in wrong:
        other.build()  # Rows without state are made anew for a snapshot's.
        other.release(other.acquire(keys(5, 6))[0])
    else:
        other.form.attach(*optimizer)
        train(other, 5, 6)
    before = everything(other)
    with pytest.raises(StorageError, match=match):
        other.snapshots.load(name)
    assert everything(other) == before


@pytest.mark.parametrize("with_state", [True, False], ids=["same width", "made anew"])
@pytest.mark.parametrize("kind", ["device", "host"])
def test_a_damaged_snapshot_leaves_the_rows_as_they_were(kind, with_state, open_store, tmp_path):
    store = open_store(kind)
    store.form.attach(*ADAM)
    train(store, *range(30))
    store.snapshots.save("s", {})
    store.close()
    spoil_a_block(tmp_path / "rows")
    other = open_store(kind)
    if with_state:
        other.form.attach(*ADAM)
    else:
        other.build()
    other.release(other.acquire(keys(5, 6))[0])
    before = everything(other)
    with pytest.raises(StorageError, match="checksum"):
        other.snapshots.load("s")
    assert everything(other) == before


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANS)
def test_capacity_is_the_same_for_every_store(kind, open_store):
    store = open_store(kind, capacity=50)
    store.form.attach(*ADAM)
    train(store, *range(30))
    before = everything(store)
    with pytest.raises(StoreFullError, match="capacity is 50 rows; 30 are kept and 21 new ones were asked for"):
        store.acquire(keys(*range(10, 51)))[0]
    assert everything(store) == before
    train(store, *range(20, 50))
    with pytest.raises(StoreFullError, match="50 are kept and 1 new .* at least 51"):
        store.acquire(keys(0, 1, 99))[0]
    train(store, *range(40))


@pytest.mark.parametrize("kind", ["host", "ssd", "ssd, host cache"])
def test_a_cache_smaller_than_a_step_names_the_size(kind, open_store):
    store = open_store(kind)
    store.form.attach(*ADAM)
    train(store, *range(46))
    before = everything(store)
    with pytest.raises(StoreFullError, match="device tier has 46 slots; 46 .* 1 more rows were asked for, 47 in all"):
        store.acquire(keys(*range(47)))[0]
    assert everything(store) == before


# ---- closing ---------------------------------------------------------------------------------------------------------


def test_a_closed_store_says_so_and_lets_go_of_the_path(open_store):
    store = open_store()
    store.form.attach(*ADAM)
    train(store, 1)
    store.close()
    store.close()
    for call in (
        lambda: store.read(keys(1)),
        lambda: store.form.attach(*ADAM),
        lambda: store.snapshots.save("s", {}),
        lambda: store.snapshots.delete("s"),
    ):
        with pytest.raises(StorageError, match="is closed; make it again"):
            call()
    open_store().form.attach(*ADAM)


def test_a_path_in_use_is_refused_and_the_holder_goes_on(open_store):
    store = open_store()
    store.form.attach(*ADAM)
    train(store, 1)
    before = everything(store)
    second = open_store()
    with pytest.raises(StorageError, match="process"):
        second.form.attach(*ADAM)
    assert not second.built
    train(store, 2)
    store.close()
    second.form.attach(*ADAM)
    assert before != everything(second)


# ---- prefetching ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANS)
def test_prefetched_rows_are_taken_over_by_their_lookup(kind, open_store):
    store, plain = open_store(kind), open_store(kind, path="plain")
    for one in (store, plain):
        one.form.attach(*ADAM)
        train(one, *range(40))
        train(one, *range(60, 100))
    changes = store.changes
    numbers = [*range(10, 30), *range(200, 210)]
    prefetched = store.prefetch(keys(*numbers))
    assert store.changes == changes and store.stats()["rows"] == 80
    assert (prefetched.slot_U[:20] >= 0).all() and (prefetched.slot_U[20:] == -1).all()
    slot_U = store.acquire(keys(*numbers), prefetched)[0]
    assert store.stats()["device"]["pinned"] == 30 and store.stats()["rows"] == 90
    other_U = plain.acquire(keys(*numbers))[0]
    assert store.row_SW[slot_U].tobytes() == plain.row_SW[other_U].tobytes()
    store.release(slot_U)
    assert store.stats()["device"]["pinned"] == 0


@pytest.mark.parametrize("kind", ["host", "ssd"])
def test_prefetched_rows_give_way_to_a_step_that_needs_their_slots(kind, open_store):
    store = open_store(kind)
    store.form.attach(*ADAM)
    train(store, *range(40))
    train(store, *range(40, 80))
    prefetched = store.prefetch(keys(*range(30)))
    slot_U = store.acquire(keys(*range(100, 146)))[0]
    assert not prefetched.held
    store.release(slot_U)
    again_U = store.acquire(keys(*range(30)), prefetched)[0]
    assert values(store, *range(30)).tobytes() == store.row_SW[again_U].tobytes()
    store.release(again_U)
    assert store.stats()["device"]["pinned"] == 0


def test_prefetched_rows_that_nobody_takes_are_let_go(open_store):
    store = open_store("ssd")
    store.form.attach(*ADAM)
    train(store, *range(40))
    prefetched = store.prefetch(keys(*range(40)))
    assert store.stats()["device"]["pinned"] == 40
    store.unprefetch(prefetched)
    store.unprefetch(prefetched)
    assert store.stats()["device"]["pinned"] == 0


@pytest.mark.parametrize("kind", PLANS)
def test_prefetched_rows_that_were_replaced_are_forgotten_by_their_lookup(kind, open_store):
    store = open_store(kind)
    store.form.attach(*ADAM)
    train(store, *range(20))
    prefetched = store.prefetch(keys(*range(20)))
    store.clear()
    slot_U = store.acquire(keys(*range(20)), prefetched)[0]
    assert not store.pins.prefetched and not prefetched.held, "a store would keep the keys of such lookups for ever"
    assert store.stats()["device"]["pinned"] == 20
    store.release(slot_U)


# ---- a store at the bottom that is no persistent table --------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANS)
def test_rows_on_any_row_store_are_those_on_a_persistent_table(kind, open_store):
    bottom = DictBottom()
    one, two = open_store(kind, path="table"), open_store(kind, path="dict", bottom=bottom)
    for store in (one, two):
        store.form.attach(*ADAM)
        for begin in range(0, 200, 40):
            train(store, *range(begin, begin + 40))
    assert everything(one) == everything(two)
    two.hot.flush()
    assert len(bottom.stores[3 * DIM]) == 200
    with pytest.raises(StorageError, match="a dict cannot keep snapshots"):
        two.snapshots.save("s", {})
    with pytest.raises(StorageError, match="a dict cannot keep snapshots"):
        two.snapshots.load("s")
    assert two.snapshots.names() == [] and everything(one) == everything(two)
    for store in (one, two):
        store.clear()
    assert everything(one) == everything(two) and len(bottom.stores[3 * DIM]) == 0


@pytest.mark.parametrize("kind", PLANS)
def test_rows_that_the_store_below_keeps_are_there_when_it_is_opened_again(kind, open_store):
    bottom = DictBottom()
    store = open_store(kind, bottom=bottom)
    store.form.attach(*ADAM)
    for begin in range(0, 100, 20):
        train(store, *range(begin, begin + 20))
    store.hot.flush()
    _, _, optimizer, rows = everything(store)
    store.close()
    again = open_store(kind, bottom=bottom)
    again.form.attach(*ADAM)
    assert everything(again) == (100, 0, optimizer, rows)


def test_rows_that_the_store_below_keeps_must_fit_where_all_of_them_have_to(open_store):
    bottom = DictBottom()
    store = open_store(bottom=bottom)
    store.form.attach(*ADAM)
    train(store, *range(100))
    store.hot.flush()
    store.close()
    with pytest.raises(StoreFullError, match="capacity is 99 rows, 100 are to be loaded"):
        open_store(bottom=bottom, capacity=99).form.attach(*ADAM)


@pytest.mark.parametrize("kind", PLANS)
def test_rows_on_a_store_without_snapshots_keep_their_width(kind, open_store):
    store = open_store(kind, bottom=DictBottom())
    store.build()
    store.form.attach(*ADAGRAD)  # There is no row yet.
    store.form.attach(*ADAM)
    train(store, *range(20))
    rows = open_store(kind, path="other", bottom=DictBottom())
    rows.build()
    rows.release(rows.acquire(keys(*range(20)))[0])
    before = everything(rows)
    with pytest.raises(StorageError, match="attach the optimizer before the first lookup"):
        rows.form.attach(*ADAM)
    assert everything(rows) == before
    rows.form.attach(*SGD)
    assert everything(rows)[2:] == ("sgd", before[3])


class ElsewhereLoops(HostBackend):
    """Loops of another place, which is the host as well."""

    place = "elsewhere"


@pytest.mark.parametrize("bottom", [None, DictBottom])
@pytest.mark.parametrize("kind", PLANS)
def test_rows_move_to_another_place_whatever_is_below(kind, bottom, open_store, monkeypatch):
    monkeypatch.setattr(store_form, "backend_at", lambda device, threads: ElsewhereLoops(threads))
    store = open_store(kind, bottom=bottom and bottom())
    store.form.attach(*ADAM)
    for begin in range(0, 200, 40):
        train(store, *range(begin, begin + 40))
    before, generation = everything(store), store.generation
    store.form.move_to(torch.device("meta"))
    assert store.backend.place == "elsewhere" and everything(store) == before and store.generation != generation
    train(store, *range(20))
    assert store.stats()["rows"] == 200 and store.snapshots.names() == []


@pytest.mark.parametrize("kind", PLANS)
def test_format_backend_and_generation_of_a_store_are_those_of_its_rows(kind, open_store, monkeypatch):
    monkeypatch.setattr(store_form, "backend_at", lambda device, threads: ElsewhereLoops(threads))
    store = open_store(kind)
    calls = [
        (store.build, None),
        (lambda: store.form.attach(*SGD), "sgd"),  # whose rows have the words of rows without an optimizer
        (lambda: store.snapshots.save("of sgd", {}), "sgd"),
        (lambda: store.form.detach("drop"), None),
        (lambda: store.snapshots.load("of sgd"), "sgd"),
        (lambda: store.form.attach(*ADAM), "adam"),
        (lambda: train(store, 1, 2), "adam"),
        (lambda: store.form.detach("sparse_adam"), "sparse_adam"),
        (lambda: store.form.move_to(torch.device("meta")), "sparse_adam"),
        (store.clear, "sparse_adam"),
        (lambda: store.form.detach("drop"), None),
        (store.close, None),
    ]
    for number, (call, optimizer) in enumerate(calls):
        call()
        assert store.format == store.rows.format and store.format.optimizer == optimizer, number
        assert store.backend is store.rows.backend and store.generation == store.rows.generation, number


_CALLS = ("put", "flush", "save_snapshot", "load_snapshot", "delete_snapshot", "scan", "clear", "open")


class FailingCalls:
    """Lets calls of persistent tables and tiers fail, from the `first` on and as many as `times`."""

    def __init__(self, monkeypatch, error, first, times):
        self.error, self.first, self.times, self.calls = error, first, times, 0
        for name in _CALLS:
            self._count(monkeypatch, PersistentTable, name)
        self._count(monkeypatch, stack, "_host_tier")

    def _count(self, monkeypatch, owner, name):
        original = inspect.getattr_static(owner, name)
        call = original.__func__ if isinstance(original, classmethod) else original

        def counted(*args, **kwargs):
            self.calls += 1
            if self.first <= self.calls < self.first + self.times:
                raise self.error
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, classmethod(counted) if isinstance(original, classmethod) else counted)


@pytest.mark.parametrize(
    "kind, what, error, times",
    covering(
        ("device", "host", "ssd"), ("move", "attach"), (StorageError("it fails"), RuntimeError("it fails")), (1, 2, 100)
    ),
)
def test_rows_are_where_they_were_or_where_the_error_says(kind, what, error, times, open_store, monkeypatch):
    monkeypatch.setattr(store_form, "backend_at", lambda device, threads: ElsewhereLoops(threads))
    first = 0
    while True:
        first += 1
        store = open_store(kind, path=f"{first}")
        if what == "move":
            store.form.attach(*ADAM)
            train(store, *range(40))
        else:
            store.build()
            store.release(store.acquire(keys(*range(40)))[0])
        store.snapshots.save("there", {})
        before, weights = everything(store), values(store, *range(40))[:, :DIM]
        error.__notes__ = []
        raised = None
        with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            failing = FailingCalls(patched, error, first, times)
            try:
                store.form.move_to(torch.device("meta")) if what == "move" else store.form.attach(*ADAM)
            except BaseException as caught:
                raised = caught
        done = failing.calls < first
        if raised is None:  # What fails after the rows are where they should be is worth a warning only.
            assert done or "could not be deleted" in str(warned[0].message)
            assert store.format.state_width == 2 * DIM and store.stats()["rows"] == 40
        elif not store.store_lock.broken:
            assert everything(store) == before and store.backend.place == "the CPU"
            assert "there" in store.snapshots.names() and (len(store.snapshots.names()) == 1 or warned)
            train(store, *range(30, 45))
        else:
            noted = [note for note in getattr(raised, "__notes__", ()) if "the rows are in the snapshot" in note]
            if noted:
                (name,) = set(store.snapshots.names()) - {"there"}
                assert name in noted[0]
                store.snapshots.load(name)
                assert (store.stats()["rows"], store.step) == before[:2]
                assert values(store, *range(40))[:, :DIM].tobytes() == weights.tobytes()
            else:
                assert times == 100 and any("nor could they be saved" in note for note in raised.__notes__)
        store.close()
        if done:
            break
    assert first > 2


def test_no_slots_are_given_where_rows_move(open_store):
    store = open_store("ssd")
    store.form.attach(*ADAM)
    train(store, 1, 2)
    assert not store.reads_in_place and store.slots_of(*keys_of([(0, 1), (0, 2)])) is None
