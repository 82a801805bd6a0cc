"""NVIDIA's dynamicemb, by its own names, on the CPU and on GPUs: TorchRec's collections with tables that grow.

    import oneemb.dynamicemb as dynamicemb
    from oneemb.dynamicemb.planner import DynamicEmbParameterConstraints, ...
    from oneemb.dynamicemb.shard import DynamicEmbeddingCollectionSharder

A script that imports `dynamicemb` itself runs unchanged after `oneemb.compat.install("dynamicemb")`. docs/dynamicemb.md
says where this package differs from dynamicemb.
"""

from oneemb.kernels.extras import not_loaded

try:
    import fbgemm_gpu as _fbgemm_gpu
    import torchrec as _torchrec
except (ImportError, OSError) as error:
    raise not_loaded("oneemb.dynamicemb", error, "torchrec") from error

from oneemb.dynamicemb.dump_load import DynamicEmbDump, DynamicEmbLoad
from oneemb.dynamicemb.dynamicemb_config import (
    BATCH_SIZE_PER_DUMP,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    ScoreStrategy,
    align_to_table_size,
    data_type_to_dtype,
    data_type_to_dyn_emb,
    dyn_emb_to_torch,
    get_sharded_table_capacity,
    get_table_value_bytes,
    string_to_evict_strategy,
    torch_to_dyn_emb,
)
from oneemb.dynamicemb.embedding_admission import FrequencyAdmissionStrategy, KVCounter
from oneemb.dynamicemb.optimizer import EmbOptimType, OptimizerArgs
from oneemb.dynamicemb.types import (
    BUCKET_ALIGNMENT,
    DEMB_TABLE_ALIGN_SIZE,
    MAX_BUCKET_CAPACITY,
    AdmissionStrategy,
    Counter,
)

__all__ = [
    "BATCH_SIZE_PER_DUMP", "BUCKET_ALIGNMENT", "DEMB_TABLE_ALIGN_SIZE", "MAX_BUCKET_CAPACITY", "AdmissionStrategy",
    "Counter", "DynamicEmbCheckMode", "DynamicEmbDump", "DynamicEmbEvictStrategy", "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode", "DynamicEmbLoad", "DynamicEmbPoolingMode", "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions", "EmbOptimType", "FrequencyAdmissionStrategy", "KVCounter", "OptimizerArgs",
    "ScoreStrategy", "align_to_table_size", "data_type_to_dtype", "data_type_to_dyn_emb", "dyn_emb_to_torch",
    "get_sharded_table_capacity", "get_table_value_bytes", "string_to_evict_strategy", "torch_to_dyn_emb",
]  # fmt: skip

del _fbgemm_gpu, _torchrec
