"""``compile(jit_compile=True)``: Keras models that ``torch.compile`` compiles give the numbers of plain Keras."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import keras
import pytest
import torch
from keras_models import STRATEGIES, classifier, compare, dense, rows

import stratagem as sg

if importlib.util.find_spec("tqdm"):
    # torch.compile may show a progress bar, which maps a lock that stays until the process ends.
    importlib.import_module("tqdm").std.TqdmDefaultWriteLock.create_mp_lock()

pytestmark = [
    pytest.mark.soak,  # each compilation takes ten seconds and more
    # torch reads .grad of all tensors that it traces. The filter that it sets around this holds for one thread only.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

X, Y = rows()


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler that remembers nothing. Replicas that compile at once leave its progress bar's thread."""
    monkeypatch.setattr(torch.hub.tqdm, "monitor_interval", 0, raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that were compiled; they run as traced, which takes less time than to generate code."""
    found: list[Any] = []

    def collect(graph: Any, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=collect))
    return found


def one_batch(model: Any) -> Any:
    """Use 7 rows, which do not divide evenly."""
    return model.train_on_batch(X[:7], Y[:7])


def small(**settings: Any) -> Any:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile(optimizer="sgd", **classifier(), **settings)
    return model


def builds(build: Any) -> Any:
    """Return a function that builds the model of plain Keras first, which need not be compiled, then a compiled one."""
    compiled = iter((False, True))
    return lambda: build(jit_compile=next(compiled))


def shuffled(model: Any) -> Any:
    """Fit two epochs: compiling must not move the generator that shuffles the second one."""
    return model.fit(X[:14], Y[:14], batch_size=7, epochs=2, verbose=0).history


def test_each_replica_runs_compiled_code(graphs: list[Any]) -> None:
    compare(builds(small), shuffled, STRATEGIES["central"]())
    assert graphs


def test_workers_run_compiled_code(graphs: list[Any]) -> None:
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        compare(builds(small), one_batch, sg.ParameterServerStrategy(cluster.resolver))
    assert graphs


def epochs(model: Any) -> Any:
    """Fit with shuffling: compiling must not move the generator that shuffles."""
    data = {"batch_size": 16, "validation_data": (X, Y)}
    history = model.fit(X, Y, epochs=2, verbose=0, **data).history
    return [history, model.predict(X, verbose=0)]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_code_of_the_default_compiler_gives_the_numbers_of_plain_keras(kind: str) -> None:
    compare(builds(dense), epochs, STRATEGIES[kind]())


def test_code_of_the_default_compiler_gives_the_numbers_of_plain_keras_on_a_worker() -> None:
    with sg.LocalCluster(workers=1, ps=1) as cluster:
        compare(builds(dense), epochs, sg.ParameterServerStrategy(cluster.resolver))
