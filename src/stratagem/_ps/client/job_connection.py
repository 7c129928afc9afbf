"""A coordinator's connection to its named job: the claim, heartbeats, and the record of its position.

The connections are apart from those for data, and a thread of their own uses them: the servers hear the coordinator also
while it builds a model or waits for a long step. Every answer says whether a newer coordinator has replaced this one.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, final

from typing_extensions import override

from stratagem._owner import Owner
from stratagem._ps.client.connect_all import connect_all
from stratagem._ps.client.server_connection import Address, Membership, Pending, ServerConnection
from stratagem._ps.job_reports import (
    JobState,
    describe_coordinator,
    judge_owner,
    silence_s,
    state_of,
)
from stratagem._wire import messages
from stratagem._wire.handshake import ClusterKey
from stratagem.errors import (
    CoordinatorReplaced,
    DeadlineExceeded,
    JobInUse,
    NotFoundError,
    ParameterServerLost,
    WireError,
)

_log = logging.getLogger("stratagem.ps")

HEARTBEAT_S: Final = 0.5
"""Between two signs of life; a small part of the limit."""

SOON_S: Final = 0.1
"""The same while a position waits for closures to finish."""

RETRY_S: Final = 1.0
"""For one attempt to connect to a server again; the other servers wait for their signs of life meanwhile."""

_PAUSE_S: Final = 0.1
"""Between two questions about an owner that may be gone."""

_CLOSE_S: Final = 5.0
"""How long `close` waits for the thread."""


def session_name(job: str) -> str:
    """Return the name of a job's session on the servers."""
    return f"job:{job}"


@final
class JobConnection(Owner):
    """The hold of this process on a named job.

    Args:
        job: its name.
        servers: task of each server, and its address or a function that returns it.
        key: the cluster's key.
        lease_s: how long servers keep the job without a coordinator.
        limit_s: silence after which an owner counts as gone.
        wait_s: how long to wait for the servers.
        seed: of the job's random streams, if the job is new.

    Attributes:
        state: what the servers knew before the claim.
        instance: of the job.
        epoch: of this coordinator.
        seed: of the job's random streams.
        replaced: the error, once a newer coordinator has the job.

    Raises:
        JobInUse: a live coordinator has the job.
        ParameterServerLost: a server cannot be reached.
    """

    def __init__(
        self,
        job: str,
        servers: Sequence[tuple[str, str | Address]],
        *,
        key: ClusterKey | None,
        lease_s: float,
        limit_s: float,
        wait_s: float,
        seed: int = 0,
    ) -> None:
        self.job = job
        self.session = session_name(job)
        self.lease_s = lease_s
        self.replaced: CoordinatorReplaced | None = None
        self._since = time.time()
        self._membership = Membership(session="", task="/job:chief/task:0", key=key)
        self._servers = servers
        self._connections = [ServerConnection(*one, self._membership) for one in servers]
        self._record, self._serial = b"", 0
        self._known = [0] * len(servers)  # number of the record that each server has
        self._is_complete = [True] * len(servers)  # False while a server is being restored
        self._restored = [0] * len(servers)  # how often a server was restored
        self._restored_then = [0] * len(servers)  # the same when `_pending` was sent
        self._pending: list[Pending | None] = [None] * len(servers)
        self._changed = threading.Condition()
        self._has_work = False
        self._closed = False
        self._on_replaced: Callable[[CoordinatorReplaced], None] | None = None
        self.before_beat: Callable[[], bool] | None = None
        """Called by the heartbeat's thread before each sign of life; it may call `note`. True: call again soon."""
        self._thread = threading.Thread(
            target=self._keep, name="stratagem-job-heartbeat", daemon=True
        )
        try:
            self.state = self._join(limit_s, seed, wait_s)
        except BaseException:
            self._disconnect()
            raise
        self._serial = self.state.serial
        self._known = [self._serial] * len(servers)
        self._thread.start()

    # -- the claim ----------------------------------------------------------------------------

    def _join(self, limit_s: float, seed: int, wait_s: float) -> JobState:
        """Connect and claim the job, from the beginning if a server is restarted meanwhile."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                left_s = max(0.1, deadline - time.monotonic())
                connect_all(self._connections, timeout_s=left_s, patient=True)
                return self._claim(limit_s, seed)
            except ParameterServerLost:
                if time.monotonic() >= deadline - _PAUSE_S:
                    raise
                self._disconnect()  # the claims made so far count no more
                self._connections = [
                    ServerConnection(*one, self._membership) for one in self._servers
                ]
                time.sleep(_PAUSE_S)

    def _claim(self, limit_s: float, seed: int) -> JobState:
        began = time.monotonic()
        has_logged = False
        while True:
            reports = [self._ask(one) for one in self._connections]
            waited_s = time.monotonic() - began
            verdict = judge_owner(reports, waited_s=waited_s, limit_s=limit_s)
            newest = max(reports, key=lambda one: one.epoch)
            owner = describe_coordinator(newest.coordinator, newest.since)
            if verdict == "in use":
                raise JobInUse(
                    f"job {self.job!r} is in use by {owner}. Stop that coordinator first, or "
                    f"give this job another name. A coordinator that is silent for {limit_s:g} s "
                    "(STRATAGEM_JOB_LIMIT_S) counts as gone.",
                    job=self.job,
                    coordinator=owner,
                )
            if verdict == "free":
                state = state_of(reports)
                if self._claim_all(state, seed):
                    return state
                began = time.monotonic()  # another coordinator was faster
                continue
            if not has_logged and waited_s > 1.0:
                has_logged = True
                _log.warning(
                    "job %r belongs to %s, which has been silent for %.1f s: waiting until %g s are over",
                    self.job,
                    owner,
                    silence_s(reports),
                    limit_s,
                )
            time.sleep(_PAUSE_S)

    def _ask(self, connection: ServerConnection) -> messages.JobReport:
        report = connection.request(messages.AskJob(session=self.session)).message
        assert isinstance(report, messages.JobReport)
        return report

    def _claim_all(self, state: JobState, seed: int) -> bool:
        """Claim the job on all servers, the first one first; False if another coordinator was faster."""
        self.epoch = state.epoch + 1
        self.instance = state.instance or secrets.token_hex(8)
        self.seed = state.seed if state.is_live else seed
        message = messages.ClaimJob(
            session=self.session,
            instance=self.instance,
            epoch=self.epoch,
            coordinator=f"process {os.getpid()} on {platform.node()}",
            since=self._since,
            lease_s=self.lease_s,
            keep=state.is_live,
            seed=self.seed,
        )
        try:
            for connection in self._connections:
                connection.request(message)
        except CoordinatorReplaced:
            return False
        how = "continues" if state.is_live else "starts"
        _log.info("this process %s job %r, epoch %d", how, self.job, self.epoch)
        return True

    # -- signs of life and the record ---------------------------------------------------------

    def on_replaced(self, call: Callable[[CoordinatorReplaced], None]) -> None:
        """Call a function, in the heartbeat's thread, when a newer coordinator has the job."""
        self._on_replaced = call
        if self.replaced is not None:
            call(self.replaced)

    def note(self, record: bytes) -> None:
        """Send a record to all servers soon; never wait."""
        with self._changed:
            self._serial += 1
            self._record, self._has_work = record, True
            self._changed.notify_all()

    def note_and_wait(self, record: bytes, *, timeout_s: float) -> None:
        """Send a record and wait until every server has it.

        Raises:
            CoordinatorReplaced: a newer coordinator has the job.
            DeadlineExceeded: a server did not confirm in time.
        """
        self.note(record)
        with self._changed:
            wanted = self._serial
            done = self._changed.wait_for(
                lambda: self.replaced is not None or min(self._known) >= wanted, timeout_s
            )
        self.check()
        if not done:
            raise DeadlineExceeded(
                f"not all parameter servers have noted the position of job {self.job!r} within "
                f"{timeout_s:g} s"
            )

    def server_lost(self, server: int) -> None:
        """Note that a server is about to be restored: until then no coordinator may adopt its part of the job."""
        with self._changed:
            self._is_complete[server], self._known[server] = False, 0

    def server_restored(self, server: int) -> None:
        """Note that a restarted server has its variables again."""
        with self._changed:
            self._is_complete[server], self._has_work = True, True
            self._restored[server] += 1
            self._changed.notify_all()

    def check(self) -> None:
        """Raise `CoordinatorReplaced` if a newer coordinator has the job."""
        if self.replaced is not None:
            raise self.replaced

    def _keep(self) -> None:
        """Send signs of life and records until closed or replaced. The heartbeat's thread."""
        pause_s = HEARTBEAT_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_work, pause_s)
                if self._closed:
                    return
                self._has_work = False
            before = self.before_beat
            pause_s = SOON_S if before is not None and before() else HEARTBEAT_S
            with self._changed:
                record, serial = self._record, self._serial
            try:
                for server in range(len(self._servers)):
                    self._send(server, record, serial)
                for server in range(len(self._servers)):
                    self._collect(server)
            except CoordinatorReplaced as error:
                if not self._closed:
                    self._lose(error)
                return

    def _send(self, server: int, record: bytes, serial: int) -> None:
        if self._pending[server] is not None:
            return  # it has not answered the last one
        with self._changed:
            is_new = self._is_complete[server] and serial > self._known[server]
            self._restored_then[server] = self._restored[server]
        message = messages.KeepJob(
            session=self.session,
            instance=self.instance,
            epoch=self.epoch,
            serial=serial if is_new else 0,
            record=record if is_new else b"",
        )
        try:
            self._pending[server] = self._connections[server].begin(message)
        except (WireError, ParameterServerLost):
            self._connect_again(server)

    def _collect(self, server: int) -> None:
        """Take in the answer of a server if it comes soon; else look again at the next turn."""
        pending, connection = self._pending[server], self._connections[server]
        deadline = time.monotonic() + HEARTBEAT_S / 2
        while pending is not None and not (
            connection.is_answered(pending) or connection.is_cut_off
        ):
            if time.monotonic() > deadline or self._closed:
                return
            time.sleep(0.002)
        if pending is None:
            return
        self._pending[server] = None
        try:
            answer = connection.collect(pending, timeout_s=RETRY_S).message
        except NotFoundError:  # it was restarted
            with self._changed:
                self._known[server] = 0
                if self._restored_then[server] == self._restored[server]:
                    self._is_complete[server] = False
                else:  # and restored since: say it again
                    self._has_work = True
        except (WireError, ParameterServerLost):
            self._connect_again(server)
        else:
            assert isinstance(answer, messages.JobKept)
            with self._changed:
                self._known[server] = answer.serial
                self._changed.notify_all()

    def _connect_again(self, server: int) -> None:
        self._pending[server] = None
        self._connections[server].close()
        connection = ServerConnection(*self._servers[server], self._membership)
        self._connections[server] = connection
        try:
            connection.open(timeout_s=RETRY_S)
        except WireError as error:
            _log.debug(
                "%s does not hear the coordinator of job %r: %s", connection.task, self.job, error
            )

    def _lose(self, error: CoordinatorReplaced) -> None:
        _log.error("%s", error)
        with self._changed:
            self.replaced = error
            self._changed.notify_all()
            call = self._on_replaced
        if call is not None:
            call(error)

    @override
    def close(self) -> None:
        """End the thread and close the connections. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
        self._disconnect()

    def _disconnect(self) -> None:
        for connection in self._connections:
            connection.close()

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed else "replaced" if self.replaced else "open"
        return f"<JobConnection of {self.job!r}, epoch {self.epoch}, {state}>"
