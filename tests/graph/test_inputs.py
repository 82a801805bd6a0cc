"""What of a call is structure, which `build` may branch on, and what is a value."""

from collections import namedtuple

import pytest
import torch

from oneemb.graph.inputs import Signature

Pair = namedtuple("Pair", "first second")


def build(batch, mode="train", fields=("user", "item"), *rest, **options):
    pass


def flatten(*args, **kwargs):
    return Signature(build).flatten(args, kwargs)


@pytest.mark.parametrize(
    "one, other",
    [
        ({"name": "a"}, {"name": "b"}),
        (["a", "b"], ["c", "d", "e"]),
        (("a",), ("b", "c")),
        ({"names": ["a", "b"], "n": 1}, {"names": ["c"], "n": 2}),
        ([torch.ones(2), "a"], [torch.ones(3), "b"]),
        (Pair("a", 1), Pair("b", 2)),
        (3, 4.5),
    ],
)
def test_data_changes_no_structure_and_comes_back_as_it_was(one, other):
    values, structure = flatten(one)
    others, same = flatten(other)
    assert structure == same and hash(structure) == hash(same)
    for batch, flat in ((one, values), (other, others)):
        args, kwargs = Signature(build).call(structure, flat)
        assert args[0] == batch and type(args[0]) is type(batch)
        assert args[1:] == ("train", ("user", "item")) and kwargs == {}


@pytest.mark.parametrize(
    "one, other, said",
    [
        (dict(mode="train"), dict(mode="test"), "mode: 'train', then 'test'"),
        (dict(loss="mse"), dict(loss="bce"), "options['loss']: 'mse', then 'bce'"),
        (dict(batch=[1, None]), dict(batch=[1, 2]), "batch[1]: None, then a value"),
        (dict(batch={"a": True}), dict(batch={"a": False}), "batch['a']: True, then False"),
        (dict(batch=[1]), dict(batch=[1, 2, 3]), "batch: a list of 1, then of 3"),
        (dict(batch={"a": 1}), dict(batch={"b": 1}), "batch: a dict of 'a', then a dict of 'b'"),
        (dict(batch={"a": torch.float32}), dict(batch={"a": torch.float16}), "batch['a']: torch.float32, then"),
        (dict(batch=torch.device("cpu")), dict(batch=torch.device("meta")), "device(type='meta')"),
    ],
)
def test_what_build_may_branch_on_is_structure(one, other, said):
    structures = [flatten(**{"batch": 0, **given})[1] for given in (one, other)]
    assert structures[0] != structures[1] and structures[0].difference(structures[0]) == ""
    assert said in structures[0].difference(structures[1])


def test_true_is_not_one():
    assert flatten(True)[1] != flatten(1)[1]


def test_strings_of_a_default_and_of_the_arguments_after_it_are_structure():
    assert flatten(0)[0] == [0]
    assert flatten(0, "train", ("user",))[0] == [0, ("user",)]
    assert flatten(0, "train", 1, "a", "b")[0] == [0, 1]
    assert flatten(0)[1] == flatten(0, mode="train")[1]
