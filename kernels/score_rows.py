"""Scores of rows: a full table evicts the rows with the lowest scores first.  U keys, P places, T tables.

Each table has a rule that says which score a row gets when it is used:

    rule          score                                          evicted first: rows
    LOOKUP        number of the lookup                           not used for longest
    STEP          number of the step                             not used for longest; lookups of a step count as one
    COUNT         uses so far                                    used least often
    DECAYED       uses, each halved with every half-life         used least often in recent steps
    MIXED         2^power uses, roughly; then the step           used least often; of these, not used for longest
    EPOCH_LOOKUP  epoch; then number of the lookup               of old epochs; of these, not used for longest
    EPOCH_COUNT   epoch; then uses so far                        of old epochs; of these, used least often
    GIVEN         number from the user                           with the lowest number

A score is a uint64. A score of DECAYED holds the bits of the float64 log2(uses) + step / half-life. Such bits order
like the numbers, and the score of an unused row need not change. MIXED is Morris' approximate counter: the power grows
with probability 2^-power, by a random number from the key and the lookup.

References for MIXED: LFU of Redis and of TorchRec's dynamic embedding; Morris, CACM 21(10), 1978.
"""

from typing import NamedTuple

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index import hash_key
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import float_bits, natural, prefetch, prefetch_row, uint_as_float
from oneemb.kernels.threads import Threads

LOOKUP, STEP, COUNT, DECAYED, MIXED, EPOCH_LOOKUP, EPOCH_COUNT, GIVEN = range(8)

# The salt differs from those of hash indexes and owners.
_TIE_SALT = np.uint64(0x6F776E6572730002)

# Keys whose usage words are fetched before they are needed.
_AHEAD = 16

# Least number of rows that is worth waking a thread for.
_SHARE_MIN = 1 << 13

_LOG_MAX = 1000.0
_POWER_MAX = np.uint64(63)
_LOW = np.uint64(0xFFFFFFFF)
_MOST = np.uint64(0xFFFFFFFFFFFFFFFF)


class ScoreRules(NamedTuple):
    """Rules of T tables."""

    kind_T: np.ndarray
    """int64: rule of each table, LOOKUP and so on."""
    param_T: np.ndarray
    """float64: half-life in steps (DECAYED), power of a new row (MIXED)."""
    given_T: np.ndarray
    """uint64: score of a new row (GIVEN)."""
    writes_T: np.ndarray
    """bool: whether every use sets that score again (GIVEN)."""


@rule
def _more(count: Number, uses: Number, most: Number) -> Number:
    """count + uses, limited to `most`."""
    return count + uses if uses <= most - count else most


@rule
def _count_score(
    kind: Number, is_new: Number, before: Number, uses: Number, lookup: Number, step: Number, epoch: Number
) -> Number:
    """Score after a use, by one of the rules that count in integers."""
    if kind == LOOKUP:
        return lookup
    if kind == STEP:
        return step
    if kind == COUNT:
        return uses if is_new else _more(before, uses, _MOST)
    if kind == EPOCH_LOOKUP:
        return epoch << np.uint64(32) | lookup & _LOW
    # EPOCH_COUNT: a new epoch does not reset the uses.
    return epoch << np.uint64(32) | _more(np.uint64(0) if is_new else before & _LOW, uses, _LOW)


@rule
def _mixed_score(is_new: Number, before: Number, least: Number, step: Number, draw: Number) -> Number:
    power = least if is_new else before >> np.uint64(32)
    if not is_new and power < _POWER_MAX and (power == np.uint64(0) or draw >> (np.uint64(64) - power) == np.uint64(0)):
        power += np.uint64(1)
    return power << np.uint64(32) | step & _LOW


@rule
def _decayed_score(is_new: Number, before: Number, uses: Number, halved: Number) -> Number:
    if is_new:
        return float_bits(np.log2(np.float64(uses)) + halved)
    more = uint_as_float(before) - halved
    if more < _LOG_MAX:  # The user may have set any score; above this bound, further uses change nothing.
        return float_bits(np.log2(2.0**more + np.float64(uses)) + halved)
    return before


@cpu
def _score_uses_cpu(
    begin: Number, end: Number, place_U: Array, is_new_U: Array, table_U: Array, id_U: Array, uses_U: Array,
    kind_T: Array, param_T: Array, given_T: Array, writes_T: Array, score_P: Array, word_PX: Array, first: Number,
    lookup: Number, step: Number, second: Number, epoch: Number,
) -> None:  # fmt: skip
    score_at, upper_at, step_at, second_at = first, first + 1, first + 2, first + 3
    for u in range(begin, end):
        ahead = natural(place_U[min(u + _AHEAD, end - 1)])
        prefetch(score_P, ahead)
        prefetch_row(word_PX, ahead, first, 4)
        t, p = natural(table_U[u]), natural(place_U[u])
        kind, is_new, uses = kind_T[t], is_new_U[u], np.uint64(uses_U[u])
        score = score_P[p]
        if kind == GIVEN:
            if is_new or writes_T[t]:
                score = given_T[t]
        elif kind == DECAYED:
            score = _decayed_score(is_new, score, uses, np.float64(step) / param_T[t])
        elif kind == MIXED:
            draw = hash_key(np.int64(t), id_U[u], lookup)
            score = _mixed_score(is_new, score, np.uint64(param_T[t]), step, draw)
        else:
            score = _count_score(kind, is_new, score, uses, lookup, step, epoch)
        score_P[p] = score
        word_PX[p, score_at], word_PX[p, upper_at] = score & _LOW, score >> np.uint64(32)
        word_PX[p, step_at], word_PX[p, second_at] = min(step, _LOW), second


@cpu
def _hashes_cpu(begin: Number, end: Number, table_N: Array, id_N: Array, salt: Number, hash_N: Array) -> None:
    for n in range(begin, end):
        hash_N[n] = hash_key(np.int64(table_N[n]), id_N[n], salt)


def score_uses(
    place_U: np.ndarray, is_new_U: np.ndarray, table_U: np.ndarray, id_U: np.ndarray, uses_U: np.ndarray,
    rules: ScoreRules, score_P: np.ndarray, word_PX: np.ndarray, first: int, *, lookup: int, step: int, second: int,
    epoch: int, threads: Threads,
) -> None:  # fmt: skip
    """Update the scores of the rows that a lookup uses, and write the score and the time of this use into their
    records.

    Args:
        place_U: int64, index of each key's score and record.
        is_new_U: bool, whether the key's row is new and has no score yet.
        table_U, id_U, uses_U: int32, int64, int64: the distinct keys, and how often the lookup uses each.
        score_P: uint64, scores.
        word_PX: uint32, records of rows. Words `first` to `first + 3` are the score, lower half first, and the step and
            the second of the last use.
        lookup, step, second, epoch: current numbers; they never decrease.
    """
    threads.run(
        _score_uses_cpu, len(place_U), place_U, is_new_U, table_U, id_U, uses_U, *rules, score_P, word_PX,
        first, np.uint64(lookup), np.uint64(step), np.uint32(second), np.uint64(epoch), share_min=_SHARE_MIN,
    )  # fmt: skip


def ties_of(table_N: np.ndarray, id_N: np.ndarray, *, threads: Threads) -> np.ndarray:
    """Number of each key that orders rows with equal scores: uint64 [N], a function of the key alone."""
    return hashes_of(table_N, id_N, int(_TIE_SALT), threads=threads)


def hashes_of(table_N: np.ndarray, id_N: np.ndarray, salt: int, *, threads: Threads) -> np.ndarray:
    """Hash of each key with `salt`, uint64 [N]: pseudo-random numbers."""
    hash_N = np.empty(len(id_N), np.uint64)
    threads.run(_hashes_cpu, len(id_N), table_N, id_N, np.uint64(salt), hash_N, share_min=_SHARE_MIN)
    return hash_N
