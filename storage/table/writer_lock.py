"""The lock of a table's folder, for one writer at a time, with a record of the table's snapshots.  FORMAT.md describes
its bytes.

The system frees the lock when the process that holds it ends. The file then still names the old holder, for a message
to the next one. If an object of this process holds the lock, errors name the object, and `oneemb.release` closes it: in
a notebook, the object that a cell has made lives on when the cell is run again.

Invariants:
- the file is one block that is written once and from then on only overwritten, so that a process can take the lock on a
  full disk;
- a new record of the snapshots is durable before the older one is overwritten, so a loss of power leaves one of the
  two;
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
"""Reason that a holder returns from `close_for` if it never closes for others."""

_BLOCK_BYTES = 4096
_HOLDER_BYTES = 512
_RECORD_BEGINS = (512, 2048)
_RECORD_BYTES = 1536
_SUM = struct.Struct("<Q")
_TEXT_BYTES = _RECORD_BYTES - _SUM.size
_RECORD_VERSION = 1
# Upper bound of a record's bytes without the names of snapshots: numbers, and names of fields.
_NUMBERS_BYTES = 256
_NUMBER_MAX = 1 << 62


@dataclass(frozen=True)
class KnownSnapshots:
    """A record in LOCK of a table's snapshots.

    Args:
        names, count: names of snapshots that must exist, as many as fit, and the number of snapshots that must exist.
        lost, lost_more: names of snapshots that were found missing and are not given up, as many as fit, and the number
            of further ones.
        keep_below: files of chunks with a smaller number are kept even if no snapshot needs them, since a lost snapshot
            may need them.
        next_chunk: greater than the number of every chunk that a snapshot has had, if no snapshot has the greatest of
            these any more; else it may be smaller.
    """

    names: tuple[str, ...] = ()
    count: int = 0
    lost: tuple[str, ...] = ()
    lost_more: int = 0
    keep_below: int = 0
    next_chunk: int = 0

    def gone(self, there: Collection[str]) -> tuple[list[str], int]:
        """(names of the recorded snapshots that are missing among `there`, number of further ones): snapshots that must
        exist, and snapshots that were lost before."""
        lost = [name for name in self.lost if name not in there]
        gone = [name for name in self.names if name not in there]
        more = max(0, self.count - len(there) - len(gone))
        return lost + [name for name in gone if name not in lost], self.lost_more + more


class Holder(Protocol):
    """An object that holds a lock, for other objects of its process."""

    @property
    def what(self) -> str:
        """The object in words, such as "embedding 'items'"."""

    def close_for(self, other: str) -> str:
        """Close for `other`, an object in words, if no row is lost by it. Returns "" if closed, otherwise the reason
        why not, such as "whose 3 rows no snapshot holds"."""

    def force_close(self) -> int:
        """Close. Returns the number of lost rows. Raises LockedError if the object cannot be closed without others,
        RuntimeError if this thread is in the middle of the object's step."""


class WriterLock:
    """A lock that is held from construction until `release`. Raises LockedError if another table object holds it.

    Args:
        path: path of the lock's file.
        holder: object that holds the lock, weakly referenced; None = only a call holds it.
        takes_over: whether another holder in this process is asked to close.
        foreign: whether the file belongs to another program's table: then it has only the holder, and is emptied by
            `release`.
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
        self.sequence, self._position, self.known, newer = _newest(block)
        self.keeps_records = not newer and not foreign
        """Whether records may be written. Records of a later release are not overwritten."""
        fields = {"pid": self._pid, "host": socket.gethostname(), "since": time.time()}
        self._write_holder(json.dumps(fields).encode(), block)
        _held[id(self)] = self

    def _take(self, newcomer: str) -> int:
        """Take the lock, and return its open file. newcomer: object in words, for which a holder in this process is
        asked to close; "" = do not ask."""
        try:
            return self._fs.lock(self.path)
        except BlockingIOError:
            text = _holder_text(self._fs.read_lock(self.path) or b"")
            here = next((lock for lock in _held_here() if lock._fs.still_locks(lock._file, self.path)), None)
            if here is None:
                raise LockedError(
                    f"{self.path} is held by {text}; one table object at a time writes to a path: end that process, or"
                    " close its object, or choose another path; snapshots may be read meanwhile"
                ) from None
            held = here.ask(newcomer)
        if held:
            gc.collect()  # The holder may be garbage.
        try:
            return self._fs.lock(self.path)
        except BlockingIOError:
            raise LockedError(
                f"{self.path} is held by {text}, which is this one, by {held or 'another object'}. Save the rows to"
                f" keep and close that object, or call oneemb.release({os.path.dirname(self.path)!r}), which closes it"
                " (with save='a-name' it saves the rows first); or choose another path. Snapshots may be read meanwhile"
            ) from None

    def ask(self, newcomer: str) -> str:
        """Ask the holder to close. Returns "" if it has closed, otherwise the holder in words with the reason why
        not."""
        holder = self.holder
        if holder is None:
            return "a call that is under way"
        why = holder.close_for(newcomer) if newcomer else IN_USE
        return f"{holder.what}, {why}" if why else ""

    @property
    def holder(self) -> Holder | None:
        """The object that holds the lock; None = a call holds it, or the object has been garbage collected."""
        return None if self._holder is None else self._holder()

    @property
    def still_there(self) -> bool:
        """Whether the file at the path is still the locked one; if not, the folder no longer belongs to this writer."""
        return self._fs.still_locks(self._file, self.path)

    def check(self) -> None:
        """Raise StorageError if the file at the path is no longer the locked one."""
        if not self.still_there:
            raise StorageError(
                f"{self.path} was removed, with its folder or alone, while process {self._pid} held it: a folder that"
                " is there now belongs to another process, and nothing in it was changed. Rows of this table that no"
                " snapshot holds are in this process only; open a new table, at a path that nobody removes"
            )

    def record(self, known: KnownSnapshots, at_least: int = 0) -> None:
        """Write a new record of the snapshots, durably, whose sequence is `at_least` or greater. After an OSError the
        new record may not be durable; the older one still is."""
        if self._pid != os.getpid():
            raise StorageError(f"{self.path} is held by process {self._pid}; a forked child must open its own table")
        if not self.keeps_records:
            return
        position, sequence = 1 - self._position, max(self.sequence + 1, min(at_least, _NUMBER_MAX - 1))
        self._fs.write(self._file, _pack(known, sequence), _RECORD_BEGINS[position])
        self._fs.sync(self._file)
        if self.known is None:
            self._fs.sync_directory(os.path.dirname(self.path))
        self.sequence, self._position, self.known = sequence, position, known

    def release(self) -> None:
        _held.pop(id(self), None)
        if self._pid == os.getpid():
            try:
                if not self._foreign:
                    self._write_holder(b"")
                elif self.still_there:
                    self._fs.truncate(self.path, 0)
            except OSError as error:
                raise StorageError(f"could not release the lock {self.path}: {error}") from error
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
    """Locks that this process holds. Locks from before a fork are the parent's."""
    locks = [reference() for reference in _held.valuerefs()]
    return [lock for lock in locks if lock is not None and lock._pid == os.getpid()]


def holder_at(fs: FileSystem, path: str) -> Holder | None:
    """The object of this process that holds the lock at a path; None = no object of this process does."""
    return next((lock.holder for lock in _held_here() if fs.still_locks(lock._file, path)), None)


def holders_below(folder: str) -> list[tuple[str, Holder]]:
    """(folder, holder) of each object of this process that holds `folder` or a folder below it, outer folders first.

    A folder that has been renamed, or whose link has been changed, is recognized by the file of its lock."""
    found, top, path = [], os.path.join(os.path.realpath(folder), ""), os.path.join(folder, "LOCK")
    for lock in _held_here():
        held_folder, holder = os.path.dirname(lock.path), lock.holder
        if holder is not None and (
            os.path.join(os.path.realpath(held_folder), "").startswith(top) or lock._fs.still_locks(lock._file, path)
        ):
            found.append((held_folder, holder))
    return sorted(found, key=lambda one: len(one[0]))


def lock_holder(fs: FileSystem, path: str) -> str | None:
    """The holder of the lock at a path, in words; None = the lock is free."""
    block = fs.read_lock(path)
    return None if block is None else _holder_text(block)


def known_snapshots(fs: FileSystem, path: str) -> KnownSnapshots | None:
    """The newest record in LOCK, read without taking the lock; None = LOCK has no record."""
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
    """(sequence of the newest record, its position 0 or 1, the record or None, whether a later release wrote one)."""
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
            numbers.append(fields.get("next_chunk", 0))
            if not all(type(number) is int and 0 <= number < _NUMBER_MAX for number in numbers):
                continue  # No release of oneemb has written this record.
            if numbers[0] > sequence:
                known = KnownSnapshots(
                    tuple(map(str, fields["snapshots"])), numbers[1], tuple(map(str, fields["lost"])), *numbers[2:]
                )
                sequence, position = numbers[0], n
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # No release of oneemb has written this record.
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
        **({"next_chunk": known.next_chunk} if known.next_chunk else {}),
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
