"""Each sink shows each version of a job, whatever is saved, deleted, rolled back or restarted between."""

import json
import os
import shutil
import uuid

import pytest
from click.testing import CliRunner

import oneemb
from oneemb.cli.commands import oneemb as command
from oneemb.storage.errors import OtherTableError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.table.snapshot_file import SnapshotFiles
from tests.support.published import DIM, KINDS, PREFIX, Job, Place, publishing


@pytest.fixture(params=KINDS)
def place(request, tmp_path, redis_server):
    return Place(request.param, tmp_path / "sinks", redis_server)


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "job")
    yield job
    job.close()


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
        with pytest.raises(oneemb.PublishError, match="has no changes from there to 'v3'"):
            with publishing(job, place.make(), when_behind="error"):
                pass
        place.check(job, "v1")
    with publishing(job, place.make()) as publisher:
        publisher.flush()
        assert publisher.stats().popitem()[1]["wholes"] == 1
    place.check(job, "v3")


def test_a_whole_snapshot_gives_a_sink_its_changes(place, job):
    job.train(1000, ids=10000)
    for n in range(2):
        job.save(f"v{n}")
    with publishing(job, place.make(), when_behind="error"):
        pass
    job.save("v2", whole=True)
    with publishing(job, place.make(), when_behind="error") as publisher:
        publisher.flush()
        place.check(job, "v2")
        (stats,) = publisher.stats().values()
        if place.kind != "served":
            assert (stats["wholes"], stats["versions"]) == (0, 1) and 0 < stats["rows"] < 200
        job.save("v3", whole=True)
        job.save("v4")  # since v3, which the sink has not seen
        publisher.flush()
        place.check(job, "v4")
        assert publisher.stats().popitem()[1]["wholes"] == (2 if place.kind == "served" else 0)


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


def test_a_missing_parent_or_a_strangers_delta_is_an_error(place, job, tmp_path):
    for n in range(3):
        job.save(f"v{n}")
    with publishing(job, place.make(), version="v0"):
        pass
    other = Job(tmp_path / "other")
    for n in range(2):
        other.save(f"v{n}")
    other.close()
    its, others = (SnapshotFiles(LocalFileSystem(), f"{one.folder}/snapshots").path("v1") for one in (job, other))
    os.rename(its, tmp_path / "kept")
    for parent in (None, others):
        if parent:
            shutil.copy(parent, its)
        publisher = publishing(job, place.make())
        with pytest.raises(oneemb.PublishError, match=r"'v2' is a delta since 'v1' .* not there, or has been replaced"):
            publisher.flush()
        publisher.close()
        place.check(job, "v0")
    os.replace(tmp_path / "kept", its)
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


def test_a_snapshot_that_no_user_has_saved_is_neither_published_nor_served(job):
    job.save("v0")
    job.embedding.store.snapshots.save("rows-before-a-relayout-0", {})
    job.embedding.store.snapshots.save("rows-on-their-way-to-a-file-0", {})
    seen = []
    with publishing(job, lambda changes: seen.append(changes.version.name)):
        pass
    assert seen == ["v0"]
    with oneemb.InferenceEmbedding.open(job.folder) as served:
        assert served.version.name == "v0"


def train_on_ranks(group, path):
    """Rows that this rank owns at each of three versions."""
    job, states = Job(path, group, save_rows=False), []
    for n in range(3):
        job.save(f"v{n}")
        rows = {}
        for table_N, id_N, row_NW in job.embedding.store.rows.rows():
            for table, id, row in zip(table_N.tolist(), id_N.tolist(), row_NW, strict=True):
                rows[table, id] = row[:DIM].tobytes()
        states.append(rows)
    job.close()
    return states


def test_rows_of_any_number_of_ranks_are_published(tmp_path, rank_pool, redis_server):
    of_ranks = rank_pool(2, train_on_ranks, str(tmp_path / "job"))
    place = Place("redis", tmp_path, redis_server)
    for n in range(3):
        with oneemb.publish(tmp_path / "job", [place.make()], version=f"v{n}") as publisher:
            publisher.flush()
            assert publisher.stats().popitem()[1]["wholes"] == (n == 0)
        assert place.read() == (f"v{n}", of_ranks[0][n] | of_ranks[1][n])


def test_versions_of_an_object_store_are_published(job, tmp_path):
    url, place = f"memory://{uuid.uuid4().hex}/items", Place("table", tmp_path / "sinks", None)
    with pytest.raises(ValueError, match="folder must be given with a URL, and only then"):
        oneemb.publish(url, [place.make()])
    with pytest.raises(ValueError, match="folder must be given with a URL, and only then"):
        publishing(job, place.make(), folder=tmp_path / "copy")
    job.save("v0")
    oneemb.push(job.folder, url)
    with oneemb.publish(url, [place.make()], folder=tmp_path / "copy", seconds=1000) as publisher:
        publisher.flush()
        place.check(job, "v0")
        for n in range(1, 4):
            job.save(f"v{n}")
        oneemb.push(job.folder, url)
        publisher.flush()
        place.check(job, "v3")
        (stats,) = publisher.stats().values()
        assert (stats["versions"], stats["wholes"]) == (4, 1)


def test_the_command_publishes_to_sinks_of_each_kind(job, tmp_path, redis_server):
    job.save("v0")
    job.save("v1")
    kinds = {kind: Place(kind, tmp_path / "sinks", redis_server) for kind in ("parquet", "served", "table", "redis")}
    targets = {
        "parquet": f"parquet:{tmp_path}/sinks/parquet", "served": f"served:{tmp_path}/sinks/served/file",
        "table": f"table:{tmp_path}/sinks/table", "redis": f"redis://127.0.0.1:{redis_server.port}?prefix={PREFIX}",
    }  # fmt: skip
    arguments = [word for target in targets.values() for word in ("--to", target)]
    done = CliRunner().invoke(command, ["publish", job.folder, *arguments, "--once", "--json"])
    assert done.exit_code == 0, done.output
    assert {stats["version"] for stats in json.loads(done.stdout)["sinks"].values()} == {"v1"}
    for place in kinds.values():
        place.check(job, "v1")
    for wrong in ("nothing", "box:there"):
        done = CliRunner().invoke(command, ["publish", job.folder, "--to", wrong, "--once"])
        assert done.exit_code == 2 and "--to" in done.stderr
