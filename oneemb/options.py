"""Options of tables and stores: immutable, checked when they are made, and equal when they come back from JSON.

    tables = [make_table(make_normal_initializer(std=0.01)) for _ in range(26)]
    store = make_cached_ssd_store_options(cache_budget_mb=4096, persistent_path="/nvme/items")

Names and arguments are those of OneFlow's one_embedding. `size_factor` and `storage_dim` are accepted for OneFlow's
scripts: leave them out, since the optimizer says how much state a row needs.
"""

import json
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
    """Initial weights of one value."""
    return ConstantInitializer(value)


def make_uniform_initializer(low: float = 0.0, high: float = 1.0) -> UniformInitializer:
    """Uniform initial weights between `low` and `high`; ValueError if low is above high, or one is not finite."""
    return UniformInitializer(low, high)


def make_normal_initializer(mean: float = 0.0, std: float = 1.0) -> NormalInitializer:
    """Normal initial weights; ValueError if std is negative, or an argument is not finite."""
    return NormalInitializer(mean, std)


def make_trunc_normal_initializer(
    mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> TruncNormalInitializer:
    """Normal initial weights, cut off below `a` and above `b` (values, as in `torch.nn.init.trunc_normal_`).

    Raises:
        ValueError: std is not above 0, a is not below b, hardly anything lies between them, or one is not finite.
    """
    return TruncNormalInitializer(mean, std, a, b)


def make_id_initializer(modulus: int = 100_000) -> IdInitializer:
    """`IdInitializer(modulus)`, which takes this function's place."""
    warnings.warn(
        "make_id_initializer is for tests and dynamicemb's DEBUG mode; use oneemb.options.IdInitializer",
        DeprecationWarning,
        stacklevel=2,
    )
    return IdInitializer(modulus)


# ---- tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnOptions:
    """One column of a row, and the initializer of its weights; None = the embedding's default initializer."""

    initializer: Initializer | None = None

    def __post_init__(self) -> None:
        if self.initializer is not None and not isinstance(self.initializer, Initializer):
            raise TypeError(f"initializer must be made by one of oneemb.make_*_initializer, got {self.initializer!r}")


@dataclass(frozen=True)
class TableOptions:
    """One logical table: its columns, a single one except for MultiTableMultiColumnEmbedding; and whether it is
    replicated, so that every rank has all of its rows."""

    columns: tuple[ColumnOptions, ...]
    replicate: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.replicate, bool):
            raise TypeError(f"replicate must be True or False, got {self.replicate!r}")
        if not self.columns or not all(isinstance(column, ColumnOptions) for column in self.columns):
            raise TypeError(
                "a table (param of make_table) needs one or more columns made by make_column_options, got"
                f" {self.columns!r}"
            )


def make_column_options(initializer: Initializer | None = None) -> ColumnOptions:
    """One column of a table; TypeError if the initializer was not made by one of `make_*_initializer`."""
    return ColumnOptions(initializer)


def make_table_options(
    param: Initializer | Sequence[ColumnOptions] | ColumnOptions | None = None, *, replicate: bool = False
) -> TableOptions:
    """One logical table.

    Args:
        param: the initializer of all weights; or a column, or a sequence of columns for
            `MultiTableMultiColumnEmbedding`; None = the embedding's default initializer.
        replicate: with `process_group`, let every rank have all rows of the table, rather than each row one rank: for
            small tables. Lookups of it move no rows between ranks, and where all tables of an embedding are replicated
            each rank makes them by itself, errors and all. Gradients go to every rank, and the copies of a row stay
            equal, bit for bit. Such rows of an embedding may take 1 GiB a rank, weights and optimizer state; those
            beyond are a StoreFullError. Snapshots hold each row once, and load into a table with `replicate` or
            without. Without `process_group` it means nothing.

    Raises:
        TypeError: param is none of these, or replicate is not a bool.
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
    url: str = field(repr=False)  # It may have a password; JSON has it too.


@dataclass(frozen=True)
class StoreOptions:
    """Place of rows: the base of the options of each store. Fields come in the order of the arguments of
    `make_*_store_options`."""

    persistent_path: tuple[str, ...] = ()
    """Folders, one or one for each rank; empty = a temporary one."""
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
        persistent_path: folder for snapshots, made if it does not exist; or a list of folders, one for each rank. None
            = a temporary folder, for trials and tests: it is removed when the embedding is closed or dropped, or when
            the process ends.
        capacity: rows of all tables together at most; None = as many as the memory holds. Memory is taken as rows
            come, not at once. Rows in memory of all embeddings of a process share nine tenths of what it may use (of
            the machine, its control groups and `ulimit`); with a capacity, memory for so many rows is reserved for
            this embedding before its first row comes, if so much is free.
        size_factor: for OneFlow's scripts; values of a row as a multiple of its weights. None = what the optimizer
            needs. If it is too small for the optimizer, attaching the optimizer is an error that says how much is
            needed.
        storage_dim: for OneFlow's scripts; values of a row, an alternative to size_factor. None or -1 = what the
            optimizer needs.
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
    """Options of a store that keeps every row in host memory, and the rows in use in a device cache.

    Args:
        cache_budget_mb: MiB of device memory for the cache, its index included. The rows of one step must fit.
        cache_policy: which rows are evicted from the cache: "lfu" = those used least often, where the weight of a use
            halves each time eight times as many rows have been used as the cache holds; "lru" = those not used for
            longest. No value depends on it. "lfu" reads less from the store below unless the popular ids change every
            few hundred steps.

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
) -> CachedSsdStoreOptions:
    """Options of a store that keeps rows on an SSD, and the rows in use in a device cache and perhaps a host cache.

    Args:
        cache_budget_mb: MiB of device memory for the cache, its index included. The rows of one step must fit.
        persistent_path: folder of the persistent table, on the SSD. None = a temporary folder, as in
            `make_device_mem_store_options`, which `tempfile.gettempdir()` is to have room for.
        host_cache_budget_mb: MiB of host memory for a second cache; 0 = none.
        cache_policy: of both caches, as in `make_cached_host_mem_store_options`.

    The other arguments and errors are those of `make_device_mem_store_options`.
    """
    return CachedSsdStoreOptions(
        cache_budget_mb, _paths(persistent_path), capacity, size_factor, storage_dim, physical_block_size,
        host_cache_budget_mb, cache_policy,
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
    """Options of a store that keeps every row on a parameter server, such as Redis, and the rows in use in a device
    cache.

    The server is not what makes rows last: snapshots are, whole ones in `persistent_path`, as those of any other store.
    A row that the server has lost or mixed up is a `LostRowsError`, never a wrong number; loading a snapshot brings all
    rows back. An embedding begins without rows, whatever the server has of an earlier job. Each row takes 24 bytes of
    memory here.

    Args:
        url: of the server: `redis://host:6379/?prefix=job`, `file:///folder`, or of a plugin; docs/remote.md has them
            all. Jobs that share a server need a prefix each.
        persistent_path: folder for snapshots, made if it does not exist; or a list of folders, one for each rank.

    The other arguments and errors are those of `make_cached_host_mem_store_options`.

    Raises:
        ValueError: the URL names no kind of server that there is.
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
_PLAIN = (int, float, str, bool, type(None))


def to_json(options: Options | Sequence[Options]) -> str:
    """The options, or a list of them, as JSON text that `from_json` reads.

    >>> to_json(make_constant_initializer(0.5))
    '{"type": "ConstantInitializer", "value": 0.5}'
    """
    return json.dumps(to_tree(options))


def to_tree(value: object) -> Any:
    """Options as dicts, lists and plain values, of which `to_json` is the text."""
    names = _FIELDS.get(type(value))
    if names is None:
        return [to_tree(item) for item in value] if isinstance(value, list | tuple) else value
    tree = {"type": type(value).__name__}
    for name in names:
        field = getattr(value, name)
        tree[name] = field if type(field) in _PLAIN else to_tree(field)
    if tree.get("replicate") is False:  # The text of other tables stays that of earlier releases.
        del tree["replicate"]
    return tree


def from_json(text: str) -> Options | list[Options]:
    """Options equal to those that `to_json` wrote; ValueError if the text is no such text."""
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
        arguments: Any = {name: tuple(its) if isinstance(its, list) else its for name, its in found.items()}
        return kind(**arguments)
    return [_from_tree(item) for item in tree] if isinstance(tree, list) else tree


# ---- checks ---------------------------------------------------------------------------------------------------------


def _paths(paths: _Paths) -> tuple[str, ...]:
    """The paths as a tuple, empty for a temporary folder; `_check_store` looks at what they are, and makes them
    strings."""
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
        raise TypeError(f"persistent_path must name a folder, or one for each rank, got {paths!r}")
    # Relative paths are of the current directory, which the job may change later.
    object.__setattr__(options, "persistent_path", tuple(map(absolute_path, paths)))
    for name in ("capacity", "size_factor", "storage_dim"):
        value = getattr(options, name)
        if value is not None:
            _check_int(name, value, 1)
    if options.size_factor is not None and options.storage_dim is not None:
        raise ValueError(
            f"give size_factor or storage_dim, not both, got {options.size_factor} and {options.storage_dim};"
            " with neither, the optimizer says what a row needs"
        )
    if options.physical_block_size not in (512, 4096):
        raise ValueError(f"physical_block_size must be 512 or 4096 bytes, got {options.physical_block_size}")
    if isinstance(options, CachedHostMemStoreOptions | CachedSsdStoreOptions | CachedRemoteStoreOptions):
        _check_int("cache_budget_mb", options.cache_budget_mb, 1)
        if options.cache_policy not in ("lru", "lfu"):
            raise ValueError(f'cache_policy must be "lru" or "lfu", got {options.cache_policy!r}')
    if isinstance(options, CachedSsdStoreOptions):
        _check_int("host_cache_budget_mb", options.host_cache_budget_mb, 0)


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
