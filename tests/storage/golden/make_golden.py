"""Makes the tables that `test_persistent_table_golden.py` reads. Run once for each format version, never again:

python tests/storage/golden/make_golden.py tests/storage/golden/format_1
"""

import sys

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.table.persistent_table import PersistentTable


def golden_rows(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows of a snapshot, from a rule and not from a file: (table, id, row)."""
    size, width = {"small": (40, 7), "large": (700, 7)}[name]
    n = np.arange(size, dtype=np.uint64)
    id_N = (n * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    id_N[:4] = [0, -1, np.iinfo(np.int64).max, np.iinfo(np.int64).min]
    column = np.arange(width, dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits = (n[:, None] + np.uint64(len(name))) * np.uint64(2654435761) + column * np.uint64(40503)
    return (n % np.uint64(3)).astype(np.int32), id_N, bits.astype(np.uint32).view(np.float32)


def make(path: str) -> None:
    for block in (512, 4096):
        with PersistentTable.open(
            f"{path}/block_{block}", row_width=7, physical_block_size=block, chunk_bytes=1, threads=Threads(1),
            background=False, io="pread",
        ) as table:  # fmt: skip
            table.put(*golden_rows("small"))
            table.save_snapshot("small", {"name": "small", "pi": 3.5, "list": [1, None, "é"]})
            table.put(*golden_rows("large"))
            table.save_snapshot("a/large one", {"name": "large"})


if __name__ == "__main__":
    make(sys.argv[1])
