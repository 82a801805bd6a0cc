"""EmbeddingBagCollections in which some tables are dynamic; see `oneemb.dynamicemb.shard`."""

from collections.abc import Mapping
from typing import Any

import torchrec
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as TorchRecSharder
from torchrec.distributed.types import QuantizedCommCodecs

from oneemb.dynamicemb.shard.sharded import DynamicSharder, ShardedDynamic
from oneemb.torchrec import EmbeddingBagCollection, EmbeddingBagCollectionSharder

__all__ = ["DynamicEmbeddingBagCollectionSharder", "ShardedDynamicEmbeddingBagCollection"]


class ShardedDynamicEmbeddingBagCollection(ShardedDynamic):
    """Sharded form of an EmbeddingBagCollection, made by `DynamicEmbeddingBagCollectionSharder`."""


class DynamicEmbeddingBagCollectionSharder(DynamicSharder):
    """Shards TorchRec's EmbeddingBagCollections in which some tables are dynamic.

    Args:
        fused_params, qcomm_codecs_registry, seed, num_threads: same as for `DynamicEmbeddingCollectionSharder`.
        sharded_module_order_overwrite: passed to TorchRec's sharder, for tables that are not dynamic.
    """

    _stock, _of = TorchRecSharder, torchrec.EmbeddingBagCollection
    _own, _own_sharder = EmbeddingBagCollection, EmbeddingBagCollectionSharder
    _sharded = ShardedDynamicEmbeddingBagCollection

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        sharded_module_order_overwrite: list[str] | None = None,
        *,
        seed: int = 0,
        num_threads: int | None = None,
    ):
        super().__init__(
            fused_params, qcomm_codecs_registry, seed, num_threads,
            sharded_module_order_overwrite=sharded_module_order_overwrite,
        )  # fmt: skip
