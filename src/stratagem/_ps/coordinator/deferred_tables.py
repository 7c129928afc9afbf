"""Tables that are too large for the coordinator and exist only on servers.

While a scope is open, `DeferredTables` (a torch function mode) catches factory calls such as
``torch.empty((1_000_000_000, 16))``, with which ``nn.Embedding`` begins, and returns a `TableParameter` over a
`DeferredTable`. In-place initialisations (``normal_``, ``uniform_``, ``nn.init`` …) are recorded. When a module has
the table as a parameter, each server runs the recipe on its own shard. Any other use of such a tensor before that is
an error.

Random numbers come from seeds drawn from torch's generator, one per operation and shard. ``torch.manual_seed`` repeats
them, but they are not the numbers that one machine would draw for the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from stratagem._ps.client.remote_keys import RemoteKeys
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.init_ops import SEEDS, shard_recipe
from stratagem._ps.tables.keyed_rows import KeyedPart, KeyedRows
from stratagem._ps.tables.table_parameter import TableParameter
from stratagem._ps.tables.worker_rows import refusal
from stratagem._ps.types import InitOp
from stratagem.errors import ForeignParameterError


class DeferredTable:
    """Rows that will be on servers: a recipe until then, a `RowSource` afterwards.

    Attributes:
        recipe: what fills the table, in order.
        keyed: of a dynamic table, which part of it this is.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, keyed: KeyedPart | None = None
    ) -> None:
        self.name = "table"
        self.keyed = keyed
        self.shape = shape
        self.dtype = dtype
        self.recipe: list[InitOp] = []
        self._remote: RemoteVariable | None = None
        self._flush: Callable[[], None] | None = None

    # -------------------------------------------------------------- becoming a variable

    def adopt(self, name: str, flush: Callable[[], None]) -> None:
        """Note that a module has the table as a parameter; `flush` creates it on the servers."""
        self.name = name
        self._flush = flush

    @property
    def is_unmade(self) -> bool:
        """True if the table is a parameter that the servers have not created yet."""
        return self._flush is not None and self._remote is None

    def place_on(self, remote: RemoteVariable) -> list[list[InitOp]]:
        """Return the recipe of each shard of the variable that is about to be created."""
        self._remote = remote
        if self.keyed is not None:
            remote.bindings = [[one] for one in self.keyed.recipes(remote.description)]
            return remote.bindings
        return [shard_recipe(self.recipe, remote.description, i) for i in range(len(remote.places))]

    # -------------------------------------------------------------- RowSource

    def rows(self, ids: Tensor) -> Tensor:
        """Return these rows, from the servers once the table is there."""
        return self._there().rows(ids)

    def rows_as_asked(self, ids: Tensor) -> Tensor | None:
        """Return None: lookups on the coordinator fetch each row once."""

    def whole(self) -> Tensor:
        """Fetch and return all rows."""
        return self._there().read()

    def update_rows(self, ids: Tensor, values: Tensor) -> None:
        self._there().update_rows(ids, values)

    def _there(self) -> RemoteVariable:
        if self._remote is None and self._flush is not None:
            self._flush()
        if self._remote is None:
            raise ForeignParameterError(
                f"a tensor of shape {self.shape}, {self.dtype}, was made under a scope of parameter servers, where a tensor "
                "of this size becomes a table on the servers, and was used before a module had it as a parameter. Make "
                "data outside the scope, or raise STRATAGEM_REMOTE_TABLE_BYTES."
            )
        return self._remote

    @property
    def is_gone(self) -> bool:
        """True if the servers have freed the rows."""
        return self._remote is not None and self._remote.is_released

    @property
    def keys(self) -> RemoteKeys:
        """Of a dynamic table: the rows of its keys. Creates the table on the servers first."""
        return self._there().keys

    # -------------------------------------------------------------- in-place operators

    def write(self, name: str, values: Sequence[Any]) -> None:
        """Apply or record an in-place operator, given by name; `values` are its other arguments."""
        if self._remote is not None:
            if name != "copy_":
                raise ForeignParameterError(
                    f"{name} on {self.name!r}, whose rows are on parameter servers already: load a "
                    "whole value with copy_ or load_state_dict, or train it in a scheduled function."
                )
            self._remote.put(values[0].to(self.dtype))
            return
        operation = _recorded(name, values)
        if operation is not None:
            self.recipe.append(operation)
        elif name == "copy_":
            self._there().put(values[0].to(self.dtype))
        else:
            raise ForeignParameterError(
                f"{name} cannot be recorded for table {self.name!r}, which is too large to be "
                "built here: initialise it with zero_, fill_, uniform_, normal_ or nn.init."
            )

    def fill_row(self, row: int, value: float) -> None:
        """Set one row (an embedding's padding)."""
        if self._remote is not None:
            self._remote.update_rows(
                torch.tensor([row]), torch.full((1, *self.shape[1:]), value, dtype=self.dtype)
            )
        else:
            self.recipe.append(InitOp(name="fill_row", args=(float(row % self.shape[0]), value)))


def _seed() -> int:
    return int(torch.randint(SEEDS, (), dtype=torch.int64))


def _recorded(name: str, values: Sequence[Any]) -> InitOp | None:
    """Return an initialisation for the servers; None for any other operator."""
    if any(isinstance(value, Tensor) for value in values):
        return None
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if name in ("zero_", "zeros_"):
        return InitOp(name="zeros")
    if name == "ones_":
        return InitOp(name="fill", args=(1.0,))
    if name in ("fill_", "constant_"):
        return InitOp(name="fill", args=(numbers[0],))
    if name == "uniform_":
        low, high = [*numbers, *(0.0, 1.0)[len(numbers) :]][:2]
        return InitOp(name="uniform", args=(low, high), seed=_seed())
    if name == "normal_":
        mean, std = [*numbers, *(0.0, 1.0)[len(numbers) :]][:2]
        return InitOp(name="normal", args=(mean, std), seed=_seed())
    if name == "mul_":
        return InitOp(name="scale", args=(numbers[0],))
    return None


class DeferredParameter(TableParameter):
    """A `TableParameter` over a `DeferredTable`; it records in-place initialisations."""

    @override
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        special = _on_planned(func, args, kwargs or {})
        if special is not NotImplemented:
            return special
        return super().__torch_function__(func, types, args, kwargs)

    @override
    def __reduce_ex__(self, proto: Any) -> NoReturn:
        source = cast("DeferredTable", self.source)
        kind = (
            "is a dynamic table"
            if source.keyed is not None
            else "is too large to be held in one piece"
        )
        text = (
            f"table {source.name!r} {tuple(source.shape)} {kind}, so torch.save, pickle and copy.deepcopy cannot "
            "write it: its rows are on parameter servers only. "
        )
        if source.is_gone:
            raise TypeError(
                text
                + "The servers freed them when the strategy was closed. Save the model before that, with "
                "sg.Checkpoint(model=model).save(path)."
            )
        more = ", and table.export() returns its ids and rows" if source.keyed is not None else ""
        raise TypeError(
            text
            + "Save the model with sg.Checkpoint(model=model).save(path) while the strategy is open: servers "
            f"write their own rows, and plain PyTorch reads the files{more}."
        )

    @override
    def register_hook(self, hook: Any) -> Any:
        self._refuse_hook()

    @override
    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        self._refuse_hook()

    def _refuse_hook(self) -> NoReturn:
        raise ValueError(
            f"table {self.source.name!r} is too large to be held in one piece "
            "(STRATAGEM_REMOTE_TABLE_BYTES): its gradient exists only as rows, and no hook can be given "
            "the whole of it. Change the rows' gradients in the function, between backward() and step()."
        )


class DeferredTables(TorchFunctionMode):
    """Mode in which factory calls for large tensors return planned tables.

    Args:
        threshold: bytes from which a tensor is a table.
    """

    def __init__(self, threshold: int) -> None:
        super().__init__()
        self._threshold = threshold

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        fill = _FACTORIES.get(func)
        is_dynamic = func is torch.empty_strided and _is_keyed(args)
        if fill is not None or is_dynamic:
            planned = self._plan(args, kwargs)
            if planned is not None:
                table = DeferredParameter.over(planned, requires_grad=False)
                if fill is not None:
                    fill(planned, args, kwargs)
                return table
        return func(*args, **kwargs)

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeferredTable | None:
        if set(kwargs) - {"dtype", "device", "requires_grad", "size", "fill_value"}:
            return None
        if kwargs.get("requires_grad") or not _is_cpu(kwargs.get("device")):
            return None
        shape = _shape(args, kwargs)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if shape is None or len(shape) < 2:
            return None
        # Of any size: servers make rows when they are used.
        if isinstance(shape[0], KeyedRows):
            return DeferredTable((int(shape[0]), *shape[1:]), dtype, shape[0].part)
        if math.prod(shape) * dtype.itemsize < self._threshold:
            return None
        return DeferredTable(shape, dtype)


def _is_keyed(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], tuple) and isinstance(args[0][0], KeyedRows)


def _is_cpu(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"


def _shape(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    size = kwargs.get("size", args[0] if len(args) and not isinstance(args[0], int) else args)
    if not isinstance(size, tuple | list) or not all(isinstance(one, int) for one in size):
        return None
    return tuple(size)


def _filled(name: str, *numbers: float) -> Callable[[DeferredTable, Any, Any], None]:
    return lambda planned, args, kwargs: planned.write(name, numbers)


def _full(planned: DeferredTable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    planned.write("fill_", [kwargs.get("fill_value", args[1] if len(args) > 1 else 0.0)])


_FACTORIES: dict[Any, Callable[[DeferredTable, Any, Any], None]] = {
    torch.empty: lambda planned, args, kwargs: None,
    torch.zeros: _filled("zero_"),
    torch.ones: _filled("ones_"),
    torch.rand: _filled("uniform_"),
    torch.randn: _filled("normal_"),
    torch.full: _full,
}


class _Row:
    """``weight[padding_idx]`` of a planned table: a row that can only be filled."""

    def __init__(self, planned: DeferredTable, row: int) -> None:
        self._planned = planned
        self._row = row

    def fill_(self, value: float) -> _Row:
        """Set every element."""
        self._planned.fill_row(self._row, float(value))
        return self

    def zero_(self) -> _Row:
        """Set every element to 0."""
        return self.fill_(0.0)


def planned_of(table: object) -> DeferredTable | None:
    """Return the plan of a planned table, None for other tensors."""
    if isinstance(table, TableParameter) and isinstance(table.source, DeferredTable):
        return table.source
    return None


def _on_planned(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a torch function on a planned table; `NotImplemented`: as on any other table."""
    everything = [*args, *kwargs.values()]
    table = next((one for one in everything if planned_of(one) is not None), None)
    if table is None:
        return NotImplemented
    planned = cast("DeferredTable", planned_of(table))
    name = getattr(func, "__name__", "")
    if func in (Tensor.detach, torch.detach, _DATA.__get__):
        return DeferredParameter.over(planned, requires_grad=False)
    if func in _LIKE:
        # An optimizer on the coordinator asks for state as large as the table; the servers have the
        # true state.
        value = _LIKE[func](args)
        return torch.full((), value, dtype=planned.dtype).expand(planned.shape)
    if func is nn.init.kaiming_uniform_:
        return _kaiming_uniform(table, args, kwargs)
    if name.startswith("new_"):  # another tensor, of our type
        return getattr(torch.empty(0, dtype=planned.dtype), name)(*args[1:], **kwargs)
    if name in _WRITING_OPERATORS:
        raise refusal(planned.name)
    if name in _COMPARISONS and planned.is_unmade:
        raise ForeignParameterError(
            f"table {planned.name!r} is too large to be built here, so an initialiser that looks at "
            "its values (nn.init.trunc_normal_, orthogonal_ …) cannot run on it: use zero_, fill_, "
            "uniform_, normal_ or another of nn.init, or sg.Variable with a function that fills shards."
        )
    if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
        rest = [one for one in everything if one is not table and one is not None]
        planned.write(name, rest)
        return table
    if func is Tensor.__getitem__ and isinstance(args[1], int) and not torch.is_grad_enabled():
        return _Row(planned, args[1])
    return NotImplemented


_DATA = cast("Any", Tensor.data)
_WRITING_OPERATORS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
_COMPARISONS = frozenset({"__lt__", "__gt__", "lt", "gt"})

_LIKE: dict[Any, Callable[[Sequence[Any]], float]] = {
    torch.zeros_like: lambda args: 0.0,
    torch.empty_like: lambda args: 0.0,
    torch.ones_like: lambda args: 1.0,
    torch.full_like: lambda args: float(args[1]),
}


def _kaiming_uniform(table: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    options = dict(kwargs)
    options.pop("tensor", None)
    given = dict(zip(("a", "mode", "nonlinearity"), args[1:], strict=False)) | options
    slope, mode = given.get("a", 0), given.get("mode", "fan_in")
    fan = table.shape[1] if mode == "fan_in" else table.shape[0]
    fan *= math.prod(table.shape[2:])
    gain = nn.init.calculate_gain(given.get("nonlinearity", "leaky_relu"), slope)
    bound = math.sqrt(3.0) * gain / math.sqrt(fan)
    cast("DeferredTable", planned_of(table)).write("uniform_", [-bound, bound])
    return table
