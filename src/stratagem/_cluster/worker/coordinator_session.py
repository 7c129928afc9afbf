"""One incarnation of a worker: the session with one coordinator.

Two threads meet here. The *receiving* thread (`listen`) takes messages in while a closure runs, so that the
worker is never idle for a round trip; it returns unstarted closures when asked, and sends heartbeats. The
*working* thread (`work`) runs closures, one after another.

A worker unpickles what its coordinator sends; the coordinator has proved the cluster key.
"""

from __future__ import annotations

import math
import queue
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast, final

import numpy as np
import torch
from typing_extensions import override

from stratagem import _faults as faults
from stratagem import metrics
from stratagem._cluster.contract import StrategyOnWorker, WorkerSetup
from stratagem._cluster.worker.received_objects import ReceivedObjects
from stratagem._cluster.worker.results import Results
from stratagem._snapshots import Snapshot
from stratagem._usage import process_usage
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.codec import Outgoing, dtype_from, pack, unpack
from stratagem._wire.failures import failure_from
from stratagem._wire.frames import Buffer, check_size
from stratagem._wire.messages import Frame, Packed
from stratagem._wire.process_probe import own_process
from stratagem.errors import ConnectionLost, ProtocolError, WireError

if TYPE_CHECKING:
    from stratagem._cluster.worker.worker import Worker


_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
"""Odd, and with irregular bits in both halves: distinct closures get distinct, unrelated seeds."""


@final
class ClosureRandom:
    """The random streams of one job on one worker, derived from the job's seed and the closure's number.

    A closure that is repeated on another worker draws the same numbers as before. This covers the global generators
    of torch, Python's `random` and NumPy (docs/design/0003), in processes that a worker owns. All of them are seeded
    before each closure, in 6 µs.
    """

    def __init__(self, seed: int) -> None:
        self._base = _mix(seed)
        self._has_cuda = torch.cuda.is_available()
        self._seed_torch = torch.default_generator.manual_seed

    def begin(self, number: int) -> None:
        """Let the generators continue with the stream of closure `number`."""
        seed = (self._base + number * _STEP) & _MASK
        self._seed_torch(seed)
        if self._has_cuda:
            torch.cuda.manual_seed_all(seed)
        seed = _mix(seed)
        random.seed(seed)
        np.random.seed(_mix(seed) >> 32)  # noqa: NPY002 - the global state; an array as seed would take 90 µs


def _mix(seed: int) -> int:
    """SplitMix64: return unrelated numbers for neighbouring seeds."""
    z = (seed + _STEP) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


TICK_S: Final = (
    0.1  # longest sleep of the receiving thread: bounds the delay of results and heartbeats
)
MESSAGES_AT_ONCE: Final = 64  # received between two looks at the clock
QUICK_S: Final = 0.001  # a function whose last call took less is expected to be quick again
METRICS_S: Final = 1.0  # how often a heartbeat carries the worker's metrics
FUNCTIONS_TIMED: Final = 1024  # functions whose last run time is kept


@final
class CoordinatorSession:
    """Messages, closures and results of one incarnation. `opening`: the frame with OpenWorker."""

    def __init__(self, worker: Worker, channel: Channel, opening: Frame) -> None:
        assert isinstance(opening.message, messages.OpenWorker)
        self.channel = channel
        self.order: messages.OpenWorker = opening.message
        self.heard_at = time.monotonic()
        self.steps = 0
        self._worker = worker
        self._opening = opening
        self._inbox: queue.SimpleQueue[tuple[float, Frame] | None] = queue.SimpleQueue()
        self._waiting: set[int] = set()
        self._ended = False
        self._lacks = False  # an object that only the next session can have: no more closures run
        self._results = Results(channel, worker.task)
        self._last_run_s: dict[bytes, float] = {}  # by function
        self._views: StrategyOnWorker | None = None
        self._random = ClosureRandom(self.order.seed)
        self._metrics_at = 0.0
        # Where the working thread's time goes; the receiving thread reads these sums.
        self._opened_at = time.perf_counter()
        self._run_s = self._idle_s = 0.0
        self._running_since = self._idle_since = 0.0  # 0: not at present

    @property
    def waiting(self) -> int:
        """Number of closures that have arrived but not started."""
        return len(self._waiting)

    # ------------------------------------------------------------------ the receiving thread

    def listen(self, turn_away: Callable[[], None]) -> None:
        """Receive until the coordinator leaves, is gone, or is silent for too long.

        Args:
            turn_away: called regularly, to answer others that connect meanwhile.
        """
        sent_at = looked_at = time.monotonic()
        silence_s = 3 * self.order.heartbeat_limit_s  # it may be swapping while its socket is open
        while not self._ended:
            received = self.channel.receive_some(timeout_s=TICK_S, most=MESSAGES_AT_ONCE)
            now = time.monotonic()
            if received:
                self.heard_at = now
                for frame in received:
                    self.take_in(frame)
            if now - sent_at >= self.order.heartbeat_s:
                sent_at = now
                self.channel.notify(messages.Beat(metrics=self._metrics(now)))
            if now - looked_at >= TICK_S:
                looked_at = now
                turn_away()
                if self._views is not None:  # a closure may run for long
                    self._results.flush_ready(self._views)
            # A closure that held Python's lock (GIL) stopped this thread, too: unread data counts.
            if now - self.heard_at > silence_s and self.channel.silent_s() > silence_s:
                raise ConnectionLost(f"the coordinator was silent for {silence_s:g} s")

    def take_in(self, frame: Frame) -> None:
        """Handle one message, or queue it for the working thread."""
        message = frame.message
        if isinstance(message, messages.Run):
            self._waiting.add(message.closure)
            self._inbox.put((time.perf_counter(), frame))
        elif isinstance(message, messages.Recall):
            back = tuple(closure for closure in message.closures if self._claim(closure))
            self.channel.notify(messages.Returned(closures=back))
        elif isinstance(message, messages.Define | messages.Update | messages.Forget):
            self._inbox.put((0.0, frame))
        elif isinstance(message, messages.Leave):
            self._ended = True
        elif not isinstance(message, messages.Beat):
            raise ProtocolError(f"a worker does not expect {type(message).__name__}")

    def end(self) -> None:
        """Let the working thread end: no more messages will come."""
        self._ended = True
        self._inbox.put(None)
        if self._views is not None:
            self._views.abandon()  # a closure may wait for a server that hangs

    def _claim(self, closure: int) -> bool:
        """Take a closure to start it or to give it back; return False if the other thread has it."""
        try:
            self._waiting.remove(closure)  # atomic, so that exactly one thread succeeds
        except KeyError:
            return False
        return True

    def _metrics(self, now: float) -> Snapshot | None:
        """Return the metrics that this heartbeat carries; None if the last ones are recent."""
        if now - self._metrics_at < METRICS_S:
            return None
        self._metrics_at = now
        return self.metrics()

    def metrics(self) -> Snapshot:
        """Return the metrics of this session, and those of the process if the worker owns it."""
        own = self._worker.owns_process  # else the coordinator's own registry has the rest
        seen = metrics.snapshot() if own else Snapshot()
        usage = process_usage() if own else {}
        memory = usage.pop("process.memory_bytes", None)
        now = time.perf_counter()
        running, idle = self._running_since, self._idle_since
        times = {
            "worker.steps": self.steps,
            "worker.session_s": now - self._opened_at,
            "worker.run_s": self._run_s + (now - running if running else 0.0),
            "worker.idle_s": self._idle_s + (now - idle if idle else 0.0),
            "worker.ack_s": self._results.waited_s,
        }
        return replace(
            seen,
            counters={**seen.counters, **times, **usage},
            gauges=seen.gauges
            if memory is None
            else {**seen.gauges, "process.memory_bytes": memory},
        )

    # ------------------------------------------------------------------ the working thread

    def work(self) -> None:
        """Run what comes in, until the session ends."""
        objects: ReceivedObjects | None = None
        try:
            views = self._open()
            if views is None:
                return
            objects = ReceivedObjects(views, self._worker.task)
            while (item := self._next_item()) is not None:
                if self._ended:
                    continue
                arrived, frame = item
                if isinstance(frame.message, messages.Run):
                    self._run(frame, frame.message, arrived, objects, views)
                else:
                    objects.receive(frame)
                if self._results and self._inbox.empty():
                    self._results.flush(views)
        except WireError:
            pass  # the coordinator is gone; the receiving thread logs that
        finally:
            self._ended = True
            self.channel.close()
            if objects is not None:
                objects.clear()
            if self._views is not None:
                self._views.close()

    def _next_item(self) -> tuple[float, Frame] | None:
        """Return the next message, and count how long the thread waits for it."""
        try:
            return self._inbox.get_nowait()  # a busy worker reads no clock
        except queue.Empty:
            self._idle_since = began = time.perf_counter()
            item = self._inbox.get()
            self._idle_since = 0.0
            self._idle_s += time.perf_counter() - began
            return item

    def _open(self) -> StrategyOnWorker | None:
        """Connect to the strategy's servers and answer the coordinator; None if that failed."""
        try:
            setup = cast("WorkerSetup", unpack(self.order.setup, self._opening))
            self._views = setup.connect(
                worker_index=self.order.worker,
                incarnation=self.order.incarnation,
                key=self._worker.key,
            )
        except Exception as error:  # noqa: BLE001 - any error goes to the coordinator
            failure = failure_from(error, task=self._worker.task, with_pickle=True)
            self.channel.reply(self._opening, failure)
            return None
        self.channel.reply(
            self._opening,
            messages.WorkerOpened(process=own_process()),
        )
        return self._views

    def _run(
        self,
        frame: Frame,
        message: messages.Run,
        arrived: float,
        objects: ReceivedObjects,
        views: StrategyOnWorker,
    ) -> None:
        if self._lacks or not self._claim(message.closure):
            return  # the coordinator ends the session, or has recalled the closure
        if faults.active is not None:
            faults.active.at("worker.before_closure")
        began = time.perf_counter()
        run_s = self._last_run_s.get(message.function, math.inf)
        if self._results.is_due(began, run_s):
            self._results.flush(views)
            began = time.perf_counter()
        self._running_since = began
        written = views.written()
        try:
            if self._worker.owns_process:
                _set_default_dtype(message.dtype)
            function = objects.function(message.function)
            with views.closure(
                message.closure,
                exactly_once=message.exactly_once,
                quick=run_s < QUICK_S,
                arrived=arrived,
            ):
                args, kwargs = objects.arguments(frame, message)
                if self._worker.owns_process:
                    self._random.begin(self._stream_of(message))
                readers = objects.begin_leases(message.leases) if message.leases else ()
                result = function(*args, **kwargs)
                leased = tuple(reader.end() for reader in readers)
                if faults.active is not None:
                    faults.active.at("worker.after_closure")
            if message.resource:
                objects.keep_resource(message.resource, result)
                result = None
            ended = time.perf_counter()
            if len(self._last_run_s) >= FUNCTIONS_TIMED:
                self._last_run_s.clear()
            self._last_run_s[message.function] = ended - began
            self._running_since = 0.0
            self._run_s += ended - began
            value, buffers = (None, ()) if result is None else _packed(result)
            advanced = views.advances()
            number, advances = (0, None) if advanced is None else _packed_advances(*advanced)
            finished = messages.Finished(
                closure=message.closure,
                value=value,
                advances=advances,
                report=number,
                leased=leased,
                waited_s=began - arrived,
                ran_s=ended - began,
            )
            self._results.hold(finished, buffers, views)
            self.steps += 1
        except BaseException as error:  # noqa: BLE001 - a closure may raise anything, SystemExit too
            if self._running_since:
                self._running_since = 0.0
                self._run_s += time.perf_counter() - began
            ended_input = 0
            if isinstance(error, StopIteration) and not error.args:  # it has no text of its own
                error.add_note(
                    f"An iterator ended on {self._worker.task}: its dataset is used up. Repeat it "
                    "(dataset.repeat()), or schedule no more steps than it has (CCO-26)."
                )
                if views.written() == written:
                    ended_input = objects.ended_input()
            if message.resource:
                objects.fail_resource(message.resource, error)
            failed = self._results.failure(
                message.closure, error, views, lacks=objects.lacks, ended=ended_input
            )
            self._results.hold(failed, (), views)
            self._lacks = failed.lacks and not message.resource  # it would be built again and again

    def _stream_of(self, message: messages.Run) -> int:
        """Return the number of a closure's random stream.

        That of a resource is the same for every incarnation of the worker, so that an iterator that is
        built again shuffles as before; and it differs between workers (CCO-31).
        """
        if not message.resource:
            return message.closure
        return -(message.resource << 20 | self.order.worker)

    @override
    def __repr__(self) -> str:
        return (
            f"incarnation {self.order.incarnation} for {self.order.coordinator!r}, "
            f"{len(self._waiting)} closures waiting"
        )


def _set_default_dtype(name: str) -> None:
    """Create new tensors with the coordinator's default dtype."""
    dtype = dtype_from(name)
    if dtype is not torch.get_default_dtype():
        torch.set_default_dtype(dtype)


def _packed_advances(number: int, advances: Sequence[object]) -> tuple[int, Packed]:
    """Pack what a closure did to schedulers and settings, which is plain data."""
    outgoing = Outgoing()
    packed = pack(advances, outgoing)
    if outgoing.buffers:
        raise TypeError(
            f"a scheduled function gave a scheduler or an optimizer setting a tensor or an array: {advances!r}. "
            "Give it a number."
        )
    return number, packed


def _packed(result: object) -> tuple[Packed, Sequence[Buffer]]:
    """Pack a closure's result; an error of packing says that the result is meant."""
    outgoing = Outgoing()
    try:
        packed = pack(result, outgoing, prefers_data=True)
    except Exception as error:  # pickling runs the users' own code; raised again below
        error.add_note(
            f"The function ran; its result, a {type(result).__name__}, cannot be sent back. Return "
            "tensors or other values that can be pickled, or None."
        )
        raise
    check_size(outgoing.buffers)
    return packed, outgoing.buffers
