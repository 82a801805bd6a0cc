"""Arguments of an embedding: checks, and conversions to arguments of storage and kernels."""

import functools
import hashlib
import os
import shutil
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import numpy as np
import torch

from oneemb.graph.ops.lookup import DTYPES
from oneemb.graph.ranks import AnyRanks
from oneemb.kernels import init_rows
from oneemb.kernels.hash_index import TABLE_MAX
from oneemb.options import (
    CachedHostMemStoreOptions,
    CachedRemoteStoreOptions,
    CachedSsdStoreOptions,
    DeviceMemStoreOptions,
    Initializer,
    NormalInitializer,
    StoreOptions,
    TableOptions,
    make_table_options,
)
from oneemb.storage.policies.row_policy import RowPolicy
from oneemb.storage.remote.servers import check_installed
from oneemb.storage.rows.initializers import encoded, largest_weight
from oneemb.storage.snapshots.snapshot_parts import rank_folder_name
from oneemb.storage.tiers.stack import RemotePlan, StorePlan

DEFAULT_INITIALIZER = NormalInitializer(0.0, 0.05)
"""Initializer of rows if neither the table nor the embedding names one."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""{dtype of rows: its name in storage}."""


def check_arguments(
    name: str,
    dim_C: Sequence[int],
    dtype: torch.dtype,
    key_type: torch.dtype,
    tables: Sequence[TableOptions],
    store_options: StoreOptions,
    default_initializer: Initializer | None,
    padding_idx: int | None,
    seed: int,
    ranks: int,
) -> None:
    """Raise TypeError or ValueError unless the arguments are as documented in `MultiTableEmbedding`.

    Args:
        dim_C: width of each column.
        ranks: number of ranks.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a str of at least one letter, got {name!r}")
    for dim in dim_C:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"embedding_dim must be an int of 1 or more, got {_with_type(dim)}; give the width of rows")
        if dim < 1:
            raise ValueError(f"embedding_dim must be 1 or more, got {dim}; give the width of rows")
    if not dim_C:
        raise ValueError("embedding_dim must be a list of one or more column widths, got an empty one")
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
        raise TypeError(
            f"dtype must be torch.float32, float16 or bfloat16, got {_with_type(dtype)}; give the dtype of weights"
        )
    if not isinstance(key_type, torch.dtype) or key_type not in (torch.int64, torch.int32):
        raise TypeError(
            f"key_type must be torch.int64 or torch.int32, got {_with_type(key_type)}; give the dtype of ids"
        )
    if not isinstance(tables, list | tuple) or not tables or not all(isinstance(t, TableOptions) for t in tables):
        swapped = "; store_options come after tables" if isinstance(tables, StoreOptions) else ""
        raise TypeError(
            f"tables must be a list of one or more oneemb.make_table(...), got {_with_type(tables)}"
            f"{swapped or '; for two equal tables, give [oneemb.make_table()] * 2'}"
        )
    if len(tables) > TABLE_MAX + 1:
        raise ValueError(f"an embedding has at most {TABLE_MAX + 1} tables, got {len(tables)}")
    for t, table in enumerate(tables):
        if len(table.columns) not in (1, len(dim_C)):
            raise ValueError(
                f"table {t} must have {len(dim_C)} columns, as embedding_dim, or one for all, got {len(table.columns)}"
            )
        for column in table.columns:
            if column.initializer is not None:
                _check_range(f"table {t}", column.initializer, dtype)
    if default_initializer is not None:
        if not isinstance(default_initializer, Initializer):
            raise TypeError(
                f"default_initializer must be made by one of oneemb.make_*_initializer, got {default_initializer!r}"
            )
        _check_range("default_initializer", default_initializer, dtype)
    if not isinstance(store_options, StoreOptions):
        raise TypeError(
            f"store_options must be made by one of oneemb.make_*_store_options, got {_with_type(store_options)};"
            " make_device_mem_store_options(folder) keeps rows in memory"
        )
    if len(store_options.persistent_path) not in (0, 1, ranks):
        raise ValueError(
            f"persistent_path must name one folder, or one for each of {ranks} ranks of process_group, got"
            f" {len(store_options.persistent_path)}"
        )
    limits = torch.iinfo(key_type)
    if padding_idx is not None and (isinstance(padding_idx, bool) or not isinstance(padding_idx, int)):
        raise TypeError(f"padding_idx must be an int or None, got {padding_idx!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if padding_idx is not None and not limits.min <= padding_idx <= limits.max:
        raise ValueError(f"padding_idx must fit in key_type, {key_type}, got {padding_idx}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must fit in 64 bits, got {seed}")


def _with_type(value: object) -> str:
    """Text of a value for an error, with its type unless it is None or a dtype."""
    return str(value) if value is None or isinstance(value, torch.dtype) else f"{type(value).__name__} {value!r}"


Class = TypeVar("Class", bound=type)


def own_constructor(made: Class) -> Class:
    """Give a class its own copy of the inherited constructor, so that Python's errors about arguments name the class.
    Returns the class."""
    inherited: Any = made.__init__  # type: ignore[misc]
    own = types.FunctionType(
        inherited.__code__, inherited.__globals__, "__init__", inherited.__defaults__, inherited.__closure__
    )
    vars(functools.update_wrapper(own, inherited)).pop("__wrapped__")
    own.__qualname__ = f"{made.__qualname__}.__init__"
    made.__init__ = own  # type: ignore[misc]
    return made


def initial_rows(
    seed: int, dim_C: Sequence[int], tables: Sequence[TableOptions], default: Initializer
) -> init_rows.InitialRows:
    """Description of new rows for kernels: kind and parameters of the initializer of each table and column.

    Args:
        dim_C: width of each column.
        default: initializer of columns that name none.
    """
    kind_TC = np.empty((len(tables), len(dim_C)), np.int64)
    param_TC4 = np.zeros((len(tables), len(dim_C), 4))
    for t, table in enumerate(tables):
        for c in range(len(dim_C)):
            column = table.columns[c if len(table.columns) > 1 else 0]
            kind_TC[t, c], params = encoded(column.initializer or default)
            param_TC4[t, c, : len(params)] = params
    return init_rows.InitialRows(seed % 2**64, kind_TC, param_TC4, np.cumsum(dim_C, dtype=np.int64))


def _check_range(what: str, initializer: Initializer, dtype: torch.dtype) -> None:
    """Raise ValueError if initial weights may be infinite in `dtype`: the largest float16 is 65504. `what` names the
    initializer."""
    largest = largest_weight(initializer)
    if largest > torch.finfo(dtype).max:
        raise ValueError(
            f"{what} initializes weights up to {largest:g}, {dtype} holds at most {torch.finfo(dtype).max:g}; choose a"
            " narrower initializer or another dtype"
        )


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, str] | None:
    """(text of the differing arguments of `theirs`, text of those of `ours`), for arguments that change how rows are
    initialized or read; None = no such argument differs.

    Args:
        theirs: `description` in a snapshot; other releases may have saved only parts of it, or nothing.
        ours: `description` of an embedding with at least as many tables.
    """
    names = [name for name in ("seed", "padding_idx", "key_type", "column_dims") if name in theirs]
    found = [(f"{name}={theirs[name]}", f"{name}={ours[name]}") for name in names if theirs[name] != ours[name]]
    tables, default = theirs.get("tables", []), ours["default_initializer"]
    their_default, other = theirs.get("default_initializer", default), list[tuple[int, str, str]]()
    if their_default != default or tables != ours["tables"][: len(tables)]:
        pairs = [
            (t, _initializers(table, their_default), _initializers(ours["tables"][t], default))
            for t, table in enumerate(tables)
        ]
        other = [(t, was, now) for t, was, now in pairs if was != now]
    if other:
        t, was, now = other[0]
        more = f" (and others in {len(other) - 1} more)" * (len(other) > 1)
        found.append((f"{was} in table {t}{more}", f"{now} in it"))
    return (", ".join(one for one, _ in found), ", ".join(one for _, one in found)) if found else None


def _initializers(table: Mapping[str, Any], default: Mapping[str, Any]) -> str:
    """Text of the initializers of a table in a description."""
    texts = []
    for column in table["columns"]:
        options = dict(column["initializer"] or default)
        kind = options.pop("type")
        texts.append(f"{kind}({', '.join(f'{name}={value}' for name, value in options.items())})")
    return texts[0] if len(set(texts)) == 1 else f"[{', '.join(texts)}]"


def pretrained(
    weight: Any, ids: Any, has_columns: bool, more: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[np.ndarray, np.ndarray]]]:
    """(arguments of an embedding with given rows, [(ids, weights)] of its tables). Any: a user's values.

    Args:
        weight, ids, more: arguments of `from_pretrained`.
        has_columns: whether `embedding_dim` of the embedding is a list of columns.
    """
    weights = list(weight) if isinstance(weight, list | tuple) else [weight]
    several = isinstance(weight, list | tuple) and isinstance(ids, list | tuple)
    ids_T = list(ids) if several else [ids] * len(weights)
    if not weights or len(ids_T) != len(weights):
        raise ValueError(
            f"weight and ids must be lists with one tensor for each table, got {len(weights)} weights and"
            f" {len(ids_T)} ids"
        )
    for table, (one, ids_of_table) in enumerate(zip(weights, ids_T, strict=True)):
        _check_rows(one, ids_of_table, weights[0], table)
    dim, dtype = weights[0].shape[1], weights[0].dtype
    key_type = next((one.dtype for one in ids_T if one is not None), torch.int64)
    options: dict[str, Any] = {"embedding_dim": [dim] if has_columns else dim, "dtype": dtype, "key_type": key_type}
    options |= {"tables": [make_table_options()] * len(weights), **more}
    if isinstance(options["tables"], list | tuple) and len(options["tables"]) != len(weights):
        raise ValueError(f"tables must be {len(weights)}, one for each tensor of weight, got {len(options['tables'])}")
    given = options["embedding_dim"]
    if dim != (sum(given) if has_columns and isinstance(given, list | tuple) else given):
        raise ValueError(f"embedding_dim must be {dim}, the width of weight, or a list with this sum, got {given!r}")
    rows = [
        (
            np.arange(len(one)) if ids_of_table is None else ids_of_table.cpu().numpy(),
            one.detach().cpu().float().numpy(),
        )
        for one, ids_of_table in zip(weights, ids_T, strict=True)
    ]
    return options, rows


def _check_rows(weight: Any, ids: Any, first: Any, table: int) -> None:
    """Raise unless `weight` and `ids` are those of one table, and `weight` has the dtype and width of `first`, the
    weights of table 0."""
    is_matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.dtype in DTYPE_NAMES
    if not is_matrix or weight.shape[1:] != first.shape[1:] or weight.dtype != first.dtype:
        got = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise TypeError(
            f"weight must be float32, float16 or bfloat16 [rows, D], with the same dtype and D for all tables, got"
            f" {got} for table {table}"
        )
    if ids is None:
        return
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
        got = str(ids.dtype) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TypeError(
            f"ids must be a tensor of int64 or int32, got {got} for table {table}; call torch.as_tensor(ids).long();"
            " for several tables give a list of such tensors, and a list of weights"
        )
    if ids.shape != weight.shape[:1] or len(ids.unique()) < len(ids):
        raise ValueError(
            f"ids must be [{len(weight)}], one for each row, and distinct, got {list(ids.shape)} for table {table}"
        )


def temporary_folder(owner: object) -> tuple[str, Callable[[], object]]:
    """(path of a new folder that is removed when `owner` is gone, function that removes it earlier)."""
    folder = tempfile.mkdtemp(prefix="oneemb-")
    # weakref.finalize would not run when a process of multiprocessing ends, and would run in a forked child.
    return folder, Finalize(owner, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=0)


def rank_folders(options: StoreOptions, ranks: AnyRanks) -> list[str]:
    """For each rank, the folder of its rows: from the options, or a subfolder of the folder in the options."""
    paths = options.persistent_path
    if ranks.alone or len(paths) > 1:
        return list(paths)
    return [os.path.join(paths[0], rank_folder_name(rank, ranks.size)) for rank in range(ranks.size)]


def store_plan(name: str, options: StoreOptions, tables: Sequence[TableOptions], ranks: AnyRanks) -> StorePlan:
    """Plan of this rank's store for the embedding `name`."""
    folder = rank_folders(options, ranks)[ranks.rank]
    cache_bytes: int | None
    host_bytes: int | None
    remote = None
    of_table: dict[str, Any] = {}
    match options:
        case DeviceMemStoreOptions():
            cache_bytes, host_bytes, policy = None, 0, "lfu"
        case CachedHostMemStoreOptions():
            cache_bytes, host_bytes, policy = options.cache_budget_mb * 2**20, None, options.cache_policy
        case CachedSsdStoreOptions():
            cache_bytes, host_bytes = options.cache_budget_mb * 2**20, options.host_cache_budget_mb * 2**20
            policy = options.cache_policy
            of_table["max_space_amplification"] = float(options.max_space_amplification)
            of_table["expected_rows"] = options.expected_rows
            if options.index_memory_mb is not None:
                of_table["index_memory_bytes"] = options.index_memory_mb * 2**20
        case CachedRemoteStoreOptions():
            cache_bytes, host_bytes, policy = options.cache_budget_mb * 2**20, 0, options.cache_policy
            check_installed(options.url)
            # Equal when a job is started again; different for each rank, and for a copy in another folder.
            own_name = f"{name}.{hashlib.blake2s(folder.encode(), digest_size=4).hexdigest()}"
            remote = RemotePlan(options.url, own_name)
    replicated = tuple(t for t, table in enumerate(tables) if table.replicate)
    return StorePlan(
        folder, cache_bytes, host_bytes, options.capacity, options.physical_block_size, policy, ranks.rank, ranks.size,
        replicated, remote=remote, **of_table,
    )  # fmt: skip


def policies_of(
    policy: RowPolicy | Sequence[RowPolicy] | None, tables: Sequence[TableOptions], options: StoreOptions,
    ranks: AnyRanks,
) -> tuple[RowPolicy, ...] | None:  # fmt: skip
    """The policy of each table; None = all tables keep all rows.

    Raises:
        TypeError, ValueError: `policy` is no policy, or does not fit the tables.
    """
    if policy is None:
        return None
    if not ranks.alone and any(table.replicate for table in tables):
        raise ValueError(
            "replicated tables must keep all rows, got replicate=True and policy= in one embedding; make another"
            " embedding for the tables with a policy"
        )
    policies: tuple[Any, ...] = (policy,) * len(tables)
    if isinstance(policy, list | tuple):
        policies = tuple(policy)
    if not all(isinstance(one, RowPolicy) for one in policies):
        raise TypeError(f"policy must be a oneemb.policies.RowPolicy, or a list of one for each table, got {policy!r}")
    if len(policies) != len(tables):
        raise ValueError(f"policy must be one for all tables, or one for each of {len(tables)}, got {len(policies)}")
    if len({one.clock for one in policies if one.expire_after_seconds is not None}) > 1:
        raise ValueError("the policies of an embedding must have the same clock=, got several")
    if len({one.timestamps for one in policies}) > 1:
        raise ValueError("the policies of an embedding must have the same timestamps=, got both True and False")
    if options.capacity is not None and len({one.evict for one in policies}) > 1:
        raise ValueError(
            f"the policies of tables that share the store's capacity, {options.capacity} rows, must have the same"
            " evict=, which orders their rows; or give each table a capacity of its own, in its policy"
        )
    return policies


def state_width_of(options: StoreOptions, dim: int, optimizer: str, needed: int) -> int:
    """Number of state values for which a row has room: from the options, or else `needed`, the number of values of the
    optimizer. Raise ValueError if the options leave too little room."""
    if options.storage_dim is not None:
        if options.storage_dim < dim + needed:
            raise ValueError(
                f"storage_dim={options.storage_dim} is too small for {optimizer!r}: rows of {dim} weights need"
                f" storage_dim={dim + needed}; give this value, or leave storage_dim out"
            )
        return options.storage_dim - dim
    if options.size_factor is not None:
        factor = -(-(dim + needed) // dim)
        if options.size_factor < factor:
            raise ValueError(
                f"size_factor={options.size_factor} is too small for {optimizer!r}: rows of {dim} weights need"
                f" size_factor={factor}; give this value, or leave size_factor out"
            )
        return (options.size_factor - 1) * dim
    return needed
