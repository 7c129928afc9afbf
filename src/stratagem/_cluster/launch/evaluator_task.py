"""Run an `Evaluator` as a task of a local cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, final

from typing_extensions import override

from stratagem._owner import Owner
from stratagem._wire import object_bytes

if TYPE_CHECKING:
    from stratagem._checkpoint.evaluator import Evaluator


def write_evaluator(evaluator: Evaluator, path: Path) -> None:
    """Write an evaluator for another process.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        path.write_bytes(object_bytes.dump(evaluator))
    except Exception as error:
        raise TypeError(
            f"{evaluator!r} cannot be sent to the process of the evaluator: {error}. Create what cannot be "
            "pickled inside build() or evaluate()."
        ) from error


@final
class EvaluatorTask(Owner):
    """An evaluator that runs until its last checkpoint. It listens on no address.

    Args:
        path: the file that `write_evaluator` made.
    """

    def __init__(self, path: str) -> None:
        self._evaluator: Evaluator = object_bytes.load(Path(path).read_bytes())
        self.address = ""

    def serve(self) -> None:
        """Evaluate checkpoints in the calling thread."""
        self._evaluator.run()

    @override
    def close(self) -> None:
        """Stop after the current evaluation, from any thread. May be called again."""
        self._evaluator.close()

    @override
    def __repr__(self) -> str:
        return f"<EvaluatorTask of {self._evaluator!r}>"
