"""Checks for your own models, and faults to inject into your own runs.

`assert_equivalent` trains a model with plain PyTorch and under a strategy, and compares the weights. If they
differ, the error names the step, the parameter and likely reasons. It uses only the public interface of strategies.

`inject` kills, stops or delays processes, or drops their connections, at named points (`POINTS`) or at random.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from stratagem import _faults, config
from stratagem._faults import POINTS, Fault, FiredFault

if TYPE_CHECKING:
    from stratagem._strategies.base import Strategy

__all__ = [
    "POINTS",
    "Equivalence",
    "Fault",
    "FiredFault",
    "Injection",
    "assert_equivalent",
    "inject",
]


class Injection:
    """The faults of one `inject` block, and what fired.

    Example:
        >>> import stratagem as sg
        >>> with sg.testing.inject() as faults:
        ...     faults.count()
        0
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last: list[FiredFault] | None = None

    @property
    def fired(self) -> list[FiredFault]:
        """Faults that happened so far, in all processes, in order."""
        return _faults.read_fired(self._directory) if self._last is None else self._last

    def count(self, point: str = "*", *, action: str = "*", task: str = "*") -> int:
        """Return how often faults fired; the arguments are patterns, such as ``"server.*"``."""
        return sum(
            fnmatch.fnmatchcase(one.point, point)
            and fnmatch.fnmatchcase(one.action, action)
            and fnmatch.fnmatchcase(one.task, task)
            for one in self.fired
        )

    def _end(self) -> None:
        self._last = self.fired


@contextmanager
def inject(*faults: Fault) -> Iterator[Injection]:
    """Inject faults into this process (as ``/job:chief/task:0``) and into tasks started in the block.

    Create the `LocalCluster` inside the block. Tasks that are threads of this process (``in_process=True``) count as
    part of this process: a fault that kills them kills it. A block inside another one replaces its faults until it ends.

    Args:
        faults: the faults; see `Fault`.

    Example:
        >>> import torch, stratagem as sg
        >>> slow = sg.testing.Fault(
        ...     point="worker.after_closure", action="delay", seconds=0.001, times=3
        ... )
        >>> with (
        ...     sg.testing.inject(slow) as faults,
        ...     sg.LocalCluster(workers=2, ps=1, in_process=True) as cluster,
        ... ):
        ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
        ...     with strategy.scope():
        ...         total = sg.Variable(torch.zeros(()))
        ...     with sg.ClusterCoordinator(strategy) as coordinator:
        ...         for _ in range(10):
        ...             _ = coordinator.schedule(lambda: total.assign_add(torch.ones(())) and None)
        ...         coordinator.join()
        ...         print(float(total), faults.count(action="delay"))
        10.0 3
    """
    with tempfile.TemporaryDirectory(prefix="stratagem-faults-") as name:
        directory = Path(name)
        _faults.write_faults(directory, faults)
        injection = Injection(directory)
        before = config.environment(_faults.VARIABLE)
        config.set_environment(_faults.VARIABLE, name)
        active = _faults.active
        _faults.activate(directory, "/job:chief/task:0")
        try:
            yield injection
        finally:
            _faults.active = active
            config.set_environment(_faults.VARIABLE, before)
            injection._end()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Result of `assert_equivalent` when both trainings agree.

    Example:
        >>> import stratagem as sg
        >>> sg.testing.Equivalence(steps=3, replicas=2, largest_difference=1e-8, parameter="weight")
        Equivalence(steps=3, replicas=2, largest_difference=1e-08, parameter='weight')
    """

    steps: int
    """Number of batches."""

    replicas: int
    """Number of replicas of the strategy."""

    largest_difference: float
    """Largest absolute difference of any value after any step."""

    parameter: str
    """Name of the parameter (or buffer) with the largest difference."""


def assert_equivalent(
    model_fn: Callable[[], nn.Module],
    optimizer_fn: Callable[[nn.Module], Any],
    step_fn: Callable[[nn.Module, Any, Any], Any],
    batches: Iterable[Any],
    strategy: Strategy,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    seed: int = 0,
    compare_buffers: bool | None = None,
) -> Equivalence:
    """Train with plain PyTorch and under ``strategy``; compare the weights after every step.

    Args:
        model_fn: builds the model.
        optimizer_fn: builds the optimizer (or a tuple of them) for a model.
        step_fn: one training step, ``step_fn(model, optimizer, batch)``, from ``zero_grad`` to
            ``step``. Under the strategy it runs in every replica.
        batches: global batches: tensors, or nests of tensors whose first dimension counts rows.
        strategy: the strategy to check.
        rtol: relative tolerance. The default allows for sums in another order.
        atol: absolute tolerance.
        seed: passed to ``torch.manual_seed`` before each model is built and each training starts.
        compare_buffers: whether to compare buffers (running statistics); by default only with one
            replica, because each replica computes statistics of its own rows.

    Raises:
        AssertionError: the weights differ. The message names the first step, the parameter, the largest
            difference and likely reasons.

    Example:
        >>> import torch, stratagem as sg
        >>> def step(model, optimizer, batch):
        ...     optimizer.zero_grad()
        ...     model(batch).square().mean().backward()
        ...     optimizer.step()
        >>> with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        ...     found = sg.testing.assert_equivalent(
        ...         lambda: torch.nn.Linear(3, 1),
        ...         lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        ...         step,
        ...         [torch.ones(5, 3), torch.ones(1, 3)],
        ...         strategy,
        ...     )
        >>> found.steps, found.largest_difference < 1e-6
        (2, True)
    """
    everything = list(batches)
    size = strategy.num_replicas_in_sync
    if compare_buffers is None:
        compare_buffers = size == 1
    plain = _TrainedModel(model_fn, optimizer_fn, seed)
    with strategy.scope():
        ours = _TrainedModel(model_fn, optimizer_fn, seed)
    if not plain.is_lazy():
        # Equal initial weights even if model_fn draws numbers that the seed does not control.
        ours.model.load_state_dict(plain.model.state_dict())

    def distributed(batch: Any) -> None:
        step_fn(ours.model, ours.optimizer, batch)

    torch.manual_seed(seed)
    with torch.random.fork_rng():
        history = list(_train_plainly(plain, step_fn, everything))
    torch.manual_seed(seed)
    largest, where = 0.0, ""
    for number, (batch, expected) in enumerate(zip(everything, history, strict=True)):
        strategy.run(distributed, args=(_cut(batch, size),))
        for name, wanted in expected.state.items():
            if not compare_buffers and name in expected.buffers:
                continue
            got = ours.model.state_dict()[name]
            difference = _difference(got, wanted)
            if difference > largest or not where:
                largest, where = difference, name
            if not torch.allclose(
                got.to(wanted.device), wanted, rtol=rtol, atol=atol, equal_nan=True
            ):
                raise AssertionError(
                    _difference_text(number, name, got, wanted, strategy)
                    + _advice(ours.model, expected, strategy)
                )
    return Equivalence(
        steps=len(everything), replicas=size, largest_difference=largest, parameter=where
    )


class _TrainedModel:
    """A model and its optimizer."""

    def __init__(
        self, model_fn: Callable[[], nn.Module], optimizer_fn: Callable[[nn.Module], Any], seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.model = model_fn()
        self.optimizer = optimizer_fn(self.model)

    def is_lazy(self) -> bool:
        return any(nn.parameter.is_lazy(each) for each in self.model.parameters())


@dataclasses.dataclass(frozen=True)
class _After:
    """State of plain training after one step."""

    state: dict[str, Tensor]
    buffers: frozenset[str]
    gradients: dict[str, Tensor]


def _train_plainly(
    training: _TrainedModel, step_fn: Callable[[nn.Module, Any, Any], Any], batches: list[Any]
) -> Iterator[_After]:
    for batch in batches:
        step_fn(training.model, training.optimizer, batch)
        yield _After(
            copy.deepcopy(training.model.state_dict()),
            frozenset(name for name, _ in training.model.named_buffers()),
            {
                name: each.grad.detach().clone()
                for name, each in training.model.named_parameters()
                if each.grad is not None and each.grad.layout is torch.strided
            },
        )


def _cut(batch: Any, size: int) -> Any:
    """Split a global batch into ``size`` parts: rows in order, sizes that differ by at most one."""
    from stratagem._core.torch_patches.private_api import pytree
    from stratagem._core.values import PerReplica

    if size == 1:
        return batch
    return pytree.tree_map(
        lambda leaf: (
            PerReplica(list(torch.tensor_split(leaf, size)))
            if isinstance(leaf, Tensor) and leaf.dim() > 0
            else leaf
        ),
        batch,
    )


def _difference(got: Tensor, wanted: Tensor) -> float:
    if got.numel() == 0:
        return 0.0
    return float(_apart(got, wanted).max())


def _apart(got: Tensor, wanted: Tensor) -> Tensor:
    wide = torch.complex128 if got.is_complex() else torch.float64
    return (got.to(wanted.device, wide) - wanted.to(wide)).abs().nan_to_num(torch.inf)


def _difference_text(
    number: int, name: str, got: Tensor, wanted: Tensor, strategy: Strategy
) -> str:
    apart = _apart(got, wanted)
    place = [int(i) for i in torch.unravel_index(apart.argmax(), apart.shape)]
    at = tuple(place)
    return (
        f"training under {strategy!r} differs from plain training at step {number} (counted from 0): "
        f"{name!r} differs by up to {_difference(got, wanted):.3g}, at {place}, where it is "
        f"{got[at].item():.6g} and plain training has {wanted[at].item():.6g}."
    )


def _advice(model: nn.Module, expected: _After, strategy: Strategy) -> str:
    """Return likely reasons, the most specific first."""
    size = strategy.num_replicas_in_sync
    hints = []
    ratio = _gradient_ratio(model, expected)
    if ratio is not None and size > 1 and abs(ratio * size - 1) < 0.05:
        hints.append(
            f"gradients are 1/{size} of plain training's: the loss seems to be a sum over rows "
            "(reduction='sum'), but the strategy averages over rows. Use a mean loss, or "
            'gradient_aggregation="sum".'
        )
    elif ratio is not None and size > 1 and abs(ratio / size - 1) < 0.05:
        hints.append(
            f"gradients are {size} times plain training's: gradient_aggregation="
            f"{strategy.gradient_aggregation!r} adds the replicas' gradients. With a mean loss use "
            '"mean", or divide the loss by the number of replicas.'
        )
    kinds = {
        type(each).__name__
        for each in model.modules()
        if isinstance(each, _BatchNorm) and not isinstance(each, torch.nn.SyncBatchNorm)
    }
    if kinds and size > 1:
        hints.append(
            f"{', '.join(sorted(kinds))} normalises with the statistics of each replica's own rows "
            "(see docs/same-numbers.md). nn.SyncBatchNorm uses those of the whole batch; GroupNorm and "
            "LayerNorm do not depend on other rows."
        )
    if size > 1 and any(
        isinstance(each, _DropoutNd) and each.p > 0 and each.training for each in model.modules()
    ):
        hints.append("dropout draws different numbers in each replica. Compare with p=0 or eval().")
    if not hints:
        hints.append(
            "does the loss couple rows of the batch (contrastive losses, batch statistics, weights "
            "normalised over the batch), or does the step draw random numbers? Then a split batch "
            "cannot give the same numbers. If the difference is tiny, raise rtol or atol."
        )
    return " Advice: " + " Also: ".join(hints)


def _gradient_ratio(model: nn.Module, expected: _After) -> float | None:
    """Return the ratio of our gradients' norm to plain training's, None without gradients."""
    ours = torch.tensor(0.0, dtype=torch.float64)
    plain = torch.tensor(0.0, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        wanted = expected.gradients.get(name)
        if parameter.grad is None or wanted is None or parameter.grad.layout is not torch.strided:
            continue
        ours += parameter.grad.detach().abs().to("cpu", torch.float64).square().sum()
        plain += wanted.abs().to("cpu", torch.float64).square().sum()
    if not (plain > 0 and ours > 0):
        return None
    return float((ours / plain).sqrt())
