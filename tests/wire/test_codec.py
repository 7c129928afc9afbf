"""Tensors and objects to bytes and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stratagem._wire import codec
from stratagem._wire.codec import (
    LocalBuffers,
    Outgoing,
    any_tensor_from,
    digest_of,
    pack,
    tensor_from,
    unpack_from,
)
from stratagem._wire.messages import Packed, SparseRef, TensorRef
from stratagem.errors import ProtocolError

DTYPES = [dtype for _, dtype in sorted(codec._DTYPES.items())]


def round_trip(tensor: Tensor) -> Tensor:
    outgoing = Outgoing()
    ref = outgoing.add_any(tensor)
    return any_tensor_from(ref, LocalBuffers(outgoing.buffers))


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return bytes(codec.bytes_of(one.contiguous())) == bytes(codec.bytes_of(other.contiguous()))


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch warns whenever one is made
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Scalars, empty tensors and all dtypes, bfloat16, bool and float8 included, bit for bit."""
    count = max(1, torch.Size(shape).numel()) * dtype.itemsize
    raw = (torch.arange(count) % (2 if dtype is torch.bool else 256)).to(torch.uint8)
    tensor = raw.view(dtype)[: torch.Size(shape).numel()].reshape(shape)
    back = round_trip(tensor)
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert same_bytes(back, tensor)


def test_there_are_as_many_dtypes_as_torch_has() -> None:
    """The list of dtypes tested is not empty by mistake, and holds the usual ones."""
    assert len(DTYPES) >= 20
    assert {torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.complex64} <= set(DTYPES)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1:],
        lambda t: t.expand(5, 3, 4),
        lambda t: t[:, 0],
    ],
)
def test_views_that_are_not_contiguous_come_back_as_values(
    change: Callable[[Tensor], Tensor],
) -> None:
    """What travels is the value seen, not the memory behind it."""
    view = change(torch.arange(12.0).reshape(3, 4))
    assert torch.equal(round_trip(view), view)


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_one_element_with_any_stride_comes_back(shape: tuple[int, ...]) -> None:
    """torch calls it contiguous; ``torch.distributions.Normal(0, sigma)`` keeps such a mean."""
    view = torch.tensor(3.0).expand(shape)
    assert torch.equal(round_trip(view), view)
    assert torch.equal(
        round_trip(torch.arange(8.0)[5:6].as_strided((1,), (7,))), torch.tensor([5.0])
    )


def test_conjugate_views_come_back_as_values() -> None:
    """A lazily conjugated tensor has other bytes than its values."""
    view = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(round_trip(view), view.resolve_conj())


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_tensors_travel_as_indices_and_values(coalesced: bool) -> None:
    """Indices and values, not the dense size."""
    sparse = torch.sparse_coo_tensor([[5, 1, 5]], torch.ones(3, 2), (100_000, 2))
    sparse = sparse.coalesce() if coalesced else sparse
    outgoing = Outgoing()
    ref = outgoing.add_any(sparse)
    assert isinstance(ref, SparseRef)
    assert sum(len(memoryview(buffer)) for buffer in outgoing.buffers) < 200
    back = any_tensor_from(ref, LocalBuffers(outgoing.buffers))
    assert back.is_coalesced() == coalesced
    assert torch.equal(back.to_dense(), sparse.to_dense())


def test_sparse_indices_out_of_range_are_refused() -> None:
    """A hostile peer must not make us write outside a tensor later."""
    outgoing = Outgoing()
    ref = SparseRef((2,), outgoing.add(torch.tensor([[7]])), outgoing.add(torch.ones(1)))
    with pytest.raises(RuntimeError):
        any_tensor_from(ref, LocalBuffers(outgoing.buffers))


@pytest.mark.parametrize(
    "ref",
    [
        TensorRef("float32", (3,), 0),
        TensorRef("float32", (-2, -1), 0),
        TensorRef("float32", (2**62, 4), 0),
        TensorRef("no_such_dtype", (2,), 0),
        TensorRef("float32", (2,), 5),
    ],
    ids=str,
)
def test_references_that_do_not_fit_their_buffer_are_refused(ref: TensorRef) -> None:
    """Size, dtype, shape and buffer number are all checked before memory is looked at."""
    outgoing = Outgoing()
    outgoing.add(torch.ones(2))
    with pytest.raises((ProtocolError, IndexError)):
        tensor_from(ref, LocalBuffers(outgoing.buffers))


def test_other_layouts_are_refused_with_a_way_out() -> None:
    """The error says what to do."""
    with pytest.raises(ValueError, match="to_dense"):
        Outgoing().add_any(torch.eye(3).to_sparse_csr())


# Objects.


def trip(obj: object, **hooks: Callable[[object], object]) -> object:
    outgoing = Outgoing()
    describe, rebuild = hooks.get("describe"), hooks.get("rebuild")
    packed = pack(obj, outgoing, describe=describe)
    return unpack_from(packed, outgoing.buffers, rebuild=rebuild)


def test_tensors_inside_objects_are_buffers_not_pickle() -> None:
    """The pickle stays small however large the tensors and arrays are."""
    outgoing = Outgoing()
    packed = pack({"t": torch.ones(100_000), "a": np.ones(100_000)}, outgoing)
    assert len(packed.payload) < 1000
    assert len(outgoing.buffers) == 2
    back = unpack_from(packed, outgoing.buffers)
    assert torch.equal(back["t"], torch.ones(100_000))
    assert np.array_equal(back["a"], np.ones(100_000))
    back["a"][0] = 5.0  # received arrays can be written to


def test_tensor_kind_and_identity_survive() -> None:
    """Parameters stay parameters, gradients flags stay, one object stays one object."""
    parameter, plain = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    back = trip([parameter, plain, parameter, torch.zeros(1)])
    assert isinstance(back, list)
    assert isinstance(back[0], nn.Parameter)
    assert back[0] is back[2]
    assert back[1].requires_grad
    assert type(back[1]) is Tensor
    assert not back[3].requires_grad


def test_functions_of_main_lambdas_and_closures_travel_by_value() -> None:
    """13.4: any callable is schedulable."""
    offset = torch.tensor(3.0)

    def add(value: Tensor) -> Tensor:
        return value + offset

    back = trip((add, lambda x: x * 2))
    assert isinstance(back, tuple)
    assert back[0](torch.tensor(1.0)) == 4.0
    assert back[1](21) == 42


class Special:
    """Stands for a strategy or variable."""


def test_special_objects_arrive_as_the_receivers_own() -> None:
    """Inside closures, arguments and containers; the same token gives the same object."""
    mine, yours = Special(), Special()

    def uses() -> Special:
        return mine

    back = trip(
        [uses, mine, {"k": mine}],
        describe=lambda obj: "token" if obj is mine else None,
        rebuild=lambda token: yours if token == "token" else None,
    )
    assert isinstance(back, list)
    assert back[0]() is yours
    assert back[1] is yours
    assert back[2]["k"] is yours


def test_a_described_tensor_is_a_handle_not_a_copy() -> None:
    """Parameters of a strategy are asked for before they are taken for plain tensors."""
    parameter, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    back = trip(
        parameter,
        describe=lambda obj: 1 if obj is parameter else None,
        rebuild=lambda token: other if token == 1 else None,
    )
    assert back is other


def test_a_handle_where_none_is_expected_is_an_error() -> None:
    """Not None, not a string: an error that shows the token."""
    special = Special()
    outgoing = Outgoing()
    packed = pack(special, outgoing, describe=lambda o: "tok" if o is special else None)
    with pytest.raises(ProtocolError, match="'tok'"):
        unpack_from(packed, outgoing.buffers)


def test_digest_depends_on_code_and_tensors() -> None:
    """Same function, same digest; another captured tensor, another digest."""

    def digest(value: float) -> bytes:
        tensor = torch.full((1000,), value)
        outgoing = Outgoing()
        packed: Packed = pack(lambda: tensor, outgoing)
        return digest_of(packed, outgoing.buffers)

    assert digest(1.0) == digest(1.0)
    assert digest(1.0) != digest(2.0)


SCRIPT = """
FACTOR = 3.0

def inner(x):
    return x.sin() * FACTOR

def outer(x, inner):
    return inner(x) + FACTOR

def named():
    return __name__

def defines():
    class Local:
        pass
    return Local
"""


def test_functions_that_travelled_are_compiled_with_their_own_globals() -> None:
    """The receiver's ``__main__`` is another module: `torch.compile` must not look there (issue 20)."""
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, script)
    inner, outer = trip(script["inner"]), trip(script["outer"])
    assert inner.__globals__ is not outer.__globals__
    x = torch.arange(4.0)
    try:
        torch.testing.assert_close(
            torch.compile(outer, backend="eager")(x, inner), x.sin() * 3.0 + 3.0
        )
    finally:
        torch._dynamo.reset()
    assert trip(script["named"])() == "__main__"
    assert trip(script["defines"])().__module__ == "__main__"
