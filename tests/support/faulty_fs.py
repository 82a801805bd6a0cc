"""A file system in memory that loses power at a given call, and that fails calls on demand.

A call that changes something is counted. At `crash_at` the power goes: that call does nothing or half of its work,
and this and every later call raise `PowerLoss`. `survivors` are the disks that may be found afterwards:

    lost    nothing that was not synced is there
    kept    everything is there, the half of the interrupted call too
    torn-n  of each file any of the unsynced sectors, and of each directory any of the unsynced changes of names

A name, of a file or of a directory, is safe only when its directory was synced, as POSIX has it.

A file that the system could not write back (`writeback_fails`) reports that as Linux does (errseq): once to each
descriptor that was open, and to one that is opened later only if nobody has been told before.
"""

import contextlib
import errno
import os
import random
import threading

SECTOR = 512


class PowerLoss(BaseException):
    """Not an Exception: no handler of errors may swallow it."""


class _Directory:
    """Its entries are those whose path begins with its own."""


class _Inode:
    def __init__(self, safe=b""):
        self.now = bytearray(safe)
        self.safe = bytes(safe)
        self.unsynced = []  # ("write", offset, data) and ("truncate", size), in order
        self.errors = 0  # times that the system could not write it back
        self.told = True  # whether a sync has reported the last of them

    def write(self, offset, data):
        _place(self.now, offset, data)
        self.unsynced.append(("write", offset, bytes(data)))

    def truncate(self, size):
        _resize(self.now, size)
        self.unsynced.append(("truncate", size))

    def sync(self):
        safe = bytearray(self.safe)
        for change in self.unsynced:
            if change[0] == "truncate":
                _resize(safe, change[1])
            else:
                _place(safe, *change[1:])
        self.safe, self.unsynced = bytes(safe), []

    def fail_writeback(self):
        """Lose what is unsynced, as systems do: it stays readable, and no later sync writes it."""
        if self.unsynced:
            self.unsynced, self.errors, self.told = [], self.errors + 1, False

    def torn(self, rng):
        """The file with any of the unsynced sectors."""
        data = bytearray(self.safe)
        for change in self.unsynced:
            if change[0] == "truncate":
                if rng.random() < 0.5:
                    _resize(data, change[1])
                continue
            _, offset, content = change
            fate = rng.random()
            for begin in range(0, len(content), SECTOR):
                if fate < 0.3 or (fate < 0.7 and rng.random() < 0.5):
                    _place(data, offset + begin, content[begin : begin + SECTOR])
        return data


class FaultyFileSystem:
    """See the module. Keeps `calls`, a list of the names of the calls that were counted."""

    native = False

    def __init__(self):
        self.entries = {}  # path -> inode, as programs see them
        self.safe_entries = {}
        self.unsynced_names = {}  # directory -> [("link", path, inode) | ("unlink", path) | ("move", source, target)]
        self.calls = []
        self.crash_at = None
        self.half = False
        self.fail = None  # a function of (call, path) that may raise OSError
        self.watch = None  # a function of `half`, called before each call that is counted, and after half of a write
        self._open = {}
        self._errors_known = {}  # descriptor -> errors of its file of which it knows
        self._next = 3
        self._locked = {}
        self._dead = False
        self._guard = threading.RLock()

    # What a table calls.

    def make_directories(self, path):
        with self._guard:
            above = os.path.dirname(path)
            if not self._is_directory(path):
                self.make_directories(above)
                self._count("mkdir", path)
                self.entries[path] = directory = _Directory()
                self._rename_later(path, ("link", path, directory))
            if path != "/":
                self.sync_directory(above)

    def names(self, path):
        self._alive()
        if not self._is_directory(path):
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return [os.path.basename(p) for p in self.entries if os.path.dirname(p) == path]

    def size(self, path):
        self._alive()
        return len(self._inode(path).now)

    def is_linked(self, path):
        return sum(inode is self._inode(path) for inode in self.entries.values()) > 1

    def create(self, path, *, direct=False):
        with self._guard:
            self._count("create", path)
            if path in self.entries:
                raise FileExistsError(errno.EEXIST, "exists", path)
            inode = self.entries[path] = _Inode()
            self._rename_later(path, ("link", path, inode))
            return self._opened(inode, path)

    def open(self, path, *, direct=False):
        with self._guard:
            self._alive()
            if self.fail is not None:
                self.fail("open", path)
            return self._opened(self._inode(path), path)

    def read_into(self, file, out, offset):
        self._alive()
        inode, path = self._open[file]
        if self.fail is not None:
            self.fail("read", path)
        data = inode.now[offset : offset + len(out)]
        out[: len(data)] = data
        return len(data)

    def will_read(self, path, size):
        pass

    def write(self, file, data, offset):
        with self._guard:
            inode, path = self._open[file]
            data = bytes(memoryview(data).cast("B"))
            self._count("write", path, lambda: inode.write(offset, data[: len(data) // 2]))
            inode.write(offset, data)

    def sync(self, file):
        with self._guard:
            inode, path = self._open[file]
            try:
                self._count("sync", path)
            except OSError:
                inode.fail_writeback()
                self._learns(file)
                raise
            self._sync(file)

    def close(self, file):
        del self._open[file], self._errors_known[file]

    def spare_files(self):
        return 1 << 10

    def truncate(self, path, size):
        with self._guard:
            self._count("truncate", path)
            self._inode(path).truncate(size)

    def rename(self, source, target):
        with self._guard:
            self._count("rename", target)
            self.entries[target] = self._inode(source)
            del self.entries[source]
            self._rename_later(target, ("move", source, target))

    def remove(self, path):
        with self._guard:
            self._count("remove", path)
            self._inode(path)
            del self.entries[path]
            self._rename_later(path, ("unlink", path))

    def sync_directory(self, path):
        with self._guard:
            self._count("sync_directory", path)
            for change in self.unsynced_names.pop(path, []):
                _change_name(self.safe_entries, change)

    def lock(self, path, *, exists=False):
        with self._guard:
            self._alive()
            if path in self._locked.values():
                raise BlockingIOError(errno.EWOULDBLOCK, "locked", path)
            file = self.open(path) if path in self.entries else self.create(path)
            self._locked[file] = path
            return file

    def unlock(self, lock):
        self._locked.pop(lock, None)
        self._open.pop(lock, None)
        self._errors_known.pop(lock, None)

    def still_locks(self, lock, path):
        return lock in self._locked and self._open[lock][0] is self.entries.get(path)

    def read_lock(self, path):
        return bytes(self._inode(path).now) if path in self._locked.values() else None

    # What a test calls.

    def power_off(self):
        """The process is gone; nothing is lost."""
        self._locked.clear()

    def survivors(self, torn=2, seed=0):
        """(what became of the unsynced changes, the file system after the power is back), for each fate."""
        with self._guard:
            found = [
                ("lost", self._disk(self.safe_entries, lambda inode: inode.safe)),
                ("kept", self._disk(self.entries, lambda inode: inode.now)),
            ]
            for n in range(torn):
                rng = random.Random(seed * 1000 + n)
                entries = dict(self.safe_entries)
                for changes in self.unsynced_names.values():
                    for change in changes:
                        if rng.random() < 0.5:
                            _change_name(entries, change)
                found.append((f"torn-{n}", self._disk(entries, lambda inode, rng=rng: inode.torn(rng))))
            return found

    def power_loss(self):
        """From now on every call raises `PowerLoss`."""
        self._dead = True

    def writeback_fails(self, others_ask):
        """The system fails to write back what is unsynced, of all files; `others_ask`: another process syncs them
        first."""
        with self._guard:
            for path, inode in self.entries.items():
                if not isinstance(inode, _Directory):
                    inode.fail_writeback()
                    if others_ask:
                        file = self._opened(inode, path)
                        self._learns(file)
                        self.close(file)

    def _sync(self, file):
        inode, path = self._open[file]
        inode.sync()
        if self._learns(file):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def _learns(self, file):
        """Whether a sync on this descriptor reports an error."""
        inode, known = self._open[file][0], self._errors_known[file]
        if known == inode.errors:
            return False
        self._errors_known[file], inode.told = inode.errors, True
        return True

    def _disk(self, entries, content):
        disk = FaultyFileSystem()
        disk.entries = {
            path: inode if isinstance(inode, _Directory) else _Inode(bytes(content(inode)))
            for path, inode in entries.items()
            if _has_all_above(entries, path)
        }
        disk.safe_entries = dict(disk.entries)
        return disk

    def _count(self, call, path, half=None):
        self._alive()
        if self.watch is not None:
            self.watch(False)
            if half is not None:
                with self._undone(path):
                    half()
                    self.watch(True)
        if self.crash_at is not None and len(self.calls) == self.crash_at:
            if self.half and half is not None:
                half()
            self._dead = True
            raise PowerLoss(f"{call} {path}")
        self.calls.append(f"{call} {os.path.basename(path)}")
        if self.fail is not None:
            try:
                self.fail(call, path)
            except OSError:
                if half is not None:
                    half()
                raise

    @contextlib.contextmanager
    def _undone(self, path):
        """Undo at the end what the block does to the open file of this path."""
        before = [(inode, bytes(inode.now), list(inode.unsynced)) for inode, at in self._open.values() if at == path]
        yield
        for inode, now, unsynced in before:
            inode.now, inode.unsynced = bytearray(now), unsynced

    def _alive(self):
        if self._dead:
            raise PowerLoss

    def _is_directory(self, path):
        return path == "/" or isinstance(self.entries.get(path), _Directory)

    def _inode(self, path):
        if path not in self.entries:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        if self._is_directory(path):
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        return self.entries[path]

    def _opened(self, inode, path):
        self._next += 1
        self._open[self._next] = inode, path
        self._errors_known[self._next] = inode.errors if inode.told else -1
        return self._next

    def _rename_later(self, path, change):
        self.unsynced_names.setdefault(os.path.dirname(path), []).append(change)


def _has_all_above(entries, path):
    above = os.path.dirname(path)
    return above == "/" or above in entries and _has_all_above(entries, above)


def _change_name(entries, change):
    if change[0] == "link":
        entries[change[1]] = change[2]
    elif change[0] == "unlink":
        entries.pop(change[1], None)
    elif change[1] in entries:
        entries[change[2]] = entries.pop(change[1])


def _place(data, offset, content):
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(content)] = content


def _resize(data, size):
    del data[size:]
    data.extend(bytes(size - len(data)))
