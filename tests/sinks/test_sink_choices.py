"""Sinks made again with other arguments, in folders with files of others, by functions that end their thread."""

import functools
import json
import os
import sys
import time

import numpy as np
import pytest
import redis
import torch

import oneemb
from oneemb.sinks.faiss_index import FaissLibrary
from oneemb.storage.errors import ForkedProcessError
from tests.support.forks import ended_well, in_child
from tests.support.published import PREFIX, publishing, read_files, read_index, read_redis, read_served, read_table


def of_table(rows, table):
    return {key: row for key, row in rows.items() if key[0] == table}


@pytest.mark.parametrize("kind", ["redis", "parquet", "safetensors", "table", "served"])
@pytest.mark.parametrize("saves", [True, False], ids=["with a newer delta", "with the same version"])
def test_a_sink_that_is_made_with_other_tables_gets_all_rows(job, tmp_path, redis_server, kind, saves):
    folder = tmp_path / "sink"
    if kind == "redis":
        client = redis.Redis(port=redis_server.port)
        client.flushall()
        make, argument = oneemb.sinks.Redis, f"redis://127.0.0.1:{redis_server.port}?prefix={PREFIX}"
        read = lambda: read_redis(client)  # noqa: E731
    else:
        sinks = {"table": oneemb.sinks.Table, "served": oneemb.sinks.ServedFile}
        make, argument = sinks.get(kind, lambda folder, **more: oneemb.sinks.Files(folder, kind, **more)), folder
        reads = {"table": read_table, "served": read_served}
        read = lambda: reads.get(kind, lambda folder: read_files(folder, kind))(folder)  # noqa: E731
    with publishing(job, make(argument, tables=[0])):
        pass
    assert read()[1] == of_table(job.rows["v0"], 0)
    newest = "v1" if saves else "v0"
    if saves:
        job.save("v1")
    with publishing(job, make(argument)):
        pass
    assert read() == (newest, job.rows[newest])
    with publishing(job, make(argument, tables=[1])):
        pass
    assert read() == (newest, of_table(job.rows[newest], 1))


@pytest.mark.parametrize("kind", ["parquet", "table"])
def test_a_sink_that_is_made_with_state_gets_all_rows(job, tmp_path, kind):
    make = oneemb.sinks.Files if kind == "parquet" else oneemb.sinks.Table
    read = functools.partial(
        *((read_files, tmp_path / "sink", kind) if kind == "parquet" else (read_table, tmp_path / "sink"))
    )
    for name, with_state in (("v1", False), ("v2", True), ("v3", False)):
        job.save(name)
        with publishing(job, make(tmp_path / "sink", with_state=with_state)) as publisher:
            publisher.flush()
            assert publisher.stats().popitem()[1]["wholes"] == 1
        assert read() == (name, job.rows[name])


def test_state_that_is_not_published_any_more_goes(job, redis_server):
    client = redis.Redis(port=redis_server.port)
    client.flushall()
    for with_state, states in ((True, True), (False, False)):
        url = f"redis://127.0.0.1:{redis_server.port}?prefix={PREFIX}"
        with publishing(job, oneemb.sinks.Redis(url, with_state=with_state)):
            pass
        assert read_redis(client) == ("v0", job.rows["v0"])
        assert bool(list(client.scan_iter("*_osid_1"))) == states


def test_a_folder_of_files_gets_another_format(job, tmp_path):
    with publishing(job, oneemb.sinks.Files(tmp_path / "sink", "parquet")):
        pass
    job.save("v1")
    with publishing(job, oneemb.sinks.Files(tmp_path / "sink", "safetensors")):
        pass
    assert read_files(tmp_path / "sink", "safetensors") == ("v1", job.rows["v1"])


@pytest.mark.parametrize("saves", [True, False])
def test_an_index_of_another_table_is_built_anew(job, tmp_path, saves):
    options = {"index": "Flat", "inner_product": False}
    with publishing(job, oneemb.sinks.Faiss(tmp_path / "sink", table=0, **options)):
        pass
    newest = "v1" if saves else "v0"
    if saves:
        job.save("v1")
    with publishing(job, oneemb.sinks.Faiss(tmp_path / "sink", table=1, **options)):
        pass
    shown = read_index(oneemb.sinks.Faiss(tmp_path / "sink"), 1)  # a reader names no table
    assert shown == (newest, of_table(job.rows[newest], 1))


def test_faiss_adds_few_vectors_by_one_thread_and_many_by_all():
    faiss, added = pytest.importorskip("faiss"), []

    class Index:
        ntotal = 0

        def add(self, vector_ND):
            added.append((len(vector_ND), faiss.omp_get_max_threads()))
            self.ntotal += len(vector_ND)

    faiss.omp_set_num_threads(3)
    try:
        library = FaissLibrary(lambda vector_ND: Index(), inner_product=True)
        for size in (1, 256, 257):
            library.add(library.made(np.zeros((size, 4), np.float32)), np.zeros((size, 4), np.float32))
        assert added == [(1, 1), (256, 1), (257, 3)] and faiss.omp_get_max_threads() == 3
    finally:
        faiss.omp_set_num_threads(os.cpu_count())


@pytest.mark.parametrize("make", [oneemb.sinks.Faiss, oneemb.sinks.Usearch])
def test_an_index_of_another_metric_is_built_anew(job, tmp_path, make):
    ids = job.embedding.ids(table=0)
    rows = job.embedding.read(ids, torch.tensor(0)).numpy()
    expected = {True: rows.sum(1).max(), False: ((rows - 1) ** 2).sum(1).min()}
    for inner_product, score in expected.items():
        with publishing(job, make(tmp_path / "sink", inner_product=inner_product)):
            pass
        shown = make(tmp_path / "sink").search(np.ones((1, 4), np.float32), 1)[0]  # a reader names no metric
        np.testing.assert_allclose(shown, score, rtol=1e-5)


@pytest.mark.parametrize("tables", [[2], [0, 7]])
def test_a_table_that_is_not_there_is_an_error(job, tmp_path, tables):
    for sink in (
        oneemb.sinks.Files(tmp_path / "files", tables=tables),
        oneemb.sinks.Table(tmp_path / "t", tables=tables),
    ):
        with pytest.raises(oneemb.PublishError, match="tables must be some of 0 to 1"):
            with publishing(job, sink):
                pass


@pytest.mark.parametrize("tables", [[], [-1], ["0"], 0, [0.5]])
def test_tables_that_are_no_numbers_are_refused(tmp_path, tables):
    for make in (oneemb.sinks.Files, oneemb.sinks.Table, oneemb.sinks.ServedFile):
        with pytest.raises(ValueError, match="tables must be"):
            make(tmp_path / "sink", tables=tables)


def test_files_of_others_in_a_sinks_folder_stay(job, tmp_path):
    names = [
        "day.parquet",
        "day.gone.parquet",
        "part-0.safetensors",
        "old.faiss",
        "train.ids",
        "copy.tmp",
        "2024.parquet",
    ]
    for name in names:
        (tmp_path / name).write_text("of a user")
    for sink in (oneemb.sinks.Files(tmp_path), oneemb.sinks.Faiss(tmp_path / "index", "Flat")):
        for name in ("v1", "v2"):
            job.save(f"{name} {type(sink).__name__}", whole=True)
            with publishing(job, sink):
                pass
        for name in names:
            (tmp_path / "index").mkdir(exist_ok=True)
            (tmp_path / "index" / name).write_text("of a user")
    job.save("v3", whole=True)
    with publishing(job, oneemb.sinks.Faiss(tmp_path / "index", "Flat")):
        pass
    for name in names:
        assert (tmp_path / name).read_text() == (tmp_path / "index" / name).read_text() == "of a user"


def test_a_function_that_ends_its_thread_is_an_error_and_is_called_again(job):
    calls = []

    def leaves(changes):
        calls.append(changes)
        if len(calls) == 1:
            sys.exit(3)

    with oneemb.publish(job.folder, [leaves], seconds=0.01) as publisher:
        while len(calls) < 2:
            time.sleep(0.01)
        publisher.flush()
        (stats,) = publisher.stats().values()
        assert (stats["errors"], stats["error"], stats["versions"]) == (1, None, 1)


def test_a_child_of_fork_has_no_figures(job):
    with publishing(job, lambda changes: None) as publisher:

        def child():
            with pytest.raises(ForkedProcessError, match="call publish here"):
                publisher.stats()
            return True

        assert ended_well(in_child(child)) is True


def test_a_clock_that_goes_back_gives_no_lag_below_0(job, monkeypatch):
    with pytest.raises(RuntimeError):
        with publishing(job, lambda changes: None) as publisher:
            monkeypatch.setattr(time, "time", lambda: 5.0)
            assert publisher.stats().popitem()[1]["lag_s"] == 0.0
            raise RuntimeError


def test_a_sink_of_a_former_release_goes_on(job, tmp_path):
    with publishing(job, oneemb.sinks.Files(tmp_path / "sink")):
        pass
    manifest = json.loads((tmp_path / "sink" / "MANIFEST.json").read_text())
    del manifest["choice"], manifest["crc32"]
    (tmp_path / "sink" / "MANIFEST.json").write_text(json.dumps(manifest))
    job.save("v1")
    with publishing(job, oneemb.sinks.Files(tmp_path / "sink")) as publisher:
        publisher.flush()
        assert publisher.stats().popitem()[1]["wholes"] == 0
    assert read_files(tmp_path / "sink", "parquet") == ("v1", job.rows["v1"])
    assert os.path.exists(tmp_path / "sink" / manifest["versions"][0]["rows"])
