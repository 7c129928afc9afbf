"""CRC-32C, the checksum of TFRecord files, vectorised with NumPy.

A CRC is linear: the register after n bytes is the exclusive-or of one contribution per byte, which depends only on
the byte and its distance from the end. All contributions are looked up in a table at once.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = np.uint32(0x82F63B78)  # Castagnoli, bits reversed
_CHUNK = 1024  # a table of 1024 × 256 words is 1 MB: it stays in cache


@functools.cache
def _tables() -> NDArray[np.uint32]:
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


def masked_crc32c_many(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """Return the checksums of many pieces of a buffer, as TFRecord files store them.

    All pieces advance together, eight bytes at a time, aligned at their ends. `data` needs eight more bytes in front
    of the first piece.
    """
    words = np.ndarray(len(data) - 7, dtype="<u8", buffer=data, strides=(1,))
    steps = -(-lengths // 8)
    # Longest first: the pieces that have begun are a prefix.
    order = np.argsort(-steps, kind="stable")
    ends, counts = (starts + lengths)[order], steps[order]
    # Bytes in front of a piece's first byte.
    unused = (8 * steps - lengths)[order].astype(np.uint64)
    begun = np.searchsorted(
        -counts, -np.arange(counts[0] if len(counts) else 0, 0, -1), side="right"
    )
    register = np.zeros(len(order), dtype=np.uint64)
    tables = _word_tables()
    fresh = 0
    for step, active in enumerate(begun.tolist()):
        left = int(counts[0]) - step
        word = words[ends[:active] - 8 * left]
        if active > fresh:  # clear the bytes that belong to the piece before
            shift = 8 * unused[fresh:active]
            word[fresh:] = (word[fresh:] >> shift) << shift
            fresh = active
        word ^= register[:active]
        parts = word.view("<u2").reshape(active, 4).T.astype(np.intp)
        found = tables[0][parts[0]]
        for place in (1, 2, 3):
            found ^= tables[place][parts[place]]
        register[:active] = found
    crc = np.empty(len(order), dtype=np.uint32)
    crc[order] = register
    sizes, which = np.unique(lengths, return_inverse=True)
    # The start value of the register, moved through as many zeros, and the final inversion.
    zeros = np.array([_of_zeros(size) for size in sizes.tolist()], dtype=np.uint32)
    crc ^= zeros[which]
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


@functools.lru_cache(4096)
def _of_zeros(size: int) -> int:
    return crc32c(bytes(size))


@functools.cache
def _word_tables() -> list[NDArray[np.uint32]]:
    """Return, for each two bytes of a word of eight, their contribution to the register after the word."""
    tables = _tables()
    low, high = np.arange(1 << 16) & 0xFF, np.arange(1 << 16) >> 8
    return [tables[7 - 2 * m, low] ^ tables[6 - 2 * m, high] for m in range(4)]
