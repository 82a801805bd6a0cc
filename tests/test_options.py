"""Options: what is accepted, what is refused and with which words, and the trip through JSON."""

import dataclasses
import functools
import inspect
import json
import math
from pathlib import Path

import pytest
import scipy.special
import torch
from hypothesis import given, settings, strategies as st

import oneemb
from oneemb.embeddings.embedding_arguments import state_width_of, store_plan
from oneemb.graph.one_rank import ALONE
from oneemb.options import from_json, to_json
from oneemb.storage import cold_index
from oneemb.storage.rows.initializers import normal_cdf
from oneemb.storage.table.persistent_table import PersistentTable

STORES = {
    "device": lambda **options: oneemb.make_device_mem_store_options("/rows", **options),
    "host": lambda **options: oneemb.make_cached_host_mem_store_options(64, "/rows", **options),
    "ssd": lambda **options: oneemb.make_cached_ssd_store_options(64, "/rows", **options),
    "remote": lambda **options: oneemb.make_cached_remote_store_options("memory://", 64, "/rows", **options),
}


# ---- initializers ---------------------------------------------------------------------------------------------------


def test_initializers_have_oneflows_defaults():
    assert dataclasses.astuple(oneemb.make_uniform_initializer()) == (0.0, 1.0)
    assert dataclasses.astuple(oneemb.make_normal_initializer()) == (0.0, 1.0)
    assert dataclasses.astuple(oneemb.make_trunc_normal_initializer()) == (0.0, 1.0, -2.0, 2.0)


def test_numbers_are_kept_as_floats():
    assert dataclasses.astuple(oneemb.make_uniform_initializer(-1, 2)) == (-1.0, 2.0)
    assert isinstance(oneemb.make_constant_initializer(3).value, float)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: oneemb.make_constant_initializer(math.nan), "value must be a finite number, got nan"),
        (lambda: oneemb.make_constant_initializer("1"), "value must be a finite number, got '1'"),
        (lambda: oneemb.make_constant_initializer(True), "value must be a finite number, got True"),
        (lambda: oneemb.make_uniform_initializer(1, 0), "low must not be above high, got low=1.0, high=0.0"),
        (lambda: oneemb.make_uniform_initializer(0, math.inf), "high must be a finite number"),
        (lambda: oneemb.make_normal_initializer(0, -1), "std must be 0 or more, got -1"),
        (lambda: oneemb.make_trunc_normal_initializer(std=0), "std must be above 0, got 0"),
        (lambda: oneemb.make_trunc_normal_initializer(a=1, b=1), "a must be below b, got a=1.0, b=1.0"),
        (lambda: oneemb.make_trunc_normal_initializer(a=8, b=9), "hardly ever lies between a=8.0 and b=9.0"),
    ],
)
def test_initializers_out_of_range_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_options_cannot_be_changed():
    for options in (oneemb.make_normal_initializer(), oneemb.make_table(), STORES["device"]()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, dataclasses.fields(options)[0].name, 1)


@pytest.mark.parametrize("x", [-40.0, -6.0, -1.0, 0.0, 0.5, 3.0, 9.0])
def test_normal_cdf_agrees_with_scipy(x):
    assert math.isclose(normal_cdf(x), scipy.special.ndtr(x), rel_tol=1e-14)


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_a_table_is_made_of_an_initializer_columns_or_nothing():
    normal, constant = oneemb.make_normal_initializer(), oneemb.make_constant_initializer(1)
    columns = oneemb.make_column_options(normal), oneemb.make_column_options(constant)
    assert oneemb.make_table(normal).columns == columns[:1]
    assert oneemb.make_table(columns[0]) == oneemb.make_table([columns[0]]) == oneemb.make_table(normal)
    assert oneemb.make_table(list(columns)).columns == oneemb.make_table(columns).columns == columns
    assert oneemb.make_table().columns == (oneemb.make_column_options(),)
    assert oneemb.make_table_options is oneemb.make_table


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: oneemb.make_table("normal"),
            "param of make_table must be an initializer or a list of columns, got str 'normal'",
        ),
        (lambda: oneemb.make_table([]), "one or more columns"),
        (lambda: oneemb.make_table([oneemb.make_normal_initializer()]), "made by make_column_options"),
        (lambda: oneemb.make_column_options(0.5), "made by one of oneemb.make_.*_initializer, got 0.5"),
    ],
)
def test_tables_of_something_else_are_refused(make, match):
    with pytest.raises(TypeError, match=match):
        make()


# ---- stores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORES)
def test_a_store_takes_a_path_or_one_for_each_rank(kind, tmp_path):
    def paths(path):
        return dataclasses.replace(STORES[kind](), persistent_path=path).persistent_path

    assert STORES[kind]().persistent_path == ("/rows",)
    make = {
        "device": oneemb.make_device_mem_store_options,
        "host": lambda path: oneemb.make_cached_host_mem_store_options(1, path),
        "ssd": lambda path: oneemb.make_cached_ssd_store_options(1, path),
        "remote": lambda path: oneemb.make_cached_remote_store_options("memory://", 1, path),
    }[kind]
    assert make(tmp_path).persistent_path == make(str(tmp_path)).persistent_path == (str(tmp_path),)
    assert make(["/a", Path("/b")]).persistent_path == ("/a", "/b")
    for wrong in ([], "", [""], 7, ["/a", 7]):
        with pytest.raises(TypeError):
            make(wrong)


@pytest.mark.parametrize("kind", STORES)
def test_a_path_is_absolute_from_the_moment_it_is_given(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")

    def paths(path):
        return dataclasses.replace(STORES[kind](), persistent_path=path).persistent_path

    assert paths(("rows", b"rows", Path("rows"))) == (f"{tmp_path}/rows",) * 3
    assert paths(["~/rows"]) == ("/home/somebody/rows",)
    options = dataclasses.replace(STORES[kind](), persistent_path=("rows",))
    assert oneemb.options.from_json(oneemb.options.to_json(options)) == options


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (dict(capacity=0), ValueError, "capacity must be at least 1, got 0"),
        (dict(capacity=1.5), TypeError, "capacity must be an int, got 1.5"),
        (dict(capacity=True), TypeError, "capacity must be an int, got True"),
        (dict(size_factor=0), ValueError, "size_factor must be at least 1"),
        (dict(storage_dim=-3), ValueError, "storage_dim must be at least 1"),
        (dict(storage_dim=0), ValueError, "storage_dim must be at least 1"),
        (
            dict(size_factor=2, storage_dim=8),
            ValueError,
            "size_factor and storage_dim must not both be given, got 2 and 8",
        ),
        (dict(physical_block_size=1024), ValueError, "physical_block_size must be 512 or 4096 bytes, got 1024"),
    ],
)
def test_store_options_out_of_range_are_refused(kind, options, error, match):
    with pytest.raises(error, match=match):
        STORES[kind](**options)


@pytest.mark.parametrize("path", ["", [], [""], [3]])
def test_a_store_without_a_path_is_refused(path):
    with pytest.raises(TypeError):
        oneemb.make_device_mem_store_options(path)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: oneemb.make_cached_host_mem_store_options(0, "/rows"), ValueError),
        (lambda: oneemb.make_cached_ssd_store_options(0.5, "/rows"), TypeError),
        (lambda: oneemb.make_cached_ssd_store_options(None, "/rows"), TypeError),
    ],
)
def test_a_cache_needs_a_budget(make, error):
    with pytest.raises(error, match="cache_budget_mb must be"):
        make()


def test_a_host_cache_may_be_left_out_and_not_be_negative():
    assert STORES["ssd"]().host_cache_budget_mb == 0
    with pytest.raises(ValueError, match="host_cache_budget_mb must be at least 0, got -1"):
        STORES["ssd"](host_cache_budget_mb=-1)


def test_caches_evict_by_frequency_or_by_age():
    assert STORES["ssd"]().cache_policy == STORES["host"]().cache_policy == "lfu"
    assert STORES["ssd"](cache_policy="lru").cache_policy == "lru"
    for kind in ("host", "ssd"):
        with pytest.raises(ValueError, match='cache_policy must be "lru" or "lfu", got \'full\''):
            STORES[kind](cache_policy="full")


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("kind", ["host", "ssd"])
def test_the_policy_reaches_every_cache(kind, policy, tmp_path):
    more = {"host_cache_budget_mb": 1} if kind == "ssd" else {}
    make = {"host": oneemb.make_cached_host_mem_store_options, "ssd": oneemb.make_cached_ssd_store_options}[kind]
    options = make(1, tmp_path, cache_policy=policy, **more)
    embedding = oneemb.MultiTableEmbedding("x", 4, torch.float32, torch.int64, [oneemb.make_table()], options)
    embedding(torch.arange(3))
    tiers = embedding.store.rows.tiers
    assert len(tiers) == 2 and {tier.policy for tier in tiers if not tier.stable_slots} == {policy}
    embedding.close()


# ---- JSON ------------------------------------------------------------------------------------------------------------

_NUMBERS = st.floats(-1e6, 1e6)
_INITIALIZERS = st.one_of(
    st.builds(oneemb.make_constant_initializer, st.floats(allow_nan=False, allow_infinity=False)),
    st.tuples(_NUMBERS, _NUMBERS).map(lambda pair: oneemb.make_uniform_initializer(*sorted(pair))),
    st.builds(oneemb.make_normal_initializer, _NUMBERS, st.floats(0, 1e6)),
    st.builds(lambda m, s: oneemb.make_trunc_normal_initializer(m, s, m - s, m + 2 * s), _NUMBERS, st.floats(1, 1e6)),
)
_COLUMNS = st.builds(oneemb.make_column_options, st.none() | _INITIALIZERS)
_TABLES = st.builds(oneemb.make_table, st.none() | _INITIALIZERS | st.lists(_COLUMNS, min_size=1, max_size=4))
_SIZES = st.fixed_dictionaries(
    {},
    optional={
        "capacity": st.integers(1, 2**62),
        "size_factor": st.integers(1, 9),
        "physical_block_size": st.sampled_from([512, 4096]),
    },
)
_CACHED = st.builds(lambda sizes, policy: sizes | {"cache_policy": policy}, _SIZES, st.sampled_from(["lru", "lfu"]))
_PATHS = st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3)
_STORES = st.one_of(
    st.builds(lambda path, sizes: oneemb.make_device_mem_store_options(path, **sizes), _PATHS, _SIZES),
    st.builds(
        lambda mb, path, sizes: oneemb.make_cached_host_mem_store_options(mb, path, **sizes),
        st.integers(1, 10**9), _PATHS, _CACHED,
    ),
    st.builds(
        lambda mb, host, path, more: oneemb.make_cached_ssd_store_options(mb, path, host_cache_budget_mb=host, **more),
        st.integers(1, 10**9), st.integers(0, 10**9), _PATHS, _CACHED,
    ),
    st.builds(
        lambda mb, path, sizes: oneemb.make_cached_remote_store_options("memory://rows", mb, path, **sizes),
        st.integers(1, 10**9), _PATHS, _CACHED,
    ),
)  # fmt: skip
_OPTIONS = _INITIALIZERS | _COLUMNS | _TABLES | _STORES | st.lists(_TABLES, max_size=4)


@given(_OPTIONS)
def test_options_are_equal_after_a_trip_through_json(options):
    text = to_json(options)
    assert from_json(text) == options
    assert type(from_json(text)) is type(options)
    assert to_json(from_json(text)) == text


@pytest.mark.slow
@settings(max_examples=5000, derandomize=False)
@given(_OPTIONS)
def test_options_are_equal_after_a_trip_through_json_at_length(options):
    assert from_json(to_json(options)) == options


def test_json_tells_tables_apart():
    one, two = oneemb.make_table(oneemb.make_normal_initializer(std=0.1)), oneemb.make_table()
    assert to_json([one, two]) != to_json([two, one])


def test_json_is_checked_as_the_functions_are():
    with pytest.raises(ValueError, match="low must not be above high"):
        from_json('{"type": "UniformInitializer", "low": 2, "high": 1}')
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        from_json(to_json(STORES["device"](capacity=1)).replace('"capacity": 1', '"capacity": 0'))


@pytest.mark.parametrize(
    "tree",
    [
        {"type": "Unknown"},
        {"value": 1.0},
        {"type": "ConstantInitializer", "value": 1.0, "seed": 3},
        {"type": "ConstantInitializer"},
        {"type": ["ConstantInitializer"]},
        5,
        [1],
        None,
    ],
    ids=["unknown type", "no type", "unknown field", "missing field", "type is a list", "5", "[1]", "null"],
)
def test_text_that_is_not_of_options_is_refused(tree):
    with pytest.raises(ValueError, match="not an option of oneemb"):
        from_json(json.dumps(tree))


def test_text_that_is_not_json_is_refused():
    with pytest.raises(ValueError):
        from_json("{")


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        ({"max_space_amplification": 1}, ValueError, "must be a number above 1, got 1; 2 is the default"),
        ({"max_space_amplification": float("nan")}, ValueError, "must be a number above 1, got nan"),
        ({"max_space_amplification": float("inf")}, ValueError, "must be a number above 1, got inf"),
        ({"max_space_amplification": True}, TypeError, "must be a number above 1, got True"),
        ({"max_space_amplification": "2"}, TypeError, "must be a number above 1, got '2'"),
        ({"expected_rows": -1}, ValueError, "expected_rows must be at least 0, got -1"),
        ({"expected_rows": 1.5}, TypeError, "expected_rows must be an int, got 1.5"),
        ({"index_memory_mb": 0}, ValueError, "index_memory_mb must be at least 1, got 0"),
        ({"index_memory_mb": 1.5}, TypeError, "index_memory_mb must be an int, got 1.5"),
    ],
)
def test_options_of_the_table_on_the_ssd_are_checked(wrong, error, words):
    with pytest.raises(error, match=words):
        STORES["ssd"](**wrong)


def test_the_disk_stays_within_the_factor_that_was_asked_for(tmp_path, monkeypatch):
    """Rows that are trained in random order, with a cache that holds few: a smaller factor takes less disk."""
    in_calls = functools.partial(PersistentTable.open, background=False)  # so that no size depends on a thread
    monkeypatch.setattr(PersistentTable, "open", in_calls)
    used = {}
    for factor in (1.2, 3.0):
        folder = tmp_path / str(factor)
        options = oneemb.make_cached_ssd_store_options(1, folder, max_space_amplification=factor, expected_rows=100)
        embedding = oneemb.MultiTableEmbedding("e", 64, torch.float32, torch.int64, [oneemb.make_table()], options)
        optimizer = oneemb.Optimizer(torch.optim.SGD([embedding.weight], lr=1.0), [embedding])
        sizes = []
        draw = torch.Generator().manual_seed(0)  # In a fixed order chunks would lose all their rows, and go whole.
        for ids in torch.randint(20_000, (60, 2000), generator=draw):
            embedding(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(sum(file.stat().st_size for file in (folder / "chunks").iterdir()))
        used[factor] = max(sizes[len(sizes) // 2 :])
        embedding.clear()
        embedding.close()
    assert used[1.2] < used[3.0] / 2, used


def test_the_index_of_the_table_on_the_ssd_stays_within_its_memory(tmp_path, monkeypatch):
    """With less memory than the index needs, a part of it is on the disk, and each row is the same."""
    monkeypatch.setattr(cold_index, "_READ_BLOCKS", 64)
    rows = {}
    for limit in (None, 1):
        folder = tmp_path / str(limit)
        options = oneemb.make_cached_ssd_store_options(1, folder, index_memory_mb=limit)
        embedding = oneemb.MultiTableEmbedding("e", 4, torch.float32, torch.int64, [oneemb.make_table()], options)
        optimizer = oneemb.Optimizer(torch.optim.SGD([embedding.weight], lr=1.0), [embedding])
        for ids in torch.randperm(200_000, generator=torch.Generator().manual_seed(0)).split(10_000):
            (embedding(ids) * ids[:, None]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            rows[limit] = torch.cat([embedding(ids) for ids in torch.arange(200_000).split(10_000)])
        assert (folder / "index.cold").exists() == (limit is not None)
        embedding.clear()
        embedding.close()
        assert not (folder / "index.cold").exists()
    assert torch.equal(rows[None], rows[1])


def test_minus_one_is_no_storage_dim(tmp_path):
    """As in OneEmbedding, whose default it is: the optimizer says how wide a row is."""
    given = oneemb.make_device_mem_store_options(str(tmp_path), size_factor=2, storage_dim=-1)
    assert given == oneemb.make_device_mem_store_options(str(tmp_path), size_factor=2)
    assert given.storage_dim is None


# ---- OneFlow's arguments --------------------------------------------------------------------------------------------

OTHER = {
    "cache_budget_mb": 32, "persistent_path": ("/other",), "capacity": 10, "size_factor": 3, "storage_dim": 40,
    "physical_block_size": 512, "host_cache_budget_mb": 16, "cache_policy": "lru", "url": "memory://other",
    "max_space_amplification": 1.3, "expected_rows": 1000, "index_memory_mb": 100,
}  # fmt: skip
OF_ONEFLOW = {
    "device": ["persistent_path", "capacity", "size_factor", "storage_dim", "physical_block_size"],
    "host": [
        "cache_budget_mb", "persistent_path", "capacity", "size_factor", "storage_dim", "physical_block_size",
    ],
    "ssd": [
        "cache_budget_mb", "persistent_path", "capacity", "size_factor", "storage_dim", "physical_block_size",
        "host_cache_budget_mb",
    ],
}  # fmt: skip
"""OneFlow's arguments, in its order."""
MAKERS = {
    "device": oneemb.make_device_mem_store_options, "host": oneemb.make_cached_host_mem_store_options,
    "ssd": oneemb.make_cached_ssd_store_options, "remote": oneemb.make_cached_remote_store_options,
}  # fmt: skip


@pytest.mark.parametrize("kind", MAKERS)
def test_every_argument_of_a_store_is_followed(kind):
    """It changes what the store is built of, or the room that rows have for an optimizer's state."""
    taken = list(inspect.signature(MAKERS[kind]).parameters)
    assert taken[: len(OF_ONEFLOW.get(kind, ()))] == OF_ONEFLOW.get(kind, [])
    assert set(taken) <= set(OTHER)
    assert {field.name for field in dataclasses.fields(STORES[kind]())} == set(taken)

    def built(options):
        return store_plan("e", options, [oneemb.make_table()], ALONE), state_width_of(options, 8, "sgd", 0)

    for name in taken:
        assert built(dataclasses.replace(STORES[kind](), **{name: OTHER[name]})) != built(STORES[kind]()), name
