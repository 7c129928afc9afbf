"""Public names of the input pipeline: datasets, readers, options.

Example:
    >>> import stratagem as sg
    >>> dataset = sg.data.Dataset.range(5).batch(2)
    >>> len(dataset)
    3
"""

from stratagem._data.cursor import Skipped
from stratagem._data.dataset import Dataset, as_dataset
from stratagem._data.dataset_sources import ColumnOptions
from stratagem._data.distribute import (
    DistributedDataset,
    DistributedIterator,
    OptionalElement,
)
from stratagem._data.hashing import hash_bucket
from stratagem._data.iteration import DatasetIterator
from stratagem._data.node import INFINITE, UNKNOWN
from stratagem._data.options import SHARD_HINT, AutoShardPolicy, DistributeOptions, Options
from stratagem._data.parallel import AUTOTUNE
from stratagem._data.ragged import Ragged
from stratagem._data.readers import Bad, LineReader, Reader, TFRecordReader, write_tfrecords
from stratagem._data.seeds import ElementRng
from stratagem._data.specs import ObjectSpec, PerReplicaSpec, TensorSpec
from stratagem._data.table_readers import CsvReader, NumpyReader, ParquetReader
from stratagem._data.tfrecord_format import Feature

__all__ = [
    "AUTOTUNE",
    "INFINITE",
    "SHARD_HINT",
    "UNKNOWN",
    "AutoShardPolicy",
    "Bad",
    "ColumnOptions",
    "CsvReader",
    "Dataset",
    "DatasetIterator",
    "DistributeOptions",
    "DistributedDataset",
    "DistributedIterator",
    "ElementRng",
    "Feature",
    "LineReader",
    "NumpyReader",
    "ObjectSpec",
    "OptionalElement",
    "Options",
    "ParquetReader",
    "PerReplicaSpec",
    "Ragged",
    "Reader",
    "Skipped",
    "TFRecordReader",
    "TensorSpec",
    "as_dataset",
    "hash_bucket",
    "write_tfrecords",
]
