"""Enums, initializers of rows, and interfaces of stores, caches and admission, shared by dynamicemb's modules.

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
    """Place of memory."""

    DEVICE = "device"
    MANAGED = "managed"
    PINNED_HOST = "pinned_host"
    HOST = "host"


class CopyMode(enum.Enum):
    """Columns that `Storage.find` returns of a row: the weights, or the weights and then the optimizer state."""

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
        mean, std_dev: of NORMAL and TRUNCATED_NORMAL.
        lower, upper: the bounds of UNIFORM and TRUNCATED_NORMAL; None = -1 / sqrt(N) and 1 / sqrt(N), for N
            `num_embeddings` of the table's config; where there is no config, 0 and 1.
        value: of CONSTANT.
    """

    mode: DynamicEmbInitializerMode = DynamicEmbInitializerMode.UNIFORM
    mean: float = 0.0
    std_dev: float = 1.0
    lower: float | None = None
    upper: float | None = None
    value: float = 0.0


def bounds_of(args: DynamicEmbInitializerArgs, num_embeddings: int | None) -> tuple[float, float]:
    """The bounds of UNIFORM and TRUNCATED_NORMAL; arguments as of `initializer_of`."""
    low, high = (0.0, 1.0) if num_embeddings is None else (-(num_embeddings**-0.5), num_embeddings**-0.5)
    return low if args.lower is None else args.lower, high if args.upper is None else args.upper


def initializer_of(args: DynamicEmbInitializerArgs, num_embeddings: int | None) -> Initializer:
    """Initializer of a table, for dynamicemb's arguments and `num_embeddings` of its config, None = there is none;
    ValueError if the distribution cannot have them."""
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
    """Result of `Storage.find` for N ids, M of them without a row."""

    num_missing: int
    """M"""
    missing_keys: torch.Tensor
    missing_indices: torch.Tensor
    """Places of the missing ids among the N, int64 [M]."""
    missing_table_ids: torch.Tensor
    missing_scores: torch.Tensor | None
    """Scores that they were looked up with; None = none."""
    founds: torch.Tensor
    """Whether each id has a row, bool [N]."""
    scores: torch.Tensor
    """int64 [N], or [N, 2] of two scores; 0 of ids without a row."""
    values: torch.Tensor
    """float32 [N, D], or [N, D + Z] with state; zeros of ids without a row."""


class Storage(abc.ABC, Generic[OptionsT, OptimizerT]):
    """Interface of a store of tables' rows; N ids, M of them without a row, D weights and Z numbers of state."""

    @abc.abstractmethod
    def find(
        self,
        unique_keys: torch.Tensor,
        table_ids: torch.Tensor,
        copy_mode: CopyMode,
        lfu_accumulated_frequency: torch.Tensor | None = None,
    ) -> "Found":
        """Read rows, and say which ids have none."""

    @abc.abstractmethod
    def insert(
        self,
        keys: torch.Tensor,
        table_ids: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        """Write rows, [N, D + Z]; with `preserve_existing`, existing rows stay as they are."""

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
        """Weights of a row."""

    @abc.abstractmethod
    def value_dim(self, table_id: int) -> int:
        """Weights and state of a row, as numbers."""

    @abc.abstractmethod
    def max_embedding_dim(self) -> int:
        """Most weights of a row, of all tables."""

    @abc.abstractmethod
    def max_value_dim(self) -> int:
        """Most weights and state of a row, of all tables."""

    @abc.abstractmethod
    def embedding_dims(self, on_device: bool = False) -> torch.Tensor:
        """Weights of a row of each table, int64; on the CPU unless `on_device`."""

    @abc.abstractmethod
    def all_dims_vec4(self) -> bool:
        """Whether weights, and weights and state, are by fours in every table."""

    @abc.abstractmethod
    def init_optimizer_state(self) -> float:
        """Number that fills the optimizer's state of a new row."""

    @abc.abstractmethod
    def export_keys_values(
        self, device: torch.device, batch_size: int = 65536, table_id: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Ids, weights, state and scores of a table, batch by batch."""


class Cache(abc.ABC):
    """Interface of a cache of rows before a `Storage`."""

    @abc.abstractmethod
    def lookup(
        self, unique_keys: torch.Tensor, table_ids: torch.Tensor, lfu_accumulated_frequency: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores of ids; whether each is there; and its slot, -1 if it is not."""

    @abc.abstractmethod
    def insert_and_evict(
        self, keys: torch.Tensor, table_ids: torch.Tensor, scores: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots of ids that come in; how many leave; and ids, slots, scores and tables of these."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Empty the cache."""

    @abc.abstractmethod
    def cache_metrics(self) -> torch.Tensor:
        """Counts of the lookups."""

    @abc.abstractmethod
    def set_record_cache_metrics(self, record: bool) -> None:
        """Count lookups from now on, or do not."""


class AdmissionStrategy(abc.ABC):
    """Decides which ids get a row.

    `admit` is called once a lookup, for the ids of a table that have no row. A strategy with `initializer_args`, such
    as `FrequencyAdmissionStrategy`, sets by them the values of ids without a row.
    """

    initializer_args: DynamicEmbInitializerArgs | None = None

    @abc.abstractmethod
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Whether each id gets a row: bool [N].

        Args:
            keys: int64 [N], distinct.
            frequencies: int64 [N], how often each was looked up so far, this lookup included.
        """

    def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
        """Not called; `initializer_args` sets the values of ids without a row."""
        return False


class Counter(abc.ABC):
    """Counts how often ids without a row were looked up."""

    @abc.abstractmethod
    def add(self, keys: torch.Tensor, table_ids: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Count more of these ids, and give what is counted now: int64 [N]."""

    @abc.abstractmethod
    def erase(self, keys: torch.Tensor, table_ids: torch.Tensor) -> None:
        """Forget these ids."""

    @abc.abstractmethod
    def memory_usage(self, mem_type: MemoryType = MemoryType.DEVICE) -> int:
        """Bytes of memory."""

    @abc.abstractmethod
    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        """Read counts of a table from two files."""

    @abc.abstractmethod
    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        """Write them."""


__all__ = ["absent"]


def absent(module: str, reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for the module of `oneemb.dynamicemb` with this `__name__`: it raises ImportError for names of
    dynamicemb that the module lacks, with the reason and advice in `reasons`, and AttributeError for others."""

    def getattr_of_module(name: str) -> Any:
        if name in reasons:
            raise ImportError(f"{module} has no {name}: {reasons[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module
