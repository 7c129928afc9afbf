"""`Variable`: a named tensor that is read and written the same way under every strategy.

Its `VariableStorage` knows where the value is and what writing means in a replica. The current strategy chooses the
storage of a new variable, in its hook ``_create_variable(request)``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import numpy as np
import torch
from typing_extensions import override

from stratagem._core import context
from stratagem._core.reduction import ReduceOp
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches import private_api
from stratagem._core.values import Convertible, convert_to_tensor, delegate_operators, to_numpy
from stratagem.errors import ContextError, MisuseError, StratagemError, StrategyMismatch

if TYPE_CHECKING:
    from stratagem._core.variable_storage import VariableStorage

Write = Literal["assign", "assign_add", "assign_sub"]
Scatter = Literal["add", "sub", "mul", "div", "min", "max", "update"]


class VariableAggregation(enum.Enum):
    """Rule that combines the replicas' values when a variable is written in a replica.

    SUM and MEAN combine all values; ONLY_FIRST_REPLICA takes that of replica 0. With NONE, central storage raises an
    error, and the copies of a mirrored variable may differ.

    Example:
        >>> import stratagem as sg
        >>> sg.VariableAggregation.ONLY_FIRST_REPLICA.value
        3
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3

    def as_reduce_op(self) -> ReduceOp:
        """Return the reduction of the same name; only SUM and MEAN have one."""
        if self in (VariableAggregation.SUM, VariableAggregation.MEAN):
            return ReduceOp[self.name]
        raise ValueError(f"{self} is not a reduction: expected SUM or MEAN.")


class VariableSynchronization(enum.Enum):
    """Time at which the copies of a variable are synchronized.

    Example:
        >>> import stratagem as sg
        >>> sg.VariableSynchronization.ON_READ.value
        3
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


@dataclass(frozen=True, kw_only=True)
class VariableRequest:
    """The arguments of a new variable; the strategy chooses a storage for it."""

    initial_value: Any = None
    trainable: bool | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    name: str = "Variable"
    aggregation: VariableAggregation = VariableAggregation.NONE
    synchronization: VariableSynchronization = VariableSynchronization.AUTO
    per_worker_variable: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def initial_tensor(self) -> torch.Tensor:
        """Return the initial value as a tensor of the requested type and shape; storages copy it."""
        value = self.initial_value
        # The strategy places variables; a device scope around their creation does not (VAR-1).
        scoped = private_api.function_modes() > 0
        with torch.device("cpu") if scoped else nullcontext():
            if callable(value):
                value = value()
            given = None if value is None else convert_to_tensor(value)
        if given is None:
            raise ValueError(
                f"variable {self.name!r} has no initial value: expected a tensor, array, number, "
                "or a function that makes one."
            )
        tensor = given.detach().to(self.dtype or given.dtype)
        if self.shape is not None and tuple(tensor.shape) != tuple(self.shape):
            raise ValueError(
                f"variable {self.name!r}: the initial value has shape {tuple(tensor.shape)}, but "
                f"shape={self.shape!r} was asked for."
            )
        return tensor

    def tracks_gradient(self) -> bool:
        """Return whether reads take part in autograd: as requested, or as the initial value does."""
        if self.trainable is not None:
            return self.trainable
        return isinstance(self.initial_value, torch.Tensor) and self.initial_value.requires_grad


@final
@delegate_operators
class Variable(Convertible):
    """A named value that belongs to the strategy under whose scope it was created.

    Operators and torch functions act on its value. Writes of replicas are combined by the rule
    ``aggregation``.

    Args:
        initial_value: tensor, array, number, or a function without arguments that returns one.
        trainable: True: reads take part in autograd; None: as the initial value does.
        dtype: type to convert the initial value to.
        shape: checked against the initial value, or passed to a function that fills shards.
        name: for messages and checkpoints.
        aggregation: `VariableAggregation` or its name.
        synchronization: `VariableSynchronization` or its name.
        per_worker_variable: under parameter servers, one independent variable per worker.
        **options: passed to the strategy.

    Raises:
        ValueError: no initial value, an unknown aggregation or synchronization.
        RuntimeError: strategies are mixed.

    Example:
        >>> import stratagem as sg
        >>> with sg.OneDeviceStrategy("cpu:0").scope():
        ...     counter = sg.Variable(3.0, name="counter")
        >>> counter.assign_add(2.0)
        tensor(5.)
        >>> counter * 2, counter.device
        (tensor(10.), '/job:localhost/replica:0/task:0/device:CPU:0')
    """

    __slots__ = ("__weakref__", "_request", "_storage", "_strategy")
    __hash__: ClassVar[Any] = object.__hash__

    _storage: VariableStorage
    _request: VariableRequest
    _strategy: StrategyHooks

    def __new__(
        cls,
        initial_value: Any = None,
        trainable: bool | None = None,
        *,
        dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
        name: str | None = None,
        aggregation: Any = VariableAggregation.NONE,
        synchronization: Any = VariableSynchronization.AUTO,
        per_worker_variable: bool = False,
        **options: Any,
    ) -> Any:
        # Not __init__: under parameter servers this may be a ShardedVariable.
        request = VariableRequest(
            initial_value=initial_value,
            trainable=trainable,
            dtype=dtype,
            shape=None if shape is None else tuple(shape),
            name="Variable" if name is None else name,
            aggregation=_member(VariableAggregation, aggregation, "aggregation"),
            synchronization=_member(VariableSynchronization, synchronization, "synchronization"),
            per_worker_variable=per_worker_variable,
            options=options,
        )
        return create(request)

    @classmethod
    def at(
        cls, storage: VariableStorage, request: VariableRequest, strategy: StrategyHooks
    ) -> Variable:
        """Return a variable with the given storage; for strategies."""
        self = object.__new__(cls)
        self._storage = storage
        self._request = request
        self._strategy = strategy
        return self

    # -------------------------------------------------------------- what it is

    @property
    def name(self) -> str:
        """Name of the variable."""
        return self._request.name

    @property
    def shape(self) -> torch.Size:
        """Shape of the value."""
        return self._storage.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self._storage.dtype

    @property
    def device(self) -> str:
        """Device that holds the value, as ``/job:localhost/replica:0/task:0/device:CPU:0``."""
        return self._storage.device

    @property
    def trainable(self) -> bool:
        """True if it is trainable (True unless created with ``trainable=False``)."""
        return self._request.trainable is not False

    @property
    def aggregation(self) -> VariableAggregation:
        """Rule by which the replicas' writes are combined."""
        return self._request.aggregation

    @property
    def synchronization(self) -> VariableSynchronization:
        """Time at which copies are synchronized."""
        return self._request.synchronization

    @property
    def distribute_strategy(self) -> Any:
        """The strategy it was created under; None outside any."""
        return None if self._strategy._is_default else self._strategy

    @property
    def values(self) -> tuple[Variable, ...]:
        """The variables behind this one: one per replica if mirrored, else one."""
        return self._storage.components(self)

    def get(self) -> Variable:
        """Return this replica's own copy of the variable, without aggregation."""
        parts = self.values
        replica = context.current_replica()
        if replica is None or len(parts) == 1:
            return parts[0]
        return parts[replica.id]

    @property
    def handle(self) -> torch.Tensor:
        """The tensor that holds the value.

        Raises:
            ValueError: a mirrored variable outside a replica has several.
        """
        if len(self.values) > 1 and context.current_replica() is None:
            raise ValueError(
                f"variable {self.name!r} has {len(self.values)} copies, so no single tensor "
                "outside a replica. Use .values, or .value() for the combined value."
            )
        return self._storage.read()

    # -------------------------------------------------------------- reading

    @override
    def _to_tensor(self) -> Any:
        return self._storage.read()

    def value(self) -> torch.Tensor:
        """Return the value, which may change with later writes. `read_value` returns a copy."""
        return self._storage.read()

    def read_value(self) -> torch.Tensor:
        """Return a copy of the value."""
        return self._storage.read().detach().clone()

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy of the value as an array."""
        return to_numpy(self.read_value())

    def sparse_read(self, indices: Any) -> torch.Tensor:
        """Return some rows, in the order of ``indices``."""
        ids = torch.as_tensor(indices)
        _check_ids(ids.reshape(-1), self)
        return self._storage.rows(ids)

    @property
    def grad(self) -> torch.Tensor | None:
        """Gradient of the value the caller sees, if it tracks one."""
        return self._storage.read().grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self._storage.read().grad = gradient

    def __float__(self) -> float:
        return float(self._storage.read().detach())

    def __int__(self) -> int:
        return int(self._storage.read().detach())

    def __bool__(self) -> bool:
        return bool(self._storage.read())

    def __len__(self) -> int:
        return len(self._storage.read())

    # -------------------------------------------------------------- writing

    def assign(self, value: Any, *, read_value: bool = True) -> torch.Tensor | None:
        """Set the value; return the value afterwards, or None with ``read_value=False``."""
        return self._write("assign", value, read_value=read_value)

    def assign_add(self, delta: Any, *, read_value: bool = True) -> torch.Tensor | None:
        """Add to the value; return the value afterwards."""
        return self._write("assign_add", delta, read_value=read_value)

    def assign_sub(self, delta: Any, *, read_value: bool = True) -> torch.Tensor | None:
        """Subtract from the value; return the value afterwards."""
        return self._write("assign_sub", delta, read_value=read_value)

    def _write(self, how: Write, value: Any, *, read_value: bool) -> torch.Tensor | None:
        result = self._storage.write(self, how, value)
        return result if read_value else None

    def scatter_add(self, sparse_delta: Any) -> torch.Tensor:
        """Add rows, given as ``torch.sparse_coo_tensor([ids], rows, size)``."""
        return self._scatter("add", sparse_delta)

    def scatter_sub(self, sparse_delta: Any) -> torch.Tensor:
        """Subtract rows."""
        return self._scatter("sub", sparse_delta)

    def scatter_mul(self, sparse_delta: Any) -> torch.Tensor:
        """Multiply rows by the given rows."""
        return self._scatter("mul", sparse_delta)

    def scatter_div(self, sparse_delta: Any) -> torch.Tensor:
        """Divide rows by the given rows."""
        return self._scatter("div", sparse_delta)

    def scatter_min(self, sparse_delta: Any) -> torch.Tensor:
        """Keep the smaller one of each element and the given element, in the given rows."""
        return self._scatter("min", sparse_delta)

    def scatter_max(self, sparse_delta: Any) -> torch.Tensor:
        """Keep the larger one of each element and the given element, in the given rows."""
        return self._scatter("max", sparse_delta)

    def scatter_update(self, sparse_delta: Any) -> torch.Tensor:
        """Replace rows; the last value of a repeated row wins."""
        return self._scatter("update", sparse_delta)

    def batch_scatter_update(self, sparse_delta: Any) -> torch.Tensor:
        """Do the same as `scatter_update`."""
        return self._scatter("update", sparse_delta)

    def _scatter(self, how: Scatter, sparse: Any) -> torch.Tensor:
        if not isinstance(sparse, torch.Tensor) or sparse.layout != torch.sparse_coo:
            raise TypeError(
                f"scatter_{how} got {sparse!r}, a {type(sparse).__name__}: expected row numbers "
                "and rows, as torch.sparse_coo_tensor([ids], rows, size) makes."
            )
        if sparse.sparse_dim() != 1:
            raise ValueError(
                f"scatter_{how} got {sparse.sparse_dim()} axes of indices: expected one, row "
                "numbers."
            )
        # Not coalesced: that would add up values that may have to be multiplied.
        indices, rows = private_api.sparse_parts(sparse)
        ids = indices[0]
        _check_ids(ids, self)
        if rows.dtype != self.dtype or rows.shape[1:] != self.shape[1:]:
            raise ValueError(
                f"scatter_{how} got rows of shape {tuple(rows.shape[1:])} and {rows.dtype}: "
                f"variable {self.name!r} has rows of shape {tuple(self.shape[1:])} and "
                f"{self.dtype}."
            )
        return self._storage.scatter(self, how, ids, rows)

    # -------------------------------------------------------------- copying and showing

    def __copy__(self) -> Variable:
        raise MisuseError(f"variable {self.name!r} cannot be copied shallowly: use copy.deepcopy.")

    @override
    def __reduce__(self) -> Any:
        raise TypeError(
            f"variable {self.name!r} cannot be pickled: it belongs to its strategy. Save its value, "
            "as in torch.save(variable.read_value(), path), and assign it after loading."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        current = context.current_strategy()
        if current is not None and current is not self._strategy:
            raise StrategyMismatch(
                f"mixing different strategy objects: variable {self.name!r} of "
                f"{self._strategy!r} cannot be deep-copied under {current!r}."
            )
        request = replace(self._request, initial_value=self.read_value, shape=None, dtype=None)
        twin = Variable.at(self._storage.copy_for(request), self._request, self._strategy)
        memo[id(self)] = twin
        return twin

    @override
    def __repr__(self) -> str:
        copies = self.values
        if len(copies) > 1:
            # As tf.distribute prints it: one line per copy.
            on_read = self.synchronization is VariableSynchronization.ON_READ
            kind = "SyncOnReadVariable" if on_read else "MirroredVariable"
            lines = ",\n".join(f"  {i}: {copy!r}" for i, copy in enumerate(copies))
            return f"{kind}:{{\n{lines}\n}}"
        try:
            shown = repr(self._storage.read().detach())
        except (ValueError, StratagemError) as error:
            shown = f"<{error}>"
        return (
            f"<Variable {self.name!r} shape={tuple(self.shape)} dtype={self.dtype} "
            f"device={self.device} value={shown}>"
        )


def _member(kind: type[enum.Enum], given: Any, argument: str) -> Any:
    if isinstance(given, kind):
        return given
    if given is None:
        return next(iter(kind))
    if isinstance(given, str) and given.upper() in kind.__members__:
        return kind[given.upper()]
    raise ValueError(
        f"{argument}={given!r} is not known: expected one of "
        f"{', '.join(f'{kind.__name__}.{each.name}' for each in kind)}."
    )


def _check_ids(ids: torch.Tensor, variable: Variable) -> None:
    if not variable.shape:
        raise ValueError(f"variable {variable.name!r} is a scalar: it has no rows.")
    if ids.is_floating_point() or ids.dtype is torch.bool:
        raise TypeError(f"row numbers of {ids.dtype} were given: expected integers.")
    rows = variable.shape[0]
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= rows):
        raise ValueError(
            f"row numbers {ids.tolist()} are out of range for variable {variable.name!r} with "
            f"{rows} rows: expected 0 ≤ number < {rows}."
        )


# ------------------------------------------------------------------ creating


def create(request: VariableRequest) -> Any:
    """Create a variable of the current strategy; in a replica, one for all replicas."""
    strategy: StrategyHooks = context.get_strategy()
    if context.default_scope_is_open() and not strategy._is_default:
        raise ContextError(
            f"mixing different strategy objects: variable {request.name!r} is being created under "
            f"{strategy!r} inside the default strategy's scope. Leave the default scope first."
        )
    replica = context.current_replica()
    if replica is None or replica.group.size == 1:
        return strategy._create_variable(request)

    def make(brought: list[Any]) -> list[Any]:
        first = next(each for each in brought if each is not None)
        return [strategy._create_variable(first)] * len(brought)

    label = f"creation of variable {request.name!r}"
    return replica.group.rendezvous(replica.id, label, request, make)
