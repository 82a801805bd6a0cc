"""XXH64 checksums of 64-bit words, and of strings.  B blocks, N rows or strings, X words or bytes of all of them.

Reference: Collet, xxHash fast digest algorithm, version 0.1.1. Rows and blocks are multiples of 8 bytes long, so their
loops leave out XXH64's steps for a rest of less than 8 bytes; the result is the same. Words are read in the machine's
byte order, which must be little-endian like that of the files.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import lanes_mixed

Buffer = bytes | bytearray | memoryview | np.ndarray
"""Contiguous bytes, or numbers of any kind."""

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)


@rule
def _rotate(x: Number, bits: Number) -> Number:
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@rule
def _round(lane: Number, word: Number) -> Number:
    return _rotate(lane + word * _P2, 31) * _P1


@rule
def _merge(sum: Number, lane: Number) -> Number:
    return (sum ^ _round(np.uint64(0), lane)) * _P1 + _P4


@rule
def sum_words(word_X: Array, begin: Number, end: Number, seed: Number) -> Number:
    """XXH64 of the bytes of word_X[begin:end]."""
    seed = np.uint64(seed)
    x = begin
    if end - begin >= 4:
        x = end - (end - begin) % 4
        lane_4 = (seed + _P1 + _P2, seed + _P2, seed, seed - _P1)
        a, b, c, d = lanes_mixed(word_X, np.uint64(begin), np.uint64(x), lane_4, _P2, np.uint64(31), _P1)
        sum = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        sum = _merge(_merge(_merge(_merge(sum, a), b), c), d)
    else:
        sum = seed + _P5
    sum += np.uint64(8 * (end - begin))
    while x < end:
        sum = _rotate(sum ^ _round(np.uint64(0), word_X[x]), 27) * _P1 + _P4
        x += 1
    return _avalanche(sum)


@rule
def _avalanche(sum: Number) -> Number:
    sum = (sum ^ (sum >> np.uint64(33))) * _P2
    sum = (sum ^ (sum >> np.uint64(29))) * _P3
    return sum ^ (sum >> np.uint64(32))


@rule
def _little_endian(byte_X: Array, x: Number, size: Number) -> Number:
    """byte_X[x : x + size] read as one little-endian number."""
    word = np.uint64(0)
    for k in range(size):
        word |= np.uint64(byte_X[x + k]) << np.uint64(8 * k)
    return word


@rule
def sum_bytes(byte_X: Array, begin: Number, end: Number, seed: Number) -> Number:
    """XXH64 of byte_X[begin:end], of any length."""
    seed = np.uint64(seed)
    x = begin
    if end - begin >= 32:
        a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while x + 32 <= end:
            a = _round(a, _little_endian(byte_X, x, 8))
            b = _round(b, _little_endian(byte_X, x + 8, 8))
            c = _round(c, _little_endian(byte_X, x + 16, 8))
            d = _round(d, _little_endian(byte_X, x + 24, 8))
            x += 32
        sum = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        sum = _merge(_merge(_merge(_merge(sum, a), b), c), d)
    else:
        sum = seed + _P5
    sum += np.uint64(end - begin)
    while x + 8 <= end:
        sum = _rotate(sum ^ _round(np.uint64(0), _little_endian(byte_X, x, 8)), 27) * _P1 + _P4
        x += 8
    if x + 4 <= end:
        sum = _rotate(sum ^ (_little_endian(byte_X, x, 4) * _P1), 23) * _P2 + _P3
        x += 4
    while x < end:
        sum = _rotate(sum ^ (np.uint64(byte_X[x]) * _P5), 11) * _P1
        x += 1
    return _avalanche(sum)


@rule
def low_half(sum: Number) -> Number:
    """The low 32 bits of a checksum."""
    return np.uint32(sum & np.uint64(0xFFFFFFFF))


@rule
def block_sum(word_X: Array, b: Number, block_words: Number) -> Number:
    """The low half of the XXH64 of block b, with seed 0."""
    return low_half(sum_words(word_X, b * block_words, (b + 1) * block_words, 0))


@cpu
def _xxh64(word_X: Array, seed: Number) -> Number:
    return sum_words(word_X, 0, len(word_X), seed)


@cpu
def blocks_sum(begin: Number, end: Number, word_X: Array, block_words: Number, sum_B: Array) -> None:
    """sum_B[b] = the low half of the XXH64 of block b, with seed 0."""
    for b in range(begin, end):
        sum_B[b] = block_sum(word_X, b, block_words)


@cpu
def rows_sum(
    begin: Number, end: Number, word_X: Array, stride: Number, words: Number, seed_N: Array, sum_N: Array
) -> None:
    """sum_N[n] = the XXH64, with seed_N[n], of the first `words` words of row n; a row is `stride` words long."""
    for n in range(begin, end):
        sum_N[n] = sum_words(word_X, n * stride, n * stride + words, seed_N[n])


@cpu
def strings_sum(begin: Number, end: Number, byte_X: Array, offset_N1: Array, seed: Number, sum_N: Array) -> None:
    """sum_N[n] = the XXH64 of byte_X[offset_N1[n]:offset_N1[n + 1]]."""
    for n in range(begin, end):
        sum_N[n] = sum_bytes(byte_X, offset_N1[n], offset_N1[n + 1], seed)


def xxh64(data: Buffer, seed: int = 0) -> int:
    """The XXH64 of contiguous bytes. The number of bytes must be a multiple of 8."""
    byte_N = np.frombuffer(data, np.uint8)
    if byte_N.ctypes.data % 8:
        byte_N = byte_N.copy()
    return int(_xxh64(byte_N.view(np.uint64), np.uint64(seed)))


@cpu
def _xxh64_words_cpu(word_N: Array, seed: Number, sum_N: Array) -> None:
    for n in range(len(word_N)):
        sum_N[n] = sum_words(word_N, n, n + 1, seed)


def xxh64_words(word_N: np.ndarray, seed: int) -> np.ndarray:
    """The XXH64 of the 8 bytes of each word: uint64 [N]. OneFlow puts a key into path `xxh64_words(key, 1) % paths`; it
    first widens a 32-bit key with zeros, `key.view(np.uint32).astype(np.uint64)`."""
    sum_N = np.empty(len(word_N), np.uint64)
    _xxh64_words_cpu(np.ascontiguousarray(word_N).view(np.uint64), np.uint64(seed), sum_N)
    return sum_N
