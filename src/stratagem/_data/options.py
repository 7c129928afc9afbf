"""Options that travel with a dataset: how it is shared among workers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class AutoShardPolicy(enum.IntEnum):
    """How a dataset is shared among the workers of a cluster.

    Example:
        >>> import stratagem as sg
        >>> sg.data.AutoShardPolicy.DATA
        <AutoShardPolicy.DATA: 2>
    """

    OFF = -1
    """Every worker sees everything."""

    AUTO = 0
    """By file where the dataset reads files and no step depends on the order of all rows, else by
    data. With fewer files than workers: by data, with a warning."""

    FILE = 1
    """Worker w of W reads files w, w+W, w+2W, …"""

    DATA = 2
    """Worker w of W keeps elements (batches) w, w+W, … of the finished dataset."""

    HINT = 3
    """``shard(SHARD_HINT, SHARD_HINT)`` in the pipeline becomes ``shard(W, w)``."""


SHARD_HINT = -1
"""Stands for both arguments of `Dataset.shard` where ``AutoShardPolicy.HINT`` is to fill them in."""


@dataclass(frozen=True, kw_only=True)
class DistributeOptions:
    """How a dataset is distributed.

    Attributes:
        auto_shard_policy: how workers share it.
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
                f"auto_shard_policy={self.auto_shard_policy!r} is no policy; expected one of "
                f"{', '.join(f'AutoShardPolicy.{p.name}' for p in AutoShardPolicy)}"
            ) from None
        object.__setattr__(self, "auto_shard_policy", policy)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything `Dataset.with_options` takes.

    Attributes:
        distribute: how the dataset is shared among workers.

    Example:
        >>> import stratagem as sg
        >>> sg.data.Options().distribute.auto_shard_policy
        <AutoShardPolicy.AUTO: 0>
    """

    distribute: DistributeOptions = field(default_factory=DistributeOptions)
