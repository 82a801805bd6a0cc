"""XXH64 of single words against known values and against the library of xxHash's author."""

import numpy as np
import pytest
import xxhash

from oneemb.kernels.checksum import xxh64_words

ENDS = [0, 1, -1, np.iinfo(np.int64).min, np.iinfo(np.int64).max, 2**32, -(2**32), 0x0102030405060708]


def library(key, seed):
    return xxhash.xxh64_intdigest((key % 2**64).to_bytes(8, "little"), seed)


def python(key, seed, last_shift=32):
    """The algorithm for 8 bytes in whole numbers of any size."""
    p1, p2, p3, p4, p5 = (
        0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
    )  # fmt: skip
    mask = 2**64 - 1

    def rotated(x, bits):
        return (x << bits | x >> (64 - bits)) & mask

    lane = rotated((key % 2**64) * p2 & mask, 31) * p1 & mask
    h = (rotated((seed + p5 + 8 & mask) ^ lane, 27) * p1 + p4) & mask
    h = (h ^ h >> 33) * p2 & mask
    h = (h ^ h >> 29) * p3 & mask
    return h ^ h >> last_shift


@pytest.mark.parametrize("seed", [0, 1, 2, 2**64 - 1])
def test_words_agree_with_the_library_and_with_plain_python(seed):
    key_N = np.concatenate([np.array(ENDS), np.random.default_rng(seed % 97).integers(-(2**63), 2**63, 1000)])
    expected = [library(key, seed) for key in key_N.tolist()]
    assert xxh64_words(key_N, seed).tolist() == expected
    assert [python(key, seed) for key in key_N.tolist()] == expected


def test_a_known_value():
    # XXH64 of eight zero bytes with seed 0, as other implementations have it among their tests.
    assert xxh64_words(np.zeros(1, np.uint64), 0).tolist() == [0x34C96ACDCADB1BBB]


def test_words_that_do_not_lie_next_to_each_other_and_none_at_all():
    key_N = np.arange(20)[::3]
    assert xxh64_words(key_N, 1).tolist() == [library(key, 1) for key in key_N.tolist()]
    assert xxh64_words(key_N[:0], 1).tolist() == []


def test_the_comparison_notices_a_wrong_shift():
    assert all(python(key, 1, last_shift=31) != library(key, 1) for key in ENDS)
