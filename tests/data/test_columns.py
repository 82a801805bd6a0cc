"""Columns of batches against plain Python, for each Arrow type; bad rows are named, or dropped and counted."""

import decimal
import json

import numpy as np
import pytest
import torch

import oneemb
from oneemb.data import BadRowError, Files, GrowingFile, Ids, Lists, Loader, Numbers

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def loader_of(folder, columns, table=None, batch_size=100, group_rows=3, **options):
    if table is not None:
        pq.write_table(table, folder / "0.parquet", row_group_size=group_rows)
    return Loader(Files(f"{folder}/*.parquet"), batch_size, columns, **options)


def one_batch(folder, columns, table, **options):
    (batch,) = loader_of(folder, columns, pa.table(table), **options)
    return batch


STRINGS = {
    "string": pa.array(["a", "", "ü", "a"]),
    "large": pa.array(["a", "", "ü", "a"], pa.large_string()),
    "binary": pa.array([b"a", b"", "ü".encode(), b"a"]),
    "dictionary": pa.array(["a", "", "ü", "a"]).dictionary_encode(),
}


@pytest.mark.parametrize("kind", STRINGS)
def test_strings_of_each_type_have_the_ids_of_hash_ids(tmp_path, kind):
    batch = one_batch(tmp_path, {"x": Ids("s", ("s", "n"))}, {"s": STRINGS[kind], "n": [1, 2, 3, 4]})
    strings = ["a", "", "ü", "a"]
    expected = torch.stack([oneemb.hash_ids(strings), oneemb.hash_ids(strings, [1, 2, 3, 4])], 1)
    assert torch.equal(batch["x"], expected)


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int64(), pa.uint64()])
def test_integers_are_ids_and_numbers(tmp_path, kind):
    array = pa.array([1, 0, 100, 2**64 - 1 if kind == pa.uint64() else 7], kind)
    batch = one_batch(tmp_path, {"x": Ids("n"), "y": "n", "z": Numbers("n", "n")}, {"n": array})
    last = -1 if kind == pa.uint64() else 7
    assert batch["x"].tolist() == [[1], [0], [100], [last]] and batch["x"].dtype == torch.int64
    assert torch.equal(batch["y"], torch.from_numpy(np.array(array).astype(np.float32)))
    assert batch["z"].shape == (4, 2) and batch["z"].dtype == torch.float32


def test_numbers_are_of_floats_booleans_and_decimals(tmp_path):
    table = {"f": [0.1, -2.5], "b": [True, False], "d": [decimal.Decimal("1.25"), decimal.Decimal("-3")],
             "h": pa.array(np.array([1, 2], np.float16))}  # fmt: skip
    batch = one_batch(tmp_path, {"x": Numbers("f", "b", "d", "h")}, table)
    assert torch.equal(batch["x"], torch.tensor([[0.1, 1, 1.25, 1], [-2.5, 0, -3, 2]]))


def test_what_is_missing_is_filled(tmp_path):
    table = {
        "s": pa.array(["a", None]), "n": pa.array([None, 5]), "f": [float("nan"), None], "l": [None, [1]],
        "d": pa.array([None, "a"]).dictionary_encode(),
    }  # fmt: skip
    columns = {"s": Ids("s", "d", missing="?"), "n": Ids("n", missing=-1), "f": Numbers("f", missing=0.5),
               "l": Lists("l", missing=True)}  # fmt: skip
    batch = one_batch(tmp_path, columns, table)
    a, missing = oneemb.hash_ids(["a", "?"]).tolist()
    assert batch["s"].tolist() == [[a, missing], [missing, a]] and batch["n"].tolist() == [[-1], [5]]
    assert batch["f"].tolist() == [[0.5], [0.5]] and [one.tolist() for one in batch["l"]] == [[1], [0, 0, 1]]


LISTS = {
    "list": pa.array([[1, 2], [], [3]], pa.list_(pa.int64())),
    "large": pa.array([[1, 2], [], [3]], pa.large_list(pa.int32())),
    "sliced": pa.array([[9], [1, 2], [], [3], [9]])[1:4],
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_are_bags_of_the_embedding(tmp_path, kind):
    table = {"l": LISTS[kind], "s": ["a", "b", "c"], "w": [[0.5, 1.5], [], [2.5]]}
    columns = {"bags": Lists("l"), "both": Lists("l", "s"), "weights": Lists("w")}
    batch = one_batch(tmp_path, columns, table)
    a, b, c = oneemb.hash_ids(["a", "b", "c"]).tolist()
    assert [one.tolist() for one in batch["bags"]] == [[1, 2, 3], [0, 2, 2, 3]]
    assert [one.tolist() for one in batch["both"]] == [[1, 2, a, b, 3, c], [0, 2, 3, 3, 4, 5, 6]]
    assert batch["weights"][0].tolist() == [0.5, 1.5, 2.5] and batch["weights"][0].dtype == torch.float32
    tables, store = [oneemb.make_table()] * 2, oneemb.make_device_mem_store_options()
    embedding = oneemb.MultiTableEmbedding("e", 4, torch.float32, torch.int64, tables, store)
    values, offsets = batch["both"]
    pooled = embedding(values, offsets=offsets)
    rows = embedding(torch.tensor([[1, a], [2, b], [3, c]]))
    assert pooled.shape == (3, 2, 4) and torch.allclose(pooled[0, 0], rows[0, 0] + rows[1, 0])
    assert torch.equal(pooled[:, 1], rows[:, 1]) and not pooled[1, 0].any()


def test_fixed_size_lists_are_bags(tmp_path):
    table = {"l": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))}
    batch = one_batch(tmp_path, {"l": Lists("l", missing=True)}, table)
    assert [one.tolist() for one in batch["l"]] == [[1, 2, 3, 4], [0, 2, 2, 4]]


BAD = {
    "no string": (Ids("x"), pa.array(["a", None, "b"]), "column 'x' has no value"),
    "no integer": (Ids("x"), pa.array([1, None, 2]), "column 'x' has no value"),
    "no category": (Ids("x"), pa.array(["a", None, "b"]).dictionary_encode(), "column 'x' has no value"),
    "no number": ("x", pa.array([1.0, None, 2.0]), "column 'x' has no value"),
    "NaN": ("x", pa.array([1.0, float("nan"), 2.0]), "not finite"),
    "too large": (Numbers("x", missing=0), pa.array([1.0, 1e300, 2.0]), "not finite"),
    "no list": (Lists("x"), pa.array([[1], None, [2]]), "column 'x' has no list"),
    "long list": (Lists("x", max_length=2), pa.array([[1], [1, 2, 3], [2]]), "more than 2 values"),
    "no element": (Lists("x"), pa.array([["a"], ["b", None], []]), "missing value in a list"),
    "infinite element": (Lists("x"), pa.array([[1.0], [float("inf")], []]), "not finite"),
}


@pytest.mark.parametrize("shuffle", [0, 6])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_is_named_or_dropped(tmp_path, what, shuffle):
    spec, array, text = BAD[what]
    table = pa.table({"x": pa.concat_arrays([array[:1], array[:1], array[:1], array]) if what != "no category"
                      else pa.array(["a", "a", "a", "a", None, "b"]).dictionary_encode(), "n": range(6)})  # fmt: skip
    loader = loader_of(tmp_path, {"y": spec, "n": "n"}, table, batch_size=2, shuffle=shuffle)
    seen = []
    with pytest.raises(BadRowError, match=rf"0.parquet, row group 1, row 1: .*{text}.*drop"):
        for batch in loader:
            seen += batch["n"].tolist()
    assert seen == ([] if shuffle else [0, 1, 2, 3]), "batches before the window are given"
    loader = loader_of(tmp_path, {"y": spec, "n": "n"}, batch_size=2, shuffle=shuffle, bad_rows="drop")
    batches = list(loader)
    assert sorted(n for batch in batches for n in batch["n"].tolist()) == [0, 1, 2, 3, 5]
    assert loader.dropped == 1 and len(batches) == 3


def test_a_batch_of_bad_rows_alone_is_left_out_and_the_count_is_in_the_state(tmp_path):
    table = pa.table({"n": pa.array([1, None, None, 2, None, 3], pa.int64())})
    loader = loader_of(tmp_path, {"n": "n"}, table, batch_size=1, bad_rows="drop")
    assert [batch["n"].tolist() for _, batch in zip(range(2), loader, strict=False)] == [[1], [2]]
    again = loader_of(tmp_path, {"n": "n"}, batch_size=1, bad_rows="drop")
    again.load_state_dict(loader.state_dict())
    assert again.dropped == 2 and [batch["n"].tolist() for batch in again] == [[3]] and again.dropped == 3


@pytest.mark.parametrize(
    ("spec", "array", "text"),
    [
        (Ids("x"), [0.5], "must hold strings or integers, got double"),
        (Ids("x"), [[1]], "must hold strings or integers, got list"),
        (Ids("x", missing="?"), pa.array([1, None]), "missing='\\?'"),
        ("x", ["a"], "column 'x' must hold numbers, got string"),
        (Numbers("x"), [[1.0]], "must hold numbers"),
        (Lists("x"), [[[1]]], "must hold strings or integers"),
        (Ids("y"), [1], "there must be one column 'y'; it has"),
    ],
)
@pytest.mark.parametrize("bad_rows", ["raise", "drop"])
def test_a_column_that_is_missing_or_of_a_wrong_type_is_named(tmp_path, spec, array, text, bad_rows):
    loader = loader_of(tmp_path, {"y": spec}, pa.table({"x": array}), bad_rows=bad_rows)
    with pytest.raises(BadRowError, match=f"0.parquet, row group 0, row 0: .*{text}"):
        list(loader)


@pytest.mark.parametrize("spec", [Ids, Numbers, Lists])
def test_columns_are_names(spec):
    for wrong in ((), (1,), (("a", 2),)):
        with pytest.raises(TypeError):
            spec(*wrong)


# ---- JSON ------------------------------------------------------------------------------------------------------------

LINES = [
    b"", b" ", b"{", b"null", b"[1]", b'"text"', b'{"n": 1}{"n": 2}', b'{"n": "text"}', b'{"n": 1.5}', b"\xff\xfe",
    b'{"n": 99999999999}', b'{"n": [1]}', b'{"n": null}', b"{}", b'{"n": 1', b'{"n": 1}}', b'{"n": {"n": 1}}', b"\0",
    b'{"n": tru}', b'{"n": 1, "n": 2}', b'{"n": 1} null', b'{"n": 1}[1]', b"{" * 9999,
]  # fmt: skip


@pytest.mark.parametrize("bad", range(len(LINES)))
@pytest.mark.parametrize("other", [None, 0, 6])
def test_a_line_that_is_bad_harms_no_other(tmp_path, bad, other):
    """One row for each line: an empty line does not hide a line of two objects."""
    lines = [json.dumps({"n": n, "more": [n]}).encode() for n in range(9)]
    lines[4] = LINES[bad]
    if other is not None:
        lines[6] = LINES[other]
    path = tmp_path / "lines"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    source = GrowingFile(path, {"n": pa.int32()})
    loader = Loader(source, 2, {"n": "n"}, bad_rows="drop", end_after_s=0)
    wrong = {4, 6} if other is not None else {4}
    assert [n for batch in loader for n in batch["n"].tolist()] == [n for n in range(9) if n not in wrong]
    assert loader.dropped == len(wrong)
    begin = sum(len(line) + 1 for line in lines[:4])
    with pytest.raises(BadRowError, match=f"lines, byte {begin}: "):
        list(Loader(source, 2, {"n": "n"}, end_after_s=0))


def test_schemas_that_are_wrong_are_refused(tmp_path):
    for schema, error in ((None, TypeError), ({}, TypeError), ({"n": "integer"}, ValueError), ({"n": 3}, ValueError)):
        with pytest.raises(error, match="GrowingFile"):
            GrowingFile(tmp_path / "lines", schema)
