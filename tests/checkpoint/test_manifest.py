"""The manifest's text: it comes back as it was, and no damage goes unnoticed."""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem._ps.blocks.manifest import (
    Manifest,
    StoredBlock,
    StoredFile,
    StoredTensor,
    from_text,
    to_text,
)
from stratagem.errors import CheckpointCorrupt

MANIFEST = Manifest(
    step=120,
    serial=7,
    identity="0123abcd",
    created=1.5,
    tensors={
        "model.weight": StoredTensor("float32", (5, 3)),
        "model.tied": StoredTensor("float32", (5, 3), same_as="model.weight"),
        "optimizer.step": StoredTensor("float32", (), per_shard=True),
        "ä.ö": StoredTensor("bfloat16", ()),
    },
    blocks=(
        StoredBlock("model.weight", "__0_0.distcp", 640, 0, 3, 17),
        StoredBlock("model.weight", "__1_0.distcp", 640, 0, 2, 18, 64, 19),
    ),
    files={
        "__0_0.distcp": StoredFile(1000, 1),
        "__1_0.distcp": StoredFile(2000, 2, {"cut": 17}),
    },
    parent="step_00000100",
    parent_identity="fedc",
    final=True,
    metrics={"auc": 0.5},
)


def test_a_manifest_comes_back_as_it_was() -> None:
    assert from_text(to_text(MANIFEST), "x") == MANIFEST


@settings(deadline=None)
@given(st.data())
def test_one_changed_bit_anywhere_is_noticed(data: st.DataObject) -> None:
    text = bytearray(to_text(MANIFEST).encode())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointCorrupt, match=r"dir/manifest\.json is damaged") as caught:
        from_text(text.decode(errors="replace"), "dir/manifest.json")
    assert caught.value.path == "dir/manifest.json"


def test_every_truncation_is_noticed() -> None:
    text = to_text(MANIFEST)
    for length in range(len(text)):
        with pytest.raises(CheckpointCorrupt):
            from_text(text[:length], "manifest.json")


def test_a_newer_format_is_refused_with_the_remedy() -> None:
    whole = json.loads(to_text(MANIFEST))["manifest"]
    body = json.dumps({**whole, "format": 2})
    text = f'{{"crc32": "{zlib.crc32(body.encode()):08x}", "manifest": {body}}}\n'
    with pytest.raises(CheckpointCorrupt, match=r"format 2.*Upgrade"):
        from_text(text, "manifest.json")


def test_the_text_is_ordinary_json() -> None:
    found = json.loads(to_text(MANIFEST))["manifest"]
    assert found["format"] == 1
    assert found["tensors"]["model.weight"]["shape"] == [5, 3]
