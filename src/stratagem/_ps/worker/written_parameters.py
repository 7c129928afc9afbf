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
from stratagem._ps.worker.dense_parameter import COMPARED, DenseParameter, written_among
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


@final
class WrittenParameters:
    """The parameters of one worker that its functions write.

    Args:
        dense: all dense parameters, by the id of their leaves.
        is_sole: whether the cluster has no other worker.

    Attributes:
        copied: the tables of which the function has copies.
    """

    def __init__(self, dense: dict[int, DenseParameter], *, is_sole: bool) -> None:
        self._dense = dense
        self.copied: list[WorkerRows] = []
        self.is_sole = is_sole
        self._turn = 0  # parameter to search next for writes that torch did not count
        self.has_sent = False
        """True if a trained parameter was sent: from then on the versions of all parameters are noted."""

    def suspects(self) -> list[DenseParameter]:
        """Return the parameters that the function may have written."""
        every = self._dense.values()
        suspects = written_among(every)
        # Small variables share pages, which show that something was written, but not what.
        return suspects + [
            one
            for one in every
            if not one.leaf.requires_grad
            and one.is_live
            and one.leaf.numel() > COMPARED
            and one not in suspects
            and one.is_written(thorough=True)
        ]

    def find(self) -> list[DenseParameter]:
        """Return the parameters that the function wrote, without those that it must not write."""
        return self.allowed(self.suspects())

    def allowed(self, suspects: Iterable[DenseParameter]) -> list[DenseParameter]:
        """Return those of the suspects that the function may write."""
        # With several workers, a value that was put back is no write: SAM's perturbation.
        return [
            one
            for one in suspects
            if not one.leaf.requires_grad or self.is_sole or not one.is_changed()
        ]

    def tables(self) -> list[tuple[RemoteVariable, Tensor]]:
        """Return the tables that the function wrote, with their values."""
        found = [(cast("RemoteVariable", one.source), one.written()) for one in self.copied]
        return [(remote, value) for remote, value in found if value is not None]

    def follow_step(self) -> None:
        """Update the function's copies of tables after a step of an optimizer."""
        for one in self.copied:
            one.follow_step()

    def forget_copies(self) -> None:
        """Forget the function's copies of tables, at its end."""
        for one in self.copied:
            one.forget()
        self.copied.clear()

    def add_changes(
        self,
        written: Iterable[DenseParameter],
        tables: Iterable[tuple[RemoteVariable, Tensor]],
        batch: WriteBatch,
    ) -> list[_Base]:
        """Add the values that differ from the servers' to a batch; return the trained ones."""
        trained: list[_Base] = []
        for remote, value in tables:
            remote.add_assign(batch, "set", value)
            trained.append(_Base(remote, remote.seen))
        for dense in written:
            if dense.is_changed():
                dense.add_change(batch)
                if dense.leaf.requires_grad:
                    trained.append(_Base(dense.remote, dense.remote.seen))
        return trained

    def check(
        self, trained: Iterable[_Base], versions: Mapping[tuple[int, int], int], own: int
    ) -> None:
        """Raise if another task wrote one of these parameters since this worker read it.

        Args:
            trained: what `add_changes` returned.
            versions: of the variables after the writes, by server and variable.
            own: how many writes each variable got from this worker, at most.
        """
        for remote, seen in trained:
            for place, before in zip(remote.places, seen, strict=True):
                after = versions.get((place.server, place.variable), 0)
                if self.has_sent and before > 0 and after > before + own:
                    raise ForeignParameterError(
                        f"parameter {remote.name!r} was written in place inside a scheduled "
                        f"function while another task wrote it ({after - before - own} times): those "
                        "writes are lost. Functions may write trained parameters only while no other worker and "
                        f"no code on the coordinator changes them. {SGD_INSTEAD}"
                    )
        self.has_sent = self.has_sent or bool(trained)

    def discard(self) -> None:
        """Forget what a failed function wrote."""
        for dense in self.find():
            dense.undo_write()

    def undo(self, *, may_be: bool = True) -> list[DenseParameter]:
        """Restore written parameters at the function's end; return the trained ones among them.

        `may_be`: False if there are no `suspects`.

        Writes that only the kernel knows of are looked for in one parameter per closure, in turn. If that
        one was written, all are searched.
        """
        written = written_among(self._dense.values()) if may_be else []
        if not written:
            self._turn = (self._turn + 1) % len(self._dense)
            looked_at = next(itertools.islice(self._dense.values(), self._turn, None))
            if looked_at.is_written(thorough=True):
                written = [one for one in self._dense.values() if one.is_written(thorough=True)]
        trained = [dense for dense in written if dense.leaf.requires_grad and dense.is_changed()]
        for dense in written:
            dense.undo_write()
        return trained

    def refusal(self, written: DenseParameter) -> ForeignParameterError:
        """Return the error for a trained parameter that was written and not sent."""
        reason = (
            "torch did not count the write (it went through an array or a tensor that was taken in an "
            "earlier function), so that it cannot be sent."
            if self.is_sole
            else "With several workers, each would overwrite the others' updates, so that a worker's copy of a "
            "trained parameter is not sent back."
        )
        return ForeignParameterError(
            f"parameter {written.remote.name!r} was written in place inside a scheduled function. It is "
            f"stored on parameter servers. {reason} Let step() of an optimizer made inside "
            "`with strategy.scope():` update it (not of one made in the function), use a sg.Variable's "
            "assign methods, freeze it (requires_grad=False) if functions are to write it, write it on the "
            f"coordinator, or use one worker. {SGD_INSTEAD}"
        )

    @override
    def __repr__(self) -> str:
        return f"<WrittenParameters {len(self.find())} of {len(self._dense)} parameters written>"
