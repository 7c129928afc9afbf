"""Public names of dynamic embedding tables and table lookups.

Example:
    >>> import torch, stratagem as sg
    >>> sg.nn.embedding_lookup(torch.eye(3), torch.tensor([1]))
    tensor([[0., 1., 0.]])
"""

from stratagem._ps.tables.dynamic_embedding import DynamicEmbedding, DynamicEmbeddingBag
from stratagem._ps.tables.lookup import (
    embedding_lookup,
    embedding_lookup_sparse,
    safe_embedding_lookup_sparse,
)

__all__ = [
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "safe_embedding_lookup_sparse",
]
