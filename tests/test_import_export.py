"""Rows from and to other tools' files: each format is written and read by its own library on the other side."""

import json
import os
import sys
import tracemalloc
import warnings
import zipfile

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import oneemb
from oneemb.storage.errors import SnapshotExistsError, SnapshotNotFoundError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.table.snapshot_reader import read_snapshot_info
from tests.support.interrupts import count_lines, interrupted, some_lines
from tests.support.keys import read_rows
from tests.support.pairwise import covering

pytestmark = pytest.mark.filterwarnings("ignore:embedding 'e' starts empty")

FORMATS = ["npz", "parquet", "safetensors"]
IDS = np.array([0, 1, -1, np.iinfo(np.int64).min, np.iinfo(np.int64).max, 77, 2**40])


def make_embedding(path, dim=3, tables=3, dtype=torch.float32, **options):
    return oneemb.MultiTableEmbedding(
        "e", dim, dtype, options.pop("key_type", torch.int64),
        [oneemb.make_table(oneemb.make_constant_initializer(0.5))] * tables,
        options.pop("store", None) or oneemb.make_device_mem_store_options(str(path)), num_threads=1, **options,
    )  # fmt: skip


@pytest.fixture
def embedding(tmp_path):
    made = make_embedding(tmp_path / "e")
    yield made
    made.close()


def some_vectors(seed=0, dim=3, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((len(IDS), dim)).astype(dtype)


def rows_in(embedding):
    """(table, id) -> weights of every row, as lookups give them."""
    embedding.save_snapshot("look", overwrite=True)
    rows = snapshot_rows(embedding.store.plan.persistent_path, "look")
    return {key: row[: embedding.embedding_dim] for key, row in rows.items()}


def snapshot_rows(path, name):
    found = {}
    with oneemb.make_persistent_table_reader(path, name, "int64", "float32", with_tables=True) as reader:
        for table_N, keys, values in reader:
            found |= zip(zip(table_N.tolist(), keys.tolist(), strict=True), values.tolist(), strict=True)
    return found


def expected_rows(tables, keys, values):
    return dict(zip(zip(tables.tolist(), keys.tolist(), strict=True), values.astype(np.float32).tolist(), strict=True))


def save(path, format, **columns):
    """A file made by the format's own library."""
    path = str(path)
    if format == "npz":
        np.savez(path, **columns)
    elif format == "parquet":
        arrays = {
            name: pyarrow.array(list(array)) if array.ndim == 2 else pyarrow.array(array)
            for name, array in columns.items()
        }
        pyarrow.parquet.write_table(pyarrow.table(arrays), path)
    else:
        safetensors.numpy.save_file({k: np.ascontiguousarray(v) for k, v in columns.items()}, path)
    return path


def load(path, format):
    """What the format's own library reads."""
    if format == "npz":
        with np.load(path) as archive:
            return {name: archive[name] for name in archive.files if name != "oneemb"}
    if format == "parquet":
        table = pyarrow.parquet.read_table(path)
        return {
            name: np.array(table[name].to_pylist(), dtype=np.int64 if name in ("keys", "tables") else np.float32)
            for name in table.column_names
        }
    return safetensors.numpy.load_file(path)


# ---- in -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_tables", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_vectors_of_other_tools_come_into_an_embedding(tmp_path, embedding, format, with_tables):
    values, tables = some_vectors(), np.arange(len(IDS), dtype=np.int32) % 3
    columns = {"keys": IDS, "values": values} | ({"tables": tables} if with_tables else {})
    path = save(tmp_path / f"v.{format}", format, **columns)
    for batch_size in (2, 65536):
        assert oneemb.import_rows(embedding, path, table=2, batch_size=batch_size) == len(IDS)
        assert rows_in(embedding) == expected_rows(tables if with_tables else np.full(len(IDS), 2), IDS, values)
        embedding.clear()


@pytest.mark.parametrize("with_tables", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_vectors_of_other_tools_become_a_snapshot_that_an_embedding_loads(tmp_path, format, with_tables):
    values, tables = some_vectors(), np.arange(len(IDS)) % 3
    columns = {"keys": IDS, "values": values} | ({"tables": tables} if with_tables else {})
    path = save(tmp_path / f"v.{format}", format, **columns)
    assert oneemb.import_rows(tmp_path / "t", path, snapshot="pretrained", batch_size=2) == len(IDS)
    expected = expected_rows(tables if with_tables else 0 * tables, IDS, values)
    assert snapshot_rows(tmp_path / "t", "pretrained") == expected
    embedding = make_embedding(tmp_path / "t")
    embedding.load_snapshot("pretrained")
    assert rows_in(embedding) == expected
    embedding.close()


def test_the_comparison_notices_a_row_in_another_table_and_another_weight(embedding):
    values = some_vectors()
    oneemb.import_rows(embedding, (IDS, values), table=1)
    tables = np.ones(len(IDS), np.int64)
    assert rows_in(embedding) == expected_rows(tables, IDS, values)
    assert rows_in(embedding) != expected_rows(tables * 0, IDS, values)
    values[3, 2] = np.nextafter(values[3, 2], 2)
    assert rows_in(embedding) != expected_rows(tables, IDS, values)


@pytest.mark.parametrize("format", FORMATS)
def test_columns_have_the_names_that_they_are_given(tmp_path, embedding, format):
    values = some_vectors()
    path = save(tmp_path / f"v.{format}", format, id=IDS, vector=values, field=np.ones(len(IDS), np.int64))
    oneemb.import_rows(embedding, path, keys="id", values="vector", tables="field")
    assert rows_in(embedding) == expected_rows(np.ones(len(IDS), np.int64), IDS, values)
    for options in ({"keys": "id"}, {"values": "vector"}, {"keys": "id", "values": "vector", "tables": "t"}):
        with pytest.raises(ValueError, match="has no column.*'(id|field)'"):
            oneemb.import_rows(embedding, path, **options)


@pytest.mark.parametrize("format", FORMATS)
def test_without_a_column_of_keys_the_row_numbers_are_the_keys(tmp_path, embedding, format):
    values = some_vectors()
    path = save(tmp_path / f"v.{format}", format, weight=values)
    with pytest.raises(ValueError, match="keys=None"):
        oneemb.import_rows(embedding, path, values="weight")
    oneemb.import_rows(embedding, path, keys=None, values="weight", batch_size=3)
    assert rows_in(embedding) == expected_rows(np.zeros(7, np.int64), np.arange(7), values)


def test_npy_files_and_arrays_and_tensors_and_batches_are_sources(tmp_path, embedding):
    values, tables = some_vectors(), np.arange(len(IDS)) % 3
    names = [str(tmp_path / f"{name}.npy") for name in ("k", "v", "t")]
    for name, array in zip(names, (IDS, values, tables), strict=True):
        np.save(name, array)
    at_0, of_tables = expected_rows(0 * tables, IDS, values), expected_rows(tables, IDS, values)
    for source, expected in [
        (names[:2], at_0),
        (tuple(names), of_tables),
        (names[1], expected_rows(0 * tables, np.arange(7), values)),
        ((IDS, values), at_0),
        ([IDS, values, tables], of_tables),
        ((torch.from_numpy(IDS), torch.from_numpy(values)), at_0),
        (iter([(IDS[:4], values[:4]), (IDS[4:], values[4:])]), at_0),
        ([(tables, IDS, values)], of_tables),
    ]:
        assert oneemb.import_rows(embedding, source, batch_size=2) == 7
        assert rows_in(embedding) == expected
        embedding.clear()


def test_parquet_columns_of_numbers_are_the_weights_in_the_order_given(tmp_path, embedding):
    values = some_vectors(dtype=np.float64)
    frame = pandas.DataFrame({"id": IDS, "b": values[:, 1], "a": values[:, 0], "c": values[:, 2]})
    frame.to_parquet(tmp_path / "v.parquet")
    oneemb.import_rows(embedding, tmp_path / "v.parquet", keys="id", values=["a", "b", "c"])
    assert rows_in(embedding) == expected_rows(np.zeros(7, np.int64), IDS, values)


def test_compressed_npz_and_float16_and_bfloat16_are_read_exactly(tmp_path):
    half = some_vectors(dtype=np.float16)
    np.savez_compressed(tmp_path / "v.npz", keys=IDS, values=half)
    brain = torch.from_numpy(some_vectors()).to(torch.bfloat16)
    safetensors.torch.save_file({"keys": torch.from_numpy(IDS), "values": brain}, tmp_path / "v.safetensors")
    for name, dtype, values in [("v.npz", "float16", half), ("v.safetensors", "bfloat16", brain.float().numpy())]:
        oneemb.import_rows(tmp_path / dtype, tmp_path / name, snapshot="s")
        assert read_snapshot_info(tmp_path / dtype, "s").meta["rows"]["layout"]["dtype"] == dtype
        assert snapshot_rows(tmp_path / dtype, "s") == expected_rows(np.zeros(7, np.int64), IDS, values)


@pytest.mark.parametrize("dtype", ["float16", torch.float16, np.float16, np.dtype(np.float16)])
def test_the_dtype_of_a_snapshot_may_be_of_torch_or_of_numpy(tmp_path, dtype):
    oneemb.import_rows(tmp_path / "t", (IDS, some_vectors(dtype=np.float16)), snapshot="s", dtype=dtype)
    assert read_snapshot_info(tmp_path / "t", "s").meta["rows"]["layout"]["dtype"] == "float16"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_rounded_to_nearest_even_as_torch_does(tmp_path, dtype):
    bits = np.random.default_rng(1).integers(0, 2**32, (4000, 3), dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[(np.abs(values) < 6e4).all(1)]
    values[:3, 0] = np.array([0x3F808000, 0x3F818000, 0x3F801000], np.uint32).view(np.float32)  # ties of both formats
    ids = np.arange(len(values))
    expected = torch.from_numpy(values).to(dtype).float().numpy()
    oneemb.import_rows(tmp_path / "t", (ids, values), snapshot="s", dtype=dtype)
    assert snapshot_rows(tmp_path / "t", "s") == expected_rows(0 * ids, ids, expected)
    embedding = make_embedding(tmp_path / "e", dtype=dtype)
    oneemb.import_rows(embedding, (ids, values))
    assert rows_in(embedding) == expected_rows(0 * ids, ids, expected)
    embedding.close()


def test_the_last_of_equal_keys_counts_and_other_rows_stay(embedding):
    embedding(torch.tensor([[5, 5, 5]]))
    oneemb.import_rows(
        embedding, (np.array([5, 6, 5]), np.array([[1.0] * 3, [2.0] * 3, [3.0] * 3])), batch_size=2
    )  # fmt: skip
    assert rows_in(embedding) == {(0, 5): [3.0] * 3, (0, 6): [2.0] * 3, (1, 5): [0.5] * 3, (2, 5): [0.5] * 3}


def test_imported_rows_keep_their_state_and_train_on(tmp_path, embedding):
    step = oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), lr=0.1), [embedding])
    ids = torch.tensor([[5, 6, 7]])
    embedding(ids).sum().backward()
    step.step()
    embedding.save_snapshot("before")
    oneemb.import_rows(embedding, (np.array([5, 9]), np.ones((2, 3), np.float32)))
    embedding.save_snapshot("after")
    before, after = (snapshot_rows(tmp_path / "e", name) for name in ("before", "after"))
    assert after[0, 5] == [1.0] * 3 + before[0, 5][3:] and any(before[0, 5][3:])
    assert after[0, 9] == [1.0] * 3 + [0.0] * 6
    assert {k: v for k, v in after.items() if k not in [(0, 5), (0, 9)]} == {
        k: v for k, v in before.items() if k != (0, 5)
    }
    embedding(torch.tensor([[9, 9, 9]])).sum().backward()
    step.step()
    # Adam's second step with the first gradient of a row: m = 0.1 g, v = 0.001 g^2, each over 1 - beta^2.
    moved = 1 - 0.1 * (0.1 / (1 - 0.9**2)) / (0.001 / (1 - 0.999**2)) ** 0.5
    assert embedding.eval()(torch.tensor([[9, 9, 9]]))[0, 0].tolist() == pytest.approx([moved] * 3, rel=1e-6)


def test_rows_imported_before_the_optimizer_is_attached_are_kept(tmp_path, embedding):
    values = some_vectors()
    oneemb.import_rows(embedding, (IDS, values))
    oneemb.Optimizer(torch.optim.Adagrad(embedding.parameters(), lr=0.1), [embedding])
    assert rows_in(embedding) == expected_rows(np.zeros(7, np.int64), IDS, values)


@pytest.mark.parametrize("kind", ["ssd", "host"])
def test_more_rows_than_the_cache_holds_come_in(tmp_path, kind):
    make = {"ssd": oneemb.make_cached_ssd_store_options, "host": oneemb.make_cached_host_mem_store_options}[kind]
    embedding = make_embedding(tmp_path / "e", dim=64, store=make(1, str(tmp_path / "e")))
    ids = np.random.default_rng(0).permutation(20000)
    values = np.random.default_rng(1).standard_normal((20000, 64)).astype(np.float32)
    oneemb.import_rows(embedding, (ids, values))
    assert embedding.stats()["device"]["slots"] < 5000 < embedding.stats()["rows"] == 20000
    assert torch.equal(embedding.eval()(torch.from_numpy(ids), torch.zeros(1, dtype=int)), torch.from_numpy(values))
    embedding.close()


def test_padding_is_left_out(tmp_path):
    embedding = make_embedding(tmp_path, padding_idx=77)
    oneemb.import_rows(embedding, (IDS, some_vectors()))
    assert {id for _, id in rows_in(embedding)} == set(IDS.tolist()) - {77}
    embedding.close()


def test_a_sharded_folder_and_a_reader_and_a_table_of_oneflow(tmp_path, embedding):
    values = some_vectors()
    paths = [tmp_path / "a", tmp_path / "b"]
    oneemb.import_rows(paths, (IDS, values), snapshot="s")
    expected = expected_rows(np.zeros(7, np.int64), IDS, values)
    assert snapshot_rows(paths, "s") == expected
    oneemb.import_rows(embedding, oneemb.make_persistent_table_reader(paths, "s", "int64", "float32"))
    assert rows_in(embedding) == expected
    with oneemb.make_persistent_table_writer(
        tmp_path / "f", "s", "int64", "float32", 3, format="oneflow"
    ) as writer:  # fmt: skip
        writer.write(IDS, values)
    reader = oneemb.make_persistent_table_reader(tmp_path / "f", "s", "int64", "float32", format="oneflow")
    oneemb.import_rows(tmp_path / "t", reader, snapshot="s", table=0)
    assert snapshot_rows(tmp_path / "t", "s") == expected


# ---- out ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_other_tools_read_what_is_exported(tmp_path, embedding, format):
    values, tables = some_vectors(), np.arange(len(IDS)) % 3
    oneemb.import_rows(embedding, (IDS, values, tables))
    expected = expected_rows(tables, IDS, values)
    path = str(tmp_path / f"v.{format}")
    for batch_size in (2, 65536):
        assert oneemb.export_rows(embedding, path, overwrite=True, batch_size=batch_size) == 7
        found = load(path, format)
        assert sorted(found) == ["keys", "tables", "values"]
        assert expected_rows(found["tables"], found["keys"], found["values"]) == expected
    assert embedding.snapshots() == []
    embedding.save_snapshot("s")
    assert oneemb.export_rows(tmp_path / "e", path, snapshot="s", overwrite=True) == 7
    found = load(path, format)
    assert expected_rows(found["tables"], found["keys"], found["values"]) == expected
    assert oneemb.export_rows(embedding, path, table=1, overwrite=True) == 2
    found = load(path, format)
    assert sorted(found) == ["keys", "values"]
    assert expected_rows(np.ones(2, np.int64), found["keys"], found["values"]) == {
        key: row for key, row in expected.items() if key[0] == 1
    }
    assert [f.name for f in tmp_path.iterdir()] == ["e", f"v.{format}"] or not list(tmp_path.glob(".oneemb-*"))


def test_npy_files_are_exported(tmp_path, embedding):
    values, tables = some_vectors(), np.arange(len(IDS)) % 3
    oneemb.import_rows(embedding, (IDS, values, tables))
    names = [tmp_path / f"{name}.npy" for name in ("k", "v", "t")]
    oneemb.export_rows(embedding, names)
    keys, vectors, of = (np.load(name) for name in names)
    assert expected_rows(of, keys, vectors) == expected_rows(tables, IDS, values)
    with pytest.raises(ValueError, match="third file"):
        oneemb.export_rows(embedding, names[:2], overwrite=True)
    assert len(np.load(names[0])) == 7, "the file that was to be replaced is as it was"
    oneemb.export_rows(embedding, names[:2], table=0, overwrite=True)
    assert sorted(np.load(names[0]).tolist()) == sorted(IDS[tables == 0].tolist())


@pytest.mark.parametrize(
    ("optimizer", "format", "dtype"),
    covering([torch.optim.SGD, torch.optim.Adam], [*FORMATS, "npy"], [torch.float32, torch.float16, torch.bfloat16]),
)
def test_rows_and_state_survive_the_way_through_a_file(tmp_path, format, dtype, optimizer):
    first = make_embedding(tmp_path / "a", dtype=dtype)
    second = make_embedding(tmp_path / "b", dtype=dtype)
    steps = [oneemb.Optimizer(optimizer(e.parameters(), lr=0.1), [e]) for e in (first, second)]
    for n in range(3):
        (first(torch.tensor([[4, 5, n]])).float() ** 2).sum().backward()
        steps[0].step()
        steps[0].zero_grad()
    path = [tmp_path / f"{i}.npy" for i in range(4)] if format == "npy" else tmp_path / f"v.{format}"
    if format == "npy" and optimizer is torch.optim.SGD:
        path = path[:3]
    with_state = format != "npy" or optimizer is not torch.optim.SGD
    oneemb.export_rows(first, path, with_state=with_state)
    oneemb.import_rows(second, path, with_state=with_state)
    for e in (first, second):
        e.save_snapshot("s")
    assert snapshot_rows(tmp_path / "a", "s") == snapshot_rows(tmp_path / "b", "s")
    if format != "npy":
        assert second.store.step == 3
        oneemb.import_rows(tmp_path / "c", path, snapshot="s", with_state=True)
        assert snapshot_rows(tmp_path / "c", "s") == snapshot_rows(tmp_path / "a", "s")
        third = make_embedding(tmp_path / "c", dtype=dtype)
        step = oneemb.Optimizer(optimizer(third.parameters(), lr=0.1), [third])
        third.load_snapshot("s")
        for e, o in [(first, steps[0]), (third, step)]:
            e(torch.tensor([[4, 5, 9]])).float().sum().backward()
            o.step()
            e.save_snapshot("t")
        assert snapshot_rows(tmp_path / "c", "t") == snapshot_rows(tmp_path / "a", "t")
        third.close()
    for e in (first, second):
        e.close()


@pytest.mark.parametrize("format", FORMATS)
def test_no_rows_at_all_have_columns_all_the_same(tmp_path, embedding, format):
    path = tmp_path / f"v.{format}"
    assert oneemb.export_rows(embedding, path) == 0
    assert {name: len(column) for name, column in load(path, format).items()} == {"keys": 0, "tables": 0, "values": 0}
    assert oneemb.import_rows(embedding, path) == 0
    assert oneemb.import_rows(tmp_path / "t", path, snapshot="s") == 0


def test_exporting_does_not_change_what_a_state_dict_says(tmp_path, embedding):
    oneemb.import_rows(embedding, (IDS, some_vectors()))
    embedding.save_snapshot("s")
    oneemb.export_rows(embedding, tmp_path / "v.npz")
    assert oneemb.snapshot_name(embedding.get_extra_state()) == "s"


def test_progress_is_told(tmp_path, embedding):
    told = []
    oneemb.import_rows(embedding, (IDS, some_vectors()), batch_size=3, progress=lambda *now: told.append(now))
    oneemb.import_rows(embedding, iter([(IDS, some_vectors())]), progress=lambda *now: told.append(now))
    oneemb.export_rows(embedding, tmp_path / "v.npz", progress=lambda *now: told.append(now))
    assert told == [(3, 7), (6, 7), (7, 7), (7, None), (7, 7)]


# ---- memory ---------------------------------------------------------------------------------------------------------


def traced_peak(run):
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("format", FORMATS)
def test_memory_does_not_grow_with_the_rows(tmp_path, format):
    size, dim = 100_000, 64
    batches = ((np.arange(n, n + 5000), np.full((5000, dim), n, np.float32)) for n in range(0, size, 5000))
    oneemb.import_rows(tmp_path / "t", batches, snapshot="s")
    path = tmp_path / f"v.{format}"
    out = traced_peak(lambda: oneemb.export_rows(tmp_path / "t", path, snapshot="s", batch_size=5000))
    back = traced_peak(lambda: oneemb.import_rows(tmp_path / "u", path, snapshot="s", batch_size=5000))
    # Of 26 MB of weights a few batches of 1.3 MB, and 30 bytes a key: what Arrow and torch hold is not traced.
    assert out < 12e6 and back < 18e6
    assert len(oneemb.make_persistent_table_reader(tmp_path / "u", "s", "int64", "float32")) == size


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_sources_that_do_not_fit_are_refused(tmp_path, embedding):
    vectors = some_vectors()
    (tmp_path / "broken.npz").write_bytes(b"x" * 100)
    (tmp_path / "broken.npy").write_bytes(b"x" * 100)
    (tmp_path / "broken.parquet").write_bytes(b"x" * 100)
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 100)
    np.save(tmp_path / "objects.npy", np.array([[{}]], object), allow_pickle=True)
    np.save(tmp_path / "columns.npy", np.asfortranarray(vectors))
    np.save(tmp_path / "cut.npy", vectors)
    data = (tmp_path / "cut.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(data[:-4])
    np.savez(tmp_path / "short.npz", keys=IDS[:-1], values=vectors)
    pyarrow.parquet.write_table(
        pyarrow.table({"keys": [1, 2], "values": [[1.0, 2.0, 3.0], [1.0]]}), tmp_path / "ragged.parquet"
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"keys": [1, None], "values": [[1.0, 2.0, 3.0]] * 2}), tmp_path / "null.parquet"
    )
    for source, error, says in [
        (tmp_path / "broken.npz", ValueError, "not an .npz file"),
        (tmp_path / "broken.npy", ValueError, "not an .npy file"),
        (tmp_path / "broken.parquet", ValueError, "not a Parquet file"),
        (tmp_path / "broken.safetensors", ValueError, "not a safetensors file"),
        (tmp_path / "objects.npy", ValueError, "pickled"),
        (tmp_path / "columns.npy", ValueError, "ascontiguousarray"),
        (tmp_path / "cut.npy", ValueError, "ends before row 7"),
        (tmp_path / "short.npz", ValueError, "keys must have a row for each of the 7 values"),
        (tmp_path / "ragged.parquet", ValueError, "one length, got 1 to 3"),
        (tmp_path / "null.parquet", ValueError, "missing values"),
        (tmp_path / "no.npz", FileNotFoundError, "no.npz"),
        (tmp_path / "v.csv", ValueError, "must end in"),
        (tmp_path, ValueError, "is a folder"),
        (7, TypeError, "must be a file, arrays"),
        ([7], TypeError, r"batch 0 must be \(keys, values\)"),
        ((IDS.astype(float), vectors), ValueError, "keys must be integers"),
        ((IDS.astype(np.uint64), vectors), ValueError, "must be from -9223372036854775808"),
        ((IDS, vectors.astype(int)), ValueError, "values must be floating-point"),
        ((IDS, vectors[:, 0]), ValueError, "values must be floating-point"),
        ((IDS[:3], vectors), ValueError, "a row for each of the 7 values"),
        ((IDS, some_vectors(dim=4)), ValueError, r"values must be \[N, 3\].*'e', got values \[N, 4\]"),
        ((IDS, vectors, np.full(7, 3)), ValueError, "tables must be from 0 to 2"),
        ((IDS, vectors, np.full(7, -1)), ValueError, "tables must be from 0"),
        ([(IDS, vectors), (IDS, some_vectors(dim=2))], ValueError, r"values \[N, 2\]"),
    ]:
        with pytest.raises(error, match=says):
            oneemb.import_rows(embedding, source)
    half = make_embedding(tmp_path / "half", dtype=torch.float16, key_type=torch.int32)
    with pytest.raises(ValueError, match="int32"):
        oneemb.import_rows(half, (np.array([2**31]), vectors[:1]))
    with pytest.raises(ValueError, match="fit in float16"):
        oneemb.import_rows(half, (np.array([1]), np.full((1, 3), 1e6)))
    half.close()


def test_arguments_that_make_no_sense_are_refused(tmp_path, embedding):
    vectors = some_vectors()
    np.savez(tmp_path / "v.npz", keys=IDS, values=vectors)
    for target, options, error, says in [
        (tmp_path / "t", {}, ValueError, "snapshot="),
        (tmp_path / "t", {"snapshot": "s", "dtype": "int8"}, TypeError, "dtype must be"),
        (embedding, {"snapshot": "s"}, ValueError, "leave them out"),
        (embedding, {"dtype": "float32"}, ValueError, "leave them out"),
        (embedding, {"batch_size": 0}, ValueError, "batch_size"),
        (embedding, {"table": -1}, ValueError, "table must be"),
        (embedding, {"with_state": True}, ValueError, "fourth array"),
    ]:
        with pytest.raises(error, match=says):
            oneemb.import_rows(target, (IDS, vectors), **options)
    with pytest.raises(ValueError, match="no column 'state'"):
        oneemb.import_rows(embedding, tmp_path / "v.npz", with_state=True)
    for source, target, options, error, says in [
        (embedding, "v.csv", {}, ValueError, "must end in"),
        (embedding, "v.npz", {}, FileExistsError, "overwrite=True"),
        (embedding, "no/v.npz", {}, FileNotFoundError, "not a folder"),
        (embedding, "w.npz", {"snapshot": "s"}, ValueError, "leave it out"),
        (tmp_path / "e", "w.npz", {}, ValueError, "snapshot="),
        (tmp_path / "e", "w.npz", {"snapshot": "s"}, SnapshotNotFoundError, "'s'"),
        (embedding, "w.npz", {"batch_size": 0}, ValueError, "batch_size"),
    ]:
        with pytest.raises(error, match=says):
            oneemb.export_rows(source, tmp_path / target, **options)
    for names, options, says in [
        (["a.npy"], {}, "2 to 4 files"),
        (["a.npy", "b.npz"], {}, "2 to 4 files"),
        (["a.npy"] * 4, {}, "fourth file"),
        (["a.npy"] * 3, {"with_state": True}, "fourth file"),
        (["a.npy"] * 3, {"table": 1}, "keys and values alone if one table is exported"),
    ]:
        with pytest.raises(ValueError, match=says):
            oneemb.export_rows(embedding, names, **options)
    assert not (tmp_path / "w.npz").exists()


def test_state_of_another_optimizer_is_refused(tmp_path, embedding):
    oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), lr=0.1), [embedding])
    oneemb.import_rows(embedding, (IDS, some_vectors()))
    oneemb.export_rows(embedding, tmp_path / "v.npz", with_state=True)
    other = make_embedding(tmp_path / "other")
    with pytest.raises(oneemb.StorageError, match="'adam'.*attach 'adam' to the embedding first"):
        oneemb.import_rows(other, tmp_path / "v.npz", with_state=True)
    oneemb.Optimizer(torch.optim.Adagrad(other.parameters(), lr=0.1), [other])
    with pytest.raises(oneemb.StorageError, match="'adagrad'.*'adam'"):
        oneemb.import_rows(other, tmp_path / "v.npz", with_state=True)
    oneemb.import_rows(other, tmp_path / "v.npz")
    assert rows_in(other) == rows_in(embedding)
    other.close()


def test_an_import_that_fails_leaves_no_snapshot_and_an_export_no_file(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="integers"):
        oneemb.import_rows(
            tmp_path / "t", iter([(IDS, some_vectors()), (IDS.astype(float), some_vectors())]), snapshot="s"
        )
    assert read_snapshot_info(tmp_path / "t") == []
    oneemb.import_rows(tmp_path / "t", (IDS, some_vectors()), snapshot="s")
    with pytest.raises(SnapshotExistsError):
        oneemb.import_rows(tmp_path / "t", (IDS, some_vectors()), snapshot="s")

    def fail(*now):
        raise ZeroDivisionError

    (tmp_path / "out").mkdir()
    for format in FORMATS:
        path = tmp_path / "out" / f"v.{format}"
        with pytest.raises(ZeroDivisionError):
            oneemb.export_rows(tmp_path / "t", path, snapshot="s", progress=fail)
        assert list((tmp_path / "out").iterdir()) == []
        oneemb.export_rows(tmp_path / "t", path, snapshot="s")
        before = path.read_bytes()
        with pytest.raises(ZeroDivisionError):
            oneemb.export_rows(tmp_path / "t", path, snapshot="s", overwrite=True, progress=fail)
        assert path.read_bytes() == before
        path.unlink()


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path, embedding, monkeypatch):
    for module in ("pyarrow.parquet", "safetensors"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install 'oneemb\[parquet\]'"):
        oneemb.export_rows(embedding, tmp_path / "v.parquet")
    with pytest.raises(ImportError, match=r"needs safetensors: .*oneemb\[safetensors\]"):
        oneemb.import_rows(embedding, tmp_path / "v.safetensors")


def test_a_file_says_what_its_rows_are(tmp_path, embedding):
    oneemb.Optimizer(torch.optim.Adagrad(embedding.parameters(), lr=0.1), [embedding])
    oneemb.import_rows(embedding, (IDS, some_vectors()))
    expected = {"layout": {"dim": 3, "dtype": "float32", "state_width": 3}, "optimizer": "adagrad",
                "state": [0.0] * 3, "step": 0}  # fmt: skip
    for format in FORMATS:
        oneemb.export_rows(embedding, tmp_path / f"v.{format}", with_state=True)
    assert json.loads(str(np.load(tmp_path / "v.npz")["oneemb"])) == expected
    assert json.loads(pyarrow.parquet.read_schema(tmp_path / "v.parquet").metadata[b"oneemb"]) == expected
    with safetensors.safe_open(tmp_path / "v.safetensors", "np") as file:
        assert json.loads(file.metadata()["oneemb"]) == expected


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "damaged", "folder", "other", "json"])
@pytest.mark.parametrize("format", [*FORMATS, "npy"])
def test_a_file_that_is_garbage_is_named_with_what_it_must_be(tmp_path, embedding, format, kind):
    path, rng = tmp_path / f"garbage.{format}", np.random.default_rng(0)
    keys, values = np.arange(3000), rng.standard_normal((3000, 3)).astype(np.float32)
    if format == "npy":
        np.save(path, values)
    else:
        save(path, format, keys=keys, values=values)
    data = bytearray(path.read_bytes())
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "damaged":
        for at in range(8, len(data), 97):
            data[at] ^= 0xFF
        path.write_bytes(data)
    else:
        other = {"empty": b"", "text": b"id,x,y\n1,2,3\n" * 9, "other": b"\x89PNG\r\n\x1a\n" * 50, "json": b"{}"}
        path.write_bytes(other[kind])
    with pytest.raises((ValueError, oneemb.StorageError), match=f"garbage.{format}") as caught:
        oneemb.import_rows(embedding, path)
        assert (format, kind) == ("safetensors", "damaged"), "there is nothing that could tell"
        raise ValueError(f"garbage.{format}")
    assert len(str(caught.value)) > len(str(path)) + 20 or kind == "damaged"


def test_a_header_that_promises_more_than_there_is_takes_no_memory(tmp_path, embedding):
    for shape in ["(1000000000000, 3)", "(7, 1000000000000)", "(-1, 3)", "(4, -3)"]:
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
        header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        (tmp_path / "v.npy").write_bytes(header + bytes(84))
        with zipfile.ZipFile(tmp_path / "v.npz", "w") as archive:
            archive.writestr("values.npy", header + bytes(84))
        for name, options in [("v.npy", {}), ("v.npz", {"keys": None})]:
            tracemalloc.start()
            with pytest.raises(ValueError, match=f"{name}.*ends before row"):
                oneemb.import_rows(embedding, tmp_path / name, **options)
            assert tracemalloc.get_traced_memory()[1] < 10e6
            tracemalloc.stop()


@pytest.mark.parametrize("note", ["x", "7", "[]", '{"layout": 7}', '{"layout": {"dim": 3}}', "[" * 100_000])
@pytest.mark.parametrize("format", FORMATS)
def test_a_note_of_what_rows_are_that_makes_no_sense_is_refused(tmp_path, embedding, format, note):
    path = tmp_path / f"v.{format}"
    if format == "npz":
        np.savez(path, keys=IDS, values=some_vectors(), oneemb=np.array(note))
    elif format == "parquet":
        table = pyarrow.table({"keys": IDS, "values": list(some_vectors())}).replace_schema_metadata({"oneemb": note})
        pyarrow.parquet.write_table(table, path)
    else:
        safetensors.numpy.save_file({"keys": IDS, "values": some_vectors()}, path, {"oneemb": note})
    with pytest.raises(
        ValueError, match=f"v.{format}: the file's metadata entry 'oneemb' is not what export_rows writes"
    ):
        oneemb.import_rows(embedding, path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_weights_that_are_not_finite_are_refused_by_row_and_column_unless_asked_for(tmp_path, format, value):
    values = some_vectors()
    values[4, 1] = value
    path = save(tmp_path / f"v.{format}", format, keys=IDS, values=values)
    embedding = make_embedding(tmp_path / "e")
    says = rf"table 2, id {IDS[4]} has {value} in column values\[1\]; .*allow_nonfinite=True"
    for target, options in [(embedding, {}), (tmp_path / "t", {"snapshot": "s"})]:
        with pytest.raises(ValueError, match=says):
            oneemb.import_rows(target, path, table=2, batch_size=2, **options)
    assert read_snapshot_info(tmp_path / "t") == []
    assert oneemb.import_rows(tmp_path / "t", path, table=2, snapshot="s", allow_nonfinite=True) == len(IDS)
    found = snapshot_rows(tmp_path / "t", "s")[2, int(IDS[4])][1]
    assert np.array(found).tobytes() == np.array(float(value)).tobytes()
    embedding.close()


def test_the_column_of_a_weight_that_is_not_finite_is_that_of_the_file(tmp_path, embedding):
    pandas.DataFrame({"id": [5, 6], "x": [1.0, 2.0], "y": [3.0, np.inf], "z": [0.0, 0.0]}).to_parquet(
        tmp_path / "f.parquet"
    )
    with pytest.raises(ValueError, match="table 0, id 6 has inf in column y;"):
        oneemb.import_rows(embedding, tmp_path / "f.parquet", keys="id", values=("x", "y", "z"))
    state = np.zeros((7, 2), np.float32)
    state[1, 1] = np.nan
    with pytest.raises(ValueError, match=r"id 1 has nan in column state\[1\]"):
        oneemb.import_rows(tmp_path / "t", (IDS, some_vectors(), 0 * IDS, state), snapshot="s", with_state=True)


@pytest.mark.parametrize("table", [1 << 23, 1 << 24, 2**31 - 1])
def test_tables_that_no_index_can_hold_are_refused(tmp_path, embedding, table):
    tables = np.full(len(IDS), table)
    with pytest.raises(ValueError, match="table must be from 0 to 8388607"):
        oneemb.import_rows(tmp_path / "t", (IDS, some_vectors()), snapshot="s", table=table)
    with pytest.raises(ValueError, match=f"tables must be from 0 to 8388607, got {table}"):
        oneemb.import_rows(tmp_path / "t", (IDS, some_vectors(), tables), snapshot="s")
    with oneemb.make_persistent_table_writer(tmp_path / "t", "s", "int64", "float32", 3) as writer:
        with pytest.raises(ValueError, match=f"table_ids must be from 0 to 8388607, got {table}"):
            writer.write(IDS, some_vectors(), tables)
        writer.write(IDS, some_vectors(), tables * 0 + (1 << 23) - 1)
    assert len(snapshot_rows(tmp_path / "t", "s")) == len(IDS)


def test_an_embedding_of_more_tables_than_an_index_can_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at most 8388608 tables, got 8388609"):
        make_embedding(tmp_path / "e", tables=(1 << 23) + 1)


def test_a_table_without_rows_is_an_error_of_a_snapshot_and_an_empty_file_of_an_embedding(tmp_path, embedding):
    oneemb.import_rows(tmp_path / "t", (IDS, some_vectors(), np.arange(7) % 2 * 4), snapshot="s")
    for table in (1, 7):
        with pytest.raises(ValueError, match=f"snapshot 's' has no rows of table {table}; it has rows of tables 0, 4"):
            oneemb.export_rows(tmp_path / "t", tmp_path / "v.npz", snapshot="s", table=table)
    assert not (tmp_path / "v.npz").exists()
    assert oneemb.export_rows(embedding, tmp_path / "v.npz", table=2) == 0
    assert load(tmp_path / "v.npz", "npz")["keys"].shape == (0,)
    with pytest.raises(ValueError, match="table must be from 0 to 2, a table of 'e', got 3"):
        oneemb.export_rows(embedding, tmp_path / "w.npz", table=3)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_files_that_belong_together_are_replaced_together(tmp_path, monkeypatch, fails_at):
    oneemb.import_rows(tmp_path / "t", (IDS, some_vectors()), snapshot="s")
    files = [tmp_path / f"{name}.npy" for name in ("keys", "values", "tables")]
    for file in files:
        file.write_bytes(b"old")
    honest, calls = os.fsync, []

    def full(number):
        calls.append(number)
        if len(calls) == fails_at + 1:
            raise OSError(28, "No space left on device")
        honest(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(oneemb.StorageError, match="No space"):
        oneemb.export_rows(tmp_path / "t", files, snapshot="s", overwrite=True)
    assert [file.read_bytes() for file in files] == [b"old"] * 3
    assert {file.name for file in tmp_path.iterdir()} == {"t", *(file.name for file in files)}


def test_a_parquet_file_that_cannot_be_finished_leaves_nothing(tmp_path, monkeypatch):
    oneemb.import_rows(tmp_path / "t", (IDS, some_vectors()), snapshot="s")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(oneemb.StorageError, match="No space"):
        oneemb.export_rows(tmp_path / "t", tmp_path / "v.parquet", snapshot="s")
    assert {file.name for file in tmp_path.iterdir()} == {"t"}


def test_paths_are_those_of_the_moment_they_are_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    oneemb.import_rows(b"t", (IDS, some_vectors()), snapshot="s")
    oneemb.export_rows("t", b"v.npz", snapshot="s")
    assert (tmp_path / "t/chunks").is_dir() and (tmp_path / "v.npz").is_file()
    embedding = make_embedding("t", store=oneemb.make_cached_ssd_store_options(1, "t"))
    reader = oneemb.make_persistent_table_reader("t", "s", "int64", "float32")
    writer = oneemb.make_persistent_table_writer("u", "s", "int64", "float32", 3)
    monkeypatch.chdir(tmp_path / "elsewhere")
    embedding.load_snapshot("s")
    assert rows_in(embedding) == expected_rows(0 * IDS, IDS, some_vectors())
    embedding.close()
    assert sum(len(keys) for keys, _ in reader) == len(IDS)
    with reader, writer:
        writer.write(IDS, some_vectors())
    assert len(snapshot_rows(tmp_path / "u", "s")) == len(IDS) and list((tmp_path / "elsewhere").iterdir()) == []
    assert oneemb.import_rows(tmp_path / "w", b"../v.npz", snapshot="s") == len(IDS)


def test_an_import_that_is_stopped_leaves_no_pin_and_no_row_that_is_not_written_down(tmp_path):
    """Rows that lookups read are those that a snapshot holds, whenever it is stopped."""
    embedding = oneemb.MultiTableEmbedding(
        "items", 256, torch.float32, torch.int64, [oneemb.make_table()],
        oneemb.make_cached_ssd_store_options(1, str(tmp_path / "rows")), num_threads=1,
    )  # fmt: skip
    id_N = np.arange(100)
    embedding(torch.from_numpy(id_N))
    embedding.save_snapshot("clean")

    def bring():
        oneemb.import_rows(embedding, (id_N, np.ones((100, 256), np.float32)))

    stopped = 0
    for at in some_lines(count_lines(bring, "signal"), 80):
        embedding.load_snapshot("clean")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            was, place = interrupted(bring, at, "signal")
        stopped += was
        assert embedding.stats()["device"]["pinned"] == 0, place
        read = read_rows(embedding.store, np.zeros(100), id_N)
        embedding.save_snapshot("after", overwrite=True)
        embedding.load_snapshot("after")
        assert read_rows(embedding.store, np.zeros(100), id_N).tobytes() == read.tobytes(), place
    assert stopped
    embedding.close()


# Ctrl-C in a finalizer, Python drops.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("target", ["x.npz", "x.safetensors", "x.parquet", ("k.npy", "v.npy")])
def test_an_export_that_is_stopped_leaves_what_was_there(tmp_path, embedding, target):
    keys, values = IDS, some_vectors()
    oneemb.import_rows(embedding, (keys, values), table=1)
    names = [target] if isinstance(target, str) else list(target)
    paths = [str(tmp_path / name) for name in names]

    def export():
        oneemb.export_rows(embedding, paths[0] if len(paths) == 1 else paths, table=1, overwrite=True)

    export()
    old = [open(path, "rb").read() for path in paths]
    oneemb.import_rows(embedding, (keys, values + 1), table=1)
    export()
    new = [open(path, "rb").read() for path in paths]
    assert old != new
    files = sorted(os.listdir(tmp_path))
    lines = count_lines(export, "signal")
    for at in some_lines(lines, 30):
        for path, data in zip(paths, old, strict=True):
            with open(path, "wb") as file:
                file.write(data)
        _, place = interrupted(export, at, "signal")
        found = [open(path, "rb").read() for path in paths]
        # Zip archives hold the time of their making.
        assert [len(one) for one in found] == [len(one) for one in new], place
        if not paths[0].endswith(".npz"):
            assert found in (old, new), place
        assert sorted(os.listdir(tmp_path)) == files and embedding.snapshots() == [], place


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("format", FORMATS)
def test_an_export_to_a_full_disk_leaves_no_file_and_says_which(tmp_path, embedding, format, monkeypatch):
    oneemb.import_rows(embedding, (IDS, some_vectors()))
    create, full = LocalFileSystem.create, os.open("/dev/full", os.O_RDWR)

    def made(fs, path, **how):
        file = create(fs, path, **how)
        return os.dup2(full, file) if f"x.{format}" in path else file

    monkeypatch.setattr(LocalFileSystem, "create", made)
    with pytest.raises(oneemb.StorageError, match=rf"could not write .*x\.{format}.*: ENOSPC.*free space"):
        oneemb.export_rows(embedding, tmp_path / f"x.{format}")
    os.close(full)
    assert [name for name in os.listdir(tmp_path) if name.startswith("x.")] == []


@pytest.mark.parametrize("format", ["npz", "parquet"])  # safetensors itself takes no such names
def test_file_names_that_are_no_text_are_names_too(tmp_path, embedding, format):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff." + format.encode())
    oneemb.import_rows(embedding, (IDS, some_vectors()))
    oneemb.export_rows(embedding, path)
    oneemb.import_rows(tmp_path / "new", path, snapshot="v")
    assert snapshot_rows(tmp_path / "new", "v") == rows_in(embedding) != {}


def test_files_of_an_export_are_different_ones(tmp_path, embedding):
    keys, values = IDS, some_vectors()
    oneemb.import_rows(embedding, (keys, values))
    with pytest.raises(ValueError, match="a different file for each of keys, values"):
        oneemb.export_rows(embedding, [tmp_path / "k.npy", tmp_path / "sub" / ".." / "k.npy"], table=0)
    assert not os.path.exists(tmp_path / "k.npy")


# A signal that comes in a finalizer Python drops, with a warning: the call is then not interrupted.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("places", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_an_import_that_is_interrupted_leaves_no_lock_and_all_of_a_snapshot_or_nothing(tmp_path, shards, places, seed):
    made = []

    def bring():
        made.append([tmp_path / f"{len(made)}-{shard}" for shard in range(shards)])
        oneemb.import_rows(made[-1], (IDS, some_vectors()), snapshot="v")

    lines = count_lines(bring, "signal")
    for at in some_lines(lines, places, seed):
        stopped, place = interrupted(bring, at, "signal")  # whose frames live on, as in a notebook
        there = [[info.name for info in read_snapshot_info(path)] for path in made[-1] if os.path.isdir(path)]
        assert there in ([["v"]] * shards, [[]] * len(there)), place
        oneemb.import_rows(made[-1], (IDS, some_vectors()), snapshot="w")


def test_exports_of_one_embedding_at_once_take_nothing_from_each_other(tmp_path, embedding):
    oneemb.import_rows(embedding, (np.arange(5000), np.ones((5000, 3), np.float32)))
    inner = []

    def export_another(done, total):
        if not inner:
            inner.append(1)
            oneemb.import_rows(embedding, (np.arange(5000), np.full((5000, 3), 2, np.float32)))
            oneemb.export_rows(embedding, tmp_path / "b.npz")

    oneemb.export_rows(embedding, tmp_path / "a.npz", progress=export_another, batch_size=512)
    for name, value in (("a", 1), ("b", 2)):
        found = load(tmp_path / f"{name}.npz", "npz")["values"]
        assert found.shape == (5000, 3) and (found == value).all()
    assert embedding.snapshots() == []


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_killed_export_has_left_in_the_table_goes_with_the_next_use_of_it(tmp_path, format):
    child = os.fork()
    if child == 0:
        embedding = make_embedding(tmp_path / "rows")
        oneemb.import_rows(embedding, (IDS, some_vectors()))
        oneemb.export_rows(embedding, tmp_path / f"x.{format}", progress=lambda *_: os._exit(9))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert {file.name for file in tmp_path.iterdir()} <= {"rows", f"x.{format}.tmp"}
    embedding = make_embedding(tmp_path / "rows")
    assert len(read_snapshot_info(tmp_path / "rows")) == 1
    embedding(torch.arange(3)[:, None].expand(3, 3))
    assert embedding.snapshots() == []
    embedding.close()
