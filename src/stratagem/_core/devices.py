"""Device names: parsing, canonical form, and the devices that exist here.

CPU devices are logical: ``cpu:0``, ``cpu:1``, … all mean host memory, and each can have one replica. ``gpu:i`` and
``cuda:i`` are the same device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from typing_extensions import override

from stratagem._core.torch_patches import private_api
from stratagem.errors import DeviceNotFound

# "/job:x/replica:0/task:0/device:CPU:1", any part missing; "cpu:1", "/cpu:1", "CPU" for short.
_FULL = re.compile(
    r"^(?:/job:(?P<job>[A-Za-z_][A-Za-z0-9_]*))?(?:/replica:(?P<replica>\d+))?"
    r"(?:/task:(?P<task>\d+))?(?:/?(?:device:)?(?P<kind>[A-Za-z]+)(?::(?P<index>\d+|\*))?)?$",
)
_TORCH_TYPE = {"GPU": "cuda", "CUDA": "cuda"}
_LOCAL_JOB = "localhost"
_CHIEF_JOB = "chief"

# Keys of the parameter-server strategies that this process coordinates. Any thread may change the set.
_coordinated: set[int] = set()


def coordinate(key: int) -> None:
    """Make this process the chief of a cluster; its devices are named accordingly (PSS-10)."""
    _coordinated.add(key)


def coordinate_no_more(key: int) -> None:
    """Undo `coordinate`. May be repeated; safe in finalizers."""
    _coordinated.discard(key)


def host() -> Device:
    """Return the CPU of this process, by its current name."""
    return Device(job=_CHIEF_JOB if _coordinated else _LOCAL_JOB)


@dataclass(frozen=True)
class Device:
    """One logical device.

    Attributes:
        kind: ``"CPU"``, ``"GPU"`` or another accelerator type of torch in capitals.
        index: its number, from 0.
        job: the cluster job it belongs to; ``"localhost"`` for this machine, ``"chief"`` in a process
            that coordinates parameter servers.
        task: the task of that job.
    """

    kind: str = "CPU"
    index: int = 0
    job: str = _LOCAL_JOB
    task: int = 0
    torch_device: torch.device = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # torch knows one CPU: every logical CPU is the host.
        kind = _TORCH_TYPE.get(self.kind, self.kind.lower())
        actual = torch.device(kind) if kind == "cpu" else torch.device(kind, self.index)
        object.__setattr__(self, "torch_device", actual)

    @property
    def name(self) -> str:
        """The canonical form."""
        return f"/job:{self.job}/replica:0/task:{self.task}/device:{self.kind}:{self.index}"

    @property
    def short(self) -> str:
        """The short form, such as ``cpu:1``."""
        return f"{self.kind.lower()}:{self.index}"

    @override
    def __str__(self) -> str:
        return self.name


def parse_device(device: object) -> Device:
    """Return the device for a name, a `torch.device` or a `Device`; it need not exist.

    ``""`` and None mean ``CPU:0``.

    Raises:
        TypeError: not a name at all.
        ValueError: a string that is not a device's name.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        return Device()
    if isinstance(device, torch.device):
        kind = "GPU" if device.type == "cuda" else device.type.upper()
        return Device(kind, device.index or 0)
    if not isinstance(device, str):
        raise TypeError(
            f"device={device!r} has type {type(device).__name__}: expected one device name such as "
            '"cpu:0" or "gpu:1", or a torch.device.'
        )
    if device == "":
        return Device()
    found = _FULL.match(device.strip())
    kind = (found["kind"] or "CPU").upper() if found else ""
    kind = "GPU" if kind == "CUDA" else kind
    if not found or kind not in _known_kinds() or found["index"] == "*":
        raise ValueError(
            f"{device!r} is not a device name: expected a form such as 'cpu:0', 'GPU:1', "
            "'/device:CPU:0' or '/job:localhost/replica:0/task:0/device:CPU:0' with a type of "
            f"{', '.join(sorted(_known_kinds()))}."
        )
    return Device(
        kind, int(found["index"] or 0), found["job"] or _LOCAL_JOB, int(found["task"] or 0)
    )


def _known_kinds() -> frozenset[str]:
    kinds = {"CPU", "GPU", "XPU", "MPS"}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type != "cuda":
        kinds.add(accelerator.type.upper())
    return frozenset(kinds)


def accelerators() -> tuple[Device, ...]:
    """Return the accelerators of this machine that torch can use."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return ()
    kind = "GPU" if found.type == "cuda" else found.type.upper()
    return tuple(Device(kind, i) for i in range(torch.accelerator.device_count()))


def resolve_device(device: object) -> Device:
    """Return the device for a name; raise if this machine does not have it.

    Raises:
        DeviceNotFound: (a ValueError) naming the devices that do exist.
    """
    found = parse_device(device)
    here = _coordinated and found.job == _CHIEF_JOB
    local = (here or found.job == _LOCAL_JOB) and found.task == 0
    if local and found.kind == "CPU":
        return found
    if local and Device(found.kind, found.index) in accelerators():
        return found
    names = ["cpu:0, cpu:1, … (every cpu:i is host memory)"]
    names += [each.short for each in accelerators()]
    raise DeviceNotFound(
        f"device {str(device)!r} ({found.name}) does not exist here. "
        f"Devices of this machine: {'; '.join(names)}."
    )


def resolve_devices(devices: object, *, argument: str) -> tuple[Device, ...]:
    """Return a list of devices, each checked; raise for a bare string.

    Raises:
        TypeError: not a list of device names.
        ValueError: a bare string, an unknown name, a device that does not exist.
    """
    if isinstance(devices, str):
        raise ValueError(
            f"{argument}={devices!r} is a single string: expected a list of device names, such as "
            f"[{devices!r}]."
        )
    if not isinstance(devices, Iterable):
        raise TypeError(
            f"{argument}={devices!r} has type {type(devices).__name__}: expected a list of device "
            'names, such as ["cpu:0", "cpu:1"].'
        )
    return tuple(resolve_device(each) for each in devices)


def current_device() -> torch.device:
    """Return the device for results of reductions: that of the device scope, else the CPU (RED-12)."""
    if private_api.function_modes() == 0:
        return torch.device("cpu")
    return torch.get_default_device()
