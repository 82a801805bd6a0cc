"""CRC-32C (Castagnoli) of bytes, which TensorFlow's checkpoints have as checksums.  X bytes.

Eight bytes are taken at a time by eight tables; the table k has the checksums of bytes that k zero bytes follow.

Reference: Kounavis, Berry. A Systematic Approach to Building High Performance Software-Based CRC Generators. ISCC 2005.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.checksum import Buffer
from oneemb.kernels.jit import Number, cpu

_POLYNOMIAL = np.uint32(0x82F63B78)


def _tables() -> np.ndarray:
    table_8_256 = np.zeros((8, 256), np.uint32)
    table_8_256[0] = np.arange(256)
    for _ in range(8):
        table_8_256[0] = (table_8_256[0] >> 1) ^ (table_8_256[0] & 1) * _POLYNOMIAL
    for k in range(1, 8):
        table_8_256[k] = (table_8_256[k - 1] >> 8) ^ table_8_256[0][table_8_256[k - 1] & 0xFF]
    return table_8_256


_TABLES = _tables()


@cpu
def _crc32c(byte_X: Array, table_8_256: Array, crc: Number) -> Number:
    x, end = 0, len(byte_X) - len(byte_X) % 8
    while x < end:
        low = crc ^ np.uint32(
            np.uint32(byte_X[x])
            | np.uint32(byte_X[x + 1]) << np.uint32(8)
            | np.uint32(byte_X[x + 2]) << np.uint32(16)
            | np.uint32(byte_X[x + 3]) << np.uint32(24)
        )
        crc = (
            table_8_256[7, low & np.uint32(0xFF)]
            ^ table_8_256[6, (low >> np.uint32(8)) & np.uint32(0xFF)]
            ^ table_8_256[5, (low >> np.uint32(16)) & np.uint32(0xFF)]
            ^ table_8_256[4, low >> np.uint32(24)]
            ^ table_8_256[3, byte_X[x + 4]]
            ^ table_8_256[2, byte_X[x + 5]]
            ^ table_8_256[1, byte_X[x + 6]]
            ^ table_8_256[0, byte_X[x + 7]]
        )
        x += 8
    while x < len(byte_X):
        crc = (crc >> np.uint32(8)) ^ table_8_256[0, (crc ^ byte_X[x]) & np.uint32(0xFF)]
        x += 1
    return crc


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC-32C of contiguous bytes. `crc`: checksum of the bytes before `data`."""
    byte_X = np.frombuffer(data, np.uint8)
    return int(_crc32c(byte_X, _TABLES, np.uint32(crc ^ 0xFFFFFFFF))) ^ 0xFFFFFFFF
