"""Files that take their names when they are whole, and what killed processes leave of them."""

import errno
import os
import shutil

import pytest

from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.new_files import NewFile, begin, is_held, new_files, remove_unfinished, replace_file
from tests.support.faulty_fs import FaultyFileSystem, PowerLoss

OLD, NEW = b"o" * 700, b"n" * 1500


def with_old():
    fs = FaultyFileSystem()
    fs.make_directories("/d")
    replace_file(fs, "/d/file", OLD)
    fs.sync_directory("/d")
    fs.calls.clear()
    return fs


def content(fs, path="/d/file"):
    file, data = fs.open(path), bytearray(fs.size(path))
    assert fs.read_into(file, memoryview(data), 0) == len(data)
    fs.close(file)
    return bytes(data)


def calls_of_a_replacement():
    fs = with_old()
    replace_file(fs, "/d/file", NEW)
    fs.sync_directory("/d")
    return [call.split()[0] for call in fs.calls]


def test_a_file_is_synced_before_it_takes_its_name():
    calls = calls_of_a_replacement()
    assert calls.index("write") < calls.index("sync") < calls.index("rename") < calls.index("sync_directory")


@pytest.mark.parametrize("half", [False, True])
def test_a_loss_of_power_at_any_call_leaves_the_old_file_or_the_new_one(half):
    found = set()
    for at in range(len(calls_of_a_replacement())):
        fs = with_old()
        fs.crash_at, fs.half = at, half
        with pytest.raises(PowerLoss):
            replace_file(fs, "/d/file", NEW)
            fs.sync_directory("/d")
        found |= {content(disk) for _, disk in fs.survivors()}
    assert found == {OLD, NEW}


@pytest.mark.parametrize("failing", ["create", "write", "sync", "rename"])
def test_a_call_that_fails_leaves_the_old_file_and_nothing_beside_it(failing):
    fs = with_old()

    def fail(call, path):
        if call == failing:
            raise OSError(errno.ENOSPC, "full", path)

    fs.fail = fail
    with pytest.raises(OSError, match="full"):
        replace_file(fs, "/d/file", NEW)
    fs.fail = None
    assert content(fs) == OLD and fs.names("/d") == ["file"]


@pytest.mark.parametrize("call", ["write", "sync"])
def test_an_interrupt_leaves_no_open_file_and_nothing_beside_it(tmp_path, monkeypatch, call):
    class Interrupted(LocalFileSystem):
        closed = 0

        def close(self, file):
            self.closed += 1
            super().close(file)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Interrupted, call, interrupted)
    fs = Interrupted()
    (tmp_path / "file").write_bytes(OLD)
    with pytest.raises(KeyboardInterrupt):
        replace_file(fs, str(tmp_path / "file"), NEW)
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == OLD and fs.closed == 1


def test_what_a_killed_process_has_left_under_the_temporary_name_is_replaced(tmp_path):
    path = f"{tmp_path}/file"
    (tmp_path / "file.tmp").write_bytes(b"left" * 1000)
    replace_file(LocalFileSystem(), path, NEW)
    assert (tmp_path / "file").read_bytes() == NEW and os.listdir(tmp_path) == ["file"]


def test_files_that_belong_together_take_their_names_together_or_not_at_all(tmp_path):
    paths = [f"{tmp_path}/{n}" for n in range(3)]
    with new_files(*paths) as files:
        for file in files:
            file.write(OLD)
        assert not any(map(os.path.exists, paths))
    with pytest.raises(ZeroDivisionError), new_files(*paths) as files:
        for file in files:
            file.write(NEW)
        raise ZeroDivisionError
    for path in paths:
        with open(path, "rb") as file:
            assert file.read() == OLD
    assert len(os.listdir(tmp_path)) == 3


def test_what_a_dropped_file_has_in_its_buffer_reaches_no_other_file(tmp_path):
    new = NewFile(f"{tmp_path}/dropped")
    stream = new.stream
    stream.write(b"dropped")
    new.drop()
    with open(
        tmp_path / "other", "wb", buffering=0
    ) as other:  # It may well have the number of the file that is closed.
        del new, stream
        other.write(b"other")
    assert (tmp_path / "other").read_bytes() == b"other" and os.listdir(tmp_path) == ["other"]


@pytest.mark.parametrize(("make", "remove"), [(None, os.remove), (os.mkdir, shutil.rmtree)])
def test_what_nobody_holds_is_removed_and_what_another_makes_is_left_to_it(tmp_path, make, remove):
    ours, theirs = LocalFileSystem(), LocalFileSystem()
    left, lock = begin(theirs, f"{tmp_path}/file", 8, make)
    made, other_lock = begin(theirs, f"{tmp_path}/file", 8, make)
    others = {"file.0123456789.tmp", "file.01234567.tmp.old", "another.01234567.tmp"}
    for name in others:
        (tmp_path / name).touch()
    assert is_held(ours, made) and is_held(ours, left)
    theirs.unlock(lock)  # as the system does when a process ends
    remove_unfinished(ours, str(tmp_path), "file", 8, remove)
    assert set(os.listdir(tmp_path)) == {*others, os.path.basename(made)}
    theirs.unlock(other_lock)
    assert not is_held(ours, made)


def test_a_name_that_was_found_before_it_was_locked_is_given_up(tmp_path, monkeypatch):
    fs, lock = LocalFileSystem(), LocalFileSystem.lock
    taken = []

    def late(its, path, **how):
        file = lock(its, path, **how)
        if not taken:
            taken.append(path)
            os.remove(path)
        return file

    monkeypatch.setattr(LocalFileSystem, "lock", late)
    path, number = begin(fs, f"{tmp_path}/file", 8)
    assert path != taken[0] and os.listdir(tmp_path) == [os.path.basename(path)]
    fs.unlock(number)


def test_a_folder_that_another_removes_before_it_is_locked_is_given_up(tmp_path):
    taken = []

    def make(path):
        os.mkdir(path)
        if not taken:
            taken.append(path)
            os.rmdir(path)

    fs = LocalFileSystem()
    path, number = begin(fs, f"{tmp_path}/folder", 8, make)
    assert path != taken[0] and os.path.isdir(path) and os.listdir(tmp_path) == [os.path.basename(path)]
    fs.unlock(number)
