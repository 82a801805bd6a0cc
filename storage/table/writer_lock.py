"""One writer for each path: the lock, its holder, and a record of the table's snapshots.  FORMAT.md has the bytes.

The system frees the lock when its holder ends, in whatever way. The name that a dead holder has left in the file tells
the next one whose lock it takes over.

Invariants:
- the file is one block that is written once and from then on only overwritten, so that a full disk keeps no process
  from taking the lock;
- a record of the snapshots is on the device before the older one is overwritten: a loss of power leaves one of them;
- a snapshot that a record names was durable when the record was written.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass

from oneemb.kernels.checksum import xxh64
from oneemb.storage.errors import LockedError, StorageError
from oneemb.storage.fs import FileSystem, storage_error

__all__ = ["KnownSnapshots", "WriterLock", "known_snapshots", "lock_holder"]

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
    """What LOCK says of a table's snapshots.

    Args:
        names: of snapshots that must exist, as many as fit.
        count: how many must exist.
        lost: names of snapshots that were found missing and that the user has not given up yet, as many as fit.
        lost_more: how many more are missing, whose names are not known.
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


class WriterLock:
    """Held from construction until `release`.

    Args:
        fs: where the table is.
        path: of the lock's file.
        foreign: the file is of another program's table: it names the holder and is empty after `release`.

    Raises:
        LockedError: another table object holds it.
    """

    def __init__(self, fs: FileSystem, path: str, foreign: bool = False):
        self._fs, self.path, self._foreign = fs, path, foreign
        self._pid = os.getpid()
        try:
            self._file = fs.lock(path)
        except BlockingIOError as error:
            raise LockedError(
                f"{path} is held by {_holder_text(fs.read_lock(path) or b'')}; one table object at a time writes to a "
                f"path: close that one (or del it: an object of this process that was replaced may still live), or "
                f"choose another path; snapshots may be read beside it"
            ) from error
        except OSError as error:
            raise storage_error(error, "lock", path) from error
        try:
            block = _read_block(fs, self._file)
        except OSError as error:
            fs.unlock(self._file)
            raise storage_error(error, "read", path) from error
        self.left_by = _holder_text(block) if _holder_of(block) else None
        self._sequence, self._position, self.known, newer = _newest(block)
        self.keeps_records = not newer and not foreign
        """Whether records may be written: not over those of a later release."""
        holder = {"pid": self._pid, "host": socket.gethostname(), "since": time.time()}
        self._write_holder(json.dumps(holder).encode(), block)

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
        """Write a new record of the snapshots. Durable when this returns.

        Raises:
            OSError: the new record may not be durable; the older one is.
        """
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


def lock_holder(fs: FileSystem, path: str) -> str | None:
    """Who holds the lock, in words; None when nobody does."""
    block = fs.read_lock(path)
    return None if block is None else _holder_text(block)


def known_snapshots(fs: FileSystem, path: str) -> KnownSnapshots | None:
    """What LOCK says of a table's snapshots, read without taking the lock; None if it does not say."""
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
