"""Rows as plain tensors, in aten ops and as one op, against NumPy, a dict and the training embedding."""

import numpy as np
import pytest
import torch

import oneemb
from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.threads import Threads
from oneemb.serving.build import find_snapshot, make_file
from oneemb.serving.frozen_op import HashedRows
from oneemb.serving.frozen_rows import FrozenRows
from oneemb.serving.initial import InitialValues
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.serving.served_file import ServedFile
from oneemb.storage.snapshots.snapshot_looks import SnapshotLooks

EXTREMES = [-(2**63), -(2**63) + 1, -(2**32), -1, 0, 1, 2**32, 2**62, 2**63 - 1]
DYNAMIC = {0: torch.export.Dim.DYNAMIC}


def served(folder, dtype="float32", name=None):
    path = str(folder / f"{dtype}-{name}.serving")
    make_file(path, find_snapshot(SnapshotLooks([str(folder)]), name), dtype, None, threads=Threads(1))
    return ServedFile(path, threads=Threads(1))


def lookups(file, absent="initial"):
    return [FrozenRows.of_file(file, absent=absent), HashedRows(file, absent)]


def embedding_of(folder, initializers, dtype=torch.float32, dim=9, **options):
    return oneemb.MultiTableEmbedding(
        "frozen", dim, dtype, torch.int64, [oneemb.make_table(one) for one in initializers],
        oneemb.make_device_mem_store_options(str(folder)), seed=2**63 + 12345, **options,
    )  # fmt: skip


def trained(folder, dtype=torch.float32, dim=9):
    """An embedding of three tables with rows of extreme ids among others, the middle table empty, and a snapshot."""
    initializers = [oneemb.make_normal_initializer(0, 1), oneemb.make_uniform_initializer(-1, 1), None]
    embedding = embedding_of(folder, initializers, dtype, dim, padding_idx=5)
    print("seed 0")
    ids = torch.cat([torch.randint(-50, 50, (80,), generator=torch.Generator().manual_seed(0)), torch.tensor(EXTREMES)])
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.3)
    for table in (0, 2):
        embedding(ids, torch.tensor(table)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    embedding.save_snapshot("one")
    return embedding.eval()


def some_keys():
    ids = torch.cat([torch.arange(-90, 90), torch.tensor(EXTREMES), torch.tensor(EXTREMES) ^ 77])
    return torch.arange(3).repeat_interleave(len(ids)), ids.repeat(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 9])
def test_rows_as_trained_are_those_of_eval_mode_bit_for_bit(tmp_path, dtype, dim):
    embedding = trained(tmp_path, dtype, dim)
    tables, ids = some_keys()
    want = embedding(ids, tables)
    for lookup in lookups(served(tmp_path)):
        got = lookup(tables, ids)
        assert got.dtype == torch.float32 and torch.equal(got, want.float())


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
@pytest.mark.parametrize("dim", [1, 8, 9])
def test_rounded_rows_are_those_that_numpy_reads_from_the_file(tmp_path, dtype, dim):
    trained(tmp_path, torch.float32, dim)
    file = served(tmp_path, dtype)
    byte_SX = np.ascontiguousarray(file.rows.row_SX).view(np.uint8).reshape(file.info.slots, -1)
    if dtype == "float16":
        weight_SD = byte_SX[:, : 2 * dim].copy().view(np.float16).astype(np.float32)
    elif dtype == "int8":
        scale_S2 = byte_SX[:, dim : dim + 8].copy().view(np.float32)
        weight_SD = byte_SX[:, :dim].astype(np.float32) * scale_S2[:, :1] + scale_S2[:, 1:]
    else:
        size = (dim + 1) // 2
        scale_S2 = byte_SX[:, size : size + 4].copy().view(np.float16).astype(np.float32)
        both_SX = np.stack([byte_SX[:, :size] & 15, byte_SX[:, :size] >> 4], 2).reshape(len(byte_SX), -1)[:, :dim]
        weight_SD = both_SX.astype(np.float32) * scale_S2[:, :1] + scale_S2[:, 1:]
    rows = {(t, id): weight_SD[slot] for t, id, slot in np.stack(file.keys(), 1).tolist()}
    assert len(rows) == file.info.rows > 100
    tables, ids = some_keys()
    zeros = np.zeros(dim, np.float32)
    want = np.stack([rows.get(key, zeros) for key in zip(tables.tolist(), ids.tolist(), strict=True)])
    for lookup in lookups(file, "zeros"):
        assert np.array_equal(lookup(tables, ids).numpy(), want)


def test_keys_that_salts_would_make_equal_are_told_apart(tmp_path):
    def written(name, keys):
        with oneemb.make_persistent_table_writer(tmp_path, name, torch.int64, torch.float32, 1) as writer:
            for table, id, value in keys:
                writer.write(np.array([id]), np.array([[value]], np.float32), np.array([table], np.int32))
        return FrozenRows.of_file(served(tmp_path, name=name), absent="zeros")

    first = written("first", [(0, 7, 1.0), (1, 7, 2.0)])
    other = 7 ^ int(first.salt_T[1])  # In table 1 it has the key of id 7 in table 0.
    assert first(torch.tensor([1, 0]), torch.tensor([other, other ^ 1])).tolist() == [[0.0], [0.0]]
    second = written("second", [(0, 7, 1.0), (1, other, 2.0)])
    assert second.salt_T[1] != first.salt_T[1]
    tables, ids = torch.tensor([0, 1, 0, 1]), torch.tensor([7, other, other, 7])
    assert second(tables, ids).tolist() == [[1.0], [2.0], [0.0], [0.0]]


@pytest.mark.parametrize(
    "initializer",
    [
        oneemb.make_constant_initializer(0.1), oneemb.make_uniform_initializer(-0.3, 0.7),
        oneemb.make_normal_initializer(0.5, 2.0), oneemb.make_trunc_normal_initializer(0.1, 0.4, -0.2, 0.9),
        oneemb.options.IdInitializer(1000),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unknown_ids_begin_as_in_training(tmp_path, initializer, dtype):
    embedding = embedding_of(tmp_path, [initializer, oneemb.make_constant_initializer(-2.0)], dtype, 10)
    embedding.save_snapshot("none")
    print("seed 1")
    ids = torch.randint(-(2**63), 2**63 - 1, (2000,), generator=torch.Generator().manual_seed(1))
    tables = torch.arange(2).repeat(1000)
    with torch.no_grad():
        want = embedding.eval()(ids, tables)
    aten, op = lookups(served(tmp_path))
    assert torch.equal(op(tables, ids), want.float())
    got = aten(tables, ids)
    exact = "normal" not in type(initializer).__name__.lower()
    wrong = got != want.float()
    assert not (exact and wrong.any()) and wrong.float().mean() < 1e-3
    neighbours = torch.nextafter(want.float(), got)
    assert dtype != torch.float32 or torch.equal(neighbours, got)  # within one rounding


def test_columns_that_begin_inside_a_block_of_four_begin_as_in_training(tmp_path):
    columns = [oneemb.make_uniform_initializer(0, 1), oneemb.make_constant_initializer(3), None]
    table = oneemb.make_table_options([oneemb.make_column_options(one) for one in columns])
    embedding = oneemb.MultiTableMultiColumnEmbedding(
        "columns", [3, 2, 6], torch.float32, torch.int64, [table], oneemb.make_device_mem_store_options(str(tmp_path)),
        oneemb.make_uniform_initializer(-5, 5),
    )  # fmt: skip
    embedding.save_snapshot("none")
    ids = torch.arange(-100, 100)
    for lookup in lookups(served(tmp_path)):
        assert torch.equal(lookup(torch.zeros(200, dtype=torch.int64), ids), embedding.eval()(ids))


def test_an_initializer_that_aten_cannot_draw_names_the_way_out():
    initial = InitialRows(0, np.array([[77]]), np.zeros((1, 1, 4)), np.array([2]))
    with pytest.raises(ValueError, match='kinds \\[77\\].*absent="zeros"'):
        InitialValues(initial, torch.float32)


@pytest.mark.parametrize("kind", ["aten", "op"])
def test_a_lookup_can_be_scripted_and_exported_for_any_number_of_ids(tmp_path, kind):
    trained(tmp_path)
    lookup = lookups(served(tmp_path, "int4"))[kind == "op"]
    tables, ids = some_keys()
    want = lookup(tables, ids)
    exported = torch.export.export(lookup, (tables, ids), dynamic_shapes=(DYNAMIC, DYNAMIC)).module()
    for program in (torch.jit.script(lookup), exported):
        for count in (len(ids), 7, 1, 0):
            assert torch.equal(program(tables[:count], ids[:count]), want[:count])


def test_tables_that_are_not_there_end_the_call(tmp_path):
    trained(tmp_path)
    for lookup in lookups(served(tmp_path)):
        for table in (-1, 3, 1 << 32, -(1 << 32), 1 + (1 << 40)):
            with pytest.raises((IndexError, RuntimeError, ValueError)):
                lookup(torch.tensor([table]), torch.tensor([1]))


def test_tables_of_another_dtype_are_no_tables_of_the_op(tmp_path):
    trained(tmp_path)
    lookup = HashedRows(served(tmp_path))
    for tables in (torch.tensor([0.5]), torch.tensor([True]), torch.tensor([1], dtype=torch.int32)):
        with pytest.raises(TypeError, match="tables must be int64"):
            lookup(tables, torch.tensor([1]))


def test_the_op_gives_float32_whatever_the_default_is_and_takes_strided_keys(tmp_path):
    trained(tmp_path)
    lookup, (tables, ids) = HashedRows(served(tmp_path)), some_keys()
    want = lookup(tables, ids)
    torch.set_default_dtype(torch.float64)
    try:
        got = lookup(torch.stack([tables, tables - 1], 1)[:, 0], torch.stack([ids, ids - 1], 1)[:, 0])
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == torch.float32 and torch.equal(got, want)


def test_a_damaged_row_is_found_before_it_is_frozen(tmp_path):
    trained(tmp_path)
    file = served(tmp_path)
    with open(file.path, "r+b") as changed:
        changed.seek(4096 + 30)
        changed.write(b"\xff\x00\xff")
    for make in (FrozenRows.of_file, HashedRows):
        with pytest.raises(CorruptTableError, match="offset 4096"):
            make(ServedFile(file.path, threads=Threads(1)))


def test_rows_of_a_writer_need_zeros_for_unknown_ids(tmp_path):
    with oneemb.make_persistent_table_writer(tmp_path, "one", torch.int64, torch.float32, 2) as writer:
        writer.write(np.array([7]), np.array([[1, 2]], np.float32))
    for make in (FrozenRows.of_file, HashedRows):
        with pytest.raises(StorageError, match='absent="zeros"'):
            make(served(tmp_path))
