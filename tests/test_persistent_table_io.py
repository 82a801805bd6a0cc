"""Readers and writers of persistent tables against a dict, and against folders built byte by byte."""

import gc
import shutil
import tracemalloc

import numpy as np
import pytest
import torch
import xxhash

import oneemb
from oneemb.foreign.oneflow_reader import OneFlowReader
from oneemb.foreign.oneflow_table import oneflow_snapshots
from oneemb.foreign.oneflow_writer import OneFlowWriter
from oneemb.storage.errors import CorruptTableError, LockedError, SnapshotExistsError, SnapshotNotFoundError

pytestmark = pytest.mark.filterwarnings("ignore:embedding 'e' starts empty")

INT64 = np.iinfo(np.int64)
EXTREMES = [0, 1, -1, INT64.min, INT64.min + 1, INT64.max, 2**32, -(2**32)]


def rows_of(reader):
    """What a reader gives, as a dict from (table, key) to the bytes of the values. No key comes twice."""
    found = {}
    for table_N, keys, values in reader:
        assert len(table_N) == len(keys) == len(values) > 0
        for t, key, value in zip(table_N.tolist(), keys.tolist(), values, strict=True):
            assert (t, key) not in found
            found[t, key] = value.tobytes()
    return found


def read(paths, name="s", key_type=torch.int64, value_type=torch.float32, **options):
    with oneemb.make_persistent_table_reader(paths, name, key_type, value_type, with_tables=True, **options) as reader:
        rows = rows_of(reader)
        assert len(reader) == len(rows)
        return rows


def write(paths, keys, values, name="s", table_ids=None, batch=1000, **options):
    """Writes in batches and returns the rows as `rows_of` gives them."""
    key_type, value_type = options.pop("key_type", keys.dtype), options.pop("value_type", values.dtype)
    with oneemb.make_persistent_table_writer(paths, name, key_type, value_type, values.shape[1], **options) as writer:
        for n in range(0, len(keys), batch):
            some = slice(n, n + batch)
            writer.write(keys[some], values[some], None if table_ids is None else table_ids[some])
    tables = np.zeros(len(keys), np.int64) if table_ids is None else table_ids
    triples = zip(tables.tolist(), keys.tolist(), values, strict=True)
    return {(t, key): value.tobytes() for t, key, value in triples}


def some_rows(rng, size, dim, dtype=np.float32, extremes=EXTREMES):
    keys = np.unique(np.concatenate([np.array(extremes, np.int64), rng.integers(-(2**62), 2**62, size)]))
    rng.shuffle(keys)
    return keys, rng.standard_normal((len(keys), dim)).astype(dtype)


def embedding_on(path, dim, tables=1, dtype=torch.float32, **options):
    return oneemb.MultiTableEmbedding(
        "e", dim, dtype, torch.int64, [oneemb.make_table(oneemb.make_constant_initializer(0.25))] * tables,
        oneemb.make_device_mem_store_options(str(path)), num_threads=1, **options,
    )  # fmt: skip


# ---- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [512, 4096])
@pytest.mark.parametrize(("dim", "dtype"), [(1, np.float32), (7, np.float32), (64, np.float32), (5, np.float16)])
@pytest.mark.parametrize("paths", [1, 3])
def test_rows_come_back_bit_for_bit(tmp_path, block, dim, dtype, paths):
    rng = np.random.default_rng(dim * paths)
    keys, values = some_rows(rng, 3000, dim, dtype)
    table_ids = rng.integers(0, 4, len(keys))
    folders = [tmp_path / f"{i}" for i in range(paths)]
    expected = write(folders, keys, values, table_ids=table_ids, physical_block_size=block)
    assert read(folders, value_type=dtype) == expected
    assert read(folders[::-1], value_type=dtype, batch_size=17) == expected


def test_every_bit_pattern_of_float32_comes_back(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**32, (500, 3), dtype=np.uint32)
    expected = write(tmp_path, np.arange(500), bits.view(np.float32))
    assert read(tmp_path) == expected


def test_the_comparison_notices_one_bit_and_one_missing_row(tmp_path):
    keys, values = some_rows(np.random.default_rng(1), 50, 2)
    expected = write(tmp_path, keys, values)
    found = read(tmp_path)
    assert found == expected
    key = (0, -1)
    assert {**found, key: bytes([found[key][0] ^ 1, *found[key][1:]])} != expected
    del found[key]
    assert found != expected


def test_int32_keys(tmp_path):
    keys = np.array([0, -1, 2**31 - 1, -(2**31), 77], np.int32)
    expected = write(tmp_path, keys, np.ones((5, 2), np.float32))
    for batch, _ in oneemb.make_persistent_table_reader(tmp_path, "s", np.int32, np.float32):
        assert batch.dtype == np.int32
    assert read(tmp_path, key_type="int32") == read(tmp_path, key_type=torch.int64) == expected


def test_the_last_of_equal_keys_counts_within_a_write_and_between_writes(tmp_path):
    values = np.arange(6, dtype=np.float32)[:, None]
    with oneemb.make_persistent_table_writer(tmp_path, "s", np.int64, np.float32, 1) as writer:
        writer.write(np.array([5, 6, 5, 5]), values[:4])
        writer.write(np.array([6, 7]), values[4:])
    assert read(tmp_path) == {(0, k): np.float32(v).tobytes() for k, v in [(5, 3), (6, 4), (7, 5)]}


def test_equal_keys_of_two_tables_are_two_rows(tmp_path):
    values = np.array([[1.0], [2.0]], np.float32)
    expected = write(tmp_path, np.array([9, 9]), values, table_ids=np.array([0, 3], np.uint8))
    assert len(expected) == 2 and read(tmp_path) == expected


def test_an_empty_snapshot_and_an_empty_write(tmp_path):
    expected = write(tmp_path, np.empty(0, np.int64), np.empty((0, 4), np.float32))
    with oneemb.make_persistent_table_writer(tmp_path, "t", np.int64, np.float32, 4) as writer:
        writer.write(np.empty(0, np.int64), np.empty((0, 4), np.float32))
    assert read(tmp_path) == read(tmp_path, "t") == expected == {}


def test_pairs_without_tables_are_the_default(tmp_path):
    write(tmp_path, np.array([3]), np.ones((1, 2), np.float32))
    reader = oneemb.make_persistent_table_reader(tmp_path, "s", torch.int64, torch.float32, 2)
    ((keys, values),) = list(reader)
    assert (keys.tolist(), values.tolist(), len(reader)) == ([3], [[1.0, 1.0]], 1)
    assert len(list(reader)) == 1, "a reader can be read twice"


def test_snapshots_of_one_folder_do_not_change_each_other(tmp_path):
    first = write(tmp_path, np.array([1, 2]), np.ones((2, 1), np.float32), "first")
    second = write(tmp_path, np.array([2, 3]), np.zeros((2, 1), np.float32), "second")
    assert (read(tmp_path, "first"), read(tmp_path, "second")) == (first, second)


def test_a_block_that_raises_leaves_no_snapshot_and_frees_the_path(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        oneemb.make_persistent_table_writer(tmp_path, "s", "int64", "float32", 1) as w,
    ):
        w.write(np.array([1]), np.ones((1, 1), np.float32))
        raise ZeroDivisionError
    with pytest.raises(SnapshotNotFoundError, match="none"):
        read(tmp_path)
    assert write(tmp_path, np.array([2]), np.ones((1, 1), np.float32)) == read(tmp_path)


@pytest.mark.parametrize("format", ["oneemb", "oneflow"])
def test_a_sharded_snapshot_that_fails_in_one_path_is_in_none(tmp_path, format, monkeypatch):
    paths = [tmp_path / "a", tmp_path / "b"]
    writer = oneemb.make_persistent_table_writer(paths, "s", "int64", "float32", 1, format=format)
    writer.write(np.arange(100), np.ones((100, 1), np.float32))

    def fail(parts):
        raise oneemb.StorageError("no space")

    monkeypatch.setattr(writer._sinks[1], "save", fail)
    with pytest.raises(oneemb.StorageError, match="no space"):
        writer.close()
    for path in paths:
        with pytest.raises(SnapshotNotFoundError, match="none"):
            read(path, format=format)
    keys, values = np.arange(9), np.ones((9, 1), np.float32)
    expected = write(paths, keys, values, format=format)
    assert read(paths, format=format) == expected


# ---- memory ---------------------------------------------------------------------------------------------------------


def traced_peak(run):
    gc.collect()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("format", ["oneemb", "oneflow"])
def test_memory_of_reading_and_writing_does_not_grow_with_the_rows(tmp_path, format):
    def write_rows(path, size):
        with oneemb.make_persistent_table_writer(path, "s", "int64", "float32", 64, format=format) as writer:
            for n in range(0, size, 8192):
                writer.write(np.arange(n, n + 8192), np.full((8192, 64), n, np.float32))

    def read_rows(path):
        for _ in oneemb.make_persistent_table_reader(path, "s", "int64", "float32", batch_size=8192, format=format):
            pass

    peak = {}
    for size in (5 * 8192, 25 * 8192):
        path = tmp_path / str(size)
        peak["write", size] = traced_peak(lambda path=path, size=size: write_rows(path, size))
        peak["read", size] = traced_peak(lambda path=path: read_rows(path))
    more_rows = 20 * 8192
    # A key costs the writer's index 40 bytes at most while it grows, and the reader 8 to 30 in the chunk that it reads:
    # of the 256 bytes of a row nothing stays.
    for what, per_row in (("write", 70), ("read", 40)):
        assert peak[what, 25 * 8192] - peak[what, 5 * 8192] < per_row * more_rows
        assert peak[what, 25 * 8192] < 256 * 25 * 8192 / 2


def test_the_memory_comparison_notices_rows_that_are_kept(tmp_path):
    write(tmp_path, np.arange(40000), np.ones((40000, 64), np.float32), batch=8192)
    reader = oneemb.make_persistent_table_reader(tmp_path, "s", "int64", "float32", batch_size=8192)
    assert traced_peak(lambda: list(reader)) > 256 * 40000


# ---- embeddings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "written"), [(torch.float32, np.float32), (torch.float16, np.float16), (torch.bfloat16, np.float32)]
)
def test_written_weights_load_into_an_embedding(tmp_path, dtype, written):
    rng = np.random.default_rng(0)
    keys, values = some_rows(rng, 200, 6, written)
    write(tmp_path, keys, values, weight_type=dtype, table_ids=keys % 2)
    embedding = embedding_on(tmp_path, 6, tables=2, dtype=dtype)
    embedding.load_snapshot("s")
    found = embedding(torch.from_numpy(keys), torch.from_numpy(keys % 2)).detach()
    assert torch.equal(found, torch.from_numpy(values).to(dtype))
    unknown = embedding.eval()(torch.tensor([12345]), torch.tensor([0]))
    assert torch.equal(unknown, torch.full((1, 6), 0.25, dtype=dtype))
    embedding.close()


def trained(path, optimizer=torch.optim.Adam, dtype=torch.float32, steps=3):
    embedding = embedding_on(path, 3, tables=2, dtype=dtype)
    step = oneemb.Optimizer(optimizer(embedding.parameters(), lr=0.1), [embedding])
    for n in range(steps):
        (embedding(torch.tensor([[4, 5], [n, -n]])).float() ** 2).sum().backward()
        step.step()
    return embedding, step


def test_written_weights_and_state_load_into_a_trained_embedding(tmp_path):
    embedding, _ = trained(tmp_path / "a")
    embedding.save_snapshot("s")
    rows = read(tmp_path / "a")
    tables, keys = (np.array(column) for column in zip(*rows, strict=True))
    values = np.stack([np.frombuffer(row, np.float32) for row in rows.values()])
    assert values.shape[1] == 9
    write(tmp_path / "b", keys, values, table_ids=tables, embedding_dim=3)
    again = embedding_on(tmp_path / "b", 3, tables=2)
    oneemb.Optimizer(torch.optim.Adam(again.parameters(), lr=0.1), [again])
    again.load_snapshot("s")
    again.save_snapshot("t")
    assert read(tmp_path / "b", "t") == rows
    for e in (embedding, again):
        e.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_snapshot_of_an_embedding_reads_as_what_it_looks_up(tmp_path, dtype):
    embedding, _ = trained(tmp_path, dtype=dtype)
    embedding.save_snapshot("s")
    rows = read(tmp_path)
    assert rows.keys() == {(0, 4), (1, 5), (0, 0), (0, 1), (0, 2), (1, 0), (1, -1), (1, -2)}
    for (table, key), row in rows.items():
        looked_up = embedding.eval()(torch.tensor([key]), torch.tensor([table]))[0]
        assert np.frombuffer(row, np.float32)[:3].tolist() == looked_up.tolist()
    embedding.close()


def test_rows_of_float16_with_state_are_written_as_float32_and_load(tmp_path):
    embedding, _ = trained(tmp_path / "a", dtype=torch.float16)
    embedding.save_snapshot("s")
    rows = read(tmp_path / "a")
    tables, keys = (np.array(column) for column in zip(*rows, strict=True))
    values = np.stack([np.frombuffer(row, np.float32) for row in rows.values()])
    write(tmp_path / "b", keys, values, table_ids=tables, embedding_dim=3, weight_type=torch.float16)
    assert read(tmp_path / "b") == rows
    again = embedding_on(tmp_path / "b", 3, tables=2, dtype=torch.float16)
    again.load_snapshot("s")
    ids, of = torch.from_numpy(keys), torch.from_numpy(tables)
    assert torch.equal(again.eval()(ids, of), embedding.eval()(ids, of))
    for e in (embedding, again):
        e.close()


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    with oneemb.make_persistent_table_writer(tmp_path, "s", np.int64, np.float32, 2) as writer:
        for keys, values, table_ids, error, says in [
            (np.array([1], np.int32), np.ones((1, 2), np.float32), None, TypeError, "keys must be int64"),
            (np.array([[1]]), np.ones((1, 2), np.float32), None, TypeError, "keys must be int64"),
            (np.array([1]), np.ones((1, 3), np.float32), None, TypeError, r"shape \[1, 2\]"),
            (np.array([1]), np.ones((1, 2), np.float64), None, TypeError, "values must be float32"),
            (np.array([1]), np.ones((1, 2), np.float32), np.array([0, 1]), TypeError, "table_ids must be integers"),
            (np.array([1]), np.ones((1, 2), np.float32), np.array([0.0]), TypeError, "table_ids must be integers"),
            (np.array([1]), np.ones((1, 2), np.float32), np.array([-1]), ValueError, "from 0 to 8388607, got"),
            (np.array([1]), np.ones((1, 2), np.float32), np.array([2**31]), ValueError, "from 0 to 8388607, got"),
        ]:
            with pytest.raises(error, match=says):
                writer.write(keys, values, table_ids)
    assert read(tmp_path) == {}
    with pytest.raises(oneemb.StorageError, match="closed"):
        writer.write(np.array([1]), np.ones((1, 2), np.float32))
    writer.close()


def test_arguments_that_make_no_sense_are_refused(tmp_path):
    make = oneemb.make_persistent_table_writer
    for arguments, options, error, says in [
        (("uint64", "float32", 2), {}, TypeError, "key_type must be int64 or int32"),
        (("int64", "float64", 2), {}, TypeError, "value_type must be float32 or float16"),
        (("int64", "float32", 0), {}, ValueError, "embedding_dim"),
        (("int64", "float32", 2), {"embedding_dim": 3}, ValueError, "embedding_dim must be from 1 to storage_dim=2"),
        (("int64", "float16", 2), {"embedding_dim": 1}, TypeError, "weight_type float16"),
        (("int64", "float32", 2), {"weight_type": "int8"}, TypeError, "weight_type must be"),
        (("int64", "float32", 2), {"physical_block_size": 1000}, ValueError, "512 or 4096"),
        (("int64", "float32", 2), {"format": "hdf5"}, ValueError, "'oneemb' or 'oneflow'"),
        (("int64", "float16", 2), {"format": "oneflow"}, TypeError, "must be float32 for OneFlow"),
    ]:
        with pytest.raises(error, match=says):
            make(tmp_path / "t", "s", *arguments, **options)
    for paths in ([], [tmp_path / "t", tmp_path / "t"]):
        with pytest.raises(ValueError, match="paths must name"):
            make(paths, "s", "int64", "float32", 2)
    with pytest.raises(ValueError, match="batch_size"):
        oneemb.make_persistent_table_reader(tmp_path, "s", "int64", "float32", batch_size=0)
    with pytest.raises(ValueError, match="paths"):
        oneemb.make_persistent_table_reader([], "s", "int64", "float32")


def test_a_weight_too_large_for_its_dtype_is_an_error_not_an_infinity(tmp_path):
    big = np.array([[1e5], [np.inf]], np.float32)
    with oneemb.make_persistent_table_writer(
        tmp_path, "s", "int64", "float32", 1, weight_type="float16"
    ) as writer:  # fmt: skip
        with pytest.raises(ValueError, match="100000.0 among them"):
            writer.write(np.arange(2), big)
        writer.write(np.arange(1), big[1:])
    assert read(tmp_path) == {(0, 0): np.float32(np.inf).tobytes()}


def test_a_reader_says_what_the_snapshot_is(tmp_path):
    write(tmp_path, np.array([2**40]), np.ones((1, 4), np.float32))
    make = oneemb.make_persistent_table_reader
    with pytest.raises(SnapshotNotFoundError, match="'s'"):
        make(tmp_path, "other", "int64", "float32")
    with pytest.raises(oneemb.StorageError, match="storage_dim of snapshot 's' .* is 4.*got 5"):
        make(tmp_path, "s", "int64", "float32", 5)
    with pytest.raises(TypeError, match="round"):
        make(tmp_path, "s", "int64", "float16")
    with pytest.raises(oneemb.StorageError, match="do not fit in int32"):
        list(make(tmp_path, "s", "int32", "float32"))


def test_a_part_of_a_sharded_snapshot_is_not_given_for_the_whole(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    expected = write(paths, np.arange(50), np.ones((50, 1), np.float32))
    for some in (paths[:1], paths[:2], [*paths[:2], paths[0]], [*paths, paths[0]]):
        with pytest.raises(oneemb.StorageError, match="has 3 parts|the 3 folders of snapshot"):
            read(some)
    assert all(0 < len(rows) < 50 for rows in (read_part(path) for path in paths))
    assert read(paths) == expected


def read_part(path):
    from oneemb.storage.table.snapshot_reader import SnapshotReader

    with SnapshotReader.open(path, "s") as reader:
        return [id for _, id_N, _ in reader.scan() for id in id_N.tolist()]


@pytest.mark.parametrize("format", ["oneemb", "oneflow"])
def test_a_path_in_use_and_a_name_in_use_are_named(tmp_path, format):
    make = oneemb.make_persistent_table_writer
    arguments = ("int64", "float32", 1)
    with make(tmp_path / "t", "s", *arguments, format=format):
        with pytest.raises(LockedError, match="process"):
            make([tmp_path / "free", tmp_path / "t"], "other", *arguments, format=format)
    with pytest.raises(SnapshotExistsError, match="'s' already"):
        make(tmp_path / "t", "s", *arguments, format=format)
    make(tmp_path / "free", "s", *arguments, format=format).close()


# ---- OneFlow's folders ----------------------------------------------------------------------------------------------


class OneFlowFolder:
    """OneFlow's table written byte by byte from the description of its layout, with nothing of oneemb."""

    def __init__(self, path, key_bytes, dim, block, blocks_per_chunk):
        self.path, self.key_bytes, self.value_bytes = path, key_bytes, 4 * dim
        self.block_bytes = -(-4 * dim // block) * block
        self.per_block = self.block_bytes // (4 * dim)
        self.per_chunk = self.per_block * blocks_per_chunk
        self.keys, self.values = {}, {}  # by chunk: bytes
        self.blocks = 0
        for folder in ("keys", "values", "snapshots"):
            (path / folder).mkdir(parents=True)
        (path / "LOCK").write_bytes(b"")
        for name, number in [
            ("KEY_SIZE", key_bytes), ("VALUE_SIZE", 4 * dim), ("PHYSICAL_BLOCK_SIZE", block),
            ("NUM_LOGICAL_BLOCKS_PER_CHUNK", blocks_per_chunk),
        ]:  # fmt: skip
            (path / name).write_text(f"{number}\n")
        self.blocks_per_chunk = blocks_per_chunk

    def put(self, keys, values, waste=0, filler=0):
        """Rows on fresh blocks, `waste` blocks left empty after them; returns their numbers."""
        first = self.blocks * self.per_block
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            chunk, row = divmod(first + i, self.per_chunk)
            block, place = divmod(row, self.per_block)
            kept = self.values.setdefault(chunk, bytearray())
            begin = block * self.block_bytes
            kept.extend(bytes([filler]) * max(0, begin + self.block_bytes - len(kept)))
            begin += place * self.value_bytes
            kept[begin : begin + self.value_bytes] = value.astype("<f4").tobytes()
            kept = self.keys.setdefault(chunk, bytearray())
            kept.extend(bytes(max(0, (block + 1) * self.per_block * self.key_bytes - len(kept))))
            kept[row * self.key_bytes : (row + 1) * self.key_bytes] = (key % 2 ** (8 * self.key_bytes)).to_bytes(
                self.key_bytes, "little"
            )
        self.blocks += -(-len(keys) // self.per_block) + waste
        return [first + i for i in range(len(keys))]

    def save(self, name, rows):
        for chunk in self.keys:
            (self.path / f"keys/key-{chunk:012d}").write_bytes(self.keys[chunk])
            (self.path / f"values/value-{chunk:012d}").write_bytes(self.values[chunk])
        folder = self.path / "snapshots" / name
        folder.mkdir()
        listed = ""
        for chunk in sorted({row // self.per_chunk for row in rows}):
            own = [row for row in rows if row // self.per_chunk == chunk]
            (folder / f"index-{chunk:012d}").write_bytes(b"".join(row.to_bytes(8, "little") for row in own))
            listed += f"index-{chunk:012d}\n"
        (folder / "LIST").write_text(listed)

    def files(self):
        return {str(f.relative_to(self.path)): f.read_bytes() for f in self.path.rglob("*") if f.is_file()}


# Values a block with room left, one block filled exactly, a value of two blocks; chunks of a few blocks.
ONEFLOW_LAYOUTS = [(8, 7, 512, 3), (8, 128, 512, 5), (4, 150, 512, 4), (4, 1, 4096, 1), (8, 64, 4096, 2)]


@pytest.mark.parametrize(("key_bytes", "dim", "block", "blocks_per_chunk"), ONEFLOW_LAYOUTS)
def test_tables_of_oneflow_are_read(tmp_path, key_bytes, dim, block, blocks_per_chunk):
    rng = np.random.default_rng(dim)
    bits = 8 * key_bytes
    folder = OneFlowFolder(tmp_path / "t", key_bytes, dim, block, blocks_per_chunk)
    live, values = {}, {}
    for size, waste in [(1, 0), (20, 3), (13, 1), (40, 0)]:
        keys = [0, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)), *rng.integers(-99, 99, 150).tolist()]
        keys = list(dict.fromkeys(keys))[:size]
        batch = rng.standard_normal((len(keys), dim)).astype(np.float32)
        live.update(zip(keys, folder.put(keys, batch, waste, filler=0xEE), strict=True))
        values.update(zip(keys, batch, strict=True))
    rows = list(live.values())
    rng.shuffle(rows)
    folder.save("epoch 1", rows)
    folder.save("nothing", [])
    expected = {(0, key): values[key].tobytes() for key in live}
    key_type = f"int{bits}"
    for batch_size in (1, 7, 65536):
        found = read(tmp_path / "t", "epoch 1", key_type, format="oneflow", batch_size=batch_size)
        assert found == expected
    assert read(tmp_path / "t", "nothing", key_type, format="oneflow") == {}
    assert oneflow_snapshots(tmp_path / "t") == ["epoch 1", "nothing"]


@pytest.mark.parametrize(("key_bytes", "dim", "block", "blocks_per_chunk"), ONEFLOW_LAYOUTS)
def test_tables_written_for_oneflow_are_those_of_the_description_byte_for_byte(
    tmp_path, key_bytes, dim, block, blocks_per_chunk
):
    rng = np.random.default_rng(dim)
    expected = OneFlowFolder(tmp_path / "expected", key_bytes, dim, block, blocks_per_chunk)
    block_bytes = -(-4 * dim // block) * block
    writer = OneFlowWriter(
        tmp_path / "found", "s", key_bytes=key_bytes, value_bytes=4 * dim, physical_block_size=block,
        chunk_bytes=block_bytes * blocks_per_chunk,
    )  # fmt: skip
    live = {}
    for size in (1, 30, 0, 17):
        keys = rng.permutation(np.arange(-20, 40))[:size]
        values = rng.standard_normal((size, dim)).astype(np.float32)
        live.update(zip(keys.tolist(), expected.put(keys.tolist(), values), strict=True))
        writer.put(keys, values)
    writer.save()
    writer.close()
    expected.save("s", sorted(live.values()))
    assert OneFlowFolder.files(expected) == {
        str(f.relative_to(tmp_path / "found")): f.read_bytes() for f in (tmp_path / "found").rglob("*") if f.is_file()
    }
    assert len(list((tmp_path / "found/values").iterdir())) > 1, "more than one chunk was written"


def test_the_byte_comparison_notices_a_packed_batch(tmp_path):
    folders = [OneFlowFolder(tmp_path / name, 8, 7, 512, 100) for name in "ab"]
    one, two = np.ones((1, 7), np.float32), np.full((1, 7), 2, np.float32)
    folders[0].save("s", folders[0].put([1], one) + folders[0].put([2], two))
    folders[1].save("s", folders[1].put([1, 2], np.concatenate([one, two])))
    assert folders[0].files() != folders[1].files()


@pytest.mark.parametrize("key_type", ["int64", "int32"])
def test_paths_are_those_that_oneflow_looks_in(tmp_path, key_type):
    rng = np.random.default_rng(3)
    limits = np.iinfo(key_type)
    keys = np.unique([0, 1, -1, limits.min, limits.max, *rng.integers(limits.min, limits.max, 500)]).astype(key_type)
    values = rng.standard_normal((len(keys), 3)).astype(np.float32)
    paths = [tmp_path / f"{i}-3" for i in range(3)]
    expected = write(paths, keys, values, format="oneflow", batch=100)
    assert read(paths, key_type=key_type, format="oneflow") == expected
    bits = 64 if key_type == "int64" else 32
    for p, path in enumerate(paths):
        own = {k for _, k in read(path, key_type=key_type, format="oneflow")}
        assert own == {
            key
            for key in keys.tolist()
            if xxhash.xxh64_intdigest((key % 2**bits).to_bytes(8, "little"), seed=1) % 3 == p
        }
        assert (path / "NUM_LOGICAL_BLOCKS_PER_CHUNK").read_text() == f"{(4 << 30) // 4096}\n"
        assert (path / "KEY_SIZE").read_text() == f"{bits // 8}\n"


def test_a_table_of_oneflow_becomes_one_of_oneemb_and_back(tmp_path):
    keys, values = some_rows(np.random.default_rng(4), 300, 5)
    expected = write(tmp_path / "oneflow", keys, values, format="oneflow")
    for source, target, formats in [
        ("oneflow", "oneemb", ("oneflow", "oneemb")),
        ("oneemb", "back", ("oneemb", "oneflow")),
    ]:
        with (
            oneemb.make_persistent_table_reader(
                tmp_path / source, "s", "int64", "float32", format=formats[0]
            ) as reader,
            oneemb.make_persistent_table_writer(
                tmp_path / target, "s", "int64", "float32", 5, format=formats[1]
            ) as writer,
        ):
            for batch_keys, batch_values in reader:
                writer.write(batch_keys, batch_values)
    assert read(tmp_path / "oneemb") == read(tmp_path / "back", format="oneflow") == expected


def test_rows_of_oneflow_with_state_say_how_many_weights_they_have(tmp_path):
    keys, values = some_rows(np.random.default_rng(4), 30, 6)
    write(tmp_path / "f", keys, values, format="oneflow")
    make = oneemb.make_persistent_table_reader
    reader = make(tmp_path / "f", "s", "int64", "float32", embedding_dim=2, format="oneflow")
    oneemb.import_rows(tmp_path / "weights", reader, snapshot="s")
    oneemb.import_rows(tmp_path / "state", reader, snapshot="s", with_state=True)
    assert read(tmp_path / "weights") == {(0, k): v[:2].tobytes() for k, v in zip(keys.tolist(), values, strict=True)}
    assert read(tmp_path / "state") == {(0, k): v.tobytes() for k, v in zip(keys.tolist(), values, strict=True)}
    embedding = embedding_on(tmp_path / "state", 2)
    oneemb.Optimizer(torch.optim.Adam(embedding.parameters()), [embedding])
    embedding.load_snapshot("s")
    assert torch.equal(embedding(torch.from_numpy(keys)).detach(), torch.from_numpy(values[:, :2]))
    embedding.close()
    for dim in (0, 7):
        with pytest.raises(ValueError, match="embedding_dim must be from 1 to 6"):
            make(tmp_path / "f", "s", "int64", "float32", embedding_dim=dim, format="oneflow")
    with pytest.raises(ValueError, match="leave it out"):
        make(tmp_path / "state", "s", "int64", "float32", embedding_dim=2)


def test_a_second_snapshot_leaves_every_byte_of_the_first(tmp_path):
    folder = OneFlowFolder(tmp_path / "t", 8, 2, 512, 4)
    folder.save("first", folder.put([1, 2, 3], np.ones((3, 2), np.float32)))
    before = folder.files()
    expected = write(tmp_path / "t", np.array([3, 4]), np.zeros((2, 2), np.float32), "second", format="oneflow",
                     physical_block_size=512)  # fmt: skip
    assert read(tmp_path / "t", "second", format="oneflow") == expected
    assert read(tmp_path / "t", "first", format="oneflow").keys() == {(0, 1), (0, 2), (0, 3)}
    after = folder.files()
    assert {name: after[name] for name in before} == before
    assert "keys/key-000000000001" in after


def test_an_abandoned_writer_leaves_a_table_without_snapshot_and_without_rows(tmp_path):
    writer = oneemb.make_persistent_table_writer(tmp_path, "s", "int64", "float32", 2, format="oneflow")
    writer.write(np.arange(10), np.ones((10, 2), np.float32))
    writer.abandon()
    assert oneflow_snapshots(tmp_path) == []
    assert [f.name for f in (tmp_path / "values").iterdir()] == []


def damaged(folder, change):
    shutil.rmtree(folder.path.parent / "damaged", ignore_errors=True)
    path = folder.path.parent / "damaged"
    shutil.copytree(folder.path, path)
    change(path)
    return path


def test_folders_that_contradict_themselves_are_refused_by_name(tmp_path):
    folder = OneFlowFolder(tmp_path / "t", 8, 2, 512, 4)
    rows = folder.put(list(range(300)), np.ones((300, 2), np.float32))
    folder.save("s", rows)
    index, key, value = (f"{name}-000000000001" for name in ("index", "key", "value"))

    def cut(name, size):
        return lambda path: (path / name).write_bytes((path / name).read_bytes()[:size])

    def write_index(*rows):
        data = b"".join(row.to_bytes(8, "little") for row in rows)
        return lambda path: (path / "snapshots/s" / index).write_bytes(data)

    for change, says in [
        (lambda path: (path / "snapshots/s" / index).unlink(), f"LIST names {index}, which is missing"),
        (cut(f"snapshots/s/{index}", 12), "8 bytes a row, has 12"),
        (cut(f"values/{value}", 511), f"{index} names row 299"),
        (cut(f"keys/{key}", 64), f"{index} names row 299"),
        (lambda path: (path / "keys" / key).unlink(), f"{key} is missing"),
        (lambda path: (path / "values" / value).unlink(), f"{value} is missing"),
        (write_index(256, 256), "twice"),
        (write_index(255), "names row 255"),
        (write_index(2**64 - 1), f"names row {2**64 - 1}"),
        (write_index(256, 512), "names row 512"),
        (lambda path: (path / "snapshots/s/LIST").write_text("index-1\n"), "got the line 'index-1'"),
        (lambda path: (path / "KEY_SIZE").write_text("x"), "positive number up to .*, holds 'x'"),
        (lambda path: (path / "VALUE_SIZE").write_text("6"), "VALUE_SIZE 6"),
        (lambda path: (path / "KEY_SIZE").write_text("16"), "KEY_SIZE 16"),
        (lambda path: (path / "VALUE_SIZE").write_text("4" * 40), "positive number up to"),
        (lambda path: (path / "VALUE_SIZE").write_text(str(1 << 36)), "names row"),
        (lambda path: (path / "VALUE_SIZE").write_text("8" * 5000), "positive number up to"),
        (lambda path: (path / "PHYSICAL_BLOCK_SIZE").write_text("7"), "PHYSICAL_BLOCK_SIZE 7"),
        (lambda path: (path / "PHYSICAL_BLOCK_SIZE").write_text(str(1 << 36)), "names row"),
        (lambda path: (path / "NUM_LOGICAL_BLOCKS_PER_CHUNK").write_text(str(1 << 39)), "names row"),
        (lambda path: (path / "snapshots/s/LIST").write_text(f"{index}\n{index}\n"), "twice"),
    ]:
        with pytest.raises(CorruptTableError, match=says):
            read(damaged(folder, change), format="oneflow")
    assert len(read(damaged(folder, lambda path: None), format="oneflow")) == 300


def test_a_save_that_oneflow_did_not_finish_is_not_read_short(tmp_path):
    folder = OneFlowFolder(tmp_path / "t", 8, 2, 512, 4)
    folder.save("s", folder.put(list(range(300)), np.ones((300, 2), np.float32)))

    def unfinished(path):
        # OneFlow maps each index file at its full size, cuts it, and then names it in LIST: the second was not cut.
        (path / "snapshots/s/LIST").write_text("index-000000000000\n")
        (path / "snapshots/s/index-000000000001").write_bytes(bytes(8 * folder.per_chunk))

    with pytest.raises(CorruptTableError, match="ended while it saved"):
        read(damaged(folder, unfinished), format="oneflow")


def test_arguments_that_are_not_the_tables_are_refused(tmp_path):
    write(tmp_path / "f", np.array([1]), np.ones((1, 2), np.float32), format="oneflow")
    write(tmp_path / "e", np.array([1]), np.ones((1, 2), np.float32))
    make_reader, make_writer = oneemb.make_persistent_table_reader, oneemb.make_persistent_table_writer
    with pytest.raises(TypeError, match="whose keys have 8 bytes"):
        make_reader(tmp_path / "f", "s", "int32", "float32", format="oneflow")
    with pytest.raises(oneemb.StorageError, match="storage_dim of snapshot 's' .* is 2.*got 3"):
        make_reader(tmp_path / "f", "s", "int64", "float32", 3, format="oneflow")
    with pytest.raises(SnapshotNotFoundError, match="'s'"):
        make_reader(tmp_path / "f", "t", "int64", "float32", format="oneflow")
    with pytest.raises(oneemb.StorageError, match='format="oneflow"'):
        make_reader(tmp_path / "f", "s", "int64", "float32")
    with pytest.raises(oneemb.StorageError, match="no table of OneFlow"):
        make_reader(tmp_path / "e", "s", "int64", "float32", format="oneflow")
    with pytest.raises(oneemb.StorageError, match="holds a table of oneemb"):
        make_writer(tmp_path / "e", "t", "int64", "float32", 2, format="oneflow")
    with pytest.raises(oneemb.StorageError, match="holds a table of OneFlow"):
        make_writer(tmp_path / "f", "t", "int64", "float32", 2)
    for arguments, block in [
        (("int64", "float32", 3), 4096),
        (("int32", "float32", 2), 4096),
        (("int64", "float32", 2), 512),
    ]:
        with pytest.raises(oneemb.StorageError, match="keys of 8 bytes, values of 8 and blocks of 4096"):
            make_writer(tmp_path / "f", "t", *arguments, block, format="oneflow")
    with pytest.raises(ValueError, match="must be possible as the name of a folder"):
        make_writer(tmp_path / "f", "../t", "int64", "float32", 2, format="oneflow")
    with pytest.raises(ValueError, match="table_ids must be 0 for OneFlow"):
        with make_writer(tmp_path / "f", "t", "int64", "float32", 2, format="oneflow") as writer:
            writer.write(np.array([1]), np.ones((1, 2), np.float32), np.array([1]))
    assert oneflow_snapshots(tmp_path / "f") == ["s"]
    assert len(OneFlowReader(tmp_path / "f", "s")) == 1


def test_an_embedding_refuses_a_part_of_a_sharded_snapshot(tmp_path):
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    with oneemb.make_persistent_table_writer(paths, "both", torch.int64, torch.float32, 4) as writer:
        writer.write(np.arange(100), np.ones((100, 4), np.float32))
    store = oneemb.make_device_mem_store_options(paths[1])
    embedding = oneemb.MultiTableEmbedding("e", 4, torch.float32, torch.int64, [oneemb.make_table()], store)
    with pytest.raises(oneemb.StorageError, match="part 1 of 2"):
        embedding.load_snapshot("both")
    assert embedding.stats()["rows"] == 0
    embedding.close()
