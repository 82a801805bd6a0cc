"""What this process holds of the system."""

import ctypes
import gc
import os
import re
from pathlib import Path


def resident_bytes():
    """Memory that is there."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_bytes(call):
    """Bytes by which resident memory grows at most while `call` runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # Memory that was freed and kept would hide what `call` takes.
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before = resident_bytes()
    call()
    peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    return peak - before


def open_files(without):
    """The paths of open files once the collector has run, sorted, but for those that have `without` in them."""
    gc.collect()
    files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            pass  # the folder's own
    return sorted(file for file in files if without not in file)
