"""Options of tables and stores: immutable, checked when they are made, and equal after a round trip through JSON.

    tables = [make_table(make_normal_initializer(std=0.01)) for _ in range(26)]
    store = make_cached_ssd_store_options(cache_budget_mb=4096, persistent_path="/nvme/items")

Names and arguments are those of OneFlow's one_embedding. `size_factor` and `storage_dim` exist for OneFlow's scripts;
leave them out, since row width follows from the optimizer.
"""

import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, cast

from oneemb.storage.fs import AnyPath, absolute_path
from oneemb.storage.remote.servers import check_url
from oneemb.storage.rows.initializers import (
    ConstantInitializer,
    IdInitializer,
    Initializer,
    NormalInitializer,
    TruncNormalInitializer,
    UniformInitializer,
)

__all__ = [
    "CachePolicy", "CachedHostMemStoreOptions", "CachedRemoteStoreOptions", "CachedSsdStoreOptions", "ColumnOptions",
    "ConstantInitializer", "DeviceMemStoreOptions", "IdInitializer", "Initializer", "NormalInitializer", "Options",
    "StoreOptions", "TableOptions", "TruncNormalInitializer", "UniformInitializer", "from_json",
    "make_cached_host_mem_store_options", "make_cached_remote_store_options", "make_cached_ssd_store_options",
    "make_column_options", "make_constant_initializer", "make_device_mem_store_options", "make_normal_initializer",
    "make_table", "make_table_options", "make_trunc_normal_initializer", "make_uniform_initializer", "to_json",
]  # fmt: skip


# ---- initializers ---------------------------------------------------------------------------------------------------


def make_constant_initializer(value: float) -> ConstantInitializer:
    """Initializer that sets all weights to one value."""
    return ConstantInitializer(value)


def make_uniform_initializer(low: float = 0.0, high: float = 1.0) -> UniformInitializer:
    """Initializer with uniform weights between `low` and `high`; ValueError if low is above high, or one is not
    finite."""
    return UniformInitializer(low, high)


def make_normal_initializer(mean: float = 0.0, std: float = 1.0) -> NormalInitializer:
    """Initializer with normal weights; ValueError if std is negative, or an argument is not finite."""
    return NormalInitializer(mean, std)


def make_trunc_normal_initializer(
    mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> TruncNormalInitializer:
    """Initializer with normal weights, none below `a` or above `b`. As in `torch.nn.init.trunc_normal_`, `a` and `b`
    are limits of the weights themselves, not multiples of `std`.

    Raises:
        ValueError: std is not above 0, a is not below b, the interval has almost no probability, or an argument is not
            finite.
    """
    return TruncNormalInitializer(mean, std, a, b)


def make_id_initializer(modulus: int = 100_000) -> IdInitializer:
    """Deprecated name of `IdInitializer(modulus)`."""
    warnings.warn(
        "make_id_initializer is for tests and dynamicemb's DEBUG mode; use oneemb.options.IdInitializer",
        DeprecationWarning,
        stacklevel=2,
    )
    return IdInitializer(modulus)


# ---- tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnOptions:
    """Options of one column of a row: the initializer of its weights; None = the embedding's default initializer."""

    initializer: Initializer | None = None

    def __post_init__(self) -> None:
        if self.initializer is not None and not isinstance(self.initializer, Initializer):
            raise TypeError(f"initializer must be made by one of oneemb.make_*_initializer, got {self.initializer!r}")


@dataclass(frozen=True)
class TableOptions:
    """Options of one logical table: its columns (a single one except in a MultiTableMultiColumnEmbedding), and whether
    the table is replicated, so that every rank stores all of its rows."""

    columns: tuple[ColumnOptions, ...]
    replicate: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.replicate, bool):
            raise TypeError(f"replicate must be True or False, got {self.replicate!r}")
        if not self.columns or not all(isinstance(column, ColumnOptions) for column in self.columns):
            raise TypeError(
                "a table (param of make_table) must have one or more columns made by make_column_options, got"
                f" {self.columns!r}"
            )


def make_column_options(initializer: Initializer | None = None) -> ColumnOptions:
    """Options of one column of a table; TypeError if `initializer` was not made by one of `make_*_initializer`."""
    return ColumnOptions(initializer)


def make_table_options(
    param: Initializer | Sequence[ColumnOptions] | ColumnOptions | None = None, *, replicate: bool = False
) -> TableOptions:
    """Options of one logical table.

    Args:
        param: initializer of all weights; or a column, or a sequence of columns for `MultiTableMultiColumnEmbedding`;
            None = the embedding's default initializer.
        replicate: True = every rank stores all rows of the table, for small tables; needs `process_group`, else it has
            no effect. Lookups in the table move no rows between ranks; if all tables of an embedding are replicated,
            ranks do not wait for one another in lookups, and errors stay on the rank where they occur. Gradients go to
            every rank, and all copies of a row have equal bits. Replicated rows of an embedding, with optimizer state,
            may take 1 GiB on a rank; more are a StoreFullError. Snapshots hold each row once, and load into replicated
            and other tables.

    Raises:
        TypeError: `param` is none of these, or `replicate` is not a bool.
    """
    if param is None or isinstance(param, Initializer):
        return TableOptions((ColumnOptions(param),), replicate)
    if isinstance(param, ColumnOptions):
        return TableOptions((param,), replicate)
    if isinstance(param, list | tuple):
        return TableOptions(tuple(param), replicate)
    raise TypeError(
        f"param of make_table must be an initializer or a list of columns, got {type(param).__name__} {param!r}"
    )


make_table = make_table_options


# ---- stores ---------------------------------------------------------------------------------------------------------

CachePolicy = Literal["lfu", "lru"]


@dataclass(frozen=True)
class _Cached:
    cache_budget_mb: int


@dataclass(frozen=True)
class _Remote:
    url: str = field(repr=False)  # It may contain a password, which repr hides; JSON contains it.


@dataclass(frozen=True)
class StoreOptions:
    """Base of the options of all stores: where rows live. Fields come in the order of the arguments of
    `make_*_store_options`."""

    persistent_path: tuple[str, ...] = ()
    """One folder, or one for each rank; empty = a temporary folder."""
    capacity: int | None = None
    size_factor: int | None = None
    storage_dim: int | None = None
    physical_block_size: int = 4096

    def __post_init__(self) -> None:
        _check_store(self)


class DeviceMemStoreOptions(StoreOptions):
    """All rows in device memory; the path holds snapshots. Made by `make_device_mem_store_options`."""


@dataclass(frozen=True)
class CachedHostMemStoreOptions(StoreOptions, _Cached):
    """A device cache over rows in host memory; the path holds snapshots. Made by
    `make_cached_host_mem_store_options`."""

    cache_policy: CachePolicy = "lfu"


@dataclass(frozen=True)
class CachedSsdStoreOptions(StoreOptions, _Cached):
    """A device cache, and a host cache if it has a budget, over a persistent table. Made by
    `make_cached_ssd_store_options`."""

    host_cache_budget_mb: int = 0
    cache_policy: CachePolicy = "lfu"
    max_space_amplification: float = 2.0
    expected_rows: int = 0
    index_memory_mb: int | None = None


@dataclass(frozen=True)
class CachedRemoteStoreOptions(StoreOptions, _Cached, _Remote):
    """A device cache over rows on a parameter server; the path holds snapshots. Made by
    `make_cached_remote_store_options`."""

    cache_policy: CachePolicy = "lfu"


Options = Initializer | ColumnOptions | TableOptions | StoreOptions
_Paths = AnyPath | Sequence[AnyPath] | None


def make_device_mem_store_options(
    persistent_path: _Paths = None,
    capacity: int | None = None,
    size_factor: int | None = None,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
) -> DeviceMemStoreOptions:
    """Options of a store that keeps every row in device memory (main memory on a CPU).

    Args:
        persistent_path: folder for snapshots, made if it does not exist; or a list with a folder for each rank. None =
            a temporary folder, for trials and tests, which is removed when the embedding is closed or collected, or
            when the process ends.
        capacity: largest number of rows of all tables together; None = limited by memory. Memory is allocated as rows
            are added. The rows of all embeddings of a process may take nine tenths of the memory that the machine,
            control groups and `ulimit` allow it. A capacity reserves memory for that many rows before the first row is
            added, if so much is free.
        size_factor: for OneFlow's scripts: values of a row as a multiple of its weights. None = what the optimizer
            needs. If it is too small, attaching the optimizer raises an error that says what is needed.
        storage_dim: for OneFlow's scripts: values of a row, in place of size_factor. None or -1 = what the optimizer
            needs.
        physical_block_size: bytes of the disk's block, 512 or 4096.

    Raises:
        ValueError, TypeError: an argument is out of its range, or both size_factor and storage_dim are given.
    """
    return DeviceMemStoreOptions(_paths(persistent_path), capacity, size_factor, storage_dim, physical_block_size)


def make_cached_host_mem_store_options(
    cache_budget_mb: int,
    persistent_path: _Paths = None,
    capacity: int | None = None,
    size_factor: int | None = None,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    cache_policy: CachePolicy = "lfu",
) -> CachedHostMemStoreOptions:
    """Options of a store that keeps every row in host memory, with a cache of rows on the device.

    Args:
        cache_budget_mb: MiB of device memory for the cache, its index included. The rows of one step must fit.
        cache_policy: which rows the cache evicts. "lru" = those whose last use is oldest. "lfu" = those used least
            often; a use loses half of its weight whenever eight times as many rows have been used as the cache holds.
            "lfu" reads less from the store below, unless the popular ids change every few hundred steps. No result
            depends on it.

    The other arguments and errors are those of `make_device_mem_store_options`.
    """
    return CachedHostMemStoreOptions(
        cache_budget_mb, _paths(persistent_path), capacity, size_factor, storage_dim, physical_block_size,
        cache_policy,
    )  # fmt: skip


def make_cached_ssd_store_options(
    cache_budget_mb: int,
    persistent_path: _Paths = None,
    capacity: int | None = None,
    size_factor: int | None = None,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    host_cache_budget_mb: int = 0,
    cache_policy: CachePolicy = "lfu",
    max_space_amplification: float = 2.0,
    expected_rows: int = 0,
    index_memory_mb: int | None = None,
) -> CachedSsdStoreOptions:
    """Options of a store that keeps rows on an SSD, with a cache on the device and, if wanted, a second one in host
    memory.

    Args:
        cache_budget_mb: MiB of device memory for the cache, its index included. The rows of one step must fit.
        persistent_path: folder of the persistent table, on the SSD. None = a temporary folder, as in
            `make_device_mem_store_options`; `tempfile.gettempdir()` must then have room for all rows.
        host_cache_budget_mb: MiB of host memory for the second cache; 0 = no second cache.
        cache_policy: policy of both caches, same as for `make_cached_host_mem_store_options`.
        max_space_amplification: factor above 1. Without snapshots, the disk holds at most this factor times the bytes
            of the rows, and two chunks more. A smaller factor takes less disk and moves rows more often.
        expected_rows: number of rows for which the table's index has room from the beginning, 13 bytes each; a table
            may hold more rows.
        index_memory_mb: MiB of memory for the table's index; None = no limit, 12 to 16 bytes a row. Beyond the limit
            the index lies on the SSD as well, with about 2 bytes a row in memory, and a row takes a second read.

    The other arguments and errors are those of `make_device_mem_store_options`.
    """
    return CachedSsdStoreOptions(
        cache_budget_mb, _paths(persistent_path), capacity, size_factor, storage_dim, physical_block_size,
        host_cache_budget_mb, cache_policy, max_space_amplification, expected_rows, index_memory_mb,
    )  # fmt: skip


def make_cached_remote_store_options(
    url: str,
    cache_budget_mb: int,
    persistent_path: _Paths = None,
    capacity: int | None = None,
    size_factor: int | None = None,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    cache_policy: CachePolicy = "lfu",
) -> CachedRemoteStoreOptions:
    """Options of a store that keeps every row on a parameter server, such as Redis, with a cache of rows on the device.

    Rows are durable in snapshots, not on the server: `persistent_path` holds complete snapshots, as with any other
    store. If the server has lost a row or returns a wrong one, a `LostRowsError` is raised, and loading a snapshot
    restores all rows. An embedding starts without rows, whatever an earlier job has left on the server. Each row takes
    24 bytes of local memory.

    Args:
        url: URL of the server: `redis://host:6379/?prefix=job`, `file:///folder`, or of a plugin; docs/remote.md lists
            all kinds. Jobs that share a server must have different prefixes.
        persistent_path: folder for snapshots, made if it does not exist; or a list with a folder for each rank.

    The other arguments and errors are those of `make_cached_host_mem_store_options`.

    Raises:
        ValueError: no kind of server has the URL's scheme.
    """
    return CachedRemoteStoreOptions(
        url, cache_budget_mb, _paths(persistent_path), capacity, size_factor, storage_dim, physical_block_size,
        cache_policy,
    )  # fmt: skip


# ---- JSON -----------------------------------------------------------------------------------------------------------

_TYPES = {
    kind.__name__: kind
    for kind in (
        ConstantInitializer, UniformInitializer, NormalInitializer, TruncNormalInitializer, IdInitializer,
        ColumnOptions, TableOptions, DeviceMemStoreOptions, CachedHostMemStoreOptions, CachedSsdStoreOptions,
        CachedRemoteStoreOptions,
    )
}  # fmt: skip
_FIELDS: dict[type, tuple[str, ...]] = {kind: tuple(field.name for field in fields(kind)) for kind in _TYPES.values()}
# Fields that text of earlier releases lacks. With its default such a field is left out, so that text stays the same.
_LATER = ("replicate", "max_space_amplification", "expected_rows", "index_memory_mb")
_PLAIN = (int, float, str, bool, type(None))


def to_json(options: Options | Sequence[Options]) -> str:
    """The options, or a list of them, as JSON text that `from_json` reads.

    >>> to_json(make_constant_initializer(0.5))
    '{"type": "ConstantInitializer", "value": 0.5}'
    """
    return json.dumps(to_tree(options))


def to_tree(value: object) -> Any:
    """Options as dicts, lists and plain values; `to_json` writes them as text."""
    names = _FIELDS.get(type(value))
    if names is None:
        return [to_tree(item) for item in value] if isinstance(value, list | tuple) else value
    tree = {"type": type(value).__name__}
    for name in names:
        field = getattr(value, name)
        tree[name] = field if type(field) in _PLAIN else to_tree(field)
    for name in _LATER:
        if name in tree and tree[name] == getattr(type(value), name):
            del tree[name]
    return tree


def from_json(text: str) -> Options | list[Options]:
    """Options equal to those that `to_json` wrote; ValueError if `text` is not from `to_json`."""
    found = _from_tree(json.loads(text))
    if not all(isinstance(option, Options) for option in (found if isinstance(found, list) else [found])):
        raise ValueError(f"not an option of oneemb: {text}")
    return cast(Options | list[Options], found)


def _from_tree(tree: object) -> object:
    if isinstance(tree, dict):
        kind = _TYPES.get(str(tree.get("type")))
        is_required = {field.name: field.default is MISSING for field in fields(kind)} if kind else {}
        names = tree.keys() - {"type"}
        required = {name for name in is_required if is_required[name]}
        if kind is None or not required <= names <= is_required.keys():
            raise ValueError(f"not an option of oneemb: {json.dumps(tree)}")
        # Each class checks its arguments itself.
        found = {name: _from_tree(tree[name]) for name in names}
        arguments: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        return kind(**arguments)
    return [_from_tree(item) for item in tree] if isinstance(tree, list) else tree


# ---- checks ---------------------------------------------------------------------------------------------------------


def _paths(paths: _Paths) -> tuple[str, ...]:
    """The paths as a tuple, empty for a temporary folder; `_check_store` checks them and makes them strings."""
    if paths is None:
        return ()
    if isinstance(paths, list | tuple) and not paths:
        raise TypeError(f"persistent_path must name a folder, or one for each rank, got {paths!r}")
    return cast(tuple[str, ...], tuple(paths) if isinstance(paths, list | tuple) else (paths,))


def _check_store(options: StoreOptions) -> None:
    if isinstance(options, CachedRemoteStoreOptions):
        if not isinstance(options.url, str):
            raise TypeError(f"url must be a str, such as redis://host:6379, got {type(options.url).__name__}")
        check_url(options.url)
    if type(options.storage_dim) is int and options.storage_dim == -1:  # OneFlow's value for "derive it"
        object.__setattr__(options, "storage_dim", None)
    paths = options.persistent_path
    is_list = isinstance(paths, list | tuple)
    if not is_list or not all(isinstance(path, str | bytes | os.PathLike) and os.fspath(path) for path in paths):
        got = repr(paths[0] if is_list and len(paths) == 1 else paths)
        raise TypeError(f"persistent_path must name a folder, or one for each rank, got {got}")
    # Resolve relative paths now, since the job may change its current directory later.
    object.__setattr__(options, "persistent_path", tuple(map(absolute_path, paths)))
    for name in ("capacity", "size_factor", "storage_dim"):
        value = getattr(options, name)
        if value is not None:
            _check_int(name, value, 1)
    if options.size_factor is not None and options.storage_dim is not None:
        raise ValueError(
            f"size_factor and storage_dim must not both be given, got {options.size_factor} and {options.storage_dim};"
            " leave both out, and the optimizer says what a row needs"
        )
    if options.physical_block_size not in (512, 4096):
        raise ValueError(f"physical_block_size must be 512 or 4096 bytes, got {options.physical_block_size}")
    if isinstance(options, CachedHostMemStoreOptions | CachedSsdStoreOptions | CachedRemoteStoreOptions):
        _check_int("cache_budget_mb", options.cache_budget_mb, 1)
        if options.cache_policy not in ("lru", "lfu"):
            raise ValueError(f'cache_policy must be "lru" or "lfu", got {options.cache_policy!r}')
    if isinstance(options, CachedSsdStoreOptions):
        _check_int("host_cache_budget_mb", options.host_cache_budget_mb, 0)
        _check_int("expected_rows", options.expected_rows, 0)
        if options.index_memory_mb is not None:
            _check_int("index_memory_mb", options.index_memory_mb, 1)
        factor = options.max_space_amplification
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise TypeError(f"max_space_amplification must be a number above 1, got {factor!r}")
        if not 1 < factor < math.inf:
            raise ValueError(f"max_space_amplification must be a number above 1, got {factor}; 2 is the default")


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
