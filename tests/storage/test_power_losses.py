"""The disks of `power_losses` are those that a crash at each call leaves."""

import pytest

from tests.support.faulty_fs import FaultyFileSystem, PowerLoss
from tests.support.power_losses import power_losses


def write(fs):
    fs.make_directories("/d")
    for n in range(2):
        file = fs.create("/d/new")
        fs.write(file, bytes([1 + n]) * 2000, 0)
        fs.write(file, b"end", 900)
        fs.sync(file)
        fs.write(file, b"not synced", 1500)
        fs.close(file)
        fs.truncate("/d/new", 1800)
        fs.rename("/d/new", f"/d/kept{n}")
        fs.sync_directory("/d")
    fs.remove("/d/kept0")


def content(disk):
    return {path: bytes(getattr(inode, "now", b"directory")) for path, inode in disk.entries.items()}


def test_one_run_gives_the_disks_of_a_crash_at_each_call():
    write(whole := FaultyFileSystem())
    expected, at_the_end = [], []
    for call in range(len(whole.calls) + 1):
        for half in (False, True):
            fs = FaultyFileSystem()
            fs.crash_at, fs.half = call, half
            try:
                write(fs)
            except PowerLoss:
                assert call < len(whole.calls)
            disks = [content(disk) for _, disk in fs.survivors(3, seed=call)]
            (at_the_end if call == len(whole.calls) else expected).extend(disks)
    found, found_at_the_end, fs = [], [], FaultyFileSystem()

    def look(disk, call, half, fate):
        (found_at_the_end if call == len(whole.calls) else found).append(content(disk))

    looks = power_losses(fs, lambda: write(fs), look, torn=3)
    assert looks == len(found) + len(found_at_the_end) and looks < len(expected) / 2
    assert all(disk in found for disk in expected) and all(disk in expected for disk in found)
    assert all(disk in found_at_the_end for disk in at_the_end) and found_at_the_end
    assert content(fs) == content(whole), "what was half done is undone"


def test_an_error_of_a_look_is_raised_though_the_writer_would_handle_it():
    fs = FaultyFileSystem()

    def write_and_handle():
        try:
            write(fs)
        except AssertionError:
            pass

    def look(disk, call, half, fate):
        assert "/d/kept0" not in disk.entries, f"call {call}"

    with pytest.raises(AssertionError, match="call 9"):
        power_losses(fs, write_and_handle, look)


def test_a_look_may_be_enough():
    fs, looks = FaultyFileSystem(), []
    assert power_losses(fs, lambda: write(fs), lambda *its: looks.append(its) or len(looks) == 5) == 5 == len(looks)
