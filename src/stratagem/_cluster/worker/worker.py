"""A worker: runs closures for one coordinator at a time.

Two threads. The *caller's* thread (`serve`; the main thread of a worker process) runs closures, one
after another. The *line* thread talks to the coordinator: takes closures in while another runs, so
that the worker is never idle for a round trip, gives back what has not started when asked, and says
that it lives. They meet in `_Session`.

A worker unpickles what its coordinator sends, which has proved the cluster key before. What closures
see of the strategy is not known here: `views.py`.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, cast, final

from typing_extensions import override

from stratagem import metrics
from stratagem._cluster.contract import StrategyOnWorker, WorkerSetup
from stratagem._cluster.coordinator.packer import check_size
from stratagem._cluster.worker.output import OutputForwarder
from stratagem._cluster.worker.results import Results
from stratagem._core import context
from stratagem._owner import Owner
from stratagem._ps.malloc import give_back_freed_memory
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.codec import Outgoing, pack, unpack
from stratagem._wire.failures import failure_from
from stratagem._wire.frames import Buffer
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.listener import Listener
from stratagem._wire.messages import Frame, Packed
from stratagem._wire.process_probe import own_process
from stratagem.errors import (
    ClosureInputError,
    ConnectionLost,
    ProtocolError,
    UnavailableError,
    WireError,
    WorkerBusy,
)

_log = logging.getLogger("stratagem.worker")

TICK_S: Final = 0.1
"""Longest sleep of the line thread: bounds how late a held-back result or a beat can be."""

QUICK_S: Final = 0.001
"""A function whose last call took less is expected to be over in no time again."""

FACTS_S: Final = 1.0
"""How often a worker's metrics ride on a beat."""


@final
class Worker(Owner):
    """One worker task.

    Args:
        address: where to listen, ``host:port``; port 0 takes a free one.
        index: its number among the workers.
        key: the cluster's key, or None on loopback.
        forward_output: send what is printed and logged to the coordinator (only in a process of
            its own: it takes over standard output).
        echo: print it here as well.

    Example:
        >>> import threading
        >>> with Worker("127.0.0.1:0", index=0) as worker:
        ...     thread = threading.Thread(target=worker.serve)
        ...     thread.start()
        ...     print(worker.task)
        /job:worker/task:0
        >>> thread.join()
    """

    def __init__(
        self,
        address: str,
        *,
        index: int,
        key: ClusterKey | None = None,
        forward_output: bool = False,
        echo: bool = True,
    ) -> None:
        self.index = index
        self.task = f"/job:worker/task:{index}"
        self.key = key
        self._listener = Listener(address, key=key, may_unpickle=True)
        self.address = self._listener.address
        self._closed = threading.Event()
        self._sessions: queue.SimpleQueue[_Session | None] = queue.SimpleQueue()
        self._current: _Session | None = None
        self._output: OutputForwarder | None = None
        if forward_output:
            self.forward_output(echo=echo)
        self._line = threading.Thread(
            target=self._attend_all, name=f"stratagem-worker-{index}-line", daemon=True
        )
        self._line.start()

    def forward_output(self, *, echo: bool) -> None:
        """From now on what this process prints and logs goes to the coordinator, too."""
        if self._output is None:
            self._output = OutputForwarder(echo=echo)
            session = self._current
            if session is not None:
                self._output.attach(session.channel)

    def serve(self) -> None:
        """Runs closures on this thread until `close`."""
        with context.worker_index(self.index):
            while (session := self._sessions.get()) is not None:
                session.work()
                del session
                if self._output is not None:
                    self._output.detach()
                    # An idle worker holds nothing of its last coordinator. Models refer to themselves
                    # in circles, and would else keep the servers' memory, freed there, in use here.
                    gc.collect()
                    give_back_freed_memory()

    @override
    def close(self) -> None:
        """Stops listening and serving; a closure that runs is not interrupted. May be repeated."""
        if self._closed.is_set():
            return
        self._closed.set()
        session = self._current
        if session is not None:
            session.channel.close()
        self._sessions.put(None)
        if threading.current_thread() is not self._line:
            self._line.join(10 * TICK_S + 5.0)
        self._listener.close()
        if self._output is not None:
            self._output.close()

    def _attend_all(self) -> None:
        while not self._closed.is_set():
            channel = self._listener.accept(timeout_s=TICK_S)
            if channel is None:
                continue
            with channel:
                try:
                    self._attend(channel)
                except WireError as error:
                    if not self._closed.is_set():
                        _log.info("%s: the coordinator is gone: %s", self.task, error)
                except Exception:  # noqa: BLE001 - the line must outlive anything a peer sends
                    _log.exception("%s: serving a coordinator failed", self.task)

    def _attend(self, channel: Channel) -> None:
        """Serves one coordinator until it is gone."""
        frame = channel.receive(timeout_s=5.0)
        if frame is None:
            return
        if isinstance(frame.message, messages.AskStats):
            channel.reply(frame, messages.Stats(facts=self.facts()))
            return
        if not isinstance(frame.message, messages.OpenWorker):
            raise self._say_who(channel, frame)
        if frame.message.worker != self.index:
            refusal = UnavailableError(
                f"this is {self.task}, the coordinator expects worker {frame.message.worker} at "
                f"{self.address!r}: give every task the same cluster specification.",
                task=self.task,
            )
            channel.reply(frame, failure_from(refusal, task=self.task, with_pickle=True))
            return
        session = _Session(self, channel, frame)
        self._current = session
        if self._output is not None:
            self._output.attach(channel)
        self._sessions.put(session)
        try:
            session.listen(self._turn_away)
        finally:
            session.end()
            self._current = None

    def facts(self) -> dict[str, object]:
        """Numbers for people who watch (`stratagem top`)."""
        session = self._current
        return {
            "task": self.task,
            "pid": os.getpid(),
            "state": "idle" if session is None else "running",
            "life": 0 if session is None else session.life,
            "steps": 0 if session is None else session.steps,
            "waiting": 0 if session is None else session.waiting,
        }

    def _turn_away(self) -> None:
        """Answers those who only ask; tells other coordinators that this worker is taken."""
        for channel in self._listener.progress():
            with channel:
                try:
                    self._answer_other(channel)
                except WireError as error:  # its trouble, not that of the coordinator we serve
                    _log.info("%s turned away %s: %s", self.task, channel.peer, error)

    def _answer_other(self, channel: Channel) -> None:
        frame = channel.receive(timeout_s=0.2)
        if frame is not None and isinstance(frame.message, messages.AskStats):
            channel.reply(frame, messages.Stats(facts=self.facts()), timeout_s=0.2)
        elif frame is not None and not isinstance(frame.message, messages.OpenWorker):
            raise self._say_who(channel, frame)
        elif frame is not None:
            session = self._current
            busy = WorkerBusy(
                f"{self.task} serves another coordinator: close that one first.",
                task=self.task,
                coordinator="" if session is None else session.coordinator,
                heard_s=math.inf if session is None else time.monotonic() - session.heard_at,
            )
            failure = failure_from(busy, task=self.task, with_pickle=True)
            channel.reply(frame, failure, timeout_s=0.2)

    def _say_who(self, channel: Channel, frame: Frame) -> ProtocolError:
        """Answers somebody who looks for another kind of task here; gives what is wrong."""
        stranger = ProtocolError(
            f"this is {self.task}, a worker, which does not know {type(frame.message).__name__}: give "
            f"every task the same cluster specification"
        )
        failure = failure_from(stranger, task=self.task, with_traceback=False)
        channel.reply(frame, failure, timeout_s=0.2)
        return stranger

    @property
    def shares_process(self) -> bool:
        """Whether others live in this process, its coordinator perhaps."""
        return self._output is None

    @override
    def __repr__(self) -> str:
        state = (
            "closed" if self._closed.is_set() else repr(self._current) if self._current else "idle"
        )
        return f"<Worker {self.task} at {self.address} [{state}]>"


class _Session:
    """One life of the worker for one coordinator."""

    def __init__(self, worker: Worker, channel: Channel, opening: Frame) -> None:
        assert isinstance(opening.message, messages.OpenWorker)
        self.channel = channel
        self._worker = worker
        self._opening = opening
        self._order: messages.OpenWorker = opening.message
        self._inbox: queue.SimpleQueue[tuple[float, Frame] | None] = queue.SimpleQueue()
        self._waiting: set[int] = set()
        self._ended = False
        self._results = Results(channel, worker.task)
        self._took_s: dict[bytes, float] = {}  # by function: its last call
        self._functions: dict[bytes, Frame | Callable[..., object]] = {}
        self._resources: dict[int, object] = {}
        self._views: StrategyOnWorker | None = None
        # What could not be learnt, and why: definitions and updates by the token of their object;
        # updates of which not even that is known. It is sent again after a closure has missed it.
        self._undefined: dict[Hashable, Exception] = {}
        self._unmoved: dict[Hashable, Exception] = {}
        self._unread: Exception | None = None
        # Which objects an object, or a function, was made of; collected while it is unpacked.
        self._made_of: dict[Hashable, set[Hashable]] = {}
        self._complete: set[Hashable] = set()
        self._seen: set[Hashable] = set()
        self._lacks = False  # whether the closure that runs has missed something
        self._facts_at = 0.0
        self.coordinator = opening.message.coordinator
        self.heard_at = time.monotonic()
        self.life = opening.message.incarnation
        self.steps = 0

    @property
    def waiting(self) -> int:
        """Closures that are here but have not begun."""
        return len(self._waiting)

    # ------------------------------------------------------------------ the line thread

    def listen(self, turn_away: Callable[[], None]) -> None:
        """Takes in messages until the coordinator leaves, is gone, or is silent for too long."""
        beat_at = looked_at = time.monotonic()
        silence_s = 3 * self._order.heartbeat_limit_s  # it may be swapping; its socket still lives
        while not self._ended:
            frame = self.channel.receive(timeout_s=TICK_S)
            now = time.monotonic()
            if frame is not None:
                self.heard_at = now
                self._take_in(frame)
            if now - beat_at >= self._order.heartbeat_s:
                beat_at = now
                self.channel.notify(messages.Beat(facts=self._facts(now)))
            if now - looked_at >= TICK_S:
                looked_at = now
                turn_away()
                if self._views is not None:  # a closure may run long
                    self._results.flush_ready(self._views)
            # A closure that kept Python's lock kept us from looking, too: what waits to be read counts.
            if now - self.heard_at > silence_s and self.channel.silent_s() > silence_s:
                raise ConnectionLost(f"the coordinator was silent for {silence_s:g} s")

    def _take_in(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, messages.Run):
            self._waiting.add(message.closure)
            self._inbox.put((time.perf_counter(), frame))
        elif isinstance(message, messages.Recall):
            # remove() of a set is atomic: a closure is given back or started, never both.
            back = [closure for closure in message.closures if _removed(self._waiting, closure)]
            self.channel.notify(messages.Returned(closures=tuple(back)))
        elif isinstance(message, messages.Define | messages.Update | messages.Forget):
            self._inbox.put((0.0, frame))
        elif isinstance(message, messages.Leave):
            self._ended = True
        elif not isinstance(message, messages.Beat):
            raise ProtocolError(f"a worker does not expect {type(message).__name__}")

    def _facts(self, now: float) -> dict[str, Any]:
        if self._worker.shares_process or now - self._facts_at < FACTS_S:
            return {}  # in-process workers record into the coordinator's own registry
        self._facts_at = now
        return metrics.snapshot().to_plain()

    def end(self) -> None:
        """No more messages will come."""
        self._ended = True
        self._inbox.put(None)

    # ------------------------------------------------------------------ the working thread

    def work(self) -> None:
        """Runs what comes in, until the session ends."""
        try:
            if not self._open():
                return
            while (item := self._inbox.get()) is not None:
                if self._ended:
                    continue
                arrived, frame = item
                if isinstance(frame.message, messages.Run):
                    self._run(frame, frame.message, arrived)
                else:
                    self._try_to_learn(frame)
                if self._results and self._inbox.empty():
                    self._flush()
        except WireError:
            pass  # the coordinator is gone; the line thread says so
        finally:
            self._ended = True
            self.channel.close()
            self._resources.clear()
            self._functions.clear()
            if self._views is not None:
                self._views.close()

    def _open(self) -> bool:
        try:
            setup = cast("WorkerSetup", unpack(self._order.setup, self._opening))
            self._views = setup.connect(
                worker_index=self._order.worker,
                incarnation=self._order.incarnation,
                key=self._worker.key,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the coordinator must hear it
            failure = failure_from(error, task=self._worker.task, with_pickle=True)
            self.channel.reply(self._opening, failure)
            return False
        self.channel.reply(
            self._opening,
            messages.WorkerOpened(task=self._worker.task, pid=os.getpid(), process=own_process()),
        )
        return True

    def _define(self, token: Hashable, frame: Frame, message: messages.Define) -> None:
        """What goes wrong is the error of the closures that name this object, or one made of it."""
        assert self._views is not None
        if token in self._complete:
            return  # it was sent again for the sake of another
        if message.stage == 0:
            self._undefined.pop(token, None)
            self._made_of[token] = set()
        elif token in self._undefined:
            return  # this would be the rest of it
        self._seen = self._made_of[token]
        try:
            definition = unpack(message.value, frame, rebuild=self._rebuild)
            self._views.define(token, definition, last=message.last)
            if message.last:
                self._complete.add(token)
        except Exception as error:  # noqa: BLE001 - code of the user runs when things are unpacked
            self._undefined[token] = error

    def _update(self, frame: Frame, message: messages.Update) -> None:
        """What goes wrong with one thing is the error of closures that name it; with all, of all.

        Until it has come again, whole: a closure that missed it asks for that.
        """
        assert self._views is not None
        try:
            updates = unpack(message.updates, frame, rebuild=self._rebuild)
            failures, gone = self._views.apply(updates)
        except Exception as error:  # noqa: BLE001 - code of the user runs when things are unpacked
            self._unread = error
            return
        if message.whole:
            self._unread = None
            self._unmoved.clear()
        self._unmoved.update(failures)
        for token in gone:
            for known in (self._undefined, self._unmoved, self._made_of):
                known.pop(token, None)
            self._complete.discard(token)

    def _try_to_learn(self, frame: Frame) -> None:
        """As `_learn`; what cannot be read at all is the error of all closures, as in `_update`."""
        try:
            self._learn(frame)
        except Exception as error:  # noqa: BLE001 - a worker outlives whatever it is sent
            self._unread = error

    def _learn(self, frame: Frame) -> None:
        message = frame.message
        assert self._views is not None
        if isinstance(message, messages.Define):
            if message.token is None:
                self._functions[message.function] = frame
            else:
                token = cast("Hashable", unpack(message.token, frame))
                self._define(token, frame, message)
        elif isinstance(message, messages.Update):
            self._update(frame, message)
        elif isinstance(message, messages.Forget):
            for digest in message.functions:
                self._functions.pop(digest, None)
                self._took_s.pop(digest, None)
                self._made_of.pop(digest, None)
            for resource in message.resources:
                self._resources.pop(resource, None)

    def _run(self, frame: Frame, message: messages.Run, arrived: float) -> None:
        if not _removed(self._waiting, message.closure):
            return  # recalled
        assert self._views is not None
        began = time.perf_counter()
        takes_s = self._took_s.get(message.function, math.inf)
        if self._results.is_due(began, takes_s):
            self._flush()
            began = time.perf_counter()
        self._lacks = False
        try:
            result = self._call(frame, message, quick=takes_s < QUICK_S)
            if message.resource:
                self._resources[message.resource] = result
                result = None
            ended = time.perf_counter()
            self._took_s[message.function] = ended - began
            value, buffers = (None, ()) if result is None else _packed(result)
            finished = messages.Finished(
                closure=message.closure,
                value=value,
                waited_s=began - arrived,
                ran_s=ended - began,
            )
            self._results.hold(finished, buffers, self._views)
            self.steps += 1
        except BaseException as error:  # noqa: BLE001 - a closure may raise anything, SystemExit too
            if isinstance(error, StopIteration):  # it has no text of its own
                error.add_note(
                    f"An iterator ended on {self._worker.task}: its dataset is used up. Repeat it "
                    "(dataset.repeat()), or schedule no more steps than it has (CCO-26)."
                )
            if message.resource:
                self._resources[message.resource] = _FailedResource(error)
            failed = self._results.failure(message.closure, error, lacks=self._lacks)
            self._results.hold(failed, (), self._views)

    def _call(self, frame: Frame, message: messages.Run, *, quick: bool) -> object:
        assert self._views is not None
        if self._unread is not None:
            raise self._missed(self._unread)
        function = self._functions[message.function]
        if isinstance(function, Frame):
            assert isinstance(function.message, messages.Define)
            self._lacks = True
            self._seen = self._made_of[message.function] = set()
            function = unpack(function.message.value, function, rebuild=self._rebuild)
            self._lacks = False
            self._functions[message.function] = cast("Callable[..., object]", function)
        with self._views.closure(message.closure, exactly_once=message.exactly_once, quick=quick):
            self._seen = {message.function}
            if message.arguments is None:
                if self._unmoved:
                    self._refuse_unmoved()
                return cast("Callable[..., object]", function)()
            args, kwargs = unpack(message.arguments, frame, rebuild=self._rebuild)
            if self._unmoved:
                self._refuse_unmoved()
            return cast("Callable[..., object]", function)(*args, **kwargs)

    def _rebuild(self, token: tuple[str, Hashable]) -> object:
        kind, value = token
        if kind == "r":
            found = self._resources[cast("int", value)]
            if isinstance(found, _FailedResource):
                raise ClosureInputError(
                    f"an input of the closure failed to build on {self._worker.task}: "
                    f"{found.error!r}",
                    original_exception=found.error,
                )
            return found
        assert self._views is not None
        failed = self._undefined.get(value)
        if failed is not None:
            raise self._missed(failed)
        self._seen.add(value)
        return self._views.rebuild(value)

    def _refuse_unmoved(self) -> None:
        """Raises if an update failed of anything that the function and its arguments are made of."""
        looked_at: set[Hashable] = set()
        todo = list(self._seen)
        while todo:
            token = todo.pop()
            if token in self._unmoved:
                raise self._missed(self._unmoved[token])
            if token not in looked_at:
                looked_at.add(token)
                todo.extend(self._made_of.get(token, ()))

    def _missed(self, error: Exception) -> Exception:
        """The error of something the closure needs, which is to be sent again for the next one."""
        self._lacks = True
        return error.with_traceback(None)  # or it would grow with every closure

    def _flush(self) -> None:
        assert self._views is not None
        self._results.flush(self._views)

    @override
    def __repr__(self) -> str:
        return (
            f"life {self._order.incarnation} for {self._order.coordinator!r}, "
            f"{len(self._waiting)} closures waiting, {len(self._resources)} resources"
        )


class _FailedResource:
    """Stands where a resource would be, had it not failed to build."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _packed(result: object) -> tuple[Packed, Sequence[Buffer]]:
    """A closure's result; an error of packing says that the result is meant, not the function."""
    outgoing = Outgoing()
    try:
        packed = pack(result, outgoing)
    except Exception as error:  # pickling runs the users' own code; raised again below
        error.add_note(
            f"The function ran; its result, a {type(result).__name__}, cannot be sent back. Return "
            "tensors or other values that can be pickled, or None."
        )
        raise
    check_size(outgoing.buffers)
    return packed, outgoing.buffers


def _removed(waiting: set[int], closure: int) -> bool:
    try:
        waiting.remove(closure)
    except KeyError:
        return False
    return True
