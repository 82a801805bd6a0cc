"""Marks of parts that are of no use unless all parts of their snapshot are there.  table/FORMAT.md has the bytes.

A snapshot of several ranks exists if every one of its parts does. A part that is alone may be what a killed save or
delete has left, or all that is left of a snapshot whose other parts are on a disk that is not mounted. So before a part
is saved or deleted, its folder says in the file UNFINISHED which snapshot that is; when all parts are there, or gone,
the mark goes.

Invariant: a part is removed as a leftover only where a mark that was durable before says that it may be.
"""

from collections.abc import Collection
from contextlib import suppress

from oneemb.kernels.checksum import xxh64
from oneemb.storage.fs import FileSystem, doing, read_file
from oneemb.storage.new_files import replace_file

_NAME = "UNFINISHED"
_DIGITS = (16, 32)  # of an identity
_SUM_DIGITS = 16


def marks_at(fs: FileSystem, folder: str) -> set[str]:
    """The identities of the snapshots whose parts in this folder are marked. A line that is damaged marks nothing."""
    words = [line.split(b" ") for line in (read_file(fs, f"{folder}/{_NAME}") or b"").split(b"\n")]
    return {
        word[0].decode() for word in words
        if len(word) == 2 and len(word[0]) in _DIGITS and word[1] == _sum_of(word[0])
    }  # fmt: skip


def mark(fs: FileSystem, folder: str, identities: Collection[str]) -> None:
    """Mark the parts of these snapshots, durably, as the holder of the folder's lock. StorageError: there may be no
    marks."""
    before = marks_at(fs, folder)
    if not before.issuperset(identities):
        _write(fs, folder, before.union(identities))


def unmark(fs: FileSystem, folder: str, identities: Collection[str]) -> None:
    """Remove marks, durably; raises as `mark`."""
    before = marks_at(fs, folder)
    if not before.isdisjoint(identities):
        _write(fs, folder, before.difference(identities))


def drop_unwritten(fs: FileSystem, folder: str) -> None:
    """Remove the temporary file of a killed `mark` or `unmark`."""
    with suppress(OSError):
        fs.remove(f"{folder}/{_NAME}.tmp")


def _write(fs: FileSystem, folder: str, identities: set[str]) -> None:
    path = f"{folder}/{_NAME}"
    with doing("write down which snapshots are unfinished in", path):
        if not identities:
            fs.remove(path)
        else:
            lines = [b"%s %s\n" % (identity.encode(), _sum_of(identity.encode())) for identity in sorted(identities)]
            replace_file(fs, path, b"".join(lines))
        fs.sync_directory(folder)


def _sum_of(identity: bytes) -> bytes:
    return f"{xxh64(identity):0{_SUM_DIGITS}x}".encode()
