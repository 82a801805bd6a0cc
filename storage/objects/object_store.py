"""Objects of a store that fsspec knows: S3, Google Cloud Storage, Azure, a folder, memory.

Invariants:
- an object is written completely or not at all. A piece never changes, since its key is the checksum of its bytes; a
  text is replaced as a whole;
- bytes that come from the store are compared with their checksum before they are used.
"""

import hashlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeGuard, TypeVar

from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.new_files import begin, remove_unfinished

Piece = tuple[str, int]
"""(SHA-256 of the bytes in hexadecimal digits, number of bytes) of an object that is named by its bytes."""

_TRIES = 4
_WAIT_S = 0.5
_DIGITS = 16

_PASSWORD = re.compile("//([^/@:]*):[^/@]*@")
"""User and password of a URL, such as sftp://user:password@host/items."""

T = TypeVar("T")


class StoreCalls:
    """Calls of stores that are at work. Any thread may call it."""

    def __init__(self) -> None:
        # {(process, thread): (begin of its call, the call in words)}. A child of fork has the calls of its parent too.
        self._begun: dict[tuple[int, int], tuple[float, str]] = {}

    @contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """Block in which this thread makes a call."""
        thread = os.getpid(), threading.get_ident()
        self._begun[thread] = time.monotonic(), what
        try:
            yield
        finally:
            self._begun.pop(thread, None)

    def late(self, seconds: float) -> str | None:
        """The call that has been at work for longest, in words, if it began `seconds` ago or earlier; None = there is
        none."""
        here = [call for (process, _), call in self._begun.copy().items() if process == os.getpid()]
        begun, what = min(here, default=(math.inf, ""))
        return what if begun <= time.monotonic() - seconds else None


class ObjectStore:
    """The objects below a URL, such as `s3://bucket/items`.

    Args:
        options: arguments for the file system of fsspec, such as credentials.
        calls: calls at work, which several stores may share.

    Raises:
        TypeError: the URL is no text, or options is no dict of arguments.
        ValueError: the URL is empty or holds a password, or fsspec knows no file system for the URL.
        ImportError: the package of the file system is missing.
    """

    def __init__(self, url: str, options: dict[str, Any] | None = None, calls: "StoreCalls | None" = None):
        import fsspec

        url = os.fspath(url) if isinstance(url, os.PathLike) else url
        if not isinstance(url, str):
            raise TypeError(
                f"url must be a str, such as 's3://bucket/items', got {type(url).__name__} {url!r:.100}; give where the"
                " snapshots lie"
            )
        if not url.strip():
            raise ValueError(f"url must say where the snapshots lie, such as 's3://bucket/items', got {url!r}")
        named = _PASSWORD.sub(r"//\1@", url)
        if named != url:
            raise ValueError(
                f"url must hold no password, since errors, checkpoints and copies name it, got one in {named!r}; give"
                " it in options, or in the configuration files of fsspec"
            )
        if options is not None and not (isinstance(options, dict) and all(isinstance(name, str) for name in options)):
            raise TypeError(
                "options must be a dict of arguments for the file system of fsspec, such as {'key': ..., 'secret':"
                f" ...}}, got {type(options).__name__}"
            )
        try:
            fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **(options or {}))
        except ImportError as error:
            raise ImportError(f"{url} needs a package that is not installed: {error}") from error
        except ValueError as error:
            raise ValueError(
                f"url must be one that fsspec knows, such as s3://bucket/items, got {url!r}: {error}"
            ) from error
        self._fs, self._root = fs, root.rstrip("/")
        self.url, self.calls = url.rstrip("/"), StoreCalls() if calls is None else calls
        self._local = isinstance(fs, fsspec.implementations.local.LocalFileSystem)
        self.folder = os.path.realpath(root) if self._local else None
        """The folder of the objects, if the store is one."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _tried(self, what: str, key: str, call: Callable[[], T]) -> T:
        """Result of a call, which is made again if the network fails. `what`: past participle of the call, for errors.
        FileNotFoundError and PermissionError of the call come unchanged."""
        with self.calls.at_work(f"{self.url}/{key} is {what}"):
            return self._tried_again(what, key, call)

    def _tried_again(self, what: str, key: str, call: Callable[[], T]) -> T:
        for n in range(_TRIES):
            try:
                return call()
            except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError):
                raise
            except Exception as error:  # Libraries of stores have classes of errors of their own.
                if n == _TRIES - 1 or self._local or isinstance(error, NotImplementedError):
                    raise StorageError(
                        f"{self.url}/{key} could not be {what}: {error}; call again once the store can be used"
                    ) from error
                time.sleep(_WAIT_S * 2**n)
        raise AssertionError

    def write(self, key: str, data: bytes) -> None:
        """Write an object, whole, in place of what was there before."""

        def write() -> None:
            if not self._local:
                self._fs.pipe_file(self._path(key), data)
                return
            # A folder shows a file while it is written, so the file gets its name when it is whole.
            fs, path = LocalFileSystem(), self._path(key)
            folder, name = os.path.split(path)
            fs.make_directories(folder)
            remove_unfinished(fs, folder, re.escape(name), _DIGITS, fs.remove)
            temporary, lock = begin(fs, path, _DIGITS)
            try:
                fs.write(lock, data, 0)
                fs.sync(lock)
                fs.rename(temporary, path)
                fs.sync_directory(folder)
            except BaseException:
                with suppress(FileNotFoundError):  # The object may have its name already.
                    fs.remove(temporary)
                raise
            finally:
                fs.unlock(lock)

        try:
            self._tried("written", key, write)
        except PermissionError as error:
            raise StorageError(f"{self.url}/{key} could not be written: {error}; check the credentials") from error
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise StorageError(
                f"{self.url}/{key} could not be written: {error}; make the bucket or folder, or correct the URL"
            ) from error

    def _read(self, key: str) -> bytes:
        try:
            return bytes(self._tried("read", key, lambda: self._fs.cat_file(self._path(key))))
        except PermissionError as error:
            raise StorageError(f"{self.url}/{key} could not be read: {error}; check the credentials") from error

    # ---- pieces: objects named by their bytes -----------------------------------------------------------------------

    def put(self, data: bytes) -> tuple[Piece, bool]:
        """Write an object, unless it is there. Returns its name and size, and whether it was written."""
        digest = hashlib.sha256(data).hexdigest()
        if self.size_of(object_key(digest)) == len(data):
            return (digest, len(data)), False
        self.write(object_key(digest), data)
        return (digest, len(data)), True

    def get(self, piece: Piece) -> bytes:
        """Bytes of an object.

        Raises:
            CorruptTableError: the object is missing, or has other bytes.
        """
        key = object_key(piece[0])
        try:
            data = self._read(key)
        except FileNotFoundError as error:
            raise CorruptTableError(
                f"{self.url}/{key} is missing, though a snapshot needs it; push the snapshot again"
            ) from error
        if not are_bytes_of(data, piece):
            raise CorruptTableError(
                f"{self.url}/{key} is damaged: its checksum does not match; delete the object and push the snapshot"
                " again"
            )
        return data

    def size_of(self, key: str) -> int | None:
        """Number of bytes of an object; None = there is none."""
        try:
            return int(self._tried("looked up", key, lambda: self._fs.info(self._path(key)))["size"])
        except FileNotFoundError:
            return None

    def version_of(self, key: str) -> str | None:
        """Text that changes when an object is replaced by another one; None = there is no object."""
        try:
            return str(self._tried("looked up", key, lambda: self._fs.ukey(self._path(key))))
        except FileNotFoundError:
            return None

    # ---- texts: small objects that are replaced as a whole -----------------------------------------------------------

    def put_text(self, key: str, fields: dict[str, Any]) -> None:
        """Write a dict as JSON with a checksum. What was there before is replaced."""
        self.write(key, json.dumps(fields | {"sha256": _sum_of(fields)}, sort_keys=True).encode())

    def get_object(self, key: str) -> bytes | None:
        """Bytes of an object whose own format has checksums; None = there is none."""
        try:
            return self._read(key)
        except FileNotFoundError:
            return None

    def get_text(self, key: str) -> dict[str, Any] | None:
        """The dict that `put_text` wrote; None = there is none. CorruptTableError if the bytes are not as written."""
        data = self.get_object(key)
        if data is None:
            return None
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields.pop("sha256") != _sum_of(fields):
                raise ValueError("the checksum does not match")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptTableError(
                f"{self.url}/{key} is damaged: {error}; delete the object and push the snapshot again"
            ) from error
        return fields

    # ---- lists ------------------------------------------------------------------------------------------------------

    def keys(self, prefix: str) -> Iterator[str]:
        """Keys of all objects below a prefix, which ends with "/"."""
        begin_at = len(self._root) + 1
        try:
            found = self._tried("listed", prefix, lambda: self._fs.find(self._path(prefix)))
        except FileNotFoundError:
            return
        for path in found:
            yield path[path.index(self._root) :][begin_at:]

    def age_s(self, key: str, now: float | None = None) -> float:
        """Seconds since an object was written; 0.0 if the store does not tell.

        Args:
            now: the time by the store's clock, in seconds since 1970; None = this machine's clock is used.
        """
        written = self.written_at(key)
        return 0.0 if written is None else max(0.0, (time.time() if now is None else now) - written)

    def written_at(self, key: str) -> float | None:
        """Time at which an object was written, by the store's clock, in seconds since 1970; None = there is no such
        object, or the store does not tell."""
        try:
            written = self._tried("looked up", key, lambda: self._fs.modified(self._path(key)))
        except FileNotFoundError:
            return None
        except StorageError as error:
            if isinstance(error.__cause__, NotImplementedError):
                return None
            raise
        return float(written.timestamp())

    def remove(self, key: str) -> None:
        """Remove an object, if it is there."""
        try:
            self._tried("removed", key, lambda: self._fs.rm_file(self._path(key)))
        except FileNotFoundError:
            pass


def is_url(path: object) -> TypeGuard[str]:
    """Whether a path is a URL of an object store."""
    return isinstance(path, str) and "://" in path


def store_beside(
    url: str, path: str | os.PathLike[str], names: Collection[str] | None, options: dict[str, Any] | None
) -> tuple[ObjectStore, str]:
    """(store at `url`, absolute path of a table's folder without links), for a copy of snapshots between the two.

    Args:
        names: names of the snapshots, or None for all, as the caller has given them.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: the objects would lie among the files of the table; or as for `ObjectStore`.
        ImportError: as for `ObjectStore`.
    """
    if names is not None and not (
        isinstance(names, Collection)
        and not isinstance(names, str | bytes)
        and all(isinstance(name, str) for name in names)
    ):
        raise TypeError(
            f"names must be a list of names of snapshots, such as ['base'], or None for all, got"
            f" {type(names).__name__} {names!r:.100}"
        )
    store = ObjectStore(url, options)
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"path must be that of a table's folder, got {type(path).__name__} {path!r:.100}")
    folder = os.path.realpath(os.fsdecode(path))
    if store.folder is not None and os.path.commonpath((store.folder, folder)) == folder:
        raise ValueError(
            f"url must be a folder outside of the table's, got {store.url} and the table {folder}; give another folder"
        )
    return store, folder


def are_bytes_of(data: bytes, piece: Piece) -> bool:
    """Whether `data` has the size and checksum of a piece."""
    return len(data) == piece[1] and hashlib.sha256(data).hexdigest() == piece[0]


def object_key(digest: str) -> str:
    """Key of the object with this SHA-256."""
    return f"objects/{digest[:2]}/{digest}"


def _sum_of(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
