"""Embeddings and batches that the tests of the modules share."""

import torch

import oneemb

STORES = ["device", "host", "ssd", "ssd, host cache", "remote"]


def store_options(kind, path, *, cache_mb=1, **options):
    if kind == "device":
        return oneemb.make_device_mem_store_options(path, **options)
    if kind == "host":
        return oneemb.make_cached_host_mem_store_options(cache_mb, path, **options)
    if kind == "remote":
        url = options.pop("url", f"memory://{path}")
        return oneemb.make_cached_remote_store_options(url, cache_mb, path, **options)
    if kind == "ssd, host cache":
        options["host_cache_budget_mb"] = 1
    return oneemb.make_cached_ssd_store_options(cache_mb, path, **options)


def make_embedding(
    path, *, store="device", dim=4, tables=1, dtype=torch.float32, key_type=torch.int64, name="items", cache_mb=1,
    options=None, **more,
):  # fmt: skip
    """An embedding on a folder; `tables` is how many or a list, `options` are more of the store's."""
    if isinstance(tables, int):
        tables = [oneemb.make_table(oneemb.make_uniform_initializer(-1, 1)) for _ in range(tables)]
    kind = oneemb.MultiTableMultiColumnEmbedding if isinstance(dim, list) else oneemb.MultiTableEmbedding
    return kind(
        name, dim, dtype, key_type, tables, store_options(store, path, cache_mb=cache_mb, **(options or {})), **more
    )


def rows_of(embedding, ids, table=0):
    """The weights of ids without inserting any."""
    training = embedding.training
    embedding.eval()
    ids = torch.as_tensor(ids)
    rows = embedding(ids.to(embedding.key_type), torch.full(ids.shape, table)).detach()
    embedding.train(training)
    return rows


def zipf_ids(batch, tables, steps, *, ids=2000, seed=0):
    """Batches in which some ids come often, within a batch and in every one, and new ones keep coming."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(steps, batch, tables, generator=generator, dtype=torch.float64)
    return (ids**u).long() * 7919 - ids


def reopen(embedding, **more):
    """Close an embedding and make one like it on the same folder."""
    embedding.close()
    return type(embedding)(
        embedding.name, embedding.embedding_dim, embedding.dtype, embedding.key_type, embedding.tables,
        embedding.store_options, padding_idx=embedding.padding_idx, seed=embedding.seed, **more,
    )  # fmt: skip
