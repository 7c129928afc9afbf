"""Whole sessions against a parameter server, mostly valid, with one or two twisted facts: it never ends.

Random bytes are refused by the decoder. Here every message is well-formed and most of them fit together: variables are
created, an optimizer steps on them, its state is read and loaded, rows are scattered. A twist is a value of another
shape, dtype, number or sign in one place. The seed of a round is its number; a failure can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest
import torch
from hostile import KEY, LIMIT_S, Target
from hypothesis import settings
from orders import BOUNDED, amount
from torch import Tensor

from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.codec import Outgoing, dtype_name
from stratagem._wire.connecting import connect
from stratagem._wire.messages import TensorRef
from stratagem.errors import ConnectionLost

pytestmark = [pytest.mark.process, pytest.mark.scaled]

# Sessions of about twelve messages each: all of them in `make test-soak`, a part in `.ci/run` and `make test`.
ROUNDS = 100_000 if settings().max_examples > BOUNDED else amount(25_000)
LIMIT_BYTES = 1 << 26

SERVER = f"""
import logging, sys, torch
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.server.server_options import ServerOptions
from stratagem._wire.frames import Limits
from stratagem._wire.handshake import ClusterKey
torch.set_num_threads(1)
logging.disable(logging.CRITICAL)
options = ServerOptions(memory_limit_bytes={LIMIT_BYTES}, limits=Limits(frame_bytes=1 << 24))
server = ParameterServer("127.0.0.1:0", key=ClusterKey.from_text(sys.argv[1]), options=options)
print(server.address, flush=True)
server.serve()
"""

ADAM = ("step", "exp_avg", "exp_avg_sq")
OPTIMIZERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # settings, state
    "SGD": ({"momentum": 0.9}, ("momentum_buffer",)),
    "Adam": ({"amsgrad": True}, (*ADAM, "max_exp_avg_sq")),
    "AdamW": ({"weight_decay": 0.1}, ADAM),
    "Adagrad": ({"lr_decay": 0.1}, ("step", "sum")),
    "RMSprop": ({}, ("step", "square_avg")),
    "Adadelta": ({}, ("step", "square_avg", "acc_delta")),
    "Adamax": ({}, ("step", "exp_avg", "exp_inf")),
    "NAdam": ({}, (*ADAM, "mu_product")),
    "RAdam": ({}, ADAM),
    "Rprop": ({}, ("step", "prev", "step_size")),
    "ASGD": ({}, ("step", "eta", "mu", "ax")),
    "SparseAdam": ({}, ADAM),
    "Adafactor": ({}, ("step", "row_var", "col_var", "variance")),
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
SHAPES = [(), (1,), (7,), (5, 3), (33, 16), (3, 2, 4), (0, 4)]
LARGE = (70_000, 4)  # stepped in chunks
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int8, torch.complex64]
FREQUENT = [torch.float32] * 12 + DTYPES
NUMBERS = [0, 1, -1, 2, 2**31, 2**63 - 1, -(2**63), 2**40]
T = TypeVar("T")


def _extreme(dtype: torch.dtype) -> messages.InitOp:
    """Return zeros; for integers, their smallest number."""
    is_integer = dtype in (torch.int8, torch.int32)
    return messages.InitOp("fill", (float(torch.iinfo(dtype).min) if is_integer else 0.0,))


class TwistedSession:
    """The messages of one session; `twist` changes some of the facts in them."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)
        self._generator = torch.Generator().manual_seed(number)
        self._twists = self._random.choice([0, 1, 1, 2])
        self._shapes = [self._random.choice(SHAPES) for _ in range(3)]
        if self._random.random() < 0.01:
            self._shapes[1] = LARGE
        self._dtypes = [self._random.choice(FREQUENT) for _ in range(3)]
        self._optimizer = self._random.choice([*OPTIMIZERS, *FUSED, *FUSED])
        self._sequence = 0

    def twist(self, valid: T, *others: T, chance: float = 0.04) -> T:
        """Return the valid value; or, as long as twists are left, sometimes another one."""
        if self._twists and self._random.random() < chance:
            self._twists -= 1
            return self._random.choice(others)
        return valid

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, chance: float = 0.04) -> Tensor:
        shape = self.twist(shape, *SHAPES, shape[:-1], (*shape, 1), chance=chance)
        dtype = self.twist(dtype, *DTYPES, torch.int64, torch.bool)
        is_integer = dtype in (torch.int8, torch.int32)
        if self._random.random() < (0.5 if is_integer else 0.05):
            low = torch.iinfo(dtype).min if is_integer else -1
            return torch.full(shape, self._random.choice([low, -1, 0]), dtype=torch.float64).to(
                dtype
            )
        return torch.randn(shape, generator=self._generator).to(dtype)

    def ref(self, outgoing: Outgoing, value: Tensor) -> TensorRef:
        ref = outgoing.add(value)
        ref = self.twist(ref, TensorRef(ref.dtype, ref.shape), TensorRef(ref.dtype, ref.shape, 9))
        other = dtype_name(self._random.choice(DTYPES))
        longer = tuple(2 * size + 1 for size in ref.shape)
        return self.twist(
            ref,
            TensorRef(other, ref.shape, ref.buffer),
            TensorRef(ref.dtype, longer, ref.buffer),
            TensorRef(ref.dtype, ref.shape, -1, 1, 4096),
        )

    def variable(self) -> int:
        return self.twist(self._random.randrange(3), 9, -1, 2**40)

    def ids(self, outgoing: Outgoing, rows: int, count: int) -> TensorRef:
        count = self.twist(count, 0, count + 1)
        ids = torch.randint(max(1, rows), (count,), generator=self._generator)
        if count:
            ids[0] = self.twist(int(ids[0]), *NUMBERS, rows)
        return self.ref(outgoing, ids)

    def facts(self, variable: int) -> tuple[tuple[int, ...], torch.dtype]:
        return self._shapes[variable % 3], self._dtypes[variable % 3]

    def create(self) -> Iterator[tuple[messages.Message, Outgoing]]:
        initial = [
            messages.InitOp("normal", (0.0, 1.0), 3),
            messages.InitOp("fill", (self.twist(2.0, float("nan"), 1e300),)),
            messages.InitOp("uniform", (0.0, self.twist(1.0, -1.0)), self.twist(1, *NUMBERS)),
            messages.InitOp("fill_row", (self.twist(0.0, 1e9, float("inf")), 1.0)),
        ]
        specs = tuple(
            messages.VariableSpec(
                number,
                "w",
                dtype_name(dtype),
                self.twist(shape, (2**40,), (-1,), (2**31, 2**31), (2**62, 0)),
                (_extreme(dtype), self.twist(messages.InitOp("scale", (1.0,)), *initial)),
            )
            for number, (shape, dtype) in enumerate(zip(self._shapes, self._dtypes, strict=True))
        )
        for spec in specs:
            yield messages.CreateVariables(variables=(spec,)), Outgoing()
        name = self._optimizer
        settings: dict[str, Any] = {"lr": self.twist(0.1, -1.0, float("nan"))}
        settings.update(OPTIMIZERS[name][0])
        kernel = self._random.choice(["foreach", "maximize", "capturable", ""])
        kernel = "fused" if name in FUSED and self._random.random() < 0.7 else kernel
        if kernel and name not in ("SparseAdam", "Adafactor"):
            settings[kernel] = True
        groups = (
            messages.GroupSpec((self.twist(0, 2, 9),), settings),
            messages.GroupSpec((1, self.twist(2, 1, 9)), {**settings, "lr": 0.2}),
        )
        class_name = f"torch.optim.{self.twist(name, 'Muon', 'LBFGS', 'Optimizer', 'no')}"
        yield (
            messages.CreateOptimizer(
                optimizer=1, class_name=class_name, groups=groups, defaults=settings
            ),
            Outgoing(),
        )

    def state(self) -> tuple[messages.Message, Outgoing]:
        outgoing = Outgoing()
        variable = self.variable()
        shape, dtype = self.facts(variable)
        items = []
        keys = OPTIMIZERS[self._optimizer][1]
        for key in self.twist(keys, keys[:-1], ("exp_avg",), ("momentum_buffer", "step")):
            if key in ("step", "eta", "mu", "mu_product"):
                value = self.tensor((), torch.float32)
            else:
                value = self.tensor(shape, dtype, chance=0.2)
            number: float = self.twist(2, -1, 2**62, 0.5)
            item = messages.StateItem(variable, key, tensor=self.ref(outgoing, value))
            items.append(self.twist(item, messages.StateItem(variable, key, value=number)))
        start = self.twist(-1, 0, 3, 2**62)
        return messages.WriteState(optimizer=1, items=tuple(items), start=start), outgoing

    def write(self) -> tuple[messages.Message, Outgoing]:
        outgoing = Outgoing()
        self._sequence += 1
        variable = self.variable()
        shape, dtype = self.facts(variable)
        rows = shape[0] if shape else 1
        kind = self._random.randrange(5)
        operation: messages.Operation
        if kind == 0:
            how = self._random.choice(["set", "add", "sub", "mul"])
            value = self.ref(outgoing, self.tensor(shape, dtype))
            operation = messages.Assign(variable, how, value)
        elif kind == 1:
            value = self.ref(outgoing, self.tensor((min(2, rows), *shape[1:]), dtype))
            operation = messages.AssignRows(variable, self.twist(0, *NUMBERS), value)
        elif kind == 2:
            how = self._random.choice(["add", "sub", "mul", "div", "div", "min", "max", "update"])
            count = self._random.randrange(1, 5)
            ids = self.ids(outgoing, rows, count)
            value = self.ref(outgoing, self.tensor((count, *shape[1:]), dtype))
            operation = messages.Scatter(variable, how, ids, value)
        else:
            gradients = []
            for one in self._random.sample(range(3), 2):
                shape, dtype = self.facts(one)
                rows = shape[0] if shape else 1
                if kind == 3 and shape:
                    count = min(rows, 4)
                    ids = self.ids(outgoing, rows, count)
                    value = self.ref(outgoing, self.tensor((count, *shape[1:]), dtype))
                    sparse = self._random.random() < 0.5
                    gradients.append(messages.GradientRef(one, value, ids, sparse))
                else:
                    value = self.ref(outgoing, self.tensor(shape, dtype))
                    gradients.append(messages.GradientRef(self.twist(one, 9), value))
            changed: dict[int, dict[str, Any]] = {0: {"lr": self.twist(0.5, -1.0)}}
            settings = self.twist({}, changed, {7: {"lr": 1.0}}, {0: {"betas": (1.0,)}})
            operation = messages.Push(self.twist(1, 2), tuple(gradients), settings)
        origin = messages.WriteId("fuzz", 1, self.twist(self._sequence, *NUMBERS[:3]))
        return messages.Write(
            origin=origin, operations=messages.encode_operations((operation,))
        ), outgoing

    def read(self) -> tuple[messages.Message, Outgoing]:
        outgoing = Outgoing()
        variable = self.variable()
        shape, _ = self.facts(variable)
        rows = shape[0] if shape else 1
        choice = self._random.randrange(4)
        if choice == 0:
            return messages.Read(items=(messages.ReadItem(variable),)), outgoing
        if choice == 1:
            item = messages.ReadItem(variable, self.twist(0, *NUMBERS), self.twist(rows, *NUMBERS))
            return messages.Read(items=(item,)), outgoing
        if choice == 2:
            ids = self.ids(outgoing, rows, 3)
            return messages.Read(items=(messages.ReadItem(variable, ids=ids),)), outgoing
        start, count = self.twist(0, *NUMBERS), self.twist(0, *NUMBERS)
        key = self._random.choice(["", "exp_avg"])
        return messages.ReadState(optimizer=1, key=key, start=start, count=count), outgoing

    def all(self, name: str) -> Iterator[tuple[messages.Message, Outgoing]]:
        yield messages.OpenSession(session=name, lease_s=60.0), Outgoing()
        yield from self.create()
        for _ in range(self._random.randrange(3, 9)):
            yield self._random.choice([self.state, self.write, self.write, self.read])()
        if self._random.random() < 0.2:
            yield messages.DeleteVariables(variables=(self.variable(),)), Outgoing()
            yield self.write()
        yield messages.CloseSession(session=name), Outgoing()


def attack(channel: Channel, number: int) -> tuple[int, int]:
    """Send one session; return how many of its messages were carried out, and refused."""
    calls = [
        channel.begin(message, outgoing.buffers, later=True)
        for message, outgoing in TwistedSession(number).all(f"fuzz {number}")
    ]
    done = refused = 0
    for call in calls:
        try:
            channel.collect(call, timeout_s=LIMIT_S)
            done += 1
        except ConnectionLost:
            raise
        except Exception:
            refused += 1
    return done, refused


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    target = Target(SERVER)
    try:
        yield target
    finally:
        target.close()


def test_sessions_with_twisted_facts_end_no_server(target: Target) -> None:
    """Server deaths: 0. Another session keeps its values, and all memory is returned."""
    who = Membership(session="honest", task="/job:chief/task:0", is_owner=True, key=KEY)
    w = ShardLocation(0, 1, (4,), torch.float32)
    with (
        PsClient([("/job:ps/task:0", target.address)], who) as honest,
        connect(target.address, key=KEY, timeout_s=LIMIT_S) as channel,
    ):
        honest.create(w, "w", value=torch.arange(4.0))
        channel.request(messages.Hello(task="fuzz"), timeout_s=LIMIT_S)
        done = refused = 0
        for number in range(ROUNDS):
            try:
                counts = attack(channel, number)
            except ConnectionLost as error:
                pytest.fail(f"round {number} ended its connection, server {target.exit()}: {error}")
            done, refused = done + counts[0], refused + counts[1]
        assert honest.read([w])[0][0].tolist() == [0.0, 1.0, 2.0, 3.0]
        facts = channel.request(messages.AskStats(), timeout_s=LIMIT_S).message
        assert isinstance(facts, messages.Stats)
        assert (facts.facts["sessions"], facts.facts["held_bytes"]) == (1, 128)
    target.check_unharmed()
    assert done > refused > ROUNDS // 2  # most messages were valid, and most twists were noticed
