"""Options that decide how workers share a dataset."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class AutoShardPolicy(enum.IntEnum):
    """Rule by which the workers of a cluster share a dataset.

    Example:
        >>> import stratagem as sg
        >>> sg.data.AutoShardPolicy.DATA
        <AutoShardPolicy.DATA: 2>
    """

    OFF = -1
    """Every worker sees everything."""

    AUTO = 0
    """By file if the dataset reads files and no step depends on the order of all rows, else by data. With
    fewer files than workers: by data, with a warning."""

    FILE = 1
    """Worker w of W reads files w, w+W, w+2W, …"""

    DATA = 2
    """Worker w of W keeps elements (batches) w, w+W, … of the whole pipeline."""

    HINT = 3
    """``shard(SHARD_HINT, SHARD_HINT)`` in the pipeline becomes ``shard(W, w)``."""


SHARD_HINT = -1
"""Value of both arguments of `Dataset.shard` that ``AutoShardPolicy.HINT`` replaces."""


@dataclass(frozen=True, kw_only=True)
class DistributeOptions:
    """Options for the distribution of a dataset.

    Attributes:
        auto_shard_policy: how workers share the dataset.
        num_devices: accepted for code written for tf.data, and ignored.

    Example:
        >>> import stratagem as sg
        >>> options = sg.data.DistributeOptions(auto_shard_policy=sg.data.AutoShardPolicy.OFF)
        >>> sg.data.Dataset.range(3).with_options(options).options.distribute.auto_shard_policy
        <AutoShardPolicy.OFF: -1>
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    num_devices: int | None = None

    def __post_init__(self) -> None:
        try:
            policy = AutoShardPolicy(self.auto_shard_policy)
        except ValueError:
            raise ValueError(
                f"auto_shard_policy={self.auto_shard_policy!r} is not a policy; expected one of "
                f"{', '.join(f'AutoShardPolicy.{p.name}' for p in AutoShardPolicy)}"
            ) from None
        object.__setattr__(self, "auto_shard_policy", policy)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `Dataset.with_options`.

    Attributes:
        distribute: how workers share the dataset.

    Example:
        >>> import stratagem as sg
        >>> sg.data.Options().distribute.auto_shard_policy
        <AutoShardPolicy.AUTO: 0>
    """

    distribute: DistributeOptions = field(default_factory=DistributeOptions)
