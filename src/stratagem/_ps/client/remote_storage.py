"""`RemoteStorage`: storage of a `Variable` on a parameter server, for coordinator and workers; results of its writes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core import context, variable_writes
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches.private_api import pytree
from stratagem._core.values import DistributedValues
from stratagem._core.variable_storage import VariableStorage
from stratagem._core.variables import (
    Scatter,
    Variable,
    VariableAggregation,
    VariableRequest,
    Write,
)
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.rows import sort_ids
from stratagem._wire.data_values import make_value


@final
class LazyReadTensor(Tensor):
    """Return value of a write inside a scheduled function: read at its first use, the same afterwards.

    Most functions never use the value, and waiting for the server's reply would cost more than the write.
    Other code can use it like any tensor.

    Example:
        >>> import torch
        >>> from stratagem._ps.client.remote_storage import LazyReadTensor
        >>> late = LazyReadTensor(torch.Size([2]), torch.float32, lambda: torch.ones(2))
        >>> late + 1, late.tolist()
        (tensor([2., 2.]), [1.0, 1.0])
    """

    _read: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> LazyReadTensor:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made._read = read
        return made

    def __init__(self, shape: torch.Size, dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        """Takes what `__new__` takes; a tensor is complete by then."""

    def now(self) -> Tensor:
        """Return the value; read it if that has not happened yet."""
        found: Tensor | None = self.__dict__.get("_value")
        if found is None:
            # Replicas may look at the same time: all get what the first of them has found.
            found = self.__dict__.setdefault("_value", self._read())
        return found

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(
            LazyReadTensor, LazyReadTensor.now, (tuple(args), kwargs or {})
        )
        return func(*args, **kwargs)

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The same below Python's surface, where torch itself meets one."""
        return cls.__torch_function__(func, types, args, kwargs)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return make_value, (self.now(),)


_OPERATION = {"assign": "set", "assign_add": "add", "assign_sub": "sub"}

RETURNED_BYTES = 1 << 16
"""Size up to which a write returns a copy. For a larger value it returns the value itself, which shows later
writes: copying 64 MB would cost more than an ``assign_add``."""


class ReadCache:
    """Values kept while ``cache_variable_reads`` is open (PSS-14)."""

    def __init__(self) -> None:
        self.values: dict[RemoteStorage, Tensor] | None = None


@final
class RemoteStorage(VariableStorage):
    """A variable on a parameter server.

    Args:
        remote: the variable there, in one piece.
        tracks: whether reads take part in autograd.
        strategy: the variable's strategy.
        cache: where reads are kept while the strategy caches them.
    """

    __slots__ = ("_cache", "_late", "_leaf", "_remote", "_shape", "_strategy")

    def __init__(
        self, remote: RemoteVariable, *, tracks: bool, strategy: StrategyHooks, cache: ReadCache
    ) -> None:
        self._remote = remote
        self._shape = torch.Size(remote.shape)
        self._strategy = strategy
        self._cache = cache
        self._late: weakref.ref[LazyReadTensor] | None = None  # what the last write returned
        wants = tracks and (remote.dtype.is_floating_point or remote.dtype.is_complex)
        self._leaf: Tensor | None = self._own().detach().requires_grad_() if wants else None

    @property
    def remote(self) -> RemoteVariable:
        return self._remote

    @property
    @override
    def shape(self) -> torch.Size:
        return self._shape

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self._remote.dtype

    @property
    @override
    def device(self) -> str:
        return self._remote.device

    @override
    def read(self) -> Tensor:
        cached = self._cache.values
        if cached is None:
            return self._fresh()
        known = cached.get(self)
        if known is None:
            known = cached[self] = self._fresh().detach().clone()
        return known

    def _fresh(self) -> Tensor:
        if self._leaf is None:
            return self._own()
        current = self._current()
        if self._leaf.data_ptr() != current.data_ptr():
            # Through `.data`: counts no version, so that graphs that used the leaf stay valid.
            if self._remote.mapped is None and current.nbytes > RETURNED_BYTES:
                self._leaf.data = current  # received just now: it is not copied
            else:
                self._leaf.data.copy_(current)
        return self._leaf

    def _own(self) -> Tensor:
        """Return the value; a small one is copied.

        Small values share pages. A write in place would hide later values and versions of its neighbours.
        """
        current = self._current()
        return current.clone() if current.nbytes <= RETURNED_BYTES else current

    def _current(self) -> Tensor:
        return self._remote.whole()

    @override
    def rows(self, ids: Tensor) -> Tensor:
        if self._leaf is not None and torch.is_grad_enabled():
            return self.read()[ids]
        found = sort_ids(ids)
        return self._remote.rows(found.unique)[found.places]

    @override
    def write(self, variable: Variable, how: Write, value: Any) -> Tensor:
        replica = variable_writes.own_replica(variable, self._strategy)
        if (
            replica is None
            or replica.group.size == 1  # no aggregation (PSS-33)
            or context.update_device() is not None
        ):
            return self._put(variable, how, value)
        if variable.aggregation is VariableAggregation.NONE:
            raise variable_writes.needs_aggregation(variable, how)

        def apply(brought: list[Any]) -> list[Tensor]:
            total = variable_writes.aggregated(variable, brought)
            return [self._put(variable, how, total)] * len(brought)

        return variable_writes.write_together(replica, variable, how, value, apply)

    def _put(self, variable: Variable, how: Write, value: Any) -> Tensor:
        if isinstance(value, DistributedValues):
            value = value.component(0)
        fitting = variable_writes.fitting(variable, how, value)
        self._read_lazy_value()
        self._remote.assign(_OPERATION[how], fitting)
        return self._after()

    def _read_lazy_value(self) -> None:
        """Read the lazy value that the last write returned, before the variable changes."""
        late = self._late() if self._late is not None else None
        if late is not None:
            late.now()

    def _after(self) -> Tensor:
        if not self._remote.client.outbox.is_deferring:
            return self._own().detach()
        late = LazyReadTensor(self.shape, self.dtype, self._value_now)
        self._late = weakref.ref(late)
        return late

    def _value_now(self) -> Tensor:
        return self._own().detach()

    @override
    def scatter(self, variable: Variable, how: Scatter, ids: Any, rows: Any) -> Tensor:
        variable_writes.own_replica(variable, self._strategy)
        self._read_lazy_value()
        self._remote.scatter(how, ids, rows.detach())
        return self._after()

    @override
    def copy_for(self, request: VariableRequest) -> VariableStorage:
        raise NotImplementedError(
            f"variable {request.name!r} is stored on a parameter server and cannot be deep-copied: make "
            "a new sg.Variable from its value under the strategy's scope."
        )

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"variable {self._remote.name!r} is stored on parameter servers and cannot be returned or "
            "pickled as it is: return its value, as variable.read_value()."
        )

    @override
    def __repr__(self) -> str:
        return f"<RemoteStorage on {self.device}>"
