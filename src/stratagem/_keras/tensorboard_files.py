"""``keras.callbacks.TensorBoard`` without TensorFlow: torch's writer in place of TensorFlow's.

Keras' callback uses the module ``tensorflow.summary``, and nothing else of TensorFlow. For a model under a strategy, in an environment
without TensorFlow, it gets a `Summaries` instead, which has the functions of that module that the callback calls. Tags, steps
and directories are the callback's own.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stratagem._keras.keras_names import names
from stratagem._keras.model_strategies import strategy_of


def apply_patch() -> None:
    """Replace the two attributes of the callback that import TensorFlow."""
    callback_class = names().keras.callbacks.TensorBoard
    module, write_model = callback_class.summary, callback_class._write_keras_model_summary

    def summary(self: Any) -> Any:
        if self._summary_module is None and _is_ours(self):
            self._summary_module = Summaries()
        return module.fget(self)

    @functools.wraps(write_model)
    def _write_keras_model_summary(self: Any) -> None:
        if not isinstance(self.summary, Summaries):
            write_model(self)
        elif type(self.model).__name__ in ("Functional", "Sequential"):  # as Keras
            with self._train_writer.as_default():
                self.summary.keras_model(self.model)

    callback_class.summary = property(summary, doc=module.__doc__)
    callback_class._write_keras_model_summary = _write_keras_model_summary


def _is_ours(callback: Any) -> bool:
    return (
        strategy_of(callback.model) is not None and importlib.util.find_spec("tensorflow") is None
    )


class Summaries:
    """Those functions of ``tensorflow.summary`` that Keras' callback calls.

    A function writes to the writer that is the default at the moment, if there is one.
    """

    def __init__(self) -> None:
        self.default: SummaryFiles | None = None
        self._records = True

    def create_file_writer(self, directory: str) -> SummaryFiles:
        """Return a writer of files in a directory."""
        return SummaryFiles(self, directory)

    @contextmanager
    def record_if(self, condition: Callable[[], bool]) -> Iterator[None]:
        """Write only if a condition holds."""
        before, self._records = self._records, condition()
        try:
            yield
        finally:
            self._records = before

    @property
    def _writer(self) -> Any:
        """The torch writer to write to; None if nothing is to be recorded."""
        return self.default.torch_writer if self._records and self.default else None

    def scalar(self, name: str, value: Any, step: Any) -> None:
        """Write a number."""
        if (writer := self._writer) is not None:
            writer.add_scalar(name, float(value), int(step))

    def histogram(self, name: str, value: Any, step: Any) -> None:
        """Write the distribution of the values of a variable."""
        if (writer := self._writer) is not None:
            writer.add_histogram(name, names().backend.convert_to_numpy(value), int(step))

    def image(self, name: str, value: Any, step: Any) -> None:
        """Write images of shape (count, height, width, channels)."""
        if (writer := self._writer) is not None:
            writer.add_images(name, value, int(step), dataformats="NHWC")

    def keras_model(self, model: Any) -> None:
        """Write the layers of a model, which TensorBoard draws as a graph."""
        if (writer := self._writer) is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        plugin = SummaryMetadata.PluginData(plugin_name="graph_keras_model", content=b"1")
        text = TensorProto(dtype=DT_STRING, string_val=[model.to_json().encode()])
        value = Summary.Value(
            tag="keras", metadata=SummaryMetadata(plugin_data=plugin), tensor=text
        )
        writer.file_writer.add_summary(Summary(value=[value]), 0)


class SummaryFiles:
    """Event files in one directory.

    Raises:
        ModuleNotFoundError: the package tensorboard is not installed.
    """

    def __init__(self, summaries: Summaries, directory: str) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "keras.callbacks.TensorBoard under a strategy needs the package tensorboard (or tensorflow): "
                "pip install 'stratagem[tensorboard]'.",
                name="tensorboard",
            )
        from torch.utils.tensorboard import SummaryWriter

        self._summaries = summaries
        self.torch_writer: Any = SummaryWriter(directory)
        self.flush, self.close = self.torch_writer.flush, self.torch_writer.close

    @contextmanager
    def as_default(self, step: Any = None) -> Iterator[None]:
        """Write here; every function of the callback says its own step. What was written is in the file afterwards."""
        del step
        before, self._summaries.default = self._summaries.default, self
        try:
            yield
        finally:
            self._summaries.default = before
            self.flush()
