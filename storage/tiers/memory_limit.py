"""Memory of the host that this process may use: the least of what machine, control groups and resource limits allow.

Where it looks: physical memory; `memory.max` (cgroup v2) or `memory.limit_in_bytes` (v1) of the process's control group
and of every one above it that can be seen; RLIMIT_AS and RLIMIT_DATA, less what the process has taken already.
"""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["MemoryLimit", "memory_limit"]

_PROCESS = Path("/proc/self")


@dataclass(frozen=True, order=True)
class MemoryLimit:
    """A limit of memory.

    Args:
        bytes: that may be used.
        name: what sets the limit, as errors say it.
    """

    bytes: int
    name: str


def memory_limit(taken: int = 0, process: Path = _PROCESS) -> MemoryLimit:
    """The least of the limits of this process.

    Args:
        taken: address space that the caller has taken already and counts itself.
        process: its folder in /proc.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [MemoryLimit(machine, "the machine's memory"), *_of_control_groups(process), *_of_resources(taken)]
    return min(limits)


def _of_resources(taken: int) -> Iterator[MemoryLimit]:
    """What is left by the limits that `ulimit` sets, beside what others than the caller have taken."""
    for kind, field, name in ((resource.RLIMIT_AS, 0, "ulimit -v"), (resource.RLIMIT_DATA, 5, "ulimit -d")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            pages = int((_PROCESS / "statm").read_text().split()[field])
            others = max(pages * os.sysconf("SC_PAGE_SIZE") - taken, 0)
            yield MemoryLimit(max(limit - others, 0), f"{name}, less what the process takes beside rows")


def _of_control_groups(process: Path) -> Iterator[MemoryLimit]:
    """The limits of the process's control groups and of those above them, in every hierarchy that counts memory."""
    try:
        groups = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
    except OSError:  # A system without control groups, or one that hides them.
        return
    for line in groups:
        number, controllers, path = line.split(":", 2)
        unified = number == "0" and controllers == ""
        if not unified and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            fields, _, kind = mount.partition(" - ")
            root, point = (_plain(word) for word in fields.split()[3:5])
            type, _, options = kind.split(" ", 2)
            if type != ("cgroup2" if unified else "cgroup") or not unified and "memory" not in options.split(","):
                continue
            file = "memory.max" if unified else "memory.limit_in_bytes"
            for folder in _folders_up(Path(point), PurePosixPath(root), PurePosixPath(path)):
                try:
                    limit = (folder / file).read_text().strip()
                except OSError:  # The root has none, nor has a group whose parent does not count memory.
                    continue
                if limit.isdecimal():
                    yield MemoryLimit(int(limit), f"the limit in {folder / file}")


def _folders_up(point: Path, root: PurePosixPath, path: PurePosixPath) -> Iterator[Path]:
    """The folders of a group and of those above it, where a hierarchy is mounted from `root` on at `point`."""
    # Within a container the group may be named as the host names it, though only what is below it is mounted.
    inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    yield point / inside
    for above in inside.parents:
        if above != inside:
            yield point / above


def _plain(word: str) -> str:
    """A path of mountinfo, in which blanks are written as octal numbers."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        word = word.replace(code, character)
    return word
