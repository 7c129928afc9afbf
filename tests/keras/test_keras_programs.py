"""Programs of Keras users give the numbers of plain Keras under every strategy."""

from __future__ import annotations

import importlib
import multiprocessing
from contextlib import nullcontext
from typing import Any

import keras
import keras_programs
import pytest
from keras_models import STRATEGIES, assert_close
from keras_programs import PROGRAMS

import stratagem as sg

# Keras makes it for the first PyDataset that threads read, and keeps it until the process ends.
importlib.import_module(
    "keras.src.trainers.data_adapters.py_dataset_adapter"
)._SEQUENCE_COUNTER = multiprocessing.Value("i", 0)

_plain: dict[str, Any] = {}


def plain(name: str, program: Any) -> Any:
    """Return the result of a program in plain Keras; it runs once for all strategies."""
    if name not in _plain:
        keras.utils.set_random_seed(7)
        _plain[name] = program(nullcontext)
    return _plain[name]


LONG = ("transformer", "distillation", "text classifier")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in PROGRAMS],
)
def test_a_program_gives_the_numbers_of_plain_keras(strategy: Any, name: str) -> None:
    expected = plain(name, PROGRAMS[name])
    keras.utils.set_random_seed(7)
    assert_close(PROGRAMS[name](strategy.scope), expected)


def test_dropout_with_a_seed_gives_the_numbers_of_plain_keras_without_replicas(
    cluster: Any,
) -> None:
    """One device, and a worker, draw the masks of plain Keras; replicas draw their own."""

    def program(scope: Any) -> Any:
        return keras_programs.convolutions(scope, rate=0.3)

    expected = plain("dropout", program)
    for made in (STRATEGIES["one device"](), sg.ParameterServerStrategy(cluster.resolver)):
        with made as strategy:
            keras.utils.set_random_seed(7)
            assert_close(program(strategy.scope), expected)
