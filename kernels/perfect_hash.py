"""A perfect hash of a fixed set of keys: each key has a slot of its own.

N keys, T tables, P parts, B buckets, S slots.

The keys of a table are divided into parts of at most 65,536 keys on average, so that the slots of a part are chosen
within the CPU's cache, and threads work on several parts at once. The keys of a part are divided into buckets of about
four keys. A key's slot follows from the key's hash and the pilot of its bucket: a number that was found by trial, the
largest buckets first, such that no two keys have the same slot. One slot in twenty stays empty. A lookup reads one
pilot and one slot and searches nothing: the id in the slot shows whether the key exists.

The numbers of a table are a row of region_T6, uint64; all are 0 if the table has no keys:

    SEED             mixed into the hash of an id
    PARTS            number of parts
    BUCKETS          number of buckets of all parts together; each part has equally many
    FIRST_BUCKET     index of the table's first pilot
    SLOTS            number of slots of one part
    FIRST_SLOT       the table's first slot

Invariant: a slot that is computed from a table's numbers belongs to the table, whatever the pilots are.
Limits: at most 2^48 slots; pilots are uint16.
Reference: Belazzougui, Botelho, Dietzfelbinger, "Hash, displace, and compress", ESA 2009; Pibiri, Trani, "PTHash",
SIGIR 2021.
"""

import secrets
from typing import NamedTuple

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index import hash_key
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import keep_rolled, mul_high, natural
from oneemb.kernels.threads import Threads

SEED, PARTS, BUCKETS, FIRST_BUCKET, SLOTS, FIRST_SLOT = range(6)

_PART_KEYS = 1 << 16
_BUCKET_KEYS = 4
_LOAD = 0.95
_BUCKET_MAX = 40  # random keys give about 20 at most; no pilot is tried for a larger bucket
_PILOTS = 1 << 16
_TRIES = 16
SALT_MAX = 1 << 30
_FOUND, _TWICE, _NO_PILOT = 0, 1, 2


class DuplicateKeyError(ValueError):
    """A key occurs twice; `n` is the index of its second occurrence."""

    def __init__(self, n: int):
        super().__init__(f"key {n} comes twice")
        self.n = n


class PerfectHash(NamedTuple):
    """A perfect hash: the numbers and pilots from which the slot of each key follows.

    Args:
        region_T6: numbers of each table; see the file's first lines.
        pilot_B: uint16, pilot of each bucket; at least one.
        slots_T: int64, number of slots of one part of each table.
        salt: number from which the seeds of tables are made: 0, or a random one if no pilots were found with 0.
        slots: number of slots of all tables.
    """

    region_T6: np.ndarray
    pilot_B: np.ndarray
    slots_T: np.ndarray
    salt: int
    slots: int

    @classmethod
    def of_keys(cls, table_N: np.ndarray, id_N: np.ndarray, tables: int, *, threads: Threads) -> "PerfectHash":
        """Perfect hash of these keys (table_N int32, below `tables`; id_N int64). If salt 0 fails, further salts are
        random: an attacker can choose keys that fail with any salt that is known before. DuplicateKeyError if a key
        occurs twice, ValueError if no hash was found."""
        count_T, salt = np.bincount(table_N, minlength=tables), 0
        for _ in range(_TRIES):
            made = _try(table_N, id_N, count_T, salt, threads)
            if made is not None:
                return made
            if salt == 0:
                _check_different(table_N, id_N)  # `_try` has not compared the keys of large buckets.
            salt = 1 + secrets.randbelow(SALT_MAX)
        raise ValueError(f"no perfect hash of {len(id_N)} keys was found in {_TRIES} tries")


@rule
def hash_id(id: Number, seed: Number) -> Number:
    """64 well-mixed bits of an id; different ids of a table (one seed) have different bits."""
    x = np.uint64(id) ^ seed
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


@rule
def bucket_of(hash: Number, region_T6: Array, t: Number) -> Number:
    """The bucket of a hash, int64."""
    return np.int64(mul_high(hash, region_T6[t, BUCKETS]) + region_T6[t, FIRST_BUCKET])


@rule
def slot_in_table(hash: Number, pilot: Number, region_T6: Array, t: Number) -> Number:
    """The slot of a hash whose bucket has this pilot, int64."""
    slots = region_T6[t, SLOTS]
    mixed = (hash ^ (np.uint64(pilot) * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.int64(region_T6[t, FIRST_SLOT] + mul_high(hash, region_T6[t, PARTS]) * slots + mul_high(mixed, slots))


@cpu
def _seed_cpu(begin: Number, end: Number, table_T: Array, salt: Number, seed_T: Array) -> None:
    for t in range(begin, end):
        seed_T[t] = hash_key(np.int64(table_T[t]), np.int64(0), salt)


@cpu
def _hash_cpu(
    begin: Number, end: Number, table_N: Array, id_N: Array, region_T6: Array, first_part_T: Array, hash_N: Array,
    part_N: Array,
) -> None:  # fmt: skip
    for n in range(natural(begin), natural(end)):
        t = natural(table_N[n])
        hash = hash_id(np.int64(id_N[n]), region_T6[t, SEED])
        hash_N[n] = hash
        part_N[n] = first_part_T[t] + np.int64(mul_high(hash, region_T6[t, PARTS]))


@rule
def _taken_by_trial(
    first: Number, last: Number, hash_N: Array, key_N: Array, region_T6: Array, t: Number, pilot: Number, begin: Number,
    taken_S: Array, slot_N: Array,
) -> Number:  # fmt: skip
    """Take the slots that a pilot gives to the keys of a bucket. Returns False, and takes none, if any is taken."""
    for i in range(first, last):
        s = slot_in_table(hash_N[key_N[i]], pilot, region_T6, t) - begin
        right = not taken_S[natural(s)]
        for j in range(first, i):
            right &= slot_N[j] != s
        if not right:
            return False
        slot_N[i] = s
    for i in range(first, last):
        taken_S[natural(slot_N[i])] = True
    return True


@rule
def _by_bucket(
    first: Number, last: Number, hash_N: Array, region_T6: Array, t: Number, first_bucket: Number, begin_B1: Array,
    key_N: Array,
) -> Number:  # fmt: skip
    """Write the numbers of keys first to last - 1 to key_N, bucket by bucket, and return the size of the largest."""
    buckets = len(begin_B1) - 2
    begin_B1[:] = 0
    for n in range(first, last):
        begin_B1[bucket_of(hash_N[n], region_T6, t) - first_bucket + 2] += 1
    most = 0
    for b in range(buckets):
        most = max(most, begin_B1[b + 2])
        begin_B1[b + 2] += begin_B1[b + 1]
    for n in range(first, last):
        b = bucket_of(hash_N[n], region_T6, t) - first_bucket
        key_N[begin_B1[b + 1]] = n
        begin_B1[b + 1] += 1
    return most


@cpu
def _pilots_cpu(
    begin: Number, end: Number, table_P: Array, part_P: Array, first_P1: Array, hash_N: Array, region_T6: Array,
    pilot_B: Array, wrong_P2: Array,
) -> None:  # fmt: skip
    """Find the pilots of parts begin to end - 1. hash_N: hashes of the keys, part by part; first_P1: first key of each
    part. wrong_P2: for each part _FOUND, _TWICE or _NO_PILOT, and the number of a key that occurs twice."""
    for p in range(begin, end):
        t, first, last = table_P[p], first_P1[p], first_P1[p + 1]
        buckets = np.int64(region_T6[t, BUCKETS]) // np.int64(region_T6[t, PARTS])
        slots = np.int64(region_T6[t, SLOTS])
        first_bucket = np.int64(region_T6[t, FIRST_BUCKET]) + part_P[p] * buckets
        first_slot = np.int64(region_T6[t, FIRST_SLOT]) + part_P[p] * slots
        begin_B1 = np.empty(buckets + 2, np.int64)
        key_N, slot_N = np.empty(last - first, np.int64), np.empty(last - first, np.int64)
        taken_S = np.zeros(slots, np.bool_)
        size = _by_bucket(first, last, hash_N, region_T6, t, first_bucket, begin_B1, key_N)
        wrong_P2[p, 0] = _FOUND
        while size > 0 and wrong_P2[p, 0] == _FOUND:
            for b in range(buckets):
                keep_rolled()
                bucket_begin, bucket_end = begin_B1[b], begin_B1[b + 1]
                if bucket_end - bucket_begin != size:
                    continue
                for i in range(bucket_begin, bucket_end if size <= _BUCKET_MAX else bucket_begin):
                    for j in range(bucket_begin, i):
                        if hash_N[key_N[i]] == hash_N[key_N[j]]:
                            wrong_P2[p, 0], wrong_P2[p, 1] = _TWICE, key_N[i]
                pilot = 0 if size <= _BUCKET_MAX else _PILOTS
                while pilot < _PILOTS and not _taken_by_trial(
                    bucket_begin, bucket_end, hash_N, key_N, region_T6, t, pilot, first_slot, taken_S, slot_N
                ):
                    pilot += 1
                if wrong_P2[p, 0] == _FOUND and pilot == _PILOTS:
                    wrong_P2[p, 0] = _NO_PILOT
                if wrong_P2[p, 0] != _FOUND:
                    break
                pilot_B[first_bucket + b] = pilot
            size -= 1


@cpu
def _slots_cpu(
    begin: Number, end: Number, table_N: Array, id_N: Array, region_T6: Array, pilot_B: Array, slot_N: Array
) -> None:
    for n in range(natural(begin), natural(end)):
        t = natural(table_N[n])
        hash = hash_id(np.int64(id_N[n]), region_T6[t, SEED])
        pilot = pilot_B[natural(bucket_of(hash, region_T6, t))]
        slot_N[n] = slot_in_table(hash, pilot, region_T6, t)


def slots_of(
    table_N: np.ndarray, id_N: np.ndarray, region_T6: np.ndarray, pilot_B: np.ndarray, *, threads: Threads
) -> np.ndarray:
    """Slot of each key, int64 [N]; the tables must have keys. A key that is not in the hash gets some slot of its
    table."""
    slot_N = np.empty(len(id_N), np.int64)
    threads.run(_slots_cpu, len(id_N), table_N, id_N, region_T6, pilot_B, slot_N)
    return slot_N


def regions(
    table_T: np.ndarray, count_T: np.ndarray, slots_T: np.ndarray, salt: int, *, threads: Threads
) -> np.ndarray:  # fmt: skip
    """region_T6, the numbers of tables.

    Args:
        table_T: int64, ascending: all tables of a file that have keys, and possibly others.
        count_T, slots_T: int64, number of keys, and of slots of one part, of each table; 0 = a table without keys.
    """
    region_T6 = np.zeros((len(table_T), 6), np.uint64)
    parts_T, buckets_T = parts_and_buckets(count_T)
    threads.run(_seed_cpu, len(table_T), table_T, np.int64(salt), region_T6[:, SEED])
    region_T6[:, PARTS], region_T6[:, BUCKETS], region_T6[:, SLOTS] = parts_T, buckets_T, slots_T
    region_T6[1:, FIRST_BUCKET] = np.cumsum(buckets_T)[:-1]
    region_T6[1:, FIRST_SLOT] = np.cumsum(parts_T * slots_T)[:-1]
    region_T6[count_T == 0] = 0  # The first bucket or slot computed for these may lie beyond the end.
    return region_T6


def parts_and_buckets(count_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number of parts, and of buckets of all parts together, of tables with count_T keys."""
    parts_T = -(-count_T // _PART_KEYS)
    return parts_T, parts_T * -(-count_T // (np.maximum(parts_T, 1) * _BUCKET_KEYS))


def _check_different(table_N: np.ndarray, id_N: np.ndarray) -> None:
    order_N = np.lexsort((id_N, table_N))
    same_N = (id_N[order_N[1:]] == id_N[order_N[:-1]]) & (table_N[order_N[1:]] == table_N[order_N[:-1]])
    if same_N.any():
        raise DuplicateKeyError(int(order_N[1 + np.argmax(same_N)]))


def _try(table_N: np.ndarray, id_N: np.ndarray, count_T: np.ndarray, salt: int, threads: Threads) -> PerfectHash | None:
    table_T = np.arange(len(count_T))
    region_T6 = regions(table_T, count_T, np.zeros(len(count_T), np.int64), salt, threads=threads)
    parts_T, buckets_T = parts_and_buckets(count_T)
    parts = int(parts_T.sum())
    first_part_T = np.cumsum(parts_T) - parts_T
    hash_N, part_N = np.empty(len(id_N), np.uint64), np.empty(len(id_N), np.int32 if parts >> 16 else np.uint16)
    threads.run(_hash_cpu, len(id_N), table_N, id_N, region_T6, first_part_T, hash_N, part_N)
    count_P = np.bincount(part_N, minlength=parts)
    order_N = np.argsort(part_N, kind="stable")  # of uint16 by radix
    del part_N
    hash_N = hash_N[order_N]
    table_P = np.repeat(table_T, parts_T)
    slots_P = np.ceil(count_P / _LOAD).astype(np.int64)
    slots_T = np.zeros(len(count_T), np.int64)
    np.maximum.at(slots_T, table_P, slots_P)
    region_T6 = regions(table_T, count_T, slots_T, salt, threads=threads)
    pilot_B, wrong_P2 = np.zeros(max(1, int(buckets_T.sum())), np.uint16), np.zeros((parts, 2), np.int64)
    part_P = np.arange(parts) - first_part_T[table_P]
    first_P1 = np.concatenate([[0], np.cumsum(count_P)])
    threads.run(
        _pilots_cpu, parts, table_P, part_P, first_P1, hash_N, region_T6, pilot_B, wrong_P2, share_min=1
    )  # fmt: skip
    twice = np.flatnonzero(wrong_P2[:, 0] == _TWICE)
    if len(twice):
        raise DuplicateKeyError(int(order_N[wrong_P2[twice[0], 1]]))
    if (wrong_P2[:, 0] != _FOUND).any():
        return None
    return PerfectHash(region_T6, pilot_B, slots_T, salt, int((parts_T * slots_T).sum()))
