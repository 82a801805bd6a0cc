"""Options of a table, with dynamicemb's names, and the policies, sizes and dtypes that follow from them."""

import enum
import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.types import DataType

from oneemb.dynamicemb.embedding_admission import FrequencyAdmissionStrategy, KVCounter
from oneemb.dynamicemb.optimizer import get_optimizer_state_dim
from oneemb.dynamicemb.types import (
    BUCKET_ALIGNMENT,
    DEMB_TABLE_ALIGN_SIZE,
    MAX_BUCKET_CAPACITY,
    AdmissionStrategy,
    DynamicEmbDataType,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    EvictStrategy,
    bounds_of,
    initializer_of,
)
from oneemb.foreign.dynamicemb_files import DIST_TYPES
from oneemb.options import StoreOptions
from oneemb.policies import LFU, AdmitAfter, AdmitWhere, GivenScore, RowPolicy

__all__ = [
    "BATCH_SIZE_PER_DUMP", "DEFAULT_INDEX_TYPE", "DynamicEmbCheckMode", "DynamicEmbEvictStrategy",
    "DynamicEmbInitializerArgs", "DynamicEmbInitializerMode", "DynamicEmbPoolingMode", "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions", "ScoreStrategy", "align_to_table_size", "complete_initializer_args",
    "data_type_to_dtype", "data_type_to_dyn_emb", "dyn_emb_to_torch", "evict_strategy_of", "evicting_strategy",
    "get_sharded_table_capacity", "get_table_value_bytes", "policy_of", "string_to_evict_strategy", "torch_to_dyn_emb",
]  # fmt: skip

BATCH_SIZE_PER_DUMP = 65536
DEFAULT_INDEX_TYPE = torch.int64

_COUNTERS = 1 << 20


@enum.unique
class DynamicEmbCheckMode(enum.IntEnum):
    """Treatment of ids for which a table has no room, because a lookup has more rows than fit at a time.

    ERROR: the lookup raises StoreFullError, which says how many rows there have to be. WARNING: a warning has their
    number; they read as zeros, and their gradients are dropped. IGNORE: the same, without a warning.
    """

    ERROR = 0
    WARNING = 1
    IGNORE = 2


class DynamicEmbPoolingMode(enum.IntEnum):
    """Pooling of a bag: the sum, the mean, or none, a row for each id."""

    SUM = 0
    MEAN = 1
    NONE = 2


@enum.unique
class DynamicEmbEvictStrategy(enum.Enum):
    """Rule by which rows are evicted from a full table. It follows from the score strategy; an option of this name has
    no effect."""

    LRU = EvictStrategy.KLru
    LFU = EvictStrategy.KLfu
    EPOCH_LRU = EvictStrategy.KEpochLru
    EPOCH_LFU = EvictStrategy.KEpochLfu
    CUSTOMIZED = EvictStrategy.KCustomized


class DynamicEmbScoreStrategy(enum.IntEnum):
    """Score of a row; rows of the least score are evicted from a full table first.

    TIMESTAMP: time of the last lookup, in nanoseconds. STEP: number of the table's last lookup of the row. CUSTOMIZED:
    the score that `set_score` set before that lookup. LFU: number of ids of lookups that were the row's. NO_EVICTION:
    the row's place in the table, which has no capacity.
    """

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4


ScoreStrategy = DynamicEmbScoreStrategy | tuple[DynamicEmbScoreStrategy, ...]
"""One strategy, or (TIMESTAMP, LFU) in either order: rows are evicted by LFU, incremental dumps go by time."""


@dataclass
class DynamicEmbTableOptions:
    """Options of a table, given by keywords: their order has changed in dynamicemb.

    Args:
        embedding_dtype, dim: of weights; None = as the table's config says.
        max_capacity: rows of a rank at most; None = the planner sets it, from `num_embeddings` of the config.
        initializer_args, eval_initializer_args: initial weights of rows, and values of ids without a row in eval mode.
        score_strategy: one strategy or a tuple; rows of the least score are evicted first.
        safe_check_mode: treatment of ids for which there is no room.
        caching: on a GPU, keep rows in the host's memory and a cache of them on the GPU.
        global_hbm_for_values, local_hbm_for_values: bytes of that cache, of all ranks and of each.
        external_storage: where rows live: made by one of `oneemb.make_*_store_options`.
        dist_type: "continuous", "roundrobin" or "hash_roundrobin": by which ranks dumps are split. Lookups do not
            depend on it.
        admit_strategy, admission_counter: which ids get a row, and how many are counted until they do.
        training: off, a table has no optimizer's state, and cannot be trained.
        device_id, evict_strategy, init_capacity, max_load_factor, bucket_capacity, index_type, score_type, block_size,
            io_block_size, io_by_cpu, use_constant_memory, reserved_key_start_bit, num_of_buckets_per_alloc: describe a
            GPU's hash table and have no effect; bucket_capacity is read by `get_sharded_table_capacity`.

    Raises:
        TypeError, ValueError: an option is not as above.
    """

    _: KW_ONLY
    embedding_dtype: torch.dtype | None = None
    dim: int | None = None
    max_capacity: int | None = None
    evict_strategy: DynamicEmbEvictStrategy = DynamicEmbEvictStrategy.LRU
    local_hbm_for_values: int = 0
    device_id: int | None = None
    training: bool = True
    initializer_args: DynamicEmbInitializerArgs = field(default_factory=DynamicEmbInitializerArgs)
    eval_initializer_args: DynamicEmbInitializerArgs = field(
        default_factory=lambda: DynamicEmbInitializerArgs(DynamicEmbInitializerMode.CONSTANT)
    )
    caching: bool = False
    init_capacity: int | None = None
    max_load_factor: float = 0.5
    score_strategy: ScoreStrategy | None = DynamicEmbScoreStrategy.TIMESTAMP
    bucket_capacity: int = 128
    safe_check_mode: DynamicEmbCheckMode = DynamicEmbCheckMode.IGNORE
    global_hbm_for_values: int = 0
    external_storage: StoreOptions | None = None
    index_type: torch.dtype | None = None
    dist_type: str = "roundrobin"
    admit_strategy: AdmissionStrategy | None = None
    admission_counter: KVCounter | None = None
    score_type: torch.dtype = torch.uint64
    block_size: int = 128
    io_block_size: int = 1024
    io_by_cpu: bool = False
    use_constant_memory: bool = False
    reserved_key_start_bit: int = 0
    num_of_buckets_per_alloc: int = 1

    def __post_init__(self) -> None:
        if self.dist_type not in DIST_TYPES:
            raise ValueError(f"dist_type must be one of {', '.join(DIST_TYPES)}, got {self.dist_type!r}")
        self.score_strategy = _checked(self.score_strategy)
        if self.external_storage is not None and not isinstance(self.external_storage, StoreOptions):
            raise TypeError(
                "external_storage must be made by one of oneemb.make_*_store_options, such as"
                f" make_cached_ssd_store_options(cache_budget_mb, path), got {self.external_storage!r}"
            )
        if self.admit_strategy is not None and not isinstance(self.admit_strategy, AdmissionStrategy):
            raise TypeError(f"admit_strategy must be an AdmissionStrategy, got {self.admit_strategy!r}")


def _checked(strategy: Any) -> ScoreStrategy | None:
    if strategy is None:  # of a table that is not dynamic
        return None
    one_by_one = strategy if isinstance(strategy, tuple) else (strategy,)
    if not all(isinstance(one, DynamicEmbScoreStrategy) for one in one_by_one):
        raise TypeError(f"score_strategy must be of DynamicEmbScoreStrategy, or a tuple of them, got {strategy!r}")
    if len(one_by_one) == 1:
        return one_by_one[0]
    if sorted(one_by_one) != [DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU]:
        raise NotImplementedError(f"score_strategy of several must be (TIMESTAMP, LFU), in any order, got {strategy!r}")
    return tuple(one_by_one)


def evicting_strategy(strategy: ScoreStrategy | None) -> DynamicEmbScoreStrategy:
    """Strategy by which rows are evicted."""
    return DynamicEmbScoreStrategy.LFU if isinstance(strategy, tuple) else strategy or DynamicEmbScoreStrategy.TIMESTAMP


def evict_strategy_of(strategy: ScoreStrategy | None) -> EvictStrategy:
    """Name of a strategy in dumps."""
    its = {DynamicEmbScoreStrategy.TIMESTAMP: EvictStrategy.KLru, DynamicEmbScoreStrategy.LFU: EvictStrategy.KLfu}
    return its.get(evicting_strategy(strategy), EvictStrategy.KCustomized)


def policy_of(options: DynamicEmbTableOptions, num_embeddings: int | None, ranks: int) -> RowPolicy:
    """Policy of the rows of a table with these options, which so many ranks own together; `num_embeddings` of its
    config, None = there is none."""
    strategy, capacity = evicting_strategy(options.score_strategy), options.max_capacity
    evict: Any = LFU() if strategy is DynamicEmbScoreStrategy.LFU else GivenScore(on_use=True)
    if strategy is DynamicEmbScoreStrategy.NO_EVICTION:
        evict = capacity = None
    elif capacity is not None and ranks > 1:  # A hash spreads ids over ranks, nearly evenly.
        capacity += math.ceil(5 * math.sqrt(capacity))
    refuses = capacity is not None and options.safe_check_mode != DynamicEmbCheckMode.ERROR
    admit = _admission_of(options)
    refused: Any = "initial" if admit is not None else "zeros"
    if options.admit_strategy is not None and (begins := options.admit_strategy.initializer_args) is not None:
        refused = initializer_of(begins, num_embeddings)
    return RowPolicy(
        evict, capacity, admit=admit, absent=initializer_of(options.eval_initializer_args, num_embeddings),
        refused=refused, when_full="refuse" if refuses else "raise", timestamps=True,
    )  # fmt: skip


def _admission_of(options: DynamicEmbTableOptions) -> AdmitAfter | AdmitWhere | None:
    strategy, counter = options.admit_strategy, options.admission_counter
    counters = _COUNTERS if counter is None else counter.capacity
    if strategy is None:
        return None
    if type(strategy) is FrequencyAdmissionStrategy:
        return AdmitAfter(max(1, strategy.threshold), counters=counters)

    def admits(table: int, id_N: np.ndarray, count_N: np.ndarray) -> np.ndarray:
        admitted = strategy.admit(torch.from_numpy(id_N), torch.from_numpy(np.ascontiguousarray(count_N)))
        return admitted.cpu().numpy()

    return AdmitWhere(admits, counters=counters)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def complete_initializer_args(
    initializer_args: DynamicEmbInitializerArgs, *, embedding_config: BaseEmbeddingConfig | None = None
) -> DynamicEmbInitializerArgs:
    """Arguments with the bounds that UNIFORM lacks, of a table with this config; a copy if any were missing, else the
    same object. N `num_embeddings` give -1 / sqrt(N) and 1 / sqrt(N), no config 0 and 1."""
    given = initializer_args.lower, initializer_args.upper
    if initializer_args.mode is not DynamicEmbInitializerMode.UNIFORM or None not in given:
        return initializer_args
    bounds = bounds_of(initializer_args, None if embedding_config is None else embedding_config.num_embeddings)
    return replace(initializer_args, lower=bounds[0], upper=bounds[1])


def align_to_table_size(n: int, alignment: int = DEMB_TABLE_ALIGN_SIZE) -> int:
    """The least multiple of `alignment`, but 0, that is n or more."""
    return max(1, -(-int(n) // alignment)) * alignment


def get_sharded_table_capacity(embedding_config: BaseEmbeddingConfig, world_size: int, bucket_capacity: int) -> int:
    """Rows of a table that a rank has at most: its share of `num_embeddings`, rounded up to whole buckets. ValueError
    if there is no rank, or bucket_capacity is no multiple of 16."""
    if world_size < 1:
        raise ValueError(f"world_size must be 1 or more, got {world_size}")
    rows = -(-int(embedding_config.num_embeddings) // world_size)
    if bucket_capacity == MAX_BUCKET_CAPACITY:
        return align_to_table_size(rows, BUCKET_ALIGNMENT)
    if bucket_capacity < 1 or bucket_capacity % BUCKET_ALIGNMENT:
        raise ValueError(
            f"bucket_capacity must be a multiple of {BUCKET_ALIGNMENT}, or MAX_BUCKET_CAPACITY, got {bucket_capacity}"
        )
    return align_to_table_size(rows, bucket_capacity)


def get_table_value_bytes(
    embedding_config: BaseEmbeddingConfig, optimizer_type: EmbOptimType, world_size: int, bucket_capacity: int = 128
) -> int:
    """Bytes of the weights and the optimizer's state of a table, on all ranks, as dynamicemb reckons them."""
    rows = get_sharded_table_capacity(embedding_config, world_size, bucket_capacity) * world_size
    dim, dtype = embedding_config.embedding_dim, data_type_to_dtype(embedding_config.data_type)
    return rows * dtype.itemsize * (dim + get_optimizer_state_dim(optimizer_type, dim, dtype))


# ---- data types -----------------------------------------------------------------------------------------------------

_TORCH = {
    DynamicEmbDataType.Float32: torch.float32, DynamicEmbDataType.BFloat16: torch.bfloat16,
    DynamicEmbDataType.Float16: torch.float16, DynamicEmbDataType.Int64: torch.int64,
    DynamicEmbDataType.UInt64: torch.uint64, DynamicEmbDataType.Int32: torch.int32,
    DynamicEmbDataType.UInt32: torch.uint32, DynamicEmbDataType.Int8: torch.int8, DynamicEmbDataType.UInt8: torch.uint8,
}  # fmt: skip

_OF_TORCHREC = {
    DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16,
    DataType.INT64: torch.int64, DataType.INT32: torch.int32, DataType.INT8: torch.int8, DataType.UINT8: torch.uint8,
}  # fmt: skip


def _found(table: dict[Any, Any], key: Any, what: str) -> Any:
    if key not in table:
        raise ValueError(f"{what} must be one of {', '.join(map(str, table))}, got {key!r}")
    return table[key]


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """torch's dtype of TorchRec's data type; ValueError if there is none."""
    return _found(_OF_TORCHREC, data_type, "a DataType")


def torch_to_dyn_emb(torch_dtype: torch.dtype) -> DynamicEmbDataType:
    """dynamicemb's data type of torch's dtype; ValueError if there is none."""
    return _found({dtype: own for own, dtype in _TORCH.items()}, torch_dtype, "a dtype")


def data_type_to_dyn_emb(data_type: DataType) -> DynamicEmbDataType:
    """dynamicemb's data type of TorchRec's; ValueError if there is none."""
    return torch_to_dyn_emb(data_type_to_dtype(data_type))


def dyn_emb_to_torch(data_type: DynamicEmbDataType) -> torch.dtype:
    """torch's dtype of dynamicemb's data type; ValueError if there is none."""
    return _found({**_TORCH, DynamicEmbDataType.Size_t: torch.int64}, data_type, "a DynamicEmbDataType")


def string_to_evict_strategy(strategy_str: str) -> EvictStrategy:
    """Strategy of this name, such as "KLru"; ValueError if there is none."""
    return _found({one.name: one for one in EvictStrategy}, strategy_str, "an EvictStrategy")
