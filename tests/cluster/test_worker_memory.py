"""What a worker does with memory its steps have freed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stratagem import ClusterCoordinator, LocalCluster

pytestmark = pytest.mark.process


def test_large_blocks_come_from_memory_the_process_keeps(
    cluster: LocalCluster, connect: Callable[..., ClusterCoordinator]
) -> None:
    """A block of 24 MB is none the kernel maps afresh, and takes back, for each step."""

    def mapped_for_a_block() -> int:
        import ctypes

        import torch

        class Info(ctypes.Structure):
            _fields_ = [(f"part{i}", ctypes.c_size_t) for i in range(10)]

        count = ctypes.CDLL(None).mallinfo2
        count.restype = Info
        before = count().part3  # blocks mapped one by one, see mallinfo(3)
        block = torch.ones(6 << 20)
        mapped: int = count().part3 - before
        del block
        return mapped

    assert connect(cluster).schedule(mapped_for_a_block).fetch() == 0
