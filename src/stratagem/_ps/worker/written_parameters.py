"""Parameters that a scheduled function writes in place, without an optimizer.

Frozen parameters are running statistics, targets and moving averages: their new values are sent, like buffers. A trained
parameter that the function wrote (an update by hand, clipping of weights, SAM's perturbation) is sent as well if this
worker is the cluster's only one: before the next step of an optimizer, or at the function's end. With several workers,
each would overwrite the others' updates, so the function gets an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast, final

from torch import Tensor
from typing_extensions import override

from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.client.write_batch import WriteBatch
from stratagem._ps.tables.worker_rows import WorkerRows
from stratagem._ps.worker.dense_parameter import DenseParameter, written_among
from stratagem._ps.worker.worker_buffers import WorkerBuffer
from stratagem.errors import ForeignParameterError

SGD_INSTEAD = (
    "An update by hand, parameter.add_(parameter.grad, alpha=-lr), is\n"
    "    with strategy.scope(): optimizer = torch.optim.SGD(model.parameters(), lr=lr)\n"
    "and\n"
    "    optimizer.zero_grad(); loss.backward()\n"
    "    optimizer.step()\n"
    "in the function."
)
"""Remedy in errors about parameters that functions write."""


class _Base(NamedTuple):
    """A trained parameter that was sent, and the versions of the value that the function wrote over."""

    remote: RemoteVariable
    versions: tuple[int, ...]


class FunctionWrites(NamedTuple):
    """What a function wrote: parameters, those of them whose values may differ, tables with their values, and buffers."""

    dense: list[DenseParameter]
    changed: list[DenseParameter]
    tables: list[tuple[RemoteVariable, Tensor]]
    buffers: list[WorkerBuffer]

    def __bool__(self) -> bool:
        return bool(self.dense or self.tables or self.buffers)

    def add_changes(self, batch: WriteBatch) -> list[_Base]:
        """Add the values that differ from the servers' to a batch; return the trained ones."""
        for buffer in self.buffers:
            buffer.add_change(batch)
        trained: list[_Base] = []
        for remote, value in self.tables:
            remote.add_assign(batch, "set", value)
            trained.append(_Base(remote, remote.seen))
        for one in self.changed:
            one.add_change(batch)
            if one.leaf.requires_grad:
                trained.append(_Base(one.remote, one.remote.seen))
        return trained

    def undo(self, *, watch: bool) -> None:
        """Restore the servers' values after they were sent; `watch`: the function goes on."""
        for one in self.dense:
            one.undo_write(watch=watch)


@final
class WrittenParameters:
    """The parameters and buffers of one worker that its functions write.

    Args:
        dense: all dense parameters, by the id of their leaves.
        buffers: all buffers, by the id of their tensors.
        is_sole: whether the cluster has no other worker.

    Attributes:
        copied: the tables of which the function has copies.
    """

    def __init__(
        self,
        dense: Mapping[int, DenseParameter],
        buffers: Mapping[int, WorkerBuffer],
        *,
        is_sole: bool,
    ) -> None:
        self._dense = dense
        self._buffers = buffers
        self.copied: list[WorkerRows] = []
        self.is_sole = is_sole
        self._turn = 0  # parameter to search next for writes that nothing noted

    def find(self) -> FunctionWrites:
        """Return what the function wrote.

        Raises:
            ForeignParameterError: it must not write one of these.
        """
        tables = [(cast("RemoteVariable", one.source), one.written()) for one in self.copied]
        dense = written_among(self._dense.values())
        # A value that was put back is no write: SAM's perturbation.
        changed = [one for one in dense if one.is_changed()]
        for one in changed:
            if one.leaf.requires_grad and not self.is_sole:
                raise _refusal(one, _SEVERAL)
        written = [(remote, value) for remote, value in tables if value is not None]
        buffers = [one for one in self._buffers.values() if one.is_changed()]
        return FunctionWrites(dense, changed, written, buffers)

    def check(
        self, trained: Iterable[_Base], versions: Mapping[tuple[int, int], int], own: int
    ) -> None:
        """Raise if another task wrote one of these parameters since this worker read it.

        Args:
            trained: what `FunctionWrites.add_changes` returned.
            versions: of the variables after the writes, by server and variable.
            own: how many writes each variable got from this worker, at most.
        """
        for remote, seen in trained:
            for place, before in zip(remote.places, seen, strict=True):
                after = versions.get((place.server, place.variable), 0)
                if before > 0 and after > before + own:
                    raise ForeignParameterError(
                        f"parameter {remote.name!r} was written in place inside a scheduled "
                        f"function while another task wrote it ({after - before - own} times): those "
                        "writes are lost. Functions may write trained parameters only while no other worker and "
                        f"no code on the coordinator changes them. {SGD_INSTEAD}"
                    )

    def follow_step(self) -> None:
        """Update the function's copies of tables after a step of an optimizer."""
        for one in self.copied:
            one.follow_step()

    def undo(self, *, succeeded: bool) -> ForeignParameterError | None:
        """Restore what the function wrote and did not send, at its end; return an error if nothing noted a write.

        After a success there is nothing to restore: `find` has found the writes, and they were sent. Writes that only the
        kernel knows of are looked for in one parameter per closure, in turn. If that one was written, all are searched.
        """
        for buffer in self._buffers.values():
            buffer.end_closure(succeeded=succeeded)
        for rows in self.copied:
            rows.forget()
        self.copied.clear()
        for dense in () if succeeded else written_among(self._dense.values()):
            dense.undo_write()
        unnoted: list[DenseParameter] = []
        if self._dense:
            self._turn = (self._turn + 1) % len(self._dense)
            looked_at = next(itertools.islice(self._dense.values(), self._turn, None))
            if looked_at.is_written(thorough=True):
                unnoted = [one for one in self._dense.values() if one.is_written(thorough=True)]
        for dense in unnoted:
            dense.undo_write()
        return _refusal(unnoted[0], _UNNOTED) if unnoted else None

    @override
    def __repr__(self) -> str:
        return f"<WrittenParameters of {len(self._dense)} parameters>"


_SEVERAL = (
    "With several workers, each would overwrite the others' updates, so that a worker's copy of a "
    "trained parameter is not sent back."
)
_UNNOTED = (
    "torch did not count the write (it went through an array or a tensor that was taken in an "
    "earlier function), so that it cannot be sent."
)


def _refusal(written: DenseParameter, reason: str) -> ForeignParameterError:
    return ForeignParameterError(
        f"parameter {written.remote.name!r} was written in place inside a scheduled function. It is "
        f"stored on parameter servers. {reason} Let step() of an optimizer made inside "
        "`with strategy.scope():` update it (not of one made in the function), use a sg.Variable's "
        "assign methods, freeze it (requires_grad=False) if functions are to write it, write it on the "
        f"coordinator, or use one worker. {SGD_INSTEAD}"
    )
