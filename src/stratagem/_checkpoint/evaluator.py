"""`Evaluator`: evaluates the newest checkpoint of a training run, each time a new one appears.

It needs the directory only: no cluster, no lock, no connection to the training program. Results go into
``evaluations.jsonl`` beside the checkpoints, where the manager finds them.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from stratagem._checkpoint import evaluations
from stratagem._checkpoint.checkpoint import read_content, restore_objects
from stratagem._checkpoint.directory import CheckpointDirectory, SavedCheckpoint, checked_path
from stratagem._checkpoint.evaluations import Evaluation
from stratagem._checkpoint.manager_arguments import check_evaluator_arguments, checked_metrics
from stratagem._owner import Owner
from stratagem.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointTimeout

_log = logging.getLogger("stratagem.checkpoint")


@final
class Evaluator(Owner):
    """Evaluator of the newest checkpoint in a directory, each time a new one appears.

    It skips damaged checkpoints, and those that it or an earlier evaluator of the directory has evaluated.

    Args:
        checkpoint_directory: the directory of a `CheckpointManager`.
        build: called once; returns a module, or a dictionary of objects under the names they have in
            the checkpoint.
        evaluate: called with the result of `build` after a checkpoint was loaded into it; returns
            numbers by name.
            Modules are in evaluation mode and no gradients are recorded.
        max_evaluations: stop after this many; by default only after a final checkpoint
            (``manager.save(step, final=True)``).
        poll_s: seconds between checks for a new checkpoint.
        timeout_s: how long to wait for a new checkpoint.
        tensorboard: write scalars to ``tensorboard/`` beside the checkpoints; by default if
            TensorBoard is installed.
        allow_pickle: accept values that only pickle can read.

    Example:
        >>> import tempfile, torch, stratagem as sg
        >>> directory = tempfile.mkdtemp()
        >>> trained = torch.nn.Linear(2, 1)
        >>> with sg.CheckpointManager(sg.Checkpoint(model=trained), directory) as manager:
        ...     _ = manager.save(10, final=True)
        >>> def bias(model):
        ...     return {"bias": model.bias.item()}
        >>> evaluator = sg.Evaluator(directory, lambda: torch.nn.Linear(2, 1), bias)
        >>> [result] = evaluator.run()
        >>> result.step, result.metrics["bias"] == trained.bias.item()
        (10, True)
    """

    def __init__(
        self,
        checkpoint_directory: str | Path,
        build: Callable[[], Any],
        evaluate: Callable[[Any], Mapping[str, float]],
        *,
        max_evaluations: int | None = None,
        poll_s: float = 1.0,
        timeout_s: float = 3600.0,
        tensorboard: bool | None = None,
        allow_pickle: bool = False,
    ) -> None:
        path = checked_path("checkpoint_directory", checkpoint_directory)
        check_evaluator_arguments(
            build=build,
            evaluate=evaluate,
            max_evaluations=max_evaluations,
            poll_s=poll_s,
            timeout_s=timeout_s,
        )
        self._directory = CheckpointDirectory(path)
        self._build = build
        self._evaluate = evaluate
        self._max_evaluations = max_evaluations
        self._poll_s = poll_s
        self._timeout_s = timeout_s
        if tensorboard is None:
            tensorboard = importlib.util.find_spec("tensorboard") is not None
        self._tensorboard = tensorboard
        self._allow_pickle = allow_pickle
        self._stopped = threading.Event()
        self._results: list[Evaluation] = []

    @property
    def directory(self) -> Path:
        """Directory of the checkpoints."""
        return self._directory.path

    @property
    def results(self) -> tuple[Evaluation, ...]:
        """The evaluations made so far."""
        return tuple(self._results)

    def run(self) -> list[Evaluation]:
        """Evaluate checkpoints until the last one; return the results of this call.

        Raises:
            CheckpointTimeout: no new checkpoint appeared within the limit.
            CheckpointMismatch: a checkpoint does not fit the objects of `build`.
            CheckpointError: results cannot be written to the directory.
        """
        built = self._build()
        seen = {one.identity for one in evaluations.read(self._directory.path)}
        before = len(self._results)
        while not self._stopped.is_set():
            saved = self._next(seen)
            if saved is None:
                break
            seen.add(saved.manifest.identity)
            result = self._evaluated(built, saved)
            if result is not None:
                self._results.append(result)
            count = len(self._results) - before
            if saved.manifest.final or count == self._max_evaluations:
                break
        return self._results[before:]

    def close(self) -> None:
        """Make `run` in another thread return after its current evaluation."""
        self._stopped.set()

    def _next(self, seen: set[str]) -> SavedCheckpoint | None:
        """Wait until the newest checkpoint is one not seen yet; None after a final one, or when closed."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            newest = self._directory.latest()
            if newest is not None and newest.manifest.identity not in seen:
                return newest
            if newest is not None and newest.manifest.final:
                return None
            if time.monotonic() > deadline:
                raise CheckpointTimeout(
                    f"no new checkpoint appeared in {self._directory.path} within "
                    f"{self._timeout_s:g} s. Is the training program alive?"
                )
            if self._stopped.wait(self._poll_s):
                return None

    def _evaluated(self, built: Any, saved: SavedCheckpoint) -> Evaluation | None:
        began = time.monotonic()
        with evaluations.opened(self._directory.path):
            pass  # an evaluation whose result cannot be written is not begun
        try:
            objects = self._objects(built, saved)
            restore_objects(
                objects, saved, random=False, allow_pickle=self._allow_pickle, partial=True
            )
        except CheckpointCorrupt as error:
            if saved.path.exists():
                _log.warning("skipping checkpoint %s: %s", saved.path, error)
            return None  # deleted by the manager: a newer one exists
        for module in objects.values():
            if isinstance(module, nn.Module):
                module.eval()
        with torch.no_grad():
            found = self._evaluate(built)
        if not isinstance(found, Mapping):
            raise TypeError(
                f"evaluate returned {found!r}: expected numbers by name, such as {{'auc': 0.71}}."
            )
        metrics = checked_metrics(found)
        result = Evaluation(
            saved.manifest.identity, saved.step, metrics, time.monotonic() - began, time.time()
        )
        evaluations.append(self._directory.path, result)
        if self._tensorboard:
            self._write_scalars(result)
        _log.info("evaluated step %d: %s", result.step, metrics)
        return result

    def _objects(self, built: Any, saved: SavedCheckpoint) -> dict[str, Any]:
        """Return the built objects under the names they have in the checkpoint."""
        if isinstance(built, dict):
            return built
        content = read_content(saved.path, allow_pickle=self._allow_pickle)["objects"]
        modules = [
            name
            for name, entry in content.items()
            if isinstance(entry, dict) and entry.get("$object") == "module"
        ]
        name = "model" if "model" in modules else modules[0] if len(modules) == 1 else None
        if name is None:
            raise CheckpointMismatch(
                f"{saved.path} has the modules {modules}: build() must return a dictionary that says "
                "which one is meant, such as {'generator': module}.",
                missing=["model"],
            )
        return {name: built}

    def _write_scalars(self, result: Evaluation) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter(str(self._directory.path / "tensorboard"))
        for name, value in result.metrics.items():
            writer.add_scalar(f"evaluation/{name}", value, result.step, walltime=result.time)
        writer.close()

    def __reduce__(self) -> Any:
        """Travel to another process without results."""
        options = {
            "max_evaluations": self._max_evaluations,
            "poll_s": self._poll_s,
            "timeout_s": self._timeout_s,
            "tensorboard": self._tensorboard,
            "allow_pickle": self._allow_pickle,
        }
        make = functools.partial(type(self), **options)  # type: ignore[arg-type]
        return make, (self._directory.path.absolute(), self._build, self._evaluate)

    def __repr__(self) -> str:
        return f"<Evaluator of {self._directory.path}, {len(self._results)} evaluations>"
