"""Public names of partitioners, which divide variables into shards.

Example:
    >>> import torch, stratagem as sg
    >>> sg.partitioners.FixedShardsPartitioner(2)(shape=(5, 3), dtype=torch.float32)
    [2, 1]
"""

from stratagem._ps.partition import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
