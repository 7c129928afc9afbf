"""Buffers on a worker: private copies, whose changes are sent with the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from stratagem._core.torch_patches.private_api import version_of
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.client.write_batch import WriteBatch
from stratagem._ps.types import have_same_bits
from stratagem._ps.worker.dense_parameter import COMPARED
from stratagem._ps.worker.worker_copies import LocalValue


class WorkerBuffer(LocalValue):
    """Copy of one buffer on this worker.

    Attributes:
        tensor: what functions see.
        counts: increases of several workers add up.
    """

    __slots__ = ("_noted", "_replacement", "_start", "_stored", "counts", "tensor")

    def __init__(self, remote: RemoteVariable, *, counts: bool) -> None:
        self.counts = counts
        self.tensor = remote.read()
        self._stored = self.tensor.shape, self.tensor.dtype
        # A tensor that the function assigned to the buffer's name: the tensor, the module's dict, the name.
        self._replacement: tuple[Tensor, dict[str, Tensor | None], str] | None = None
        # Batch normalisation writes its statistics without counting a version, so that small
        # buffers are compared by value.
        self._start = self.tensor.clone() if self.tensor.numel() <= COMPARED else None
        super().__init__(remote, self.tensor.data)
        self.note()

    @property
    def _present(self) -> Tensor:
        return self.tensor if self._replacement is None else self._replacement[0]

    @property
    @override
    def is_refreshable(self) -> bool:
        return self._replacement is None

    @override
    def take(self, values: Sequence[memoryview | None]) -> None:
        if self.parts is None:  # torch does not resize memory with parts
            self._check_form(self.tensor)
        super().take(values)

    @override
    def note(self) -> None:
        self._noted = self._present, version_of(self._present)
        if self._start is not None:
            self._start.copy_(self._present.detach())

    def is_changed(self) -> bool:
        """Return whether the step wrote the buffer."""
        present = self._present
        if self._start is not None:
            return not have_same_bits(present.detach(), self._start)
        return self._noted[0] is not present or self._noted[1] != version_of(present)

    def add_change(self, batch: WriteBatch) -> None:
        """Add the change to a batch: a counter's increase, any other buffer's new value."""
        present = self._present.detach()
        self._check_form(present)
        if self.counts and self._start is not None:
            self.remote.add_assign(batch, "add", present - self._start)
        else:
            self.remote.add_assign(batch, "set", present)
        self.note()

    def put(self, tensor: Tensor, buffers: dict[str, Tensor | None], name: str) -> None:
        """Note that the function assigned a tensor to the buffer's name in a module."""
        self._replacement = None if tensor is self.tensor else (tensor, buffers, name)

    def end_closure(self, *, succeeded: bool) -> None:
        """Give the module the worker's copy back; discard what a failed function wrote."""
        if self._replacement is not None or (not succeeded and self.is_changed()):
            self.remote.forget_seen()  # the next refresh reads it again
        if self.tensor.shape != self._stored[0] and not succeeded:  # a layer resized it in place
            self.tensor.data = self.tensor.new_zeros(self._stored[0])
            self.replace_memory(self.tensor.data)
        if self._replacement is not None:
            _, buffers, name = self._replacement
            self._replacement = None
            dict.__setitem__(buffers, name, self.tensor)

    def _check_form(self, tensor: Tensor) -> None:
        shape, dtype = self._stored
        if (tensor.shape, tensor.dtype) != self._stored:
            raise ValueError(
                f"buffer {self.remote.name!r} was given {tuple(tensor.shape)} {tensor.dtype} inside "
                f"a scheduled function, but is stored on a parameter server as {tuple(shape)} {dtype}: expected the "
                "same. If its layer finds the size in its first forward pass, as observers of quantization do, "
                "make one forward pass on the coordinator before the first schedule()."
            )


class NewBuffers:
    """Buffers that functions add to the coordinator's modules, and that no server knows.

    A buffer that is not part of the state dict may stay the worker's own, as caches do. Any other would be missing
    on the coordinator and different on every worker, so it is refused.

    Attributes:
        is_view: whether a module is the worker's view of one of the coordinator's; any other is the
            function's own.
    """

    def __init__(self) -> None:
        self.is_view: Callable[[nn.Module], bool] = lambda module: False
        self._noted: list[tuple[nn.Module, str]] = []

    def note(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Note a buffer that a function registers, or a tensor for a name that was registered as None."""
        held: Any = module._buffers
        if not self.is_view(module) or name in getattr(held, "kept", ()):
            return  # of a kept one, the function itself has set it to None, or deleted it
        if name not in held:
            self._noted.append((module, name))  # whether it is persistent, torch notes after this
        elif (
            dict.__getitem__(held, name) is None and name not in module._non_persistent_buffers_set
        ):
            raise _own_buffer(module, name, tensor, "is None on the coordinator and was given")

    def take_back(self) -> ValueError | None:
        """Remove the function's new buffers of the state dict; return an error if there was one.

        The next function that registers such a buffer gets the error, too.
        """
        found = None
        while self._noted:
            module, name = self._noted.pop()
            held: Any = module._buffers
            if name in module._non_persistent_buffers_set or dict.get(held, name) is None:
                continue
            found = _own_buffer(module, name, dict.pop(held, name), "was registered as")
        return found


def _own_buffer(module: nn.Module, name: str, tensor: Tensor, what: str) -> ValueError:
    return ValueError(
        f"buffer {name!r} of {type(module).__name__} {what} a tensor {tuple(tensor.shape)} {tensor.dtype} inside a "
        "scheduled function: no parameter server knows it, and it would stay this worker's own. Give it a tensor of its "
        "shape on the coordinator before you schedule the function; or register it with persistent=False if every "
        "worker is to have its own."
    )


class WatchedBuffers(dict[str, Any]):
    """A module's ``_buffers`` on a worker; notices assignments to the names of buffers on servers (`kept`)."""

    __slots__ = ("kept",)

    def __init__(self, plain: Mapping[str, Any], kept: dict[str, WorkerBuffer]) -> None:
        super().__init__(plain)
        self.kept = kept

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        dict.__setitem__(self, name, value)
        kept = self.kept.get(name)
        if kept is not None and value is not None:
            kept.put(value, self, name)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)  # a copy is a plain dict

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)
