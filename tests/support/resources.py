"""What this process holds of the system."""

import gc
import os


def resident_bytes():
    """Memory that is there."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
