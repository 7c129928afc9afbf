"""`tf.train.Example` protocol buffers, decoded for many records at once with NumPy.

An Example is a map from names to lists of one of three kinds::

    Example  { 1: Features }            Feature   { 1: BytesList | 2: FloatList | 3: Int64List }
    Features { 1: entry, 1: entry, … }  BytesList { 1: bytes, 1: bytes, … }
    entry    { 1: name, 2: Feature }    FloatList, Int64List { 1: packed numbers }

All records advance together, one map entry per step. `locate` finds the lists of the wanted names; `integers`, `floats`
and `byte_strings` decode them. Every function takes a buffer with `PADDING` unused bytes at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from stratagem._data.hashing import hash_bytes, hash_pieces, masked_words

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]

PADDING = 16

# A tag is the number of a field and the type of its value: 2 is "length and bytes".
_FIRST, _SECOND = 0x0A, 0x12

KINDS = {0x0A: "bytes", 0x12: "float", 0x1A: "int64"}
"""Kinds of lists by the tag in a Feature."""


@final
class BadExample(ValueError):
    """Record that is not an Example, or a feature of another kind than expected.

    Attributes:
        record: number of the record among those decoded.
    """

    def __init__(self, record: int, reason: str) -> None:
        super().__init__(reason)
        self.record = record


@dataclass(frozen=True)
class LocatedBytes:
    """Places of one feature's list in every record; kind 0 where the feature is missing."""

    begins: Places
    stops: Places
    kinds: Bytes

    def refuse_kind(self, name: str, kind: str) -> None:
        """Raise if the list of a feature has another kind; an empty list fits every kind."""
        tag = next(tag for tag, each in KINDS.items() if each == kind)
        filled = (self.kinds != 0) & (self.begins < self.stops)
        wrong = np.flatnonzero(filled & (self.kinds != tag))
        if len(wrong):
            found = KINDS.get(int(self.kinds[wrong[0]]), "unknown")
            raise BadExample(int(wrong[0]), f"feature {name!r} is a list of {found}, not of {kind}")


class Lists(NamedTuple):
    """Values of a feature in all records, and how many each record has."""

    values: Any
    counts: Places


def _refuse(wrong: NDArray[np.bool_], rows: Places, reason: str) -> None:
    if wrong.any():
        raise BadExample(int(rows[np.argmax(wrong)]), reason)


def _varints(data: Bytes, places: Places) -> tuple[Places, Places]:
    """Return the numbers at places, and the places after them."""
    byte = data[places]
    if not (byte & 0x80).any():
        return byte.astype(np.int64), places + 1
    value = (byte & 0x7F).astype(np.uint64)
    after = places + 1
    more = byte >= 0x80
    for shift in range(7, 70, 7):
        if not more.any():
            break
        byte = np.where(more, data[np.where(more, after, 0)], 0)
        value |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        after = after + more
        more = byte >= 0x80
    return value.view(np.int64), after


def _words(data: Bytes, kind: str) -> NDArray[Any]:
    """Return the number that begins at each byte."""
    size = np.dtype(kind).itemsize
    return np.ndarray(len(data) - size + 1, dtype=kind, buffer=data, strides=(1,))


def _features(data: Bytes, starts: Places, stops: Places) -> tuple[Places, Places]:
    """Return where the map of every record begins and ends."""
    rows = np.arange(len(starts))
    filled = starts < stops
    _refuse(filled & (data[starts] != _FIRST), rows, "not an Example")
    size, begin = _varints(data, starts + 1)
    begin = np.where(filled, begin, starts)
    stop = np.where(filled, begin + size, stops)
    _refuse((stop != stops) | (size < 0) & filled, rows, "not an Example: lengths do not match")
    return begin, stop


def _next_entry(
    data: Bytes, rows: Places, place: Places, stop: Places
) -> tuple[Places, Places, Places]:
    """Return place and length of the name of the map entry at `place`, and the end of the entry."""
    wrong = data[place] != _FIRST
    size, place = _varints(data, place + 1)
    entry_stop = place + size
    wrong |= (size < 2) | (entry_stop > stop) | (data[place] != _FIRST)
    _refuse(wrong, rows, "not an Example: a map entry is broken")
    length, name = _varints(data, place + 1)
    _refuse((length < 0) | (name + length > entry_stop), rows, "not an Example: a name is broken")
    return name, length, entry_stop


def locate(
    data: Bytes, starts: Places, stops: Places, names: Sequence[str]
) -> Mapping[str, LocatedBytes]:
    """Return the places of the lists of some features.

    Raises:
        BadExample: a record is not an Example.
    """
    wanted = [name.encode() for name in names]
    hashes = _name_hashes(wanted)
    order = np.argsort(hashes)
    shape = (len(names), len(starts))
    begins, ends = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    kinds = np.zeros(shape, np.uint8)
    rows = np.arange(len(starts))
    words = _words(data, "<u8")
    place, stop = _features(data, starts, stops)
    while True:
        alive = place < stop
        if not alive.all():
            rows, place, stop = rows[alive], place[alive], stop[alive]
        if not len(rows):
            break
        regular = _regular_entry(data, words, place, stop)
        if regular is not None:  # the usual case
            text, begin, end, kind = regular
            place = end
            if text in wanted:
                own = wanted.index(text)
                at = slice(None) if len(rows) == len(starts) else rows
                begins[own, at], ends[own, at], kinds[own, at] = begin, end, kind
            continue
        name, length, place = _next_entry(data, rows, place, stop)
        which = _identify(data, name, length, hashes, order)
        begin, end, kinds_found = _feature(data, rows, name + length, place)
        known = which >= 0
        where = which[known], rows[known]
        begins[where], ends[where], kinds[where] = begin[known], end[known], kinds_found[known]
    return {name: LocatedBytes(begins[i], ends[i], kinds[i]) for i, name in enumerate(names)}


def _regular_entry(
    data: Bytes, words: NDArray[np.uint64], place: Places, stop: Places
) -> tuple[bytes, Places, Places, int] | None:
    """Return name, list and kind of the map entries at `place`, if all are like the first one.

    That is: the same name and kind, and no length above 127. Eight bytes are compared at a time::

        0A entry-length 0A name-length name 12 feature-length kind list-length list
    """
    first = data[place[0] : place[0] + 128 + 8].tolist()
    name_length = first[3]
    header = name_length + 8
    if max(first[1], name_length) > 127 or header > len(first) - 8:
        return None
    template = np.zeros(-(-header // 8) * 8, dtype=np.uint8)
    mask = np.full(len(template), 0xFF, dtype=np.uint8)
    template[:header] = first[:header]
    mask[header:] = 0
    lengths_at = (1, name_length + 5, name_length + 7)
    mask[list(lengths_at)] = 0
    template[mask == 0] = 0
    found: list[NDArray[np.uint64]] = []
    for number, (expected, bits) in enumerate(
        zip(template.view("<u8"), mask.view("<u8"), strict=True)
    ):
        word = words[place + 8 * number] if number else words[place]
        if ((word & bits) != expected).any():
            return None
        found.append(word)
    if first[name_length + 4] != _SECOND or first[0] != _FIRST or first[2] != _FIRST:
        return None

    def length(at: int) -> Places:
        shifted = found[at // 8] >> np.uint64(8 * (at % 8))
        return (shifted & np.uint64(0xFF)).view(np.int64)

    entry = length(1)
    wrong = (entry > 127) | (length(lengths_at[1]) != entry - (name_length + 4))
    wrong |= length(lengths_at[2]) != entry - (name_length + 6)
    end = place + (entry + 2)
    if wrong.any() or (end > stop).any():
        return None
    name = bytes(first[4 : 4 + name_length])
    return name, place + header, end, first[name_length + 6]


def _name_hashes(names: Sequence[bytes]) -> NDArray[np.uint64]:
    offsets = np.cumsum([0, *map(len, names)])
    return hash_bytes(b"".join(names), offsets)


def _identify(
    data: Bytes,
    places: Places,
    lengths: Places,
    hashes: NDArray[np.uint64],
    order: NDArray[np.intp],
) -> Places:
    """Return the number of each name among the wanted ones, or -1."""
    found = hash_pieces(data, places, lengths)
    at = np.minimum(np.searchsorted(hashes, found, sorter=order), len(order) - 1)
    which = order[at].astype(np.int64)
    which[hashes[which] != found] = -1
    return which


def _feature(
    data: Bytes, rows: Places, place: Places, stop: Places
) -> tuple[Places, Places, Bytes]:
    """Return begin, end and kind of the lists in the map entries' values; kind 0 for an empty value."""
    filled = place < stop
    _refuse(filled & (data[place] != _SECOND), rows, "not an Example: a map entry has no value")
    size, place = _varints(data, place + 1)
    filled &= size > 0
    _refuse(filled & (place + size != stop), rows, "not an Example: a feature is broken")
    kind = np.where(filled, data[np.where(filled, place, 0)], 0).astype(np.uint8)
    size, begin = _varints(data, np.where(filled, place + 1, 0))
    end = np.where(filled, begin + size, begin)
    _refuse(filled & ((size < 0) | (end != stop)), rows, "not an Example: a list is broken")
    return np.where(filled, begin, 0), np.where(filled, end, 0), kind


def _flat(begins: Places, counts: Places, stride: int = 1) -> Places:
    """Return ``begins[i] + stride * k`` for all k below ``counts[i]``, row after row."""
    before = np.cumsum(counts) - counts
    numbers = np.arange(int(counts.sum())) - np.repeat(before, counts)
    return np.repeat(begins, counts) + numbers * stride


def _packed(data: Bytes, place: LocatedBytes, name: str) -> tuple[Places, Places]:
    """Return begin and length of the packed numbers of each record."""
    filled = place.begins < place.stops
    size, inside = _varints(data, np.where(filled, place.begins + 1, 0))
    wrong = (data[place.begins] != _FIRST) | (inside + size != place.stops)
    _refuse(filled & wrong, np.arange(len(filled)), f"feature {name!r} is broken, or not packed")
    return np.where(filled, inside, 0), np.where(filled, size, 0)


def floats(data: Bytes, place: LocatedBytes, name: str) -> Lists:
    """Return the float32 values of a feature."""
    heads = _words(data, "<u2")[place.begins]
    if (place.stops - place.begins == 6).all() and (heads == (_FIRST | 4 << 8)).all():
        values = _words(data, "<f4")[place.begins + 2]  # the usual case: one value
        return Lists(values, np.ones(len(values), np.int64))
    begins, lengths = _packed(data, place, name)
    _refuse(lengths % 4 != 0, np.arange(len(begins)), f"feature {name!r} is broken")
    return Lists(_words(data, "<f4")[_flat(begins, lengths // 4, 4)], lengths // 4)


def _single_integers(data: Bytes, place: LocatedBytes) -> NDArray[np.int64] | None:
    """Return the values of a feature that has one number of at most 8 bytes in every record."""
    head = _words(data, "<u2")[place.begins].astype(np.int64)  # tag, then the length
    lengths = place.stops - place.begins - 2
    if (head != (_FIRST | lengths << 8)).any() or not (0 < lengths.min() <= lengths.max() <= 8):
        return None
    word = masked_words(data, place.begins + 2, lengths)
    last = np.uint64(0x80) << (8 * (lengths - 1)).astype(np.uint64)
    # All bytes but the last have their highest bit set.
    if ((word & _HIGH) != (_HIGH & (last - np.uint64(1)))).any():
        return None
    word &= ~_HIGH
    for low, high, shift in _JOINS:  # seven bits a byte: join neighbours, then pairs, then fours
        word = (word & low) | ((word & high) >> shift)
    return word.view(np.int64)


_HIGH = np.uint64(0x8080808080808080)
_JOINS = tuple(
    (np.uint64(low), np.uint64(high), np.uint64(shift))
    for low, high, shift in (
        (0x007F007F007F007F, 0x7F007F007F007F00, 1),
        (0x00003FFF00003FFF, 0x3FFF00003FFF0000, 2),
        (0x000000000FFFFFFF, 0x0FFFFFFF00000000, 4),
    )
)


def integers(data: Bytes, place: LocatedBytes, name: str) -> Lists:
    """Return the int64 values of a feature."""
    single = _single_integers(data, place)
    if single is not None:
        return Lists(single, np.ones(len(single), np.int64))
    begins, lengths = _packed(data, place, name)
    places = _flat(begins, lengths)
    is_last = data[places] < 0x80  # the last byte of a number
    ends = np.flatnonzero(is_last)
    starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
    rows = np.repeat(np.arange(len(begins)), lengths)
    counts = np.bincount(rows[ends], minlength=len(begins))
    open_ended = np.zeros(len(begins), dtype=np.bool_)
    filled = lengths > 0
    open_ended[filled] = ~is_last[np.cumsum(lengths)[filled] - 1]
    reason = f"feature {name!r} is broken: a number does not end"
    _refuse(open_ended, np.arange(len(begins)), reason)
    return Lists(_varints(data, places[starts])[0], counts)


def byte_strings(data: Bytes, place: LocatedBytes, name: str) -> Lists:
    """Return the byte strings of a feature as their places and lengths in `data`."""
    begins, stops = place.begins, place.stops
    rows = np.arange(len(begins))
    found: list[tuple[Places, Places, Places]] = []  # rows, places, lengths
    while (alive := begins < stops).any():
        rows, begins, stops = rows[alive], begins[alive], stops[alive]
        wrong = data[begins] != _FIRST
        lengths, inside = _varints(data, begins + 1)
        _refuse(
            wrong | (lengths < 0) | (inside + lengths > stops), rows, f"feature {name!r} is broken"
        )
        found.append((rows, inside, lengths))
        begins = inside + lengths
    empty = np.zeros(0, np.int64)
    number, inside, lengths = (
        np.concatenate([part[i] for part in found] or [empty]) for i in range(3)
    )
    order = np.argsort(number, kind="stable")
    counts = np.bincount(number, minlength=len(place.begins))
    return Lists((inside[order], lengths[order]), counts)


def copy_pieces(data: Bytes, places: Places, lengths: Places) -> tuple[Bytes, Places]:
    """Return pieces of a buffer side by side, and their offsets."""
    offsets = np.zeros(len(places) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return data[_flat(places, lengths)], offsets


DECODERS = {"bytes": byte_strings, "float": floats, "int64": integers}
"""Decoders by kind."""
