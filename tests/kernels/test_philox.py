"""Philox against the known answers of its authors and against plain Python."""

import numpy as np
import pytest

from oneemb.kernels.philox import philox

# From the kat_vectors file of the authors' library Random123: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_python(counter, key, rounds=10):
    """The paper's rounds in whole numbers of any size."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (p1 >> 32) ^ x1 ^ k0, p1 % 2**32, (p0 >> 32) ^ x3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


def words(counter, key):
    found = philox(*(np.uint64(c) for c in counter), np.uint64(key[0] | key[1] << 32))
    return tuple(int(word) for word in found)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers_of_the_authors(counter, key, result):
    assert words(counter, key) == result
    assert philox_python(counter, key) == result


def test_random_counters_agree_with_plain_python():
    rng = np.random.default_rng(0)
    for _ in range(500):
        counter, key = rng.integers(0, 2**32, 4).tolist(), rng.integers(0, 2**32, 2).tolist()
        assert words(counter, key) == philox_python(counter, key)


def test_counter_words_count_by_their_low_32_bits():
    assert words((2**32 + 5, 7, 2**40, 0), (1, 2)) == words((5, 7, 0, 0), (1, 2))


@pytest.mark.parametrize("rounds", [9, 11])
def test_the_known_answers_notice_a_wrong_number_of_rounds(rounds):
    assert all(philox_python(counter, key, rounds) != result for counter, key, result in KNOWN)
