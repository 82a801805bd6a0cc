"""A pull that was killed in the middle of a file: the next one downloads only the pieces that are not there."""

import signal
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest

from oneemb.storage.new_files import NewFile
from oneemb.storage.objects import pull as pull_module, push as push_module
from oneemb.storage.objects.deletion import clean_store, delete_stored
from oneemb.storage.objects.object_store import ObjectStore
from oneemb.storage.objects.pull import pull, pull_from
from oneemb.storage.objects.push import push
from oneemb.storage.objects.transfers import THREADS
from tests.storage.test_backups import held_at
from tests.storage.test_objects import Killed, saved_table

PULL = """
import os, sys
from oneemb.storage.objects.object_store import ObjectStore
from oneemb.storage.objects.pull import pull
from tests.storage.test_killed_pulls import at_read

ObjectStore.get = at_read(int(sys.argv[3]), lambda: os.kill(os.getpid(), 9))
pull(sys.argv[1], sys.argv[2])
"""


def at_read(number, call, get=ObjectStore.get):
    """`ObjectStore.get` that makes a call at this read and at each later one."""
    lock, reads = threading.Lock(), []

    def read(store, piece):
        with lock:
            reads.append(piece)
            if len(reads) >= number:
                call()
        return get(store, piece)

    return read


@pytest.mark.parametrize("way", ["killed", "failed"])
def test_whole_pieces_of_an_unfinished_file_are_not_downloaded_again(way, tmp_path, monkeypatch):
    monkeypatch.setattr(push_module, "_PIECE_BYTES", 500)
    url, copy, get, read = f"file://{tmp_path}/objects", tmp_path / "copy", ObjectStore.get, []
    held = saved_table(tmp_path / "live", "a", size=4000)
    push(tmp_path / "live", url)
    pull(url, tmp_path / "other")
    monkeypatch.setattr(ObjectStore, "get", lambda store, piece: read.append(piece) or get(store, piece))
    pull(url, tmp_path / "whole")
    pieces, before, longest = len(read), 0, pieces_of_longest_file(tmp_path / "live")
    assert longest > 7 * THREADS
    for _ in range(2):
        if way == "killed":
            done = subprocess.run([sys.executable, "-c", PULL, url, str(copy), str(3 * THREADS)], capture_output=True)
            assert done.returncode == -signal.SIGKILL, done.stderr
        else:
            unfinished(url, copy, monkeypatch)
        before += THREADS  # Of the others, some were at work, and some are of the snapshot's own file.
    read.clear()
    pull(url, copy)
    assert len(read) <= pieces - before
    assert held_at(copy) == held


def test_a_damaged_unfinished_file_gives_no_byte_that_its_checksum_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(push_module, "_PIECE_BYTES", 500)
    url, copy = f"file://{tmp_path}/objects", tmp_path / "copy"
    held = saved_table(tmp_path / "live", "a", size=4000)
    push(tmp_path / "live", url)
    unfinished(url, copy, monkeypatch)
    (left,) = (tmp_path / "copy.pull").rglob("*.tmp")
    data = left.read_bytes()
    assert len(data) > 500
    left.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    pull(url, copy)
    assert held_at(copy) == held


def test_what_a_failed_pull_leaves_of_other_files_does_not_come_to_a_copy_that_is_mended(tmp_path, monkeypatch):
    monkeypatch.setattr(push_module, "_PIECE_BYTES", 500)
    url, copy = f"file://{tmp_path}/objects", tmp_path / "copy"
    held = saved_table(tmp_path / "live", "a", size=4000)
    push(tmp_path / "live", url)
    pull(url, copy)
    names = sorted(path.name for path in (copy / "chunks").iterdir())
    unfinished(url, tmp_path / "other", monkeypatch)
    (left,) = (tmp_path / "other.pull").rglob("*.tmp")
    (tmp_path / "other.pull").rename(tmp_path / "copy.pull")
    chunks = tmp_path / "copy.pull" / "chunks"
    (chunks / left.name).rename(chunks / f"77.{left.name}")  # of a chunk that the snapshot does not have
    pull_from(ObjectStore(url), str(copy), ["a"], is_damaged=True)
    assert sorted(path.name for path in (copy / "chunks").iterdir()) == names and held_at(copy) == held


def unfinished(url, copy, monkeypatch):
    """Let a pull fail in the middle of a file."""

    def fails():
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(ObjectStore, "get", at_read(3 * THREADS, fails))
        pull(url, copy)


def pieces_of_longest_file(folder):
    return max(path.stat().st_size for path in (folder / "chunks").iterdir()) // 500


def test_chunks_that_a_killed_pull_has_left_of_another_table_are_not_used(tmp_path, monkeypatch):
    """Another job pushes to the URL meanwhile. Its first pull is killed, too: it has replaced keys, and no rows."""
    monkeypatch.setattr(push_module, "_PIECE_BYTES", 500)
    url, copy = f"file://{tmp_path}/objects", tmp_path / "copy"
    saved_table(tmp_path / "first", "a", size=4000)
    held = saved_table(tmp_path / "second", "a", size=3900, seed=1)
    push(tmp_path / "first", url)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(pull_module, "backup_folder", Mock(side_effect=Killed))
        pull(url, copy)
    delete_stored(url, "a")
    clean_store(url, 0.0)
    push(tmp_path / "second", url)
    put_in_place = NewFile.put_in_place

    def killed_at_rows(new):
        if new.path.endswith(".rows"):
            raise Killed
        put_in_place(new)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(NewFile, "put_in_place", killed_at_rows)
        pull(url, copy)
    pull(url, copy)
    assert held_at(copy) == held
