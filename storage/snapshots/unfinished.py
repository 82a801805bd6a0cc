"""Marks of parts that are useless unless all parts of their snapshot exist.  table/FORMAT.md describes the file.

A snapshot of several ranks exists if all its parts exist. If a part is there without the others, either a killed save
or delete has left it, or the other parts are on a disk that is not mounted. So before a part is saved or deleted, the
file UNFINISHED in its folder names the snapshot. The mark is removed once all parts exist, or all are deleted.

Invariant: a part is removed as a leftover only if it has a durable mark.
"""

from collections.abc import Collection
from contextlib import suppress

from oneemb.kernels.checksum import xxh64
from oneemb.storage.fs import FileSystem, doing, read_file
from oneemb.storage.new_files import replace_file

_NAME = "UNFINISHED"
_DIGITS = (16, 32)  # possible lengths of an identity
_SUM_DIGITS = 16


def marks_at(fs: FileSystem, folder: str) -> set[str]:
    """Identities of the snapshots whose parts in this folder are marked. A damaged line marks nothing."""
    words = [line.split(b" ") for line in (read_file(fs, f"{folder}/{_NAME}") or b"").split(b"\n")]
    return {
        word[0].decode() for word in words
        if len(word) == 2 and len(word[0]) in _DIGITS and word[1] == _sum_of(word[0])
    }  # fmt: skip


def mark(fs: FileSystem, folder: str, identities: Collection[str]) -> None:
    """Mark the parts of these snapshots, durably. The caller must hold the folder's lock. After a StorageError the
    marks may be there or not."""
    before = marks_at(fs, folder)
    if not before.issuperset(identities):
        _write(fs, folder, before.union(identities))


def unmark(fs: FileSystem, folder: str, identities: Collection[str]) -> None:
    """Remove marks, durably. The caller must hold the folder's lock. After a StorageError the marks may be there or
    not."""
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
