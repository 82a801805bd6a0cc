"""Ids of strings against the xxhash library, for every kind of column."""

import os

import numpy as np
import pytest
import torch

import oneemb

pa = pytest.importorskip("pyarrow")
pd = pytest.importorskip("pandas")
xxhash = pytest.importorskip("xxhash")

STRINGS = ["", "a", "red", "größe", "日本", "x" * 31, "y" * 32, "z" * 33, "w" * 200, "tail", "a\0b", "red"]


def expected(strings, salt=0):
    data = [one if isinstance(one, bytes) else one.encode() for one in strings]
    return np.array([xxhash.xxh64_intdigest(one, salt) for one in data], np.uint64).view(np.int64).tolist()


COLUMNS = {
    "list": list,
    "tuple": tuple,
    "bytes": lambda strings: [one.encode() for one in strings],
    "objects": lambda strings: np.array(strings, object),
    "series of objects": lambda strings: pd.Series(strings, dtype=object),
    "series of strings": lambda strings: pd.Series(strings, dtype="string"),
    "series of arrow's strings": lambda strings: pd.Series(strings, dtype=pd.ArrowDtype(pa.string())),
    "categories": lambda strings: pd.Series(strings, dtype="category"),
    "index": lambda strings: pd.Index(strings),
    "arrow": pa.array,
    "large": lambda strings: pa.array(strings, pa.large_string()),
    "binary": lambda strings: pa.array([one.encode() for one in strings], pa.large_binary()),
    "view": lambda strings: pa.array(strings, pa.string_view()),
    "dictionary": lambda strings: pa.array(strings, pa.string()).dictionary_encode(),
    "sliced": lambda strings: pa.array(["before", *strings, "after"])[1:-1],
    "chunked": lambda strings: pa.chunked_array([strings[:3], [], strings[3:]], pa.string()),
    "chunked dictionary": lambda strings: pa.chunked_array(
        [pa.array(its, pa.string()).dictionary_encode() for its in (strings[:5], strings[5:])]
    ),
}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("salt", [0, 2**64 - 1])
def test_ids_are_xxh64_of_the_bytes(kind, salt):
    ids = oneemb.hash_ids(COLUMNS[kind](STRINGS), salt=salt)
    assert ids.dtype == torch.int64 and ids.tolist() == expected(STRINGS, salt)


@pytest.mark.parametrize("kind", COLUMNS)
def test_no_strings_and_one_string(kind):
    if "chunked" not in kind:
        assert oneemb.hash_ids(COLUMNS[kind](["one"])).tolist() == expected(["one"])
    empty = oneemb.hash_ids(COLUMNS[kind]([]))
    assert empty.shape == (0,) and empty.dtype == torch.int64


def test_ids_never_change():
    """Rows are kept by these numbers for good."""
    assert oneemb.hash_ids(["", "red", "x" * 33]).tolist() == [
        -1205034819632174695, -3326043860779113110, expected(["x" * 33])[0]
    ]  # fmt: skip
    assert oneemb.hash_ids(["red"], [7]).tolist() == oneemb.hash_ids(np.array(["red"]), torch.tensor([7])).tolist()


def test_random_bytes_of_every_length(seed):
    rng = np.random.default_rng(seed)
    data = [rng.bytes(n) for n in range(300)]
    assert oneemb.hash_ids(data).tolist() == expected(data)
    many = [os.urandom(int(n)) for n in rng.integers(0, 60, 20_000)]
    assert oneemb.hash_ids(many, salt=3).tolist() == expected(many, 3)


def test_shapes_of_arrays():
    strings = np.array([["a", "b"], ["c", "d"]])
    assert oneemb.hash_ids(strings).tolist() == [expected(["a", "b"]), expected(["c", "d"])]


INTEGERS = {
    "tensor": torch.tensor,
    "int32 tensor": lambda values: torch.tensor(values, dtype=torch.int32),
    "array": np.array,
    "list": list,
    "series": pd.Series,
    "arrow": pa.array,
    "chunked": lambda values: pa.chunked_array([values]),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_crosses_are_xxh64_of_eight_bytes_a_column(kind):
    colors, sizes = ["red", "green", "red"], [3, -4, 3]
    ids = oneemb.hash_ids(colors, INTEGERS[kind](sizes), salt=5)
    data = [np.array([color, size], "<i8").tobytes() for color, size in zip(expected(colors, 5), sizes, strict=True)]
    assert ids.tolist() == expected(data, 5)
    assert oneemb.hash_ids(INTEGERS[kind](sizes), colors).tolist() != ids.tolist()  # Order counts.


MISSING = {
    "none": ["a", None],
    "nan": ["a", float("nan")],
    "series": pd.Series(["a", None], dtype="string"),
    "category": pd.Series(["a", None], dtype="category"),
    "arrow": pa.array(["a", None]),
    "dictionary": pa.array(["a", None]).dictionary_encode(),
}


@pytest.mark.parametrize("kind", MISSING)
def test_missing_values_are_errors_that_say_where(kind):
    with pytest.raises(ValueError, match="the column has no value at 1"):
        oneemb.hash_ids(MISSING[kind])
    with pytest.raises(ValueError, match="column 1 has no value at 1"):
        oneemb.hash_ids(["x", "y"], MISSING[kind])


def test_missing_integers_of_a_cross_are_errors():
    for column in (pd.Series([1, None], dtype="Int64"), pa.array([1, None])):
        with pytest.raises(ValueError, match="column 1 has no value at 1"):
            oneemb.hash_ids(["a", "b"], column)
    assert oneemb.hash_ids(["a", "b"], pd.Series([1, 2], dtype="Int64")).tolist() == (
        oneemb.hash_ids(["a", "b"], [1, 2]).tolist()
    )
    with pytest.raises(ValueError, match="column 1: integers of a list must fit in int64, got 9223372036854775808"):
        oneemb.hash_ids(["a"], [2**63])


def test_a_null_in_a_dictionary_is_missing_only_where_it_is_used():
    values = pa.array(["a", None, "b"])
    unused = pa.DictionaryArray.from_arrays(pa.array([0, 2, 0]), values)
    assert oneemb.hash_ids(unused).tolist() == expected(["a", "b", "a"])
    assert oneemb.hash_ids(unused[:0]).tolist() == []
    with pytest.raises(ValueError, match="the column has no value at 2"):
        oneemb.hash_ids(pa.DictionaryArray.from_arrays(pa.array([0, 2, 1]), values))


REFUSED = [
    (pd.DataFrame({"a": ["x"]}), TypeError, "got DataFrame"),
    ("abc", TypeError, "must be a list of str or bytes"),
    ([1, 2], TypeError, "integers, which are ids already"),
    (torch.tensor([1]), TypeError, "integers, which are ids already"),
    (torch.tensor([1.0]), TypeError, "must hold integers, got torch.float32"),
    (["a", 1.5], TypeError, "must hold str or bytes, got float 1.5 at 1"),
    (["a", "\ud800"], ValueError, "the string at 1 has no UTF-8 encoding"),
    (pa.array([1.5]), TypeError, "got a pyarrow array of double"),
    (pd.Series([1, 2]), TypeError, "integers, which are ids already"),
    (pd.Series([1, 2], dtype="category"), TypeError, "categories of the column are integers"),
    ({"a": 1}, TypeError, "got dict"),
]


@pytest.mark.parametrize("column, error, words", REFUSED)
def test_other_columns_are_refused_in_words(column, error, words):
    with pytest.raises(error, match=words):
        oneemb.hash_ids(column)


def test_arguments():
    with pytest.raises(TypeError, match="needs a column of strings"):
        oneemb.hash_ids()
    for salt in (-1, 2**64, 1.0, True):
        with pytest.raises(ValueError, match="salt must be an int"):
            oneemb.hash_ids(["a"], salt=salt)
    with pytest.raises(ValueError, match="must have one shape"):
        oneemb.hash_ids(["a", "b"], [1])


def test_expected_collisions():
    assert oneemb.expected_collisions(0) == oneemb.expected_collisions(1) == 0
    assert oneemb.expected_collisions(2**32) == pytest.approx(0.5)
