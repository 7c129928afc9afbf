"""Hostile bytes against a worker: no crash, no hang, bounded memory, the next coordinator is served.

The same depths and numbers as at a parameter server (`test_fuzz.py`). Who has the key may run code on a
worker, so everything is sent short of a valid function: no payload begins as a pickle does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
from hostile import (
    KEY,
    LIMIT_S,
    SEED,
    Target,
    attack_as_strangers,
    broken,
    mutate,
    send_then_hang_up,
)
from orders import amount
from plain_strategy import PlainSetup

from stratagem._snapshots import Snapshot
from stratagem._wire import frames, messages
from stratagem._wire.channel import Channel
from stratagem._wire.codec import Outgoing, pack, unpack
from stratagem._wire.connecting import connect
from stratagem.errors import ConnectionLost, ProtocolError, RemoteError

# As for test_fuzz.py.
pytestmark = [pytest.mark.process, pytest.mark.scaled]

# More than 100,000 together in a long run.
STRANGERS = amount(2_000)
BROKEN_FRAMES = amount(3_000)
FIRST_MESSAGES = amount(1_000)
HALF_FRAMES = amount(50)
ABSURD_MESSAGES = amount(96_000)
PER_LIFE = ABSURD_MESSAGES // 96

WORKER = """
import logging, sys
from stratagem._cluster.worker.worker import Worker
from stratagem._wire.handshake import ClusterKey
logging.disable(logging.CRITICAL)
worker = Worker("127.0.0.1:0", index=0, key=ClusterKey.from_text(sys.argv[1]))
print(worker.address, flush=True)
worker.serve()
"""

NO_PICKLE = b"\xff"
"""No pickle begins so: what follows is never run."""

_T = messages.TensorRef("float32", (4,), 0)
_PACKED = messages.Packed(
    payload=NO_PICKLE + bytes(15),
    tensors=(messages.PackedTensor(_T, False, False),),
    raw=(1,),
)
_EMPTY = messages.Packed(payload=b"")
_ELSEWHERE = messages.Packed(payload=b"", body=1)
BUFFERS = [bytes(16), NO_PICKLE * 16]
DIGEST = bytes(range(16))


def opening(setup: messages.Packed) -> messages.OpenWorker:
    return messages.OpenWorker(
        coordinator="fuzz",
        worker=0,
        incarnation=1,
        setup=setup,
        heartbeat_s=0.5,
        heartbeat_limit_s=30.0,
    )


# What a coordinator may say, and what it may not: the latter ends the life.
EXPECTED: list[messages.Message] = [
    messages.Beat(),
    messages.Beat(metrics=Snapshot(counters={"a": 1}, gauges={"b": 1.5})),
    messages.Define(value=_PACKED, function=DIGEST),
    messages.Define(value=_ELSEWHERE, function=DIGEST),
    messages.Define(value=_PACKED, token=_EMPTY),
    messages.Update(updates=_PACKED),
    messages.Run(closure=1, function=DIGEST),
    messages.Run(closure=2, function=DIGEST, arguments=_PACKED, exactly_once=True),
    messages.Run(closure=3, function=bytes(16), resource=4),
    messages.Recall(closures=(1, 2, 3)),
    messages.Recall(closures=()),
    messages.Forget(functions=(DIGEST,), resources=(4,)),
]
UNEXPECTED: list[messages.Message] = [
    opening(_PACKED),
    messages.Hello(task="fuzz"),
    messages.Ping(),
    messages.AskStats(),
    messages.WorkerOpened(process="x"),
    messages.Finished(closure=1, value=_PACKED),
    messages.LogLine(level=10, logger="x", text="y"),
    messages.Write(
        origin=messages.WriteId("fuzz", 1, 1),
        operations=messages.encode_operations((messages.Assign(1, "add", _T),)),
    ),
]


def absurd(seed: messages.Message, random_: random.Random) -> bytes:
    """A frame with a well-formed message of absurd contents."""
    plain = mutate(msgspec.msgpack.decode(messages.encode(seed)), random_)
    for name in ("value", "token", "updates", "arguments", "setup"):
        if plain.get(name) and plain[name]["payload"]:
            plain[name]["payload"] = NO_PICKLE + plain[name]["payload"][1:]
    data = msgspec.msgpack.encode(plain)
    try:
        messages.decode(data)
    except ProtocolError:
        data = messages.encode(seed)
    kind = random_.choice([frames.NOTIFY, frames.NOTIFY, frames.REQUEST])
    return b"".join(frames.encode_frame(kind, random_.randrange(2**32), data, BUFFERS))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """The worker under attack."""
    target = Target(WORKER)
    try:
        yield target
    finally:
        target.close()


@pytest.fixture(autouse=True)
def served_afterwards(target: Target) -> Iterator[None]:
    """After the attack an honest coordinator opens a life and has a function run."""
    yield
    outgoing = Outgoing()
    with open_life(target.address) as channel:
        function = pack(lambda: 6 * 7, outgoing)
        channel.notify(messages.Define(value=function, function=DIGEST), outgoing.buffers)
        channel.notify(messages.Run(closure=1, function=DIGEST))
        frame = next_report(channel)
        assert isinstance(frame.message, messages.Finished)
        assert frame.message.value is not None
        assert unpack(frame.message.value, frame) == 42
        channel.notify(messages.Leave())
        read_to_end(channel)
    target.check_unharmed()


def open_life(address: str) -> Channel:
    channel = connect(address, key=KEY, timeout_s=LIMIT_S)
    outgoing = Outgoing()
    opened = channel.request(
        opening(pack(PlainSetup(), outgoing)), outgoing.buffers, timeout_s=LIMIT_S
    )
    assert isinstance(opened.message, messages.WorkerOpened)
    return channel


def next_report(channel: Channel) -> messages.Frame:
    """The next message that says more than that the worker lives."""
    frame = channel.receive(timeout_s=LIMIT_S)
    while frame is not None and isinstance(frame.message, messages.Beat):
        frame = channel.receive(timeout_s=LIMIT_S)
    assert frame is not None
    return frame


def read_to_end(channel: Channel) -> dict[str, int]:
    """Reads until the worker hangs up; counts what it said, by kind."""
    heard: dict[str, int] = {}
    try:
        while (frame := channel.receive(timeout_s=LIMIT_S)) is not None:
            name = type(frame.message).__name__
            heard[name] = heard.get(name, 0) + 1
    except ConnectionLost:
        return heard
    raise AssertionError("the worker neither speaks nor hangs up")


def test_strangers_at_a_worker(target: Target) -> None:
    """None gets in; who only asks is answered."""
    attack_as_strangers(target.address, STRANGERS)
    with connect(target.address, key=KEY, timeout_s=LIMIT_S) as channel:
        stats = channel.request(messages.AskStats(), timeout_s=LIMIT_S).message
        assert isinstance(stats, messages.Stats)
        assert stats.facts["state"] == "idle"


def test_broken_frames_at_a_worker(target: Target) -> None:
    """Each on a connection of its own, then the end: it always hangs up, too."""
    random_ = random.Random(SEED + 4)
    for _ in range(BROKEN_FRAMES):
        seed = random_.choice(EXPECTED + UNEXPECTED)
        with connect(target.address, key=KEY, timeout_s=LIMIT_S) as channel:
            send_then_hang_up(channel._stream.sock, broken(absurd(seed, random_), random_))


def test_absurd_first_messages_at_a_worker(target: Target) -> None:
    """Who has the key, but opens no life."""
    random_ = random.Random(SEED + 5)
    for _ in range(FIRST_MESSAGES):
        seed = random_.choice([opening(_PACKED), opening(_ELSEWHERE), *UNEXPECTED])
        with connect(target.address, key=KEY, timeout_s=LIMIT_S) as channel:
            send_then_hang_up(channel._stream.sock, absurd(seed, random_))


def test_absurd_messages_at_a_worker(target: Target) -> None:
    """Lives of a thousand messages each; every one is looked at, the last one may end the life."""
    random_ = random.Random(SEED + 6)
    pool = [absurd(random_.choice(EXPECTED), random_) for _ in range(ABSURD_MESSAGES // 10)]
    answers: dict[str, int] = {}
    for life in range(ABSURD_MESSAGES // PER_LIFE):
        batch = random_.choices(pool, k=PER_LIFE)
        end = messages.Leave() if life % 2 else random_.choice(UNEXPECTED)
        batch.append(b"".join(frames.encode_frame(frames.NOTIFY, 0, messages.encode(end), [])))
        with open_life(target.address) as channel:
            channel._stream.append_bytes(b"".join(batch))
            try:
                channel.notify(messages.Beat(), timeout_s=LIMIT_S)
            except ConnectionLost:
                pass  # it had read the last of them, and hung up
            for name, count in read_to_end(channel).items():
                answers[name] = answers.get(name, 0) + count
    # Every Recall is answered; closures fail, unless the session ends before they start; nothing else was made of them.
    assert set(answers) <= {"Beat", "Failed", "Returned"}
    assert answers["Returned"] > ABSURD_MESSAGES // 10


def test_a_closure_of_an_unknown_function_fails(target: Target) -> None:
    """The worker reports it and goes on."""
    with open_life(target.address) as channel:
        for closure in (1, 2):
            channel.notify(messages.Run(closure=closure, function=DIGEST))
            report = next_report(channel).message
            assert isinstance(report, messages.Failed)
            assert report.closure == closure
        channel.notify(messages.Leave())
        read_to_end(channel)


def test_half_frames_are_waited_for_without_harm(target: Target) -> None:
    """A life that stops in the middle of a message ends with its connection."""
    random_ = random.Random(SEED + 7)
    for _ in range(HALF_FRAMES):
        data = absurd(random_.choice(EXPECTED), random_)
        with open_life(target.address) as channel:
            send_then_hang_up(channel._stream.sock, data[: random_.randrange(1, len(data))])


def test_other_coordinators_are_refused_while_a_session_is_open(target: Target) -> None:
    """Coordinators and hostile peers alike; the life goes on."""
    random_ = random.Random(SEED + 8)
    with open_life(target.address) as channel:
        attack_as_strangers(target.address, amount(200))
        for _ in range(3):
            with connect(target.address, key=KEY, timeout_s=LIMIT_S) as other:
                frame = broken(absurd(random_.choice(UNEXPECTED), random_), random_)
                send_then_hang_up(other._stream.sock, frame)
        with connect(target.address, key=KEY, timeout_s=LIMIT_S) as other:
            with pytest.raises(RemoteError, match="serves another coordinator"):
                other.request(opening(_EMPTY), timeout_s=LIMIT_S)
        channel.notify(messages.Recall(closures=(7,)))
        assert next_report(channel).message == messages.Returned(closures=())
        channel.notify(messages.Leave())
        read_to_end(channel)
