"""Hashing of categories: text, bytes and integers to bucket numbers, vectorised.

The hash is a fixed function of the bytes (or of the integer) and the seed, so that it is the same in every process,
run and version. Text is hashed by its UTF-8 bytes, eight at a time: every step works on the next eight bytes of all
strings at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stratagem._data.ragged import Ragged

Hashes = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
WORD = 8
"""Bytes hashed at a time."""


def hash_bucket(values: Any, num_buckets: int, *, seed: int = 0) -> Any:
    """Return a bucket number in ``range(num_buckets)`` for each category.

    The numbers are the same in every process and every run.

    Args:
        values: an array or list of text or bytes, an integer tensor or array, a pyarrow array or a `Ragged`.
        num_buckets: number of buckets.
        seed: another seed gives other numbers, for example for a second hash of the same categories.

    Returns:
        An int64 tensor of the same shape; a `Ragged` for a `Ragged`.

    Example:
        >>> import stratagem as sg
        >>> sg.data.hash_bucket(["berlin", "lima", "berlin"], 1000)
        tensor([671, 150, 671])
        >>> sg.data.hash_bucket(torch.tensor([7, 8]), 1000)
        tensor([997,  13])
    """
    if num_buckets < 1:
        raise ValueError(f"num_buckets={num_buckets!r} is out of range: expected an integer >= 1")
    if isinstance(values, Ragged):
        return Ragged(hash_bucket(values.values, num_buckets, seed=seed), values.offsets)
    return to_buckets(_hashes(values, seed), num_buckets)


def to_buckets(hashes: Hashes, num_buckets: int) -> torch.Tensor:
    """Return the buckets of 64-bit hashes."""
    return torch.from_numpy((hashes % np.uint64(num_buckets)).astype(np.int64))


def _hashes(values: Any, seed: int) -> Hashes:
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and isinstance(values, arrow.Array | arrow.ChunkedArray):
        from stratagem._data.arrow_columns import hash_column

        return hash_column(values, seed)
    if isinstance(values, torch.Tensor):
        values = values.numpy()
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        values = np.array(values, dtype=object) if _is_text(values) else np.asarray(values)
    if not isinstance(values, np.ndarray):
        values = np.array(values, dtype=object if isinstance(values, str | bytes) else None)
    if values.dtype.kind in "iub":
        return hash_integers(values, seed)
    if values.dtype.kind not in "OUS":
        raise TypeError(
            f"hash_bucket() takes text, bytes or integers, got {values.dtype}. "
            "Convert the values to one of these first."
        )
    flat = [item.encode() if isinstance(item, str) else item for item in values.ravel().tolist()]
    bad = [item for item in flat if not isinstance(item, bytes)]
    if bad:
        raise TypeError(f"hash_bucket() takes text, bytes or integers, got {bad[0]!r:.60}")
    offsets = np.zeros(len(flat) + 1, dtype=np.int64)
    np.cumsum([len(item) for item in flat], out=offsets[1:])
    return hash_bytes(b"".join(flat), offsets, seed).reshape(values.shape)


def _is_text(values: Sequence[Any]) -> bool:
    return len(values) > 0 and isinstance(values[0], str | bytes)


def _mix(hashes: Hashes) -> Hashes:
    """Spread the bits (the finalizer of splitmix64)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * _FIRST
    hashes = (hashes ^ (hashes >> np.uint64(27))) * _SECOND
    return hashes ^ (hashes >> np.uint64(31))


def hash_integers(values: NDArray[Any], seed: int = 0) -> Hashes:
    """Return the 64-bit hashes of integers."""
    return _mix(values.astype(np.int64).view(np.uint64) * _STEP + _seed_word(seed))


def _seed_word(seed: int) -> np.uint64:
    return np.uint64((seed * int(_STEP) + int(_FIRST)) & ((1 << 64) - 1))


def hash_bytes(data: Any, offsets: NDArray[np.int64], seed: int = 0) -> Hashes:
    """Return the 64-bit hashes of byte strings.

    Args:
        data: buffer with the bytes of all strings.
        offsets: string i is ``data[offsets[i]:offsets[i + 1]]``.
        seed: seed of the hash.
    """
    size = int(offsets[-1])
    padded = np.zeros(size + WORD, dtype=np.uint8)
    padded[:size] = np.frombuffer(data, dtype=np.uint8, count=size)
    return hash_pieces(padded, offsets[:-1], np.diff(offsets), seed)


def hash_pieces(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64], seed: int = 0
) -> Hashes:
    """Return the 64-bit hashes of pieces of a buffer with `WORD` unused bytes at its end."""
    hashes = _mix(lengths.astype(np.uint64) * _STEP + _seed_word(seed))
    for begin in range(0, int(lengths.max(initial=0)), WORD):
        longer = lengths > begin
        rows = slice(None) if longer.all() else np.flatnonzero(longer)
        found = masked_words(data, starts[rows] + begin, lengths[rows] - begin)
        hashes[rows] = _mix((hashes[rows] ^ found) + _STEP)
    return hashes


def masked_words(
    data: NDArray[np.uint8], places: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Hashes:
    """Return up to eight bytes from each place on, as one number; bytes beyond the length are zero."""
    words = np.ndarray(len(data) - WORD + 1, dtype="<u8", buffer=data, strides=(1,))
    unused = (64 - 8 * np.minimum(lengths, WORD)).astype(np.uint64)
    found: Hashes = words[places] & (~np.uint64(0) >> unused)
    return found
