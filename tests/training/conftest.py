"""Strategies for the training tests: each named kind once per test, closed afterwards."""

import pytest

import stratagem as sg

STRATEGIES = {
    "one": lambda **kw: sg.OneDeviceStrategy("cpu:0", **kw),
    "central2": lambda **kw: sg.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0", **kw),
    "central3": lambda **kw: sg.CentralStorageStrategy(["cpu:0", "cpu:1", "cpu:2"], **kw),
    "mirrored2": lambda **kw: sg.MirroredStrategy(["cpu:0", "cpu:1"], **kw),
}


@pytest.fixture(params=list(STRATEGIES))
def strategy(request):
    """Every single-machine strategy in turn."""
    with STRATEGIES[request.param]() as made:
        yield made


@pytest.fixture(
    params=[
        "central2",
        "mirrored2",
        *(pytest.param(k, marks=pytest.mark.soak) for k in ("one", "central3")),
    ]
)
def usual(request):
    """Central storage and mirrored in turn; for long lists of modules and optimizers. All strategies in the long run."""
    with STRATEGIES[request.param]() as made:
        yield made


@pytest.fixture(params=["central2", "central3", "mirrored2"])
def several(request):
    """Every strategy with more than one replica."""
    with STRATEGIES[request.param]() as made:
        yield made


@pytest.fixture
def two():
    """Central storage with two CPU replicas."""
    with STRATEGIES["central2"]() as made:
        yield made


@pytest.fixture
def make_strategy():
    """A function that makes a strategy of a named kind; all are closed at the end."""
    made = []

    def make(kind, **kw):
        made.append(STRATEGIES[kind](**kw))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(params=["central2", "mirrored2"])
def pair(request, make_strategy):
    """Each strategy with two replicas."""
    return make_strategy(request.param)
