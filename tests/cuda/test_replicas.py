"""Rows of replicated tables on a GPU: the keys that are known, and the rows that ranks give each other."""

import numpy as np
import torch

from oneemb.kernels.init_rows import UNIFORM, InitialRows
from oneemb.kernels.threads import Threads
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.store_rows import set_rows
from oneemb.storage.tiers.stack import StorePlan
from tests.cuda.test_train import move_to

DIM = 3


def open_store(path, owner, cache_bytes):
    """One of two owners' stores of two tables, of which the second one is replicated."""
    initial = InitialRows(7, np.full((2, 1), UNIFORM), np.tile([-1.0, 1, 0, 0], (2, 1, 1)), np.array([DIM], np.int64))
    plan = StorePlan(
        str(path), cache_bytes=cache_bytes, host_bytes=None if cache_bytes else 0, capacity=None,
        physical_block_size=512, owner=owner, owners=2, replicated=(1,),
    )  # fmt: skip
    store = EmbeddingStore(dim=DIM, dtype="float32", initial=initial, plan=plan, threads=Threads(1))
    store.form.attach("adagrad", np.full(DIM, 0.1, np.float32))
    return store


def known(store):
    return set(zip(*(column.tolist() for column in store.replicas.keys()), strict=True))


def test_rows_of_replicated_tables_go_from_a_gpu_to_another_store_and_back(gpu, tmp_path):
    for cache_bytes in (None, 1 << 20):
        here = open_store(tmp_path / f"gpu {cache_bytes}", 0, cache_bytes)
        there = open_store(tmp_path / f"host {cache_bytes}", 1, None)
        move_to(here, gpu)
        table_N, id_N = np.array([0, 1, 1, 0, 1, 1], np.int32), np.array([3, 3, 4, 5, 3, 9])
        backend = here.backend
        keys = backend.unique_keys(backend.put(table_N), backend.put(id_N), tables=2, padding_id=None, check=None)
        slot_U, found = here.acquire(keys)
        assert len(found.id_U) == 5 and known(here) == {(1, 3), (1, 4), (1, 9)}
        backend.tensor(here.row_SW)[backend.tensor(slot_U), : 2 * DIM] = torch.arange(
            5 * 2 * DIM, dtype=torch.float32, device=backend.device
        ).reshape(5, -1)
        here.mark_dirty(found.table_U, slot_U)
        here.release(slot_U)
        table_U, id_U = here.replicas.keys()
        row_UW = here.replicas.rows_of(table_U, id_U)
        assert {tuple(row[:2]) for row in row_UW} == {(6.0, 7.0), (12.0, 13.0), (24.0, 25.0)}
        there.replicas.put(table_U, id_U, row_UW)
        assert known(there) == known(here)
        # Rows that the host has begun begin on the GPU with the same values, and are put there.
        begun_U = np.array([20, 21])
        for store in (there, here):
            store.replicas.begin(np.array([1, 1], np.int32), begun_U)
        rows = [store.replicas.rows_of(np.array([1, 1], np.int32), begun_U) for store in (here, there)]
        assert np.array_equal(*rows) and (rows[0][:, DIM:] == np.float32(0.1)).all()
        set_rows(there, np.array([1], np.int32), begun_U[:1], np.full((1, 2 * DIM), 5.0, np.float32))
        here.replicas.put(
            np.array([1], np.int32), begun_U[:1], there.replicas.rows_of(np.array([1], np.int32), begun_U[:1])
        )
        assert (here.replicas.rows_of(np.array([1], np.int32), begun_U[:1]) == 5.0).all()
        assert known(there) == known(here) and len(here.replicas) == here.stats()["replicated_rows"] == 5
        here.clear()
        assert known(here) == set() and here.stats()["rows"] == 0
        for store in (here, there):
            store.close()
