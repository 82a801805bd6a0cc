"""Ctrl-C while sinks work, and kills of a version that is written once more: the next publisher goes on."""

import functools
import shutil
import threading

import numpy as np
import pytest

import oneemb
from oneemb.sinks import turns
from oneemb.sinks.folder_lock import FolderLock
from oneemb.sinks.turns import Turns
from oneemb.storage.fs import LocalFileSystem
from tests.support.forks import ended_well, in_child
from tests.support.interrupts import interrupt_soon, interrupted
from tests.support.published import INDEXES, publishing, read_files, read_index
from tests.support.waits import came, ended


class Slow:
    """A sink whose `apply` waits, in a thread of a publisher."""

    def __init__(self, sink):
        self._sink, self.goes_on, self.begun = sink, threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._sink, name)

    def apply(self, changes):
        self._sink.apply(changes)
        self.begun.set()
        came(self.goes_on)


def test_a_close_that_is_interrupted_leaves_no_folder_locked(job, tmp_path):
    slow = Slow(oneemb.sinks.Files(tmp_path / "sink"))
    publisher = oneemb.publish(job.folder, [slow], seconds=0.01)
    came(slow.begun)
    with pytest.raises(KeyboardInterrupt):
        interrupt_soon()
        publisher.close()
    with pytest.raises(oneemb.PublishError, match="one publisher at a time"):
        with publishing(job, oneemb.sinks.Files(tmp_path / "sink", with_state=True)):
            pass  # The sink at work keeps its lock.
    slow.goes_on.set()
    publisher.close()
    job.save("v1")
    with publishing(job, oneemb.sinks.Files(tmp_path / "sink")):
        pass
    assert read_files(tmp_path / "sink", "parquet") == ("v1", job.rows["v1"])


def test_the_thread_at_work_closes_the_sink_of_a_close_that_was_interrupted(job, tmp_path):
    slow = Slow(oneemb.sinks.Files(tmp_path / "sink"))
    publisher = oneemb.publish(job.folder, [slow], seconds=0.01)
    came(slow.begun)
    with pytest.raises(KeyboardInterrupt):
        interrupt_soon()
        publisher.close()
    slow.goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "oneemb-follow":
            thread.join(60)
            assert not thread.is_alive()
    with publishing(job, oneemb.sinks.Files(tmp_path / "sink", with_state=True)):
        pass
    assert read_files(tmp_path / "sink", "parquet") == ("v0", job.rows["v0"])


def copies_after_each_rename(patch, folder, copies):
    real = LocalFileSystem.rename

    def rename(fs, *arguments):
        real(fs, *arguments)
        copies.append(folder.with_name(f"copy {len(copies)}"))
        shutil.copytree(folder, copies[-1])

    patch.setattr(LocalFileSystem, "rename", rename)


def test_a_kill_while_a_version_is_written_with_other_tables_changes_no_file_of_the_manifest(job, tmp_path):
    make = functools.partial(oneemb.sinks.Files, tmp_path / "sink")
    with publishing(job, make(tables=[0])):
        pass
    former, copies = read_files(tmp_path / "sink", "parquet"), []
    with pytest.MonkeyPatch.context() as patch:
        copies_after_each_rename(patch, tmp_path / "sink", copies)
        with publishing(job, make()):
            pass
    shown = [read_files(copy, "parquet") for copy in copies]
    assert shown == [former] * (len(shown) - 1) + [("v0", job.rows["v0"])] and len(shown) > 1


@pytest.mark.parametrize("kind", INDEXES)
def test_a_kill_while_an_index_is_written_once_more_leaves_one_that_can_be_read(job, tmp_path, kind):
    make = functools.partial(INDEXES[kind], table=1, inner_product=False, rebuild=1.0)
    sink = make(tmp_path / "sink")
    with publishing(job, sink):
        pass
    job.save("v1")
    # Ctrl-C after the files of v1 were written, and before the sink shows the version.
    real, copies = LocalFileSystem.rename, []

    def interrupted(fs, old, new):
        real(fs, old, new)
        if new.endswith("MANIFEST.json"):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFileSystem, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            with publishing(job, sink):
                pass
    with pytest.MonkeyPatch.context() as patch:
        copies_after_each_rename(patch, tmp_path / "sink", copies)
        with publishing(job, sink):
            pass
    rows = {key: row for key, row in job.rows["v1"].items() if key[0] == 1}
    assert len(copies) > 1
    for copy in copies:
        assert read_index(make(copy), 1) == ("v1", rows)
    assert np.isfinite(sink.search(np.ones((1, 4), np.float32), 1)[0]).all()


def in_turns(kind, turns):
    with getattr(turns, kind)():
        return True


@pytest.mark.parametrize("kind", ["shared", "alone"])
def test_an_interrupt_at_any_line_of_a_turn_leaves_no_turn_taken(kind):
    for line in range(1, 100):
        one = Turns()
        stopped, place = interrupted(lambda one=one: in_turns(kind, one), line, "signal", files=(turns.__file__,))
        if place is None:
            break
        other = threading.Thread(target=lambda one=one: in_turns("alone", one) and in_turns("shared", one), daemon=True)
        other.start()
        other.join(60)
        assert stopped and not other.is_alive(), place
    assert line > 5


def test_ctrl_c_ends_the_wait_for_a_turn():
    one = Turns()
    for held, wanted in (("alone", "shared"), ("shared", "alone")):
        begun, ends = threading.Event(), threading.Event()

        def holds(held=held, begun=begun, ends=ends):
            with getattr(one, held)():
                begun.set()
                came(ends)

        holder = threading.Thread(target=holds)
        holder.start()
        came(begun)
        with pytest.raises(KeyboardInterrupt):
            interrupt_soon()
            in_turns(wanted, one)
        ends.set()
        ended(holder)
        assert in_turns("alone", one) and in_turns("shared", one)


@pytest.mark.parametrize("kind", ["shared", "alone"])
def test_a_child_of_fork_has_no_turn_of_its_parent(kind):
    one, begun, ends = Turns(), threading.Event(), threading.Event()

    def holds():
        with getattr(one, kind)():
            begun.set()
            came(ends)

    holder, timer = threading.Thread(target=holds), threading.Timer(0.2, ends.set)
    holder.start()
    came(begun)
    timer.start()  # The fork waits for the block.
    child = in_child(lambda: in_turns("alone", one))
    assert ended_well(child) is True
    ended(holder)


def test_an_interrupt_at_any_line_leaves_no_folder_locked(tmp_path):
    for line in range(1, 1000):
        lock = FolderLock(LocalFileSystem(), str(tmp_path))

        def take_and_release(lock=lock):
            lock.take()
            lock.release()

        stopped, place = interrupted(take_and_release, line, "signal")
        if place is None:
            break
        lock.release()
        other = FolderLock(LocalFileSystem(), str(tmp_path))
        other.take()  # LockedError if the first one holds the folder still.
        other.release()
        assert stopped, place
    assert line > 10
