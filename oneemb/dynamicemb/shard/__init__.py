"""Sharders of collections of which some tables are dynamic, and what they make.

Dynamic tables are those of `oneemb.torchrec`, with the policies that their options ask for; others are TorchRec's own.
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
