"""Public names of optimizers for embedding tables, which change only the rows of the batch.

They work on one device and on parameter servers, with the same numbers. Use them for tables, and ``torch.optim`` for
other parameters.

Example:
    >>> import torch, stratagem as sg
    >>> table = torch.nn.Embedding(1000, 8, sparse=True)
    >>> optimizer = sg.optim.LazyAdam(table.parameters(), lr=1e-3)
"""

from stratagem._core.row_optimizers import LazyAdam, RowWiseAdagrad

__all__ = ["LazyAdam", "RowWiseAdagrad"]
