"""Enums, initializers, and interfaces of stores, caches and admission, shared by dynamicemb's modules.

Names and values are dynamicemb's.
"""

import abc
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from oneemb.options import (
    IdInitializer,
    Initializer,
    make_constant_initializer,
    make_normal_initializer,
    make_trunc_normal_initializer,
    make_uniform_initializer,
)

__all__ = [
    "BUCKET_ALIGNMENT", "COUNTER_TYPE", "DEBUG_MODULUS", "DEMB_TABLE_ALIGN_SIZE", "EMBEDDING_TYPE", "KEY_TYPE",
    "MAX_BUCKET_CAPACITY", "OPT_STATE_TYPE", "SCORE_TYPE", "AdmissionStrategy", "Cache", "CopyMode", "Counter",
    "DynamicEmbDataType", "DynamicEmbInitializerArgs", "DynamicEmbInitializerMode", "EvictStrategy", "Found",
    "MemoryType", "OptimizerT", "OptionsT", "Storage", "bounds_of", "initializer_of", "torch_dtype_to_np_dtype",
]  # fmt: skip

DEMB_TABLE_ALIGN_SIZE = BUCKET_ALIGNMENT = 16
DEBUG_MODULUS = 100_000
MAX_BUCKET_CAPACITY = 2**63 - 1

KEY_TYPE = SCORE_TYPE = COUNTER_TYPE = torch.int64
EMBEDDING_TYPE = OPT_STATE_TYPE = torch.float32
"""Dtypes of the numbers in the files of a dump."""

torch_dtype_to_np_dtype = {torch.uint64: np.uint64, torch.int64: np.int64, torch.float32: np.float32}

OptionsT = TypeVar("OptionsT")
OptimizerT = TypeVar("OptimizerT")


class DynamicEmbDataType(enum.Enum):
    """Dtype of ids and weights."""

    Float32 = 0
    BFloat16 = 1
    Float16 = 2
    Int64 = 3
    UInt64 = 4
    Int32 = 5
    UInt32 = 6
    Size_t = 7
    Int8 = 8
    UInt8 = 9


class EvictStrategy(enum.Enum):
    """Rule by which rows are evicted from a full table, in dumps."""

    KLru = 0
    KLfu = 1
    KEpochLru = 2
    KEpochLfu = 3
    KCustomized = 4


@enum.unique
class MemoryType(enum.Enum):
    """Kind of memory."""

    DEVICE = "device"
    MANAGED = "managed"
    PINNED_HOST = "pinned_host"
    HOST = "host"


class CopyMode(enum.Enum):
    """Part of a row that `Storage.find` returns: EMBEDDING = weights, VALUE = weights and then optimizer state."""

    EMBEDDING = "embedding"
    VALUE = "value"


class DynamicEmbInitializerMode(enum.Enum):
    """Distribution of a new row's weights. DEBUG: every weight is the row's id modulo `DEBUG_MODULUS`."""

    NORMAL = "normal"
    TRUNCATED_NORMAL = "truncated_normal"
    UNIFORM = "uniform"
    CONSTANT = "constant"
    DEBUG = "debug"


@dataclass
class DynamicEmbInitializerArgs:
    """Initial weights of rows.

    Args:
        mode: the distribution.
        mean, std_dev: parameters of NORMAL and TRUNCATED_NORMAL.
        lower, upper: bounds of UNIFORM and TRUNCATED_NORMAL; None = -1 / sqrt(N) and 1 / sqrt(N), where N is
            `num_embeddings` of the table's config, or 0 and 1 without a config.
        value: weight of CONSTANT.
    """

    mode: DynamicEmbInitializerMode = DynamicEmbInitializerMode.UNIFORM
    mean: float = 0.0
    std_dev: float = 1.0
    lower: float | None = None
    upper: float | None = None
    value: float = 0.0


def bounds_of(args: DynamicEmbInitializerArgs, num_embeddings: int | None) -> tuple[float, float]:
    """Bounds of UNIFORM and TRUNCATED_NORMAL; `num_embeddings` is that of the table's config, None = no config."""
    low, high = (0.0, 1.0) if num_embeddings is None else (-(num_embeddings**-0.5), num_embeddings**-0.5)
    return low if args.lower is None else args.lower, high if args.upper is None else args.upper


def initializer_of(args: DynamicEmbInitializerArgs, num_embeddings: int | None) -> Initializer:
    """Initializer of a table's rows; `num_embeddings` is that of the table's config, None = no config. ValueError if
    the distribution cannot have these parameters."""
    low, high = bounds_of(args, num_embeddings)
    match args.mode:
        case DynamicEmbInitializerMode.NORMAL:
            return make_normal_initializer(args.mean, args.std_dev)
        case DynamicEmbInitializerMode.TRUNCATED_NORMAL:
            return make_trunc_normal_initializer(args.mean, args.std_dev, low, high)
        case DynamicEmbInitializerMode.UNIFORM:
            return make_uniform_initializer(low, high)
        case DynamicEmbInitializerMode.CONSTANT:
            return make_constant_initializer(args.value)
        case DynamicEmbInitializerMode.DEBUG:
            return IdInitializer(DEBUG_MODULUS)
    raise ValueError(f"mode must be a DynamicEmbInitializerMode, got {args.mode!r}")


class Found(NamedTuple):
    """Result of `Storage.find` for N ids, M of which have no row."""

    num_missing: int
    """Number of ids without a row, M."""
    missing_keys: torch.Tensor
    missing_indices: torch.Tensor
    """Indices of the missing ids among the N ids, int64 [M]."""
    missing_table_ids: torch.Tensor
    missing_scores: torch.Tensor | None
    """Scores given in the lookup of the missing ids; None = no scores were given."""
    founds: torch.Tensor
    """Whether each id has a row, bool [N]."""
    scores: torch.Tensor
    """Scores, int64 [N], or [N, 2] if rows have two; 0 for ids without a row."""
    values: torch.Tensor
    """Weights, float32 [N, D], or weights and optimizer state, [N, D + Z]; zeros for ids without a row."""


class Storage(abc.ABC, Generic[OptionsT, OptimizerT]):
    """Interface of a store of tables' rows. N ids, M of them without a row, D weights and Z optimizer state values of a
    row."""

    @abc.abstractmethod
    def find(
        self,
        unique_keys: torch.Tensor,
        table_ids: torch.Tensor,
        copy_mode: CopyMode,
        lfu_accumulated_frequency: torch.Tensor | None = None,
    ) -> "Found":
        """Read rows; the result also says which ids have no row."""

    @abc.abstractmethod
    def insert(
        self,
        keys: torch.Tensor,
        table_ids: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        """Write rows, [N, D + Z]. With `preserve_existing` existing rows stay as they are."""

    @abc.abstractmethod
    def dump(
        self,
        table_id: int,
        meta_file_path: str,
        emb_key_path: str,
        embedding_file_path: str,
        score_file_path: str | None,
        opt_file_path: str | None,
        timestamp: int,
    ) -> None:
        """Write a table into these files."""

    @abc.abstractmethod
    def load(
        self,
        table_id: int,
        meta_file_path: str,
        emb_file_path: str,
        embedding_file_path: str,
        score_file_path: str | None,
        opt_file_path: str | None,
        include_optim: bool,
        timestamp: int,
    ) -> None:
        """Read a table from such files."""

    @abc.abstractmethod
    def embedding_dtype(self) -> torch.dtype:
        """Dtype of weights."""

    @abc.abstractmethod
    def embedding_dim(self, table_id: int) -> int:
        """Number of weights of a row."""

    @abc.abstractmethod
    def value_dim(self, table_id: int) -> int:
        """Number of weights and optimizer state values of a row."""

    @abc.abstractmethod
    def max_embedding_dim(self) -> int:
        """Largest `embedding_dim` of all tables."""

    @abc.abstractmethod
    def max_value_dim(self) -> int:
        """Largest `value_dim` of all tables."""

    @abc.abstractmethod
    def embedding_dims(self, on_device: bool = False) -> torch.Tensor:
        """`embedding_dim` of each table, int64 [T]; on the CPU unless `on_device`."""

    @abc.abstractmethod
    def all_dims_vec4(self) -> bool:
        """Whether `embedding_dim` and `value_dim` of every table are multiples of 4."""

    @abc.abstractmethod
    def init_optimizer_state(self) -> float:
        """Value that fills the optimizer state of a new row."""

    @abc.abstractmethod
    def export_keys_values(
        self, device: torch.device, batch_size: int = 65536, table_id: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Yield ids, weights, optimizer state and scores of a table, batch by batch."""


class Cache(abc.ABC):
    """Interface of a cache of rows in front of a `Storage`."""

    @abc.abstractmethod
    def lookup(
        self, unique_keys: torch.Tensor, table_ids: torch.Tensor, lfu_accumulated_frequency: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores of ids, whether each id is cached, and its slot, or -1."""

    @abc.abstractmethod
    def insert_and_evict(
        self, keys: torch.Tensor, table_ids: torch.Tensor, scores: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots of the inserted ids; number of evicted ids; and their ids, slots, scores and tables."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Empty the cache."""

    @abc.abstractmethod
    def cache_metrics(self) -> torch.Tensor:
        """Metrics of lookups, as counts."""

    @abc.abstractmethod
    def set_record_cache_metrics(self, record: bool) -> None:
        """Start or stop counting lookups."""


class AdmissionStrategy(abc.ABC):
    """Decides which ids get a row.

    `admit` is called once in a lookup, for the ids of a table that have no row. The attribute `initializer_args` gives
    the values of ids that are not admitted; `FrequencyAdmissionStrategy` takes it as an argument.
    """

    initializer_args: DynamicEmbInitializerArgs | None = None

    @abc.abstractmethod
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Whether each id gets a row, bool [N].

        Args:
            keys: distinct ids, int64 [N].
            frequencies: number of lookups of each id so far, with this one, int64 [N].
        """

    def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
        """Never called; `initializer_args` gives the values of ids that are not admitted."""
        return False


class Counter(abc.ABC):
    """Interface of a counter of lookups of ids without a row."""

    @abc.abstractmethod
    def add(self, keys: torch.Tensor, table_ids: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Add `frequencies` to the counts of these ids. Returns the new counts, int64 [N]."""

    @abc.abstractmethod
    def erase(self, keys: torch.Tensor, table_ids: torch.Tensor) -> None:
        """Forget the counts of these ids."""

    @abc.abstractmethod
    def memory_usage(self, mem_type: MemoryType = MemoryType.DEVICE) -> int:
        """Bytes of memory of the given kind."""

    @abc.abstractmethod
    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        """Read counts of a table from two files."""

    @abc.abstractmethod
    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        """Write counts of a table to two files."""


__all__ = ["absent"]


def absent(module: str, reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` for a module of `oneemb.dynamicemb`. It raises ImportError for names of dynamicemb that the module
    lacks, with the reason and advice from `reasons`, and AttributeError for other names.

    Args:
        module: `__name__` of the module.
        reasons: {missing name: why it is missing, and what to use}.
    """

    def getattr_of_module(name: str) -> Any:
        if name in reasons:
            raise ImportError(f"{module} has no {name}: {reasons[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module
