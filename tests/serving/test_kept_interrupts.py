"""Ctrl-C while served files are made or snapshots are pulled leaves no lock, even while the exception is kept.

The first instruction of a release is left out: after Ctrl-C there the lock stays as long as the exception is kept, and
no Python code can prevent that.
"""

import linecache
import os
import uuid
from pathlib import Path

import pytest

import oneemb
from oneemb.kernels.threads import Threads
from oneemb.serving import build
from oneemb.storage import fs
from oneemb.storage.locking import file_lock
from oneemb.storage.objects import pull as pull_module
from oneemb.storage.snapshots import backup
from tests.support.interrupts import ROOT, AtLine
from tests.support.published import Job


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "job")
    job.save("v0")
    yield job
    job.close()


def interrupts(call, locks, modules, functions=None):
    """Interrupt a call before each of its lines in some modules. Each time the exception is kept, and another object
    must get each of the locks. Returns the number of lines."""
    held = []
    for line in range(1, 3000):
        at, kept = AtLine(line, files=[module.__file__ for module in modules], functions=functions), None
        try:
            with at:
                call(line)
        except KeyboardInterrupt as error:
            kept = error
        if at.place is None:
            assert not held
            return line
        assert kept is not None, at.place
        for path in filter(os.path.exists, locks(line)):
            other = fs.LocalFileSystem()
            try:
                other.unlock(other.lock(path))
            except BlockingIOError:
                if not releases(at.place):
                    held.append(at.place)
    raise AssertionError


def releases(place):
    file, _, rest = place.partition(":")
    line = linecache.getline(f"{ROOT}/{file}", int(rest.split(",")[0])).strip()
    return line in ("lock.release()", "self.__exit__()", "self._lock.release()") or rest.endswith("in release")


def test_served_files_that_are_not_made_to_the_end_leave_no_lock(job, tmp_path):
    def opens(line):
        oneemb.InferenceEmbedding.open(job.folder, folder=tmp_path / f"{line}").close()

    names = ("_open_made", "_take", "take", "release", "lock", "unlock")
    assert interrupts(opens, lambda line: [tmp_path / f"{line}" / "LOCK"], [build, file_lock, fs], names) > 30


def test_a_whole_file_that_is_not_made_to_the_end_leaves_no_lock(job, tmp_path):
    with oneemb.InferenceEmbedding.open(job.folder, folder=tmp_path / "served") as served:
        version = served.version

    def makes(line):
        folder = tmp_path / f"{line}"
        folder.mkdir()
        source = build.source_of([job.folder], folder, "float32", None)
        assert build.make_whole(source, version, Threads(1), lambda: False)

    names = ("make_whole", "take", "release", "lock", "unlock")
    assert interrupts(makes, lambda line: [tmp_path / f"{line}" / "LOCK-whole"], [build, file_lock, fs], names) > 15


def test_a_pull_that_does_not_come_to_its_end_leaves_no_lock(job, tmp_path):
    url = f"memory://{uuid.uuid4().hex}/items"
    oneemb.push(job.folder, url)
    names = ("__enter__", "__exit__", "_take", "pull_from", "_only_writer", "take", "release", "lock", "unlock")

    def locks(line):
        return [tmp_path / f"{line}.pull", Path(tmp_path / f"{line}"), tmp_path / f"{line}" / "LOCK"]

    def pulls(line):
        oneemb.pull(url, tmp_path / f"{line}")

    assert interrupts(pulls, locks, [pull_module, backup, file_lock, fs], names) > 30
