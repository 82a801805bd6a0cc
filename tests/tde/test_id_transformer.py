"""Cache ids, against a dictionary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from oneemb.tde import IDTransformer, TensorList
from tests.kernels.test_philox import philox_python

EDGES = [0, -1, 1, 2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63), 7, 7 + 2**32, 7 - 2**32, 7 + 2**40]


class Oracle:
    """The rules in plain Python, one id at a time."""

    def __init__(self, rows, least=5):
        self.rows, self.least = rows, least
        self.cache, self.record, self.used = {}, {}, set()

    def use(self, id, time, use):
        if id not in self.record:
            power = self.least
        else:
            power = self.record[id][0]
            words = philox_python((id % 2**32, (id >> 32) % 2**32, time, use // 4), (0, 0))
            if power < 31 and words[use % 4] < 2 ** (32 - power):
                power += 1
        self.record[id] = (power, time)
        self.used.add(id)

    def transform(self, ids, time):
        """Cache ids, -1 where there is no room, and what came."""
        came, uses, found = [], {}, []
        for id in ids:
            if id not in self.cache and len(self.cache) < self.rows:
                self.cache[id] = min(set(range(self.rows)) - set(self.cache.values()))
                came.append([id, self.cache[id]])
            found.append(self.cache.get(id, -1))
            if id in self.cache:
                self.use(id, time, uses.get(id, 0))
                uses[id] = uses.get(id, 0) + 1
        return found, came

    def evict(self, number, kept=()):
        order = sorted((self.record[id], cache, id) for id, cache in self.cache.items() if cache not in kept)
        gone = [[id, cache] for _, cache, id in order[:number]]
        for id, _ in gone:
            del self.cache[id], self.record[id]
            self.used.discard(id)
        return gone

    def save(self):
        found = sorted([[id, self.cache[id]] for id in self.used], key=lambda pair: pair[1])
        self.used.clear()
        return found


def transformed(transformer, ids, time):
    given, cache = torch.tensor(ids, dtype=torch.int64), torch.full((len(ids),), -7)
    result = transformer.transform(TensorList([given]), TensorList([cache]), time)
    return result, cache.tolist()


ids_of_batches = st.lists(st.sampled_from(EDGES) | st.integers(-(2**63), 2**63 - 1), max_size=12)
calls = st.lists(
    st.tuples(st.just("transform"), ids_of_batches)
    | st.tuples(st.just("evict"), st.integers(0, 6))
    | st.tuples(st.just("save"), st.none()),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(calls, st.integers(1, 8), st.sampled_from([0, 1, 5, 31]), st.sampled_from(["naive", "cacheline"]))
def test_a_transformer_does_what_a_dictionary_does(calls, rows, least, kind):
    config = {"type": "mixed_lru_lfu", "min_used_freq_power": least}
    transformer, oracle = IDTransformer(rows, config, {"type": kind}), Oracle(rows, least)
    for time, (call, argument) in enumerate(calls):
        if call == "transform":
            result, cache = transformed(transformer, argument, time)
            found, came = oracle.transform(argument, time)
            assert cache == found and result.ids_to_fetch.tolist() == came
            assert result.success == (-1 not in found)
        elif call == "evict":
            assert transformer.evict(argument).tolist() == oracle.evict(argument)
        else:
            assert transformer.save().tolist() == oracle.save()
        assert len(transformer) == len(oracle.cache)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from(EDGES), min_size=1, max_size=6, unique=True), max_size=10), st.integers(6, 9))
def test_a_full_table_evicts_half_and_nothing_that_is_pinned_or_of_the_batch(batches, rows):
    transformer, oracle, pinned = IDTransformer(rows), Oracle(rows), []
    for time, ids in enumerate(batches):
        id_U = np.array(ids, np.int64)
        new = [id for id in ids if id not in oracle.cache]
        kept = {oracle.cache[id] for id in ids if id in oracle.cache} | set(pinned)
        lacking = len(new) - (rows - len(oracle.cache))
        room = lacking <= len(oracle.cache) - len(kept)
        assert transformer.has_room(id_U) == room
        if not room:
            transformer.unpin(np.array(pinned, np.int64))
            pinned = []
            continue
        gone = oracle.evict(max(rows // 2, lacking), kept) if lacking > 0 else []
        moves = transformer.moves(id_U, np.ones(len(ids), np.int64), time)
        found, came = oracle.transform(ids, time)
        assert moves.evict_E2.tolist() == gone and moves.fetch_F2.tolist() == came and moves.cache_U.tolist() == found
        transformer.unpin(np.array(pinned, np.int64))
        transformer.pin(moves.cache_U)
        pinned = moves.cache_U.tolist()


def test_200_000_ids_are_never_mixed_up():
    rng = np.random.default_rng(3)
    some = rng.integers(-(2**63), 2**63 - 1, 50_000)
    id_N = np.concatenate([some, some ^ 2**32, some ^ -(2**63), np.arange(-25_000, 25_000), EDGES])
    id_N = rng.permutation(np.unique(id_N)[: 200_000 - 1])
    transformer = IDTransformer(200_000)
    begins = range(0, len(id_N), 10_000)
    found = np.concatenate([transformed(transformer, id_N[b : b + 10_000], 0)[1] for b in begins])
    np.testing.assert_array_equal(found, np.arange(len(id_N)))
    gone = transformer.evict(100_000).numpy()
    np.testing.assert_array_equal(id_N[gone[:, 1]], gone[:, 0])
    result, again = transformed(transformer, id_N, 1)
    assert result.success
    np.testing.assert_array_equal(np.sort(again), np.arange(len(id_N)))
    stayed = np.setdiff1d(np.arange(len(id_N)), gone[:, 1])
    np.testing.assert_array_equal(np.array(again)[stayed], stayed)


def test_rarely_used_ids_leave_before_those_used_often():
    transformer = IDTransformer(8)
    for time in range(300):
        transformed(transformer, [1, 2], time)
    transformed(transformer, [3, 4], 300)
    transformed(transformer, [5], 301)
    assert [id for id, _ in transformer.evict(3).tolist()] == [3, 4, 5]


def test_one_step_with_many_uses_is_no_single_use():
    transformer = IDTransformer(8)
    transformed(transformer, [1] * 500 + [2], 0)
    assert transformer.evict(1).tolist() == [[2, 1]]


def test_tensors_of_any_shape_are_transformed_together():
    transformer = IDTransformer(8)
    ids = TensorList([torch.tensor([[5, 6], [5, 7]]), torch.tensor([7, 8]), torch.empty(0, dtype=torch.int64)])
    cache = TensorList([torch.empty_like(its) for its in ids])
    assert transformer.transform(ids, cache, 0).success
    assert [its.tolist() for its in cache] == [[[0, 1], [0, 2]], [2, 3], []] and len(cache) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0,), "num_embedding must be 1 or more"),
        ((4, {"type": "lru"}), "mixed_lru_lfu"),
        ((4, {"type": "mixed_lru_lfu", "power": 3}), "min_used_freq_power"),
        ((4, {"type": "mixed_lru_lfu", "min_used_freq_power": 32}), "from 0 to 31"),
        ((4, None, {"type": "hash"}), "naive, cacheline"),
    ],
)
def test_what_is_not_known_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        IDTransformer(*arguments)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="shapes of global_ids"):
        IDTransformer(4).transform(TensorList([torch.tensor([1])]), TensorList([torch.tensor([1, 2])]), 0)
