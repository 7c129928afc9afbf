"""A directory for the user's files (the key file, Keras' settings): tests leave those of the developer alone."""

from __future__ import annotations

import os
import shutil
import tempfile

_made: list[str] = []


def pytest_configure() -> None:
    """Make the directory; processes that tests start inherit it."""
    _made.append(tempfile.mkdtemp(prefix="stratagem-tests-"))
    os.environ["XDG_CONFIG_HOME"] = _made[0]
    os.environ["KERAS_HOME"] = os.path.join(_made[0], "keras")
    os.environ["KERAS_BACKEND"] = "torch"
    # Keras and accelerate set these, and a test may leave nothing behind.
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def pytest_unconfigure() -> None:
    """Remove the directory."""
    while _made:
        shutil.rmtree(_made.pop(), ignore_errors=True)
