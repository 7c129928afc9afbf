"""Every single-machine example runs at small size and does what its text says."""

import pytest

from examples import any_strategy, central_storage, mirrored, one_device, variables


def test_one_device_learns_the_classes():
    """A few epochs are enough to be far above chance (0.1)."""
    assert one_device.main(epochs=3) > 0.8


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_central_storage_learns_the_classes_with_any_number_of_replicas(replicas):
    """The last batch of an epoch is uneven for two and for three replicas."""
    assert central_storage.main(epochs=3, replicas=replicas) > 0.8


def test_mirrored_checks_itself_against_one_device():
    """The example raises if a step differs; a batch of a single row is among them."""
    assert mirrored.main(steps=10) < 10


def test_variables_alone_find_the_line():
    """Slope 3 and offset 2 are found by two replicas assigning averages."""
    slope, offset = variables.main(steps=100)
    assert slope == pytest.approx(3, abs=1e-3)
    assert offset == pytest.approx(2, abs=1e-3)


def test_the_script_for_any_strategy_runs_without_one():
    """`sg.auto_strategy()` chooses one device here."""
    assert any_strategy.main(epochs=3) > 0.8
