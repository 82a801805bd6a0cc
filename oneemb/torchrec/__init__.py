"""TorchRec's modules over tables that grow: the same configs, the same inputs and outputs, any int64 as an id.

    from oneemb.torchrec import EmbeddingBagCollection, EmbeddingCollection

    ebc = EmbeddingBagCollection(tables=[EmbeddingBagConfig(...)])        in place of torchrec's class
    ebc(keyed_jagged_tensor)                                              gives a KeyedTensor

docs/torchrec.md says what to install, what is the same and what is not.
"""

try:
    import torchrec as _torchrec
except ImportError as error:
    raise ImportError(
        "oneemb.torchrec needs torchrec, and that fbgemm: pip install 'oneemb[torchrec]'; on a machine without a GPU,"
        " pip install fbgemm-gpu-cpu tensordict pyre-extensions iopath, then pip install --no-deps torchrec"
    ) from error

from oneemb.torchrec.model_parallel import DistributedModelParallel
from oneemb.torchrec.modules import EmbeddingBagCollection, EmbeddingCollection
from oneemb.torchrec.sharded import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from oneemb.torchrec.sharder import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder, get_default_sharders

__all__ = [
    "DistributedModelParallel", "EmbeddingBagCollection", "EmbeddingBagCollectionSharder", "EmbeddingCollection",
    "EmbeddingCollectionSharder", "ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection", "get_default_sharders",
]  # fmt: skip

del _torchrec
