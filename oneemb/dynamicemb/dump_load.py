"""Dumps of the dynamic tables of a model, in dynamicemb's files.

A dump has a folder for each collection, named by the path of the collection in the model ("model.embedding_module").
The folder has the files of each table. Layouts of both today's dynamicemb and its first version are read and written.
"""

import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import distributed
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module

from oneemb.dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from oneemb.dynamicemb.shard import ShardedDynamicEmbeddingBagCollection, ShardedDynamicEmbeddingCollection
from oneemb.dynamicemb.table_dumps import TableDumps
from oneemb.dynamicemb.tables import DynamicTables
from oneemb.foreign.dynamicemb_files import UNFINISHED
from oneemb.foreign.dynamicemb_reader import Dump
from oneemb.graph.ranks import AnyRanks, ranks_of
from oneemb.storage.fs import AnyPath, LocalFileSystem, absolute_path

__all__ = [
    "DynamicEmbDump", "DynamicEmbLoad", "dynamic_tables", "find_sharded_modules", "get_dynamic_emb_module", "named_for",
]  # fmt: skip

_SHARDED = (
    ShardedDynamicEmbeddingCollection, ShardedDynamicEmbeddingBagCollection, ShardedEmbeddingCollection,
    ShardedEmbeddingBagCollection,
)  # fmt: skip

TableNames = Mapping[str, Sequence[str]]
"""{path of a collection, or the last name of the path: names of tables}."""


def find_sharded_modules(module: torch.nn.Module, path: str = "") -> list[tuple[str, str, torch.nn.Module]]:
    """Sharded collections of a model, each as (path, last name of the path, module). A path is `path` + "model" +
    ...."""
    found, pending = [], [(module, f"{path}model", "model")]
    while pending:
        current, module_path, name = pending.pop()
        current = get_unwrapped_module(current)
        if isinstance(current, _SHARDED):
            found.append((module_path, name, current))
        else:
            pending += [
                (child, f"{module_path}.{child_name}", child_name) for child_name, child in current.named_children()
            ]
    return found


def check_emb_collection_modules(
    module: torch.nn.Module, ret_list: list[torch.nn.Module], visited: set[int] | None = None
) -> list[torch.nn.Module]:
    """Append the sharded collections of a model to `ret_list`, and return it.

    Args:
        visited: ids (`id(m)`) of modules to skip; the call adds those of the appended modules. None = skip none.
    """
    visited = set() if visited is None else visited
    for _, _, collection in find_sharded_modules(module):
        if id(collection) not in visited:
            visited.add(id(collection))
            ret_list.append(collection)
    return ret_list


def get_dynamic_emb_module(model: torch.nn.Module) -> list[BatchedDynamicEmbeddingTablesV2]:
    """Modules of dynamic tables in a model: one for each embedding."""
    modules = model.modules()
    return list(dict.fromkeys(module for module in modules if isinstance(module, BatchedDynamicEmbeddingTablesV2)))


def dynamic_tables(model: torch.nn.Module) -> list[tuple[str, str, list[DynamicTables]]]:
    """Collections with dynamic tables, each as (path, last name of the path, tables of each embedding)."""
    collections = [(path, name, get_dynamic_emb_module(module)) for path, name, module in find_sharded_modules(model)]
    return [(path, name, [module.dynamic for module in found]) for path, name, found in collections if found]


def named_for(named: Mapping[str, Any], path: str, name: str) -> Any:
    """Entry of `named` for a collection, by its path or its last name; None = no entry."""
    return named.get(path, named.get(name))


def DynamicEmbDump(
    path: AnyPath,
    model: torch.nn.Module,
    table_names: TableNames | None = None,
    optim: bool | None = False,
    counter: "bool | distributed.ProcessGroup | None" = False,
    pg: "distributed.ProcessGroup | None" = None,
    allow_overwrite: bool = False,
    *,
    layout: Literal["today", "seed"] = "today",
) -> None:
    """Write the rows of dynamic tables into files. Every rank makes the call.

    All files are durable when the call returns. The last file of a dump is `<table>_opt_args.json`, or `<table>_keys`
    in the layout "seed" without optimizer state; a dump that lacks it was interrupted, and cannot be loaded.

    Args:
        path: a folder that all ranks see, new or without files.
        model: a model with dynamic tables.
        table_names: {collection: tables to dump}; None = all tables.
        optim: whether to write the optimizer state.
        counter: whether to write the counts of ids without a row. A process group here is taken as `pg`, which was the
            parameter at this position in dynamicemb's first version.
        pg: ranks that share the tables; None = all ranks.
        allow_overwrite: whether the folder may contain files.
        layout: "today", with files for each rank; or "seed", of dynamicemb's first version, with one file for all ranks
            and without counts.

    Raises:
        FileExistsError: the folder contains files and `allow_overwrite` is False.
        ValueError: the model has no such table, or the files cannot hold the state of a table.
        StorageError: a file cannot be written; other ranks raise RankError.

    Reference: dynamicemb.DynamicEmbDump.
    """
    if layout not in ("today", "seed"):
        raise ValueError(f'layout must be "today" or "seed", got {layout!r}')
    counts, ranks = _counts_and_ranks(counter, pg)
    folder, chosen = absolute_path(path), _chosen(model, table_names)
    what = f"dump into {folder}"
    ranks.agree(what, lambda: _check_folder(folder, allow_overwrite))
    for module_path, embeddings in chosen.items():
        where = os.path.join(folder, module_path)
        ranks.agree(what, functools.partial(LocalFileSystem().make_directories, where))
        for tables, names in embeddings:
            TableDumps(tables).dump(where, names, optim=bool(optim), counter=counts, layout=layout)


def DynamicEmbLoad(
    path: AnyPath,
    model: torch.nn.Module,
    table_names: TableNames | None = None,
    optim: bool = False,
    counter: "bool | distributed.ProcessGroup | None" = False,
    pg: "distributed.ProcessGroup | None" = None,
) -> None:
    """Load the rows of a dump into dynamic tables; other rows stay as they are. The dump may be of any number of ranks
    and any `dist_type`. Every rank makes the call.

    Before a row changes, the call checks that all files exist and have the right length. If a table has a capacity, and
    its part of the dump on a rank does not fit, the rows of lowest score are left out, with a warning.

    Args:
        path: a folder that `DynamicEmbDump`, or dynamicemb, has written.
        model: a model with dynamic tables.
        table_names: {collection: tables to load}; None = all tables.
        optim: whether to load the optimizer's state, options and count of steps.
        counter: whether to load the counts of ids without a row; a process group here is taken as `pg`.
        pg: ranks that share the tables; None = all ranks.

    Raises:
        StorageError: a file is missing or malformed; nothing has changed.
        ValueError: the model has no such table, or the dump has another score strategy, or another optimizer's state.
        StoreFullError: a table has no room for its rows.

    Reference: dynamicemb.DynamicEmbLoad.
    """
    counts, _ = _counts_and_ranks(counter, pg)
    folder = absolute_path(path)
    found: list[tuple[TableDumps, dict[str, Dump]]] = []
    for module_path, embeddings in _chosen(model, table_names).items():
        for tables, names in embeddings:
            files = TableDumps(tables)
            dumps = files.check_load(os.path.join(folder, module_path), names, optim=optim, counter=counts)
            found.append((files, dumps))
    for files, dumps in found:
        for name, dump in dumps.items():
            files.load(name, dump, optim=optim, counter=counts)


def _counts_and_ranks(counter: Any, pg: "distributed.ProcessGroup | None") -> tuple[bool, AnyRanks]:
    if isinstance(counter, distributed.ProcessGroup):
        counter, pg = False, counter
    group = pg or (distributed.group.WORLD if distributed.is_initialized() else None)
    return bool(counter), ranks_of(group, name="dumps")


def _chosen(model: torch.nn.Module, table_names: TableNames | None) -> dict[str, list[tuple[DynamicTables, list[str]]]]:
    """{path of a collection: [(tables of one embedding, names of those to dump or load)]}."""
    found = dynamic_tables(model)
    if not found:
        warnings.warn("the model has no sharded collection with dynamic tables: there is nothing to do", stacklevel=3)
    if table_names is not None:
        if not isinstance(table_names, Mapping):
            raise TypeError(
                f"table_names must be lists of tables by the path of their collection, got {table_names!r}; paths are"
                f" {[path for path, *_ in found]}"
            )
        known = {key for path, name, _ in found for key in (path, name)}
        unknown = sorted(set(table_names) - known)
        if unknown:
            raise ValueError(f"table_names must name collections with dynamic tables, {sorted(known)}, got {unknown}")
    chosen: dict[str, list[tuple[DynamicTables, list[str]]]] = {}
    for path, name, embeddings in found:
        asked = None if table_names is None else named_for(table_names, path, name) or []
        there = [table for tables in embeddings for table in tables.names]
        missing = sorted(set(asked or []) - set(there))
        if missing:
            raise ValueError(f"table_names of collection {path!r} must be dynamic tables, {there}, got {missing}")
        chosen[path] = [
            (tables, [table for table in tables.names if asked is None or table in asked]) for tables in embeddings
        ]
    return chosen


def _check_folder(folder: str, allow_overwrite: bool) -> None:
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise FileExistsError(f"path must be a folder, {folder} is a file; give another path")
    # Ignore folders and unfinished files, which a failed or killed dump leaves.
    names = (name for _, _, names in os.walk(folder) for name in names if not name.endswith(UNFINISHED))
    if not allow_overwrite and any(names):
        raise FileExistsError(f"{folder} has files already; give another path, or allow_overwrite=True")
