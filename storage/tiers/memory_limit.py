"""Host memory that this process may use: the lowest of these limits.

- the machine's physical memory;
- `memory.max` (cgroup v2) or `memory.limit_in_bytes` (v1) of the process's control group and of each visible parent;
- RLIMIT_AS and RLIMIT_DATA, less the address space that the process uses for anything but rows.

The files with the limits of control groups are found once for a process, but read at each call, since a limit may
change at any time. If a process moves to another control group, the limits of the first group still count.
"""

import functools
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_PROCESS = Path("/proc/self")


@dataclass(frozen=True, order=True)
class MemoryLimit:
    """A limit of memory: bytes that may be used, and its source, for errors."""

    bytes: int
    name: str


def memory_limit(taken: int = 0, process: Path = _PROCESS) -> MemoryLimit:
    """The lowest memory limit of the process whose folder in /proc is `process`. `taken`: bytes of address space that
    are mapped for rows; they are not subtracted from RLIMIT_AS and RLIMIT_DATA."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [MemoryLimit(machine, "the machine's memory"), *_of_control_groups(process), *_of_resources(taken)]
    return min(limits)


def _of_resources(taken: int) -> Iterator[MemoryLimit]:
    """Limits set by `ulimit`, less the address space that the process uses for anything but rows."""
    for kind, field, name in ((resource.RLIMIT_AS, 0, "ulimit -v"), (resource.RLIMIT_DATA, 5, "ulimit -d")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            pages = int((_PROCESS / "statm").read_text().split()[field])
            others = max(pages * os.sysconf("SC_PAGE_SIZE") - taken, 0)
            yield MemoryLimit(max(limit - others, 0), f"{name}, less what the process takes beside rows")


def _of_control_groups(process: Path) -> Iterator[MemoryLimit]:
    """Memory limits of the process's control groups and of their parents, in every hierarchy that counts memory."""
    for file in _limit_files(process, os.getpid()):
        try:
            with open(file, "rb") as opened:
                limit = opened.read().strip()
        except OSError:  # The root group, and a group whose parent does not count memory, have no such file.
            continue
        if limit.isdigit():
            yield MemoryLimit(int(limit), f"the limit in {file}")


@functools.lru_cache(maxsize=16)
def _limit_files(process: Path, pid: int) -> tuple[str, ...]:
    """Files that may hold limits of these groups, for this process id: a child of fork may be in another control
    group."""
    try:
        groups = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
    except OSError:  # A system without control groups, or one that hides them.
        return ()
    files = []
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
            folders = _folders_up(Path(point), PurePosixPath(root), PurePosixPath(path))
            files += [str(folder / file) for folder in folders]
    return tuple(files)


def _folders_up(point: Path, root: PurePosixPath, path: PurePosixPath) -> Iterator[Path]:
    """Folders of the group `path` and of its parents, in a hierarchy whose group `root` is mounted at `point`."""
    # In a container /proc may name the group as the host does, though only a part of the hierarchy is mounted.
    inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    yield point / inside
    for above in inside.parents:
        if above != inside:
            yield point / above


def _plain(word: str) -> str:
    """Decode a path in mountinfo, which has octal numbers in place of blanks and backslashes."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        word = word.replace(code, character)
    return word
