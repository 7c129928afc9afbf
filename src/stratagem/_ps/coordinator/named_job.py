"""State of a named job on its coordinator: adoption, variables, and closure numbers.

See docs/design/0009. `CoordinatorVariables` compares what the script creates with the live job; `_checkpoint/job_position.py`
puts the position back; `_cluster/coordinator` numbers closures and incarnations by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, final

from typing_extensions import override

from stratagem import _faults as faults
from stratagem._owner import Owner
from stratagem._ps.client.job_connection import JobConnection
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.number_ranges import NumberRanges
from stratagem._wire import codec
from stratagem.errors import JobMismatch, MisuseError

_SHOWN: Final = 20
"""Differences that an error lists."""


@final
class NamedJob(Owner):
    """The named job of one strategy.

    Attributes:
        connection: to the servers that hold the job; knows its name, instance, epoch and seed.
        state: what the servers knew before this coordinator.
        is_attaching: the variables of a live job are being adopted, until `resumed`.
        first_closure: number of the next closure, at the start of this coordinator.
        rewinds: after a server was restored, all of them return to the checkpoint; until then the job cannot be adopted.
    """

    def __init__(self, connection: JobConnection) -> None:
        self.connection = connection
        self.state = connection.state
        self.is_attaching = self.state.is_live
        self.first_closure = 1
        self.rewinds = False
        self._is_mixed = False
        self._deleted: dict[int, NumberRanges] = {}
        for server, ranges in self.state.deleted.items():
            self._deleted[server] = NumberRanges()
            self._deleted[server].merge(ranges)
        if self.is_attaching and faults.active is not None:
            faults.active.at("coordinator.in_attach")

    def check_backups(self, backups: int) -> None:
        """Compare the script's number of backups with the live job.

        Raises:
            JobMismatch: they differ.
        """
        if self.is_attaching and bool(self.state.shards) != bool(backups):
            live = int(bool(self.state.shards))
            self._raise([f"the script has backups={backups}, the live job backups={live}"])

    @property
    def first_incarnation(self) -> int:
        """A number below those of the incarnations of workers in this epoch, above those of earlier ones."""
        return self.connection.epoch << 20

    # -- adoption -----------------------------------------------------------------------------

    def match(self, wanted: Sequence[tuple[ShardLocation, str, Any]]) -> None:
        """Compare shards that the script creates with those of the live job.

        Raises:
            JobMismatch: lists the differences.
        """
        if self.is_attaching:
            self._raise(list(self._differences(wanted)))

    def match_all(
        self, wanted: Sequence[tuple[ShardLocation, str, Any]], *, next_number: int, may_lack: bool
    ) -> None:
        """Compare all shards of the script, numbered below `next_number`, with the live job.

        `may_lack`: lazy parameters of the script have no number yet.
        """
        found = list(self._differences(wanted))
        if not may_lack:
            found += [
                f"{one.name!r} {one.shape} {one.dtype} of the live job is not created by the script"
                for (_, number), one in sorted(self.state.variables.items())
                if number >= next_number
            ]
        self._raise(found)

    def match_optimizer(self, number: int, class_name: str) -> None:
        """Compare an optimizer with the live job.

        Raises:
            JobMismatch: the job has another class.
        """
        known = self.state.optimizers.get(number)
        if known is not None and known != class_name:
            self._raise(
                [f"the optimizer is a {class_name} in the script, a {known} in the live job"]
            )

    def _differences(self, wanted: Sequence[tuple[ShardLocation, str, Any]]) -> Iterator[str]:
        live = self.state.variables
        for place, name, _ in wanted:
            dtype = codec.dtype_name(place.dtype)
            made = f"{name!r} {place.shape} {dtype}"
            known = live.get((place.server, place.variable))
            if known is None:
                deleted = self._deleted.get(place.server)
                if deleted is None or place.variable not in deleted:
                    yield f"{made} is not in the live job"
            elif (known.name, tuple(known.shape), known.dtype) != (name, place.shape, dtype):
                yield f"{made} is {known.name!r} {tuple(known.shape)} {known.dtype} in the live job"

    def _raise(self, differences: list[str]) -> None:
        if not differences:
            return
        shown = "".join(f"\n  - {one}" for one in differences[:_SHOWN])
        more = f"\n  - and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise JobMismatch(
            f"the script does not create the variables of the live job {self.connection.job!r}:{shown}{more}\n"
            "Start the script that created the job, or use another job name for this one.",
            differences=differences,
        )

    def check_resumed(self) -> None:
        """Raise before the position of a live job was put back, and after a replacement.

        Raises:
            MisuseError: `restore_or_initialize` was not called.
            CoordinatorReplaced: a newer coordinator has the job.
        """
        self.connection.check()
        if self.is_attaching:
            raise MisuseError(
                f"job {self.connection.job!r} is live, and this script does not continue it. Call "
                "CheckpointManager.restore_or_initialize() before scheduling, and begin the loop at the "
                "step that it returns; or use another job name to begin a new job."
            )

    def resumed(self, first_closure: int) -> None:
        """Note that the position was put back: closures go on at this number."""
        self.is_attaching = False
        self.first_closure = first_closure

    # -- the connection -----------------------------------------------------------------------

    def note(self, record: bytes) -> None:
        """Send the position to the servers soon; never wait."""
        if not self._is_mixed:
            self.connection.note(record)

    def note_and_wait(self, record: bytes, *, timeout_s: float) -> None:
        """Send the position and wait until every server has it."""
        if not self._is_mixed:
            self.connection.note_and_wait(record, timeout_s=timeout_s)

    def suspend(self, *, timeout_s: float) -> None:
        """Make the job one that cannot be adopted, and wait until every server knows."""
        self._is_mixed = False  # the caller is about to restore all servers
        self.connection.note_and_wait(b"", timeout_s=timeout_s)

    def server_lost(self, server: int) -> None:
        """Note that a server is about to be restored."""
        self.connection.server_lost(server)

    def server_restored(self, server: int, *, is_older: bool) -> None:
        """Note that a server has its variables again, or older ones (`is_older`)."""
        if is_older and self.rewinds:
            self._is_mixed = True
            self.connection.note(b"")
        self.connection.server_restored(server)

    @override
    def close(self) -> None:
        """Close the connections. May be called again."""
        self.connection.close()

    @override
    def __repr__(self) -> str:
        return f"<NamedJob {self.connection.job!r}, epoch {self.connection.epoch}>"
