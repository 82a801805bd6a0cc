"""An index that is built anew beside the index in use: each search sees one version, exactly, whatever fails meanwhile.

The oracle of a search is the distance from the query to each row that the job had in the version, by NumPy.
"""

import shutil
import subprocess
import sys
import threading
import time

import faiss
import numpy as np
import pytest

import oneemb
from oneemb.sinks import index_build, index_sink
from oneemb.sinks.faiss_index import FaissLibrary
from oneemb.sinks.index_build import IndexBuild
from tests.support.forks import ended_well, in_child
from tests.support.interrupts import interrupt_soon, interrupted
from tests.support.published import DIM, Job, publishing, rows_of as published_rows
from tests.support.waits import ended

THREAD = "oneemb-index"
PIECES = 2
"""Additions that a new index of all rows of the job takes."""


class Job1(Job):
    """A job of about 1,700 rows in table 1, of which a delta changes some dozens."""

    def save(self, name, **training):
        super().save(name, **{"count": 150, "ids": 6000} | training)


@pytest.fixture
def job(tmp_path):
    job = Job1(tmp_path / "job")
    job.save("v0", count=2000)
    yield job
    assert not building(), "a test leaves no thread"
    job.close()


def building():
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def wait_for_builds():
    for thread in building():
        thread.join(60)
    assert not building()


class Exact:
    """Makes exact indexes; an addition in the thread of a build calls `hook` first.

    `adds`: additions of threads of builds so far.
    """

    def __init__(self, hook=lambda: None):
        self.hook, self.adds, self.made = hook, 0, 0

    def __call__(self, vector_ND):
        index = faiss.IndexFlatL2(vector_ND.shape[1])
        add, self.made = index.add, self.made + 1

        def hooked(vector_ND):
            if threading.current_thread().name == THREAD:
                self.adds += 1
                self.hook()
            add(vector_ND)

        index.add = hooked
        return index


class Gate:
    """A hook that waits until the gate is opened."""

    def __init__(self):
        self.reached, self._opened = threading.Event(), threading.Event()

    def __call__(self):
        self.reached.set()
        assert self._opened.wait(60)

    def open(self):
        self._opened.set()


def made_sink(make, folder=None, **options):
    return oneemb.sinks.Faiss(folder, make, **{"table": 1, "rebuild": 0.02} | options)


def rows_of(job, name):
    rows = {id: np.frombuffer(row, np.float32) for (table, id), row in job.rows[name].items() if table == 1}
    return np.array(list(rows)), np.array(list(rows.values())).reshape(-1, DIM)


def check(job, sink, name, count=5000):
    """Whether searches find the rows of a version and no others, with their distances: all rows, or the nearest."""
    query_QD = np.random.default_rng(3).uniform(-1, 1, (4, DIM)).astype(np.float32)
    score_QK, id_QK, version = sink.search(query_QD, count)
    assert name in (None, version.name)
    ids, rows = rows_of(job, version.name)
    assert count == 5 or len(ids) < count
    for score_K, id_K, query_D in zip(score_QK, id_QK, query_QD, strict=True):
        distances = dict(zip(ids.tolist(), ((rows.astype(np.float64) - query_D) ** 2).sum(1), strict=True))
        expected = sorted(distances.values())
        found = id_K[: len(expected)].tolist()
        assert len(set(found)) == len(found) and (id_K[len(expected) :] == -1).all()
        np.testing.assert_allclose(score_K[: len(found)], expected[: len(found)], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose([distances[id] for id in found], expected[: len(found)], rtol=1e-4, atol=1e-5)


def save_and_flush(job, publisher, **training):
    name = f"v{len(job.rows)}"
    job.save(name, **training)
    publisher.flush()
    return name


def due(job, publisher, sink, has_begun=lambda: False):
    """Save deltas until a build has begun; returns the index in use and the newest version."""
    index = sink.view.index
    for _ in range(20):
        name = save_and_flush(job, publisher)
        if building() or has_begun() or sink.view.index is not index:
            return index, name
    raise AssertionError("no build has begun")


@pytest.mark.parametrize("held", ["before it reads", "before its first vector", "before its last vectors"])
def test_versions_are_shown_while_an_index_is_built_anew_and_are_in_the_new_index(job, held):
    gate, make = Gate(), Exact()
    make.hook = lambda: held == "before its first vector" and gate() or make.adds == PIECES and gate()

    def vectors(weight_ND):
        if held == "before it reads" and threading.current_thread().name == THREAD:
            gate()
        return weight_ND

    sink = made_sink(make, vectors=vectors)
    with publishing(job, sink) as publisher:
        publisher.flush()
        check(job, sink, "v0")
        index, name = due(job, publisher, sink)
        assert gate.reached.wait(60)
        for n in range(6):
            check(job, sink, name)
            assert sink.view.index is index, "the index in use stays"
            if n == 2:
                job.embedding.erase(job.embedding.ids(table=1)[:40], 1)
            name = save_and_flush(job, publisher, whole=n == 4)
        gate.open()
        wait_for_builds()
        assert sink.view.index is not index and len(sink.view.live_P) < len(rows_of(job, name)[0]) + 6 * 200
        check(job, sink, name)
        name = save_and_flush(job, publisher)
        check(job, sink, name)
        wait_for_builds()
        assert publisher.stats().popitem()[1]["wholes"] == 1


def test_a_new_index_that_comes_in_the_middle_of_a_version_gets_the_version_too(job, tmp_path, monkeypatch):
    gate, write = Gate(), FaissLibrary.write
    sink = made_sink(Exact(gate), tmp_path / "index")

    def writes(*arguments):
        """Let the new index come after a version was added to the index in use, before it is shown."""
        if gate.reached.is_set():
            gate.open()
            wait_for_builds()
        write(*arguments)

    with publishing(job, sink) as publisher:
        publisher.flush()
        index, _ = due(job, publisher, sink)
        assert gate.reached.wait(60)
        monkeypatch.setattr(FaissLibrary, "write", writes)
        name = save_and_flush(job, publisher)
        assert sink.view.index is not index
        check(job, sink, name)
        wait_for_builds()


@pytest.mark.parametrize("index", ["HNSW16", "IVF4,Flat", "IVF4,PQ4x4", "usearch"])
def test_each_library_builds_its_index_beside(job, index):
    if index == "usearch":
        sink = oneemb.sinks.Usearch(None, table=1, inner_product=False, rebuild=0.02, expansion_search=2000)
    else:
        sink = oneemb.sinks.Faiss(None, index, table=1, inner_product=False, rebuild=0.02)
    with publishing(job, sink) as publisher:
        publisher.flush()
        former, name = due(job, publisher, sink)
        wait_for_builds()
        assert sink.view.index is not former
        for _ in range(4):
            if "PQ" in index:  # which says no exact distance
                assert set(sink.search(np.zeros((1, DIM), np.float32), 50)[1][0]) <= {-1, *rows_of(job, name)[0]}
            else:
                if index.startswith("IVF"):
                    sink.view.index.nprobe = 4
                if index.startswith("HNSW"):
                    sink.view.index.hnsw.efSearch = 2000
                check(job, sink, name, count=5)
            name = save_and_flush(job, publisher)
            wait_for_builds()


def test_a_search_sees_one_version_while_new_indexes_take_the_place_of_old_ones(job):
    sink, wrong, seen, done = made_sink(Exact()), [], set(), threading.Event()
    with publishing(job, sink) as publisher:
        publisher.flush()

        def search():
            while not done.is_set():
                view = sink.view
                seen.add(id(view.index))
                try:
                    check(job, sink, None, count=5)
                except AssertionError as error:
                    wrong.append(error)

        threads = [threading.Thread(target=search) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(12):
            save_and_flush(job, publisher)
        done.set()
        ended(*threads)
        wait_for_builds()
    assert not wrong and len(seen) > 2


def test_a_cap_holds_in_the_index_in_use_and_in_the_new_one(job):
    cap, gate = 1400, Gate()
    sink = made_sink(Exact(gate), max_rows=cap)
    first = dict(zip(*(one.tolist() for one in rows_of(job, "v0")), strict=True))

    def check_capped(name):
        """Rows of deltas stay, since they are newer than those of the whole snapshot; as many others as there is room
        for stay too."""
        ids, rows = rows_of(job, name)
        newer = {id for id, row in zip(ids.tolist(), rows.tolist(), strict=True) if first.get(id) != row}
        score_QK, id_QK, version = sink.search(np.zeros((1, DIM), np.float32), 5000)
        found = id_QK[0][np.isfinite(score_QK[0])]
        assert version.name == name and newer <= set(found.tolist())
        assert len(newer) < len(set(found.tolist())) == len(found) == min(cap, len(ids))
        distances = dict(zip(ids.tolist(), (rows.astype(np.float64) ** 2).sum(1), strict=True))
        np.testing.assert_allclose(score_QK[0][: len(found)], [distances[id] for id in found.tolist()], rtol=1e-4)

    with publishing(job, sink) as publisher:
        publisher.flush()
        assert len(rows_of(job, "v0")[0]) > cap
        check_capped("v0")
        index, name = due(job, publisher, sink)
        assert gate.reached.wait(60)
        for _ in range(2):
            check_capped(name)
            name = save_and_flush(job, publisher)
        assert sink.view.index is index
        gate.open()
        wait_for_builds()
        assert sink.view.index is not index
        check_capped(name)
        check_capped(save_and_flush(job, publisher))
        wait_for_builds()


@pytest.mark.parametrize("vectors", [None, lambda weight_ND: weight_ND])
def test_a_table_that_is_emptied_while_an_index_is_built_is_shown_empty_and_filled_again(job, vectors):
    gate = Gate()
    sink = made_sink(Exact(gate), vectors=vectors)
    with publishing(job, sink) as publisher:
        publisher.flush()
        due(job, publisher, sink)
        assert gate.reached.wait(60)
        job.embedding.erase(job.embedding.ids(table=1), 1)
        job.embedding.save_delta("empty", job.embedding.last_snapshot)
        job.rows["empty"] = published_rows(job.embedding)
        flushing = threading.Thread(target=publisher.flush)
        flushing.start()  # It waits for the build, whose index is of no use.
        flushing.join(1.0)
        gate.open()
        ended(flushing)
        assert not building() and len(rows_of(job, "empty")[0]) == sink.view.index.ntotal == 0
        check(job, sink, "empty")
        for _ in range(2):
            name = save_and_flush(job, publisher)
            check(job, sink, name)
            wait_for_builds()


def test_a_build_that_fails_is_an_error_once_and_loses_nothing(job):
    make = Exact()

    def fails():
        raise MemoryError("no room for two")

    make.hook = fails
    sink = made_sink(make)
    with publishing(job, sink) as publisher:
        publisher.flush()
        index, name = due(job, publisher, sink, lambda: make.adds > 0)
        wait_for_builds()
        check(job, sink, name)
        dead = int((~sink.view.live_P).sum())
        job.save("after")
        with pytest.raises(oneemb.PublishError, match="must be built anew, .* MemoryError: no room for two"):
            publisher.flush()
        check(job, sink, name)
        make.hook, name = lambda: None, "after"
        publisher.flush()
        while not building() and make.made == 2:  # The build is not begun again with each version.
            check(job, sink, name)
            assert int((~sink.view.live_P).sum()) < 2 * dead and sink.view.index is index
            name = save_and_flush(job, publisher)
        wait_for_builds()
        assert sink.view.index is not index and make.made == 3
        check(job, sink, name)


def test_versions_that_are_deleted_while_a_build_reads_them_are_an_error_at_the_fifth_build(job):
    reads = []

    def vectors(weight_ND):
        if threading.current_thread().name == THREAD:
            reads.append(len(weight_ND))
            raise oneemb.CorruptTableError("the writer has removed the snapshot")
        return weight_ND

    sink = made_sink(Exact(), vectors=vectors)
    with publishing(job, sink) as publisher:
        publisher.flush()
        index, name = due(job, publisher, sink, lambda: reads)
        for n in range(1, 5):
            wait_for_builds()
            assert len(reads) == n
            name = save_and_flush(job, publisher)
            check(job, sink, name)
        wait_for_builds()
        job.save("after")
        with pytest.raises(oneemb.PublishError, match="the writer has removed the snapshot"):
            publisher.flush()
        publisher.flush()
        check(job, sink, "after")
        assert len(reads) == 5 and sink.view.index is index


def test_a_close_ends_a_build_between_two_pieces_and_keeps_no_folder_locked(job, tmp_path):
    gate = Gate()
    make = Exact(gate)
    sink = made_sink(make, tmp_path / "index")
    publisher = publishing(job, sink)
    publisher.flush()
    _, name = due(job, publisher, sink)
    assert gate.reached.wait(60)
    with pytest.raises(KeyboardInterrupt):
        interrupt_soon()
        publisher.close()
    other = made_sink(Exact(), tmp_path / "index", rebuild=1.0)
    with publishing(job, other) as second:
        second.flush()
        check(job, other, name)
        name = save_and_flush(job, second)
        check(job, other, name)
    gate.open()
    wait_for_builds()
    assert make.adds == 1
    publisher.close()


def test_a_sink_that_nobody_holds_ends_its_build(job):
    gate = Gate()
    make = Exact(gate)
    sink = made_sink(make)
    publisher = publishing(job, sink, seconds=0.05)
    publisher.flush()
    due(job, publisher, sink)
    assert gate.reached.wait(60)
    followers = [thread for thread in threading.enumerate() if thread.name == "oneemb-follow"]
    del sink, publisher
    assert followers
    for thread in followers:  # A call at work keeps the sink alive until the call ends.
        thread.join(60)
        assert not thread.is_alive()
    gate.open()
    wait_for_builds()
    assert make.adds == 1


EXIT = """
import sys, threading, time
import faiss
from tests.sinks.test_index_build import *

class Waits:
    def __call__(self):
        begun.set()
        while threading.main_thread().is_alive():
            time.sleep(0.001)
        with open(sys.argv[1] + "/pieces", "a") as file:
            file.write("piece ")

if __name__ == "__main__":
    begun = threading.Event()
    job = Job1(sys.argv[1] + "/job")
    job.save("v0", count=2000)
    sink = made_sink(Exact(Waits()), sys.argv[1] + "/index")
    publisher = publishing(job, sink)
    publisher.flush()
    due(job, publisher, sink)
    assert begun.wait(60)
"""


def test_a_program_ends_while_an_index_is_built(tmp_path):
    done = subprocess.run([sys.executable, "-c", EXIT, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "pieces").read_text() == "piece "


def test_a_child_of_fork_has_no_build_and_goes_on(job):
    gate = Gate()
    sink = made_sink(Exact(gate))
    with publishing(job, sink) as publisher:
        publisher.flush()
        index, name = due(job, publisher, sink)
        assert gate.reached.wait(60)
        job.save("after")

        def child():
            faiss.omp_set_num_threads(1)  # OpenMP has no threads in a child.
            gate.open()
            check(job, sink, name)
            with publishing(job, sink):
                pass
            wait_for_builds()
            check(job, sink, "after")
            return True

        assert ended_well(in_child(child)) is True
        publisher.flush()
        check(job, sink, "after")
        gate.open()
        wait_for_builds()
        assert sink.view.index is not index
        check(job, sink, "after")


def test_what_is_saved_is_one_version_and_a_restart_or_a_rollback_goes_on(job, tmp_path):
    gate = Gate()
    sink = made_sink(Exact(gate), tmp_path / "index", save_every=2, keep=3)
    with publishing(job, sink) as publisher:
        publisher.flush()
        _, name = due(job, publisher, sink)
        saved, shown = [], []
        for _ in range(4):
            name = save_and_flush(job, publisher)
            shown.append(name)
            shutil.copytree(tmp_path / "index", tmp_path / name)
            reader = made_sink(Exact(), tmp_path / name)
            saved.append(reader.refresh().name)
            check(job, reader, saved[-1])
            with publishing(job, reader):
                pass
            check(job, reader, name)
        assert len(set(saved)) == 2, "each second version is saved"
        assert [one == other for one, other in zip(saved, shown, strict=True)].count(True) == 2
        gate.open()
        publisher.show(saved[0])  # The build belongs to no version that the sink shows now, and ends.
        check(job, sink, saved[0])
        assert not building()
        publisher.show(None)
        check(job, sink, name)
        name = save_and_flush(job, publisher)
        check(job, sink, name)


@pytest.mark.parametrize("job_kind", ["all rows change", "few rows"])
def test_an_index_that_is_built_about_as_fast_as_changes_are_added_is_built_at_once(tmp_path, job_kind):
    job = Job(tmp_path / "job")
    many = {"count": 8000, "ids": 2000} if job_kind == "all rows change" else {"count": 100, "ids": 200}
    job.save("v0", **many)
    make = Exact()
    sink = made_sink(make, rebuild=0.25)
    with publishing(job, sink) as publisher:
        publisher.flush()
        for _ in range(6):
            check(job, sink, save_and_flush(job, publisher, **many))
            assert not building() and (~sink.view.live_P).mean() <= 0.25
    assert make.adds == 0 and make.made > 2
    job.close()


def test_a_build_that_lasts_long_is_not_begun_again_at_once(job):
    gate, make = Gate(), Exact()
    make.hook = gate
    sink = made_sink(make)
    with publishing(job, sink) as publisher:
        publisher.flush()
        due(job, publisher, sink)
        assert gate.reached.wait(60)
        for _ in range(8):  # so many changes that the new index begins with more dead positions than `rebuild`
            name = save_and_flush(job, publisher)
        gate.open()
        wait_for_builds()
        first, size = int((~sink.view.live_P).sum()), len(sink.view.live_P)
        assert first > 0.02 * size and make.made == 2
        check(job, sink, name)
        while not building() and make.made == 2:
            dead = int((~sink.view.live_P).sum())
            assert dead < 2 * first
            save_and_flush(job, publisher)
        wait_for_builds()
        assert dead > 1.5 * first


def test_a_version_waits_for_a_build_that_would_never_end(job, monkeypatch):
    waiting, real, sink, wait = threading.Event(), Exact(), None, IndexBuild.wait
    shown = []

    def waits(build, *check):
        waiting.set()
        wait(build, *check)

    def hook():
        """Hold each round until there is another one to make, as fast versions do."""
        while sink.version().name in shown and not waiting.is_set():
            time.sleep(0.001)
        shown.append(sink.version().name)

    monkeypatch.setattr(IndexBuild, "wait", waits)
    real.hook = hook
    sink = made_sink(real)
    with publishing(job, sink) as publisher:
        publisher.flush()
        index, _ = due(job, publisher, sink)
        for _ in range(12):
            name = save_and_flush(job, publisher)
            check(job, sink, name)
            if waiting.is_set():
                break
        assert waiting.is_set() and sink.view.index is not index
        wait_for_builds()


def test_an_interrupt_at_any_line_leaves_a_sink_that_goes_on(job):
    make = Exact()
    sink = made_sink(make, rebuild=0.001)
    files, places = (index_sink.__file__, index_build.__file__), []
    functions = {"apply", "_show", "_begin_build", "_look_at_build", "_take_over", "start", "_is_built_at_once"}
    publisher = publishing(job, sink)
    publisher.flush()
    for line in range(1, 300):
        name = f"v{len(job.rows)}"
        job.save(name)
        _, place = interrupted(publisher.flush, line, "signal", files=files, functions=functions)
        if place is None:
            break
        places.append(place)
        publisher.flush()
        check(job, sink, name, count=5)
        wait_for_builds()
        check(job, sink, name, count=5)
    assert len(places) > 30 and any("_begin_build" in place for place in places) and make.made > 20
    publisher.close()
