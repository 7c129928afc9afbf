"""Buffers on a worker: private copies, whose changes are sent with the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from stratagem._core.torch_patches.private_api import version_of
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.client.write_batch import WriteBatch
from stratagem._ps.worker.dense_parameter import COMPARED
from stratagem._ps.worker.worker_copies import CopyMemory


class WorkerBuffer:
    """Copy of one buffer on this worker."""

    __slots__ = (
        "_memory",
        "_replacement",
        "_sent_version",
        "_stored",
        "counts",
        "remote",
        "start",
        "tensor",
        "version",
    )

    def __init__(self, remote: RemoteVariable, *, counts: bool) -> None:
        # A tensor that the function assigned to the buffer's name: the tensor, the module's dict, the name.
        self._replacement: tuple[Tensor, dict[str, Tensor | None], str] | None = None
        self._sent_version: int | None = None  # of the replacement
        self._memory: CopyMemory | None = None
        self.remote = remote
        self.counts = counts
        self.tensor = remote.read()
        self._stored = self.tensor.shape, self.tensor.dtype
        self.version = self.tensor._version
        # Batch normalisation writes its statistics without counting a version, so that small
        # buffers are compared by value.
        self.start = self.tensor.clone() if self.tensor.numel() <= COMPARED else None

    @property
    def is_refreshable(self) -> bool:
        """True if `take` may replace the value: the function has not assigned another tensor."""
        return self._replacement is None

    def take(self, parts: Sequence[memoryview | None]) -> None:
        """Take over new values of the servers, one for each shard that has changed.

        This counts no version of the tensor: a layer may have saved the buffer for its backward pass, as batch
        normalisation does, and new values of other workers are no mistake of the function.
        """
        if self._memory is None:
            self._check_form(self.tensor)
            self._memory = CopyMemory(self.remote, self.tensor.data)  # torch resizes it no more
        self._memory.fill(parts)
        self._note()

    def memory(self, shard: int) -> None:
        """Let `take` copy new values: layers write buffers themselves."""

    def take_back(self) -> None:
        """Discard what a failed function wrote: the next refresh reads the server's value."""
        if self._replacement is not None or self.is_changed():
            self.remote.forget_seen()
        if self.tensor.shape != self._stored[0]:  # a layer resized it in place
            self.tensor.data = self.tensor.new_zeros(self._stored[0])
        self.put_back()

    def put(self, tensor: Tensor, buffers: dict[str, Tensor | None], name: str) -> None:
        """Note that the function assigned a tensor to the buffer's name in a module."""
        self._replacement = None if tensor is self.tensor else (tensor, buffers, name)
        self._sent_version = None

    def put_back(self) -> None:
        """Give the module the worker's copy back at the function's end."""
        if self._replacement is not None:
            _, buffers, name = self._replacement
            self._replacement = None
            dict.__setitem__(buffers, name, self.tensor)
            self.remote.forget_seen()

    def is_changed(self) -> bool:
        """Return whether the step wrote the buffer."""
        if self._replacement is not None:
            instead = self._replacement[0]
            if self.start is None or not _are_alike(instead, self.start):
                return version_of(instead) != self._sent_version
            return not torch.equal(instead, self.start)
        if self.start is not None:
            return not torch.equal(self.tensor, self.start)
        return self.tensor._version != self.version

    def add_change(self, batch: WriteBatch) -> None:
        """Add the change to a batch: a counter's increase, any other buffer's new value."""
        current = self.tensor if self._replacement is None else self._replacement[0].detach()
        self._check_form(current)
        if self.counts and self.start is not None:
            self.remote.add_assign(batch, "add", current - self.start)
        else:
            self.remote.add_assign(batch, "set", current)
        if self._replacement is None:
            self._note()
            return
        self._sent_version = version_of(current)
        if self.start is not None:
            self.start.copy_(current)

    def _check_form(self, tensor: Tensor) -> None:
        shape, dtype = self._stored
        if (tensor.shape, tensor.dtype) != self._stored:
            raise ValueError(
                f"buffer {self.remote.name!r} was given {tuple(tensor.shape)} {tensor.dtype} inside "
                f"a scheduled function, but is stored on a parameter server as {tuple(shape)} {dtype}: expected the "
                "same. If its layer finds the size in its first forward pass, as observers of quantization do, "
                "make one forward pass on the coordinator before the first schedule()."
            )

    def _note(self) -> None:
        self.version = self.tensor._version
        if self.start is not None:
            self.start.copy_(self.tensor.detach())


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


class NewBuffers:
    """Buffers that functions add to the coordinator's modules, and that no server knows.

    A buffer that is not part of the state dict may stay the worker's own, as caches do. Any other would be missing
    on the coordinator and different on every worker, so it is refused.

    Attributes:
        is_view: whether a module is the worker's view of one of the coordinator's; any other is the
            function's own.
    """

    __slots__ = ("_noted", "is_view")

    def __init__(self) -> None:
        self.is_view: Callable[[nn.Module], bool] = _is_no_view
        self._noted: list[tuple[nn.Module, str]] = []

    def note(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Note a buffer that a function registers, or a tensor for a name that was registered as None."""
        if not self.is_view(module):
            return
        held: Any = module._buffers
        if isinstance(held, WatchedBuffers) and held.keeps(name):
            return  # the function itself has set it to None, or deleted it
        if name not in held:
            self._noted.append((module, name))  # whether it is persistent, torch notes after this
            return
        if dict.__getitem__(held, name) is None and name not in module._non_persistent_buffers_set:
            raise ValueError(
                f"buffer {name!r} of {type(module).__name__} is None on the coordinator and was "
                f"given {tuple(tensor.shape)} {tensor.dtype} inside a scheduled function: it would "
                f"stay this worker's own. {_INSTEAD}"
            )

    def take_back(self) -> str | None:
        """Remove the function's new buffers of the state dict; return an error text if there was one.

        The next function that registers such a buffer gets the error, too.
        """
        found = None
        while self._noted:
            module, name = self._noted.pop()
            held: Any = module._buffers
            is_own = name in module._non_persistent_buffers_set or name not in held
            if not is_own and dict.__getitem__(held, name) is not None:
                tensor = dict.pop(held, name)
                found = (
                    f"buffer {name!r} of {type(module).__name__}, {tuple(tensor.shape)} {tensor.dtype}, "
                    "was registered inside a scheduled function: no parameter server knows it, and it "
                    f"would stay this worker's own. {_INSTEAD}"
                )
        return found


def _is_no_view(module: nn.Module) -> bool:
    del module
    return False


_INSTEAD = (
    "Give it a tensor of its shape on the coordinator before you schedule the function; or register it "
    "with persistent=False if every worker is to have its own."
)


class WatchedBuffers(dict[str, Any]):
    """A module's ``_buffers`` on a worker; notices assignments to the names of buffers on servers."""

    __slots__ = ("_kept",)

    def __init__(self, plain: Mapping[str, Any], kept: dict[str, WorkerBuffer]) -> None:
        super().__init__(plain)
        self._kept = kept

    def keeps(self, name: str) -> bool:
        """Return whether the buffer of this name is on a server."""
        return name in self._kept

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        dict.__setitem__(self, name, value)
        kept = self._kept.get(name)
        if kept is not None and value is not None:
            kept.put(value, self, name)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)  # a copy is a plain dict

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)
