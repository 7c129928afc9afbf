"""Test whether an optimizer class can run on several parameter servers.

Each server steps with a real instance of the class, over the parameters and shards that it holds. The result is
plain PyTorch's only if no parameter's update depends on parameters that are elsewhere. torch's own classes are known. Any
other class is tried here on a few small tensors: if one parameter's values and gradients change, no other
parameter may end up different.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem._ps.optimizer_settings import (
    can_send_state,
    constructor_arguments,
    own_attributes,
    plain_settings,
    sequences_as_tuples,
    settings_of,
    state_refusal,
)
from stratagem.errors import UnsupportedOptimizer

_GRADIENT_SCALES = (1e-3, 1.0, 1e4)
"""One step each: thresholds, such as that of a global norm, lie in between."""

_GROUPS = 2
_ROWS = 4


def check_construction(optimizer: Optimizer) -> None:
    """Raise `UnsupportedOptimizer` if servers cannot construct the class from its settings, or cannot send its state."""
    # Some classes treat vectors and matrices differently.
    by_dim = {
        (index, parameter.dim()): parameter
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    tried = [(index, nn.Parameter(_small(one))) for (index, _), one in by_dim.items()]
    made = _construct(optimizer, tried)
    for _, parameter in tried:
        parameter.grad = torch.ones_like(parameter)
    with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        made.step()  # one that needs more than a gradient fails; then training shows what is wrong
    for _, parameter in tried:
        for key, value in made.state.get(parameter, {}).items():
            if not can_send_state(value):
                raise state_refusal(_name(optimizer), key, value)


def _small(parameter: Tensor) -> Tensor:
    dtype = parameter.dtype if parameter.dtype.is_floating_point else torch.float32
    return torch.zeros([min(size, _ROWS) for size in parameter.shape], dtype=dtype)


def looks_across_parameters(optimizer: Optimizer) -> bool:
    """Return whether a parameter's update depends on other parameters.

    Example:
        >>> weights = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
        >>> looks_across_parameters(torch.optim.Adam(weights))
        False
    """
    examples = _examples(optimizer)
    given = [_numbers(example, seed) for seed, (_, example) in enumerate(examples)]
    groups = [group for group, _ in examples]
    plain = _run(optimizer, groups, given)
    for changed in range(len(given)):
        others = list(given)
        others[changed] = _numbers(examples[changed][1], seed=100 + changed)
        found = _run(optimizer, groups, others)
        for index, (one, other) in enumerate(zip(plain, found, strict=True)):
            if index != changed and not torch.allclose(
                one, other, rtol=0.0, atol=0.0, equal_nan=True
            ):
                return True
    return False


def looks_across_rows(optimizer: Optimizer) -> bool:
    """Return whether the update of a tensor's rows depends on its other rows.

    Example:
        >>> looks_across_rows(torch.optim.Adam([nn.Parameter(torch.ones(4, 2))]))
        False
    """
    for group, example in _examples(optimizer):
        if example.shape[:1] != (_ROWS,):
            continue
        whole = _numbers(example, seed=0)
        halves = [[each[half] for each in whole] for half in (slice(0, 2), slice(2, _ROWS))]
        (plain,) = _run(optimizer, [group], [whole])
        found = torch.cat(_run(optimizer, [group, group], halves))
        if not torch.allclose(plain, found, rtol=1e-3, atol=1e-6, equal_nan=True):
            return True
    return False


def _examples(optimizer: Optimizer) -> list[tuple[int, Tensor]]:
    """Return small tensors like the optimizer's parameters, with the numbers of their groups."""
    found: list[tuple[int, Tensor]] = []
    for index, group in enumerate(optimizer.param_groups[:_GROUPS]):
        by_dim = {parameter.dim(): parameter for parameter in group["params"]}
        found += [(index, _small(parameter)) for parameter in list(by_dim.values())[:2]]
    return found * 2 if len(found) == 1 else found


def _numbers(like: Tensor, seed: int) -> list[Tensor]:
    """Return a parameter's value and its gradient of every step."""
    random = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(like.shape, generator=random) * scale).to(like.dtype)
        for scale in (1.0, *_GRADIENT_SCALES)
    ]


def _run(
    optimizer: Optimizer, groups: Sequence[int], given: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the parameters after a few steps of a new instance."""
    parameters = [nn.Parameter(value.clone()) for value, *_ in given]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        made = _construct(optimizer, list(zip(groups, parameters, strict=True)))
        for step in range(len(_GRADIENT_SCALES)):
            for parameter, (_, *gradients) in zip(parameters, given, strict=True):
                parameter.grad = gradients[step].clone()
            try:
                made.step()
            except NotImplementedError:
                break
            except Exception as error:
                raise UnsupportedOptimizer(
                    f"{_name(optimizer)} could not be tried on a few small tensors: "
                    f"{type(error).__name__}: {error}. Several parameter servers need optimizers "
                    "that update each parameter by itself. Use one parameter server, or another "
                    "optimizer."
                ) from error
    return [parameter.detach() for parameter in parameters]


def _construct(optimizer: Optimizer, parameters: Sequence[tuple[int, nn.Parameter]]) -> Optimizer:
    """Return a new instance over the parameters, given with their groups, as servers construct it."""
    settings, attributes = settings_of(optimizer), plain_settings(own_attributes(optimizer))
    groups = [
        {
            "params": [parameter for group, parameter in parameters if group == index],
            **sequences_as_tuples(settings[index]),
        }
        for index in sorted({group for group, _ in parameters})
    ]
    kind = type(optimizer)
    try:
        made = kind(
            groups,
            **constructor_arguments(kind, {**attributes, **plain_settings(optimizer.defaults)}),
        )
    except Exception as error:
        raise UnsupportedOptimizer(
            f"parameter servers cannot construct {_name(optimizer)}: {type(error).__name__}: {error}. "
            "Servers call the class with the settings of its groups and with those of its attributes "
            "that are numbers, texts, truth values or tuples of numbers. Use an optimizer that needs "
            "nothing else, or another strategy."
        ) from error
    vars(made).update(sequences_as_tuples(attributes))
    return made


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__qualname__
