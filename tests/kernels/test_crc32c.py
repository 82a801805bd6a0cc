"""CRC-32C against the values of RFC 3720 and against one division bit by bit."""

import numpy as np
import pytest

from oneemb.kernels.crc32c import crc32c


def reference(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (crc & 1) * 0x82F63B78
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"", 0),
    ],
)
def test_equals_the_published_values(data, crc):
    assert crc32c(data) == crc


@pytest.mark.parametrize("size", [*range(20), 255, 4096, 4099])
def test_equals_the_division_of_bits_in_one_piece_and_in_two(size):
    data = np.random.default_rng(size).bytes(size)
    assert crc32c(data) == reference(data)
    assert crc32c(data[size // 3 :], crc32c(data[: size // 3])) == reference(data)
