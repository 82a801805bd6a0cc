"""What dynamicemb's modules share: enums, how rows begin, and the interfaces of admission.

Names and values are dynamicemb's.
"""

import abc
import enum
from dataclasses import dataclass

import torch

from oneemb.options import (
    Initializer,
    make_constant_initializer,
    make_id_initializer,
    make_normal_initializer,
    make_trunc_normal_initializer,
    make_uniform_initializer,
)

__all__ = [
    "BUCKET_ALIGNMENT", "DEMB_TABLE_ALIGN_SIZE", "MAX_BUCKET_CAPACITY", "AdmissionStrategy", "Counter",
    "DynamicEmbDataType", "DynamicEmbInitializerArgs", "DynamicEmbInitializerMode", "EvictStrategy", "MemoryType",
    "initializer_of",
]  # fmt: skip

DEMB_TABLE_ALIGN_SIZE = BUCKET_ALIGNMENT = 16
MAX_BUCKET_CAPACITY = 2**63 - 1


class DynamicEmbDataType(enum.Enum):
    """Of ids and weights."""

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
    """By what rows leave a full table, as dumps name it."""

    KLru = 0
    KLfu = 1
    KEpochLru = 2
    KEpochLfu = 3
    KCustomized = 4


@enum.unique
class MemoryType(enum.Enum):
    """Where memory is."""

    DEVICE = "device"
    MANAGED = "managed"
    PINNED_HOST = "pinned_host"
    HOST = "host"


class DynamicEmbInitializerMode(enum.Enum):
    """By which distribution rows begin. DEBUG: every weight is the row's id modulo 100,000."""

    NORMAL = "normal"
    TRUNCATED_NORMAL = "truncated_normal"
    UNIFORM = "uniform"
    CONSTANT = "constant"
    DEBUG = "debug"


@dataclass
class DynamicEmbInitializerArgs:
    """How rows begin.

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


def initializer_of(args: DynamicEmbInitializerArgs, num_embeddings: int | None) -> Initializer:
    """The same, as tables have it.

    Args:
        num_embeddings: of the table's config; None = there is none.

    Raises:
        ValueError: the arguments are none of such a distribution.
    """
    low, high = (0.0, 1.0) if num_embeddings is None else (-(num_embeddings**-0.5), num_embeddings**-0.5)
    low, high = low if args.lower is None else args.lower, high if args.upper is None else args.upper
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
            return make_id_initializer(100_000)
    raise ValueError(f"mode must be a DynamicEmbInitializerMode, got {args.mode!r}")


class AdmissionStrategy(abc.ABC):
    """Says which ids get a row.

    `admit` is asked once a lookup, for the ids of a table that have none. One that has `initializer_args`, as
    `FrequencyAdmissionStrategy`, says by these what others read as.
    """

    initializer_args: DynamicEmbInitializerArgs | None = None

    @abc.abstractmethod
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Which ids get a row: bool [N].

        Args:
            keys: int64 [N], distinct.
            frequencies: int64 [N], how often each was looked up so far, this lookup included.
        """

    def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
        """Nobody calls it: see `initializer_args`."""
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
