"""Embeddings for arbitrary int64 ids: an id gets a row when it is first used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from stratagem._core.key_index import KEY, KINDS, ORDERS, PROTECTED, KeyRule
from stratagem._ps.tables.keyed_rows import KeyedPart, KeyedRows, LocalKeys
from stratagem._ps.tables.table_parameter import TableParameter
from stratagem._wire.shm import zeros_apart, zeros_on_disk

_SEEDS = 1 << 62
_PAGE_ROWS = 1 << 16


class DynamicTable(nn.Module):
    """Rows by id; base of the two layers.

    Attributes:
        weight: the rows; those of ids that were not seen are zeros and take no memory.
        keys: ids of the rows, with the last use and the count of each; not trained.
        epoch: counts restores of the table: rows that a worker remembers are those of an epoch.
    """

    weight: nn.Parameter
    keys: nn.Parameter

    def __init__(
        self,
        dim: int,
        *,
        max_rows: int = 1 << 20,
        init: Literal["normal", "uniform", "zeros"] = "normal",
        scale: float = 1.0,
        seed: int | None = None,
        admit_after: int = 1,
        admit_probability: float | None = None,
        max_age: int | None = None,
        evict: Literal["age", "count"] | None = None,
        on_disk: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(dim, max_rows, init, admit_after, admit_probability, max_age, evict)
        self.embedding_dim = dim
        self._rule = KeyRule(
            width=dim,
            max_rows=max_rows,
            seed=int(torch.randint(_SEEDS, (), dtype=torch.int64)) if seed is None else seed,
            kind=init,
            scale=scale,
            admit_after=admit_after,
            admit_probability=admit_probability or 0.0,
            max_age=max_age or 0,
            evict=evict or "",
            on_disk=on_disk,
        )
        rows = KeyedPart(self._rule)
        self.weight = nn.Parameter(_memory(rows, dim, dtype or torch.get_default_dtype()))
        keys = _memory(KeyedPart(self._rule, rows), 3, torch.int64)
        self.keys = nn.Parameter(keys, requires_grad=False)
        self.epoch = 0
        self._local = LocalKeys(self._rule)

    def __len__(self) -> int:
        """Return the number of ids that have a row."""
        keys = self.keys
        if isinstance(keys, TableParameter):
            return len(_keys_of(self.weight))
        return len(self._local.index(keys))

    def items(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ids and rows, some thousands at a time: the whole table need not fit into memory.

        Example:
            >>> import torch, stratagem as sg
            >>> table = sg.nn.DynamicEmbedding(2, init="zeros")
            >>> rows = table(torch.tensor([7, -3]))
            >>> [(ids.tolist(), rows.shape) for ids, rows in table.items()]
            [([-3, 7], torch.Size([2, 2]))]
        """
        weight, keys = self.weight, self.keys
        if isinstance(weight, TableParameter):
            for ids, rows in _keys_of(weight).pages():
                yield ids, weight.source.rows(rows)
            return
        used = torch.from_numpy(self._local.index(keys).taken())
        for some in used.split(_PAGE_ROWS):
            yield keys.detach()[some, KEY], weight.detach()[some]

    def export(self) -> tuple[Tensor, Tensor]:
        """Return all ids, ascending, and their rows.

        Example:
            >>> import torch, stratagem as sg
            >>> table = sg.nn.DynamicEmbedding(2, init="zeros")
            >>> rows = table(torch.tensor([7, -3]))
            >>> table.export()
            (tensor([-3,  7]), tensor([[0., 0.],
                    [0., 0.]]))
        """
        pages = list(self.items())
        ids = torch.cat([one for one, _ in pages]) if pages else torch.empty(0, dtype=torch.int64)
        if not pages:
            return ids, torch.empty(0, self.embedding_dim, dtype=self.weight.dtype)
        order = ids.argsort()
        return ids[order], torch.cat([rows for _, rows in pages])[order]

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the row of each id, and which ids have one (None: all)."""
        if ids.dtype.is_floating_point or ids.dtype in (torch.bool, torch.complex64):
            raise ValueError(f"ids have {ids.dtype}: expected integers.")
        weight, keys = self.weight, self.keys
        if keys.device.type != "cpu":
            raise NotImplementedError(
                f"a {type(self).__name__} keeps its rows in the host's memory, but it was moved to "
                f"{keys.device}. Leave it on the CPU and move its output."
            )
        create = self.training and torch.is_grad_enabled() and weight.requires_grad
        wanted = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
        if isinstance(weight, TableParameter):
            try:
                rows = _keys_of(weight).rows(self._rule, wanted, create=create, epoch=self.epoch)
            except MemoryError as error:  # a server knows the short name only
                name = weight.source.name.removesuffix(".weight")
                raise MemoryError(f"{type(self).__name__} {name!r}: {error}") from error
        else:
            rows = self._local.rows(keys, weight, wanted, create=create)
        found = torch.from_numpy(rows)
        has_row = found >= 0
        return found.view(ids.shape), None if bool(has_row.all()) else has_row.view(ids.shape)

    def _rows(self, ids: Tensor, rows: Tensor, has_row: Tensor | None) -> Tensor:
        """Return one row for each id, given what `_find` returned."""
        if has_row is None:
            return F.embedding(rows, self.weight, sparse=True)
        absent = self._absent(ids[~has_row.to(ids.device)])
        made = absent.new_zeros(*ids.shape, self.embedding_dim)
        made = made.masked_scatter(~has_row.unsqueeze(-1), absent)
        # Also without any known id: the result is part of a graph, as that of every other batch.
        known = F.embedding(rows[has_row], self.weight, sparse=True)
        return made.index_put(has_row.nonzero(as_tuple=True), known)

    def _absent(self, ids: Tensor) -> Tensor:
        """Return what ids without a row give: the values that they would begin with, or zeros until they are admitted."""
        wanted = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
        dtype = self.weight.dtype
        if not self._rule.admits_at_once:
            return torch.zeros(wanted.size, self.embedding_dim, dtype=dtype)
        return torch.from_numpy(self._rule.first_values(wanted)).to(dtype)

    def frozen(self) -> nn.Module:
        """Return a plain layer with the current rows, for ``torch.export`` and serving without Stratagem.

        Ids without a row give zeros.

        Example:
            >>> import torch, stratagem as sg
            >>> table = sg.nn.DynamicEmbedding(2)
            >>> rows = table(torch.tensor([7, -3]))
            >>> table.frozen()(torch.tensor([7, 8])).abs().sum(1) > 0
            tensor([ True, False])
        """
        return FrozenEmbedding(*self.export())

    @override
    def extra_repr(self) -> str:
        rule = self._rule
        more = [f"{name}={value!r}" for name, value in _settings(rule) if value]
        return ", ".join([f"{self.embedding_dim}", f"max_rows={rule.max_rows}", *more])


class DynamicEmbedding(DynamicTable):
    """An embedding for any int64 ids: an id gets a row when it is first used in training.

    Use it as ``nn.Embedding``, without knowing how many ids there are. Its gradients are sparse: train it with
    ``torch.optim.SGD``, ``Adagrad``, ``SparseAdam``, ``sg.optim.LazyAdam`` or ``sg.optim.RowWiseAdagrad``. Hash text to ids
    with ``sg.data.hash_bucket(text, 2**63 - 1)``.

    In training mode, with gradients enabled, a new id gets a row. Otherwise the table does not change, and an
    id without a row gives the values that its row would begin with.

    Args:
        dim: numbers in a row.
        max_rows: the largest number of rows. Only rows in use take memory, on parameter servers also for optimizer
            state. Choose it large: a checkpoint fits only a table with the same `max_rows`.
        init: first values of a row: ``normal``, ``uniform`` or ``zeros``. They depend only on the id and the seed.
        scale: standard deviation of ``normal``; ``uniform`` is from -`scale` to `scale`.
        seed: seed of the first values; by default drawn from torch's generator.
        admit_after: an id gets a row when it has been seen this often; until then it gives zeros and is not trained.
        admit_probability: an id gets a row with this probability each time it is seen.
        max_age: remove rows that were not used for this many training lookups in the table (at least 64; at the
            latest after a quarter more).
        evict: if the table is full, remove the least recently used rows (``age``) or the least often used rows
            (``count``). By default a full table raises MemoryError.
        on_disk: keep the rows in an unnamed file in ``STRATAGEM_TABLE_DIRECTORY`` (``/var/tmp``), with space reserved
            for `max_rows`. It disappears with its process. On parameter servers the optimizer state is also on disk.
        dtype: dtype of the rows.

    Example:
        >>> import torch, stratagem as sg
        >>> table = sg.nn.DynamicEmbedding(4, max_rows=1000)
        >>> rows = table(torch.tensor([[10**18, -5], [-5, 7]]))
        >>> rows.shape, len(table), bool((rows[0, 1] == rows[1, 0]).all())
        (torch.Size([2, 2, 4]), 3, True)
    """

    @override
    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, in their shape."""
        return self._rows(ids, *self._find(ids))


class DynamicEmbeddingBag(DynamicTable):
    """Sums or means of the rows of several ids; rows are made as in `DynamicEmbedding`.

    Args:
        dim: numbers in a row.
        mode: ``sum``, ``mean`` or ``max``.
        include_last_offset: whether offsets have the number of ids as their last entry.
        settings: as of `DynamicEmbedding`.

    Example:
        >>> import torch, stratagem as sg
        >>> bag = sg.nn.DynamicEmbeddingBag(4, mode="sum", max_rows=1000)
        >>> bag(torch.tensor([5, 900, -7]), torch.tensor([0, 2])).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        dim: int,
        *,
        mode: Literal["sum", "mean", "max"] = "mean",
        include_last_offset: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(dim, **settings)
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode={mode!r}: expected 'sum', 'mean' or 'max'.")
        self.mode = mode
        self.include_last_offset = include_last_offset

    @override
    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return one combined row for each bag; the arguments are those of ``nn.EmbeddingBag``."""
        rows, has_row = self._find(ids)
        weight: Tensor = self.weight
        is_sparse = self.mode != "max"  # as torch: no sparse gradients for "max"
        if has_row is not None or not is_sparse:
            flat = None if has_row is None else has_row.reshape(-1)
            weight, is_sparse = self._rows(ids.reshape(-1), rows.reshape(-1), flat), False
            rows = torch.arange(ids.numel()).view(ids.shape)
        return F.embedding_bag(
            rows,
            weight,
            offsets,
            mode=self.mode,
            sparse=is_sparse,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )

    @override
    def frozen(self) -> nn.Module:
        """Return a plain layer with the current rows that computes the same bags; ids without a row count as zeros.

        Example:
            >>> import torch, stratagem as sg
            >>> bag = sg.nn.DynamicEmbeddingBag(2, mode="sum")
            >>> rows = bag(torch.tensor([[7, -3]]))
            >>> torch.equal(bag.frozen()(torch.tensor([[7, -3]])), rows)
            True
        """
        return FrozenEmbeddingBag(*self.export(), self.mode, self.include_last_offset)


class FrozenEmbedding(nn.Module):
    """Rows by id, in plain torch operators; ids without a row give zeros.

    Args:
        ids: the ids, ascending.
        rows: their rows.

    Example:
        >>> layer = FrozenEmbedding(torch.tensor([3, 9]), torch.ones(2, 2))
        >>> layer(torch.tensor([9, 4]))
        tensor([[1., 1.],
                [0., 0.]])
    """

    ids: Tensor
    rows: Tensor

    def __init__(self, ids: Tensor, rows: Tensor) -> None:
        super().__init__()
        if not len(ids):
            ids, rows = torch.zeros(1, dtype=torch.int64), rows.new_zeros(1, *rows.shape[1:])
        self.register_buffer("ids", ids)
        self.register_buffer("rows", rows)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        """Return one row for each id."""
        places = torch.searchsorted(self.ids, ids).clamp(max=self.ids.shape[0] - 1)
        is_known = (self.ids[places] == ids).unsqueeze(-1)
        return F.embedding(places, self.rows) * is_known


class FrozenEmbeddingBag(FrozenEmbedding):
    """Bags of rows by id, in plain torch operators; ids without a row count as zeros.

    Args:
        ids: the ids, ascending.
        rows: their rows.
        mode: ``sum``, ``mean`` or ``max``.
        include_last_offset: whether offsets have the number of ids as their last entry.

    Example:
        >>> layer = FrozenEmbeddingBag(torch.tensor([3, 9]), torch.ones(2, 2), "mean", False)
        >>> layer(torch.tensor([[9, 4], [3, 9]]))
        tensor([[0.5000, 0.5000],
                [1.0000, 1.0000]])
    """

    def __init__(self, ids: Tensor, rows: Tensor, mode: str, include_last_offset: bool) -> None:
        super().__init__(ids, rows)
        self.mode = mode
        self.include_last_offset = include_last_offset

    @override
    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return one combined row for each bag; the arguments are those of ``nn.EmbeddingBag``."""
        return F.embedding_bag(
            torch.arange(ids.numel(), device=ids.device).view(ids.shape),
            super().forward(ids.reshape(-1)),
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )


def note_restored(module: nn.Module) -> None:
    """Let workers forget the rows that they remember of the dynamic tables in a module."""
    for one in module.modules():
        if isinstance(one, DynamicTable):
            one.epoch += 1


def _memory(part: KeyedPart, width: int, dtype: torch.dtype) -> Tensor:
    """Return zeros that take memory when they are written; a table on servers in their strategy's scope."""
    # One number for all: an ordinary tensor of this size may be larger than memory.
    made = torch.empty_strided((KeyedRows.of(part), width), (0, 0), dtype=dtype)
    if isinstance(made, TableParameter):
        return made
    if made.device.type == "meta":
        return torch.empty((part.rule.rows, width), dtype=dtype)
    make = zeros_on_disk if part.is_on_disk else zeros_apart
    return make((part.rule.rows, width), dtype)


def _keys_of(weight: Any) -> Any:
    """Return the keys of a table on parameter servers (`RemoteKeys`, of a package above)."""
    return weight.source.keys


def _settings(rule: KeyRule) -> list[tuple[str, Any]]:
    after = rule.admit_after if rule.admit_after > 1 else 0
    return [
        ("admit_after", after),
        ("admit_probability", rule.admit_probability),
        ("max_age", rule.max_age),
        ("evict", rule.evict),
        ("on_disk", rule.on_disk),
    ]


def _check(
    dim: int,
    max_rows: int,
    init: str,
    admit_after: int,
    admit_probability: float | None,
    max_age: int | None,
    evict: str | None,
) -> None:
    for name, value in (("dim", dim), ("max_rows", max_rows), ("admit_after", admit_after)):
        if value < 1:
            raise ValueError(f"{name}={value!r}: expected at least 1.")
    if max_age is not None and max_age < PROTECTED:
        raise ValueError(
            f"max_age={max_age!r}: expected at least {PROTECTED}, or None: rows of the last {PROTECTED} lookups stay, "
            "because their gradients may still arrive."
        )
    if init not in KINDS:
        raise ValueError(f"init={init!r}: expected one of {', '.join(KINDS)}.")
    if (evict or "") not in ORDERS:
        raise ValueError(f"evict={evict!r}: expected 'age', 'count' or None.")
    if admit_probability is not None:
        if not 0.0 < admit_probability <= 1.0:
            raise ValueError(
                f"admit_probability={admit_probability!r}: expected more than 0, up to 1."
            )
        if admit_after > 1:
            raise ValueError("give admit_after or admit_probability, not both.")
