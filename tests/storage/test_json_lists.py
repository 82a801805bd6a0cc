"""JSON with long lists: the same values and texts as the json module, and each long list once."""

import copy
import gc
import json

import pytest
from hypothesis import given, settings, strategies as st

from oneemb.storage.table import json_lists
from oneemb.storage.table.json_lists import LongList, from_json, to_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside) | st.dictionaries(st.integers(), inside),
    max_leaves=20,
)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Lists of five characters are long."""
    monkeypatch.setattr(json_lists, "_LONG_MIN", 5)


def with_long_lists(value):
    if isinstance(value, list):
        return LongList(json.loads(json.dumps(value)))
    return {key: with_long_lists(item) for key, item in value.items()} if isinstance(value, dict) else value


@settings(deadline=None)
@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_values_and_texts_are_those_of_the_json_module(value, indent, ascii_only):
    for one in (value, with_long_lists(value)):
        assert to_json(one) == json.dumps(value)
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    expected = json.loads(text)
    for data in (text, text.encode("utf-8", "surrogatepass"), f" {text}\n"):
        assert from_json(data) == expected
    kept = from_json(text)  # Lists are found again while it is there.
    assert from_json(text) == expected == kept


@settings(deadline=None)
@given(VALUES, st.data())
def test_a_text_is_refused_where_the_json_module_refuses_it(value, data):
    text = json.dumps(value)
    kept = from_json(text)
    at = data.draw(st.integers(0, len(text)))
    for broken in (text[:at] + text[at + 1 :], text[:at] + data.draw(st.sampled_from('{}[],:"1 ')) + text[at:]):
        try:
            expected = json.loads(broken)
        except ValueError:
            with pytest.raises(ValueError):
                from_json(broken)
        else:
            assert from_json(broken) == expected
    del kept


def test_equal_long_lists_of_two_texts_are_one_until_nobody_has_it():
    one, two = from_json('{"a": {"b": [1, 2, 3]}, "c": 1}'), from_json('{"other": [1, 2, 3], "d": [1, 2, 34]}')
    assert one["a"]["b"] is two["other"] and two["d"] == [1, 2, 34]
    assert type(copy.deepcopy(one["a"]["b"])) is list
    del one, two
    gc.collect()
    assert not json_lists._known


@pytest.mark.parametrize("value", [{1, 2}, {"a": {1}}, [object()]])
def test_values_that_json_cannot_hold_are_refused(value):
    with pytest.raises(TypeError):
        to_json(value)


def test_too_deep_a_text_is_a_recursion_error():
    with pytest.raises(RecursionError):
        from_json('{"a":' * 100_000)
