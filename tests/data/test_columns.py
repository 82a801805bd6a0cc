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


def write_files(folder, tables, kind="parquet"):
    for number, table in enumerate(tables):
        table = pa.table(table)
        if kind == "parquet":
            pq.write_table(table, folder / f"{number}.parquet")
        else:
            with pa.ipc.new_file(folder / f"{number}.parquet", table.schema) as writer:
                writer.write_table(table)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_that_is_missing_everywhere_in_a_file_is_missing_values(tmp_path, kind):
    """Writers give a column without values the type null, or a list of null."""
    write_files(tmp_path, [{name: pa.nulls(2) for name in "snxlc"} | {"w": [[], []]}], kind)
    columns = {"s": Ids("s", ("s", "c"), missing="?"), "n": Ids("n", missing=-1), "x": Numbers("x", missing=0.5),
               "l": Lists("l", missing=True), "w": Lists("w")}  # fmt: skip
    (batch,) = loader_of(tmp_path, columns)
    cross = oneemb.hash_ids(["?"], ["?"]).item()
    assert batch["s"].tolist() == [[oneemb.hash_ids(["?"]).item(), cross]] * 2 and batch["n"].tolist() == [[-1]] * 2
    assert batch["x"].tolist() == [[0.5]] * 2
    assert all([one.tolist() for one in batch[name]] == [[], [0, 0, 0]] for name in "lw")
    for spec in (Ids("s"), Ids(("c", "s")), Lists("l"), "x"):
        loader = loader_of(tmp_path, {"y": spec}, bad_rows="drop")
        assert list(loader) == [] and loader.dropped == 2


def test_empty_lists_without_a_type_and_floats_are_floats(tmp_path):
    write_files(tmp_path, [{"l": [[], []]}, {"l": [[0.5], [1.5, 2.5]]}])
    (batch,) = loader_of(tmp_path, {"l": Lists("l"), "both": Lists("l", "l")})
    assert batch["l"][0].dtype == batch["both"][0].dtype == torch.float32
    assert [one.tolist() for one in batch["l"]] == [[0.5, 1.5, 2.5], [0, 0, 0, 1, 3]]
    assert batch["both"][0].tolist() == [0.5, 0.5, 1.5, 2.5, 1.5, 2.5]


@pytest.mark.parametrize(
    ("spec", "first", "second", "text"),
    [
        (Ids("x"), ["1"], [1], "column 'x' must hold strings, as at .*0.parquet.*, and holds integers"),
        (Ids("y", ("y", "x")), [1], ["1"], "column 'x' must hold integers, as at .*, and holds strings"),
        (Lists("x"), [[2**60 + 1]], [[0.5]], "must hold integers, as at .*, and holds floats"),
        (Lists("x", "y"), [[0.5]], [[0.5]], "one Lists must all hold ids, or all floats, and hold floats .'x'., integ"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("bad_rows", ["raise", "drop"])
def test_a_column_that_changes_its_kind_of_values_is_an_error(
    tmp_path, spec, first, second, text, batch_size, bad_rows
):  # fmt: skip
    """Ids of integers would be those of other strings, and a float holds no large id."""
    write_files(tmp_path, [{"x": first, "y": [2**60 + 1]}, {"x": second, "y": [7]}])
    with pytest.raises(BadRowError, match=text):
        list(loader_of(tmp_path, {"x": spec}, batch_size=batch_size, bad_rows=bad_rows))


def test_dictionaries_and_views_of_any_values_are_read(tmp_path):
    """Arrow files keep types that Parquet does not have."""
    table = {
        "f": pa.array([1.5, None, 2.5]).dictionary_encode(),
        "i": pa.ListArray.from_arrays([0, 1, 2, 3], pa.array([7, 8, 7]).dictionary_encode()),
        "s": pa.ListArray.from_arrays(
            [0, 1, 2, 3], pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", None]))
        ),
        "v": pa.array(["a", None, "b"], pa.string_view()),
    }  # fmt: skip
    write_files(tmp_path, [table], "arrow")
    columns = {"f": Numbers("f", missing=0), "i": Lists("i"), "v": Ids("v", missing="b"), "s": Lists("s")}
    loader = loader_of(tmp_path, columns, bad_rows="drop")
    (batch,) = loader
    a, b = oneemb.hash_ids(["a", "b"]).tolist()
    assert loader.dropped == 1 and batch["f"].tolist() == [[1.5], [2.5]] and batch["v"].tolist() == [[a], [b]]
    assert batch["i"][0].tolist() == [7, 7] and batch["s"][0].tolist() == [a, a]


@pytest.mark.parametrize("array", [[1.0, None], [True, None], [[1], None], [{"b": 1}, None]])
def test_a_wrong_type_is_named_also_if_a_value_is_missing(tmp_path, array):
    for missing in (None, "?", 1):
        loader = loader_of(tmp_path, {"x": Ids("x", missing=missing)}, pa.table({"x": array}))
        with pytest.raises(BadRowError, match="column 'x' must hold strings or integers, got "):
            list(loader)


def test_missing_ids_of_narrow_and_unsigned_columns(tmp_path):
    table = {"a": pa.array([1, None], pa.uint8()), "b": pa.array([None, 2**64 - 2], pa.uint64())}
    batch = one_batch(tmp_path, {"a": Ids("a", missing=-1), "b": Ids("b", missing=2**64 - 1)}, table)
    assert batch["a"].tolist() == [[1], [-1]] and batch["b"].tolist() == [[-1], [-2]]
    for wrong in (1.5, True, 2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match="missing must be"):
            Ids("a", missing=wrong)
    for wrong in ("1", float("nan"), 1e39):
        with pytest.raises(ValueError, match="missing must be"):
            Numbers("a", missing=wrong)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_names_of_columns_that_are_odd_missing_or_come_twice(tmp_path, kind):
    names = ["", "\n", "a.b", "`'\"/../x", "ü😀", "a"]
    write_files(tmp_path, [{**{name: [n] for n, name in enumerate(names)}, "a": [{"b": 9}]}], kind)
    assert one_row(tmp_path, Ids(*names[:5])) == [0, 1, 2, 3, 4]
    with pytest.raises(BadRowError, match="there must be one column 'c'; it has .*a.b"):
        one_row(tmp_path, Ids("c"))
    write_files(tmp_path, [pa.Table.from_arrays([pa.array([n]) for n in range(3)], names=["a", "a", "b"])], kind)
    assert one_row(tmp_path, Ids("b")) == [2]
    with pytest.raises(BadRowError, match="there must be one column 'a'; it has several"):
        one_row(tmp_path, Ids("a"))


def one_row(folder, spec):
    (batch,) = loader_of(folder, {"y": spec})
    return batch["y"][0].tolist()


def test_missing_values_of_a_column_without_lists_are_empty_lists(tmp_path):
    batch = one_batch(tmp_path, {"l": Lists("x", missing=True)}, {"x": pa.array([7, None, 8])})
    assert [one.tolist() for one in batch["l"]] == [[7, 8], [0, 1, 1, 2]]


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
