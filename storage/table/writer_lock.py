"""One writer for each path: the lock, its holder, and a record of the table's snapshots.  FORMAT.md has the bytes.

The system frees the lock when its holder ends, in whatever way. The name that a dead holder has left in the file tells
the next one whose lock it takes over. A holder in this process is known as an object, which errors name and
`oneemb.release` closes: in a notebook the object of a cell lives on when the cell is run again.

Invariants:
- the file is one block that is written once and from then on only overwritten, so that a full disk keeps no process
  from taking the lock;
- a record of the snapshots is on the device before the older one is overwritten: a loss of power leaves one of them;
- a snapshot that a record names was durable when the record was written.
"""

import gc
import json
import os
import socket
import struct
import time
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from oneemb.kernels.checksum import xxh64
from oneemb.storage.errors import LockedError, StorageError
from oneemb.storage.fs import FileSystem, doing, storage_error

IN_USE = "which somebody uses"
"""The reason of a holder that never closes for others."""

_BLOCK_BYTES = 4096
_HOLDER_BYTES = 512
_RECORD_BEGINS = (512, 2048)
_RECORD_BYTES = 1536
_SUM = struct.Struct("<Q")
_TEXT_BYTES = _RECORD_BYTES - _SUM.size
_RECORD_VERSION = 1
# Bytes of a record beside the names of snapshots: its numbers, the names of its fields.
_NUMBERS_BYTES = 256
_NUMBER_MAX = 1 << 62


@dataclass(frozen=True)
class KnownSnapshots:
    """A table's snapshots as LOCK records them.

    Args:
        names, count: snapshots that must exist: names, as many as fit, and number.
        lost, lost_more: snapshots found missing and not given up yet: names, as many as fit, and number of others.
        keep_below: files of chunks with a smaller number are kept even if no snapshot needs them: a lost one may.
    """

    names: tuple[str, ...] = ()
    count: int = 0
    lost: tuple[str, ...] = ()
    lost_more: int = 0
    keep_below: int = 0

    def gone(self, there: Collection[str]) -> tuple[list[str], int]:
        """The missing ones among the snapshots that must exist or were lost before: their names, and how many more."""
        lost = [name for name in self.lost if name not in there]
        gone = [name for name in self.names if name not in there]
        more = max(0, self.count - len(there) - len(gone))
        return lost + [name for name in gone if name not in lost], self.lost_more + more


class Holder(Protocol):
    """An object that holds a lock, as other objects of its process see it."""

    @property
    def what(self) -> str:
        """The object in words, such as "embedding 'items'"."""

    def close_for(self, other: str) -> str:
        """Close for `other`, an object in words, if that loses nothing. Returns the reason against it, such as "whose 3
        rows no snapshot holds"; "" = closed."""

    def force_close(self) -> int:
        """Close. Returns the number of lost rows. LockedError if the object cannot be closed alone, RuntimeError if
        this thread is in the middle of its step."""


class WriterLock:
    """A lock, held from construction until `release`. LockedError if another table object holds it.

    Args:
        path: of the lock's file.
        holder: object that holds the lock, weakly referenced; None = a call, which ends by itself.
        takes_over: whether another holder in this process is asked to close.
        foreign: the file is of another program's table: it names the holder and is empty after `release`.
    """

    def __init__(
        self, fs: FileSystem, path: str, holder: Holder | None = None, *, takes_over: bool = False,
        foreign: bool = False,
    ):  # fmt: skip
        self._fs, self.path, self._foreign = fs, path, foreign
        self._pid, self._holder = os.getpid(), None if holder is None else weakref.ref(holder)
        with doing("lock", path):
            self._file = self._take(holder.what if holder is not None and takes_over else "")
        try:
            block = _read_block(fs, self._file)
        except OSError as error:
            fs.unlock(self._file)
            raise storage_error(error, "read", path) from error
        self.left_by = _holder_text(block) if _holder_of(block) else None
        self._sequence, self._position, self.known, newer = _newest(block)
        self.keeps_records = not newer and not foreign
        """Whether records may be written: not over those of a later release."""
        its = {"pid": self._pid, "host": socket.gethostname(), "since": time.time()}
        self._write_holder(json.dumps(its).encode(), block)
        _held[id(self)] = self

    def _take(self, newcomer: str) -> int:
        """Take the lock, and return its file. A holder in this process is asked to close for `newcomer`, in words; "" =
        it is not."""
        try:
            return self._fs.lock(self.path)
        except BlockingIOError as error:
            text = _holder_text(self._fs.read_lock(self.path) or b"")
            here = next((lock for lock in _held_here() if lock._fs.still_locks(lock._file, self.path)), None)
            if here is None:
                raise LockedError(
                    f"{self.path} is held by {text}; one table object at a time writes to a path: end that process, or"
                    " close its object, or choose another path; snapshots may be read beside it"
                ) from error
            held = here.ask(newcomer)
        if held:
            gc.collect()  # The holder may be garbage.
        try:
            return self._fs.lock(self.path)
        except BlockingIOError as error:
            raise LockedError(
                f"{self.path} is held by {text}, which is this one, by {held or 'another object'}. Save what is to stay"
                f" and close it, or call oneemb.release({os.path.dirname(self.path)!r}), which closes it; or choose"
                " another path. Snapshots may be read beside it"
            ) from error

    def ask(self, newcomer: str) -> str:
        """Ask the holder to close. Returns the holder and its reason against it; "" = it has closed."""
        holder = self.holder
        if holder is None:
            return "a call that is under way"
        why = holder.close_for(newcomer) if newcomer else IN_USE
        return f"{holder.what}, {why}" if why else ""

    @property
    def holder(self) -> Holder | None:
        """The object that holds the lock; None = a call holds it, or the object has been collected."""
        return None if self._holder is None else self._holder()

    @property
    def still_there(self) -> bool:
        """Whether the file at the path is the one that is held; if not, the folder no longer belongs to this writer."""
        return self._fs.still_locks(self._file, self.path)

    def check(self) -> None:
        """Raise StorageError if the file at the path is not the one that is held."""
        if not self.still_there:
            raise StorageError(
                f"{self.path} was removed, with its folder or alone, while process {self._pid} held it: what lies there"
                " now is somebody else's, and nothing was written or removed. Rows of this table that no snapshot holds"
                " are in this process only; begin anew, at a path that nobody removes"
            )

    def record(self, known: KnownSnapshots) -> None:
        """Write a new record of the snapshots, durably. After an OSError it may not be durable; the older one is."""
        if self._pid != os.getpid():
            raise StorageError(f"{self.path} is held by process {self._pid}; a forked child must open its own table")
        if not self.keeps_records:
            return
        position = 1 - self._position
        self._fs.write(self._file, _pack(known, self._sequence + 1), _RECORD_BEGINS[position])
        self._fs.sync(self._file)
        if self.known is None:
            self._fs.sync_directory(os.path.dirname(self.path))
        self._sequence, self._position, self.known = self._sequence + 1, position, known

    def release(self) -> None:
        _held.pop(id(self), None)
        if self._pid == os.getpid():
            try:
                if not self._foreign:
                    self._write_holder(b"")
                elif self.still_there:
                    self._fs.truncate(self.path, 0)
            except OSError as error:
                raise StorageError(f"could not give back the lock: {error}") from error
            finally:
                self._fs.unlock(self._file)

    def _write_holder(self, holder: bytes, block: bytes | None = None) -> None:
        data = holder[:_HOLDER_BYTES].ljust(_HOLDER_BYTES)
        if block is not None and len(block) < _BLOCK_BYTES and not self._foreign:
            data = data + block[_HOLDER_BYTES:].ljust(_BLOCK_BYTES - _HOLDER_BYTES, b"\0")
        try:
            self._fs.write(self._file, data, 0)
        except OSError:
            pass  # The lock is held all the same: a table on a full disk must open, so that space can be freed.


_held: "weakref.WeakValueDictionary[int, WriterLock]" = weakref.WeakValueDictionary()


def _held_here() -> list[WriterLock]:
    """Locks that this process holds; those from before a fork are its parent's."""
    locks = [reference() for reference in _held.valuerefs()]
    return [lock for lock in locks if lock is not None and lock._pid == os.getpid()]


def holders_below(folder: str) -> list[tuple[str, Holder]]:
    """Objects of this process that hold a folder or a folder below it, each after its folder, outer folders first.

    A folder that was renamed since, or whose link leads elsewhere now, is known by its lock's file."""
    found, top, path = [], os.path.join(os.path.realpath(folder), ""), os.path.join(folder, "LOCK")
    for lock in _held_here():
        its, holder = os.path.dirname(lock.path), lock.holder
        if holder is not None and (
            os.path.join(os.path.realpath(its), "").startswith(top) or lock._fs.still_locks(lock._file, path)
        ):
            found.append((its, holder))
    return sorted(found, key=lambda one: len(one[0]))


def lock_holder(fs: FileSystem, path: str) -> str | None:
    """The lock's holder, in words; None = the lock is free."""
    block = fs.read_lock(path)
    return None if block is None else _holder_text(block)


def known_snapshots(fs: FileSystem, path: str) -> KnownSnapshots | None:
    """A table's snapshots as LOCK records them, read without taking the lock; None = it has no record."""
    try:
        file = fs.open(path)
        try:
            return _newest(_read_block(fs, file))[2]
        finally:
            fs.close(file)
    except OSError:
        return None


def _read_block(fs: FileSystem, file: int) -> bytes:
    block = bytearray(_BLOCK_BYTES)
    return bytes(block[: fs.read_into(file, memoryview(block), 0)])


def _newest(block: bytes) -> tuple[int, int, KnownSnapshots | None, bool]:
    """The newest record: its sequence, its position (0 or 1), the record; and whether a later release wrote one."""
    sequence, position, known, newer = 0, 1, None, False
    for n, begin in enumerate(_RECORD_BEGINS):
        text, end = block[begin : begin + _TEXT_BYTES], block[begin + _TEXT_BYTES : begin + _RECORD_BYTES]
        if len(end) < _SUM.size or _SUM.unpack(end)[0] != xxh64(text):
            continue
        try:
            fields = json.loads(text)
            if fields["version"] != _RECORD_VERSION:
                newer = True
                continue
            numbers = [fields[name] for name in ("sequence", "count", "lost_more", "keep_below")]
            if not all(type(number) is int and 0 <= number < _NUMBER_MAX for number in numbers):
                continue  # No release has written this.
            if numbers[0] > sequence:
                known = KnownSnapshots(
                    tuple(map(str, fields["snapshots"])), numbers[1], tuple(map(str, fields["lost"])), *numbers[2:]
                )
                sequence, position = numbers[0], n
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # No release has written this either.
    return sequence, position, None if newer else known, newer


def _pack(known: KnownSnapshots, sequence: int) -> bytes:
    room = _TEXT_BYTES - _NUMBERS_BYTES
    kept: list[list[str]] = []
    for names in (known.names, known.lost):
        kept.append([])
        for name in names:
            room -= len(json.dumps(name)) + 2
            if room < 0:
                break
            kept[-1].append(name)
    fields = {
        "version": _RECORD_VERSION,
        "sequence": sequence,
        "count": known.count,
        "lost_more": known.lost_more + len(known.lost) - len(kept[1]),
        "keep_below": known.keep_below,
        "snapshots": kept[0],
        "lost": kept[1],
    }
    text = json.dumps(fields).encode().ljust(_TEXT_BYTES)
    assert len(text) == _TEXT_BYTES
    return text + _SUM.pack(xxh64(text))


def _holder_of(block: bytes) -> bytes:
    return block[:_HOLDER_BYTES].strip(b" \0")


def _holder_text(block: bytes) -> str:
    try:
        fields = json.loads(_holder_of(block))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fields["since"]))
        return f"process {fields['pid']} on host {fields['host']} since {since}"
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return "a process that did not leave its name"
