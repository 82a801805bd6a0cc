"""The same seed gives the same losses, bit for bit, wherever the rows are and however many threads work on them."""

import pytest
import torch

from tests.support.cold_shards import make_shards_small
from tests.support.training import STEPS, Job

# A row of Adam's takes 96 bytes and 40 beside it: a cache of 1 MiB holds 7,710 of them, the job meets over 20,000.
BIG = dict(batch=2048, ids=60_000)
PLACES = {
    "device": dict(store="device"),
    "host, 1 MB": dict(store="host", cache_mb=1),
    "host, 1 GB": dict(store="host", cache_mb=1024),
    "ssd, 1 MB": dict(store="ssd", cache_mb=1),
    "ssd, 1 MB, lru": dict(store="ssd", cache_mb=1, options=dict(cache_policy="lru")),
    "ssd, 1 GB": dict(store="ssd", cache_mb=1024),
    "ssd, 1 MB, host cache": dict(store="ssd, host cache", cache_mb=1),
    "ssd, 1 MB, host cache, lru": dict(store="ssd, host cache", cache_mb=1, options=dict(cache_policy="lru")),
    "ssd, 1 GB, host cache": dict(store="ssd, host cache", cache_mb=1024),
    "ssd, 1 MB, index on disk": dict(store="ssd", cache_mb=1, options=dict(index_memory_mb=1)),
    "remote, 1 MB": dict(store="remote", cache_mb=1),
}


@pytest.fixture(autouse=True)
def one_torch_thread():
    # torch's own sums depend on its number of threads, which is not what is compared here.
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    torch.set_num_threads(1)
    job = Job(tmp_path_factory.mktemp("device"), num_threads=1, **BIG)
    losses, rows = job.run(0, STEPS), job.rows()
    job.embedding.close()
    assert len(rows) > 20_000 and len(set(losses)) == STEPS
    return losses, rows


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_losses_and_rows_do_not_depend_on_store_cache_or_threads(place, threads, expected, tmp_path, monkeypatch):
    if "index on disk" in place:
        make_shards_small(monkeypatch)
    job = Job(tmp_path, num_threads=threads, **PLACES[place], **BIG)
    losses = job.run(0, STEPS)
    assert losses == expected[0]
    evicted = job.embedding.stats()["device"]["evicted"]
    assert evicted > 10_000 if "1 MB" in place else evicted == 0
    if place.startswith("ssd, 1 MB, host cache"):
        assert job.embedding.stats()["host"]["evicted"] > 0
    assert job.rows() == expected[1]
    assert (job.embedding.stats()["persistent"]["index_blocks_read"] > 0) == ("index on disk" in place)
    job.embedding.close()


def test_reading_in_between_changes_no_loss(expected, tmp_path):
    # Reads bring rows into the cache and push others out.
    job = Job(tmp_path, store="ssd", cache_mb=1, **BIG)
    losses = []
    for step in range(STEPS):
        job.weights(torch.arange(-5000, 5000) * 7)
        losses += job.run(step, step + 1)
    assert losses == expected[0]
    job.embedding.close()


@pytest.mark.parametrize("change", [dict(seed=12), dict(optimizer="adamw")], ids=str)
def test_a_small_change_of_the_job_changes_the_losses(change, expected, tmp_path):
    job = Job(tmp_path, **change, **BIG)
    assert job.run(0, STEPS) != expected[0]
    job.embedding.close()
