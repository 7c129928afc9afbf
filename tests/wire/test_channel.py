"""Channels over real sockets: replies find their callers, deadlines hold, ends are noticed."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from waiting import wait_until

from stratagem._wire import connecting, frames, messages, stream
from stratagem._wire.channel import Channel
from stratagem._wire.codec import Outgoing, tensor_from
from stratagem._wire.connecting import connect, split_address
from stratagem._wire.failures import failure_from
from stratagem._wire.frames import Limits
from stratagem._wire.listener import Listener
from stratagem._wire.messages import Fence, Frame, JobKept, Ok, Ping, TensorRef, Values
from stratagem.errors import ConnectionLost, DeadlineExceeded, ProtocolError

LIMIT_S = 120.0


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """A client's and a server's end of one connection."""
    with Listener("127.0.0.1:0") as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, timeout_s=LIMIT_S)
        with connect(listener.address, timeout_s=LIMIT_S) as client:
            server = accepted.result(LIMIT_S)
            assert server is not None
            with server:
                yield client, server


def serving(channel: Channel, answer: Callable[[Frame], None]) -> threading.Thread:
    """Answers requests in a thread until the other side hangs up."""

    def run() -> None:
        while True:
            try:
                frame = channel.receive(timeout_s=LIMIT_S)
            except ConnectionLost:
                return
            assert frame is not None
            answer(frame)

    thread = threading.Thread(target=run, name="test-server")
    thread.start()
    return thread


def test_requests_get_their_replies_in_any_order(pair: tuple[Channel, Channel]) -> None:
    """Several outstanding requests; the server answers them backwards."""
    client, server = pair
    calls = [client.begin(Ping()) for _ in range(5)]
    received = [server.receive(timeout_s=LIMIT_S) for _ in range(5)]
    for index, frame in reversed(list(enumerate(received))):
        assert frame is not None
        server.reply(frame, JobKept(serial=index))
    found = [client.collect(call, timeout_s=LIMIT_S).message for call in calls]
    assert found == [JobKept(serial=index) for index in range(5)]


def test_many_threads_share_one_channel(pair: tuple[Channel, Channel]) -> None:
    """Every thread gets the reply to its own request."""
    client, server = pair

    def answer(frame: Frame) -> None:
        assert isinstance(frame.message, Fence)
        server.reply(frame, JobKept(serial=frame.message.incarnation))

    thread = serving(server, answer)

    def ask(number: int) -> bool:
        message = Fence(worker="w", incarnation=number)
        return client.request(message, timeout_s=LIMIT_S).message == JobKept(serial=number)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(400)))
    client.close()
    thread.join(LIMIT_S)


def test_both_sides_may_send_more_than_the_sockets_hold(pair: tuple[Channel, Channel]) -> None:
    """Two peers sending 64 MiB to each other at the same time do not wait for each other forever."""
    big = torch.arange(1 << 24, dtype=torch.int32)

    def exchange(channel: Channel) -> bool:
        outgoing = Outgoing()
        ref = outgoing.add(big)
        channel.notify(Values(values=(ref,), versions=()), outgoing.buffers, timeout_s=LIMIT_S)
        frame = channel.receive(timeout_s=LIMIT_S)
        assert frame is not None
        assert isinstance(frame.message, Values)
        return torch.equal(tensor_from(frame.message.values[0], frame), big)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, pair)) == [True, True]


def test_many_buffers_in_one_frame(pair: tuple[Channel, Channel]) -> None:
    """More pieces than one system call takes; empty ones among them."""
    client, server = pair
    outgoing = Outgoing()
    tensors = [torch.full((index % 7,), index, dtype=torch.float32) for index in range(3000)]
    refs = tuple(outgoing.add(tensor) for tensor in tensors)
    client.notify(Values(values=refs, versions=()), outgoing.buffers)
    frame = server.receive(timeout_s=LIMIT_S)
    assert frame is not None
    assert isinstance(frame.message, Values)
    back = [tensor_from(ref, frame) for ref in frame.message.values]
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))


def test_a_batch_of_notifies_arrives_in_order(pair: tuple[Channel, Channel]) -> None:
    """As few system calls as possible, same order."""
    client, server = pair
    client.notify_all((Fence(worker="w", incarnation=index), ()) for index in range(1000))
    for index in range(1000):
        frame = server.receive(timeout_s=LIMIT_S)
        assert frame is not None
        assert frame.message == Fence(worker="w", incarnation=index)


def test_a_late_reply_is_an_error_that_names_the_peer_and_is_dropped(
    pair: tuple[Channel, Channel],
) -> None:
    """After the deadline the channel still works, and the late reply reaches nobody."""
    client, server = pair
    with pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.1"):
        client.request(Ping(), timeout_s=0.05)
    late = server.receive(timeout_s=LIMIT_S)
    assert late is not None
    server.reply(late, JobKept(serial=1))
    call = client.begin(Ping())
    second = server.receive(timeout_s=LIMIT_S)
    assert second is not None
    server.reply(second, JobKept(serial=2))
    assert client.collect(call, timeout_s=LIMIT_S).message == JobKept(serial=2)


def test_nothing_to_receive_gives_none_after_the_limit(pair: tuple[Channel, Channel]) -> None:
    """A wait that ends without a message is no error."""
    assert pair[1].receive(timeout_s=0.01) is None


def test_failures_of_the_other_side_are_raised_here(pair: tuple[Channel, Channel]) -> None:
    """Type and words as there."""
    client, server = pair
    call = client.begin(Ping())
    frame = server.receive(timeout_s=LIMIT_S)
    assert frame is not None
    server.reply(frame, failure_from(ValueError("no such row 7"), task="/job:ps/task:0"))
    with pytest.raises(ValueError, match="no such row 7") as caught:
        client.collect(call, timeout_s=LIMIT_S)
    assert caught.value.__notes__ == ["raised by /job:ps/task:0"]


def test_all_waiting_threads_return_when_the_peer_closes(
    pair: tuple[Channel, Channel],
) -> None:
    """All threads that wait on the channel, at once, not after their limits."""
    client, server = pair
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(client.request, Ping(), timeout_s=LIMIT_S) for _ in range(4)]
        for _ in range(4):
            assert server.receive(timeout_s=LIMIT_S) is not None
        server.close()
        for one in waiting:
            with pytest.raises(ConnectionLost):
                one.result(LIMIT_S)
    assert not client.is_open


def test_own_close_wakes_a_thread_that_waits(pair: tuple[Channel, Channel]) -> None:
    """Closing from another thread ends the wait, and closing again does nothing."""
    client, _ = pair
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.receive, timeout_s=LIMIT_S)
        wait_until(lambda: client._has_reader)
        client.close()
        client.close()
        with pytest.raises(ConnectionLost):
            waiting.result(LIMIT_S)
    with pytest.raises(ConnectionLost, match="closed"):
        client.notify(Ping())
    assert "closed" in repr(client)


def test_a_connection_cut_in_a_message_says_so(pair: tuple[Channel, Channel]) -> None:
    """Half a frame, then the end."""
    client, server = pair
    data = b"".join(frames.encode_frame(frames.NOTIFY, 0, b"x" * 100, []))
    server._stream.sock.send(data[:50])
    server.close()
    with pytest.raises(ConnectionLost, match="in the middle of a message"):
        client.receive(timeout_s=LIMIT_S)


def test_a_reader_that_never_reads_makes_the_sender_fail_in_time(
    pair: tuple[Channel, Channel],
) -> None:
    """A stuck peer is an error with its name, never a hang; nothing follows half a frame."""
    client, _ = pair
    big = bytes(1 << 26)
    with pytest.raises(DeadlineExceeded, match="took no more bytes"):
        client.notify(Ok(), [big], timeout_s=0.2)
    with pytest.raises(ConnectionLost):
        client.notify(Ok())


def test_frames_beyond_the_limits_of_the_receiver_end_the_connection() -> None:
    """The receiver says why; the sender learns that it was cut."""
    limits = Limits(message_bytes=1000, frame_bytes=1000)
    with Listener("127.0.0.1:0", limits=limits) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, timeout_s=LIMIT_S)
        with connect(listener.address, timeout_s=LIMIT_S) as client:
            server = accepted.result(LIMIT_S)
            assert server is not None
            with server:
                client.notify(Ok(), [bytes(2000)])
                with pytest.raises(ProtocolError, match="the limit is 1000 bytes"):
                    server.receive(timeout_s=LIMIT_S)


def test_bytes_that_are_no_message_are_a_protocol_error(pair: tuple[Channel, Channel]) -> None:
    """A well-formed frame around nonsense."""
    client, server = pair
    client._stream.sock.send(b"".join(frames.encode_frame(frames.REQUEST, 1, b"\xc1\xff", [])))
    with pytest.raises(ProtocolError, match="does not hold a valid message"):
        server.receive(timeout_s=LIMIT_S)


def test_unsent_buffers_can_be_kept(pair: tuple[Channel, Channel]) -> None:
    """What the socket did not take is copied: the sender may change its memory."""
    client, server = pair
    memory = bytearray(b"a" * (1 << 26))
    ref = TensorRef("uint8", (len(memory),), 0)
    server.enqueue(frames.NOTIFY, 0, Values(values=(ref,), versions=()), [memory])
    assert not server.flush()
    assert server.wants_write
    assert server.outgoing_bytes > 0
    server.keep_unsent()
    memory[:] = b"b" * len(memory)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(client.receive, timeout_s=LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        while not server.flush() and time.monotonic() < deadline:
            pass
        frame = received.result(LIMIT_S)
    assert frame is not None
    assert bytes(frame.buffer(0)[-1000:]) == b"a" * 1000


@pytest.mark.parametrize("last", [1, stream.WAKE_BYTES, 2 * stream.WAKE_BYTES, 1 << 21])
def test_the_last_bytes_of_a_large_frame_wake_the_reader(
    pair: tuple[Channel, Channel], last: int
) -> None:
    """However few they are. While most of the frame is missing, single packets do not wake it."""
    client, server = pair
    data = b"".join(frames.encode_frame(frames.NOTIFY, 0, messages.encode(Ok()), [bytes(1 << 22)]))
    sock = server._stream.sock
    sock.setblocking(True)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(client.receive, timeout_s=LIMIT_S)
        for begin, end in ((0, len(data) - last), (len(data) - last, len(data))):
            sock.sendall(data[begin:end])
            parser = client._stream.parser
            wait_until(lambda: parser.missing < len(data) - end + stream.WAKE_BYTES)
        frame = received.result(LIMIT_S)
    assert frame is not None
    assert len(frame.buffer(0)) == 1 << 22
    assert client._stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


@pytest.mark.parametrize("size", [10, frames.INPUT_BYTES, 1 << 22])
def test_messages_before_the_end_are_received(pair: tuple[Channel, Channel], size: int) -> None:
    """A peer that sends its last word and hangs up is heard; then its end is noticed."""
    client, server = pair
    data = bytes(size)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(server.notify, Ok(), [data], timeout_s=LIMIT_S)
        sent.add_done_callback(lambda _: server.close())
        frame = client.receive(timeout_s=LIMIT_S)
        sent.result(LIMIT_S)
    assert frame is not None
    assert len(frame.buffer(0)) == size
    with pytest.raises(ConnectionLost, match="closed the connection"):
        client.receive(timeout_s=LIMIT_S)


def test_an_address_without_listener_is_named() -> None:
    """The address stands in the error."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectionLost, match=rf"127\.0\.0\.1:{port}"):
        connect(f"127.0.0.1:{port}", timeout_s=LIMIT_S)


def test_a_listener_that_never_answers_is_a_deadline() -> None:
    """Something accepts but does not speak."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded, match="does not answer"):
            connect(address, timeout_s=0.1)


def test_a_listener_that_dies_while_somebody_connects_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed process hangs up on those it served before it stops listening: whoever tries again at once is still let
    into the line, and thrown out of it."""
    with socket.create_server(("127.0.0.1", 0)) as dying:

        def die(sock: socket.socket) -> None:
            stream.prepare(sock)
            dying.close()
            assert stream.wait_for(sock, select.POLLIN, time.monotonic() + LIMIT_S)

        monkeypatch.setattr(connecting, "prepare", die)
        address = f"127.0.0.1:{dying.getsockname()[1]}"
        with pytest.raises(
            ConnectionLost, match=f"/job:ps/task:0 at '{address}' closed the connection"
        ):
            connect(address, timeout_s=LIMIT_S, peer="/job:ps/task:0")


@pytest.mark.parametrize("address", ["localhost", "localhost:", "host:port", "host:99999", ""])
def test_an_invalid_address_raises(address: str) -> None:
    """The value and the form expected."""
    with pytest.raises(ValueError, match="expected host:port"):
        split_address(address)
