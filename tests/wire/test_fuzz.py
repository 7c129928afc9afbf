"""Hostile bytes against a parameter server: no crash, no hang, bounded memory, others undisturbed.

Three depths: strangers before the handshake; peers that have the key and send broken frames; peers that
send well-formed messages with absurd contents. The seed is fixed; a failure can be repeated.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hostile import KEY, LIMIT_S, SEED, Target, attack_as_strangers, mutate, send_then_hang_up
from hostile import broken as broken_bytes
from orders import amount
from server_probe import ping

import stratagem
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._wire import frames, messages
from stratagem._wire.channel import Channel
from stratagem._wire.connecting import connect
from stratagem._wire.frames import FrameParser, Limits
from stratagem.errors import ConnectionLost, DeadlineExceeded, ProtocolError

pytestmark = [pytest.mark.process, pytest.mark.scaled]

# Frames of each kind. In a long run more than 100,000 go over sockets, and 100,000 through the parser.
STRANGERS = amount(2_000)
BROKEN_FRAMES = amount(3_000)
ABSURD_MESSAGES = amount(95_000)
PARSED_FRAMES = amount(100_000)

SERVER = """
import logging, sys, torch
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.server.server_options import ServerOptions
from stratagem._wire.frames import Limits
from stratagem._wire.handshake import ClusterKey
torch.set_num_threads(1)
logging.disable(logging.CRITICAL)
options = ServerOptions(memory_limit_bytes=1 << 24, limits=Limits(frame_bytes=1 << 24))
server = ParameterServer("127.0.0.1:0", key=ClusterKey.from_text(sys.argv[1]), options=options)
print(server.address, flush=True)
server.serve()
"""


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """The server under attack."""
    target = Target(SERVER)
    try:
        yield target
    finally:
        target.close()


@pytest.fixture
def honest(target: Target) -> Iterator[PsClient]:
    """An ordinary client; after the attack it must find everything as it was."""
    who = Membership(session="honest", task="/job:chief/task:0", is_owner=True, key=KEY)
    w = ShardLocation(0, 1, (4,), torch.float32)
    with PsClient([("/job:ps/task:0", target.address)], who) as client:
        client.create(w, "w", value=torch.arange(4.0))
        yield client
        assert client.read([w])[0][0].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert ping(client) is not None
    target.check_unharmed()


# Before the handshake.


def test_strangers_at_a_parameter_server(target: Target, honest: PsClient) -> None:
    """None gets in; the honest client is served all the while."""
    attack_as_strangers(target.address, STRANGERS)
    assert honest.versions(0) == {1: 1}


# With the key.

_T = messages.TensorRef("float32", (4,), 0)
_I = messages.TensorRef("int64", (2,), 1)
_R = messages.TensorRef("float32", (2, 3), 2)
BUFFERS = [bytes(16), bytes(16), bytes(24)]
_ORIGIN = messages.WriteId("fuzz", 1, 1)
_GROUP = messages.GroupSpec((1,), {"lr": 0.1, "momentum": 0.5})
SEEDS: list[messages.Message] = [
    messages.Ping(),
    messages.AskStats(),
    messages.OpenSession(session="fuzz", lease_s=1.0),
    messages.JoinSession(session="fuzz"),
    messages.CreateVariables(
        variables=(
            messages.VariableSpec(
                1, "a", "float32", (4,), (messages.InitOp("normal", (0.0, 1.0), 3),)
            ),
            messages.VariableSpec(2, "b", "float32", (5, 3)),
        )
    ),
    messages.CreateOptimizer(optimizer=1, class_name="torch.optim.SGD", groups=(_GROUP,)),
    messages.Locate(variables=(1, 2)),
    messages.Read(items=(messages.ReadItem(1), messages.ReadItem(2, 1, 2))),
    messages.Read(items=(messages.ReadItem(2, ids=_I),)),
    messages.AskVersions(variables=(1,)),
    messages.Write(
        origin=_ORIGIN, operations=messages.encode_operations((messages.Assign(1, "add", _T),))
    ),
    messages.Write(
        origin=_ORIGIN, operations=messages.encode_operations((messages.Scatter(2, "mul", _I, _R),))
    ),
    messages.Write(
        origin=_ORIGIN, operations=messages.encode_operations((messages.AssignRows(2, 1, _R),))
    ),
    messages.Write(
        origin=_ORIGIN,
        operations=messages.encode_operations(
            (messages.Push(1, (messages.GradientRef(1, _T),), {0: {"lr": 0.5}}),)
        ),
    ),
    messages.OpenSegments(segments=(messages.SegmentRef(1, 1, 3, 8192, bytes(16)),)),
    messages.Fence(worker="w", incarnation=1),
    messages.FinishedClosures(ranges=((1, 3), (5, 6))),
    messages.ReadState(optimizer=1),
    messages.WriteState(optimizer=1, items=(messages.StateItem(1, "momentum_buffer", _T),)),
    messages.DeleteVariables(variables=(9,)),
]
TEXTS = ["", "float64", "bool", "int64", "no such", "sub", "set", "max", "uniform", "normal"]


def absurd(random_: random.Random) -> bytes:
    """A frame with a well-formed message of absurd contents."""
    seed = random_.choice(SEEDS)
    plain = msgspec.msgpack.decode(messages.encode(seed))
    data = msgspec.msgpack.encode(mutate(plain, random_))
    try:
        messages.decode(data)
    except ProtocolError:
        data = messages.encode(seed)
    if random_.random() < 0.1:
        old = random_.choice([b"\xa7float32", b"\xa3add", b"\xa6normal", b"\xa1w"])
        text = random_.choice(TEXTS).encode()
        data = data.replace(old, bytes([0xA0 + len(text)]) + text, 1)
    call = random_.randrange(1, 2**32)
    return b"".join(frames.encode_frame(frames.REQUEST, call, data, BUFFERS))


def broken(random_: random.Random) -> bytes:
    return broken_bytes(absurd(random_), random_)


class Attacker:
    """A peer that has the key, connects again whenever it is cut, and reads what it is sent."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: Channel | None = None
        self.cut = 0

    def connected(self) -> Channel:
        if self._channel is None:
            channel = connect(self._address, key=KEY, timeout_s=LIMIT_S)
            channel.request(messages.Hello(task="fuzz"), timeout_s=LIMIT_S)
            opening = messages.OpenSession(session="fuzz", lease_s=1.0)
            channel.request(opening, timeout_s=LIMIT_S)
            self._channel = channel
        return self._channel

    def send(self, data: bytes) -> None:
        """Sends bytes as they are, then waits until the server has dealt with them.

        A last, honest request is answered after them, unless the server cut the connection.
        """
        channel = self.connected()
        channel._stream.append_bytes(data)
        try:
            channel.request(messages.Ping(), timeout_s=LIMIT_S)
        except DeadlineExceeded:
            raise
        except (ConnectionLost, ProtocolError):
            self.cut += 1
            channel.close()
            self._channel = None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def test_absurd_messages_at_a_parameter_server(target: Target, honest: PsClient) -> None:
    """Every one is answered or ends its connection; none ends the server or its memory."""
    random_ = random.Random(SEED)
    attacker = Attacker(target.address)
    try:
        pool = [absurd(random_) for _ in range(ABSURD_MESSAGES // 10)]
        for _ in range(ABSURD_MESSAGES // 50):
            attacker.send(b"".join(random_.choices(pool, k=50)))
    finally:
        attacker.close()
    assert attacker.cut < ABSURD_MESSAGES // 100  # most messages of most batches were looked at
    assert honest.versions(0) == {1: 1}


def test_broken_frames_at_a_parameter_server(target: Target, honest: PsClient) -> None:
    """Each on a connection of its own, then the end: the server always hangs up, too."""
    random_ = random.Random(SEED + 1)
    for _ in range(BROKEN_FRAMES):
        attacker = Attacker(target.address)
        with attacker.connected() as channel:
            send_then_hang_up(channel._stream.sock, broken(random_))
    assert honest.versions(0) == {1: 1}


def test_half_frames_are_waited_for_without_harm(target: Target, honest: PsClient) -> None:
    """Connections left in the middle of a frame cost a socket each, and go when they are closed."""
    random_ = random.Random(SEED + 2)
    attackers = []
    for _ in range(amount(100)):
        channel = connect(target.address, key=KEY, timeout_s=LIMIT_S)
        channel.request(messages.Hello(task="half"), timeout_s=LIMIT_S)
        data = absurd(random_)
        channel._stream.sock.send(data[: random_.randrange(len(data))])
        attackers.append(channel)
    assert honest.versions(0) == {1: 1}
    for channel in attackers:
        channel.close()


def test_the_parser_and_decoder_alone() -> None:
    """The same frames without a socket, cut at random: only ProtocolError ever comes out."""
    random_ = random.Random(SEED + 3)
    parser = FrameParser(Limits(message_bytes=1 << 16, frame_bytes=1 << 20))
    good = bad = 0
    for _ in range(PARSED_FRAMES // 20):
        data = absurd(random_)
        for _ in range(20):
            mutated = bytearray(data)
            mutated[random_.randrange(len(mutated))] ^= 1 << random_.randrange(8)
            try:
                position = 0
                while position < len(mutated):
                    space = parser.space()
                    count = min(len(space), len(mutated) - position, random_.randrange(1, 400))
                    space[:count] = mutated[position : position + count]
                    parser.advance(count)
                    position += count
                    while (frame := parser.next_frame()) is not None:
                        messages.decode(frame.data)
                        good += 1
            except ProtocolError:
                bad += 1
                parser = FrameParser(Limits(message_bytes=1 << 16, frame_bytes=1 << 20))
    assert good > PARSED_FRAMES // 100
    assert bad > PARSED_FRAMES // 100


@pytest.mark.slow
def test_every_listening_socket_is_attacked() -> None:
    """A new one must be added here, and to the attacks."""
    source = Path(stratagem.__file__).parent
    made = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in ("Listener", "create_server"):
                    made.add(path.relative_to(source).as_posix())
    assert made == {
        "_wire/listener.py",  # the one place where sockets are made to listen
        "_ps/server/loop.py",  # attacked here
        "_cluster/worker/worker.py",  # attacked in test_fuzz_worker.py
        "_commands/doctor.py",  # listens to itself, for a moment
        "_monitor/web_server.py",  # Bokeh's; strangers are tried in tests/monitor/test_web_server.py
    }
