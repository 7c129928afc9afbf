"""CRC-32C, the checksum of TFRecord files, vectorised with NumPy.

A CRC is linear: the register after n bytes is the exclusive-or of one contribution per byte, which depends only on
the byte and its distance from the end. All contributions are looked up in a table at once.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

_POLYNOMIAL = np.uint32(0x82F63B78)  # Castagnoli, bits reversed
_CHUNK = 1024  # a table of 1024 × 256 words is 1 MB: it stays in cache


@functools.cache
def _tables() -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return ``tables[d, b]``: the contribution of byte b at distance d from the end."""
    base = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        base = np.where(base & 1, (base >> 1) ^ _POLYNOMIAL, base >> 1).astype(np.uint32)
    tables = np.empty((_CHUNK, 256), dtype=np.uint32)
    tables[0] = base
    for distance in range(1, _CHUNK):
        tables[distance] = (tables[distance - 1] >> 8) ^ base[tables[distance - 1] & 0xFF]
    return tables


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of bytes.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    tables = _tables()
    values = np.frombuffer(data, dtype=np.uint8)
    register = 0xFFFFFFFF
    for start in range(0, len(values), _CHUNK):
        chunk = values[start : start + _CHUNK].copy()
        size = len(chunk)
        if size < 4:  # the register does not fit into the chunk: byte by byte
            for byte in chunk.tolist():
                register = int(tables[0, (register ^ byte) & 0xFF]) ^ (register >> 8)
            continue
        # The register acts like four more bytes on top of the chunk's first ones.
        chunk[:4] ^= np.frombuffer(register.to_bytes(4, "little"), dtype=np.uint8)
        distances = np.arange(size - 1, -1, -1)
        register = int(np.bitwise_xor.reduce(tables[distances, chunk]))
    return register ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """Return the checksum as TFRecord files store it: rotated by 15 bits, plus a constant."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
