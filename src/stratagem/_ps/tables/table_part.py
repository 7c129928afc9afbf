"""`TablePart`: a view of a table without gradients: ``table.data[0]``, ``table.detach().t()``.

In plain PyTorch, such a view shares the memory of the parameter, so that code may write the parameter through it:
``table.data[:-1].div_(norm)``. A worker has no memory of the table. So a view holds the calls by which it was made, and reads the rows
when an operator needs them. An operator that writes a view writes the local copy of the table (`WritableRows`), or is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.torch_patches import private_api
from stratagem._core.torch_patches.compiling import eagerly
from stratagem._ps.tables.row_gradient import RowSource, row_ids
from stratagem._ps.tables.table_gradient import ABOUT_THE_TENSOR, writes_first
from stratagem._ps.tables.writable_rows import WritableRows
from stratagem._wire.data_values import make_tensor
from stratagem.errors import ForeignParameterError

_NAMES: Final = (
    "view view_as reshape reshape_as flatten unflatten squeeze unsqueeze t transpose permute movedim moveaxis swapaxes swapdims "
    "narrow select diagonal unfold expand expand_as unbind split chunk tensor_split"
)
_KEYS: Final = (int, slice, type(None), type(Ellipsis))

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
"""A function, and its arguments after the first one."""


@final
class TablePart(Tensor):
    """A view of a table; see the module.

    Attributes:
        source: the rows of the table.
        path: the calls by which the view was made from the whole table.
    """

    source: RowSource
    path: tuple[Call, ...]

    @classmethod
    def over(cls, source: RowSource, path: tuple[Call, ...], stand_in: Tensor) -> TablePart:
        """Return a view that calls made; `stand_in` has its shape and no memory."""
        with private_api.WithoutSubclasses():
            made: TablePart = Tensor._make_subclass(cls, stand_in, False)
        made.source, made.path = source, path
        return made

    def read(self) -> Tensor:
        """Return the present values; the caller must not write to them."""
        rest = self.path
        if rest and rest[0][0] is Tensor.__getitem__:
            rows = _rows_at(self.source, rest[0][1][0])
            if rows is not None:
                return _follow(rows, rest[1:])
        return _follow(self.source.whole().detach(), rest)

    def writable(self) -> Tensor:
        """Return the view's part of the local copy of the table."""
        return _follow(writable_rows(self.source), self.path)

    @override
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answer(func, args, {} if kwargs is None else kwargs)

    @override
    # Tensor's own method has another signature in its stub.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        with private_api.WithoutSubclasses():
            return f"<TablePart of {self.source.name!r} {tuple(self.shape)}>"

    @override
    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = copied = self.read().clone()
        return copied

    @override
    def __reduce_ex__(self, proto: Any) -> Any:
        return make_tensor, (self.read(),)


def part_of(func: Any, table: Tensor, source: RowSource, args: Any, kwargs: Any) -> Any:
    """Return what a function returns for a table or view: a view or several, or None if it makes none."""
    if func is Tensor.__getitem__:
        key = args[0] if isinstance(args[0], tuple) else (args[0],)
        if any(isinstance(part, bool) or not isinstance(part, _KEYS) for part in key):
            return None
    elif func not in _VIEWS:
        return None
    path = table.path if isinstance(table, TablePart) else ()
    with private_api.WithoutSubclasses():
        shapes = func(table, *args, **kwargs)
        if isinstance(shapes, Tensor):
            return TablePart.over(source, (*path, (func, tuple(args), kwargs)), shapes)
        items = [(*path, (_item(func, at), tuple(args), kwargs)) for at in range(len(shapes))]
        return type(shapes)(map(TablePart.over, [source] * len(items), items, shapes))


def writable_rows(source: RowSource) -> Tensor:
    """Return the local copy of a table, to be written.

    Raises:
        ForeignParameterError: functions must not write the table.
    """
    if isinstance(source, WritableRows):
        return source.local()
    raise ForeignParameterError(
        f"the write would change a copy of table {source.name!r}, whose rows are on parameter servers. Change it by "
        "optimizer.step() (torch.optim.SGD for an update by hand), by a sg.Variable's assign and scatter methods, on the "
        "coordinator, or with one worker of one replica by an operator on this table alone."
    )


@eagerly
def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on views; not traced by compilers."""
    first = args[0] if args else None
    if func in ABOUT_THE_TENSOR:
        with private_api.WithoutSubclasses():
            return func(*args, **kwargs)
    if func in _OWN:
        return _OWN[func](first)
    if isinstance(first, TablePart):
        views = part_of(func, first, first.source, args[1:], kwargs)
        if views is not None:
            return views
    out = kwargs.get("out")
    if writes_first(func):
        func(_replaced(first, written=True), *map(_replaced, args[1:]), **_replaced(kwargs))
        return first
    given = {**_replaced(kwargs), **({} if out is None else {"out": _replaced(out, written=True)})}
    return func(*map(_replaced, args), **given)


def _replaced(value: Any, *, written: bool = False) -> Any:
    """Return a value with plain tensors in place of views."""
    if isinstance(value, TablePart):
        return value.writable() if written else value.read()
    if isinstance(value, dict):
        return {name: _replaced(one, written=written) for name, one in value.items()}
    if isinstance(value, (list, tuple)) and any(isinstance(one, TablePart) for one in value):
        return type(value)(_replaced(one, written=written) for one in value)
    return value


def _follow(value: Tensor, path: Sequence[Call]) -> Tensor:
    for func, args, kwargs in path:
        value = func(value, *args, **kwargs)
    return value


def _rows_at(source: RowSource, key: Any) -> Tensor | None:
    """Return ``table[key]`` for a key of numbers and slices; None if it needs the whole table."""
    first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
    ids = row_ids(first, source.shape[0])
    if ids is None:
        return None
    rows = source.rows(ids.reshape(-1)).detach()
    rows = rows if ids.dim() else rows[0]
    return rows[(slice(None),) * ids.dim() + tuple(rest)] if rest else rows


def _item(func: Any, at: int) -> Callable[..., Tensor]:
    return lambda value, *args, **kwargs: func(value, *args, **kwargs)[at]


_GETTERS = cast("Any", Tensor)
_VIEWS: Final = frozenset(
    [
        found
        for owner in (Tensor, torch)
        for name in _NAMES.split()
        if (found := getattr(owner, name, None)) is not None
    ]
    + [_GETTERS.T.__get__, _GETTERS.mT.__get__]
)
_OWN: Final[dict[Any, Callable[[Any], Any]]] = {
    Tensor.detach: lambda view: view,
    _GETTERS.data.__get__: lambda view: view,
    _GETTERS.grad.__get__: lambda view: None,
    _GETTERS.device.__get__: lambda view: torch.device("cpu"),
    _GETTERS.is_meta.__get__: lambda view: False,
    Tensor.get_device: lambda view: -1,
}
