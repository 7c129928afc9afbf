"""Round trips and throughput of a channel between two processes on this machine.

Run: ``PYTHONPATH=src python benchmarks/bench_wire.py``. Prints a table; with ``--json`` one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from multiprocessing.connection import Connection

import torch

from stratagem._wire.channel import Channel
from stratagem._wire.codec import Outgoing, pack, tensor_from, unpack
from stratagem._wire.connecting import connect
from stratagem._wire.frames import REQUEST
from stratagem._wire.listener import Listener
from stratagem._wire.messages import Ok, Packed, Ping, Read, ReadItem, Values


def _serve(told: Connection) -> None:
    with Listener("127.0.0.1:0") as listener:
        told.send(listener.address)
        channel = listener.accept(timeout_s=10)
    assert channel is not None
    torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
    payload = torch.ones(16 << 18)
    while True:
        try:
            frame = channel.receive(timeout_s=60)
        except ConnectionError:
            return
        if frame is None:
            return
        if isinstance(frame.message, Read):
            outgoing = Outgoing()
            channel.reply(
                frame, Values(values=(outgoing.add(payload),), versions=(1,)), outgoing.buffers
            )
        else:
            channel.reply(frame, Ok())


def _round_trips(channel: Channel, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        channel.request(Ping(), timeout_s=10)
    return (time.perf_counter() - start) / count


def _pipelined(channel: Channel, count: int, depth: int) -> float:
    start = time.perf_counter()
    calls = [channel.begin(Ping()) for _ in range(depth)]
    for _ in range(count):
        channel.collect(calls.pop(0), timeout_s=10)
        calls.append(channel.begin(Ping()))
    for call in calls:
        channel.collect(call, timeout_s=10)
    return (time.perf_counter() - start) / (count + depth)


def _upload(channel: Channel, count: int) -> float:
    payload = torch.ones(16 << 18)
    start = time.perf_counter()
    for _ in range(count):
        outgoing = Outgoing()
        message = Values(values=(outgoing.add(payload),), versions=())
        channel.request(message, outgoing.buffers, timeout_s=10)
    return count * payload.nbytes / (time.perf_counter() - start) / 1e9


def _download(channel: Channel, count: int) -> float:
    size = 16 << 20
    start = time.perf_counter()
    for _ in range(count):
        frame = channel.request(Read(items=(ReadItem(1),)), timeout_s=10)
        assert isinstance(frame.message, Values)
        tensor_from(frame.message.values[0], frame)
    return count * size / (time.perf_counter() - start) / 1e9


def _packing(count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        pack(((1, 2.0, "three"), {}), Outgoing())
    return (time.perf_counter() - start) / count


def _unpacking(count: int) -> float:
    packed: Packed = pack(((1, 2.0, "three"), {}), Outgoing())

    class Nothing:
        def buffer(self, index: int) -> memoryview:
            raise AssertionError(index)

    start = time.perf_counter()
    for _ in range(count):
        unpack(packed, Nothing())
    return (time.perf_counter() - start) / count


def measure(*, round_trips: int = 5000, transfers: int = 32) -> dict[str, float]:
    """Return all figures, best of three turns of so many messages."""
    assert REQUEST == 1
    start = multiprocessing.get_context("fork")
    here, there = start.Pipe()
    child = start.Process(target=_serve, args=(there,))
    child.start()
    there.close()
    results: dict[str, float] = {}
    try:
        with connect(here.recv(), timeout_s=10) as channel:
            _round_trips(channel, round_trips // 5)
            _upload(channel, transfers // 4)
            results["round_trip_us"] = (
                min(_round_trips(channel, round_trips) for _ in range(3)) * 1e6
            )
            results["pipelined_4_us"] = (
                min(_pipelined(channel, round_trips, 4) for _ in range(3)) * 1e6
            )
            results["upload_16MiB_GBps"] = max(_upload(channel, transfers) for _ in range(3))
            results["download_16MiB_GBps"] = max(_download(channel, transfers) for _ in range(3))
    finally:
        here.close()
        child.join(timeout=60)
        child.kill()
    results["pack_small_us"] = min(_packing(round_trips) for _ in range(3)) * 1e6
    results["unpack_small_us"] = min(_unpacking(round_trips) for _ in range(3)) * 1e6
    return results


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = measure()
    if arguments.json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name:24} {value:8.2f}")


if __name__ == "__main__":
    main()
