"""The default strategy, which is current outside any scope."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, final

from typing_extensions import override

from stratagem import config
from stratagem._core import devices
from stratagem._core.user_contexts import InputContext
from stratagem._strategies.one_device import SingleReplica
from stratagem.errors import ContextError, MisuseError

_made: list[DefaultStrategy] = []
_making = threading.Lock()


@final
class DefaultStrategy(SingleReplica):
    """Ordinary PyTorch: one replica, nothing placed, nothing moved.

    `get_strategy` returns it outside any scope; there is exactly one.

    Raises:
        RuntimeError: on creating a second one.
    """

    _is_default: ClassVar[bool] = True

    def __init__(self) -> None:
        if _made:
            raise MisuseError(
                "there is one default strategy per process: use sg.get_strategy() outside any "
                "scope to get it."
            )
        super().__init__()

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise MisuseError("the default strategy cannot be copied: there is one per process.")

    @property
    @override
    def _compute_devices(self) -> tuple[devices.Device, ...]:
        return (devices.host(),)

    @property
    @override
    def _parameter_names(self) -> tuple[str, ...]:
        raise ContextError(
            "the default strategy places nothing, so it has no parameter or worker devices. Use "
            "one of the other strategies to choose devices."
        )

    @override
    def _replica_devices(self, replica_id: int) -> Any:
        return (devices.host().name,)

    @override
    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return fn(*args, **kwargs)

    def _distribute_dataset(self, dataset: Any, options: config.InputOptions | None) -> Any:
        return dataset  # INP-23

    def _distribute_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: config.InputOptions | None,
    ) -> Any:
        return dataset_fn(InputContext())


def default_strategy() -> DefaultStrategy:
    """Return the default strategy; create it when first needed."""
    if not _made:
        with _making:
            if not _made:
                _made.append(DefaultStrategy())
    return _made[0]
