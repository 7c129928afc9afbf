"""The proof of the cluster key, as a conversation between two pure objects."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem._wire import handshake
from stratagem._wire.handshake import (
    PROTOCOL_VERSION,
    ClientHandshake,
    ClusterKey,
    ServerHandshake,
)
from stratagem.errors import AuthenticationError, ProtocolError

KEY = ClusterKey(b"the key of this cluster")
OTHER = ClusterKey(b"the key of another cluster")


def converse(client: ClientHandshake, server: ServerHandshake) -> None:
    """Runs a handshake to its end, or to the first error."""
    assert client.feed(server.feed(client.feed(server.feed(client.opening())))) == b""


@pytest.mark.parametrize("key", [None, KEY])
def test_both_sides_finish_with_the_same_key(key: ClusterKey | None) -> None:
    """With a key, and with none on both sides."""
    client, server = ClientHandshake(key, who="s"), ServerHandshake(key, who="c")
    converse(client, server)
    assert client.done
    assert server.done


def test_wrong_key_is_refused_by_the_server_and_the_client_is_told() -> None:
    """The server raises; its farewell makes the client raise too."""
    client, server = ClientHandshake(OTHER, who="s"), ServerHandshake(KEY, who="c")
    proof = client.feed(server.feed(client.opening()))
    with pytest.raises(AuthenticationError, match="did not prove"):
        server.feed(proof)
    assert not server.done
    with pytest.raises(AuthenticationError, match="refused this process"):
        client.feed(server.farewell)


def test_server_that_only_pretends_is_found_out_by_the_client() -> None:
    """A verdict without the key's proof is worth nothing."""
    client, server = ClientHandshake(KEY, who="s"), ServerHandshake(KEY, who="c")
    verdict = bytearray(server.feed(client.feed(server.feed(client.opening()))))
    verdict[-1] ^= 1
    with pytest.raises(AuthenticationError, match="not a task of this cluster"):
        client.feed(bytes(verdict))
    assert not client.done


@pytest.mark.parametrize(("mine", "theirs"), [(KEY, None), (None, KEY)])
def test_key_on_one_side_only_says_so(mine: ClusterKey | None, theirs: ClusterKey | None) -> None:
    """The commonest mistake gets its own sentence, on both sides."""
    client, server = ClientHandshake(mine, who="s"), ServerHandshake(theirs, who="c")
    with pytest.raises(AuthenticationError, match="STRATAGEM_CLUSTER_KEY"):
        server.feed(client.opening())
    with pytest.raises(AuthenticationError, match="STRATAGEM_CLUSTER_KEY"):
        client.feed(server.farewell)


def test_the_page_about_the_protocol_is_about_this_version() -> None:
    """Whoever raises the version looks at the page that describes it."""
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert f"Protocol version: **{PROTOCOL_VERSION}**" in page


def test_other_message_types_are_refused_like_another_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Releases whose messages differ do not talk to each other; the error names both."""
    client = ClientHandshake(KEY, who="s")
    monkeypatch.setattr(handshake, "MESSAGES_DIGEST", 0x0BADCAFE)
    server = ServerHandshake(KEY, who="c")
    with pytest.raises(
        ProtocolError, match=r"version 3-[0-9a-f]{8}, this process speaks 3-0badcafe"
    ):
        server.feed(client.opening())


def test_other_version_is_named_on_both_sides() -> None:
    """Both versions stand in the error."""
    client = ClientHandshake(KEY, who="s", version=1)
    server = ServerHandshake(KEY, who="c", version=2)
    with pytest.raises(ProtocolError, match=r"version 1, this process speaks 2"):
        server.feed(client.opening())
    with pytest.raises(ProtocolError, match=r"version 2, this process speaks 1"):
        client.feed(server.farewell)


def test_a_recorded_proof_is_rejected() -> None:
    """Replaying a client's bytes fails, because the server's random number is new."""
    client, server = ClientHandshake(KEY, who="s"), ServerHandshake(KEY, who="c")
    opening = client.opening()
    proof = client.feed(server.feed(opening))
    server.feed(proof)
    again = ServerHandshake(KEY, who="thief")
    again.feed(opening)
    with pytest.raises(AuthenticationError):
        again.feed(proof)


def test_a_proof_reflected_to_its_sender_is_refused() -> None:
    """A peer without the key cannot answer a challenge with the challenger's own proof."""
    client, server = ClientHandshake(KEY, who="s"), ServerHandshake(KEY, who="c")
    proof = client.feed(server.feed(client.opening()))
    with pytest.raises(AuthenticationError):
        client.feed(b"\x01" + bytes(7) + proof)


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=48, max_size=48), st.binary(min_size=32, max_size=32))
def test_random_bytes_never_get_in(greeting: bytes, proof: bytes) -> None:
    """Whatever a stranger sends, the only outcome is one of our two errors."""
    for first in (greeting, ClientHandshake(KEY, who="s").opening()):
        server = ServerHandshake(KEY, who="c")
        with pytest.raises((ProtocolError, AuthenticationError)):
            server.feed(first)
            server.feed(proof)
        assert not server.done


def test_short_keys_are_refused_and_keys_do_not_show() -> None:
    """A key that can be guessed is no key; a key in a log is none either."""
    with pytest.raises(ValueError, match="at least 16"):
        ClusterKey(b"short")
    assert "the key" not in repr(KEY)
    assert ClusterKey.from_text(f" {KEY.text()}\n").text() == KEY.text()
    assert ClusterKey.random().text() != ClusterKey.random().text()
