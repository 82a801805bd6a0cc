"""First rows of a table, in memory that is freed piece by piece while the rows move into the embedding.

TorchRec's initializers fill a whole table [rows, D] before it moves; without this module memory would hold it twice.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

_CHUNK_BYTES = 4 << 20


def to_be_handed(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Tensor on the CPU whose memory `hand_over` frees while it reads. OSError or OverflowError if memory is too
    small."""
    count = math.prod(size)
    memory = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    weights: Any = torch.frombuffer(memory, dtype=dtype, count=count).reshape(size)
    weights.handed = memory
    return weights


def hand_over(weights: torch.Tensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (row numbers [N], weights [N, D], float32), some rows at a time, valid until the next are asked for. Memory
    of a tensor made by `to_be_handed` is freed on the way, so the tensor holds no rows afterwards."""
    memory: mmap.mmap | None = getattr(weights, "handed", None)
    owns_memory = memory is not None and weights.data_ptr() == np.frombuffer(memory, np.uint8).ctypes.data
    row_bytes = weights.shape[1] * weights.element_size()
    chunk, gone = max(1, _CHUNK_BYTES // row_bytes), 0
    for begin in range(0, len(weights), chunk):
        part = weights[begin : begin + chunk].detach().to("cpu", torch.float32)
        yield np.arange(begin, begin + len(part)), part.numpy()
        end = (begin + len(part)) * row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if memory is not None and owns_memory and end > gone:
            memory.madvise(mmap.MADV_DONTNEED, gone, end - gone)
            gone = end
