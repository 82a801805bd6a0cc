"""Sharders of collections in which some tables are dynamic, and the sharded collections.

Dynamic tables are tables of `oneemb.torchrec` with the policies that their options ask for; the others are TorchRec's.
"""

from oneemb.dynamicemb.shard.embedding import DynamicEmbeddingCollectionSharder, ShardedDynamicEmbeddingCollection
from oneemb.dynamicemb.shard.embeddingbag import (
    DynamicEmbeddingBagCollectionSharder,
    ShardedDynamicEmbeddingBagCollection,
)

__all__ = [
    "DynamicEmbeddingBagCollectionSharder", "DynamicEmbeddingCollectionSharder", "ShardedDynamicEmbeddingBagCollection",
    "ShardedDynamicEmbeddingCollection",
]  # fmt: skip
