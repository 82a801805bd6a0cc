"""Reads rows that are on disk by their places, and turns failed reads into errors that name file, block and key."""

from typing import Any

import numpy as np

from oneemb.storage.fs import storage_error
from oneemb.storage.table.block_reader import BlockReader, DamagedBlock, plan_reads
from oneemb.storage.table.chunk_files import ROWS_BEGIN, ChunkFile, ChunkFiles
from oneemb.storage.table.chunk_scan import block_damage, reading
from oneemb.storage.table.live_rows import LiveRows


class RowReader:
    """Reads rows that are on disk.

    Args:
        blocks: reads and checks blocks.
        files: opens chunks.
    """

    def __init__(self, blocks: BlockReader, files: ChunkFiles):
        self._blocks, self._files = blocks, files
        self._requests = self._bytes = 0

    def read(
        self, live: LiveRows, table_N: np.ndarray, id_N: np.ndarray, place_N: np.ndarray, to_N: np.ndarray,
        out_XW: np.ndarray,
    ) -> None:  # fmt: skip
        """out_XW[to_N[n]] = the row at place_N[n], which is that of the key (table_N[n], id_N[n]).

        Raises:
            CorruptTableError: a block is not what was written.
            StorageError: the system could not read.
        """
        geometry = live.geometry
        plan = plan_reads(geometry, place_N, to_N)
        # The first extent of each request's chunk: it identifies the chunk and says where it begins.
        first_Q = live.first_E[plan.extent_Q]
        offset_Q = ROWS_BEGIN + (plan.block_Q - first_Q * geometry.blocks_per_extent) * geometry.block_bytes
        begin = 0
        while begin < len(first_Q):
            firsts, q_C, chunk_of_q = np.unique(first_Q[begin:], return_index=True, return_inverse=True)
            many = self._files.files_open_max
            end = begin + int(q_C[many]) if len(firsts) > many else len(first_Q)
            file_C = np.array([self._open(live.chunk_in(extent)) for extent in firsts[:many].tolist()], np.int64)
            file_Q = file_C[chunk_of_q[: end - begin]]
            try:
                self._blocks.read(plan.cut(begin, end), file_Q, offset_Q[begin:end], live.sum_B, out_XW)
            except DamagedBlock as damage:
                place = int(plan.place_P[damage.p])
                n = int(np.flatnonzero(place_N == place)[0])
                block = place // geometry.rows_per_block
                chunk = live.chunk_in(block // geometry.blocks_per_extent)
                raise block_damage(
                    chunk.rows_path, geometry, block - live.first_block(chunk), damage.data,
                    int(live.sum_B[block]), int(table_N[n]), int(id_N[n]),
                ) from None  # fmt: skip
            except OSError as error:
                q = begin + (error.filename if isinstance(error.filename, int) else 0)
                at = f"{live.chunk_in(int(first_Q[q])).rows_path} at offset {offset_Q[q]}"
                raise storage_error(error, "read rows from", at) from error
            begin = end
        self._requests += len(first_Q)
        self._bytes += int(plan.blocks_Q.sum()) * geometry.block_bytes

    def stats(self) -> dict[str, Any]:
        return {
            "io": self._blocks.name,
            "read_depth": self._blocks.depth,
            "read_requests": self._requests,
            "bytes_read": self._bytes,
        }

    def close(self) -> None:
        self._blocks.close()

    def _open(self, chunk: ChunkFile) -> int:
        try:
            return self._files.rows_file(chunk)
        except OSError:
            with reading(chunk.rows_path, "open"):
                raise
