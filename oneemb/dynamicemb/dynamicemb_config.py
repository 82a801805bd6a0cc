"""Options of a table, with dynamicemb's names, and the policy, sizes and dtypes that follow from them."""

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
    """Treatment of ids that get no row, because one lookup needs more rows than the table can hold.

    ERROR: the lookup raises StoreFullError, which says how many rows the table must have. WARNING: these ids read as
    zeros, their gradients are dropped, and a warning gives their number. IGNORE: the same as WARNING, without a
    warning.
    """

    ERROR = 0
    WARNING = 1
    IGNORE = 2


class DynamicEmbPoolingMode(enum.IntEnum):
    """Pooling of a bag: sum, mean, or NONE, which gives a row for each id."""

    SUM = 0
    MEAN = 1
    NONE = 2


@enum.unique
class DynamicEmbEvictStrategy(enum.Enum):
    """Rule by which rows are evicted from a full table. It follows from the score strategy, so an option of this type
    has no effect."""

    LRU = EvictStrategy.KLru
    LFU = EvictStrategy.KLfu
    EPOCH_LRU = EvictStrategy.KEpochLru
    EPOCH_LFU = EvictStrategy.KEpochLfu
    CUSTOMIZED = EvictStrategy.KCustomized


class DynamicEmbScoreStrategy(enum.IntEnum):
    """Meaning of the score of a row. A full table evicts the rows of lowest score first.

    TIMESTAMP: time of the row's last lookup, in nanoseconds. STEP: number of the table's lookup that last read the row.
    CUSTOMIZED: the score that `set_score` had set at the row's last lookup. LFU: number of times that the row was
    looked up. NO_EVICTION: index of the row in the table, which has no capacity.
    """

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4


ScoreStrategy = DynamicEmbScoreStrategy | tuple[DynamicEmbScoreStrategy, ...]
"""One strategy; or (TIMESTAMP, LFU), in either order: rows are evicted by LFU, and incremental dumps compare times."""


@dataclass
class DynamicEmbTableOptions:
    """Options of a table. They must be given as keywords, since their order has changed in dynamicemb.

    Args:
        embedding_dtype, dim: dtype and number of weights of a row; None = from the table's config.
        max_capacity: largest number of rows on a rank; None = the planner sets it, from `num_embeddings` of the config.
        initializer_args: initial weights of rows.
        eval_initializer_args: values of ids without a row in eval mode.
        score_strategy: one strategy or a tuple; rows of the lowest score are evicted first.
        safe_check_mode: treatment of ids for which the table has no room.
        caching: True = keep rows in host memory, with a cache on the GPU; no effect on the CPU.
        global_hbm_for_values, local_hbm_for_values: size of that cache in bytes, on all ranks and on each rank.
        external_storage: where rows live, made by one of `oneemb.make_*_store_options`.
        dist_type: "continuous", "roundrobin" or "hash_roundrobin"; says how dumps are split into files of ranks. No
            lookup depends on it.
        admit_strategy: decides which ids get a row; None = all ids.
        admission_counter: bound on the number of ids that are counted before they get a row.
        training: False = the table has no optimizer state and cannot be trained.
        device_id, evict_strategy, init_capacity, max_load_factor, bucket_capacity, index_type, score_type, block_size,
            io_block_size, io_by_cpu, use_constant_memory, reserved_key_start_bit, num_of_buckets_per_alloc: describe a
            GPU's hash table and have no effect, except that `get_sharded_table_capacity` reads bucket_capacity.

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
    if strategy is None:  # the table is not dynamic
        return None
    one_by_one = strategy if isinstance(strategy, tuple) else (strategy,)
    if not all(isinstance(one, DynamicEmbScoreStrategy) for one in one_by_one):
        raise TypeError(f"score_strategy must be a DynamicEmbScoreStrategy, or a tuple of them, got {strategy!r}")
    if len(one_by_one) == 1:
        return one_by_one[0]
    if sorted(one_by_one) != [DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU]:
        raise NotImplementedError(
            f"a tuple of score strategies must be (TIMESTAMP, LFU), in any order, got {strategy!r}"
        )
    return tuple(one_by_one)


def evicting_strategy(strategy: ScoreStrategy | None) -> DynamicEmbScoreStrategy:
    """The strategy by which rows are evicted."""
    return DynamicEmbScoreStrategy.LFU if isinstance(strategy, tuple) else strategy or DynamicEmbScoreStrategy.TIMESTAMP


def evict_strategy_of(strategy: ScoreStrategy | None) -> EvictStrategy:
    """Name that dumps have for a score strategy."""
    names = {DynamicEmbScoreStrategy.TIMESTAMP: EvictStrategy.KLru, DynamicEmbScoreStrategy.LFU: EvictStrategy.KLfu}
    return names.get(evicting_strategy(strategy), EvictStrategy.KCustomized)


def policy_of(options: DynamicEmbTableOptions, num_embeddings: int | None, ranks: int) -> RowPolicy:
    """Policy of the rows of a table with these options.

    Args:
        num_embeddings: of the table's config; None = no config.
        ranks: number of ranks that share the rows.
    """
    strategy, capacity = evicting_strategy(options.score_strategy), options.max_capacity
    evict: Any = LFU() if strategy is DynamicEmbScoreStrategy.LFU else GivenScore(on_use=True)
    if strategy is DynamicEmbScoreStrategy.NO_EVICTION:
        evict = capacity = None
    elif capacity is not None and ranks > 1:  # 5 sigma above an equal share of a hash
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
    """`initializer_args` with bounds for UNIFORM: a copy if a bound was missing, else the same object. The bounds are
    -1 / sqrt(N) and 1 / sqrt(N), where N is `num_embeddings`, or 0 and 1 without a config."""
    given = initializer_args.lower, initializer_args.upper
    if initializer_args.mode is not DynamicEmbInitializerMode.UNIFORM or None not in given:
        return initializer_args
    bounds = bounds_of(initializer_args, None if embedding_config is None else embedding_config.num_embeddings)
    return replace(initializer_args, lower=bounds[0], upper=bounds[1])


def align_to_table_size(n: int, alignment: int = DEMB_TABLE_ALIGN_SIZE) -> int:
    """Smallest positive multiple of `alignment` that is at least n."""
    return max(1, -(-int(n) // alignment)) * alignment


def get_sharded_table_capacity(embedding_config: BaseEmbeddingConfig, world_size: int, bucket_capacity: int) -> int:
    """Capacity of a table on one rank: its share of `num_embeddings`, rounded up to whole buckets. ValueError if
    `world_size` is below 1, or `bucket_capacity` is not a multiple of 16."""
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
    """Bytes of a table's weights and optimizer state on all ranks, by dynamicemb's formula."""
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
    """torch's dtype for TorchRec's data type; ValueError if there is none."""
    return _found(_OF_TORCHREC, data_type, "a DataType")


def torch_to_dyn_emb(torch_dtype: torch.dtype) -> DynamicEmbDataType:
    """dynamicemb's data type for torch's dtype; ValueError if there is none."""
    return _found({dtype: own for own, dtype in _TORCH.items()}, torch_dtype, "a dtype")


def data_type_to_dyn_emb(data_type: DataType) -> DynamicEmbDataType:
    """dynamicemb's data type for TorchRec's; ValueError if there is none."""
    return torch_to_dyn_emb(data_type_to_dtype(data_type))


def dyn_emb_to_torch(data_type: DynamicEmbDataType) -> torch.dtype:
    """torch's dtype for dynamicemb's data type; ValueError if there is none."""
    return _found({**_TORCH, DynamicEmbDataType.Size_t: torch.int64}, data_type, "a DynamicEmbDataType")


def string_to_evict_strategy(strategy_str: str) -> EvictStrategy:
    """Strategy with this name, such as "KLru"; ValueError if there is none."""
    return _found({one.name: one for one in EvictStrategy}, strategy_str, "an EvictStrategy")
