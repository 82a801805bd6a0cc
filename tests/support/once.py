"""Folders that are made once for all processes of a test run."""

import fcntl
import os
import shutil


def made_once(tmp_path_factory, name, make):
    """The folder `name` of the run, filled by `make(folder)` in the first process that asks; the others wait for it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # Each process has a folder in that of the run.
        root = root.parent
    folder, made = root / name, root / f"{name}-is-made"
    with open(root / f"{name}-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # Of a process that failed.
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
