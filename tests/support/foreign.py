"""Embeddings and rows for tests of tables of other libraries."""

import numpy as np
import torch

import oneemb


def make_embedding(path, dim, optimizer=None, dtype=torch.float32, tables=2, **options):
    embedding = oneemb.MultiTableEmbedding(
        "e", dim, dtype, torch.int64, [oneemb.make_table(oneemb.make_constant_initializer(0.5))] * tables,
        oneemb.make_device_mem_store_options(str(path)), num_threads=1, **options,
    )  # fmt: skip
    if optimizer is not None:
        oneemb.Optimizer(optimizer(embedding.parameters()), [embedding])
    return embedding


def rows_of(embedding, table=0):
    """{id: weights and state} of a table."""
    embedding.save_snapshot("look", overwrite=True)
    return rows_in(embedding.store.plan.persistent_path, "look", table)


def rows_in(path, snapshot, table=0):
    found = {}
    with oneemb.make_persistent_table_reader(path, snapshot, "int64", "float32", with_tables=True) as reader:
        for table_N, keys, values in reader:
            found |= {int(key): row for of, key, row in zip(table_N, keys, values, strict=True) if of == table}
    return found


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(found[key].tobytes() == np.asarray(wanted[key], np.float32).tobytes() for key in wanted)
