"""Paths of the files of a dump of today's layout, as dynamicemb's users make and find them.

path/users_emb_keys.rank_0.world_size_2         encode_checkpoint_file_path(path, "users", 0, 2, "keys")
path/users_opt_args.json                        encode_meta_json_file_path(path, "users")
"""

import os
from typing import NamedTuple

from oneemb.foreign.dynamicemb_files import META, RANKED, names_in, part_of
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.fs import LocalFileSystem

__all__ = [
    "LoadingFiles", "encode_checkpoint_file_path", "encode_counter_checkpoint_file_path", "encode_meta_json_file_path",
    "find_files", "get_loading_files",
]  # fmt: skip

_ITEMS = {"keys": "emb_keys", "values": "emb_values", "scores": "emb_scores", "opt_values": "opt_values"}
_COUNTER_ITEMS = {"keys": "counter_keys", "frequencies": "counter_frequencies"}
_SUFFIXES = (*_ITEMS.values(), *_COUNTER_ITEMS.values())


def _encoded(root_path: str, table_name: str, rank: int, world_size: int, suffix: str) -> str:
    return os.path.join(root_path, f"{table_name}_{suffix}.rank_{rank}.world_size_{world_size}")


def _suffix_of(items: dict[str, str], item: str) -> str:
    if item not in items:
        raise ValueError(f"item must be one of {list(items)}, got {item!r}")
    return items[item]


def encode_meta_json_file_path(root_path: str, table_name: str) -> str:
    """Path of the options of a table and its optimizer."""
    return os.path.join(root_path, f"{table_name}_{META}")


def encode_checkpoint_file_path(root_path: str, table_name: str, rank: int, world_size: int, item: str) -> str:
    """Path of one rank's keys, values, scores or opt_values; ValueError if `item` is none of these."""
    return _encoded(root_path, table_name, rank, world_size, _suffix_of(_ITEMS, item))


def encode_counter_checkpoint_file_path(root_path: str, table_name: str, rank: int, world_size: int, item: str) -> str:
    """Path of the keys, or frequencies, of one rank's ids without a row; ValueError if `item` is neither."""
    return _encoded(root_path, table_name, rank, world_size, _suffix_of(_COUNTER_ITEMS, item))


def find_files(root_path: str, table_name: str, suffix: str) -> tuple[list[str], int]:
    """Files of all ranks, in the order of their ranks, and their number.

    Args:
        suffix: emb_keys, emb_values, emb_scores, opt_values, counter_keys or counter_frequencies.

    Raises:
        ValueError: `suffix` is none of these.
        StorageError: a rank's file is missing, files are of several numbers of ranks, or there is no folder.
    """
    if suffix not in _SUFFIXES:
        raise ValueError(f"suffix must be one of {list(_SUFFIXES)}, got {suffix!r}")
    matches = (part_of(table_name, name, RANKED) for name in names_in(LocalFileSystem(), root_path))
    found = {(int(its[2]), int(its[3])) for its in matches if its is not None and its[1] == suffix}
    ranks = max((ranks for _, ranks in found), default=0)
    if found != {(rank, ranks) for rank in range(ranks)}:
        raise CorruptTableError(
            f"the files {table_name}_{suffix} in {root_path} must be one for each of {ranks} ranks, got those of"
            f" (rank, ranks) {sorted(found)}; restore them from a copy"
        )
    return [_encoded(root_path, table_name, rank, ranks, suffix) for rank in range(ranks)], ranks


class LoadingFiles(NamedTuple):
    """Files that a rank reads; a list is empty where the dump has none such."""

    keys: list[str]
    values: list[str]
    scores: list[str]
    opt_values: list[str]
    counter_keys: list[str]
    counter_frequencies: list[str]


def get_loading_files(root_path: str, name: str, rank: int, world_size: int) -> LoadingFiles:
    """Files of a table that a rank reads: its own if `world_size` ranks have written them, else those of all.

    Raises:
        StorageError: a file is missing, or there is no folder.
    """
    found = {suffix: find_files(root_path, name, suffix) for suffix in _SUFFIXES}
    counts = {suffix: count for suffix, (_, count) in found.items() if count or suffix == "emb_values"}
    ranks = found["emb_keys"][1]
    if any(count != ranks for count in counts.values()):
        raise CorruptTableError(
            f"the files of table {name!r} in {root_path} must be of as many ranks, got {counts}; restore them from a"
            " copy"
        )
    own = slice(rank, rank + 1) if ranks == world_size else slice(None)
    return LoadingFiles(*(files[own] for files, _ in found.values()))
