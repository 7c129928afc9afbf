"""The seed pages' historical names, for people who come from tf.distribute.

Here: `v1` (tf.compat.v1's class), `experimental` (what tf.distribute.experimental holds) and
`experimental_set_strategy`. The ``experimental_*`` methods answer on every strategy object
(`spelling`), and ``strategy.extended`` is made in `extended`. New programs need none of it;
``docs/coming-from-tf-distribute.md`` has the whole table.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem._strategies.base import Strategy
    from stratagem.compat import experimental as experimental
    from stratagem.compat import v1 as v1
    from stratagem.compat.extended import StrategyExtended as StrategyExtended

__all__ = ["StrategyExtended", "experimental", "experimental_set_strategy", "v1"]


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """tf.distribute's older name of `stratagem.set_strategy` (CTX-11).

    Example:
        >>> import stratagem as sg
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> sg.compat.experimental_set_strategy(strategy)
        >>> sg.get_strategy() is strategy
        True
        >>> sg.compat.experimental_set_strategy(None)
    """
    from stratagem._core import context

    context.set_strategy(strategy)


def __getattr__(name: str) -> Any:
    # Loaded when asked for: `experimental` reaches the cluster parts.
    if name in ("v1", "experimental"):
        return importlib.import_module(f"stratagem.compat.{name}")
    if name == "StrategyExtended":
        from stratagem.compat.extended import StrategyExtended

        return StrategyExtended
    raise AttributeError(f"module 'stratagem.compat' has no attribute {name!r}")
