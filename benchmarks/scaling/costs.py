"""Processor time of each role per closure, step, message, tensor, megabyte, table and row. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

MEGABYTE = 1e6
ROWS = 1e3
READ_PART = 0.5  # of a server's time for rows; the rest is the update. Shifts time within a step, not the total


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of processor time, by role. ``server`` is the sum over all servers."""

    coordinator: float = 0.0
    worker: float = 0.0
    server: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in ROLES})

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1.0

    def __mul__(self, factor: float) -> Cost:
        return Cost(**{name: getattr(self, name) * factor for name in ROLES})

    @property
    def total(self) -> float:
        """Sum over the roles."""
        return self.coordinator + self.worker + self.server

    def positive(self) -> Cost:
        """Return the cost without negative parts, which differences of noisy figures may have."""
        return Cost(**{name: max(0.0, getattr(self, name)) for name in ROLES})


ROLES = tuple(each.name for each in fields(Cost))


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """Costs of the units that a training job consists of.

    Args:
        closure: a scheduled function: scheduling, sending, reporting its result.
        step: one ``optimizer.step()``, with the message to one server.
        message: the messages of a step to one more server.
        tensor: one more dense parameter in a step.
        megabyte: a million bytes of dense parameters: gradients to the server, SGD there, values back.
        table: using an embedding table in a step, whatever the number of rows.
        rows: a thousand looked-up rows (16 floats): lookup, gradient, Adagrad on the server.
    """

    closure: Cost
    step: Cost
    message: Cost
    tensor: Cost
    megabyte: Cost
    table: Cost
    rows: Cost


@dataclass(frozen=True, kw_only=True)
class ServerLoad:
    """Load of one server by one step: processor time, and bytes over sockets, for reading rows and for the update."""

    read_s: float
    update_s: float
    read_up: float
    read_down: float
    update_up: float
    update_down: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step, described by numbers that a user knows.

    Args:
        name: for tables.
        compute_s: processor time of forward and backward in plain PyTorch, without embedding tables.
        tensor_bytes: sizes of the dense parameters, in the order of their creation.
        rows: ids that are looked up in tables, which are divided evenly among the servers.
        row_bytes: size of one row.
    """

    name: str
    compute_s: float
    tensor_bytes: tuple[int, ...]
    rows: int = 0
    row_bytes: int = 64

    def worker_s(self, units: UnitCosts, servers: int) -> float:
        """Return the worker's processor time for one step."""
        used = len(self._used(servers))
        cost = self._fixed(units) + units.message * (used - 1)
        cost += units.megabyte * (sum(self.tensor_bytes) / MEGABYTE)
        if self.rows:
            cost += units.table + units.rows * (self.rows / ROWS)
        return self.compute_s + cost.worker

    def loads(self, units: UnitCosts, servers: int) -> list[ServerLoad]:
        """Return what each server does for one step. Tensors are placed on the servers in turn; servers without a part are left out."""
        used = self._used(servers)
        rows = self.rows / len(used)
        rows_s = units.rows.server * rows / ROWS
        if self.rows:
            rows_s += units.table.server
        loads = []
        for server in used:
            placed = self.tensor_bytes[server::servers]
            fixed_s = units.step.server if server == 0 else units.message.server
            dense_s = units.tensor.server * len(placed) + units.megabyte.server * (
                sum(placed) / MEGABYTE
            )
            loads.append(
                ServerLoad(
                    read_s=rows_s * READ_PART,
                    update_s=fixed_s + dense_s + rows_s * (1 - READ_PART),
                    read_up=rows * 8,
                    read_down=rows * self.row_bytes,
                    update_up=sum(placed) + rows * (8 + self.row_bytes),
                    update_down=sum(placed),
                )
            )
        return loads

    def _fixed(self, units: UnitCosts) -> Cost:
        return units.step + units.tensor * len(self.tensor_bytes)

    def _used(self, servers: int) -> range:
        return range(servers if self.rows else min(servers, len(self.tensor_bytes)))


def unit_costs(probes: Mapping[str, Cost]) -> UnitCosts:
    """Compute the costs of units from the costs of one step of each probe (`probes.PROBES`).

    The probes differ in one unit each, so that every unit is a difference of two of them. ``compute`` of a probe is subtracted
    before.
    """
    # A closure with 1 step, and with 8: closure + step = base; closure / 8 + step = several.
    closure = ((probes["base"] - probes["several"]) * (8 / 7)).positive()
    tensor = ((probes["tensors"] - probes["base"]) * (1 / 16)).positive()
    step = (probes["base"] - closure - tensor).positive()
    message = (probes["servers"] - probes["base"] - tensor).positive()
    megabyte = ((probes["bytes"] - probes["base"]) * (1 / 4)).positive()
    rows = ((probes["rows"] - probes["few rows"]) * (1 / 24)).positive()
    table = (probes["few rows"] - probes["base"] - rows).positive()
    return UnitCosts(
        closure=closure,
        step=step,
        message=message,
        tensor=tensor,
        megabyte=megabyte,
        table=table,
        rows=rows,
    )
