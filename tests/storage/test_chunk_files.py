"""Files of chunks: what is appended while a sync runs."""

import numpy as np

from oneemb.storage.fs import LocalFileSystem, aligned_bytes
from oneemb.storage.table.chunk_files import ChunkFiles, key_record
from oneemb.storage.table.geometry import Geometry

GEOMETRY = Geometry(row_width=4, physical_block_size=512, blocks_per_chunk=64)


class DuringSync(LocalFileSystem):
    """Makes one call while a sync runs."""

    def __init__(self):
        super().__init__()
        self.call, self.synced = None, 0

    def sync(self, file):
        call, self.call = self.call, None
        super().sync(file)
        self.synced += 1
        if call is not None:
            call()


def write_run(files, chunk, ids):
    record_N, end = key_record(chunk.end, np.zeros(len(ids), np.int32), np.array(ids), np.zeros(1, np.uint64))
    files.write(chunk, chunk.end, aligned_bytes(GEOMETRY.block_bytes), record_N)
    files.append(chunk, end)


def test_a_run_that_is_appended_and_sealed_while_a_sync_runs_is_synced_by_the_next_one(tmp_path):
    fs = DuringSync()
    files = ChunkFiles(fs, str(tmp_path), 1, direct=False)
    chunk = files.create(GEOMETRY)
    write_run(files, chunk, [1])

    def append_and_seal():
        write_run(files, chunk, [2])
        files.seal(chunk)

    fs.call = append_and_seal
    files.sync(chunk)
    assert chunk.synced_bytes < chunk.nbytes
    files.sync(chunk)
    assert chunk.synced_bytes == chunk.nbytes and fs.synced == 4
    assert chunk.rows_out is None and chunk.keys_out is None
