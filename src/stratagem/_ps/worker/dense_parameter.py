"""Dense parameters of a worker: the leaves that functions see, and the slots of their gradients.

The gradient of a dense parameter has a slot in shared memory (`client/send_buffers.py`). A large gradient moves
there as soon as autograd has accumulated it: ``parameter.grad`` then is a tensor over the slot, later backward
passes add to it in place, and a step sends it without a copy. Small gradients are copied into their slots
by the step, all in one call. Rows of tables, sparse gradients, shards and gradients that the user still holds
from an earlier step are copied when they are sent. Over connections a large gradient is sent from the tensor itself.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from stratagem._core.torch_patches.numpy_views import plain_numpy, watch_numpy
from stratagem._core.torch_patches.parameter_attributes import watch_data
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.client.send_buffers import GradientSlot, LentGradient
from stratagem._ps.client.write_batch import SlotGradient, WriteBatch
from stratagem._ps.types import Gradient, have_same_bits
from stratagem._ps.worker.worker_copies import LocalValue
from stratagem.errors import ForeignParameterError

IN_PLACE_BYTES: Final = 1 << 17
"""From this size on a gradient stays in its slot; a smaller one is copied in less time than the hook takes."""

COMPARED: Final = 1 << 16
"""Numbers up to which a copy that functions may write is compared as a whole (20 µs)."""

PROBED: Final = 256
"""Numbers of a trained parameter's copy that are compared (1 µs)."""


@final
class DenseParameter(LocalValue):
    """A parameter used as a whole: the leaf that functions see, and the slot of its gradient.

    Functions may write a frozen one, as running statistics and moving averages are, and the only worker's functions a
    trained one: its value is sent like a buffer's (`written_parameters.py`).

    Attributes:
        leaf: the worker's parameter.
        is_live: whether the leaf lies over the servers' memory. Otherwise it is a copy: on other hosts, of
            variables in several shards, and of small frozen parameters, since small variables share pages.
    """

    __slots__ = (
        "__weakref__", "_address", "_before", "_generation", "_probe", "_slot", "_start", "_version", "is_live", "leaf",
    )  # fmt: skip

    def __init__(
        self, remote: RemoteVariable, *, requires_grad: bool, channels_last: bool = False
    ) -> None:
        mapped = remote.mapped if len(remote.places) == 1 else None
        is_small = math.prod(remote.shape) <= COMPARED
        self.is_live = mapped is not None and (requires_grad or not is_small) and not channels_last
        data = mapped[0].tensor if mapped is not None and self.is_live else remote.read()
        if channels_last:  # servers keep the dimensions in order
            data = data.movedim(1, -1).contiguous().movedim(-1, 1)
        super().__init__(remote, data)
        self.leaf = nn.Parameter(data, requires_grad=requires_grad)
        watch_data(self)
        self._slot: GradientSlot | LentGradient | None = None
        self._generation = -1
        self._watch_memory()

    def lay_over_memory(self) -> bool:
        """Use the memory of the server that has taken the variable over; False if a copy must do."""
        mapped = self.remote.mapped
        self.is_live = mapped is not None
        self.replace_memory(mapped[0].tensor if mapped is not None else self.remote.read())
        self.leaf.data = self.data
        self._watch_memory()
        return self.is_live

    def _watch_memory(self) -> None:
        """Note the value in new memory: the servers'."""
        watch_numpy(self)
        self._address = self.data.data_ptr()
        # The value when the function asked for ``.data`` or ``.numpy()``.
        self._before: Tensor | None = None
        # Of a copy, an array of numbers that show whether it was written: torch does not count all writes.
        self._probe: Any = None
        if not self.is_live:
            flat = self.data.as_strided((self.data.numel(),), (1,))
            compared = PROBED if self.leaf.requires_grad else COMPARED
            numbers = plain_numpy(flat.view(torch.uint8)).reshape(-1, flat.element_size())
            self._probe = numbers[:: 1 + flat.numel() // compared]
        self.note()

    @property
    @override
    def is_refreshable(self) -> bool:
        return not self.is_live

    @override
    def note(self) -> None:
        self._version = self.leaf._version
        if self._probe is not None:
            self._start = self._probe.tobytes()
        if self._before is not None:  # an array over the memory may be written later
            self._before = self.leaf.detach().clone()

    def is_written(self, *, thorough: bool = False) -> bool:
        """Return whether the function may have written the leaf; `thorough` asks the kernel about writes that nothing noted."""
        leaf = self.leaf
        if leaf._version != self._version or leaf.data_ptr() != self._address:
            return True
        if self._before is not None:
            return True
        if self._probe is not None:
            return bool(self._probe.tobytes() != self._start)
        mapped = self.remote.mapped if thorough else None
        return mapped is not None and mapped[0].is_overwritten()

    def note_data(self) -> None:
        """Keep the value: the function asks for ``.data`` or for an array, and torch counts no writes through them."""
        if self._before is None:
            self._before = self.leaf.detach().clone()

    def is_changed(self) -> bool:
        """Return whether the value of a written leaf may differ from the one that the function began with."""
        if self._before is None:
            return True
        if have_same_bits(self._before, self.leaf.detach()):
            return False
        mapped = self.remote.mapped if self.leaf.data_ptr() == self._address else None
        # Of a live value, another worker may have made the difference.
        return not self.is_live or mapped is None or mapped[0].may_be_overwritten()

    def undo_write(self, *, watch: bool = False) -> None:
        """Restore the servers' value; `watch`: the function may still have ``.data`` or an array."""
        is_watched, self._before = watch and self._before is not None, None
        self.leaf.data = self.data
        self.note()
        if self.is_live:
            assert self.remote.mapped is not None
            self.remote.mapped[0].refresh()
        else:
            self.remote.forget_seen()  # the next refresh reads it again
        if is_watched:
            self.note_data()

    def add_change(self, batch: WriteBatch) -> None:
        """Send the value that the function wrote."""
        value = self.leaf.detach()
        if value.shape != self.data.shape or value.dtype != self.data.dtype:
            raise ForeignParameterError(
                f"parameter {self.remote.name!r} was given {tuple(value.shape)} {value.dtype} inside a "
                f"scheduled function: expected {tuple(self.data.shape)} {self.data.dtype}, as on the "
                "parameter servers."
            )
        self.remote.add_assign(batch, "set", value)

    # -- the gradient's slot ------------------------------------------------------------------

    def keep_gradient_in_slot(self) -> None:
        """Move large gradients of the leaf into the slot whenever autograd has accumulated one."""
        if self.leaf.nbytes < IN_PLACE_BYTES or not isinstance(self.slot(), GradientSlot):
            return
        reference = weakref.ref(self)  # the leaf, which this object holds, holds the hook

        def accumulated(_: Tensor) -> None:
            dense = reference()
            if dense is not None:
                dense._move_into_slot()

        needed = self.leaf.requires_grad
        self.leaf.requires_grad_()  # torch takes hooks for no other; it may be unfrozen later
        self.leaf.register_post_accumulate_grad_hook(accumulated)
        self.leaf.requires_grad_(needed)

    def slot(self) -> GradientSlot | LentGradient | None:
        """Return the slot of the gradient, or how it is lent; None if the variable is cut."""
        outbox = self.remote.client.outbox
        if self._slot is None or self._generation != outbox.buffers.generation:
            places = self.remote.places
            if len(places) > 1 or not self.leaf.numel():
                return None
            there = outbox.destinations[places[0].server]
            dtype = there.dtype_of(self.leaf.dtype)
            is_plain = dtype is self.leaf.dtype and self.leaf.is_contiguous()
            if self.leaf.nbytes >= IN_PLACE_BYTES and is_plain and not there.shares_memory:
                self._slot = LentGradient(self.leaf)
            else:
                self._slot = outbox.buffers.new_slot(tuple(self.leaf.shape), dtype)
            self._generation = outbox.buffers.generation
        return self._slot

    def _move_into_slot(self) -> None:
        grad, slot = self.leaf.grad, self.slot()
        if grad is None or not isinstance(slot, GradientSlot) or slot.holds(grad):
            return
        fits = slot.view.dtype is grad.dtype is self.leaf.dtype
        if slot.is_free and fits and grad.layout is torch.strided and not grad.requires_grad:
            into = slot.take()
            into.copy_(grad)
            self.leaf.grad = into

    def leave_slot(self) -> None:
        """Copy the gradient out of the slot, which is not used again: a server may still read it."""
        slot, grad = self._slot, self.leaf.grad
        if isinstance(slot, GradientSlot) and grad is not None and slot.holds(grad):
            self.leaf.grad = grad.clone()
        self._slot = None

    def release(self) -> None:
        """Give the slot back: the parameter is gone."""
        if isinstance(self._slot, GradientSlot):
            self.remote.client.outbox.buffers.free_slot(self._slot)
        self._slot = None

    def gradients(self, *, in_slot: bool) -> Iterator[tuple[int, Gradient | SlotGradient]]:
        """Yield each server's part of the leaf's gradient; `in_slot`: its content is in the slot."""
        grad, slot, places = (
            self.leaf.grad,
            self.slot() if in_slot else self._slot,
            self.remote.places,
        )
        if grad is None:
            return
        if grad.is_sparse:
            grad = grad.coalesce()
            yield from gradient_parts(self.remote, grad.values(), grad.indices()[0], sparse=True)
        elif slot is not None and (
            in_slot or (isinstance(slot, GradientSlot) and slot.holds(grad))
        ):
            yield places[0].server, SlotGradient(places[0].variable, slot)
        else:
            yield from gradient_parts(self.remote, grad)


def written_among(parameters: Iterable[DenseParameter]) -> list[DenseParameter]:
    """Return those for which `DenseParameter.is_written` is true; quicker than a call for each."""
    return [
        one
        for one in parameters
        if one.leaf._version != one._version
        or one.leaf.data_ptr() != one._address
        or one._before is not None
        or (one._probe is not None and one._probe.tobytes() != one._start)
    ]


def gradient_parts(
    remote: RemoteVariable,
    values: Tensor | None,
    ids: Tensor | None = None,
    *,
    sparse: bool = False,
) -> Iterator[tuple[int, Gradient]]:
    """Yield each server's part of a gradient: of a whole one (`ids` None), or of sorted unique rows.

    Shards without a row get an empty gradient: their optimizer's step count and moments move too.
    """
    assert values is not None
    if ids is None:
        for place, part in zip(remote.places, remote.cut(values), strict=True):
            yield place.server, Gradient(variable=place.variable, values=part)
        return
    clocks = remote.keys.take_clocks()
    cuts = remote.layout.cut_sorted(ids)
    for index, (place, offset, (begin, end)) in enumerate(
        zip(remote.places, remote.layout.offsets, cuts, strict=True)
    ):
        yield (
            place.server,
            Gradient(
                variable=place.variable,
                values=values[begin:end],
                ids=ids[begin:end] - offset,
                sparse=sparse,
                clock=clocks.get(index, -1),
            ),
        )
