"""One local tensor of the coordinator, with its variable on parameter servers.

`CoordinatorVariables` owns these: it creates them for the parameters and buffers of modules, and flushes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stratagem._core.fingerprints import memory_of
from stratagem._core.torch_patches.private_api import version_of
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.coordinator.deferred_tables import planned_of
from stratagem._ps.placement import Description
from stratagem._ps.types import InitOp
from stratagem.errors import ConnectionLost

if TYPE_CHECKING:
    from stratagem._ps.coordinator.coordinator_variables import CoordinatorVariables

_DATA: Any = Tensor.data  # torch's own: `nn.Parameter` has another one (`parameter_attributes`)


def _nothing() -> None:
    """Return None, as a weak reference to a collected object does."""


class Kept:
    """One local tensor and its variable on the servers."""

    __slots__ = (
        "_before",
        "_dtype",
        "_given_name",
        "_may_be_cut",
        "_memory",
        "_name",
        "_pushed",
        "description",
        "not_fetched",
        "number",
        "owner",
        "plan",
        "remote",
        "tensor",
    )

    def __init__(
        self, owner: CoordinatorVariables, tensor: Tensor, name: str, *, may_be_cut: bool = True
    ) -> None:
        self.owner = owner
        self.tensor = tensor
        self.description: Description | None = None
        self.remote: RemoteVariable | None = None
        self.number = owner.next_number()  # in order of creation, the same in every run of a script
        self.not_fetched: Exception | None = None  # why the last value is not here
        self._name = self._given_name = name
        self._may_be_cut = may_be_cut
        self._pushed = -1
        self._dtype = tensor.dtype
        # Of a buffer: `data` of a plain tensor counts no version, so its memory is compared.
        self._memory: Hashable = None
        self._before: tuple[Callable[[], Tensor | None], int] = (_nothing, -1)
        # A table that is too large for this process has a plan instead of values.
        self.plan = planned_of(tensor)
        if self.plan is not None:
            self.plan.adopt(name, owner.flush)
        self.place()

    @property
    def name(self) -> str:
        """Name in errors and metrics: the path in the module tree, once that is known."""
        return self._name

    def qualify(self, path: str) -> None:
        """Note the path of the tensor in a module tree, unless a longer one is known.

        Servers keep the first name: it is the same in every run of a script, whichever module a function names first.
        """
        if path.count(".") <= self._name.count("."):
            return
        self._name = path
        if self.plan is not None:
            self.plan.name = path
        if self.remote is not None:
            self.remote.rename(path)

    def place(self) -> None:
        """Choose the variable's servers; a lazy one has no shape yet and waits."""
        if self.description is None and not is_lazy(self.tensor):
            partitioner = self.owner.partitioner if self._may_be_cut else None
            self.description = self.owner.place(self._given_name, self.tensor, partitioner)
            if self.plan is not None and self.plan.keyed is not None:
                self.plan.keyed.note_place(self.description)

    def place_again(self) -> None:
        """Place a variable anew that was converted before its first use."""
        if not self.is_as_described():
            self.description = None  # model.double(), model.to(torch.bfloat16), …
        self._dtype = self.tensor.dtype
        self.place()

    def is_as_described(self) -> bool:
        """Return whether the local tensor still has the described shape and type: ``.data`` can be anything."""
        where = self.description
        return where is None or (
            where.dtype == self.tensor.dtype and where.shape == tuple(self.tensor.shape)
        )

    def is_changed(self) -> bool:
        """Return whether the local tensor was written since it was last sent."""
        if self.plan is not None:
            return False
        # The dtype as well: converting a model goes through `.data`, which counts no version.
        if version_of(self.tensor) != self._pushed or self.tensor.dtype is not self._dtype:
            return True
        return self._memory is not None and memory_of(self.tensor) != self._memory

    def reach(self) -> list[tuple[ShardLocation, str, Sequence[InitOp]]]:
        """Return the shards to create on the servers; `send` sends values, unless there is a plan."""
        self.place_again()
        assert self.description is not None
        self.remote = self.owner.new_remote(self.description)
        self.remote.rename(self._name)
        recipes = None if self.plan is None else self.plan.place_on(self.remote)
        return self.remote.wanted(recipes)

    def send(self) -> None:
        """Write the local values to the servers."""
        assert self.remote is not None
        self._refuse_another_kind()
        pushed = version_of(self.tensor)
        self.remote.put(self.tensor.detach())
        self.note_pushed(pushed)

    def note_pushed(self, version: int | None = None) -> None:
        """Note that the servers have the local values, or other ones that replace them.

        `version`: counter of the local tensor when they were sent; by default its present one.
        """
        self._pushed = version_of(self.tensor) if version is None else version
        self._before = _nothing, -1
        self._note_memory()

    def forget_pushed(self) -> None:
        """Let the next `flush` send the local values."""
        self._pushed = -1

    def _note_memory(self) -> None:
        if not isinstance(self.tensor, nn.Parameter):
            self._memory = memory_of(self.tensor)

    def _refuse_another_kind(self) -> None:
        where = self.description
        assert where is not None
        if not self.is_as_described():
            raise ValueError(
                f"{self._name!r} is {tuple(self.tensor.shape)} {self.tensor.dtype} now, but is stored on "
                f"parameter servers as {where.shape} {where.dtype}: it was converted after its first "
                "use in a scheduled function. Convert the model (model.double(), model.to(dtype)) "
                "before you schedule anything with it."
            )

    def stand_for(self, tensor: Tensor) -> None:
        """Replace the local tensor by another one, whose values are to be sent."""
        before, pushed = self._before
        self._before = weakref.ref(self.tensor), self._pushed
        self.tensor = tensor
        # torch.func.functional_call puts one in its place and the old one back: no change, then.
        self._pushed = pushed if before() is tensor else -1

    def refresh(self) -> None:
        """Fetch the servers' values if they have changed and nothing was changed here."""
        remote = self.remote
        if self.not_fetched is not None and not self.is_changed():
            raise ConnectionLost(
                f"the last value of {self._name!r} was not fetched from its parameter server before the "
                f"session ended ({self.not_fetched}). The value here is an older one, so that it cannot be "
                "read or saved. Restore a checkpoint into a new model under a new strategy."
            ) from self.not_fetched
        if remote is None or self.plan is not None or self.owner.is_frozen or self.is_changed():
            return
        if remote.versions() != remote.seen:
            # Through `.data`: the user changed nothing, so no version is counted. `read` returns each shard
            # as it was between two writes: checkpoints are made from this.
            _DATA.__get__(self.tensor).copy_(remote.read())
            self._note_memory()
