"""Rows of a table by their places: requests to the chunks' files, and what to say when one fails."""

from typing import Any

import numpy as np

from oneemb.storage.block_reader import BlockReader, DamagedBlock, plan_reads
from oneemb.storage.chunk_files import ROWS_BEGIN, ChunkFile, ChunkFiles
from oneemb.storage.chunk_scan import block_damage, missing_file
from oneemb.storage.fs import storage_error
from oneemb.storage.live_rows import LiveRows

__all__ = ["RowReader"]


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
        self, live: LiveRows, table_U: np.ndarray, id_U: np.ndarray, place_N: np.ndarray, to_N: np.ndarray,
        out_UW: np.ndarray,
    ) -> None:  # fmt: skip
        """out_UW[to_N[n]] = the row at place_N[n], which is that of key to_N[n].

        Raises:
            CorruptTableError: a block is not what was written.
            StorageError: the system could not read.
        """
        geometry = live.geometry
        plan = plan_reads(geometry, place_N, to_N)
        slot_Q = plan.slot_Q
        offset_Q = ROWS_BEGIN + (plan.block_Q - slot_Q * geometry.blocks_per_chunk) * geometry.block_bytes
        begin = 0
        while begin < len(slot_Q):
            slots, first, slot_of_q = np.unique(slot_Q[begin:], return_index=True, return_inverse=True)
            many = self._files.files_open_max
            end = begin + int(first[many]) if len(slots) > many else len(slot_Q)
            file_S = np.array([self._open(_chunk(live, slot)) for slot in slots[:many].tolist()], np.int64)
            file_Q = file_S[slot_of_q[: end - begin]]
            try:
                self._blocks.read(plan.cut(begin, end), file_Q, offset_Q[begin:end], live.sum_B, out_UW)
            except DamagedBlock as damage:
                place, u = int(plan.place_P[damage.p]), int(plan.to_P[damage.p])
                slot, row = divmod(place, geometry.rows_per_chunk)
                raise block_damage(
                    _chunk(live, slot).rows_path, geometry, row // geometry.rows_per_block, damage.data,
                    int(live.sum_B[place // geometry.rows_per_block]), int(table_U[u]), int(id_U[u]),
                ) from None  # fmt: skip
            except OSError as error:
                q = begin + (error.filename if isinstance(error.filename, int) else 0)
                at = f"{_chunk(live, int(slot_Q[q])).rows_path} at offset {offset_Q[q]}"
                raise storage_error(error, "read rows from", at) from error
            begin = end
        self._requests += len(slot_Q)
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
        except FileNotFoundError as error:
            raise missing_file(chunk.rows_path) from error
        except OSError as error:
            raise storage_error(error, "open", chunk.rows_path) from error


def _chunk(live: LiveRows, slot: int) -> ChunkFile:
    chunk = live.chunk_S[slot]
    assert chunk is not None
    return chunk
