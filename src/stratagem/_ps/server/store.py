"""State of one session on one parameter server: variables, versions, optimizers, and applied writes.

Pure state: no socket, no clock, no thread. `session.py` keeps one `VariableStore`, hands it memory
(`allocate`), asks `admit` before every write, calls one method per message, and publishes the versions the
methods return. Numbers are given by the coordinator: one per shard of a variable, one per optimizer. A method
that raises has changed nothing but, at most, the memory of the variable named in the error.

`ledger.py` decides which writes are applied, `shard_optimizer.py` steps optimizers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._ps.init_ops import initialise
from stratagem._ps.rows import take_rows
from stratagem._ps.server.ledger import Admission, WriteLedger
from stratagem._ps.server.shard_optimizer import ServerOptimizer
from stratagem._ps.server.state_memory import bytes_held
from stratagem._ps.store_records import Block, StateRecord, StoreManifest, VariableRecord
from stratagem._ps.types import (
    Gradient,
    GroupSpec,
    Hyperparameters,
    InitOp,
    StateEntry,
    WriteId,
    row_pieces,
)
from stratagem._wire import codec
from stratagem._wire.arenas import Budget
from stratagem.errors import NotFoundError

Allocate: TypeAlias = Callable[[int, tuple[int, ...], torch.dtype], Tensor]
"""Returns memory for a variable, given its number, shape and dtype."""


LARGEST_EXPANSION_BYTES: Final = 1 << 30
"""Of one value that a scatter applies to many rows."""


@dataclass(slots=True)
class StoredVariable:
    """A shard in the server's memory, and how many writes it has seen."""

    name: str
    tensor: Tensor
    version: int = 0


@dataclass(slots=True)
class StoreStats:
    """Numbers about a store, for metrics and `repr`."""

    variables: int
    optimizers: int
    bytes: int
    applied: int
    duplicates: int
    fenced: int


def _plain_allocate(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    del number
    return torch.empty(shape, dtype=dtype)


class VariableStore:
    """Variables and optimizers of one strategy on one server.

    Args:
        allocate: returns the memory of a new variable; servers pass shared memory.
        budget: limit of optimizer state, and of whatever else is counted in it.
        optimizer_modules: modules (and their submodules) whose optimizer classes may be imported,
            beside ``torch.optim``.

    Example:
        >>> store = VariableStore()
        >>> store.create(7, "w", (2,), torch.float32).fill_(1.0)
        tensor([1., 1.])
        >>> store.assign(7, "add", torch.ones(2))
        1
        >>> store.read(7)
        tensor([2., 2.])
    """

    def __init__(
        self,
        allocate: Allocate = _plain_allocate,
        *,
        budget: Budget | None = None,
        optimizer_modules: Sequence[str] = (),
    ) -> None:
        self._allocate = allocate
        self._budget = budget or Budget(sys.maxsize)
        self._state_bytes: dict[int, int] = {}  # of every optimizer, as counted in the budget
        self._optimizer_modules = tuple(optimizer_modules)
        self._variables: dict[int, StoredVariable] = {}
        self._optimizers: dict[int, ServerOptimizer] = {}
        self._ledger = WriteLedger()

    # Which writes are applied.

    def admit(self, write: WriteId) -> Admission:
        """Decide whether a write of a worker is applied; only `Admission.APPLY` may be carried out."""
        return self._ledger.admit(write)

    def fence(self, worker: str, incarnation: int) -> None:
        """Refuse this incarnation of the worker, and earlier ones, from now on."""
        self._ledger.fence(worker, incarnation)

    def finish_closures(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Refuse late writes of these closures, given as ranges (first, behind the last)."""
        self._ledger.finish_closures(ranges)

    # Variables.

    def create(self, variable: int, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a shard and return it; its contents are undefined until written.

        Creating the same variable again (a message sent twice) returns the first one.
        """
        known = self._variables.get(variable)
        if known is not None:
            if (known.name, tuple(known.tensor.shape), known.tensor.dtype) == (
                name,
                tuple(shape),
                dtype,
            ):
                return known.tensor
            raise ValueError(
                f"variable {variable!r} exists as {known.name!r} with shape "
                f"{tuple(known.tensor.shape)!r} and {known.tensor.dtype}: cannot create it again "
                f"as {name!r} with shape {tuple(shape)!r} and {dtype}. Give every shard its own id."
            )
        tensor = self._allocate(variable, tuple(shape), dtype)
        self._variables[variable] = StoredVariable(name, tensor)
        return tensor

    def delete(self, variable: int) -> None:
        """Free a variable and its optimizer state; an unknown one was freed before."""
        self._variables.pop(variable, None)
        for number, optimizer in list(self._optimizers.items()):
            self._count_state(number, -optimizer.forget(variable))
            if optimizer.is_empty:
                del self._optimizers[number]

    def initialise(self, variable: int, operations: Sequence[InitOp]) -> int:
        """Run in-place initialisations in order; return the new version."""
        stored = self._find(variable)
        for operation in operations:
            initialise(stored.tensor, operation)
        return self._count_write(stored)

    def write_rows(self, variable: int, start: int, values: Tensor) -> int:
        """Write consecutive rows from `start`; return the new version."""
        stored = self._find(variable)
        _copy_rows(values, stored.tensor, start, repr(stored.name))
        return self._count_write(stored)

    def read(self, variable: int) -> Tensor:
        """Return the shard itself, not a copy."""
        return self._find(variable).tensor

    def read_rows(self, variable: int, ids: Tensor) -> Tensor:
        """Return copies of the rows asked, in the order asked."""
        stored = self._find(variable)
        _check_ids(stored, ids)
        return take_rows(stored.tensor, ids)

    def version(self, variable: int) -> int:
        """Return how many writes the variable has seen."""
        return self._find(variable).version

    def versions(self, variables: Iterable[int] | None = None) -> dict[int, int]:
        """Return versions of these variables (of all, if none are named)."""
        if variables is None:
            return {number: stored.version for number, stored in self._variables.items()}
        return {number: self._find(number).version for number in variables}

    def assign(self, variable: int, operation: str, value: Tensor) -> int:
        """``set``, ``add`` or ``sub`` a value of the variable's shape; return the new version."""
        stored = self._find(variable)
        if value.shape != stored.tensor.shape:
            raise ValueError(
                f"cannot {operation} a value of shape {tuple(value.shape)!r} to {stored.name!r}: "
                f"expected shape {tuple(stored.tensor.shape)!r}."
            )
        if operation == "set":
            stored.tensor.copy_(value)
        elif operation == "add":
            stored.tensor.add_(value)
        elif operation == "sub":
            stored.tensor.sub_(value)
        else:
            raise ValueError(f"unknown assignment {operation!r}: expected 'set', 'add' or 'sub'.")
        return self._count_write(stored)

    def scatter(self, variable: int, operation: str, ids: Tensor, values: Tensor) -> int:
        """Combine rows into the variable; duplicates accumulate. Return the new version.

        `operation` is one of ``add sub mul div min max update``; with ``update`` the last of
        several values for one row wins.
        """
        stored = self._find(variable)
        _check_ids(stored, ids)
        expected = (ids.numel(), *stored.tensor.shape[1:])
        if tuple(values.shape) != expected:
            if math.prod(expected) * values.itemsize > LARGEST_EXPANSION_BYTES:
                raise ValueError(
                    f"cannot expand a value of shape {tuple(values.shape)!r} to {expected!r}: that is "
                    f"more than {LARGEST_EXPANSION_BYTES} bytes. Scatter fewer rows at a time."
                )
            values = values.expand(expected)
        if values.dtype != stored.tensor.dtype:
            raise ValueError(
                f"cannot scatter {values.dtype} into {stored.name!r}: expected "
                f"{stored.tensor.dtype}."
            )
        if ids.numel():
            _scatter(stored.tensor, operation, ids, values)
        return self._count_write(stored)

    # Optimizers.

    def create_optimizer(
        self,
        optimizer: int,
        class_name: str,
        groups: Sequence[GroupSpec],
        *,
        defaults: Hyperparameters = MappingProxyType({}),
        attributes: Hyperparameters = MappingProxyType({}),
    ) -> None:
        """Set up the real optimizer class over the variables of `groups` that are here.

        `defaults` are the arguments the coordinator's object was made with, `attributes` what its class keeps
        on it. Creating an optimizer that exists replaces its class and groups and keeps the state of
        variables that stay (an `add_param_group` on the coordinator).
        """
        parameters = {
            number: self._find(number).tensor for group in groups for number in group.variables
        }
        if class_name.rpartition(".")[2] == "Adagrad":  # makes its state at once
            size = sum(tensor.nbytes for tensor in parameters.values())
            self._budget.check(max(0, size - self._state_bytes.get(optimizer, 0)))
        made = ServerOptimizer(
            class_name,
            groups,
            parameters,
            modules=self._optimizer_modules,
            defaults=defaults,
            attributes=attributes,
        )
        previous = self._optimizers.get(optimizer)
        if previous is not None:
            made.adopt_state(previous)
        self._optimizers[optimizer] = made
        self._count_state(optimizer)

    def push(
        self,
        optimizer: int,
        gradients: Sequence[Gradient],
        settings: Mapping[int, Hyperparameters] | None = None,
    ) -> list[int]:
        """Do one optimizer step with these gradients; return each variable's version after it.

        `settings` (group number → values) hold for this step alone: another worker's step has its own.
        """
        stepper = self._find_optimizer(optimizer)
        stored = [self._find(gradient.variable) for gradient in gradients]
        for variable, gradient in zip(stored, gradients, strict=True):
            if gradient.ids is not None:
                _check_ids(variable, gradient.ids)
        with stepper.settings(settings) if settings else nullcontext():
            first = stepper.first_steps(gradients)
            if first:
                self._budget.check(stepper.expected_bytes(first))
            try:
                stepper.step(gradients)
            finally:
                if first:
                    self._count_state(optimizer, stepper.state_bytes(first))
        return [self._count_write(variable) for variable in stored]

    def optimizer_state(self, optimizer: int) -> list[StateEntry]:
        """Return what the optimizer keeps for the variables here; tensors are not copied."""
        return list(self._find_optimizer(optimizer).state_entries())

    def load_optimizer_state(self, optimizer: int, entries: Sequence[StateEntry]) -> None:
        """Replace what the optimizer keeps for the variables named in `entries`."""
        found = self._find_optimizer(optimizer)
        size = sum(bytes_held(one.value) for one in entries)
        self._budget.check(max(0, size - self._state_bytes.get(optimizer, 0)))
        found.load_state(entries)
        self._count_state(optimizer)

    def write_optimizer_rows(self, optimizer: int, entry: StateEntry, start: int) -> None:
        """Write consecutive rows from `start` of state that `load_optimizer_state` made room for."""
        target = self._find_optimizer(optimizer).state_of(entry.variable, entry.key)
        if not (isinstance(target, Tensor) and isinstance(entry.value, Tensor)):
            raise ValueError(
                f"there is no tensor {entry.key!r} of variable {entry.variable!r} to write rows of."
            )
        _copy_rows(entry.value, target, start, f"{entry.key!r} of variable {entry.variable!r}")

    # Everything in, everything out.

    def describe(self) -> StoreManifest:
        """Return everything the store holds but the rows of its tensors."""
        state = []
        for number, optimizer in self._optimizers.items():
            for entry in optimizer.state_entries():
                value = entry.value
                if isinstance(value, Tensor):
                    dtype, shape = codec.dtype_name(value.dtype), tuple(value.shape)
                    record = StateRecord(number, entry.variable, entry.key, dtype, shape)
                else:
                    record = StateRecord(number, entry.variable, entry.key, value=value)
                state.append(record)
        variables = tuple(
            VariableRecord(
                number,
                stored.name,
                codec.dtype_name(stored.tensor.dtype),
                tuple(stored.tensor.shape),
                stored.version,
            )
            for number, stored in self._variables.items()
        )
        optimizers = tuple(one.record(number) for number, one in self._optimizers.items())
        return StoreManifest(variables, optimizers, tuple(state), self._ledger.record())

    def export(self, block_bytes: int | None = None) -> Iterator[Block]:
        """Yield the rows of all tensors, in blocks of at most `block_bytes` (by default 64 MiB).

        The rows are not copied: a caller that yields to writers in between copies what it needs. Sparse state
        (SGD's momentum of sparse gradients) is yielded as dense.
        """
        for number, stored in self._variables.items():
            for start, stop, rows in _blocks(stored.tensor, block_bytes):
                yield Block("variable", number, "", start, stop, rows)
        for number, optimizer in self._optimizers.items():
            for entry in optimizer.state_entries():
                if isinstance(entry.value, Tensor):
                    for start, stop, rows in _blocks(entry.value, block_bytes):
                        yield Block(
                            "optimizer", entry.variable, entry.key, start, stop, rows, number
                        )

    def restore(self, manifest: StoreManifest, blocks: Iterable[Block]) -> None:
        """Fill an empty store: create what the manifest names, then write the blocks.

        Blocks may come in any order, and their rows in any ranges.
        """
        for variable in manifest.variables:
            dtype = codec.dtype_from(variable.dtype)
            self.create(variable.number, variable.name, variable.shape, dtype)
            self._find(variable.number).version = variable.version
        for record in manifest.optimizers:
            self.create_optimizer(
                record.number,
                record.class_name,
                record.groups,
                defaults=record.defaults,
                attributes=record.attributes,
            )
            self._find_optimizer(record.number).make_state(
                one for one in manifest.state if one.optimizer == record.number
            )
            self._count_state(record.number)
        self._ledger.restore(manifest.ledger)
        for block in blocks:
            self.write_block(block)

    def write_block(self, block: Block) -> None:
        """Write rows of a value or of optimizer state; no version counts it."""
        if block.kind == "variable":
            stored = self._find(block.variable)
            _copy_rows(block.tensor, stored.tensor, block.start, repr(stored.name))
        else:
            entry = StateEntry(variable=block.variable, key=block.key, value=block.tensor)
            self.write_optimizer_rows(block.optimizer, entry, block.start)

    def close(self) -> None:
        """Free everything. May be called again."""
        self._variables.clear()
        self._optimizers.clear()
        self._budget.change(-sum(self._state_bytes.values()))
        self._state_bytes.clear()

    # Numbers.

    def stats(self) -> StoreStats:
        """Return numbers about the store."""
        return StoreStats(
            variables=len(self._variables),
            optimizers=len(self._optimizers),
            bytes=sum(stored.tensor.nbytes for stored in self._variables.values()),
            applied=self._ledger.applied,
            duplicates=self._ledger.duplicates,
            fenced=self._ledger.fenced,
        )

    def _count_state(self, optimizer: int, change: int | None = None) -> None:
        """Count in the budget by how many bytes an optimizer's state has changed; by default, measure it."""
        before = self._state_bytes.get(optimizer, 0)
        if change is None:
            change = self._find_optimizer(optimizer).state_bytes() - before
        self._budget.change(change)
        self._state_bytes[optimizer] = before + change

    def _find(self, variable: int) -> StoredVariable:
        stored = self._variables.get(variable)
        if stored is None:
            raise NotFoundError(
                f"variable {variable!r} is not on this server, which holds "
                f"{len(self._variables)} variables: it was never created here, or its session was "
                "closed."
            )
        return stored

    def _find_optimizer(self, optimizer: int) -> ServerOptimizer:
        found = self._optimizers.get(optimizer)
        if found is None:
            raise NotFoundError(f"optimizer {optimizer!r} was never created on this server.")
        return found

    @staticmethod
    def _count_write(stored: StoredVariable) -> int:
        stored.version += 1
        return stored.version

    @override
    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<VariableStore {stats.variables} variables ({stats.bytes} bytes), "
            f"{stats.optimizers} optimizers, {stats.applied} writes>"
        )


def _blocks(tensor: Tensor, block_bytes: int | None) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (start, stop, rows) of a tensor; one without axes is one row."""
    whole = tensor.to_dense() if tensor.is_sparse else tensor
    rows = whole if whole.dim() else whole.reshape(1)
    for start, count in row_pieces(rows.shape[0], rows.nbytes, block_bytes):
        yield start, start + count, rows[start : start + count]


def _copy_rows(values: Tensor, target: Tensor, start: int, name: str) -> None:
    """Copy rows into consecutive rows of a tensor; one without axes is one row."""
    rows = target if target.dim() else target.reshape(1)
    values = values if values.dim() else values.reshape(1)
    stop = start + values.shape[0]
    if start < 0 or stop > rows.shape[0] or values.shape[1:] != rows.shape[1:]:
        raise ValueError(
            f"rows {start}…{stop} of shape {tuple(values.shape[1:])!r} do not fit into {name}, which "
            f"has {rows.shape[0]} rows of shape {tuple(rows.shape[1:])!r}."
        )
    rows[start:stop].copy_(values)


def _check_ids(stored: StoredVariable, ids: Tensor) -> None:
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise ValueError(
            f"row ids for {stored.name!r} have shape {tuple(ids.shape)!r} and {ids.dtype}: expected "
            "one axis of int64."
        )
    if ids.numel() == 0:
        return
    if stored.tensor.dim() == 0:
        raise ValueError(f"{stored.name!r} has no axis, so it has no rows.")
    smallest, largest = torch.aminmax(ids)
    if smallest < 0 or largest >= stored.tensor.shape[0]:
        bad = int(smallest) if smallest < 0 else int(largest)
        raise ValueError(
            f"row id {bad!r} is out of range for {stored.name!r}: expected 0 <= id < "
            f"{stored.tensor.shape[0]}."
        )


def _scatter(tensor: Tensor, operation: str, ids: Tensor, values: Tensor) -> None:
    if operation in ("add", "sub"):
        tensor.index_add_(0, ids, values, alpha=1 if operation == "add" else -1)
        return
    # The others work on the rows touched alone: gathered, combined, put back.
    unique, inverse = torch.unique(ids, return_inverse=True)
    rows = tensor.index_select(0, unique)
    target = inverse.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    if operation in ("min", "max"):
        rows.scatter_reduce_(0, target, values, "amin" if operation == "min" else "amax")
    elif operation == "mul":
        rows.scatter_reduce_(0, target, values, "prod")
    elif operation == "div":
        # a / b1 / b2 = a / (b1·b2): the divisors of each row are multiplied first.
        divisors = torch.ones_like(rows).scatter_reduce_(0, target, values, "prod")
        if tensor.is_floating_point() or tensor.is_complex():
            rows.div_(divisors)
        else:
            # The processor traps when it divides the smallest integer by -1: negate instead.
            negate = divisors == -1
            rows = rows.div_(divisors.masked_fill_(negate, 1), rounding_mode="trunc")
            rows = torch.where(negate, -rows, rows) if tensor.dtype.is_signed else rows
    elif operation == "update":
        # Of several values for one row the last counts; scatter_ alone leaves the winner open.
        order = torch.arange(ids.numel())
        last = torch.zeros_like(unique).scatter_reduce_(
            0, inverse, order, "amax", include_self=False
        )
        rows = values.index_select(0, last)
    else:
        raise ValueError(
            f"unknown scatter operation {operation!r}: expected add, sub, mul, div, min, max or "
            "update."
        )
    tensor.index_copy_(0, unique, rows)
