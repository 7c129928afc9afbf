"""What people read when something is wrong with a variable on parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.errors import ConnectionLost

P = sg.partitioners


@pytest.fixture(params=["1", "0"], ids=["shared", "bytes"])
def strategy(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[sg.ParameterServerStrategy]:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", request.param)
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as made:
            yield made


def test_a_variable_made_under_a_closed_strategy_says_what_to_do(
    strategy: sg.ParameterServerStrategy,
) -> None:
    strategy.close()
    for options in ({}, {"per_worker_variable": True}):
        with strategy.scope(), pytest.raises(RuntimeError, match=r"'late.*is closed\. Make a new"):
            sg.Variable(torch.zeros(4, 2), name="late", **options)


def test_objects_of_one_process_are_not_sent(
    strategy: sg.ParameterServerStrategy,
) -> None:
    """The coordinator to a worker, a worker's strategy to the coordinator: both say why not."""
    coordinator = sg.ClusterCoordinator(strategy)

    def schedule_more() -> None:
        coordinator.schedule(print)

    for function, args in ((schedule_more, ()), (print, (coordinator,))):
        with pytest.raises(ValueError, match="only the program that created it can schedule"):
            coordinator.schedule(function, args=args)

    def give_strategy() -> dict[str, Any]:
        return {"strategy": strategy}

    coordinator.schedule(give_strategy)
    with pytest.raises(TypeError, match="a strategy cannot leave the worker") as caught:
        coordinator.join(timeout_s=120)
    assert "its result, a dict, cannot be sent back" in caught.value.__notes__[0]


def test_variables_of_a_closed_strategy_say_what_to_do(
    strategy: sg.ParameterServerStrategy,
) -> None:
    with strategy.scope():
        counter = sg.Variable(1.0, name="counter")
        table = sg.Variable(torch.zeros(4, 2), name="table")
        own: Any = sg.Variable(1, per_worker_variable=True, name="own")
    assert float(counter) == 1.0
    assert table.numpy().sum() == 0
    strategy.close()
    uses: list[tuple[str, Callable[[], object]]] = [
        ("counter", lambda: float(counter)),
        ("counter", lambda: counter.assign_add(1.0)),
        ("table/part_0", lambda: table.numpy()),
        ("table/part_0", lambda: table.assign(torch.ones(4, 2))),
        ("table/part_1", lambda: table.sparse_read([3])),
        ("own/worker_0", lambda: own.read_all()),
    ]
    for name, use in uses:
        with pytest.raises(ConnectionLost, match=f"{name}' is gone.*before closing"):
            use()
    # Looking at one, as a debugger does, never fails.
    assert "'counter'" in repr(counter)
    assert "is gone" in repr(counter)
    assert "table/part_1" in repr(table)


def test_errors_of_sharded_variables_have_the_name_given(
    strategy: sg.ParameterServerStrategy,
) -> None:
    """PRT-5: the container's own name says nothing; what the user called it does."""
    with strategy.scope():
        table: Any = sg.Variable(torch.zeros(4, 2), name="users")
    rows = torch.sparse_coo_tensor([[4]], torch.ones(1, 2), (9, 2))
    wrong: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: table.assign(torch.ones(5, 2))),
        (ValueError, lambda: table.assign_add(torch.ones(4, 2, dtype=torch.float64))),
        (ValueError, lambda: table.scatter_add(rows)),
        (ValueError, lambda: table.sparse_read([-1])),
        (ValueError, lambda: table.scatter_sub(torch.ones(4, 2).to_sparse())),
        (AttributeError, lambda: table.scatter_add(torch.ones(4, 2))),
        (IndexError, lambda: table[4]),
    ]
    for kind, use in wrong:
        with pytest.raises(kind, match="sharded variable 'users'"):
            use()
    made_by_hand: Any = sg.ShardedVariable([sg.Variable(torch.zeros(2, 2))], name="by hand")
    with pytest.raises(IndexError, match="'by hand'"):
        made_by_hand[2]
