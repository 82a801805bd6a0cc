"""Classes with the names of TorchRec, over tables that grow: same configs, inputs and outputs, and any int64 is an id.

    from oneemb.torchrec import EmbeddingBagCollection, EmbeddingCollection

    ebc = EmbeddingBagCollection(tables=[EmbeddingBagConfig(...)])        in place of torchrec's class
    ebc(keyed_jagged_tensor)                                              gives a KeyedTensor

docs/torchrec.md says what to install and where these classes differ from TorchRec's.
"""

from oneemb.kernels.extras import not_loaded

try:
    import fbgemm_gpu as _fbgemm_gpu
    import torchrec as _torchrec
except (ImportError, OSError) as error:
    raise not_loaded("oneemb.torchrec", error, "torchrec") from error

from oneemb.torchrec.inference import (
    DEFAULT_QUANT_MAPPING,
    DEFAULT_SHARDERS,
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
)
from oneemb.torchrec.modules import EmbeddingBagCollection, EmbeddingCollection
from oneemb.torchrec.quant import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
    EmbeddingCollection as QuantEmbeddingCollection,
)
from oneemb.torchrec.sharded import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from oneemb.torchrec.sharder import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    get_default_sharders,
)

__all__ = [
    "DEFAULT_QUANT_MAPPING", "DEFAULT_SHARDERS", "DistributedModelParallel", "EmbeddingBagCollection",
    "EmbeddingBagCollectionSharder", "EmbeddingCollection", "EmbeddingCollectionSharder", "QuantEmbeddingBagCollection",
    "QuantEmbeddingBagCollectionSharder", "QuantEmbeddingCollection", "QuantEmbeddingCollectionSharder",
    "ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection", "get_default_sharders", "quantize_embeddings",
    "quantize_inference_model", "shard_quant_model",
]  # fmt: skip

del _fbgemm_gpu, _torchrec
