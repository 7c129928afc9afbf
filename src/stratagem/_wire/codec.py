"""Encode messages with tensors, and Python objects, and decode them.

All use of pickle is here. Tensors: `Outgoing.add` on the sending side, `tensor_from` on the receiving one; these
never pickle, and are all that parameter servers use. Objects (functions, arguments, results): `pack` and
`unpack`, for coordinators and workers only.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import cloudpickle
import torch
from torch import Tensor, nn
from typing_extensions import override

from stratagem._wire.data_values import as_data, find_global
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import AnyTensorRef, Packed, PackedTensor, SparseRef, TensorRef
from stratagem._wire.user_modules import (
    fill_module,
    find_by_name,
    importable_name,
    leave_unnamed,
    reduce_special,
    sendable_variables,
    variables_of,
)
from stratagem.errors import ProtocolError

INLINE_BYTES: Final = 512
"""Tensors up to this size inside packed objects stay in the pickle: a buffer costs more."""

PAYLOAD_BYTES: Final = 1 << 20
"""A pickle beyond this size is a buffer, too: messages are limited, and small."""

# Every dtype of this torch whose elements are whole bytes with a meaning of their own: not the
# quantised ones (they need a scale) and not the placeholders for parts of a byte.
_NO_PLAIN_DTYPE: Final = re.compile(r"q|bits|u?int[1-7]$")
# torch's own: on workers, `numpy` tells a parameter that code may write it.
_to_numpy: Final = torch.Tensor.numpy

_DTYPES: Final[dict[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and not _NO_PLAIN_DTYPE.match(str(dtype).removeprefix("torch."))
}
_NAMES: Final[dict[torch.dtype, str]] = {
    dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES.values()
}


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype on the wire.

    Example:
        >>> import torch
        >>> from stratagem._wire.codec import dtype_from, dtype_name
        >>> dtype_name(torch.bfloat16), dtype_from("float32")
        ('bfloat16', torch.float32)
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise ValueError(
            f"tensors of {dtype} cannot be sent: expected one of {', '.join(sorted(_DTYPES))}"
        )
    return name


def dtype_from(name: str) -> torch.dtype:
    """Return the dtype of this name; raise ProtocolError if there is none."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise ProtocolError(f"{name!r} is not a dtype this process knows")
    return dtype


class HasBuffers(Protocol):
    """Source of received buffers: a `messages.Frame`."""

    def buffer(self, index: int) -> memoryview:
        """Memory of one buffer."""


def is_channels_last(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is in the channels-last format, and in no other.

    Example:
        >>> images = torch.zeros(2, 3, 4, 4)
        >>> is_channels_last(images), is_channels_last(images.to(memory_format=torch.channels_last))
        (False, True)
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(tensor.dim()) if tensor.layout is torch.strided else None
    if wanted is None or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=wanted)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any dtype, without a copy."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    if tensor.is_complex() or tensor.is_neg():  # a view whose bytes are not its values
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element may have stride 0
    array: Any = _to_numpy(tensor.view(torch.uint8))
    return memoryview(array)


class Outgoing:
    """The buffers of a frame being built.

    Example:
        >>> import torch
        >>> from stratagem._wire.codec import Outgoing
        >>> outgoing = Outgoing()
        >>> outgoing.add(torch.ones(2, 3))
        TensorRef(dtype='float32', shape=(2, 3), buffer=0, segment=0, offset=0)
        >>> len(outgoing.buffers)
        1
    """

    __slots__ = ("buffers",)

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def add(self, tensor: Tensor) -> TensorRef:
        """Put a dense tensor beside the message. It must not change until it is sent."""
        if tensor.device.type != "cpu":
            tensor = tensor.detach().cpu()
        shape = tuple(tensor.shape)
        self.buffers.append(bytes_of(tensor.contiguous()))
        return TensorRef(dtype_name(tensor.dtype), shape, len(self.buffers) - 1)

    def add_any(self, tensor: Tensor) -> AnyTensorRef:
        """Put a dense or sparse tensor beside the message."""
        if tensor.layout == torch.strided:
            return self.add(tensor)
        if tensor.layout == torch.sparse_coo:
            tensor = tensor.detach()
            return SparseRef(
                tuple(tensor.shape),
                self.add(tensor._indices()),
                self.add(tensor._values()),
                tensor.is_coalesced(),
            )
        raise ValueError(
            f"a tensor with layout {tensor.layout} cannot be sent: expected torch.strided or "
            f"torch.sparse_coo. Convert it first, for instance with to_dense()"
        )

    def add_bytes(self, data: Buffer) -> int:
        """Put raw bytes beside the message; return their buffer number."""
        self.buffers.append(data)
        return len(self.buffers) - 1


def tensor_from(ref: TensorRef, frame: HasBuffers) -> Tensor:
    """Return the dense tensor a message refers to, over the received memory: no copy.

    Raises:
        ProtocolError: the reference does not fit its buffer.
    """
    return tensor_over(ref, frame.buffer(ref.buffer))


def tensor_over(ref: TensorRef, memory: memoryview) -> Tensor:
    """A tensor of the reference's dtype and shape over memory that must be exactly as large."""
    dtype = dtype_from(ref.dtype)
    shape = ref.shape
    if min(shape, default=0) < 0:
        raise ProtocolError(f"a tensor with shape {shape!r} is invalid: sizes are never negative")
    count = math.prod(shape)
    if count * dtype.itemsize != memory.nbytes:
        raise ProtocolError(
            f"a tensor of shape {shape!r} and {ref.dtype} needs {count * dtype.itemsize} bytes, its "
            f"buffer has {memory.nbytes}"
        )
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def any_tensor_from(ref: AnyTensorRef, frame: HasBuffers) -> Tensor:
    """Return the dense or sparse tensor a message refers to."""
    if isinstance(ref, TensorRef):
        return tensor_from(ref, frame)
    return torch.sparse_coo_tensor(
        tensor_from(ref.indices, frame),
        tensor_from(ref.values, frame),
        ref.shape,
        is_coalesced=ref.coalesced,
        check_invariants=True,
    )


# -- objects -----------------------------------------------------------------------------------

Describe = Callable[[object], object | None]
"""Returns the token of an object that must arrive as a handle, None for every other object."""

Rebuild = Callable[[Any], object]
"""Returns the receiver's own object for a token."""

_TENSOR = 0
_HANDLE = 1


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
    """Pickles everything by value or name, except tensors (buffers) and handles (tokens)."""

    def __init__(
        self,
        file: io.BytesIO,
        outgoing: Outgoing,
        describe: Describe | None,
        raw: list[int],
        states: dict[int, dict[str, Any]] | None = None,
        *,
        prefers_data: bool = False,
    ) -> None:
        def set_aside(buffer: pickle.PickleBuffer) -> bool:
            with buffer.raw() as memory:
                if memory.nbytes <= INLINE_BYTES:
                    return True  # stays in the pickle
            raw.append(outgoing.add_bytes(buffer.raw()))
            return False

        super().__init__(file, protocol=5, buffer_callback=set_aside)
        self._outgoing = outgoing
        self._describe = describe
        self._prefers_data = prefers_data
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # ids in _numbers stay valid while we hold the objects
        self.tensors: list[PackedTensor] = []
        self.classes: list[type] = []  # those that are packed by value
        # By id of a module: its variables that can be pickled; None: send all.
        self._states = states

    def reducer_override(self, obj: object) -> Any:
        if self._prefers_data and (data := as_data(obj)) is not None:
            return data
        name = importable_name(obj)
        if name is not None:
            return find_by_name, (name,)
        if type(obj) is types.ModuleType and obj.__name__ in _SENT_BY_VALUE:
            state = variables_of(obj) if self._states is None else self._sendable(obj)
            return types.ModuleType, (obj.__name__,), state, None, None, fill_module
        special = reduce_special(obj, self._describe, _SENT_BY_VALUE)
        if special is not None:
            return special
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and reduced is not NotImplemented:
            self.classes.append(obj)
        return reduced

    def _function_getnewargs(self, func: types.FunctionType) -> tuple[Any, ...]:
        code, names, *rest = super()._function_getnewargs(func)[:-1]
        leave_unnamed(names, code)
        # The cells themselves: functions that share a variable still share it on the worker.
        return code, names, *rest, func.__closure__

    def _sendable(self, module: types.ModuleType) -> dict[str, Any]:
        states = self._states
        assert states is not None

        def failure(value: object) -> Exception | None:
            try:
                _Pickler(io.BytesIO(), Outgoing(), self._describe, [], states).dump(value)
            except Exception as error:  # noqa: BLE001 - the user's own code
                return error
            return None

        if id(module) not in states:
            states[id(module)] = {}  # modules may refer to each other
            states[id(module)] = sendable_variables(module, failure)
        return states[id(module)]

    def persistent_id(self, obj: object) -> tuple[int, object] | str | None:
        kind = type(obj)
        if isinstance(obj, str):
            return obj if kind is str and obj.isidentifier() else None
        if kind is Tensor or kind is nn.Parameter:
            assert isinstance(obj, Tensor)
            if self._describe is not None and (token := self._describe(obj)) is not None:
                return _HANDLE, token
            return self._tensor(obj)
        if self._describe is not None and kind not in _PLAIN:
            token = self._describe(obj)
            if token is not None:
                return _HANDLE, token
        return None

    def _tensor(self, tensor: Tensor) -> tuple[int, object] | None:
        if tensor.layout not in (torch.strided, torch.sparse_coo) or tensor.device.type == "meta":
            return None  # torch's own way to pickle it
        number = self._numbers.get(id(tensor))
        if number is None:
            number = len(self.tensors)
            self._numbers[id(tensor)] = number
            self._kept.append(tensor)
            channels_last = is_channels_last(tensor)
            stored = tensor.detach().movedim(1, -1) if channels_last else tensor
            self.tensors.append(
                PackedTensor(
                    self._outgoing.add_any(stored),
                    tensor.requires_grad,
                    type(tensor) is nn.Parameter,
                    channels_last,
                )
            )
        return _TENSOR, number


_PLAIN: Final = frozenset({int, float, bool, bytes, type(None), tuple, list, dict, set, complex})


class _Unpickler(pickle.Unpickler):
    """Makes any object: runs code of the sender."""

    def __init__(
        self, data: Buffer, tensors: Sequence[Tensor], raw: Sequence[Any], rebuild: Rebuild | None
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=raw)
        self._tensors = tensors
        self._rebuild = rebuild

    @override
    def persistent_load(self, pid: tuple[int, Any] | str) -> object:
        if isinstance(pid, str):
            return sys.intern(pid)  # as in the sender's code: some programs compare it by `is`
        kind, value = pid
        if kind == _TENSOR:
            return self._tensors[value]
        if self._rebuild is None:
            raise ProtocolError(f"handle {value!r} arrived where no handles are expected")
        return self._rebuild(value)


class _DataUnpickler(_Unpickler):
    """Makes data only, see `data_values.py`."""

    @override
    def find_class(self, module: str, name: str) -> object:
        return find_global(module, name)


def pack(
    obj: object,
    outgoing: Outgoing,
    *,
    describe: Describe | None = None,
    classes: list[type] | None = None,
    prefers_data: bool = False,
) -> Packed:
    """Turn any object into a message part; its tensors become buffers of `outgoing`.

    Functions travel by value if their module cannot be imported elsewhere (``__main__``, lambdas). An object for which
    `describe` gives a token travels as that token. Classes that travel by value are added to `classes`.
    `prefers_data`: for a receiver that may not trust this process, see `unpack`.

    Example:
        >>> import torch
        >>> from stratagem._wire.codec import Outgoing, pack, unpack_from
        >>> outgoing = Outgoing()
        >>> packed = pack({"x": torch.arange(300), "f": lambda v: v + 1}, outgoing)
        >>> back = unpack_from(packed, outgoing.buffers)
        >>> back["f"](int(back["x"][41]))
        42
    """
    before = len(outgoing.buffers)
    try:
        file, raw = io.BytesIO(), list[int]()
        pickler = _Pickler(file, outgoing, describe, raw, prefers_data=prefers_data)
        pickler.dump(obj)
    except Exception:  # noqa: BLE001 - the user's own code; the second attempt raises it again
        # Variables of modules that cannot be pickled are left out: the function may not use them.
        del outgoing.buffers[before:]
        file, raw = io.BytesIO(), []
        pickler = _Pickler(file, outgoing, describe, raw, {}, prefers_data=prefers_data)
        pickler.dump(obj)
    if classes is not None:
        classes += pickler.classes
    payload, body = file.getvalue(), -1
    if len(payload) > PAYLOAD_BYTES:
        payload, body = b"", outgoing.add_bytes(payload)
    return Packed(payload=payload, tensors=tuple(pickler.tensors), raw=tuple(raw), body=body)


def unpack(
    packed: Packed, frame: HasBuffers, *, rebuild: Rebuild | None = None, trusted: bool = True
) -> Any:
    """Return the object. Runs code of the sender if the sender is `trusted`; else refuses all but data.

    Raises:
        UntrustedValueError: the sender is not trusted, and the value is not data.
    """
    tensors = [_revive(one, frame) for one in packed.tensors]
    raw = [frame.buffer(index) for index in packed.raw]
    payload = packed.payload if packed.body < 0 else frame.buffer(packed.body)
    return (_Unpickler if trusted else _DataUnpickler)(payload, tensors, raw, rebuild).load()


def unpack_from(
    packed: Packed, buffers: Sequence[Buffer], *, rebuild: Rebuild | None = None
) -> Any:
    """As `unpack`, from buffers that never crossed a process; they are copied."""
    return unpack(packed, LocalBuffers(buffers), rebuild=rebuild)


class LocalBuffers:
    """Buffers that did not come by a frame, copied so that they can be written to."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = [bytearray(buffer) for buffer in buffers]

    def buffer(self, index: int) -> memoryview:
        return memoryview(self._buffers[index])


_SENT_BY_VALUE: set[str] = set()  # names of the user's modules


def ship_by_value(module: types.ModuleType) -> None:
    """Send functions and classes of this module by value from now on, not by name."""
    if sys.modules.get(module.__name__) is module:
        cloudpickle.register_pickle_by_value(module)
        _SENT_BY_VALUE.add(module.__name__)


def digest_of(packed: Packed, buffers: Sequence[Buffer] = ()) -> bytes:
    """A digest by which two processes agree that a function was already sent.

    Example:
        >>> from stratagem._wire.codec import Outgoing, digest_of, pack
        >>> len(digest_of(pack(len, Outgoing())))
        16
    """
    summary = hashlib.blake2b(packed.payload, digest_size=16)
    if packed.tensors:
        summary.update(repr(packed.tensors).encode())  # shapes and dtypes are not in the buffers
    for buffer in buffers:
        memory = memoryview(buffer)
        if memory.nbytes:
            summary.update(memory)
    return summary.digest()


def digest(obj: object, describe: Describe | None = None) -> tuple[bytes, int]:
    """Return the digest of what an object packs to, and how many bytes that is."""
    outgoing = Outgoing()
    packed = pack(obj, outgoing, describe=describe)
    size = len(packed.payload) + sum(memoryview(one).nbytes for one in outgoing.buffers)
    return digest_of(packed, outgoing.buffers), size


def _revive(packed: PackedTensor, frame: HasBuffers) -> Tensor:
    tensor = any_tensor_from(packed.ref, frame)
    if packed.channels_last:
        tensor = tensor.movedim(-1, 1)
    if packed.is_parameter:
        return nn.Parameter(tensor, requires_grad=packed.requires_grad)
    return tensor.requires_grad_() if packed.requires_grad else tensor


def pickle_exception(error: BaseException) -> bytes:
    """Return the pickled exception if it can be unpickled unchanged, else nothing."""
    for prefers_data in (True, False):
        file = io.BytesIO()
        try:
            _Pickler(file, Outgoing(), None, [], prefers_data=prefers_data).dump(error)
            data = file.getvalue()
            back = unpickle_exception(data, trusted=not prefers_data)
            survives = type(back) is type(error) and str(back) == str(error)
        except Exception:  # noqa: BLE001 - user classes fail in any way; the text travels anyway
            continue
        if survives and len(data) <= PAYLOAD_BYTES:
            return data
    return b""


def unpickle_exception(data: bytes, *, trusted: bool) -> BaseException | None:
    """Return the exception of `pickle_exception`; None if its class is not known here, or it is refused."""
    try:
        back = (_Unpickler if trusted else _DataUnpickler)(data, (), (), None).load()
    except Exception:  # noqa: BLE001 - a module this process lacks, or any error of user code
        return None
    return back if isinstance(back, BaseException) else None
