"""State of one session on one parameter server: variables, versions, optimizers, and applied writes.

Pure state: no socket, no clock, no thread. `session.py` keeps one `VariableStore`, gives it memory
(`allocate`), calls `admit` before every write, calls one method per message, and publishes the versions the
methods return. The coordinator assigns numbers: one per shard of a variable, one per optimizer. A method
that raises has changed nothing but, at most, the memory of the variable named in the error.

`ledger.py` decides which writes are applied, `shard_optimizer.py` steps optimizers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._ps.init_ops import KEYS_OF, MemoryKind, memory_kind
from stratagem._ps.rows import take_rows
from stratagem._ps.server.changed_rows import ChangedRows
from stratagem._ps.server.cut import Cut, Key
from stratagem._ps.server.held_steps import HeldSteps
from stratagem._ps.server.keyed_tables import KeyedTables
from stratagem._ps.server.ledger import Admission, WriteLedger
from stratagem._ps.server.row_operations import (
    check_ids,
    copy_rows,
    expand_values,
    scatter_rows,
)
from stratagem._ps.server.shard_optimizer import ServerOptimizer
from stratagem._ps.server.state_memory import bytes_held
from stratagem._ps.server.store_state import Block, StoreStats, described_state
from stratagem._ps.server.stored_variable import Allocate, StoredVariable, plain_allocate
from stratagem._ps.types import Gradient, GroupSpec, Hyperparameters, InitOp, StateEntry, WriteId
from stratagem._wire import codec
from stratagem._wire.arenas import Budget
from stratagem._wire.messages import LedgerRecord, StoreManifest, VariableRecord
from stratagem.errors import NotFoundError

_ASSIGNMENTS: dict[str, Callable[..., Tensor]] = {
    "set": Tensor.copy_,
    "add": Tensor.add_,
    "sub": Tensor.sub_,
}


class VariableStore:
    """Variables and optimizers of one strategy on one server.

    Args:
        allocate: returns the memory of a new variable; servers pass shared memory.
        budget: limit of optimizer state and of everything else counted in it.
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
        allocate: Allocate = plain_allocate,
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
        self._cut: Cut | None = None
        self.changed_rows = ChangedRows()
        self.keyed = KeyedTables(self)
        self.held = HeldSteps(self, self._budget)
        self._row_bytes = 0  # of rows of dynamic tables, as counted in the budget

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
        self.held.drop(self._ledger.finished)

    # Variables.

    def create(
        self,
        variable: int,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        kind: MemoryKind = "memory",
    ) -> Tensor:
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
        tensor = self._allocate(variable, tuple(shape), dtype, kind)
        self._variables[variable] = StoredVariable(name, tensor)
        return tensor

    def delete(self, variable: int) -> None:
        """Free a variable and its optimizer state; an unknown one was freed before."""
        self.before_write(variable)
        self.keyed.forget(variable)
        self._variables.pop(variable, None)
        for number, optimizer in list(self._optimizers.items()):
            self._count_state(number, -optimizer.forget(variable))
            if optimizer.is_empty:
                del self._optimizers[number]

    def initialise(self, variable: int, operations: Sequence[InitOp]) -> int:
        """Run in-place initialisations in order, or at the first use (`AT_FIRST_USE`); return the new version."""
        stored = self.find(variable)
        self.before_write(variable)
        stored.initialise(operations)
        for operation in operations:
            if operation.name == KEYS_OF:
                self.keyed.bind(variable, stored.name, operation)
        return self._count_write(stored)

    def write_rows(self, variable: int, start: int, values: Tensor) -> int:
        """Write consecutive rows from `start`; return the new version."""
        stored = self.find(variable)
        self.before_write(variable)
        copy_rows(values, stored.tensor, start, repr(stored.name))
        return self._count_write(stored)

    def read(self, variable: int) -> Tensor:
        """Return the shard itself, not a copy."""
        return self.find(variable).tensor

    def read_rows(self, variable: int, ids: Tensor) -> Tensor:
        """Return copies of the rows asked, in the order asked."""
        stored = self.find(variable)
        check_ids(ids, stored.tensor, stored.name)
        return take_rows(stored.tensor, ids)

    def version(self, variable: int) -> int:
        """Return how many writes the variable has seen."""
        return self.find_unread(variable).version

    def versions(self, variables: Iterable[int] | None = None) -> dict[int, int]:
        """Return versions of these variables (of all, if none are named)."""
        wanted = self._variables if variables is None else variables
        return {number: self.version(number) for number in wanted}

    def assign(self, variable: int, operation: str, value: Tensor) -> int:
        """``set``, ``add`` or ``sub`` a value of the variable's shape; return the new version."""
        stored = self.find(variable)
        if value.shape != stored.tensor.shape:
            raise ValueError(
                f"cannot {operation} a value of shape {tuple(value.shape)!r} to {stored.name!r}: "
                f"expected shape {tuple(stored.tensor.shape)!r}."
            )
        self.before_write(variable)
        if operation not in _ASSIGNMENTS:
            raise ValueError(f"unknown assignment {operation!r}: expected 'set', 'add' or 'sub'.")
        _ASSIGNMENTS[operation](stored.tensor, value)
        return self._count_write(stored)

    def scatter(self, variable: int, operation: str, ids: Tensor, values: Tensor) -> int:
        """Combine rows into the variable; duplicates accumulate. Return the new version.

        `operation` is one of ``add sub mul div min max update``; with ``update`` the last of
        several values for one row wins.
        """
        stored = self.find(variable)
        check_ids(ids, stored.tensor, stored.name)
        values = expand_values(values, ids, stored.tensor, stored.name)
        if ids.numel():
            if self.is_watched:
                self.before_write(variable, torch.unique(ids))
            scatter_rows(stored.tensor, operation, ids, values)
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
        # torch's own optimizers do not look at values when they are made.
        find = self.find_unread if class_name.startswith("torch.optim.") else self.find
        parameters = {number: find(number).tensor for group in groups for number in group.variables}
        if class_name.rpartition(".")[2] == "Adagrad":  # makes its state at once
            size = sum(one.nbytes for n, one in parameters.items() if n not in self.keyed)
            self._budget.check(max(0, size - self._state_bytes.get(optimizer, 0)))
        made = ServerOptimizer(
            class_name,
            groups,
            parameters,
            modules=self._optimizer_modules,
            defaults=defaults,
            attributes=attributes,
        )
        made.uncounted.update(number for number in parameters if number in self.keyed)
        previous = self._optimizers.get(optimizer)
        if previous is not None:
            made.put_states(previous.take_states(parameters))
        self.changed_rows.mark_all(parameters)
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
        stepper = self.optimizer(optimizer)
        gradients = [self.keyed.without_evicted(gradient) for gradient in gradients]
        stored = [self.find(gradient.variable) for gradient in gradients]
        for variable, gradient in zip(stored, gradients, strict=True):
            if gradient.ids is not None:
                check_ids(gradient.ids, variable.tensor, variable.name)
        if self.is_watched:
            for gradient in gradients:
                rows_only = stepper.touches_rows_only(gradient)
                self.before_write(gradient.variable, gradient.ids if rows_only else None)
        as_given = not settings and not stepper.has_dtype
        with nullcontext() if as_given else stepper.settings(settings or {}):
            first = stepper.unstepped(gradients)
            if first:
                self._budget.check(stepper.expected_bytes(first))
            before = stepper.state_bytes(first) if first else 0
            try:
                stepper.step(gradients)
            finally:
                if first:
                    self._count_state(optimizer, stepper.state_bytes(first) - before)
        return [self._count_write(variable) for variable in stored]

    @property
    def optimizers(self) -> list[int]:
        return list(self._optimizers)

    def optimizer_state(self, optimizer: int) -> list[StateEntry]:
        """Return what the optimizer keeps for the variables here; tensors are not copied."""
        return list(self.optimizer(optimizer).state_entries())

    def load_optimizer_state(self, optimizer: int, entries: Sequence[StateEntry]) -> None:
        """Replace what the optimizer keeps for the variables named in `entries`."""
        found = self.optimizer(optimizer)
        variables = {one.variable for one in entries}
        before = found.state_bytes(variables)
        self._budget.check(max(0, sum(bytes_held(one.value) for one in entries) - before))
        self.changed_rows.mark_all(variables)
        found.load_state(entries)
        self._count_state(optimizer, found.state_bytes(variables) - before)

    def take_states(self, optimizer: int, variables: Iterable[int]) -> Callable[[], None]:
        """Remove what an optimizer keeps for these variables; return a function that puts it back."""
        found = self.optimizer(optimizer)
        taken = found.take_states(variables)
        self._count_state(optimizer)

        def put_back() -> None:
            if self._optimizers.get(optimizer) is found:
                found.put_states(taken)
                self._count_state(optimizer)

        return put_back

    def tensor_of(self, variable: int, optimizer: int, key: str) -> Tensor:
        """Return the memory of a variable (without a key), or of a tensor of optimizer state for it."""
        if not key:
            return self.find_unread(variable).tensor
        found = self.optimizer(optimizer).state_of(variable, key)
        if not isinstance(found, Tensor):
            raise ValueError(f"there is no tensor {key!r} of variable {variable!r}.")
        return found

    def touch(self, variable: int) -> int:
        """Prepare for a write of the whole variable from outside; count and return its version."""
        stored = self.find_unread(variable)
        self.before_write(variable)
        return self._count_write(stored)

    def write_optimizer_rows(self, optimizer: int, entry: StateEntry, start: int) -> None:
        """Write consecutive rows from `start` of state that `load_optimizer_state` allocated."""
        target = self.optimizer(optimizer).state_of(entry.variable, entry.key)
        if not (isinstance(target, Tensor) and isinstance(entry.value, Tensor)):
            raise ValueError(
                f"there is no tensor {entry.key!r} of variable {entry.variable!r} to write rows of."
            )
        self.before_write(entry.variable)
        copy_rows(entry.value, target, start, f"{entry.key!r} of variable {entry.variable!r}")

    # Everything in, everything out.

    def restore_ledger(self, record: LedgerRecord) -> None:
        """Remember the writes of a record as applied."""
        self._ledger.restore(record)

    def begin_cut(self, variables: Iterable[int]) -> Cut:
        """Keep these variables, and optimizer state for them, as they are now; `end_cut` ends it."""
        self.end_cut()
        wanted = set(variables)
        tensors: dict[Key, Tensor] = {(one, 0, ""): self.find(one).tensor for one in wanted}
        for number, optimizer in self._optimizers.items():
            for entry in optimizer.state_entries():
                if entry.variable in wanted and isinstance(entry.value, Tensor):
                    tensors[entry.variable, number, entry.key] = entry.value
        self._cut = Cut(tensors)
        return self._cut

    def end_cut(self) -> None:
        """Close the cut, if there is one."""
        if self._cut is not None:
            self._cut.close()
            self._cut = None

    @property
    def is_watched(self) -> bool:
        """True if a cut or a record of changed rows must know of every write."""
        return self._cut is not None or self.changed_rows.is_active

    def reset_state(self, variable: int, rows: Tensor) -> None:
        """Set optimizer state of rows of a dynamic table to that before the first step."""
        for optimizer in self._optimizers.values():
            optimizer.reset_rows(variable, rows)

    def count_rows(self, nbytes: int) -> None:
        """Count bytes of new rows of dynamic tables; MemoryError if they exceed the limit."""
        self._budget.take(nbytes)
        self._row_bytes += nbytes

    def before_write(self, variable: int, ids: Tensor | None = None) -> None:
        """Prepare for a write of these rows (by default, of all)."""
        if ids is None:
            self.keyed.note_whole_write(variable)
        if self.changed_rows.is_active and variable in self._variables:
            self.changed_rows.mark(variable, ids, self._variables[variable].tensor)
        if self._cut is not None:
            self._cut.before_write(variable, ids)

    def describe(self) -> StoreManifest:
        """Return everything the store holds but the rows of its tensors."""
        state, optimizers = described_state(self._optimizers), self._optimizers.items()
        variables = tuple(
            VariableRecord(
                number,
                stored.name,
                codec.dtype_name(stored.tensor.dtype),
                tuple(stored.tensor.shape),
                stored.version,
                stored.recipe,
            )
            for number, stored in self._variables.items()
        )
        records = tuple(one.record(number) for number, one in optimizers)
        return StoreManifest(variables, records, state, self._ledger.record())

    def restore(self, manifest: StoreManifest) -> None:
        """Create what the manifest names, in an empty store. `write_block` writes the rows."""
        for variable in manifest.variables:
            dtype = codec.dtype_from(variable.dtype)
            kind = memory_kind(variable.recipe)
            self.create(variable.number, variable.name, variable.shape, dtype, kind=kind)
        for variable in manifest.variables:
            self.initialise(variable.number, variable.recipe)
            self.find(variable.number).version = variable.version
        for record in manifest.optimizers:
            self.create_optimizer(
                record.number,
                record.class_name,
                record.groups,
                defaults=record.defaults,
                attributes=record.attributes,
            )
            self.optimizer(record.number).make_state(
                one for one in manifest.state if one.optimizer == record.number
            )
            self._count_state(record.number)
        self._ledger.restore(manifest.ledger)

    def write_block(self, block: Block) -> None:
        """Write rows of a value or of optimizer state; no version counts it."""
        if not block.key:
            stored = self.find(block.variable)
            copy_rows(block.rows, stored.tensor, block.start, repr(stored.name))
        else:
            entry = StateEntry(variable=block.variable, key=block.key, value=block.rows)
            self.write_optimizer_rows(block.optimizer, entry, block.start)

    def close(self) -> None:
        """Free everything. May be called again."""
        self.held.close()
        self._variables.clear()
        self._optimizers.clear()
        self._budget.change(-sum(self._state_bytes.values()) - self._row_bytes)
        self._state_bytes.clear()
        self._row_bytes = 0

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
        change = self.optimizer(optimizer).state_bytes() - before if change is None else change
        self._budget.change(change)
        self._state_bytes[optimizer] = before + change

    def find(self, variable: int) -> StoredVariable:
        """Return a variable by its number, initialised."""
        stored = self._variables.get(variable) or self.find_unread(variable)
        if stored.pending:
            stored.run_pending()
        return stored

    def find_unread(self, variable: int) -> StoredVariable:
        """Return a variable by its number for a caller that does not look at its values."""
        stored = self._variables.get(variable)
        if stored is None:
            raise NotFoundError(
                f"variable {variable!r} is not on this server, which holds {len(self._variables)} "
                "variables: it was never created here, or its session was closed."
            )
        return stored

    def optimizer(self, optimizer: int) -> ServerOptimizer:
        """Return an optimizer by its number."""
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
        held = f"{stats.variables} variables ({stats.bytes} bytes), {stats.optimizers} optimizers"
        return f"<VariableStore {held}, {stats.applied} writes>"
