"""Embedding modules: lookups of every shape and type, limits, snapshots and state dicts, and what is refused."""

import gc
import json
import math
import os
import pickle
import re
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from typing import get_type_hints

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint

import oneemb
from oneemb.embeddings.stats import EmbeddingStats, TableStats, TierStats
from oneemb.kernels import cuda_driver, jit_cuda
from oneemb.kernels.threads import close_when_dropped
from oneemb.options import to_json
from oneemb.storage.errors import BrokenStoreError
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import read_snapshot_info
from tests.kernels.test_init_rows import uniform_python
from tests.support.forks import fork_context
from tests.support.interrupts import AtLine
from tests.support.models import STORES, make_embedding, reopen, rows_of, store_options

INT64 = torch.iinfo(torch.int64)
INT32 = torch.iinfo(torch.int32)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def made(tmp_path):
    """make_embedding in a folder of the test's, closed at its end."""
    every = []

    def make(path="rows", **options):
        every.append(make_embedding(tmp_path / path, **options))
        return every[-1]

    yield make
    for embedding in every:
        embedding.close()


def expected_rows(ids, table=0, *, dim=4, seed=0, low=-1.0, high=1.0):
    """Initial weights, drawn in plain Python."""
    rows = [[low + (high - low) * uniform_python(seed, table, i, d) for d in range(dim)] for i in ids]
    return torch.from_numpy(np.array(rows, np.float64).astype(np.float32))


# ---- lookups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_a_new_id_reads_as_its_initial_value(made, store):
    embedding = made(store=store, tables=2, seed=7)
    ids = torch.tensor([[3, 3], [-1, 0], [INT64.min, INT64.max]])
    rows = embedding(ids)
    assert rows.shape == (3, 2, 4) and rows.dtype == torch.float32
    for t in range(2):
        assert torch.equal(rows[:, t].detach(), expected_rows(ids[:, t].tolist(), t, seed=7))
    assert embedding.stats()["rows"] == 6


@pytest.mark.parametrize("shape", [(), (5,), (0,), (2, 3), (0, 3), (2, 0), (2, 1, 3), (1, 1, 1, 1)])
def test_one_table_takes_ids_of_any_shape(made, shape):
    ids = torch.arange(math.prod(shape)).reshape(shape)
    rows = made()(ids)
    assert rows.shape == (*shape, 4)
    assert torch.equal(rows.detach().reshape(-1, 4), expected_rows(ids.reshape(-1).tolist()).reshape(-1, 4))


def test_columns_of_ids_are_tables(made):
    embedding = made(tables=3)
    embedding(torch.tensor([[5, 5, 5], [5, 6, 5]]))
    assert embedding.stats()["rows"] == 4
    with pytest.raises(ValueError, match=r"shape \[B, 3\], one column a table, got \[2, 2\]; pass table_ids"):
        embedding(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \[B, 3\].*got \[3\]"):
        embedding(torch.zeros(3, dtype=torch.int64))
    assert embedding.stats()["rows"] == 4
    assert embedding(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, 4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("ids_shape", "table_shape"),
    [
        ((6,), (6,)),
        ((2, 3), (2, 3)),
        ((2, 3), (3,)),
        ((2, 3), (2, 1)),
        ((2, 3), ()),
        ((2, 3, 4), (3, 1)),
        ((0, 2), (2,)),
        ((0,), ()),
        ((0,), (1,)),
        ((0, 2), ()),
        ((), ()),
    ],
)
def test_table_ids_broadcast_to_the_ids(made, ids_shape, table_shape, dtype):
    embedding = made(tables=3)
    ids = torch.arange(math.prod(ids_shape)).reshape(ids_shape) % 4
    table_ids = (torch.arange(math.prod(table_shape)).reshape(table_shape) % 3).to(dtype)
    rows = embedding(ids, table_ids).detach().reshape(-1, 4)
    tables = table_ids.expand(ids_shape).reshape(-1).tolist()
    for n, (table, id) in enumerate(zip(tables, ids.reshape(-1).tolist(), strict=True)):
        assert torch.equal(rows[n], expected_rows([id], table)[0])


def test_views_of_ids_are_read_as_they_are(made):
    ids = torch.arange(24).reshape(4, 6)
    embedding = made(tables=2)
    for view in (ids.t()[:, :2], ids[:, ::3], ids[::2, :2], ids[:, 3:4].expand(4, 2)):
        rows = embedding(view).detach()
        for t in range(2):
            assert torch.equal(rows[:, t], expected_rows(view[:, t].tolist(), t))


@pytest.mark.parametrize("key_type", [torch.int64, torch.int32])
def test_ids_of_both_widths_are_the_same_keys(made, key_type):
    embedding = made(key_type=key_type)
    ids = [0, -1, INT32.min, INT32.max, 77]
    rows = embedding(torch.tensor(ids, dtype=key_type))
    assert torch.equal(rows.detach(), expected_rows(ids))


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 33, 129])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_width_and_type(made, dim, dtype):
    embedding = made(dim=dim, dtype=dtype)
    rows = embedding(torch.tensor([5, 6, 5]))
    assert rows.dtype == dtype and rows.shape == (3, dim)
    assert torch.equal(rows.detach(), expected_rows([5, 6, 5], dim=dim).to(dtype))


def test_columns_have_initializers_of_their_own(made):
    tables = [
        oneemb.make_table(
            [
                oneemb.make_column_options(oneemb.make_constant_initializer(3)),
                oneemb.make_column_options(),
                oneemb.make_column_options(oneemb.make_uniform_initializer(-1, 1)),
            ]
        ),
        oneemb.make_table(oneemb.make_constant_initializer(5)),
    ]
    embedding = made(dim=[1, 2, 3], tables=tables, default_initializer=oneemb.make_constant_initializer(4))
    rows = embedding(torch.tensor([[8, 8]])).detach()
    assert embedding.embedding_dim == 6
    assert torch.equal(rows[0, 0], torch.cat([torch.tensor([3.0, 4.0, 4.0]), expected_rows([8], dim=6)[0, 3:]]))
    assert torch.equal(rows[0, 1], torch.full((6,), 5.0))


def test_the_default_initializer_is_normal_with_a_small_deviation(made):
    rows = made(tables=[oneemb.make_table()], dim=64)(torch.arange(500)).detach()
    assert abs(float(rows.mean())) < 0.001 and abs(float(rows.std()) - 0.05) < 0.001


def test_seeds_give_other_rows_and_the_same_seed_the_same(made):
    one, two, three = (
        made(path=name, seed=seed)(torch.arange(9)).detach() for name, seed in zip("abc", (1, 1, 2), strict=True)
    )
    assert torch.equal(one, two) and not torch.isclose(one, three).any()
    made(path="d", seed=2**64 - 1)
    assert torch.equal(made(path="e", seed=-1)(torch.arange(3)), made(path="f", seed=2**64 - 1)(torch.arange(3)))


def test_initial_rows_of_an_embedding_never_change(made):
    # The bits of a release are those of the next: tables trained with one go on with the other.
    tables = [
        oneemb.make_table(oneemb.make_uniform_initializer(-0.25, 0.75)),
        oneemb.make_table(oneemb.make_normal_initializer(0.5, 0.1)),
        oneemb.make_table(oneemb.make_trunc_normal_initializer(0.5, 0.1, 0.3, 0.6)),
    ]
    bits = made(tables=tables, dim=3, seed=42)(torch.tensor([[2**32, 1, 1]])).detach().numpy().view(np.uint32)
    assert [[f"{word:08x}" for word in row] for row in bits[0]] == [
        ["3c382e2d", "3e76fd78", "bd80c631"],
        ["3ec60fca", "3f3d15f2", "3ebfff02"],
        ["3efdcd89", "3f10f1a7", "3f09b99e"],
    ]


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", [0, -1, INT64.min, INT64.max])
def test_padding_reads_as_zeros_and_is_not_stored(made, padding_idx):
    embedding = made(padding_idx=padding_idx, tables=2)
    for _ in range(2):
        rows = embedding(torch.tensor([[padding_idx, 5], [5, padding_idx]])).detach()
        assert not rows[0, 0].any() and not rows[1, 1].any() and rows[1, 0].all() and rows[0, 1].all()
        assert embedding.stats()["rows"] == 2
        embedding.eval()


def test_a_batch_of_padding_is_fine(made):
    embedding = made(padding_idx=0)
    assert not embedding(torch.zeros(3, dtype=torch.int64)).any() and embedding.stats()["rows"] == 0


# ---- training and eval -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_eval_inserts_nothing_and_reads_what_train_would_insert(made, store):
    embedding = made(store=store).eval()
    ids = torch.tensor([1, 2, 3, 2])
    with torch.no_grad():
        before = embedding(ids)
    with_gradient = embedding(ids)
    assert with_gradient.requires_grad and torch.equal(with_gradient, before) and embedding.stats()["rows"] == 0
    embedding.train()
    assert torch.equal(embedding(ids).detach(), before) and embedding.stats()["rows"] == 3
    embedding.eval()
    assert torch.equal(embedding(torch.tensor([2, 99]))[0], before[1]) and embedding.stats()["rows"] == 3


@pytest.mark.parametrize("store", STORES)
def test_an_evaluation_without_eval_mode_warns_once_that_it_grows_the_table(made, store):
    embedding = made(store=store)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            embedding(torch.arange(3))  # rows that no step has trained: somebody fills the table
        embedding(torch.arange(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            embedding(torch.arange(3))  # no new id
            embedding.read(torch.tensor([70]))
            embedding.eval()(torch.tensor([71]))
        embedding.train().requires_grad_(False)
        embedding(torch.tensor([72]))
        embedding.requires_grad_(True)(torch.tensor([73]))
    said = r"'items' is in training mode, so a lookup under torch.no_grad\(\) has inserted 2 new ids; .* model.eval\(\)"
    with torch.no_grad(), pytest.warns(UserWarning, match=said) as warned:
        embedding(torch.tensor([1, 80, 81]))
        embedding(torch.tensor([82]))
    assert len(warned) == 1 and warned[0].filename == __file__
    assert sorted(embedding.ids().tolist()) == [0, 1, 2, 72, 73, 80, 81, 82]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_lookup_without_gradient_reads_what_one_with_gradient_reads(made, store, dtype, frozen):
    print("seed 0")
    rng = np.random.default_rng(0)
    options = dict(tables=3, dim=7, padding_idx=2, dtype=dtype, store=store)
    plain, with_gradient = made("a", **options), made("b", **options)
    attach(with_gradient)
    plain.requires_grad_(not frozen)
    for step in range(4):
        ids = torch.from_numpy(rng.zipf(1.3, (50 + step, 3)).clip(max=300))
        with torch.set_grad_enabled(frozen):
            rows = plain(ids)
        expected = with_gradient(ids)
        assert expected.requires_grad and not rows.requires_grad
        assert rows.dtype == dtype and torch.equal(rows, expected.detach())
        assert not rows[ids == 2].any()
        # In eval mode, ids beyond those are not inserted.
        assert torch.equal(plain.eval()(ids + 5), with_gradient.eval()(ids + 5))
        plain.train(), with_gradient.train()
        assert plain.stats()["rows"] == with_gradient.stats()["rows"] and plain.stats()["device"]["pinned"] == 0
    tables = torch.tensor([2, 0, 0])
    ids = torch.tensor([5, 2, 400])
    with torch.no_grad():
        assert torch.equal(plain(ids, table_ids=tables), with_gradient(ids, table_ids=tables))
        for wrong, error in ((ids.int(), TypeError), (ids.reshape(1, 3, 1), ValueError)):
            with pytest.raises(error):
                plain(wrong)
        with pytest.raises(ValueError, match="table_ids must be from 0 to 2"):
            plain(ids, table_ids=torch.tensor([0, 3, 0]))


@pytest.mark.parametrize("store", STORES)
def test_a_row_of_the_padding_id_that_a_snapshot_brings_stays_unread(made, store):
    embedding = made(store=store)
    embedding(torch.tensor([2, 5]))
    embedding.save_snapshot("s")
    embedding.close()
    other = made(store=store, padding_idx=2)
    with pytest.warns(UserWarning, match="padding_idx=2"):
        other.load_snapshot("s")
    for train in (False, True):
        with torch.no_grad():
            assert other.train(train)(torch.tensor([2, 5])).any(1).tolist() == [False, True]


def test_a_lookup_without_gradient_that_does_not_fit_changes_nothing(made):
    embedding = made(options=dict(capacity=3))
    with torch.no_grad():
        embedding(torch.tensor([1, 2]))
        with pytest.raises(oneemb.StoreFullError, match="capacity is 3"):
            embedding(torch.tensor([1, 7, 8]))
    assert embedding.stats()["rows"] == 2


def test_no_grad_in_training_inserts_and_leaves_no_pins(made):
    embedding = made()
    with torch.no_grad():
        embedding(torch.tensor([1, 2]))
    assert embedding.stats()["rows"] == 2 and embedding.stats()["device"]["pinned"] == 0


def test_a_forward_pass_without_a_step_leaks_no_pins(made):
    # The cache holds 23,831 rows of 4 weights: it fits two of these batches, not twenty.
    embedding = made(store="ssd")
    for step in range(20):
        rows = embedding(torch.arange(step * 10_000, (step + 1) * 10_000))
        assert rows.requires_grad
        del rows
    rows = embedding(torch.tensor([1]))
    assert embedding.stats()["device"]["pinned"] == len(rows)


# ---- ids that are refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((torch.tensor([[1.0, 2.0]]),), TypeError, r"got torch.float32 \[1, 2\]; call ids.to"),
        ((torch.tensor([[1, 2]], dtype=torch.int32),), TypeError, "ids must be torch.int64 .*got torch.int32"),
        ((torch.tensor([[True, False]]),), TypeError, "got torch.bool"),
        (([[1, 2]],), TypeError, "ids must be a tensor of torch.int64 .*got list"),
        ((np.array([[1, 2]]),), TypeError, "ids must be a tensor .*got ndarray"),
        ((torch.tensor([1, 2]),), ValueError, r"\[B, 2\].*got \[2\]"),
        ((torch.tensor([[[1, 2]]]),), ValueError, r"\[B, 2\].*got \[1, 1, 2\]"),
        ((torch.tensor([[1, 2]]), torch.tensor([0.0])), TypeError, "must be a tensor of integers, .*got torch"),
        ((torch.tensor([[1, 2]]), [0, 1]), TypeError, "must be a tensor of integers, .*got list"),
        ((torch.tensor([[1, 2]]), torch.tensor([0, 1, 0])), ValueError, r"or one that broadcasts to it, got \[3\]"),
        ((torch.tensor([1]), torch.tensor([[0], [1]])), ValueError, r"or one that broadcasts to it, got \[2, 1\]"),
        ((torch.tensor([[1, 2]]), torch.tensor([0, 2])), ValueError, "table_ids must be from 0 to 1, got 0 to 2"),
        ((torch.tensor([[1, 2]]), torch.tensor([-1, 1])), ValueError, "table_ids must be from 0 to 1, got -1 to 1"),
        ((torch.tensor([[1, 2]]), torch.tensor([0, 2**32])), ValueError, "from 0 to 1, got 0 to 4294967296"),
        ((torch.zeros(1, 2, dtype=torch.int64, device="meta"),), ValueError, "ids must be on the CPU.*got meta"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_ids_that_cannot_be_looked_up_are_refused(made, arguments, error, match, training):
    embedding = made(tables=2).train(training)
    embedding(torch.tensor([[1, 2]]))
    rows = embedding.stats()["rows"]
    with pytest.raises(error, match=match):
        embedding(*arguments)
    assert embedding.stats()["rows"] == rows


def test_int64_ids_for_int32_keys_are_refused(made):
    with pytest.raises(TypeError, match="ids must be torch.int32 of any shape, got torch.int64"):
        made(key_type=torch.int32)(torch.tensor([1]))


# ---- arguments that are refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (dict(name=""), TypeError, "name must be a str of at least one letter"),
        (dict(dim=0), ValueError, "embedding_dim must be 1 or more, got 0"),
        (dict(dim=2.0), TypeError, "embedding_dim must be an int of 1 or more, got float 2.0"),
        (dict(dim=[4, 0]), ValueError, "embedding_dim must be 1 or more"),
        (dict(dtype=torch.float64), TypeError, "dtype must be torch.float32, float16 or bfloat16, got torch.float64"),
        (dict(key_type=torch.int16), TypeError, "key_type must be torch.int64 or torch.int32, got torch.int16"),
        (dict(tables=[]), TypeError, "tables must be a list of one or more"),
        (dict(tables=[oneemb.make_normal_initializer()]), TypeError, r"oneemb.make_table\(...\)"),
        (dict(tables=[oneemb.make_table([oneemb.make_column_options()] * 2)]), ValueError, "or one for all, got 2"),
        (
            dict(padding_idx=2**31, key_type=torch.int32),
            ValueError,
            "padding_idx must fit in key_type, torch.int32, got 2147483648",
        ),
        (dict(padding_idx=0.5), TypeError, "padding_idx must be an int or None, got 0.5"),
        (dict(seed=2**64), ValueError, "seed must fit in 64 bits"),
        (dict(seed=1.5), TypeError, "seed must be an int, got 1.5"),
        (dict(default_initializer=0.5), TypeError, "default_initializer must be made by one of .*, got 0.5"),
        (
            dict(default_initializer=oneemb.make_normal_initializer(std=1e4), dtype=torch.float16),
            ValueError,
            "default_initializer initializes weights up to 70000, torch.float16 holds at most 65504",
        ),
        (
            dict(tables=[oneemb.make_table(oneemb.make_constant_initializer(-1e39))]),
            ValueError,
            r"table 0 initializes weights up to 1e\+39, torch.float32 holds at most 3.4",
        ),
        (
            dict(tables=[oneemb.make_table(oneemb.make_uniform_initializer(-1e5, 0))], dtype=torch.float16),
            ValueError,
            "table 0 initializes weights up to 100000",
        ),
        (
            dict(
                tables=[oneemb.make_table(oneemb.make_trunc_normal_initializer(0, 1e5, -1, 1e5))], dtype=torch.float16
            ),
            ValueError,
            "table 0 initializes weights up to 100000",
        ),
        (dict(num_threads=0), ValueError, "number of threads must be at least 1"),
    ],
)
def test_arguments_out_of_range_are_refused(made, options, error, match):
    with pytest.raises(error, match=match):
        made(**options)


def test_one_width_for_several_columns_is_refused(tmp_path):
    with pytest.raises(TypeError, match="list of column widths, got 4"):
        oneemb.MultiTableMultiColumnEmbedding(
            "items", 4, torch.float32, torch.int64, [oneemb.make_table()], store_options("device", tmp_path)
        )


def test_store_options_of_another_kind_or_more_ranks_are_refused(tmp_path):
    def make(options):
        oneemb.MultiTableEmbedding("items", 4, torch.float32, torch.int64, [oneemb.make_table()], options)

    with pytest.raises(TypeError, match="made by one of oneemb.make_.*_store_options, got dict {'path'"):
        make({"path": "/rows"})
    with pytest.raises(ValueError, match="must name one folder, or one for each of 1 ranks of process_group, got 2"):
        make(oneemb.make_device_mem_store_options([tmp_path / "a", tmp_path / "b"]))


# ---- size_factor and storage_dim -------------------------------------------------------------------------------------


def attach(embedding, cls=torch.optim.Adam, **options):
    return oneemb.Optimizer(cls(embedding.parameters(), lr=0.1, **options), [embedding])


@pytest.mark.parametrize(
    ("options", "optimizer", "needed"),
    [
        (dict(size_factor=2), torch.optim.Adam, "size_factor=3"),
        (dict(size_factor=1), torch.optim.Adagrad, "size_factor=2"),
        (dict(size_factor=1), oneemb.optim.RowWiseAdagrad, "size_factor=2"),
        (dict(storage_dim=11), torch.optim.Adam, "storage_dim=12"),
        (dict(storage_dim=4), oneemb.optim.RowWiseAdagrad, "storage_dim=5"),
    ],
)
def test_a_row_too_narrow_for_the_optimizer_names_the_right_number(made, options, optimizer, needed):
    embedding = made(options=options)
    with pytest.raises(ValueError, match=f"is too small for .* rows of 4 weights need {needed}; give this"):
        attach(embedding, optimizer)
    name, number = needed.split("=")
    embedding.close()
    attach(made(options={name: int(number)}), optimizer)


@pytest.mark.parametrize("options", [dict(size_factor=4), dict(storage_dim=20), {}])
def test_a_row_wider_than_needed_trains_to_the_same_weights(made, options):
    weights = []
    for path, more in (("plain", {}), ("wide", options)):
        embedding = made(path=path, options=more)
        optimizer = attach(embedding)
        for _ in range(3):
            embedding(torch.tensor([1, 2, 1])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(rows_of(embedding, [1, 2]))
    assert torch.equal(*weights)


# ---- capacity and budgets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_capacity_reached_is_an_error_that_changes_nothing(made, store):
    embedding = made(store=store, tables=2, options=dict(capacity=10))
    embedding(torch.arange(8).reshape(4, 2))
    before = rows_of(embedding, range(20))
    with pytest.raises(oneemb.StoreFullError, match="capacity is 10 rows; 8 are kept and 3 new ones were asked for"):
        embedding(torch.tensor([[100, 1], [102, 103]]))
    assert embedding.stats()["rows"] == 8 and torch.equal(rows_of(embedding, range(20)), before)
    embedding(torch.tensor([[100, 1], [102, 3]]))
    assert embedding.stats()["rows"] == 10
    embedding.eval()
    embedding(torch.tensor([[1000, 1001]]))


@pytest.mark.parametrize("store", ["host", "ssd", "ssd, host cache"])
def test_a_cache_smaller_than_a_step_says_the_size_needed_and_that_size_works(made, store):
    def train(cache_mb, path):
        embedding = made(path=path, store=store, dim=64, cache_mb=cache_mb)
        optimizer = attach(embedding)
        embedding(torch.arange(1000))
        embedding(torch.arange(4000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return embedding

    with pytest.raises(oneemb.StoreFullError, match="the device tier has 1297 slots") as error:
        train(1, "small")
    needed = int(re.search(r"at least (\d+) MiB", str(error.value)).group(1))
    with pytest.raises(oneemb.StoreFullError):
        train(needed - 1, "smaller")
    assert train(needed, "enough").stats()["step"] == 1


def test_a_step_that_does_not_fit_changes_nothing(made):
    embedding = made(store="ssd", dim=64)
    optimizer = attach(embedding)
    embedding(torch.arange(500)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before, stats = rows_of(embedding, torch.arange(500)), embedding.stats()
    with pytest.raises(oneemb.StoreFullError):
        embedding(torch.arange(4000))
    assert embedding.stats()["rows"] == stats["rows"] and embedding.stats()["device"]["pinned"] == 0
    assert torch.equal(rows_of(embedding, torch.arange(500)), before)


# ---- snapshots -------------------------------------------------------------------------------------------------------


def test_snapshots_are_listed_overwritten_and_deleted(made):
    embedding = made()
    embedding(torch.tensor([1]))
    assert embedding.snapshots() == []
    embedding.save_snapshot("b")
    embedding.save_snapshot("a")
    assert embedding.snapshots() == ["b", "a"]
    with pytest.raises(oneemb.StorageError, match="'b'.*overwrite=True"):
        embedding.save_snapshot("b")
    embedding(torch.tensor([2]))
    embedding.save_snapshot("b", overwrite=True)
    embedding.load_snapshot("a")
    assert embedding.stats()["rows"] == 1
    embedding.load_snapshot("b")
    assert embedding.stats()["rows"] == 2
    embedding.delete_snapshot("a")
    assert embedding.snapshots() == ["b"]
    for call in (embedding.load_snapshot, embedding.delete_snapshot):
        with pytest.raises(oneemb.StorageError, match="'a'.*'b'"):
            call("a")


def test_a_description_is_written_as_json_once_and_never_parsed(made, monkeypatch):
    done = {"written": 0, "parsed": 0}  # characters
    encode, raw_decode = json.JSONEncoder.encode, json.JSONDecoder.raw_decode

    def counted_encode(self, value):
        text = encode(self, value)
        done["written"] += len(text)
        return text

    def counted_decode(self, text, idx=0):
        value, end = raw_decode(self, text, idx)
        done["parsed"] += end - idx
        return value, end

    monkeypatch.setattr(json.JSONEncoder, "encode", counted_encode)
    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted_decode)

    def cost_of(call, size):
        done.update(written=0, parsed=0)
        call()
        return round(done["written"] / size, 1), round(done["parsed"] / size, 1)

    # Each table has another one, and the description is long.
    tables = [oneemb.make_table(oneemb.make_constant_initializer(t)) for t in range(2000)]
    size = len(to_json(tables))
    assert size > 200_000
    embedding = made(tables=tables)
    embedding(torch.tensor([[1] * 2000]))
    assert cost_of(lambda: embedding.save_snapshot("first"), size) == (1, 0)
    for name in ("second", "third"):
        assert cost_of(lambda name=name: embedding.save_snapshot(name), size) == (0, 0)
    assert embedding.description()["tables"] is embedding.description()["tables"]
    assert cost_of(lambda: embedding.load_snapshot("second"), size) == (0, 0)
    embedding = reopen(embedding)
    gc.collect()
    assert cost_of(lambda: embedding.load_snapshot("second"), size) == (1, 0)
    embedding.close()
    gc.collect()
    files = [read_snapshot_info(embedding.store_options.persistent_path[0])]
    assert cost_of(lambda: files.append(read_snapshot_info(embedding.store_options.persistent_path[0])), size) == (0, 0)
    read = [info.meta["embedding"]["tables"] for infos in files for info in infos]
    assert len(read) == 6 and all(one == json.loads(to_json(tables)) for one in read)
    copy = pickle.loads(pickle.dumps(read[0]))
    assert type(copy) is list and copy == read[0]


@pytest.mark.parametrize("store", STORES)
def test_a_new_embedding_goes_on_from_a_snapshot(made, store):
    embedding = made(store=store, tables=2)
    optimizer = attach(embedding)
    for _ in range(3):
        embedding(torch.tensor([[1, 2], [3, 2]])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    embedding.save_snapshot("s")
    rows = rows_of(embedding, range(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # A resume is what is expected.
        other = reopen(embedding)
        assert other.stats()["rows"] == 0
        other.load_snapshot("s")
        other(torch.tensor([[1, 2]]))
    assert torch.equal(rows_of(other, range(5)), rows) and other.stats()["step"] == 3
    attach(other)
    other.close()


@pytest.mark.parametrize("no_grad", [False, True])
def test_the_first_training_lookup_beside_snapshots_says_once_that_none_was_loaded(made, no_grad):
    embedding = made(tables=2)
    embedding(torch.tensor([[1, 2]]))
    embedding.save_snapshot("s")
    other = reopen(embedding)
    attach(other)  # so that there are rows to be read in place
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.eval()(torch.tensor([[1, 2]]))
        other.train()
    with torch.set_grad_enabled(not no_grad):
        with pytest.warns(
            UserWarning,
            match="'items' starts empty, though .* holds the snapshots 's'; to continue",
        ) as said:
            torch.nn.Sequential(other)(torch.tensor([[1, 2]]))
        assert len(said) == 1 and said[0].filename == __file__, "the warning names the line that looks up"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other(torch.tensor([[3, 4]]))


def test_a_warning_that_is_an_error_leaves_no_row(made):
    embedding = made()
    embedding(torch.arange(3))
    embedding.save_snapshot("s")
    other = reopen(embedding)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="starts empty"):
            other(torch.arange(3))
    other.load_snapshot("s")
    assert other.stats()["rows"] == 3


def test_rows_that_were_never_saved_or_were_begun_otherwise_give_no_warning(made, tmp_path):
    embedding = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embedding.save_snapshot("of no rows")
        embedding(torch.arange(3))
        embedding.save_snapshot("s")
        other = reopen(embedding)
        other.clear()  # as somebody does who wants to begin anew
        other(torch.arange(3))
        copy = other.copy_to(tmp_path / "copy")
        copy(torch.arange(9))
        copy.close()


@pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")
def test_a_snapshot_of_more_tables_is_refused_and_of_fewer_is_loaded(made):
    embedding = made(tables=2)
    embedding(torch.tensor([[1, 2]]))
    embedding.save_snapshot("two")
    embedding.close()
    narrow = made(tables=1)
    narrow(torch.tensor([5]))
    with pytest.raises(
        oneemb.StorageError, match="'two' holds rows of 2 tables, embedding 'items' has 1; make the embedding with"
    ):
        narrow.load_snapshot("two")
    assert narrow.stats()["rows"] == 1
    narrow.close()
    wide = made(tables=3)
    wide.load_snapshot("two")
    assert wide.stats()["rows"] == 2


def test_an_empty_folder_gives_no_warning(made):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made()


# ---- state dicts -----------------------------------------------------------------------------------------------------


def test_a_state_dict_names_a_snapshot_and_loading_it_loads_that(made, tmp_path):
    embedding = made()
    optimizer = attach(embedding)
    model = torch.nn.ModuleDict({"rows": embedding, "mlp": torch.nn.Linear(4, 1)})

    def step():
        embedding(torch.tensor([1, 2, 1])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    rows = rows_of(embedding, [1, 2])
    state = model.state_dict()
    torch.save(state, tmp_path / "state.pt")
    step()
    assert not torch.equal(rows_of(embedding, [1, 2]), rows)
    model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(rows_of(embedding, [1, 2]), rows) and embedding.stats()["step"] == 1
    assert embedding.snapshots() == [oneemb.snapshot_name(state["rows._extra_state"])]


def named(embedding):
    return oneemb.snapshot_name(embedding.state_dict()["_extra_state"])


def test_a_state_dict_saves_a_snapshot_only_when_rows_have_changed(made):
    embedding = made()
    optimizer = attach(embedding)
    assert named(embedding) is None and embedding.snapshots() == []
    embedding(torch.tensor([1]))
    first = named(embedding)
    embedding(torch.tensor([1]))
    embedding.eval()(torch.tensor([2]))
    embedding.train()
    assert named(embedding) == first and len(embedding.snapshots()) == 1
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert named(embedding) != first and len(embedding.snapshots()) == 2
    embedding.save_snapshot("mine")
    assert named(embedding) == "mine"
    embedding.delete_snapshot("mine")
    assert named(embedding) in embedding.snapshots()
    embedding.load_snapshot(first)
    assert named(embedding) == first


def test_a_snapshot_that_is_overwritten_holds_the_state_dict_of_the_moment(made):
    embedding = made()
    embedding(torch.tensor([1]))
    embedding.save_snapshot("s")
    embedding(torch.tensor([2]))
    assert named(embedding) != "s"
    embedding.save_snapshot("s", overwrite=True)
    assert named(embedding) == "s"


def test_the_state_dict_of_an_empty_embedding_empties_another(made):
    empty = made(path="empty").state_dict()
    embedding = made()
    embedding(torch.tensor([1]))
    embedding.load_state_dict(empty)
    assert embedding.stats()["rows"] == 0


@pytest.mark.parametrize("change", [torch.clone, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double])
def test_a_state_dict_may_be_mapped_and_loads(made, change):
    embedding = made()
    embedding(torch.arange(3))
    state = {name: change(value) for name, value in embedding.state_dict().items()}
    embedding(torch.arange(5))
    embedding.load_state_dict(state)
    assert embedding.stats()["rows"] == 3


def test_a_state_dict_that_was_averaged_says_that_it_names_no_rows(made):
    embedding, states = made(), []
    for id in (1, 2):
        embedding(torch.tensor([id]))
        states.append(embedding.state_dict())
    averaged = {name: value // 2 + states[1][name] // 2 for name, value in states[0].items()}
    with pytest.raises(ValueError, match="copy entries unchanged: state dicts hold no rows"):
        embedding.load_state_dict(averaged)
    assert embedding.stats()["rows"] == 2


def test_a_state_dict_goes_through_safetensors_and_distributed_checkpoints(made, tmp_path):
    embedding = made()
    embedding(torch.arange(3))
    safetensors.torch.save_file(embedding.state_dict(), tmp_path / "s.safetensors")
    torch.distributed.checkpoint.save(embedding.state_dict(), checkpoint_id=tmp_path / "dcp")
    for way in ("safetensors", "dcp"):
        embedding.clear()
        state = embedding.state_dict()
        if way == "dcp":
            torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "dcp")
        else:
            state = safetensors.torch.load_file(tmp_path / "s.safetensors")
        embedding.load_state_dict(state)
        assert embedding.stats()["rows"] == 3, way


def test_the_longest_name_of_a_snapshot_fits_into_a_state_dict(made):
    embedding = made()
    embedding(torch.arange(3))
    for letter, times in (("a", 200), ("\U0001f600", 16), ("\x01", 60)):
        embedding.save_snapshot(letter * times)
        assert len(embedding.get_extra_state()) == 1024 and named(embedding) == letter * times


def test_a_state_dict_whose_snapshot_is_gone_names_it_and_those_that_are_there(made):
    embedding = made()
    embedding(torch.tensor([1]))
    state = embedding.state_dict()
    name = oneemb.snapshot_name(state["_extra_state"])
    embedding.save_snapshot("other")
    embedding.delete_snapshot(name)
    embedding(torch.tensor([2]))
    with pytest.raises(oneemb.StorageError, match=f"'{name}'.*'other'"):
        embedding.load_state_dict(state)
    assert embedding.stats()["rows"] == 2


# ---- what an embedding is not ----------------------------------------------------------------------------------------


NO_GPU = {  # torch.version.cuda, whether numba-cuda is there, the driver's CUDA, and what the error says
    "torch without CUDA": (None, True, 0, "PyTorch .* is built without CUDA; install a build with CUDA 13"),
    "no numba-cuda": ("13.0", False, 0, r"needs numba-cuda: pip install 'oneemb\[cuda\]'"),
    "no driver": ("13.0", True, 0, "need an NVIDIA driver that knows CUDA 13 .*, and there is none; install"),
    "an old driver": ("12.8", True, 12080, "the NVIDIA driver knows CUDA 12.8; install a newer one"),
    "no GPU": ("13.0", True, 13000, "PyTorch finds no GPU .*; check nvidia-smi"),
}


@pytest.mark.parametrize(("torch_cuda", "numba_cuda", "driver", "says"), NO_GPU.values(), ids=NO_GPU)
def test_moving_to_cuda_without_it_says_what_to_install(made, monkeypatch, torch_cuda, numba_cuda, driver, says):
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(jit_cuda, "COMPILES", numba_cuda)
    monkeypatch.setattr(cuda_driver, "driver_version", lambda: driver)
    embedding = made()
    for model in (embedding, torch.nn.Sequential(embedding)):
        with pytest.raises(RuntimeError, match=f"'items' cannot move: .*{says}"):
            model.to("cuda:99")  # which no machine has, so that torch fails on one with GPUs too
        with pytest.raises(RuntimeError, match=f"'items' cannot move: .*{says}"):
            model.cuda(99)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_this_machine_without_a_gpu_is_told_what_it_lacks(made):
    lacks = "PyTorch .* is built without CUDA" if torch.version.cuda is None else "needs numba-cuda|driver|finds no GPU"
    with pytest.raises(RuntimeError, match=f"'items' cannot move: .*({lacks})"):
        made().to("cuda")


def test_an_embedding_moves_to_no_other_device(made):
    embedding = made()
    for model in (embedding, torch.nn.Sequential(embedding)):
        with pytest.raises(NotImplementedError, match=r"got a move to meta; .*embedding\(ids\).to\(device\)"):
            model.to("meta")
    assert embedding.to("cpu") is embedding


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_rows_keep_their_dtype_when_a_model_is_cast(made, cast):
    embedding = made()
    optimizer = oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), lr=0.1), [embedding])
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    rows = rows_of(embedding, [1, 2])
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), embedding, torch.nn.Linear(4, 1))
    with pytest.warns(UserWarning, match="'items' keeps its torch.float32 rows though the model becomes .*: cast"):
        getattr(model, cast)()
    dtype = getattr(torch.ones(1), cast)().dtype
    assert model[0].weight.dtype == model[2].weight.dtype == dtype and embedding.weight.dtype == torch.float32
    assert torch.equal(rows_of(embedding, [1, 2]), rows) and rows.dtype == torch.float32
    out = model[2](embedding(torch.tensor([1])).to(dtype)).sum()
    out.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(rows_of(embedding, [1]), rows[:1])


@pytest.mark.parametrize("cast", ["half", "float", "cpu"])
def test_a_cast_that_rows_need_not_follow_gives_no_warning(made, cast):
    embedding = made(dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(torch.nn.Sequential(embedding), cast)()
    assert embedding(torch.tensor([1])).dtype == torch.float16


def test_a_move_that_is_refused_says_what_has_been_moved(made):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), made())
    with pytest.raises(NotImplementedError, match="before this embedding.* are converted already.*load their"):
        model.to("meta")


def test_a_move_that_a_graph_refuses_has_moved_nothing(made):
    class Graph(oneemb.TrainGraph):
        def __init__(self):
            super().__init__()
            self.mlp, self.embedding = torch.nn.Linear(4, 1), made()

    graph = Graph()
    before = graph.mlp.weight.detach().clone()
    with pytest.raises(NotImplementedError, match=r"got a move to meta; .*to\(device\)$"):
        graph.to("meta")
    assert torch.equal(graph.mlp.weight, before)
    embedding = graph.embedding
    oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), [embedding])
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError):
        graph.to("meta")
    assert torch.equal(graph.mlp.weight, before) and len(embedding.weight.grad.passes) == 1


@pytest.mark.parametrize("name", [5, None, b"name"])
def test_a_snapshot_whose_name_is_no_text_is_refused(made, name):
    embedding = made()
    with pytest.raises(TypeError, match="a snapshot's name must be a str, got"):
        embedding.save_snapshot(name)
    assert embedding.snapshots() == []


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2]], (1,), 3])
@pytest.mark.parametrize("training", [True, False])
def test_ids_that_are_no_tensor_are_refused(made, ids, training):
    embedding = made().train(training)
    for arguments in ({}, {"offsets": torch.tensor([0, 2])}, {"table_ids": torch.tensor(0)}):
        with pytest.raises(TypeError, match="ids must be a tensor of torch.int64 of .*shape.*, got (list|tuple|int)"):
            embedding(ids, **arguments)


def test_the_representation_says_what_it_is(made):
    text = repr(made(tables=3, dtype=torch.bfloat16))
    assert text.startswith("MultiTableEmbedding('items', tables=3, dim=4, dtype=bfloat16, store=DeviceMem, path=/")
    assert text.endswith("rows=0, memory=0.0 MiB, optimizer=none yet)")


def test_stats_tell_rows_steps_and_hits(made):
    embedding = made(store="host", dim=64)
    assert embedding.stats()["hit_rate"] == 0
    optimizer = attach(embedding)
    for _ in range(4):
        embedding(torch.arange(100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = embedding.stats()
    assert (stats["rows"], stats["step"], stats["hit_rate"]) == (100, 4, 0.75)
    assert stats["device"]["hits"] == 300 and stats["device"]["misses"] == 100


@pytest.mark.parametrize("store", STORES)
def test_stats_have_the_keys_and_types_that_editors_see(made, store):
    embedding = made(store=store)
    assert embedding.stats().keys() == {"rows", "replicated_rows", "step", "hit_rate"}, "before the first lookup"
    embedding(torch.arange(4))
    stats = embedding.stats()
    check_typed(stats, EmbeddingStats)
    for tier in stats.keys() & {"device", "host"}:
        check_typed(stats[tier], TierStats)
    check_typed(stats["persistent"], TableStats)


def check_typed(found, kind):
    types = get_type_hints(kind)
    assert kind.__required_keys__ <= found.keys() <= types.keys()
    for key in kind.__required_keys__:
        assert type(found[key]) is types[key], key


def test_lookups_without_gradient_count_ids_that_are_found(made):
    embedding = made()
    with torch.no_grad():
        embedding(torch.tensor([1, 1, 2, 3]))
        embedding(torch.tensor([1, 1, 2, 7]))
    stats = embedding.stats()
    assert (stats["device"]["hits"], stats["device"]["misses"], stats["hit_rate"]) == (3, 4, 3 / 7)


# ---- paths -----------------------------------------------------------------------------------------------------------


def hold(path, pipe):
    embedding = make_embedding(path)
    embedding(torch.tensor([1, 2]))
    embedding.save_snapshot("of-the-holder")
    pipe.send("ready")
    pipe.recv()
    embedding(torch.tensor([3]))
    embedding.save_snapshot("second")
    pipe.send("saved")


def test_a_second_process_on_a_path_is_refused_and_the_first_goes_on(made, tmp_path):
    pipe, theirs = fork_context().Pipe()
    holder = fork_context().Process(target=hold, args=(str(tmp_path / "rows"), theirs))
    holder.start()
    try:
        assert pipe.poll(600) and pipe.recv() == "ready"
        embedding = made()
        for call in (
            lambda: embedding(torch.tensor([1])),
            lambda: attach(embedding),
            lambda: embedding.load_snapshot("of-the-holder"),
        ):
            with pytest.raises(oneemb.StorageError, match=f"process {holder.pid} on host"):
                call()
        assert embedding.row_optimizer is None and embedding.snapshots() == ["of-the-holder"]
        pipe.send("go on")
        assert pipe.poll(600) and pipe.recv() == "saved"
        holder.join(600)
        assert holder.exitcode == 0
        embedding.load_snapshot("second")
        assert embedding.stats()["rows"] == 3
    finally:
        holder.kill()
        holder.join()


def test_a_path_under_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path, said in [
        (tmp_path / "file", f"persistent_path must be a folder, got the file {tmp_path / 'file'};"),
        (tmp_path / "file" / "rows", f"persistent_path {tmp_path / 'file' / 'rows'} cannot be made: Not a directory;"),
    ]:
        with pytest.raises(oneemb.StorageError, match=said):
            make_embedding(path)


def test_a_path_that_is_not_writable_is_refused():
    # A user without rights is needed to see this, and the tests may be run by root.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        child = os.fork()
        if child == 0:
            try:
                if os.getuid() == 0:
                    os.setuid(65534)
                make_embedding(folder)
                os._exit(1)
            except oneemb.StorageError as error:
                os._exit(0 if f"persistent_path {folder} cannot be written to; give a folder" in str(error) else 2)
            except BaseException:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_closed_embedding_says_so(made):
    embedding = made()
    embedding(torch.tensor([1]))
    embedding.close()
    embedding.close()
    with pytest.raises(oneemb.StorageError, match="is closed"):
        embedding(torch.tensor([1]))
    embedding.eval()
    with pytest.raises(oneemb.StorageError, match="is closed"):
        embedding(torch.tensor([1]))


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"seed": 1}, {"seed": 2}, "saved with seed=1, embedding 'items' has seed=2, which now"),
        ({}, {"padding_idx": 0}, "saved with padding_idx=None, embedding 'items' has padding_idx=0, which now"),
        (
            {"initializer": oneemb.make_constant_initializer(0.5), "seed": 3},
            {},
            r"saved with seed=3, ConstantInitializer\(value=0.5\) in table 0 \(and others in 1 more\), embedding"
            r" 'items' has seed=0, NormalInitializer\(mean=0.0, std=0.05\) in it, which now",
        ),
        (
            {"default": oneemb.make_constant_initializer(0.5)},
            {"initializer": oneemb.make_constant_initializer(1.5)},
            r"ConstantInitializer\(value=0.5\) in table 0 .*ConstantInitializer\(value=1.5\) in it",
        ),
        ({"key_type": torch.int64}, {"key_type": torch.int32}, "key_type=int64, .* has key_type=int32"),
    ],
)
def test_a_snapshot_whose_rows_begin_otherwise_is_loaded_with_a_warning_that_says_how(tmp_path, then, now, said):
    def make(initializer=None, default=None, key_type=torch.int64, tables=2, **options):
        return oneemb.MultiTableEmbedding(
            "items", 4, torch.float32, key_type, [oneemb.make_table(initializer)] * tables,
            oneemb.make_device_mem_store_options(tmp_path), default, **options,
        )  # fmt: skip

    first = make(**then)
    first(torch.tensor([[1, 2]]))
    first.save_snapshot("s")
    first.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = make(**then, tables=3)  # One more is no difference.
        same.load_snapshot("s")
        same.close()
    second = make(**now)
    with pytest.warns(UserWarning, match=said) as warned:
        second.load_snapshot("s")
    assert len(warned) == 1 and warned[0].filename == __file__, "the warning names the line that loads"
    assert second.stats()["rows"] == 2
    second.close()


def test_an_initializer_that_is_written_otherwise_is_no_other_one(tmp_path):
    def make(initializer, default):
        return oneemb.MultiTableEmbedding(
            "items", 4, torch.float32, torch.int64, [oneemb.make_table(initializer)],
            oneemb.make_device_mem_store_options(tmp_path), default,
        )  # fmt: skip

    half = oneemb.make_constant_initializer(0.5)
    first = make(None, half)
    first(torch.arange(3))
    first.save_snapshot("s")
    first.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(half, None).load_snapshot("s")


@pytest.mark.parametrize("store", ["device", "host", "ssd"])
def test_an_embedding_that_is_dropped_leaves_no_thread_and_no_lock(tmp_path, store):
    make_store = {
        "device": oneemb.make_device_mem_store_options,
        "host": lambda path: oneemb.make_cached_host_mem_store_options(1, path),
        "ssd": lambda path: oneemb.make_cached_ssd_store_options(1, path),
    }[store]

    def ours():
        return {thread for thread in threading.enumerate() if thread.name.startswith("oneemb")}

    def use():
        embedding = oneemb.MultiTableEmbedding(
            "dropped", 64, torch.float32, torch.int64, [oneemb.make_table()], make_store(str(tmp_path / "rows")),
            num_threads=3,
        )  # fmt: skip
        optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding])
        for step in range(4):
            embedding(torch.arange(2000) + 1000 * step).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        embedding.save_snapshot(str(time.monotonic_ns()))

    gc.collect()
    before = ours()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):  # the second time with the path that the first has left
            use()
            gc.collect()
    deadline = time.monotonic() + 600
    while ours() - before and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that was told to end does so when it runs
    assert ours() - before == set()


def test_a_load_on_another_thread_comes_before_a_lookup_or_after_it(tmp_path):
    embedding = make_embedding(tmp_path / "e", dim=1)
    ids = np.arange(1000)
    for name, order in (("up", ids), ("down", ids[::-1].copy())):
        embedding.clear()
        oneemb.import_rows(embedding, (order, order[:, None].astype(np.float32)))
        embedding.save_snapshot(name)
    embedding.load_snapshot("up")
    find, threads = embedding.store.slots_of, []

    def find_and_let_load(*keys):
        slots = find(*keys)
        threads.append(threading.Thread(target=embedding.load_snapshot, args=("down",)))
        threads[-1].start()
        threads[-1].join(0.3)  # It has to wait for us.
        return slots

    embedding.store.slots_of = find_and_let_load
    embedding.eval()
    with torch.no_grad():
        assert torch.equal(embedding(torch.from_numpy(ids))[:, 0], torch.from_numpy(ids).float())
        threads[0].join()
        embedding.store.slots_of = find
        assert torch.equal(embedding(torch.from_numpy(ids))[:, 0], torch.from_numpy(ids).float())
    embedding.close()


@pytest.mark.parametrize("store", STORES)
def test_clear_makes_every_id_new_again_and_mends(made, store):
    embedding = made(store=store)
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding])
    ids = torch.arange(40)
    begun = embedding(ids).detach().clone()
    embedding(ids).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    embedding.save_snapshot("s")
    embedding.store.store_lock.cut_short(KeyboardInterrupt())
    with pytest.raises(oneemb.StorageError, match=r"its clear\(\) from none"):
        embedding(ids)
    embedding.clear()
    assert embedding.stats()["rows"] == embedding.stats()["step"] == 0 and embedding.snapshots() == ["s"]
    assert torch.equal(embedding(ids), begun)
    embedding.load_snapshot("s")
    assert torch.equal(embedding(ids), begun - 1)
    embedding.close()
    with pytest.raises(oneemb.StorageError, match="is closed; make it again"):
        embedding.clear()


def test_an_interrupt_while_a_dropped_embedding_is_closed_comes_a_moment_later():
    class Table:
        def close(self):
            raise KeyboardInterrupt

    owner = Table()
    close_when_dropped(owner, Table())
    with pytest.raises(KeyboardInterrupt):
        del owner
        for _ in range(60_000):  # It does not end a sleep.
            time.sleep(0.01)


@pytest.mark.parametrize("why", ["damaged", "interrupted"])
def test_a_broken_embedding_stays_so_when_its_next_load_fails(made, monkeypatch, why):
    embedding = made(store="ssd")
    embedding(torch.arange(10))
    embedding.save_snapshot("good")
    embedding.save_snapshot("other")
    embedding.store.store_lock.cut_short(KeyboardInterrupt())
    error = {"damaged": oneemb.StorageError("damaged"), "interrupted": KeyboardInterrupt()}[why]

    def fail(*args):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(PersistentTable, "load_snapshot", fail)
        with pytest.raises(type(error)):
            embedding.load_snapshot("other")
    with pytest.raises(BrokenStoreError):
        embedding(torch.arange(10))
    embedding.load_snapshot("good")
    assert embedding.stats()["rows"] == 10


def test_no_state_dict_names_a_snapshot_that_an_interrupted_call_has_deleted(made):
    def prepare():
        embedding = made(f"rows{len(paths)}")
        paths.append(embedding)
        embedding(torch.arange(3))
        embedding.save_snapshot("s")
        return embedding

    paths = []
    for at in range(1, 6):
        embedding = prepare()
        with (
            suppress(KeyboardInterrupt),
            AtLine(at, files=[oneemb.embeddings.snapshot_calls.__file__], functions=["delete_snapshot"]),
        ):
            embedding.delete_snapshot("s")
        assert named(embedding) in embedding.snapshots(), at
