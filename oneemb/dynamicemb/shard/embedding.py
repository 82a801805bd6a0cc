"""EmbeddingCollections in which some tables are dynamic; see `oneemb.dynamicemb.shard`."""

from collections.abc import Mapping
from typing import Any

import torch
import torchrec
from torchrec.distributed.embedding import EmbeddingCollectionSharder as TorchRecSharder
from torchrec.distributed.types import QuantizedCommCodecs

from oneemb.dynamicemb.shard.sharded import DynamicSharder, ShardedDynamic
from oneemb.torchrec import EmbeddingCollection, EmbeddingCollectionSharder

__all__ = ["DynamicEmbeddingCollectionSharder", "ShardedDynamicEmbeddingCollection"]


class ShardedDynamicEmbeddingCollection(ShardedDynamic):
    """Sharded form of an EmbeddingCollection, made by `DynamicEmbeddingCollectionSharder`."""


class DynamicEmbeddingCollectionSharder(DynamicSharder):
    """Shards TorchRec's EmbeddingCollections in which some tables are dynamic.

    Args:
        fused_params: the optimizer and its options, by FBGEMM's names.
        qcomm_codecs_registry: result of `get_qcomm_codecs_registry`; same as for the sharders of `oneemb.torchrec`.
        use_index_dedup: for tables that are not dynamic, on a GPU. Each key of a dynamic table is always sent once.
        seed: rows of dynamic tables are a pure function of (seed, table, id).
        num_threads: threads that run the kernels; None = one for each core.

    Raises:
        ValueError: an option of `fused_params` is not supported; the message names it.
    """

    _stock, _of = TorchRecSharder, torchrec.EmbeddingCollection
    _own, _own_sharder = EmbeddingCollection, EmbeddingCollectionSharder
    _sharded = ShardedDynamicEmbeddingCollection

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        *,
        seed: int = 0,
        num_threads: int | None = None,
    ):
        # FBGEMM deduplicates only on GPUs.
        dedup = use_index_dedup and torch.cuda.is_available()
        super().__init__(fused_params, qcomm_codecs_registry, seed, num_threads, use_index_dedup=dedup)
