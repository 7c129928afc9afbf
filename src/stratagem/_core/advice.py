"""What to do about errors that torch raises in a replica for a reason torch cannot know.

The exception stays as it is, type, message and traceback; the advice becomes a note on it.
"""

from __future__ import annotations

from collections.abc import Sequence


def advice(error: BaseException, replica_id: int, rows: Sequence[int] | None, size: int) -> str:
    """What a strategy has to say about an error in one of several replicas; "" if nothing.

    Args:
        error: as raised in the replica.
        replica_id: where.
        rows: rows of the global batch that each replica got; None if nobody knows.
        size: number of replicas.

    Example:
        >>> from stratagem._core.advice import advice
        >>> error = ValueError("Expected more than 1 value per channel when training, got …")
        >>> advice(error, 1, (2, 1), 2).split(". ")[0]
        '(replica 1 got 1 of the 3 rows of this batch'
        >>> advice(KeyError("x"), 1, (2, 1), 2)
        ''
    """
    if isinstance(error, ValueError) and "Expected more than 1 value per channel" in str(error):
        return _batch_norm(replica_id, rows, size)
    return ""


def _batch_norm(replica_id: int, rows: Sequence[int] | None, size: int) -> str:
    share = (
        f"replica {replica_id} got too few rows of this batch"
        if rows is None
        else f"replica {replica_id} got {rows[replica_id]} of the {sum(rows)} rows of this batch"
    )
    return (
        f"({share}. BatchNorm in training takes the statistics of each replica's own rows, and one "
        f"value has no variance: train {size} replicas on batches of at least {2 * size} rows and "
        "leave out a smaller last one (batch(n, drop_remainder=True), DataLoader(drop_last=True)); or "
        "under the scope nn.SyncBatchNorm.convert_sync_batchnorm(model), which takes the statistics "
        "of the whole batch; or use GroupNorm or LayerNorm.)"
    )
