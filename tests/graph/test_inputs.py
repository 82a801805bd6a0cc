"""What of a call is structure, for which lookups are recorded anew, and what is a value."""

from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from oneemb.graph.inputs import Signature

Pair = namedtuple("Pair", "first second")


@dataclass
class Sample:
    ids: Any
    more: Any


@dataclass
class Other:
    ids: Any
    more: Any


def build(batch, mode="train", fields=("user", "item"), *rest, **options):
    pass


def flatten(*args, **kwargs):
    return Signature(build).flatten(args, kwargs)


X, Y = torch.ones(2), torch.ones(3)


@pytest.mark.parametrize(
    "one, other, values",
    [
        ({"name": "a"}, {"name": "b"}, ["a"]),
        (["a", "b"], ["c", "d", "e"], [["a", "b"]]),
        (("a",), ("b", "c"), [("a",)]),
        ({"names": ["a", "b"], "n": 1}, {"names": ["c"], "n": 2}, [["a", "b"], 1]),
        ([X, "a"], [Y, "b"], [X, "a"]),
        (Pair("a", 1), Pair("b", 2), ["a", 1]),
        (Sample(X, {"n": [1]}), Sample(Y, {"n": [2.5]}), [X, 1]),
        (3, 4.5, [3]),
        (iter, max, [iter]),
    ],
)
def test_data_is_values_and_changes_no_structure(one, other, values):
    found, structure = flatten(one)
    _, same = flatten(other)
    assert structure == same and hash(structure) == hash(same)
    assert len(found) == len(values) and all(a is b or a == b for a, b in zip(found, values, strict=True))
    assert len(list(structure.names())) == len(values)


def test_values_are_the_objects_themselves_and_have_names_of_their_own():
    batch = {"x": X, "pair": Pair(Y, [X]), "sample": Sample(Y, None)}
    values, structure = flatten(batch, "train", 0, 1, 2, loss=X)
    assert [id(value) for value in values[:4]] == [id(X), id(Y), id(X), id(Y)]
    assert list(structure.names()) == [
        "batch_x", "batch_pair_first", "batch_pair_second_0", "batch_sample_ids", "fields", "rest_0", "rest_1",
        "options_loss",
    ]  # fmt: skip


def test_what_a_class_of_its_own_holds_is_no_structure():
    class Opaque:
        pass

    opaque, ours = Opaque(), UserDict(a=1)
    assert flatten(opaque)[0] == [opaque] and flatten(ours)[0] == [ours]
    assert flatten(Sample)[0] == [Sample]  # the class, not an object of it
    assert flatten({(1, 2): 3})[0] == [{(1, 2): 3}]


@pytest.mark.parametrize(
    "one, other, said",
    [
        (dict(mode="train"), dict(mode="test"), "mode: 'train', then 'test'"),
        (dict(loss="mse"), dict(loss="bce"), "options['loss']: 'mse', then 'bce'"),
        (dict(batch=[1, None]), dict(batch=[1, 2]), "batch[1]: None, then a value"),
        (dict(batch={"a": True}), dict(batch={"a": False}), "batch['a']: True, then False"),
        (dict(batch=[1]), dict(batch=[1, 2, 3]), "batch: a list of 1, then of 3"),
        (dict(batch={"a": 1}), dict(batch={"b": 1}), "batch: a dict of 'a', then a dict of 'b'"),
        (dict(batch=Sample(1, None)), dict(batch=Sample(1, 2)), "batch['more']: None, then a value"),
        (dict(batch=Sample(1, 2)), dict(batch=Other(1, 2)), "batch: a Sample of 'ids', 'more', then a Other"),
        (dict(batch=Sample(1, 2)), dict(batch=dict(ids=1, more=2)), "batch: a Sample of 'ids', 'more', then a dict"),
        (dict(batch={"a": torch.float32}), dict(batch={"a": torch.float16}), "batch['a']: torch.float32, then"),
        (dict(batch=torch.device("cpu")), dict(batch=torch.device("meta")), "device(type='meta')"),
    ],
)
def test_what_says_which_lookups_are_made_is_structure(one, other, said):
    structures = [flatten(**{"batch": 0, **given})[1] for given in (one, other)]
    assert structures[0] != structures[1] and structures[0].difference(structures[0]) == ""
    assert said in structures[0].difference(structures[1])


def test_fields_that_are_not_set_are_no_structure_until_they_are():
    @dataclass
    class Lazy:
        ids: Any
        made: Any = field(init=False)

    lazy = Lazy(X)
    values, before = flatten(lazy)
    assert values == [X]
    lazy.made = Y
    values, after = flatten(lazy)
    assert [id(value) for value in values] == [id(X), id(Y)]
    assert "a Lazy of 'ids', then a Lazy of 'ids', 'made'" in before.difference(after)


def test_true_is_not_one():
    assert flatten(True)[1] != flatten(1)[1]


def test_strings_of_a_default_and_of_the_arguments_after_it_are_structure():
    assert flatten(0)[0] == [0]
    assert flatten(0, "train", ("user",))[0] == [0, ("user",)]
    assert flatten(0, "train", 1, "a", "b")[0] == [0, 1]
    assert flatten(0)[1] == flatten(0, mode="train")[1]
