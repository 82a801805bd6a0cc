"""What takes long to make, made once for all processes of a test run."""

import fcntl
import os
import shutil


def made_once(tmp_path_factory, name, make):
    """A folder that `make(folder)` has filled: the first process that asks for it makes it, and the others wait."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # Each process has a folder in that of the run.
        root = root.parent
    folder, made = root / name, root / f"{name}-is-made"
    with open(root / f"{name}-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one who failed
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
