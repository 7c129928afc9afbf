"""Lookups of rows by id: the functions behind `stratagem.nn`.

They take a `ShardedVariable`, a variable, a parameter (a layer's weight on a worker is a table of remote rows) or
a plain tensor. Only the rows asked are transferred.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stratagem._core.values import convert_to_tensor
from stratagem._ps.tables.sharded_variable import ShardedVariable

Combiner = Literal["mean", "sqrtn", "sum"]


def embedding_lookup(params: Any, ids: Any, max_norm: float | None = None) -> Tensor:
    """Return the rows of `params` with these ids, in the order and shape of `ids`.

    Args:
        params: a sharded variable, a variable, a parameter or a tensor.
        ids: integers of any shape.
        max_norm: rows with a larger norm are scaled down to it; stored rows do not change.

    Raises:
        ValueError: an id is out of range.

    Example:
        >>> import torch, stratagem as sg
        >>> table = torch.arange(6.0).reshape(3, 2)
        >>> sg.nn.embedding_lookup(table, torch.tensor([2, 0]))
        tensor([[4., 5.],
                [0., 1.]])
    """
    ids = torch.as_tensor(ids)
    if ids.dtype.is_floating_point or ids.dtype in (torch.bool, torch.complex64):
        raise ValueError(f"ids have {ids.dtype}: expected integers.")
    if isinstance(params, ShardedVariable):
        rows = params.sparse_read(ids)
    else:
        weight = params if isinstance(params, Tensor) else convert_to_tensor(params)
        count = weight.shape[0]
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= count):
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ValueError(f"id {bad!r} is out of range: expected 0 <= id < {count}.")
        rows = F.embedding(ids, weight) if weight.dim() == 2 else weight[ids.long()]
    if max_norm is None:
        return rows
    length = rows.flatten(ids.dim()).norm(dim=-1) if rows.dim() > ids.dim() else rows.abs()
    factor = (max_norm / length.clamp_min(max_norm)).reshape(
        *ids.shape, *[1] * (rows.dim() - ids.dim())
    )
    return rows * factor


def embedding_lookup_sparse(
    params: Any,
    sp_ids: Tensor,
    sp_weights: Tensor | None = None,
    combiner: Combiner = "mean",
    max_norm: float | None = None,
) -> Tensor:
    """Return one combined embedding for every row of `sp_ids`.

    Args:
        params: as for `embedding_lookup`.
        sp_ids: sparse (COO) matrix of ids: row = example, value = id.
        sp_weights: sparse matrix of the same places with one weight each; None means 1.
        combiner: ``"sum"``, ``"mean"`` (divided by the sum of weights) or ``"sqrtn"`` (divided by
            the root of the sum of their squares).
        max_norm: as for `embedding_lookup`.

    Example:
        >>> import torch, stratagem as sg
        >>> table = torch.tensor([[1.0], [2.0], [4.0]])
        >>> ids = torch.sparse_coo_tensor([[0, 0, 1], [0, 1, 0]], [0, 2, 1], check_invariants=True)
        >>> sg.nn.embedding_lookup_sparse(table, ids, combiner="sum")
        tensor([[5.],
                [2.]])
    """
    _check_combiner(combiner)
    examples, ids = _entries(sp_ids)
    weights = None if sp_weights is None else _weights(sp_weights, sp_ids)
    return _combine(params, examples, ids, weights, (sp_ids.shape[0], combiner, max_norm))


def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Tensor,
    sparse_weights: Tensor | None = None,
    combiner: Combiner = "mean",
    default_id: int | None = None,
    max_norm: float | None = None,
) -> Tensor:
    """Combine embeddings as `embedding_lookup_sparse` does; skip invalid ids and empty rows.

    Ids below 0, and entries with a weight of 0 or less (except with ``"sum"``), are skipped. A row without valid
    ids gives zeros, or the embedding of `default_id`.

    Example:
        >>> import torch, stratagem as sg
        >>> table = torch.tensor([[1.0], [2.0]])
        >>> ids = torch.sparse_coo_tensor([[0, 1], [0, 0]], [1, -1], (3, 1), check_invariants=True)
        >>> sg.nn.safe_embedding_lookup_sparse(table, ids)
        tensor([[2.],
                [0.],
                [0.]])
    """
    _check_combiner(combiner)
    examples, ids = _entries(sparse_ids)
    weights = None if sparse_weights is None else _weights(sparse_weights, sparse_ids)
    keep = ids >= 0
    if weights is not None and combiner != "sum":
        keep &= weights > 0
    examples, ids = examples[keep], ids[keep]
    weights = None if weights is None else weights[keep]
    count = sparse_ids.shape[0]
    if default_id is not None:
        empty = torch.ones(count, dtype=torch.bool).index_fill_(0, examples, False)
        lonely = empty.nonzero().flatten()
        examples = torch.cat([examples, lonely])
        ids = torch.cat([ids, torch.full_like(lonely, default_id)])
        if weights is not None:
            weights = torch.cat([weights, weights.new_ones(lonely.numel())])
    return _combine(embedding_weights, examples, ids, weights, (count, combiner, max_norm))


def _combine(
    params: Any,
    examples: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    how: tuple[int, Combiner, float | None],
) -> Tensor:
    count, combiner, max_norm = how
    rows = embedding_lookup(params, ids, max_norm)
    spread = [1] * (rows.dim() - 1)
    if weights is not None:
        rows = rows * weights.to(rows.dtype).reshape(-1, *spread)
    total = rows.new_zeros(count, *rows.shape[1:]).index_add(0, examples, rows)
    if combiner == "sum":
        return total
    ones = rows.new_ones(ids.numel()) if weights is None else weights.to(rows.dtype)
    parts = ones if combiner == "mean" else ones.square()
    divisor = rows.new_zeros(count).index_add(0, examples, parts)
    if combiner == "sqrtn":
        divisor = divisor.sqrt()
    # A row without ids is zeros, not 0/0.
    divisor = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
    return total / divisor.reshape(-1, *spread)


def _entries(sparse: Tensor) -> tuple[Tensor, Tensor]:
    if sparse.layout != torch.sparse_coo or sparse.sparse_dim() != sparse.dim():
        raise ValueError(
            f"ids of layout {sparse.layout} were given: expected a sparse (COO) matrix of ids, as "
            "torch.sparse_coo_tensor(indices, ids, size) makes."
        )
    # Not coalesced on purpose: coalescing would add up ids that share a place.
    return sparse._indices()[0], sparse._values().long()


def _weights(sparse: Tensor, ids: Tensor) -> Tensor:
    if sparse.layout != torch.sparse_coo or not torch.equal(sparse._indices(), ids._indices()):
        raise ValueError(
            "the weights are not at the places of the ids: expected a sparse (COO) matrix with the "
            "same indices."
        )
    return sparse._values()


def _check_combiner(combiner: str) -> None:
    if combiner not in ("mean", "sqrtn", "sum"):
        raise ValueError(f"combiner={combiner!r} is not known: expected 'mean', 'sqrtn' or 'sum'.")
