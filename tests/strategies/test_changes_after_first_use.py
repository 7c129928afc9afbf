"""What changes on the coordinator after a module's or optimizer's first use reaches the workers (issue 4 §3).

Attributes, hooks and parts: functions scheduled afterwards see them, functions scheduled before do not,
and a worker that comes later sees what there is now.
"""

from __future__ import annotations

import copy
import threading
import types
from collections import OrderedDict
from typing import Any

import pytest
import torch
from scheduling import WAIT_S, run
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import stratagem as sg
from stratagem._ps.coordinator import change_tracking

pytestmark = pytest.mark.process


class Scaled(nn.Module):
    """Multiplies by whatever its attributes are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.drop = nn.Dropout(0.5)
        self.temperature = 1.0
        self.factors = [1.0]
        self.config = types.SimpleNamespace(shift=0.0, more={"shift": 0.0})
        self.offset = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.weight * self.temperature + self.offset
        for factor in self.factors:
            scaled = scaled * factor
        return scaled + self.config.shift + self.config.more["shift"]


# ------------------------------------------------------------------ attributes


def test_attributes_changed_added_and_deleted_later_arrive(
    coordinator: sg.ClusterCoordinator,
) -> None:
    with coordinator.strategy.scope():
        model = Scaled()

    def apply() -> float:
        return float(model(torch.ones(2))[0])

    def added() -> Any:
        return getattr(model, "added", "none")

    assert run(coordinator, apply) == 1.0
    model.temperature = 2.0
    assert run(coordinator, apply) == 2.0
    assert run(coordinator, added) == "none"
    model.added = (1, "one")
    assert run(coordinator, added) == (1, "one")
    del model.added
    assert run(coordinator, added) == "none"
    model.forward = types.MethodType(lambda self, x: x * self.weight * 7, model)
    assert run(coordinator, apply) == 7.0
    del model.forward
    assert run(coordinator, apply) == 2.0


def test_members_are_not_compared_at_each_schedule_however_many_they_are(
    coordinator: sg.ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinator.strategy.scope():
        model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(200)])
        model.parts = nn.ModuleList([nn.Identity() for _ in range(200)])
    compared: list[object] = []
    digest = change_tracking.digest
    monkeypatch.setattr(
        change_tracking, "digest", lambda *given: (compared.append(given), digest(*given))[1]
    )

    def apply() -> tuple[float, int]:
        return sum(float(one) for one in model), len(model.parts)

    assert run(coordinator, apply) == (200.0, 200)
    assert run(coordinator, apply) == (200.0, 200)
    assert not compared
    model.parts.append(nn.Identity())
    assert run(coordinator, apply) == (200.0, 201)


def test_a_class_is_compared_in_full_once_after_python_adds_a_name_to_it(
    coordinator: sg.ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``copyreg`` notes slots in a class when it pickles an object: no change, but the quick check fails (issue 18)."""
    with coordinator.strategy.scope():
        model = type("Own", (Scaled,), {"__module__": __name__})()
    compared: list[Any] = []

    plain = change_tracking.Fingerprint.__init__

    def counting(self: Any, root: Any, *given: Any, **settings: Any) -> None:
        if isinstance(root, tuple) and type(model) in root:
            compared.append(root)
        plain(self, root, *given, **settings)

    def apply() -> float:
        return float(model(torch.ones(2))[0])

    assert run(coordinator, apply) == 1.0
    monkeypatch.setattr(change_tracking.Fingerprint, "__init__", counting)
    type(model).__slotnames__ = []
    for _ in range(3):
        assert run(coordinator, apply) == 1.0
    assert len(compared) == 1


def test_settings_of_torchs_own_layers_arrive(alone: sg.ClusterCoordinator) -> None:
    with alone.strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        table = nn.Embedding(4, 2)

    def look() -> tuple[Any, ...]:
        return model[1].momentum, model[1].eps, model[2].p, table.padding_idx, model[2].training

    assert run(alone, look) == (0.1, 1e-5, 0.5, None, True)
    model[1].momentum, model[1].eps, model[2].p, table.padding_idx = None, 0.25, 0.125, 1
    model[2].eval()
    assert run(alone, look) == (None, 0.25, 0.125, 1, False)
    model.train()
    assert run(alone, look) == (None, 0.25, 0.125, 1, True)


def test_an_attribute_changed_in_place_arrives(coordinator: sg.ClusterCoordinator) -> None:
    """A list, an object, a dict inside it, a tensor that is no buffer: nobody assigned to them."""
    with coordinator.strategy.scope():
        model = Scaled()

    def apply() -> float:
        return float(model(torch.ones(2))[0])

    assert run(coordinator, apply) == 1.0
    model.factors.append(3.0)
    assert run(coordinator, apply) == 3.0
    model.config.shift = 10.0
    assert run(coordinator, apply) == 13.0
    model.config.more["shift"] = 100.0
    assert run(coordinator, apply) == 113.0
    model.offset.fill_(1.0)
    assert run(coordinator, apply) == 116.0
    model.factors[0] = 2.0
    assert run(coordinator, apply) == 122.0


def test_a_large_attribute_arrives_when_it_is_assigned(alone: sg.ClusterCoordinator) -> None:
    """Too many values to compare at each `schedule`: assigning it again is what tells."""
    with alone.strategy.scope():
        model = Scaled()
        model.names = {f"name {n}": n for n in range(1000)}

    def look() -> int:
        return int(model.names["name 7"])

    assert run(alone, look) == 7
    model.names["name 7"] = -7
    model.names = model.names
    assert run(alone, look) == -7


def test_functions_scheduled_before_a_change_see_the_old_value(
    alone: sg.ClusterCoordinator,
) -> None:
    """As with learning rates: what counts is the moment of `schedule`."""
    with alone.strategy.scope():
        model = Scaled()

    def look() -> tuple[float, list[float], int]:
        return model.temperature, list(model.factors), len(model._forward_hooks)

    seen = []
    for step in range(5):
        model.temperature = float(step)
        model.factors.append(float(step))
        model.register_forward_hook(lambda module, args, result: None)
        seen.append(alone.schedule(look))
    alone.join(timeout_s=WAIT_S)
    expected = [
        (float(step), [1.0, *(float(n) for n in range(step + 1))], step + 1) for step in range(5)
    ]
    assert [value.get(timeout_s=WAIT_S) for value in seen] == expected


def test_a_number_changed_at_every_step_is_all_that_is_sent(alone: sg.ClusterCoordinator) -> None:
    """An annealed temperature; the module is not described again each time."""
    with alone.strategy.scope():
        model = Scaled()

    def look() -> float:
        return float(model.temperature)

    run(alone, look)
    views = alone.strategy._cluster_views()
    model.temperature = 0.5
    updates, outdated = views.changes()
    assert len(updates) == 1
    assert outdated == []
    assert run(alone, look) == 0.5


def test_an_object_that_cannot_be_sent_raises_until_it_is_removed(
    alone: sg.ClusterCoordinator,
) -> None:
    with alone.strategy.scope():
        model = Scaled()

    def look() -> float:
        return float(model.temperature)

    run(alone, look)
    model.lock = threading.Lock()
    model.temperature = 4.0
    for _ in range(2):
        with pytest.raises(TypeError, match="'lock' of Scaled, which was set after the first use"):
            alone.schedule(look)
    del model.lock
    assert run(alone, look) == 4.0


class Forgetful(nn.Module):
    """Keeps one of its attributes out of pickles."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.lock = threading.Lock()
        self.kept = 1

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}


def test_a_class_may_keep_an_attribute_out_of_pickles(alone: sg.ClusterCoordinator) -> None:
    with alone.strategy.scope():
        model = Forgetful()

    def look() -> tuple[int, bool]:
        return model.kept, hasattr(model, "lock")

    assert run(alone, look) == (1, False)
    model.lock = threading.Lock()
    model.kept = 2
    assert run(alone, look) == (2, False)


def test_attributes_set_on_a_worker_survive_updates(
    alone: sg.ClusterCoordinator,
) -> None:
    with alone.strategy.scope():
        model = Scaled()

    def count() -> tuple[int, float]:
        model.count = getattr(model, "count", 0) + 1
        return model.count, model.temperature

    assert run(alone, count) == (1, 1.0)
    model.temperature = 3.0
    assert run(alone, count) == (2, 3.0)


def test_a_layer_that_is_on_no_server_is_sent_when_it_is_written(
    alone: sg.ClusterCoordinator,
) -> None:
    """A frozen body made outside the scope travels by value, also later."""
    body = nn.Linear(1, 1, bias=False).requires_grad_(False)
    nn.init.ones_(body.weight)
    with alone.strategy.scope():
        head = nn.Linear(1, 1, bias=False)
        nn.init.ones_(head.weight)
    model = nn.Sequential(body, head)

    def apply() -> float:
        return float(model(torch.ones(1)))

    assert run(alone, apply) == 1.0
    nn.init.constant_(body.weight, 5.0)
    assert run(alone, apply) == 5.0
    assert run(alone, lambda: model[0].weight.requires_grad) is False
    body.requires_grad_()
    assert run(alone, lambda: model[0].weight.requires_grad) is True


# ------------------------------------------------------------------ hooks


def test_module_hooks_registered_later_run_until_removed(
    coordinator: sg.ClusterCoordinator,
) -> None:
    """Forward and backward, before and after, in the order they would run on one device."""
    strategy = coordinator.strategy
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)

    def apply() -> tuple[float, float]:
        x = torch.ones(1, 1, requires_grad=True)
        y = model(x)
        y.sum().backward()
        return y.item(), x.grad.item()

    handles = [model.register_forward_hook(lambda module, args, result: result * 2)]
    assert run(coordinator, apply) == (2.0, 2.0)  # there from the beginning
    handles.append(model.register_forward_pre_hook(lambda module, args: (args[0] + 3,)))
    assert run(coordinator, apply) == (8.0, 2.0)
    first = model.register_forward_hook(lambda module, args, result: result + 1, prepend=True)
    handles.append(first)
    assert run(coordinator, apply) == (10.0, 2.0)  # (4 + 1) * 2
    scaled = model.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 7,))
    assert run(coordinator, apply) == (10.0, 14.0)
    before = model.register_full_backward_pre_hook(lambda module, outer: (outer[0] * 10,))
    assert run(coordinator, apply) == (10.0, 140.0)
    for handle in (before, scaled, *handles):
        handle.remove()
    assert run(coordinator, apply) == (1.0, 1.0)


def test_hooks_with_keywords_and_those_always_called(alone: sg.ClusterCoordinator) -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor, *, plus: float = 0.0) -> Tensor:
            if plus < 0:
                raise ArithmeticError("no")
            return x * self.weight + plus

    with alone.strategy.scope():
        model = Adding()

    def apply(plus: float) -> Any:
        calls: list[int] = []
        model.calls = calls
        try:
            return float(model(torch.ones(1), plus=plus)), len(calls)
        except ArithmeticError:
            return "no", len(calls)

    assert run(alone, apply, 1.0) == (2.0, 0)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {"plus": kwargs["plus"] * 2}), with_kwargs=True
    )
    model.register_forward_hook(
        lambda module, args, result: module.calls.append(1), always_call=True
    )
    assert run(alone, apply, 1.0) == (3.0, 1)
    assert run(alone, apply, -1.0) == ("no", 1)


@pytest.mark.parametrize("emptied", ["cleared", "replaced"])
def test_hooks_taken_away_without_their_handles_go(
    alone: sg.ClusterCoordinator, emptied: str
) -> None:
    with alone.strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)

    def apply() -> float:
        return float(model(torch.ones(1)))

    run(alone, apply)
    model.register_forward_hook(lambda module, args, result: result * 2)
    assert run(alone, apply) == 2.0
    if emptied == "cleared":
        model._forward_hooks.clear()
    else:
        model._forward_hooks = OrderedDict()
    assert run(alone, apply) == 1.0
    model.register_forward_hook(lambda module, args, result: result * 3)
    assert run(alone, apply) == 3.0


def test_hooks_of_a_function_survive_updates_of_hooks(
    alone: sg.ClusterCoordinator,
) -> None:
    """torch numbers hooks in each process by itself: neither may be taken for the other."""
    with alone.strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
    there = model.register_forward_hook(lambda module, args, result: result + 1)

    def add_own() -> None:
        for _ in range(200):  # past every number the coordinator has given
            model.register_forward_hook(lambda module, args, result: None)
        model.register_forward_hook(lambda module, args, result: result * 10)

    def apply() -> tuple[float, int]:
        return float(model(torch.ones(1))), len(model._forward_hooks)

    run(alone, add_own)
    assert run(alone, apply) == (20.0, 202)
    later = [model.register_forward_hook(lambda module, args, result: result + 2) for _ in range(3)]
    assert run(alone, apply) == (80.0, 205)
    there.remove()
    assert run(alone, apply) == (70.0, 204)
    for handle in later:
        handle.remove()
    assert run(alone, apply) == (10.0, 201)


def test_step_hooks_registered_later_run_until_removed(
    coordinator: sg.ClusterCoordinator,
) -> None:
    strategy = coordinator.strategy
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        steps = sg.Variable(0.0)

    def one_step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    def step() -> None:
        strategy.run(one_step)

    def double(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)

    def count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        steps.assign_add(1.0)

    run(coordinator, step)
    assert model.weight.item() == -1.0
    optimizer.param_groups[0]["lr"] = 0.5
    doubled = optimizer.register_step_pre_hook(double)
    counted = optimizer.register_step_post_hook(count)
    run(coordinator, step)
    assert (model.weight.item(), float(steps)) == (-2.0, 1.0)
    doubled.remove()
    run(coordinator, step)
    assert (model.weight.item(), float(steps)) == (-2.5, 2.0)
    counted.remove()
    run(coordinator, step)
    assert (model.weight.item(), float(steps)) == (-3.0, 2.0)


# ------------------------------------------------------------------ parts


def layer(value: float) -> nn.Linear:
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, value)
    return made


class Plus(nn.Module):
    """Adds a number; has no parameters."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.number


def test_parts_inserted_appended_and_deleted_are_called_in_their_order(
    coordinator: sg.ClusterCoordinator,
) -> None:
    """`Sequential.insert` and ``_modules[...]`` write past torch's registration hooks."""
    scope = coordinator.strategy.scope
    with scope():
        model = nn.Sequential(layer(2.0), Plus(1.0))

    def apply() -> float:
        return float(model(torch.ones(1)))

    assert run(coordinator, apply) == 3.0
    with scope():
        model.insert(0, layer(3.0))
    assert run(coordinator, apply) == 7.0
    model.insert(1, Plus(10.0))
    assert run(coordinator, apply) == 27.0
    model.append(Plus(100.0))
    assert run(coordinator, apply) == 127.0
    del model[0]
    assert run(coordinator, apply) == 123.0  # (1 + 10) * 2 + 1 + 100
    model._modules["0"] = Plus(20.0)
    assert run(coordinator, apply) == 143.0
    model[0].number = 30.0  # a part that came later, without parameters
    assert run(coordinator, apply) == 163.0
    moved = model._modules.pop("1")  # the layer goes to the end
    model._modules["last"] = moved
    assert run(coordinator, apply) == 264.0  # (1 + 30 + 1 + 100) * 2
    again = model._modules.pop("0")  # the same under the same name, but behind the others
    model._modules["0"] = again
    assert run(coordinator, apply) == 234.0  # (1 + 1 + 100) * 2 + 30


def test_lists_and_dicts_of_modules_are_as_on_the_coordinator(
    alone: sg.ClusterCoordinator,
) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ModuleList([layer(1.0), Plus(1.0)])
            self.named = nn.ModuleDict({"a": Plus(1.0), "b": Plus(2.0)})
            self.head = layer(1.0)

        def forward(self, x: Tensor) -> Tensor:
            for part in (*self.rows, *self.named.values()):
                x = part(x)
            return self.head(x) if hasattr(self, "head") else x

    with alone.strategy.scope():
        model = Many()

    def apply() -> float:
        return float(model(torch.ones(1)))

    assert run(alone, apply) == 5.0
    model.rows.insert(1, Plus(10.0))
    assert run(alone, apply) == 15.0
    model.rows[2] = Plus(100.0)
    assert run(alone, apply) == 114.0
    model.rows.pop(1)
    assert run(alone, apply) == 104.0
    model.named.pop("a")
    assert run(alone, apply) == 103.0
    model.named.update({"c": Plus(1000.0)})
    assert run(alone, apply) == 1103.0
    model.named.clear()
    assert run(alone, apply) == 101.0
    with alone.strategy.scope():
        model.head = layer(2.0)
    assert run(alone, apply) == 202.0
    del model.head
    assert run(alone, apply) == 101.0


class Doubled(nn.Linear):
    """Another class for a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_parametrization_and_class_changes_reach_workers(
    coordinator: sg.ClusterCoordinator,
) -> None:
    """And trains: its weight is computed from parameters that were made then."""
    strategy = coordinator.strategy
    with strategy.scope():
        model = nn.Sequential(layer(3.0))

    def apply() -> float:
        return float(model(torch.ones(1)))

    assert run(coordinator, apply) == 3.0
    with strategy.scope():
        parametrizations.weight_norm(model[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def one_step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    assert run(coordinator, apply) == 3.0
    run(coordinator, lambda: strategy.run(one_step))
    assert run(coordinator, apply) == pytest.approx(2.0)
    with strategy.scope():
        parametrize.remove_parametrizations(model[0], "weight")
    assert run(coordinator, apply) == pytest.approx(2.0)
    model[0].__class__ = Doubled
    assert run(coordinator, apply) == pytest.approx(4.0)


# ------------------------------------------------------------------ buffers made by functions


class Counting(nn.Module):
    """Registers its buffer when it is first called."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.persistent = persistent

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(()), persistent=self.persistent)
        self.count += 1
        return x * self.weight


def test_a_buffer_first_registered_in_a_function_is_refused_each_time(
    coordinator: sg.ClusterCoordinator,
) -> None:
    """It would be missing here and another on every worker; made here first, it is shared."""
    with coordinator.strategy.scope():
        model = Counting(persistent=True)

    def apply() -> float:
        return float(model(torch.ones(1)))

    for _ in range(2):
        coordinator.schedule(apply)
        with pytest.raises(ValueError, match=r"buffer 'count' of Counting.*persistent=False"):
            coordinator.join(timeout_s=WAIT_S)
    model.register_buffer("count", torch.zeros(()))
    run(coordinator, apply)
    run(coordinator, apply)
    assert float(model.count) == 2.0


def test_a_buffer_outside_the_state_dict_first_registered_in_a_function_is_its_workers(
    coordinator: sg.ClusterCoordinator,
) -> None:
    with coordinator.strategy.scope():
        model = Counting(persistent=False)

    def apply() -> float:
        model(torch.ones(1))
        return float(model.count)

    assert [run(coordinator, apply) for _ in range(2)] == [1.0, 2.0]
    assert not hasattr(model, "count")


@pytest.mark.parametrize("made", ["new", "copied"])
def test_a_module_made_in_a_function_may_register_buffers(
    coordinator: sg.ClusterCoordinator, made: str
) -> None:
    """Made in it, or a copy of the coordinator's."""
    with coordinator.strategy.scope():
        model = nn.Sequential(Counting(persistent=True), nn.BatchNorm1d(1))

    def apply() -> float:
        own = Counting(persistent=True) if made == "new" else copy.deepcopy(model)[0]
        own(torch.ones(1))
        return float(own.count)

    assert run(coordinator, apply) == 1.0


# ------------------------------------------------------------------ lives that come later


def test_a_later_worker_sees_the_present_state(cluster: sg.LocalCluster) -> None:
    """FLT-2: attributes, hooks on modules and optimizers, parts and what changed of new ones."""
    strategy = sg.ParameterServerStrategy(cluster.resolver)
    with sg.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = nn.Sequential(layer(2.0), Plus(1.0))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        old = model.register_forward_hook(lambda module, args, result: result * 1000)

        def look() -> tuple[Any, ...]:
            hooks = len(optimizer._optimizer_step_pre_hooks)
            notes = getattr(model, "notes", None)
            return float(model(torch.ones(1))), model.training, notes, hooks

        assert run(coordinator, look) == (3000.0, True, None, 0)
        old.remove()
        model.register_forward_hook(lambda module, args, result: result * 10)
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
        optimizer.param_groups[0]["lr"] = 0.25
        model.notes = ["first"]
        model.insert(0, Plus(4.0))
        now = (110.0, True, ["first"], 1)
        assert run(coordinator, look) == now
        model[0].number, model[2].number = 5.0, 2.0  # plain numbers: told as updates alone
        model.notes.append("second")
        model.eval()
        now = (140.0, False, ["first", "second"], 1)
        assert run(coordinator, look) == now

        def step() -> None:
            optimizer.zero_grad()
            model[1](torch.ones(1)).sum().backward()
            optimizer.step()

        pid = cluster.pid("worker", 0)
        cluster.kill_worker(0)
        cluster.wait_restarted(0, pid)
        assert run(coordinator, look) == now
        run(coordinator, step)
        assert model[1].weight.item() == 1.75  # at the rate of now


def test_values_that_change_back_are_seen(alone: sg.ClusterCoordinator) -> None:
    """A learning rate, a parameter that is frozen and thawed, a mode: each returns to its first value."""
    with alone.strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def look() -> tuple[float, bool, bool]:
        return optimizer.param_groups[0]["lr"], model.weight.requires_grad, model.training

    for rate, is_on in ((0.1, True), (0.2, False), (0.1, True), (0.2, False)):
        optimizer.param_groups[0]["lr"] = rate
        model.weight.requires_grad_(is_on)
        model.train(is_on)
        assert run(alone, look) == (rate, is_on, is_on)
