"""Counts of the ids that lookups ask for, and of the distinct rows among them, for each table."""

from __future__ import annotations

from stratagem import metrics

_counters: dict[str, tuple[metrics.Counter, metrics.Counter]] = {}


def count_lookup(table: str, *, ids: int, rows: int) -> None:
    """Count one lookup in the metrics ``table.ids:NAME`` and ``table.rows:NAME``.

    Example:
        >>> count_lookup("doc", ids=4, rows=3)
        >>> metrics.snapshot().counters["table.rows:doc"] >= 3
        True
    """
    found = _counters.get(table)
    if found is None:
        names = (f"table.ids:{table}", f"table.rows:{table}")
        found = _counters[table] = (metrics.counter(names[0]), metrics.counter(names[1]))
    found[0].add(ids)
    found[1].add(rows)
