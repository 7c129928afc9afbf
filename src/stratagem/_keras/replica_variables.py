"""Keras variables under a strategy: their value depends on the context.

Outside replicas ``Variable.value`` is the central tensor; with parameter servers it is first brought up to date, also if it belongs to
an optimizer. In a split call
(`split_calls`) it is the replica's value. In a replica of ``strategy.run`` it is the replica's leaf, as for any other
parameter under a strategy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stratagem._core.context import current_replica
from stratagem._core.managed import find_registered
from stratagem._core.torch_patches.compiling import eagerly
from stratagem._keras.forward_pass import KEY
from stratagem._keras.keras_names import names

SOURCE = "_stratagem_source"
"""The attribute of a Keras optimizer's variable whose value is on parameter servers; its ``fetch()`` brings it up to date."""


def apply_patch() -> None:
    """Replace ``Variable.value`` and ``Variable._direct_assign``."""
    variable_class = names().Variable
    read = variable_class.value.fget
    assign = variable_class._direct_assign
    backend = names().backend
    in_stateless_scope = backend.in_stateless_scope

    @eagerly
    def value(self: Any) -> Any:
        central = self._value
        if central is None or in_stateless_scope():
            return read(self)
        if (source := vars(self).get(SOURCE)) is not None:
            source.fetch()
        replica = current_replica()
        running = None if replica is None else replica.group.shared.get(KEY)
        if running is not None:
            found = running.read(replica, self, central)
        else:
            managed = find_registered(central)
            found = central if managed is None else managed.resolve()
        if (
            found is central
            or str(names().global_state.get_global_attribute("torch_device")) == "meta"
        ):
            return read(self)
        return self._maybe_autocast(found)

    @eagerly
    def _direct_assign(self: Any, value: Tensor) -> None:
        replica = current_replica()
        running = None if replica is None else replica.group.shared.get(KEY)
        # Random layers share the state of their seed generator: every replica draws other numbers.
        if running is None or replica is None or self.name == "seed_generator_state":
            assign(self, value)
        else:
            running.write(replica, self, value)

    variable_class.value = property(value, doc=variable_class.value.__doc__)
    variable_class._direct_assign = _direct_assign
