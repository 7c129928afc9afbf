"""Sources of a `Dataset`: the constructors, for data in memory, generators and files."""

from __future__ import annotations

import builtins
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from stratagem._data import nests
from stratagem._data.file_source import FilesNode, ListFilesNode, OnError, expand
from stratagem._data.node import Node
from stratagem._data.readers import Reader, reader_for
from stratagem._data.sources import GeneratorNode, RangeNode, SlicesNode, TensorsNode


class DatasetSources(ABC):
    """Constructors of `Dataset`."""

    @abstractmethod
    def __init__(self, node: Node) -> None: ...

    @classmethod
    def range(cls, *args: int) -> Self:
        """Return a dataset of integers, with the arguments of Python's `range`.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(1, 6, 2)]
            [1, 3, 5]
        """
        return cls(RangeNode(builtins.range(*map(operator.index, args))))

    @classmethod
    def from_tensors(cls, tensors: Any) -> Self:
        """Return a dataset with one element, a nest of tensors.

        Example:
            >>> import stratagem as sg
            >>> list(sg.data.Dataset.from_tensors([1, 2]))
            [tensor([1, 2])]
        """
        return cls(TensorsNode(nests.to_columns(tensors)))

    @classmethod
    def from_tensor_slices(cls, tensors: Any) -> Self:
        """Return a dataset of the rows of a nest of arrays, tensors or lists; lists are stacked.

        Example:
            >>> import stratagem as sg
            >>> list(sg.data.Dataset.from_tensor_slices({"x": [1, 2], "y": [3, 4]}))
            [{'x': tensor(1), 'y': tensor(3)}, {'x': tensor(2), 'y': tensor(4)}]
        """
        return cls(SlicesNode.of(tensors))

    @classmethod
    def from_generator(cls, generator: Callable[..., Any], args: tuple[Any, ...] = ()) -> Self:
        """Return a dataset of the items of ``generator(*args)``, which every epoch calls again.

        Example:
            >>> import stratagem as sg
            >>> def squares(n):
            ...     yield from (i * i for i in range(n))
            >>> [int(x) for x in sg.data.Dataset.from_generator(squares, args=(4,))]
            [0, 1, 4, 9]
        """
        return cls(GeneratorNode(generator, tuple(args)))

    @classmethod
    def list_files(cls, patterns: Any) -> Self:
        """Return a dataset of paths; the matches of a pattern are sorted.

        Example:
            >>> import stratagem as sg
            >>> list(sg.data.Dataset.list_files(["b.txt", "a.txt"]))
            ['b.txt', 'a.txt']
        """
        return cls(ListFilesNode(expand(patterns)))

    @classmethod
    def from_files(
        cls, patterns: Any, reader: Reader | str | None = None, *, on_error: OnError = "raise"
    ) -> Self:
        r"""Return a dataset of the records of files, in order.

        Args:
            patterns: a path or pattern, or a list of them.
            reader: a `Reader`, or "lines", "csv", "numpy", "parquet", "tfrecord"; by default the file
                names decide.
            on_error: "raise", or "skip" to skip unreadable records and files. The iterator's ``skipped``
                lists them, and a warning at the end counts them.

        Example:
            >>> import stratagem as sg, pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "a.csv")
            >>> _ = path.write_text("x\n1\nbad\n3\n")
            >>> [int(r["x"]) for r in sg.data.Dataset.from_files(path).take(1)]
            [1]
        """
        paths = expand(patterns)
        return cls(FilesNode(paths, reader_for(reader, paths), on_error))
