"""Format of dumps of dynamicemb's tables, which are read and written byte for byte.

Little-endian, without headers. n rows, m ids without a row, D weights and Z optimizer state values of a row, r a rank
of R. Layout "today":

    <table>_emb_keys.rank_<r>.world_size_<R>        int64 [n]
    <table>_emb_values.rank_...                     float32 [n, D]
    <table>_emb_scores.rank_...                     int64 [n], or [n, 2] if rows have two scores
    <table>_opt_values.rank_...                     float32 [n, Z]; only with optimizer state
    <table>_counter_keys.rank_...                   int64 [m], ids without a row; only with counts
    <table>_counter_frequencies.rank_...            int64 [m], counts of lookups of these ids; only with counts
    <table>_opt_args.json                           options of the optimizer and the table

Layout "seed", of dynamicemb's first version, with one file for all ranks:

    <table>_keys, <table>_values                    as above
    <table>_scores                                  uint64 [n]; not for LRU tables
    <table>_opt_state_<name>_keys, _values, _scores for each part of the optimizer state, in its own order of rows
    <table>_opt_args.json                           only with optimizer state

Invariants:
- <table>_opt_args.json is written last and removed first: if it exists, all other files exist, complete and of one
  dump. In "seed" without optimizer state <table>_keys takes its place;
- a file gets its final name only when its content is durable.
"""

import re
from typing import Literal

import numpy as np

from oneemb.storage.errors import SnapshotNotFoundError
from oneemb.storage.fs import FileSystem

Layout = Literal["today", "seed"]
DIST_TYPES = ("continuous", "roundrobin", "hash_roundrobin")
"""Rules by which dynamicemb assigns ids to ranks."""

UNFINISHED = ".unfinished"
"""End of the temporary name of a file."""
RANKED = re.compile(r"(emb_keys|emb_values|emb_scores|opt_values|counter_keys|counter_frequencies)"
                    r"\.rank_(\d+)\.world_size_([1-9]\d*)")  # fmt: skip
"""Names of files of "today", without the name of the table."""
OF_SEED = re.compile(r"keys|values|scores|opt_state_(.+)_(keys|values|scores)")
"""Names of files of "seed", without the name of the table."""
META = "opt_args.json"
"""Name of the last file of a dump, without the name of the table."""


# ---- ranks of keys --------------------------------------------------------------------------------------------------


def owner_of_key(dist_type: str, id_N: np.ndarray, ranks: int, num_embeddings: int | None) -> np.ndarray:
    """Rank to which dynamicemb assigns each id, int64 [N]. "continuous" needs `num_embeddings` of the table's
    config."""
    unsigned_N = id_N.astype(np.uint64)
    if dist_type == "hash_roundrobin":
        unsigned_N = _hashed(unsigned_N)
    elif dist_type == "continuous":
        block = _block(ranks, num_embeddings)
        inside_N = unsigned_N < np.uint64(block * ranks)
        return np.where(inside_N, unsigned_N // np.uint64(block), unsigned_N % np.uint64(ranks)).astype(np.int64)
    return (unsigned_N % np.uint64(ranks)).astype(np.int64)


def numbers_in_file(dist_type: str, id_N: np.ndarray, ranks: int, num_embeddings: int | None) -> np.ndarray:
    """Number under which the file of its rank stores each id, int64 [N]. The number is the id, except for "continuous":
    there it is the id's index in the rank's block, and ids beyond all blocks are assigned to the ranks in turn."""
    if dist_type != "continuous":
        return id_N
    unsigned_N, block = id_N.astype(np.uint64), np.uint64(_block(ranks, num_embeddings))
    inside_N = unsigned_N < block * np.uint64(ranks)
    return np.where(inside_N, unsigned_N % block, unsigned_N // np.uint64(ranks)).astype(np.int64)


def ids_of_numbers(dist_type: str, rank: int, key_N: np.ndarray, ranks: int, num_embeddings: int | None) -> np.ndarray:
    """Ids, int64 [N], of the numbers under which the file of `rank` stores them. Inverse of `numbers_in_file`."""
    if dist_type != "continuous":
        return key_N
    unsigned_N, block = key_N.astype(np.uint64), np.uint64(_block(ranks, num_embeddings))
    beyond_N = unsigned_N * np.uint64(ranks) + np.uint64(rank)
    return np.where(unsigned_N < block, unsigned_N + block * np.uint64(rank), beyond_N).astype(np.int64)


def _block(ranks: int, num_embeddings: int | None) -> int:
    return max(1, -(-(num_embeddings or 0) // ranks))


def _hashed(unsigned_N: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3 (Appleby), of uint64."""
    h_N, shift = unsigned_N, np.uint64(33)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h_N = (h_N ^ (h_N >> shift)) * np.uint64(factor)
    return h_N ^ (h_N >> shift)


# ---- names ----------------------------------------------------------------------------------------------------------


def check_name(table: str) -> None:
    """Raise ValueError if the table's name cannot be part of a file's name."""
    if not table or "/" in table or "\0" in table:
        raise ValueError(f"the name of a table must have no '/', since its files are named after it, got {table!r}")


def part_of(table: str, name: str, pattern: "re.Pattern[str]") -> "re.Match[str] | None":
    """Match of `pattern` with the part of a file's name that follows the table's name; None = no match, or another
    table."""
    return pattern.fullmatch(name.removeprefix(f"{table}_")) if name.startswith(f"{table}_") else None


def names_in(fs: FileSystem, folder: str) -> set[str]:
    """Names of the files in a folder; SnapshotNotFoundError if there is no such folder."""
    try:
        return set(fs.names(folder))
    except OSError as error:
        raise SnapshotNotFoundError(f"no folder of dumps at {folder}: {error.strerror or error}") from error
