"""Share Ray datasets among the workers of a coordinator."""

from __future__ import annotations

import sys
from collections.abc import Callable


def as_iterable(source: object) -> object:
    """Return a dataset over a Ray dataset or iterator; anything else unchanged."""
    if "ray.data" not in sys.modules:
        return source
    from stratagem._data.dataset import as_dataset
    from stratagem._data.ray_source import is_ray_data

    return as_dataset(source) if is_ray_data(source) else source


def share_ray_data(source: object) -> tuple[object, Callable[[], None] | None]:
    """Return a dataset whose Ray datasets are shared by all workers, and a function that ends the sharing.

    The source itself and None if it reads no Ray dataset.
    """
    if "ray.data" not in sys.modules:
        return source, None
    from stratagem._data.dataset import Dataset, as_dataset
    from stratagem._data.ray_source import is_ray_data, share_node
    from stratagem._strategies.unbuilt_dataset import UnbuiltDataset

    inner = source.source if isinstance(source, UnbuiltDataset) else source
    if not isinstance(inner, Dataset) and not is_ray_data(inner):
        return source, None
    dataset = as_dataset(inner)
    node, end = share_node(dataset.node)
    if end is None:
        return source, None
    shared = Dataset(node)
    return (source.with_source(shared) if isinstance(source, UnbuiltDataset) else shared), end
