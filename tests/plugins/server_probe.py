"""Ask the parameter servers of a client for signs of life and statistics, on connections of their own."""

from __future__ import annotations

from stratagem._ps.client.ps_client import PsClient
from stratagem._wire import messages
from stratagem._wire.connecting import connect
from stratagem._wire.messages import Message


def _ask(client: PsClient, server: int, question: Message) -> Message:
    task, address = client.addresses()[server]
    with connect(address, key=client._membership.key, peer=task, timeout_s=60.0) as channel:
        channel.request(messages.Hello(purpose="control"), timeout_s=60.0)
        return channel.request(question, timeout_s=60.0).message


def ping(client: PsClient, server: int = 0) -> messages.Pong:
    """The server's answer, which it gives also while it works on a long step."""
    answer = _ask(client, server, messages.Ping())
    assert isinstance(answer, messages.Pong)
    return answer


def stats(client: PsClient, server: int = 0) -> dict[str, object]:
    """Numbers about the server, at most half a second old."""
    answer = _ask(client, server, messages.AskStats())
    assert isinstance(answer, messages.Stats)
    return dict(answer.facts)
