"""An embedding of a planned job: number of rows, size of a row, and its lookups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oneemb import optim
from oneemb.embeddings.rank_traffic import KeyCounts, PartCounts
from oneemb.graph.row_optimizers import SUPPORTED, row_optimizer_of

# Bytes of memory of a key in the index of a persistent table, and of a key whose cell is on the disk; see
# storage/compact_index.py and storage/cold_index.py.
_KEY_BYTES, _COLD_KEY_BYTES = 15, 1.7
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class PlannedEmbedding:
    """An embedding of a planned job, which each step looks up once.

    Args:
        rows: final number of rows, of all ranks together.
        embedding_dim: number of weights of a row, D.
        ids: number of ids in a sample, in all tables of the embedding together.
        bags: number of bags in a sample, which share its ids evenly and are summed or averaged; None = a row for each
            id.
        unique: number of unique keys (table, id) in a rank's batch, divided by its number of ids; above 0, at most 1.
            See `oneemb.unique_share`.
        dtype: dtype of the weights, "float32", "float16" or "bfloat16".
        optimizer: name of a class of torch.optim or oneemb.optim, such as "Adagrad", with its defaults; or the number
            of optimizer state values of a row.
        cache_mb: MiB of each rank's cache over rows on an SSD; None = all rows are in memory.
        hit_rate: share of a step's unique keys that the cache holds, from 0 to 1. Required with cache_mb.
        physical_block_size: bytes of the disk's block, 512 or 4096.
        index_memory_mb: MiB of memory of a rank for the index of rows on an SSD; None = no limit. Only with cache_mb.
        comm_dtype: dtype in which rows and gradients travel between ranks, by name, same as for `MultiTableEmbedding`.

    Raises:
        ValueError, TypeError: an argument is not as above.
    """

    rows: int
    embedding_dim: int
    ids: int = 1
    bags: int | None = None
    unique: float = 1.0
    dtype: str = "float32"
    optimizer: str | int = "SGD"
    cache_mb: int | None = None
    hit_rate: float | None = None
    physical_block_size: int = 4096
    comm_dtype: str = "float32"
    index_memory_mb: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "embedding_dim", "ids"):
            check_count(name, getattr(self, name))
        if self.bags is not None:
            check_count("bags", self.bags)
        check_share("unique", self.unique, above_0=True)
        for name in ("dtype", "comm_dtype"):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in _DTYPE_BYTES:
                raise ValueError(f"{name} must be one of {', '.join(_DTYPE_BYTES)}, got {getattr(self, name)!r}")
        if self.physical_block_size not in (512, 4096):
            raise ValueError(f"physical_block_size must be 512 or 4096, got {self.physical_block_size!r}")
        if self.cache_mb is None:
            if self.hit_rate is not None:
                raise ValueError(
                    "hit_rate must be left out without cache_mb, since it is of a cache over rows on an SSD; give"
                    " cache_mb too, or leave hit_rate out"
                )
        else:
            check_count("cache_mb", self.cache_mb)
            if self.hit_rate is None:
                raise ValueError(
                    "a cache needs its hit_rate, from 0 to 1, got None; measure it with embedding.stats()['hit_rate']"
                    " in a short run, or with benchmarks/bench_cache_policy.py"
                )
            check_share("hit_rate", self.hit_rate)
        if self.index_memory_mb is not None:
            check_count("index_memory_mb", self.index_memory_mb)
            if self.cache_mb is None:
                raise ValueError(
                    "index_memory_mb must be left out without cache_mb, since it limits the index of rows on an SSD;"
                    " give cache_mb too, or leave index_memory_mb out"
                )
        self.state_width  # noqa: B018  # raises if the optimizer is not supported

    def index_bytes(self, rows: int) -> tuple[int, float]:
        """Bytes of memory of the index of a rank's rows on an SSD, and the share of keys that are on the SSD alone."""
        if self.index_memory_mb is None or rows * _KEY_BYTES * 4 <= self.index_memory_mb * 2**20 * 3:
            return rows * _KEY_BYTES, 0.0
        limit = self.index_memory_mb * 2**20
        # A quarter of the limit is for keys that were written lately; see storage/cold_index.py.
        in_memory = max(0.0, (limit * 3 / 4 - rows * _COLD_KEY_BYTES) / (_KEY_BYTES - _COLD_KEY_BYTES))
        return max(limit, round(rows * _COLD_KEY_BYTES)), 1 - in_memory / rows

    @property
    def weight_bytes(self) -> int:
        return _DTYPE_BYTES[self.dtype]

    @property
    def comm_bytes(self) -> int:
        return _DTYPE_BYTES[self.comm_dtype]

    def keys(self, asks_R: Sequence[int], asked_R: Sequence[int], parts: PartCounts | None = None) -> KeyCounts:
        """Counts of the keys of a lookup.

        Args:
            asks_R: number of keys that this rank asks each rank for.
            asked_R: number of keys that each rank asks this rank for.
            parts: counts of parts of bags; None = owners send rows.
        """
        row_bytes = min(self.weight_bytes, self.comm_bytes)
        return KeyCounts(self.embedding_dim, row_bytes, asks_R, asked_R, self.comm_bytes, parts)

    @property
    def rows_given(self) -> int:
        """Number of rows in a lookup's result for a sample."""
        return self.ids if self.bags is None else self.bags

    @property
    def state_width(self) -> int:
        """Number of optimizer state values of a row."""
        if isinstance(self.optimizer, int) and not isinstance(self.optimizer, bool):
            if self.optimizer < 0:
                raise ValueError(
                    "optimizer must be a name, or the number of values of state of a row, 0 or more, got"
                    f" {self.optimizer}"
                )
            return self.optimizer
        return _state_width(self.optimizer, self.embedding_dim)

    @property
    def row_words(self) -> int:
        """Number of 32-bit words of a row, with optimizer state."""
        return -(-self.embedding_dim * self.weight_bytes // 4) + self.state_width


def unique_share(batches: Any) -> float:
    """Mean of (unique keys / ids) over batches, for `PlannedEmbedding(unique=...)`.

    Args:
        batches: batches of ids of one rank: integers [B, T] with column t for table t; or [N], of one table.

    Raises:
        ValueError: there is no batch, or a batch has no ids.
    """
    shares = []
    for batch in batches:
        id_BT = np.asarray(batch)
        if id_BT.size == 0 or id_BT.ndim > 2:
            raise ValueError(f"a batch must be ids of shape [B, T] or [N], at least one, got shape {id_BT.shape}")
        columns = id_BT.reshape(len(id_BT), -1).T
        shares.append(sum(len(np.unique(column)) for column in columns) / id_BT.size)
    if not shares:
        raise ValueError("there must be at least one batch to count unique keys of, got none")
    return float(np.mean(shares))


def _state_width(optimizer: Any, dim: int) -> int:
    cls = next((getattr(m, optimizer) for m in (torch.optim, optim) if hasattr(m, str(optimizer))), None)
    try:
        if cls is None:
            raise TypeError
        made = cls([torch.nn.Parameter(torch.empty(0, dim, dtype=torch.float32, device="cpu"))], lr=0.01)
        return row_optimizer_of(made, made.param_groups[0]).state_width(dim)
    except TypeError:
        raise ValueError(
            f"optimizer must be the name of one that rows support ({SUPPORTED}), or the number of values of state of a"
            f" row, got {optimizer!r}"
        ) from None


def check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 up, got {value!r}")


def check_share(name: str, value: object, *, above_0: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 or (above_0 and value == 0):
        raise ValueError(f"{name} must be a share {'above' if above_0 else 'from'} 0 up to 1, got {value!r}")
