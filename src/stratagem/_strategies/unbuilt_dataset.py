"""`UnbuiltDataset`: a distributed dataset of a parameter-server strategy, which only workers can build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from typing_extensions import override

from stratagem import config
from stratagem._core import context
from stratagem._core.user_contexts import InputContext

_HAND_IT_ON: Final = (
    "Give it to coordinator.create_per_worker_dataset(), which builds it on every worker."
)


class UnbuiltDataset:
    """A distributed dataset that only workers can build.

    Give it to ``coordinator.create_per_worker_dataset``. On a worker, calling it builds that worker's share: of a
    dataset by its auto-shard policy, of a dataset function by its `InputContext`.
    """

    def __init__(
        self, build: Callable[..., Any], source: Any, options: config.InputOptions | None
    ) -> None:
        self._build = build
        self.source = source
        self._options = options

    def with_source(self, source: Any) -> UnbuiltDataset:
        """Return the same over another source."""
        return UnbuiltDataset(self._build, source, self._options)

    def __call__(self, worker: InputContext) -> Any:
        """Build the share of one worker, for the devices of its strategy."""
        return self._build(
            self.source,
            [device.torch_device for device in context.get_strategy()._compute_devices],
            self._options,
            num_input_pipelines=worker.num_input_pipelines,
            input_pipeline_id=worker.input_pipeline_id,
        )

    def __iter__(self) -> Iterator[Any]:
        raise ValueError(f"{self._what()} cannot be iterated here. {_HAND_IT_ON}")

    @property
    def cardinality(self) -> int:
        """Raise: the size is known when a worker has built the dataset."""
        raise ValueError(f"{self._what()} has no known size here. {_HAND_IT_ON}")

    def _what(self) -> str:
        return f"a dataset made by strategy.{self._build.__name__}() under parameter servers"

    @override
    def __repr__(self) -> str:
        return f"<UnbuiltDataset of {self.source!r}>"
