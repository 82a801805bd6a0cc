"""The lookups that a call of `build` makes, those that it is expected to make, and what becomes of each."""

import threading

import pytest
import torch

from oneemb.graph import ops
from oneemb.graph.arguments import Lookup, Planned
from oneemb.graph.build_error import BuildError
from oneemb.graph.building import Building, Expected, building_now
from oneemb.graph.tape import Tape
from oneemb.storage.errors import StoreFullError
from tests.support.graph_models import make_embedding, rows_of
from tests.support.keys import limit_rows


@pytest.fixture
def embedding():
    embedding = make_embedding("a", 4, 1)
    embedding(torch.arange(10))
    return embedding


class Counted:
    """Counts calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1


def expect(embedding, ids, table_ids=None, offsets=None, per_sample_weights=None, pooling="sum", reads=True):
    """A lookup that is expected: `reserve`d and, if its keys are known, read."""
    ids = ids.clone()
    keys = ops.unique_keys(ids, table_ids, embedding.num_tables, torch.int64, embedding.padding_idx, offsets)
    reserved = ops.reserve(embedding.store, keys)
    rows = ops.gather(reserved.acquire(), per_sample_weights, pooling) if reads else None
    store = embedding.store
    lookup = Lookup(ids, table_ids, offsets, None, per_sample_weights, pooling)
    return Expected(Planned("a", lookup, reserved, rows), store.changes, False)


def peeked(embedding, ids):
    """A lookup that is expected of an embedding that is not trained."""
    keys = ops.unique_keys(ids, None, embedding.num_tables, torch.int64, None)
    rows = ops.peek(embedding.store, keys)
    return Expected(Planned("a", Lookup(ids.clone()), rows=rows), embedding.store.changes, False)


def pinned(embedding):
    return embedding.stats()["device"]["pinned"]


def test_a_lookup_that_was_expected_uses_its_rows(embedding):
    ids, all_made = torch.arange(5), Counted()
    lookup = expect(embedding, ids)
    building = Building({embedding.store: "a"}, [lookup], all_made)

    read = lookup.rows.data_ptr()

    @building.call
    def rows():
        assert all_made.calls == 0 and building.in_vain == ["a"]
        rows = embedding(ids)
        assert all_made.calls == 1 and building.others == 0 and not building.in_vain
        return rows

    assert rows.data_ptr() == read
    assert torch.equal(rows, embedding(ids)) and not lookup.has_grad
    rows.sum().backward()
    assert lookup.has_grad and embedding.weight.grad.row_values().tolist() == [[1.0] * 4] * 5
    lookup.drop()
    assert pinned(embedding) == 0


def test_rows_are_used_once(embedding):
    lookup = expect(embedding, torch.arange(5))
    building = Building({embedding.store: "a"}, [lookup])

    read = lookup.rows.data_ptr()

    @building.call
    def both():
        one, other = embedding(torch.arange(5)), embedding(torch.arange(5))
        assert building.others == 1
        return one, other

    one, other = both

    assert one.data_ptr() == read != other.data_ptr() and torch.equal(one, other)


OTHER = {
    "other ids": dict(ids=torch.arange(1, 7)),
    "ids of another shape": dict(ids=torch.arange(6).reshape(2, 3), offsets=None, per_sample_weights=None),
    "fewer ids": dict(ids=torch.arange(5), per_sample_weights=torch.ones(5), offsets=torch.tensor([0, 2, 5])),
    "no offsets": dict(offsets=None, per_sample_weights=None),
    "other offsets": dict(offsets=torch.tensor([0, 3, 6])),
    "tables": dict(table_ids=torch.tensor(0)),
    "offsets of another dtype": dict(offsets=torch.tensor([0, 2, 6], dtype=torch.int32)),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_lookup_is_made_as_in_eager_mode(embedding, name):
    given = dict(ids=torch.arange(6), offsets=torch.tensor([0, 2, 6]), per_sample_weights=torch.ones(6))
    lookup = expect(embedding, **given)
    wanted = embedding(**(given | OTHER[name]))
    building = Building({embedding.store: "a"}, [lookup])

    @building.call
    def rows():
        rows = embedding(**(given | OTHER[name]))
        assert (building.others, building.in_vain) == (1, ["a"])
        return rows

    assert torch.equal(rows, wanted)
    lookup.drop()
    del rows, wanted
    assert pinned(embedding) == 0


@pytest.mark.parametrize(
    "other",
    [dict(pooling="mean"), dict(pooling="max"), dict(per_sample_weights=torch.full((6,), 2.0)), {}],
    ids=["mean", "max", "weights", "weights that get a gradient"],
)
@pytest.mark.parametrize("known", [True, False], ids=["read", "not read"])
def test_bags_of_another_pooling_are_read_again_from_the_same_rows(embedding, other, known):
    ids, offsets = torch.arange(6), torch.tensor([0, 2, 6])
    other = other or dict(per_sample_weights=torch.full((6,), 2.0, requires_grad=True))
    lookup = expect(embedding, ids, None, offsets, reads=known)
    if not known:
        lookup.lookup = lookup.lookup._replace(pooling=None)
    wanted = embedding(ids, None, offsets, **other)
    building = Building({embedding.store: "a"}, [lookup])

    @building.call
    def rows():
        rows = embedding(ids, None, offsets, **other)
        assert (building.others, building.in_vain) == (0, [])
        return rows

    assert torch.equal(rows, wanted)
    gradients = []
    for each in (rows, wanted):
        each.square().sum().backward()
        gradients.append(embedding.weight.grad.row_values())
        embedding.weight.grad = None
    assert torch.equal(*gradients)


def test_rows_that_have_changed_are_read_again(embedding):
    ids = torch.arange(5)
    lookup = expect(embedding, ids)
    building = Building({embedding.store: "a"}, [lookup])

    @building.call
    def _build():
        slot_U, _ = embedding.store.acquire(lookup.reserved.acquire().keys.unique)
        embedding.store.weight_SX[slot_U] = 7
        embedding.store.mark_dirty(None, slot_U)
        embedding.store.release(slot_U)
        assert embedding(ids).tolist() == [[7.0] * 4] * 5 and building.others == 0


def test_rows_that_were_replaced_are_looked_up_anew(embedding):
    ids = torch.arange(5)
    wanted = embedding(ids).detach().clone()
    lookup = expect(embedding, ids)
    embedding.clear()
    building = Building({embedding.store: "a"}, [lookup])

    @building.call
    def rows():
        rows = embedding(ids)
        assert torch.equal(rows, wanted) and embedding.stats()["rows"] == 5
        return rows

    rows.sum().backward()  # not of rows that are gone


def test_an_unknown_id_is_inserted_when_build_asks_for_it(embedding):
    lookup = expect(embedding, torch.tensor([100, 3]), reads=False)
    building = Building({embedding.store: "a"}, [lookup])

    @building.call
    def _build():
        assert (0, 100) not in rows_of(embedding)
        embedding(torch.tensor([100, 3]))
        assert (0, 100) in rows_of(embedding)


def test_without_a_gradient_rows_have_none(embedding):
    ids = torch.arange(5)
    building = Building({embedding.store: "a"}, [expect(embedding, ids)])

    @building.call
    def _build():
        with torch.no_grad():
            assert not embedding(ids).requires_grad and building.others == 0

    embedding.eval().requires_grad_(False)
    lookup = peeked(embedding, ids)
    building = Building({embedding.store: "a"}, [lookup])

    @building.call
    def _build():
        rows = embedding(ids)
        assert rows.data_ptr() == lookup.rows.data_ptr() and building.others == 0 and not rows.requires_grad


def test_rows_without_a_lease_do_not_serve_where_a_gradient_may_come(embedding):
    lookup = peeked(embedding, torch.arange(5))
    building = Building({embedding.store: "a"}, [lookup])

    @building.call
    def rows():
        rows = embedding(torch.arange(5))
        assert building.others == 1
        return rows

    rows.sum().backward()
    assert len(embedding.weight.grad.row_values()) == 5


def test_an_embedding_in_eval_mode_is_inserted_by_no_lookup(embedding):
    embedding.eval()
    ids = torch.tensor([200, 3])
    keys = ops.unique_keys(ids, None, 1, torch.int64, None)
    lease = ops.acquire_later(embedding.store, keys)
    lookup = Expected(Planned("a", Lookup(ids.clone()), lease, ops.gather(lease)), embedding.store.changes, False)
    building = Building({embedding.store: "a"}, [lookup])

    @building.call
    def rows():
        rows = embedding(ids)
        assert building.others == 0 and rows.requires_grad
        return rows

    assert (0, 200) not in rows_of(embedding)
    rows.sum().backward()
    assert lookup.has_grad


def test_lookups_may_come_in_any_order(embedding):
    several, all_made = [torch.arange(i, i + 4) for i in range(4)], Counted()
    expected = [expect(embedding, ids) for ids in several]
    building = Building({embedding.store: "a"}, expected, all_made)

    read = [lookup.rows.data_ptr() for lookup in expected]

    @building.call
    def _build():
        for i in (2, 0, 3, 1):
            assert all_made.calls == 0
            assert embedding(several[i]).data_ptr() == read[i]
        assert all_made.calls == 1 and building.others == 0
        embedding(several[0])

    assert all_made.calls == 1


def test_leases_have_the_order_in_which_lookups_were_made(embedding):
    """Gradients of a row are summed in this order."""
    embedding.eval()
    several = [torch.arange(i, i + 4) for i in range(3)]
    expected = []
    for ids in several:
        lease = ops.acquire_later(embedding.store, ops.unique_keys(ids, None, 1, torch.int64, None))
        expected.append(Expected(Planned("a", Lookup(ids), lease, ops.gather(lease)), embedding.store.changes, False))
    building = Building({embedding.store: "a"}, expected)

    @building.call
    def made():
        return {i: embedding(several[i]) for i in (2, 0, 1)}

    order = {i: rows.grad_fn.lease.order for i, rows in made.items()}
    assert sorted(order, key=order.__getitem__) == [2, 0, 1]


def test_all_made_is_said_once_and_when_rows_are_acquired(embedding):
    all_made = Counted()
    Building({}, [], all_made)
    assert all_made.calls == 1

    class Reserved:
        inserts = True

        def acquire(self):
            assert told.calls == 0
            return lookup.acquire()

        def drop(self):
            pass

        def forget(self):
            lookup.forget()

    told, expected = Counted(), expect(embedding, torch.arange(3))
    lookup, expected.reserved = expected.reserved, Reserved()
    building = Building({embedding.store: "a"}, [expected], told)

    @building.call
    def _build():
        embedding(torch.arange(4))
        assert told.calls == 0
        embedding(torch.arange(3))
        assert told.calls == 1


def test_a_lookup_that_build_does_not_make_is_never_said_to_be_made(embedding):
    all_made = Counted()
    lookup = expect(embedding, torch.arange(3), reads=False)
    building = Building({embedding.store: "a"}, [lookup], all_made)
    with pytest.raises(ZeroDivisionError):
        building.call(lambda: 1 / 0)
    assert all_made.calls == 0 and building.in_vain == ["a"] and building_now() is None


def test_what_is_expected_gives_way_to_a_lookup_that_finds_no_room():
    embedding, all_made = make_embedding("a", 64, 1, "ssd"), Counted()
    room = 2**20 // (4 * 64)
    known = torch.arange(room * 3 // 4)
    with torch.no_grad():
        embedding(known)
    lookup = expect(embedding, known)
    building = Building({embedding.store: "a"}, [lookup], all_made)

    @building.call
    def rows():
        rows = embedding(known + 100_000)
        assert all_made.calls == 1 and not building.in_vain
        return rows

    assert len(rows) == len(known)
    limit_rows(embedding.store, embedding.stats()["rows"])
    del rows
    for expected in ([], [expect(embedding, torch.arange(3))]):
        with pytest.raises(StoreFullError):
            Building({embedding.store: "a"}, expected).call(embedding, known + 200_000)


def test_an_embedding_that_is_no_part_of_the_graph(embedding):
    building = Building({})

    @building.call
    def _build():
        with pytest.raises(BuildError, match="'a', looked up at .*test_building.py.*is no part of the graph"):
            embedding(torch.arange(3))
        with torch.no_grad():
            assert embedding(torch.arange(3)).shape == (3, 4)
        embedding.requires_grad_(False)
        assert embedding(torch.arange(3)).shape == (3, 4)


def test_what_no_lookup_takes_is_refused_by_the_lookup(embedding):
    building = Building({embedding.store: "a"}, [expect(embedding, torch.arange(3))])

    @building.call
    def _build():
        for wrong in ([1, 2], None, torch.arange(3.0), torch.arange(3, dtype=torch.int32)):
            with pytest.raises((TypeError, AttributeError), match="ids|NoneType"):
                embedding(wrong)
        assert building.in_vain == ["a"]


def test_the_inner_of_nested_calls_is_asked(embedding):
    ids = torch.arange(3)
    outer, inner = expect(embedding, ids), expect(embedding, ids)
    assert building_now() is None
    one, other = Building({embedding.store: "a"}, [outer]), Building({embedding.store: "a"}, [inner])

    def build_inner():
        assert building_now() is other
        return embedding(ids)

    read = [inner.rows.data_ptr(), outer.rows.data_ptr()]

    @one.call
    def _build():
        assert other.call(build_inner).data_ptr() == read[0]
        assert building_now() is one and one.in_vain == ["a"]
        assert embedding(ids).data_ptr() == read[1]

    assert building_now() is None


def test_another_thread_looks_up_as_in_eager_mode(embedding):
    lookup, found = expect(embedding, torch.arange(3)), []

    def run():
        found.append(building_now())
        found.append(embedding(torch.arange(3)).tolist())

    building = Building({embedding.store: "a"}, [lookup])

    @building.call
    def _build():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert building.in_vain == ["a"]
        assert found == [None, embedding(torch.arange(3)).tolist()]


def test_a_tape_notes_lookups_that_are_made_as_in_eager_mode(embedding):
    ids = torch.arange(3)
    tape = Tape([ids], ["ids"])
    building = Building({embedding.store: "a"}, tape=tape)

    @building.call
    def _build():
        rows = embedding(ids + 1)
        embedding(rows.long()[:, 0])
        assert building.others == 0 and rows.requires_grad

    assert tape.others == 1
    assert [node.target for node in tape.graph().nodes if node.op == "call_module"] == ["a"]


def test_backward_is_called_in_its_place(embedding):
    called = []
    x = torch.ones(2, requires_grad=True)
    building = Building({}, backward=lambda *args, **kwargs: called.append((len(args), kwargs["retain_graph"])))
    building.call(lambda: x.sum().backward(retain_graph=True))
    assert called == [(1, True)] and x.grad is None
    Building({}).call(lambda: x.sum().backward())
    assert x.grad.tolist() == [1, 1]


def test_the_ids_of_the_batch_itself_are_not_compared_where_that_would_wait(embedding):
    ids = torch.arange(5)
    for waits, change, matches in ((True, False, True), (True, True, False), (False, True, False)):
        lookup = expect(embedding, ids)
        planned = Planned("a", Lookup(ids.clone()), lookup.reserved, lookup.rows, ids)
        lookup = Expected(planned, lookup.changes, waits)
        if change:
            ids.add_(1)
        assert lookup.is_of(Lookup(ids)) == matches


def test_ids_of_inference_mode_are_compared_as_they_count_no_changes(embedding):
    with torch.inference_mode():
        ids = torch.arange(5)
    lookup = Expected(Planned("a", Lookup(ids.clone()), origin=ids), 0, True)
    assert lookup.is_of(Lookup(ids))
    with torch.inference_mode():
        ids.add_(1)
    assert not lookup.is_of(Lookup(ids))
