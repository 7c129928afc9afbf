"""What one server holds: variables, scatter, initialisation, versions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from orders import orders, tries

from stratagem._ps.server.ledger import Admission
from stratagem._ps.server.store import VariableStore
from stratagem._ps.types import InitOp, WriteId
from stratagem.errors import NotFoundError


@pytest.fixture
def store():
    made = VariableStore()
    made.create(1, "w", (4, 2), torch.float32).copy_(torch.arange(8.0).reshape(4, 2))
    return made


def test_memory_comes_from_the_server():
    """The store writes into the memory `allocate` gave it."""
    given_out = []

    def allocate(number, shape, dtype, reserve):
        given_out.append(torch.zeros(shape, dtype=dtype))
        return given_out[-1]

    store = VariableStore(allocate)
    store.create(3, "v", (2,), torch.float64)
    store.assign(3, "add", torch.ones(2, dtype=torch.float64))
    assert given_out[0].tolist() == [1.0, 1.0]


def test_creating_twice_is_once_but_another_shape_is_refused(store):
    assert store.create(1, "w", (4, 2), torch.float32) is store.read(1)
    with pytest.raises(ValueError, match="exists as 'w'"):
        store.create(1, "w", (4, 3), torch.float32)


def test_unknown_names_are_not_found(store):
    for call in (
        lambda: store.read(9),
        lambda: store.push(9, []),
        lambda: store.assign(9, "set", torch.zeros(())),
    ):
        with pytest.raises(NotFoundError, match="9"):
            call()


def test_every_write_moves_the_version(store):
    assert store.version(1) == 0
    assert store.assign(1, "set", torch.zeros(4, 2)) == 1
    assert store.scatter(1, "add", torch.tensor([0]), torch.ones(1, 2)) == 2
    assert store.write_rows(1, 1, torch.ones(2, 2)) == 3
    assert store.initialise(1, [InitOp(name="zeros")]) == 4
    assert store.versions() == {1: 4}
    assert "1 variables (32 bytes)" in repr(store)


def test_wrong_shapes_are_refused_and_change_nothing(store):
    before = store.read(1).clone()
    with pytest.raises(ValueError, match="expected shape"):
        store.assign(1, "set", torch.zeros(5, 2))
    with pytest.raises(ValueError, match="do not fit"):
        store.write_rows(1, 3, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="unknown assignment"):
        store.assign(1, "pow", torch.zeros(4, 2))
    with pytest.raises(ValueError, match="row id 4"):
        store.scatter(1, "add", torch.tensor([4]), torch.ones(1, 2))
    with pytest.raises(ValueError, match="one axis of int64"):
        store.read_rows(1, torch.tensor([[0]]))
    with pytest.raises(ValueError, match="unknown scatter"):
        store.scatter(1, "xor", torch.tensor([0]), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"float64.*expected torch\.float32"):
        store.scatter(1, "add", torch.tensor([0]), torch.ones(1, 2, dtype=torch.float64))
    assert torch.equal(store.read(1), before)
    assert store.version(1) == 0


def test_rows_come_in_the_order_asked(store):
    """SHV-6, 13.1."""
    assert store.read_rows(1, torch.tensor([3, 0, 3])).tolist() == [[6, 7], [0, 1], [6, 7]]


NUMPY = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.divide.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
}


@tries(2000)
@given(
    st.sampled_from([*NUMPY, "update"]),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.5, 4, width=32)), max_size=12),
)
def test_scatter_agrees_with_one_row_after_another(operation, writes):
    """SHV-5: duplicates accumulate; the last update wins; empty is allowed."""
    start = torch.tensor([1.0, 2.0, 3.0, 4.0]).unsqueeze(1)
    store = VariableStore()
    store.create(1, "w", (4, 1), torch.float32).copy_(start)
    ids = torch.tensor([row for row, _ in writes], dtype=torch.int64)
    values = torch.tensor([value for _, value in writes], dtype=torch.float32).unsqueeze(1)
    store.scatter(1, operation, ids, values)
    expected = start.numpy().copy()
    for row, value in writes:
        if operation == "update":
            expected[row] = value
        else:
            NUMPY[operation](expected, [row], np.float32(value))
    np.testing.assert_allclose(store.read(1).numpy(), expected, rtol=1e-5)


class Plain:
    """What a store should hold, by plain arithmetic on lists."""

    def __init__(self):
        self.rows: dict[int, list[float]] = {}
        self.version: dict[int, int] = {}

    def wrote(self, variable, rows):
        self.rows[variable] = rows
        self.version[variable] += 1


@orders(3000, events=60)
def test_in_any_order_of_writes_values_and_versions_are_those_of_plain_arithmetic(events):
    """Creations, deletions, assignments, rows and scatters of several lives; each counts once.

    Versions count the writes that were admitted, one by one: staleness is measured by them.
    """
    store, plain = VariableStore(), Plain()
    lives, sent = [1, 1], [0, 0]
    last: WriteId | None = None
    while events.more:
        step = events.of(
            ["read", "assign", "scatter", "rows", "again", "fence", "create", "delete"]
        )
        variable, worker, value = events.below(3), events.below(2), float(events.below(8))
        if step == "create":
            if variable not in plain.rows:
                store.create(variable, f"v{variable}", (4, 1), torch.float64).zero_()
                plain.rows[variable], plain.version[variable] = [0.0] * 4, 0
        elif step == "delete":
            if variable in plain.rows:
                store.delete(variable)
                del plain.rows[variable], plain.version[variable]
        elif step == "fence":
            store.fence(f"w{worker}", lives[worker])
            lives[worker] += 1
            sent[worker] = 0
        elif step == "again" and last is not None:
            assert store.admit(last) is not Admission.APPLY
        elif step in ("assign", "scatter", "rows") and variable in plain.rows:
            sent[worker] += 1
            last = WriteId(worker=f"w{worker}", incarnation=lives[worker], sequence=sent[worker])
            assert store.admit(last) is Admission.APPLY
            rows = list(plain.rows[variable])
            if step == "assign":
                operation = events.of(["set", "add", "sub"])
                store.assign(variable, operation, torch.full((4, 1), value, dtype=torch.float64))
                sign = {"set": 0, "add": 1, "sub": -1}[operation]
                rows = [row + sign * value if sign else value for row in rows]
            elif step == "scatter":
                ids = [events.below(4) for _ in range(events.below(4))]
                values = torch.full((len(ids), 1), value, dtype=torch.float64)
                store.scatter(variable, "add", torch.tensor(ids, dtype=torch.int64), values)
                for row in ids:
                    rows[row] += value
            else:
                start = events.below(4)
                values = torch.full((4 - start, 1), value, dtype=torch.float64)
                store.write_rows(variable, start, values)
                rows[start:] = [value] * (4 - start)
            plain.wrote(variable, rows)
            assert store.read(variable).flatten().tolist() == rows
        assert store.versions() == plain.version
    for variable, rows in plain.rows.items():
        assert store.read(variable).flatten().tolist() == rows


def test_initialisation_repeats_with_its_seed_and_can_be_composed():
    def make(seed):
        store = VariableStore()
        store.create(1, "t", (1000, 4), torch.float32)
        store.initialise(
            1,
            [
                InitOp(name="normal", args=(0.0, 2.0), seed=seed),
                InitOp(name="scale", args=(0.5,)),
                InitOp(name="fill_row", args=(7, 0.0)),
            ],
        )
        return store.read(1)

    first = make(3)
    assert torch.equal(first, make(3))
    assert not torch.equal(first, make(4))
    assert first[7].tolist() == [0.0] * 4
    assert abs(float(first.std()) - 1.0) < 0.1


def test_other_initialisations_fill_what_they_say():
    store = VariableStore()
    store.create(1, "t", (200,), torch.float32)
    store.initialise(1, [InitOp(name="uniform", args=(2.0, 3.0), seed=1)])
    assert 2 <= float(store.read(1).min()) < float(store.read(1).max()) <= 3
    store.initialise(1, [InitOp(name="fill", args=(9.0,))])
    assert set(store.read(1).tolist()) == {9.0}
    with pytest.raises(ValueError, match="unknown initialisation 'xavier'"):
        store.initialise(1, [InitOp(name="xavier")])
