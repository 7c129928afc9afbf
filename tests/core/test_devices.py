"""Device names: what they mean and what is refused (ODS-1, spec 13.2)."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg
from stratagem._core import devices
from stratagem._core.devices import Device, parse_device, resolve_device, resolve_devices

CPU1 = "/job:localhost/replica:0/task:0/device:CPU:1"


@pytest.mark.parametrize(
    "text", ["CPU:1", "/cpu:1", "cpu:1", "/device:CPU:1", "/device:cpu:1", "device:CPU:1", CPU1]
)
def test_every_spelling_means_the_same_device(text):
    """ODS-1."""
    assert parse_device(text).name == CPU1
    assert parse_device(text) == Device("CPU", 1)
    assert str(parse_device(text)) == CPU1
    assert parse_device(text).short == "cpu:1"


@pytest.mark.parametrize("text", ["", None, "cpu", "CPU", torch.device("cpu"), Device()])
def test_nothing_means_the_first_cpu(text):
    """ODS-1: '' and None are CPU:0."""
    assert parse_device(text).name == "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.mark.parametrize("text", ["gpu:2", "cuda:2", "/device:GPU:2", torch.device("cuda", 2)])
def test_gpu_and_cuda_are_one(text):
    """Spec 13.2."""
    assert parse_device(text) == Device("GPU", 2)
    assert parse_device(text).torch_device == torch.device("cuda", 2)


def test_logical_cpus_are_host_memory():
    """Spec 13.2: each is a device of its own, all are the host."""
    assert resolve_device("cpu:17").torch_device == torch.device("cpu")
    assert resolve_device("cpu:17") != resolve_device("cpu:0")


def test_names_of_a_cluster():
    """Full names of other tasks can be read, but do not exist here."""
    remote = parse_device("/job:ps/replica:0/task:1/device:CPU:0")
    assert (remote.job, remote.task) == ("ps", 1)
    assert remote.name == "/job:ps/replica:0/task:1/device:CPU:0"
    with pytest.raises(sg.errors.DeviceNotFound):
        resolve_device(remote)


@pytest.mark.parametrize(
    "text",
    ["x", "cpu:", "cpu:-1", "cpu 0", "foo:1", "cpu:1:2", "/job:localhost/", "cpu:x", "cpu:*"],
)
def test_malformed_names(text):
    """ODS-1: unparsable is a ValueError with the value and the expected form."""
    with pytest.raises(ValueError, match="is not a device name") as caught:
        parse_device(text)
    assert repr(text) in str(caught.value)
    assert "'cpu:0'" in str(caught.value)


@pytest.mark.parametrize("given", [["cpu:0"], 3, 1.5, object()])
def test_not_a_name_at_all(given):
    """ODS-1: a list is a TypeError."""
    with pytest.raises(TypeError, match="expected one device name"):
        parse_device(given)


def test_a_device_that_does_not_exist_names_those_that_do():
    """Spec 13.2, against ODS-2."""
    missing = f"gpu:{torch.cuda.device_count() + 7}"
    with pytest.raises(ValueError, match="does not exist here") as caught:
        resolve_device(missing)
    assert isinstance(caught.value, sg.errors.DeviceNotFound)
    assert "cpu:0" in str(caught.value)


def test_lists_of_devices():
    """CSS-2: any iterable; a bare string would mean its letters."""
    assert resolve_devices((f"cpu:{i}" for i in range(2)), argument="devices") == (
        Device("CPU", 0),
        Device("CPU", 1),
    )
    assert resolve_devices(["cpu:0", "cpu:0"], argument="devices") == (Device(), Device())
    with pytest.raises(ValueError, match=r"devices='cpu:0' is a single string.*\['cpu:0'\]"):
        resolve_devices("cpu:0", argument="devices")
    with pytest.raises(TypeError, match="expected a list of device names"):
        resolve_devices(3, argument="devices")


def test_where_results_go():
    """RED-12: the device scope around the call, else the CPU."""
    assert devices.current_device() == torch.device("cpu")
    with torch.device("meta"):
        assert devices.current_device() == torch.device("meta")
