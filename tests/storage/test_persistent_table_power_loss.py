"""The power goes while a process saves: on a real file system, whatever had not reached the device is gone.

The table lies on ext4 in a file. The process is stopped at a random moment and the file is copied: the copy is the disk
of a machine whose memory is lost. It is mounted again and read. Needs root, loop devices and mkfs.ext4.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.table.persistent_table import PersistentTable
from tests.support.table_model import put_random, scanned

DISK_MIB = 96
NAMES = 3
OPTIONS = dict(row_width=40, physical_block_size=512, chunk_bytes=1 << 16)


def write(path):
    """Save one snapshot after the other, each under one of three names; say the number of each that is durable."""
    table, rows = PersistentTable.open(path, threads=Threads(1), **OPTIONS), {}
    n = 0
    while True:
        put_random(table, rows, np.random.default_rng(n), 400, ids=2000)
        table.save_snapshot(f"s{n % NAMES}", {"n": n}, overwrite=True)
        os.write(1, b"%d\n" % n)
        n += 1


class _Nowhere:
    """Takes puts for a table of the same width: only the model is wanted."""

    row_width = OPTIONS["row_width"]

    def put(self, *keys_and_rows):
        pass


def rows_after(n):
    rows = {}
    for i in range(n + 1):
        put_random(_Nowhere(), rows, np.random.default_rng(i), 400, ids=2000)
    return rows


@contextlib.contextmanager
def mounted(disk, folder):
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", disk, folder], check=True)
    try:
        yield folder
    finally:
        for _ in range(50):
            if subprocess.run(["umount", folder], stderr=subprocess.DEVNULL).returncode == 0:
                break
            time.sleep(0.1)


def copied(disk, copy):
    """Copy a disk that nobody writes to: until two copies are equal, for the system may still be writing."""
    shutil.copyfile(disk, copy)
    for _ in range(100):
        before = copy.read_bytes()
        shutil.copyfile(disk, copy)
        if copy.read_bytes() == before:
            return
    raise AssertionError(f"{disk} is still being written")


def can_mount(tmp_path):
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        return False
    disk = tmp_path / "try"
    disk.write_bytes(bytes(8 << 20))
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
    (tmp_path / "there").mkdir()
    tried = subprocess.run(["mount", "-o", "loop", disk, tmp_path / "there"], capture_output=True)
    if tried.returncode == 0:
        subprocess.run(["umount", tmp_path / "there"], check=True)
    return tried.returncode == 0


def check_losses(tmp_path, losses, seed):
    if not can_mount(tmp_path):
        pytest.skip("this machine mounts no file as a disk")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.write_bytes(bytes(DISK_MIB << 20))
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
    choose = random.Random(seed)
    with mounted(disk, tmp_path / "mounted") as folder:
        command = f"from tests.storage.test_persistent_table_power_loss import write; write({str(folder / 't')!r})"
        writer = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE)
        said = b""
        try:
            while len(said.split()) < NAMES:
                said += os.read(writer.stdout.fileno(), 4096)
            os.set_blocking(writer.stdout.fileno(), False)
            for _ in range(losses):
                time.sleep(choose.uniform(0, 0.3))
                writer.send_signal(signal.SIGSTOP)
                with contextlib.suppress(BlockingIOError):
                    said += os.read(writer.stdout.fileno(), 1 << 20)
                durable = int(said[: said.rindex(b"\n")].split()[-1])
                copied(disk, copy)
                with mounted(copy, tmp_path / "again") as found:
                    check_survivors(found / "t", durable)
                writer.send_signal(signal.SIGCONT)
                assert writer.poll() is None
        finally:
            writer.kill()
            writer.wait()


def check_survivors(path, durable):
    """Each name holds what its last save made, or the one that was under way; the table works."""
    with PersistentTable.open(str(path), threads=Threads(1), **OPTIONS) as table:
        assert not table.recovery.damaged, table.recovery.damaged
        found = {info.name: info.meta["n"] for info in table.snapshots()}
        for name in range(NAMES):
            last = max(n for n in range(durable + 1) if n % NAMES == name)
            under_way = durable + 1 if (durable + 1) % NAMES == name else last
            assert found[f"s{name}"] in (last, under_way), (found, durable)
        for name, n in found.items():
            table.load_snapshot(name)
            assert scanned(table) == rows_after(n), (name, n)
        table.save_snapshot("after", {})


@pytest.mark.slow
def test_whatever_had_not_reached_the_disk_no_snapshot_is_missing(tmp_path, seed):
    check_losses(tmp_path, 60, seed)
