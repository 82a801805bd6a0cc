"""Each sink shows each version of a job, whatever is saved, deleted, rolled back or restarted between."""

import functools

import pytest
import torch

import oneemb
from oneemb.storage.errors import OtherTableError, SnapshotNotFoundError
from tests.support.published import (
    PREFIX,
    Job,
    read_faiss,
    read_files,
    read_function,
    read_redis,
    read_served,
    read_table,
    redis_client,
)
from tests.support.redis_process import redis_process
from tests.support.thread_ranks import run_ranks

KINDS = ["function", "redis", "redis in pieces", "parquet", "safetensors", "served", "table", "faiss"]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    with redis_process(tmp_path_factory.mktemp("redis"), appendfsync="no") as process:
        yield process


class Place:
    """A sink's place: `make` opens a sink on it, `read` gives (version, rows) as a user reads them."""

    def __init__(self, kind, folder, redis_server):
        self.kind = kind
        if kind == "function":
            items = {"version": None, "rows": {}}
            self.make = functools.partial(oneemb.sinks.Function, functools.partial(take, items), folder / "position")
            self.read = functools.partial(read_function, items)
        elif kind.startswith("redis"):
            client = redis_client(redis_server)
            client.flushall()
            url = f"redis://127.0.0.1:{redis_server.port}?prefix={PREFIX}"
            self.make = functools.partial(oneemb.sinks.Redis, url, atomic_bytes=0 if "pieces" in kind else 1 << 20)
            self.read = functools.partial(read_redis, client)
        elif kind in ("parquet", "safetensors"):
            self.make = functools.partial(oneemb.sinks.Files, folder / kind, kind, merge_share=100.0)
            self.read = functools.partial(read_files, folder / kind, kind)
        elif kind == "served":
            self.make = functools.partial(oneemb.sinks.ServedFile, folder / "served" / "file")
            self.read = functools.partial(read_served, folder / "served" / "file")
        elif kind == "table":
            self.make = functools.partial(oneemb.sinks.Table, folder / "table")
            self.read = functools.partial(read_table, folder / "table")
        else:
            make = functools.partial(oneemb.sinks.Faiss, folder / "faiss", "Flat", table=1, inner_product=False)
            self.make = make
            self.read = lambda: read_faiss(make(), 1)

    def check(self, job, name):
        """Whether the sink shows the rows of a version of a job."""
        rows = job.rows[name]
        if self.kind == "faiss":
            rows = {key: row for key, row in rows.items() if key[0] == 1}
        shown = self.read()
        assert shown[0] == name
        assert shown[1] == rows


def take(items, changes):
    """A function for `oneemb.publish` that holds the rows in a dict."""
    rows = {} if changes.is_whole else dict(items["rows"])
    table_N, id_N = changes.gone()
    for key in zip(table_N.tolist(), id_N.tolist(), strict=True):
        rows.pop(key, None)
    for batch in changes.batches(7):
        for table, id, row in zip(batch.table_N.tolist(), batch.id_N.tolist(), batch.weight_ND, strict=True):
            rows[table, id] = row.tobytes()
    items.update(version=changes.version.name, rows=rows)


@pytest.fixture(params=KINDS)
def place(request, tmp_path, redis_server):
    return Place(request.param, tmp_path / "sinks", redis_server)


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "job")
    yield job
    job.close()


def publishing(job, *sinks, **options):
    return oneemb.publish(job.folder, sinks, **{"seconds": 1000.0} | options)


def test_a_sink_shows_each_version_in_order_and_goes_on_after_a_restart(place, job):
    job.save("v0")
    with publishing(job, place.make()) as publisher:
        publisher.flush()
        place.check(job, "v0")
        for n in range(1, 4):
            job.save(f"v{n}")
            publisher.flush()
            place.check(job, f"v{n}")
        (stats,) = publisher.stats().values()
        assert (stats["versions"], stats["version"], stats["backlog_versions"]) == (4, "v3", 0)
        assert stats["wholes"] == (4 if place.kind == "served" else 1)
    job.save("v4")
    job.save("v5")
    with publishing(job, place.make()) as publisher:
        publisher.flush()
        place.check(job, "v5")
        (stats,) = publisher.stats().values()
        assert stats["versions"] == (1 if place.kind == "served" else 2)
        publisher.flush()
        assert publisher.stats().popitem()[1]["versions"] == stats["versions"], "each version once"


def test_a_sink_that_is_too_far_behind_gets_all_rows_or_an_error(place, job):
    for n in range(2):
        job.save(f"v{n}")
    with publishing(job, place.make()):
        pass
    job.save("v2")
    job.save("v3", whole=True)
    job.embedding.delete_snapshot("v2")
    job.embedding.delete_snapshot("v1")
    if place.kind != "served":
        with pytest.raises(oneemb.PublishError, match="has no deltas from there to 'v3'"):
            with publishing(job, place.make(), when_behind="error"):
                pass
        place.check(job, "v1")
    with publishing(job, place.make()) as publisher:
        publisher.flush()
        assert publisher.stats().popitem()[1]["wholes"] == 1
    place.check(job, "v3")


def test_all_sinks_are_rolled_back_together_and_go_on(place, job):
    for n in range(4):
        job.save(f"v{n}")
    with publishing(job, place.make()) as publisher:
        publisher.flush()
        publisher.show("v1")
        place.check(job, "v1")
        publisher.show("v2")
        place.check(job, "v2")
        publisher.show(None)
        place.check(job, "v3")
        job.save("v4")
        publisher.flush()
        place.check(job, "v4")


def test_a_job_that_goes_on_from_an_older_version_is_followed(place, job):
    for n in range(3):
        job.save(f"v{n}")
    with publishing(job, place.make()) as publisher:
        publisher.flush()
        job.embedding.load_snapshot("v1")
        job.embedding.delete_snapshots_after("v1")
        publisher.flush()
        place.check(job, "v1")
        job.save("v2")
        publisher.flush()
        place.check(job, "v2")


def test_a_missing_parent_or_a_strangers_delta_is_an_error(place, job):
    for n in range(3):
        job.save(f"v{n}")
    with publishing(job, place.make(), version="v0"):
        pass
    snapshots = job.embedding.store_options.persistent_path[0] + "/snapshots"
    other = Job(job.folder + ".other")
    for n in range(2):
        other.save(f"v{n}")
    other.close()
    import os
    import shutil

    os.rename(f"{snapshots}/v1", f"{job.folder}/v1")
    for parent in (None, f"{other.folder}/snapshots/v1"):
        if parent:
            shutil.copy(parent, f"{snapshots}/v1")
        publisher = publishing(job, place.make())
        with pytest.raises(oneemb.PublishError, match=r"'v2' is a delta since 'v1' .* not there, or has been replaced"):
            publisher.flush()
        publisher.close()
        place.check(job, "v0")
    os.replace(f"{job.folder}/v1", f"{snapshots}/v1")
    with publishing(job, place.make()):
        pass
    place.check(job, "v2")


def test_a_sink_of_another_embedding_is_refused(place, job, tmp_path):
    job.save("v0")
    with publishing(job, place.make()):
        pass
    other = Job(tmp_path / "other", name="users")
    other.save("v0")
    publisher = publishing(other, place.make())
    with pytest.raises(oneemb.PublishError) as caught:
        publisher.flush()
    assert isinstance(caught.value.__cause__, OtherTableError)
    publisher.close()
    other.close()
    place.check(job, "v0")
