"""XXH64 against the published vectors and against a plain transcription of the algorithm's description."""

import numpy as np
import pytest

from oneemb.kernels import jit, jit_code
from oneemb.kernels.checksum import blocks_sum, rows_sum, xxh64

P1, P2, P3, P4, P5 = (
    11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261,
)  # fmt: skip
MASK = 2**64 - 1


def reference(data, seed):
    def rotate(x, n):
        return (x << n | x >> 64 - n) & MASK

    def step(lane, word):
        return rotate((lane + word * P2) & MASK, 31) * P1 & MASK

    words = [int.from_bytes(data[n : n + 8], "little") for n in range(0, len(data), 8)]
    stripes = len(words) // 4
    if stripes:
        lanes = [(seed + P1 + P2) & MASK, (seed + P2) & MASK, seed, (seed - P1) & MASK]
        for n in range(stripes):
            lanes = [step(lane, words[4 * n + k]) for k, lane in enumerate(lanes)]
        sum = (rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18)) & MASK
        for lane in lanes:
            sum = ((sum ^ step(0, lane)) * P1 + P4) & MASK
    else:
        sum = (seed + P5) & MASK
    sum = (sum + len(data)) & MASK
    for word in words[4 * stripes :]:
        sum = (rotate(sum ^ step(0, word), 27) * P1 + P4) & MASK
    sum = (sum ^ sum >> 33) * P2 & MASK
    sum = (sum ^ sum >> 29) * P3 & MASK
    return sum ^ sum >> 32


@pytest.mark.parametrize("size", [*range(0, 200, 8), 512, 4096, 4104])
@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_equals_the_description(size, seed):
    data = np.random.default_rng(size).bytes(size)
    assert xxh64(data, seed) == reference(data, seed)


def test_equals_the_published_value_of_the_empty_string():
    assert xxh64(b"") == 0xEF46DB3751D8E999


def test_memory_that_does_not_begin_at_a_word_is_read_too():
    data = np.arange(257, dtype=np.uint8)
    assert xxh64(data[1:]) == xxh64(data[1:].tobytes())


@pytest.mark.parametrize("block_words", [64, 512])
def test_blocks_have_the_low_half_of_their_own_checksum(block_words):
    word_X = np.random.default_rng(0).integers(0, 2**64, 8 * block_words, dtype=np.uint64)
    sum_B = np.zeros(8, np.uint32)
    blocks_sum(2, 8, word_X, block_words, sum_B)
    expected = [xxh64(word_X[b * block_words : (b + 1) * block_words]) & 0xFFFFFFFF for b in range(8)]
    assert sum_B.tolist() == [0, 0, *expected[2:]]


@pytest.mark.parametrize(("stride", "words"), [(1, 1), (4, 3), (9, 8), (37, 36)])
def test_rows_have_checksums_of_their_own_with_seeds_of_their_own(stride, words):
    rng = np.random.default_rng(stride)
    word_X, seed_N = (rng.integers(0, 2**64, size, dtype=np.uint64) for size in (6 * stride, 6))
    sum_N = np.zeros(6, np.uint64)
    rows_sum(1, 5, word_X, stride, words, seed_N, sum_N)
    expected = [reference(word_X[n * stride :][:words].tobytes(), int(seed_N[n])) for n in range(1, 5)]
    assert sum_N.tolist() == [0, *expected, 0]


def lanes(word_X, begin, end, before, bits, after):
    lane_4 = (word_X[0], word_X[1], word_X[2], word_X[3])
    return jit_code.lanes_mixed(word_X, np.uint64(begin), np.uint64(end), lane_4, before, bits, after)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("end", [5, 9, 101])
def test_lanes_are_the_same_in_one_register_and_in_four(tmp_path, monkeypatch, wide, end):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jit_code, "_WIDE_PRODUCTS", wide)
    loop = jit.cpu(lanes)
    word_X = np.random.default_rng(end).integers(0, 2**64, 128, dtype=np.uint64)
    got = loop(word_X, 5, end, np.uint64(P2), np.uint64(31), np.uint64(P1))
    expected = word_X[:4].tolist()
    for x in range(5, end, 4):
        mixed = [(lane + int(word_X[x + i]) * P2) & MASK for i, lane in enumerate(expected)]
        expected = [((m << 31 | m >> 33) & MASK) * P1 & MASK for m in mixed]
    assert list(got) == expected
    assert ("<4 x i64>" in next(iter(loop.inspect_llvm().values()))) == wide
