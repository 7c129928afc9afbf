"""Input: datasets and how they are shared. The public names of the `_data` room.

Example:
    >>> import stratagem as sg
    >>> dataset = sg.data.Dataset.range(5).batch(2)
    >>> len(dataset)
    3
"""

from stratagem._data.dataset import Dataset, as_dataset
from stratagem._data.distribute import (
    DistributedDataset,
    DistributedIterator,
    OptionalElement,
)
from stratagem._data.iteration import DatasetIterator
from stratagem._data.node import INFINITE, UNKNOWN, Skipped
from stratagem._data.options import SHARD_HINT, AutoShardPolicy, DistributeOptions, Options
from stratagem._data.parallel import AUTOTUNE
from stratagem._data.readers import (
    Bad,
    CsvReader,
    LineReader,
    NumpyReader,
    ParquetReader,
    Reader,
    TFRecordReader,
    write_tfrecords,
)
from stratagem._data.seeds import ElementRng
from stratagem._data.specs import ObjectSpec, PerReplicaSpec, TensorSpec

__all__ = [
    "AUTOTUNE",
    "INFINITE",
    "SHARD_HINT",
    "UNKNOWN",
    "AutoShardPolicy",
    "Bad",
    "CsvReader",
    "Dataset",
    "DatasetIterator",
    "DistributeOptions",
    "DistributedDataset",
    "DistributedIterator",
    "ElementRng",
    "LineReader",
    "NumpyReader",
    "ObjectSpec",
    "OptionalElement",
    "Options",
    "ParquetReader",
    "PerReplicaSpec",
    "Reader",
    "Skipped",
    "TFRecordReader",
    "TensorSpec",
    "as_dataset",
    "write_tfrecords",
]
