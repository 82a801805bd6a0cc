"""Dumps of dynamicemb's tables, read and written byte for byte.

Little-endian, without headers; n rows, D weights, Z numbers of state, r of R ranks. "today":

    <table>_emb_keys.rank_<r>.world_size_<R>        int64 [n]
    <table>_emb_values.rank_...                     float32 [n, D]
    <table>_emb_scores.rank_...                     int64 [n], or [n, 2] of two scores
    <table>_opt_values.rank_...                     float32 [n, Z], where state is dumped
    <table>_counter_keys.rank_...                   int64 [m], where counts are; of ids without a row
    <table>_counter_frequencies.rank_...            int64 [m]
    <table>_opt_args.json                           of the optimizer and the table

and "seed", with one file for all ranks:

    <table>_keys, <table>_values                    as above
    <table>_scores                                  uint64 [n], but of tables of LRU
    <table>_opt_state_<name>_keys, _values, _scores of each part of the state, with an order of its own
    <table>_opt_args.json                           where state is dumped

Invariants:
- <table>_opt_args.json is written last, and removed first: where it is, every other file is there, whole, of one dump;
  and so, where "seed" has none, are keys: they come after all others but that one, and go before them;
- files appear under their names when their contents outlive a loss of power.
"""

import re
from typing import Literal

import numpy as np

from oneemb.storage.errors import SnapshotNotFoundError
from oneemb.storage.fs import FileSystem

Layout = Literal["today", "seed"]
DIST_TYPES = ("continuous", "roundrobin", "hash_roundrobin")
"""Rules by which dynamicemb deals ids to ranks."""

UNFINISHED = ".unfinished"
"""End of temporary names."""
RANKED = re.compile(r"(emb_keys|emb_values|emb_scores|opt_values|counter_keys|counter_frequencies)"
                    r"\.rank_(\d+)\.world_size_([1-9]\d*)")  # fmt: skip
"""Names of files of "today", without that of the table."""
OF_SEED = re.compile(r"keys|values|scores|opt_state_(.+)_(keys|values|scores)")
"""Names of files of "seed", without that of the table."""
META = "opt_args.json"
"""The last file, without the name of the table."""


# ---- ranks of keys --------------------------------------------------------------------------------------------------


def owner_of_key(dist_type: str, id_N: np.ndarray, ranks: int, num_embeddings: int | None) -> np.ndarray:
    """Rank that dynamicemb keeps each id on: int64 [N]. "continuous" needs `num_embeddings` of the table's config."""
    unsigned_N = id_N.astype(np.uint64)
    if dist_type == "hash_roundrobin":
        unsigned_N = _hashed(unsigned_N)
    elif dist_type == "continuous":
        block = _block(ranks, num_embeddings)
        inside_N = unsigned_N < np.uint64(block * ranks)
        return np.where(inside_N, unsigned_N // np.uint64(block), unsigned_N % np.uint64(ranks)).astype(np.int64)
    return (unsigned_N % np.uint64(ranks)).astype(np.int64)


def file_key(dist_type: str, id_N: np.ndarray, ranks: int, num_embeddings: int | None) -> np.ndarray:
    """Number of each id in the file of its rank, int64 [N]: under "continuous" the id's place in the rank's block, else
    the id. Ids beyond all blocks are dealt to the ranks in turn."""
    if dist_type != "continuous":
        return id_N
    unsigned_N, block = id_N.astype(np.uint64), np.uint64(_block(ranks, num_embeddings))
    inside_N = unsigned_N < block * np.uint64(ranks)
    return np.where(inside_N, unsigned_N % block, unsigned_N // np.uint64(ranks)).astype(np.int64)


def key_of_file(dist_type: str, rank: int, key_N: np.ndarray, ranks: int, num_embeddings: int | None) -> np.ndarray:
    """Ids of the numbers in a rank's file: int64 [N]."""
    if dist_type != "continuous":
        return key_N
    unsigned_N, block = key_N.astype(np.uint64), np.uint64(_block(ranks, num_embeddings))
    beyond_N = unsigned_N * np.uint64(ranks) + np.uint64(rank)
    return np.where(unsigned_N < block, unsigned_N + block * np.uint64(rank), beyond_N).astype(np.int64)


def _block(ranks: int, num_embeddings: int | None) -> int:
    return max(1, -(-(num_embeddings or 0) // ranks))


def _hashed(unsigned_N: np.ndarray) -> np.ndarray:
    """The finaliser of MurmurHash3 (Appleby), uint64."""
    h_N, shift = unsigned_N, np.uint64(33)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h_N = (h_N ^ (h_N >> shift)) * np.uint64(factor)
    return h_N ^ (h_N >> shift)


# ---- names ----------------------------------------------------------------------------------------------------------


def check_name(table: str) -> None:
    """Raise ValueError if no file can have a table's name."""
    if not table or "/" in table or "\0" in table:
        raise ValueError(f"the files of a table have its name, which must have no '/', got {table!r}")


def part_of(table: str, name: str, pattern: "re.Pattern[str]") -> "re.Match[str] | None":
    """Match of a pattern with a file's name after that of the table; None = no match, or another table's file."""
    return pattern.fullmatch(name.removeprefix(f"{table}_")) if name.startswith(f"{table}_") else None


def names_in(fs: FileSystem, folder: str) -> set[str]:
    """Names of a folder's files; SnapshotNotFoundError if there is no folder."""
    try:
        return set(fs.names(folder))
    except OSError as error:
        raise SnapshotNotFoundError(f"no folder of dumps at {folder}: {error.strerror or error}") from error
