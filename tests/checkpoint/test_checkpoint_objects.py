"""What a checkpoint accepts, what comes back, and what is refused before anything is touched."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import CheckpointError, CheckpointMismatch, ContextError


def trained(
    kind: Any = torch.optim.Adam, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    optimizer.zero_grad()
    model(torch.randn(6, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def assert_equal(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
        assert got.dtype == expected.dtype
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_equal(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other)
    else:
        assert got == expected


class Keeper:
    """Any object with a state dict."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


STATES: dict[str, Any] = {
    "numbers": {"a": 1, "b": 2.5, "c": 3 + 4j, "d": True, "e": None, "f": 10**40},
    "text": ["x", b"y", "ä"],
    "containers": {
        "t": (1, (2, [3])),
        "s": {1, 2},
        "f": frozenset({3}),
        "o": OrderedDict(z=1, a=2),
    },
    "keys": {1: "one", "two": 2, (3, 4): 5, None: 6},
    "dollars": {"$tensor": 1, "$object": [torch.ones(2)]},
    "counter": {"c": Counter("abca")},
    "tensors": [torch.ones(2), {"in": (torch.zeros(3, dtype=torch.int8), 4)}],
    "arrays": {
        "f": np.arange(6.0).reshape(2, 3),
        "u": np.array([1, 2], np.uint8),
        "z": np.zeros(()),
    },
    "odd arrays": {"s": np.array(["ab", "c"]), "d": np.array(["2026-11-16"], "datetime64[D]")},
    "foreign order": {"b": np.array([1.5, 2.5], ">f4")},
    "numpy numbers": [np.float32(0.1), np.int64(3), {"b": np.bool_(True)}],
    "torch things": {"d": torch.float16, "v": torch.device("cpu"), "s": torch.Size([2, 3])},
    "sparse": {"t": torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,)).coalesce()},
    "same name twice": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "c": 1},
    "empty": {"d": {}, "l": [], "t": torch.empty(0, 3)},
    "bytes": bytearray(b"abc"),
}


@pytest.mark.parametrize("name", STATES)
def test_any_plain_state_comes_back_with_its_types(tmp_path: Path, name: str) -> None:
    saved = Keeper(STATES[name])
    sg.Checkpoint(keeper=saved).save(tmp_path / "one")
    restored = Keeper()
    sg.Checkpoint(keeper=restored).restore(tmp_path / "one")
    if name == "sparse":
        assert torch.equal(restored.state["t"].to_dense(), saved.state["t"].to_dense())
    else:
        assert_equal(restored.state, saved.state)


def test_a_model_an_optimizer_and_all_else_come_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    generator = torch.Generator().manual_seed(4)
    checkpoint = sg.Checkpoint(
        model=model,
        both={"optimizer": optimizer, "scheduler": [scheduler, scaler]},
        generator=generator,
        tensor=torch.arange(3),
        history=[1, {"loss": 0.5}],
        epoch=3,
    )
    checkpoint.save(tmp_path / "one", step=12)
    other, other_optimizer = trained()
    other_scheduler = torch.optim.lr_scheduler.ExponentialLR(other_optimizer, 0.5)
    other_scaler = torch.amp.GradScaler("cpu")
    other_generator = torch.Generator()
    tensor, history = torch.zeros(3, dtype=torch.int64), [0]
    objects = sg.Checkpoint(
        model=other,
        both={"optimizer": other_optimizer, "scheduler": [other_scheduler, other_scaler]},
        generator=other_generator,
        tensor=tensor,
        history=history,
        epoch=0,
    )
    restored = objects.restore(tmp_path / "one")
    assert (restored.step, restored.missing, restored.unexpected) == (12, (), ())
    assert_equal(other.state_dict(), model.state_dict())
    assert_equal(other_optimizer.state_dict(), optimizer.state_dict())
    assert_equal(other_scheduler.state_dict(), scheduler.state_dict())
    assert_equal(other_scaler.state_dict(), scaler.state_dict())
    assert torch.equal(other_generator.get_state(), generator.get_state())
    # In place, where that can be.
    assert tensor.tolist() == [0, 1, 2]
    assert history == [1, {"loss": 0.5}]
    assert objects["epoch"] == 3


def test_random_streams_go_on_where_they_were(tmp_path: Path) -> None:
    sg.Checkpoint().save(tmp_path / "one")

    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()]  # noqa: NPY002

    expected = draw()
    draw()
    sg.Checkpoint().restore(tmp_path / "one")
    assert draw() == expected
    sg.Checkpoint().restore(tmp_path / "one", random=False)
    assert draw() != expected


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        o, 3
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_needs_no_pickle(tmp_path: Path, name: str) -> None:
    _, optimizer = trained(torch.optim.SGD)
    scheduler = SCHEDULERS[name](optimizer)
    plateau = [0.5] if name == "ReduceLROnPlateau" else []
    optimizer.step()
    scheduler.step(*plateau)
    sg.Checkpoint(scheduler=scheduler, optimizer=optimizer).save(tmp_path / "one")
    _, other_optimizer = trained(torch.optim.SGD)
    other = SCHEDULERS[name](other_optimizer)
    sg.Checkpoint(scheduler=other, optimizer=other_optimizer).restore(tmp_path / "one")
    for _ in range(4):
        optimizer.step()
        scheduler.step(*plateau)
        other_optimizer.step()
        other.step(*plateau)
        assert [g["lr"] for g in other_optimizer.param_groups] == [
            g["lr"] for g in optimizer.param_groups
        ]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    model[1].weight = model[0].weight
    saved = sg.Checkpoint(model=model).save(tmp_path / "one")
    assert saved.manifest.tensors["model.1.weight"].same_as == "model.0.weight"
    assert len(saved.manifest.blocks) == 3
    other = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    other[1].weight = other[0].weight
    sg.Checkpoint(model=other).restore(tmp_path / "one")
    assert other[1].weight is other[0].weight
    assert torch.equal(other[1].weight, model[1].weight)


def test_layouts_of_memory_come_back(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    part = torch.arange(10)[::2]
    one = torch.tensor(3.0).expand(1)  # contiguous, with stride 0
    keeper = Keeper({"image": image, "part": part, "one": one})
    sg.Checkpoint(keeper=keeper).save(tmp_path / "one")
    other = Keeper()
    sg.Checkpoint(keeper=other).restore(tmp_path / "one")
    assert torch.equal(other.state["one"], one)
    assert other.state["image"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(other.state["image"], image)
    assert torch.equal(other.state["part"], part)


def test_complex_numbers_that_are_conjugated_lazily(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 1j])
    with sg.CheckpointManager(sg.Checkpoint(k=Keeper({"t": value.conj()})), tmp_path) as manager:
        manager.save(1, wait=True)
        manager.save(2).wait()
        for saved in manager.all():
            other = Keeper()
            sg.Checkpoint(k=other).restore(saved.path)
            assert torch.equal(other.state["t"], torch.tensor([1 - 2j, 3 + 1j]))


# ------------------------------------------------------------------ optimizers by name


def test_optimizer_state_finds_its_parameter_in_any_order(tmp_path: Path) -> None:
    model, optimizer = trained()
    sg.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "one")
    other, _ = trained()
    backwards = torch.optim.Adam(list(other.parameters())[::-1], lr=0.3)
    sg.Checkpoint(model=other, optimizer=backwards).restore(tmp_path / "one")
    for name, parameter in model.named_parameters():
        mine, theirs = optimizer.state[parameter], backwards.state[other.get_parameter(name)]
        assert_equal(dict(theirs), dict(mine))


def test_several_models_and_bare_parameters_under_one_optimizer(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        a, b, bare = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.randn(2))
        optimizer = torch.optim.Adagrad([*a.parameters(), *b.parameters(), bare])
        (a(torch.ones(1, 2)) + b(torch.ones(1, 2)) * bare).sum().backward()
        optimizer.step()
        return {"a": a, "b": b, "bare": bare, "optimizer": optimizer}

    saved, other = make(), make()
    sg.Checkpoint(**saved).save(tmp_path / "one")
    sg.Checkpoint(**other).restore(tmp_path / "one")
    names = sg.Checkpoint(**saved).save(tmp_path / "two").manifest.tensors
    assert "optimizer.state.a.weight.sum" in names
    assert "optimizer.state.parameter_0.sum" in names
    assert_equal(other["optimizer"].state_dict(), saved["optimizer"].state_dict())
    assert torch.equal(other["bare"], saved["bare"])


def test_an_optimizer_with_groups_and_without_steps(tmp_path: Path) -> None:
    def make(lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        groups = [
            {"params": [model.weight], "lr": lr},
            {"params": [model.bias], "weight_decay": lr},
        ]
        return model, torch.optim.SGD(groups, lr=lr)

    model, optimizer = make(0.5)
    sg.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "one")
    other, other_optimizer = make(0.1)
    sg.Checkpoint(model=other, optimizer=other_optimizer).restore(tmp_path / "one")
    assert_equal(other_optimizer.state_dict(), optimizer.state_dict())


# ------------------------------------------------------------------ strictness


def test_another_model_is_refused_with_a_list_and_nothing_is_touched(tmp_path: Path) -> None:
    model, optimizer = trained()
    sg.Checkpoint(model=model, optimizer=optimizer, extra=Keeper(1)).save(tmp_path / "one")
    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Linear(1, 1))
    other_optimizer = torch.optim.Adam(other.parameters())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    stream = torch.get_rng_state()
    with pytest.raises(CheckpointMismatch) as caught:
        sg.Checkpoint(model=other, optimizer=other_optimizer, more=3).restore(tmp_path / "one")
    error = caught.value
    assert "build the objects as saved, or use another" in str(error)
    assert error.missing == (
        "model.3.weight",
        "model.3.bias",
        "optimizer: parameter 3.bias",
        "optimizer: parameter 3.weight",
        "more",
    )
    assert error.unexpected == ("extra",)
    assert error.different == (
        "model.0.weight (shape (4, 3) in the checkpoint, (5, 3) here)",
        "model.0.bias (shape (4,) in the checkpoint, (5,) here)",
    )
    assert "model.3.weight" in str(error)
    assert_equal(dict(other.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), stream)


def test_optimizer_state_without_its_parameter_is_refused(tmp_path: Path) -> None:
    """TensorFlow drops it silently (tf-keras #838)."""
    model, optimizer = trained()
    sg.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "one")
    fewer = torch.optim.Adam(list(model.parameters())[:2])
    with pytest.raises(CheckpointMismatch, match=r"optimizer: state of 1\.bias") as caught:
        sg.Checkpoint(model=model, optimizer=fewer).restore(tmp_path / "one")
    assert len(caught.value.unexpected) == 4


def test_strict_false_restores_what_fits_and_says_what_did_not(tmp_path: Path) -> None:
    model, optimizer = trained()
    sg.Checkpoint(model=model, optimizer=optimizer, gone=1).save(tmp_path / "one")
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Linear(1, 1))
    other_optimizer = torch.optim.Adam(other.parameters())
    restored = sg.Checkpoint(model=other, optimizer=other_optimizer).restore(
        tmp_path / "one", strict=False
    )
    assert "model.3.weight" in restored.missing
    assert restored.unexpected == ("gone",)
    assert torch.equal(other[0].weight, model[0].weight)
    mine, theirs = optimizer.state[model[0].weight], other_optimizer.state[other[0].weight]
    assert_equal(dict(theirs), dict(mine))
    assert other[3].weight not in other_optimizer.state


def test_another_class_of_optimizer_or_type_of_numbers_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    sg.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "one")
    other, other_optimizer = trained(torch.optim.SGD)
    with pytest.raises(CheckpointMismatch, match=r"Adam in the checkpoint, .*SGD here"):
        sg.Checkpoint(model=other, optimizer=other_optimizer).restore(tmp_path / "one")
    other, other_optimizer = trained()
    other.bfloat16()
    objects = sg.Checkpoint(model=other, optimizer=other_optimizer)
    with pytest.raises(CheckpointMismatch, match=r"float32 in the checkpoint, bfloat16 here"):
        objects.restore(tmp_path / "one")
    objects.restore(tmp_path / "one", strict=False)
    assert torch.equal(other[0].weight, model[0].weight.bfloat16())


def test_a_model_in_the_place_of_plain_values_is_refused(tmp_path: Path) -> None:
    sg.Checkpoint(a=[1], b=nn.Linear(1, 1)).save(tmp_path / "one")
    with pytest.raises(CheckpointMismatch, match="plain values in the checkpoint, a module here"):
        sg.Checkpoint(a=nn.Linear(1, 1), b=nn.Linear(1, 1)).restore(tmp_path / "one")
    with pytest.raises(CheckpointMismatch, match="a module in the checkpoint, a optimizer here"):
        sg.Checkpoint(a=[1], b=trained()[1]).restore(tmp_path / "one")


@pytest.mark.parametrize("place", [None, {}, torch.zeros(3)])
def test_plain_values_in_the_place_of_an_optimizer_are_refused(tmp_path: Path, place: Any) -> None:
    """They would become its state dict, and the run would go on without the optimizer's state."""
    model, optimizer = trained()
    sg.Checkpoint(model=model, parts={"optimizer": optimizer, "n": 1}).save(tmp_path / "one")
    checkpoint = sg.Checkpoint(model=model, parts={"optimizer": place, "n": 2})
    with pytest.raises(
        CheckpointMismatch,
        match=r"parts\.optimizer \(a optimizer in the checkpoint, plain values here\)",
    ):
        checkpoint.restore(tmp_path / "one")
    assert checkpoint["parts"]["n"] == 2


# ------------------------------------------------------------------ refusals


def test_objects_without_a_state_are_refused_at_once() -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3])
    with pytest.raises(TypeError, match=r"data\.train has type DataLoader.*sg\.data\.as_dataset"):
        sg.Checkpoint(data={"train": loader})
    with pytest.raises(
        TypeError, match="thing has type object: expected something with state_dict"
    ):
        sg.Checkpoint(thing=object())
    with pytest.raises(TypeError, match="model has type type"):
        sg.Checkpoint(model=nn.Linear)
    with pytest.raises(TypeError, match=r"Linear without a name.*model=model"):
        sg.Checkpoint(nn.Linear(1, 1))


class Colour:
    """A class that only pickle can save."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_values_that_only_pickle_can_save_must_be_allowed(tmp_path: Path) -> None:
    keeper = Keeper({"deep": [1, {"colour": Colour("red")}]})
    with pytest.raises(
        CheckpointError, match=r"keeper\.deep\.1\.colour is a .*Colour.*allow_pickle"
    ):
        sg.Checkpoint(keeper=keeper).save(tmp_path / "one")
    assert not (tmp_path / "one").exists()
    sg.Checkpoint(keeper=keeper).save(tmp_path / "one", allow_pickle=True)
    keeper.state = None
    with pytest.raises(
        CheckpointError,
        match=r"coordinator\.pt holds values that only pickle can.*allow_pickle=True\. \(.*Colour",
    ) as caught:
        sg.Checkpoint(keeper=keeper).restore(tmp_path / "one")
    assert "\x1b" not in str(caught.value)  # torch's advice about torch.load, in bold
    assert "weights_only" not in str(caught.value)
    assert keeper.state is None
    sg.Checkpoint(keeper=keeper).restore(tmp_path / "one", allow_pickle=True)
    assert keeper.state["deep"][1]["colour"].name == "red"


def test_a_lazy_model_that_saw_no_batch_is_refused(tmp_path: Path) -> None:
    model = nn.LazyLinear(2)
    with pytest.raises(CheckpointError, match=r"model\.weight has no value yet"):
        sg.Checkpoint(model=model).save(tmp_path / "one")
    model(torch.ones(1, 3))
    sg.Checkpoint(model=model).save(tmp_path / "one")
    fresh = nn.LazyLinear(2)
    sg.Checkpoint(model=fresh).restore(tmp_path / "one")
    assert torch.equal(fresh.weight, model.weight)


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    checkpoint = sg.Checkpoint(epoch=1)
    checkpoint.save(tmp_path / "one")
    with pytest.raises(CheckpointError, match="one exists"):
        checkpoint.save(tmp_path / "one")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be created"):
        checkpoint.save(tmp_path / "file" / "below")
    for nothing in ("nowhere", "file"):
        with pytest.raises(CheckpointError, match=f"{nothing} is not a complete checkpoint"):
            checkpoint.restore(tmp_path / nothing)
    for no_path in (None, 3, b"one"):
        with pytest.raises(TypeError, match=r"path=.*: expected a path"):
            checkpoint.restore(no_path)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"path=.*: expected a path"):
            checkpoint.save(no_path)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="'other' is not part"):
        checkpoint["other"] = 1


# ------------------------------------------------------------------ strategies


@pytest.mark.parametrize(
    "make",
    [
        lambda: sg.OneDeviceStrategy("cpu:0"),
        lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
        lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    ],
    ids=["one", "central", "mirrored"],
)
def test_from_any_strategy_to_any_other(tmp_path: Path, make: Any) -> None:
    """A checkpoint does not depend on the strategy it was made under."""

    def objects(strategy: Any) -> dict[str, Any]:
        with strategy.scope():
            model = nn.Linear(2, 1)
            optimizer = torch.optim.Adam(model.parameters())
            count = sg.Variable(0.0, aggregation="SUM")
        return {"model": model, "optimizer": optimizer, "count": count}

    with make() as strategy:
        saved = objects(strategy)

        def step() -> None:
            saved["optimizer"].zero_grad()
            saved["model"](torch.ones(2, 2)).sum().backward()
            saved["optimizer"].step()
            saved["count"].assign_add(torch.tensor(1.0))

        strategy.run(step)
        sg.Checkpoint(**saved).save(tmp_path / "one")
        for another in (
            lambda: sg.OneDeviceStrategy("cpu:0"),
            lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1", "cpu:2"]),
            lambda: sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
        ):
            with another() as other_strategy:
                other = objects(other_strategy)
                sg.Checkpoint(**other).restore(tmp_path / "one")
                assert_equal(other["model"].state_dict(), saved["model"].state_dict())
                assert_equal(other["optimizer"].state_dict(), saved["optimizer"].state_dict())
                assert [float(v) for v in other["count"].values] == [
                    float(saved["count"].value())
                ] * len(other["count"].values)
    plain = nn.Linear(2, 1)
    sg.Checkpoint(model=plain).restore(tmp_path / "one", strict=False)
    assert torch.equal(plain.weight, saved["model"].weight)


@pytest.mark.parametrize(("aggregation", "total"), [("SUM", 6.0), ("MEAN", 2.0), ("NONE", None)])
def test_variables_with_a_value_per_replica(
    tmp_path: Path, aggregation: str, total: float | None
) -> None:
    def make(strategy: Any) -> Any:
        with strategy.scope():
            return sg.Variable(0.0, aggregation=aggregation, synchronization="ON_READ")

    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        variable = make(strategy)

        def write() -> None:
            variable.assign(1.0 + sg.get_replica_context().replica_id_in_sync_group)

        strategy.run(write)
        sg.Checkpoint(v=variable).save(tmp_path / "one")
        same = make(strategy)
        sg.Checkpoint(v=same).restore(tmp_path / "one")
        assert [float(each) for each in same.values] == [1.0, 2.0, 3.0]
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        fewer = make(strategy)
        if total is None:
            with pytest.raises(CheckpointMismatch, match="3 replicas' values"):
                sg.Checkpoint(v=fewer).restore(tmp_path / "one")
        else:
            sg.Checkpoint(v=fewer).restore(tmp_path / "one")
            assert float(fewer) == total


def test_saving_and_restoring_inside_a_replica_is_refused(tmp_path: Path) -> None:
    checkpoint = sg.Checkpoint(epoch=1)
    checkpoint.save(tmp_path / "one")
    with sg.OneDeviceStrategy("cpu:0") as strategy:
        with pytest.raises(ContextError, match="saved inside a replica"):
            strategy.run(lambda: checkpoint.save(tmp_path / "two"))
        with pytest.raises(ContextError, match="restored inside a replica"):
            strategy.run(lambda: checkpoint.restore(tmp_path / "one"))


def test_a_huge_plain_object_is_saved_but_not_listed_for_torch(tmp_path: Path) -> None:
    words = {f"word {n}": n for n in range(5000)}
    saved = sg.Checkpoint(words=words, epoch=1).save(tmp_path / "one")
    assert saved.bytes < 1_000_000
    words_again: dict[str, int] = {}
    sg.Checkpoint(words=words_again, epoch=0).restore(tmp_path / "one")
    assert words_again == words
