"""A parameter server in a folder, `file://PATH`: rows in persistent tables, for one process at a time.

    PATH/LOCK            the process that has opened the folder
    PATH/NAMES           the number of each table and part (`value_names.py`)
    PATH/width-16/       the persistent table of all values of 16 numbers, of all tables and parts
    PATH/UNSAVED         exists while the folder has rows that no snapshot holds, which only `save_bytes` allows

Each part of a row is stored as a row of its own in a persistent table. The table number of that row names the user's
table and the part. So a row may have some parts only, and parts of any widths. A value takes about 30 bytes of memory
beside its place on the disk.

Invariants:
- a push or an erase that has returned survives the process and a loss of power: it has saved a snapshot, which costs
  some syncs and a bit for each value. With `save_bytes` it survives once a save, a flush or a close has followed;
- a loss of rows is an error when the folder is opened: UNSAVED is durable before the first unsaved row is written, and
  NAMES before the first row of a name; each width that NAMES lists has a snapshot;
- the persistent table compares every byte with its checksum;
- all users of a URL in one process (the embeddings of a model, their averages and copies) share a server: it handles
  one call at a time, and the folder is released when the last user has closed it. A child of fork has no server.
"""

import json
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import LockedError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path, doing, read_file
from oneemb.storage.remote.parameter_server import LostRowsError, ServerError, wrong_length
from oneemb.storage.remote.value_names import Value, ValueNames, write_durably
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.writer_lock import IN_USE, WriterLock

_SNAPSHOT = "rows"


def read_file_url(url_rest: str) -> tuple[str, int, bool]:
    """(path, save_bytes, accept_loss) of a URL without its `file://`: `PATH`, `PATH?save_bytes=N`, `PATH?lost=accept`,
    or both options with `&` between them. Raises ValueError without a path, or for an unknown option."""
    path, _, options = url_rest.partition("?")
    if not path:
        raise ValueError("a file server's URL is file://PATH, such as file:///data/rows; got no path")
    save_bytes, accept_loss = 0, False
    for option in filter(None, options.split("&")):
        if match := re.fullmatch(r"save_bytes=(\d+)", option):
            save_bytes = int(match[1])
        elif option == "lost=accept":
            accept_loss = True
        else:
            raise ValueError(f"file:// takes the options save_bytes=N and lost=accept, got {option!r}")
    return absolute_path(path), save_bytes, accept_loss


class FileServer:
    """A parameter server that keeps rows in a folder.

    Args:
        path: the folder, which is made if it does not exist. `~` is the user's home.
        save_bytes: number of bytes that may be pushed before a save. 0 = each push is saved before it returns.
        accept_loss: if a process has ended with unsaved rows, continue with the rows of its last save.
        background: write in background threads; False = in the calls themselves.

    Raises:
        LostRowsError: rows that were pushed are lost.
        ServerError: another process has opened the folder, or files cannot be read or are damaged.
    """

    def __init__(
        self, path: AnyPath, *, save_bytes: int = 0, accept_loss: bool = False, fs: FileSystem | None = None,
        background: bool = True,
    ):  # fmt: skip
        self._fs, self._path = fs or LocalFileSystem(), absolute_path(path)
        self.name = self.what = f"file://{self._path}"
        self._save_bytes, self._background = save_bytes, background
        self._unsaved_bytes, self._unsaved_widths, self._marked = 0, set[int](), False
        self._threads, self._pid, self._closed = Threads(), os.getpid(), False
        self._tables: dict[int, PersistentTable] = {}
        with self._as_server_error():
            with doing("make the folder", self._path):
                self._fs.make_directories(self._path)
            self._lock = WriterLock(self._fs, f"{self._path}/LOCK", self)
            try:
                self._open(accept_loss)
            except BaseException:
                self._release()
                raise

    def pull(self, table: str, id_N: np.ndarray, widths: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        id_N = np.ascontiguousarray(id_N)
        parts = [np.zeros((len(id_N), width), np.float32) for width in widths]
        found_NP = np.zeros((len(id_N), len(widths)), np.bool_)
        with self._as_server_error():
            self._begin()
            for p, (part, width) in enumerate(zip(parts, widths, strict=True)):
                value = self._names.find(table, p)
                if value is None:
                    continue
                table_N = np.full(len(id_N), value.number, np.int32)
                if width in value.widths:
                    found_NP[:, p] = ~self._tables[width].get(table_N, id_N, part)
                for other in value.widths:
                    if other == width:
                        continue
                    wrong_N = np.flatnonzero(self._tables[other].contains(table_N, id_N))
                    if len(wrong_N):
                        n = wrong_N[0]
                        if found_NP[n, p]:
                            raise ServerError(
                                f"{self.name}: part {p} of row {id_N[n]} of table {table!r} has values of {width} and"
                                f" of {other} numbers, since a push was cut short; push the row again, or erase it"
                            )
                        raise wrong_length(self.name, table, id_N[n], p, 4 * other, 4 * width)
        return parts, found_NP

    def push(self, table: str, id_N: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        for part in parts:
            if part.dtype != np.float32 or part.ndim != 2 or len(part) != len(id_N) or not part.shape[1]:
                raise ValueError(
                    f"parts must be float32 of shape [{len(id_N)}, 1 or more], got {part.dtype} {list(part.shape)}"
                )
        id_N = np.ascontiguousarray(id_N)
        with self._as_server_error():
            self._begin()
            if not len(id_N):
                return
            for p, part in enumerate(parts):
                value = self._value(table, p, part.shape[1])
                table_N = np.full(len(id_N), value.number, np.int32)
                self._will_change(part.shape[1], part.nbytes + id_N.nbytes)
                self._tables[part.shape[1]].put(table_N, id_N, part)
                self._erase(value, id_N, but=part.shape[1])
            self._save_if_due()

    def erase(self, table: str, id_N: np.ndarray, parts: int) -> None:
        id_N = np.ascontiguousarray(id_N)
        with self._as_server_error():
            self._begin()
            for p in range(parts):
                value = self._names.find(table, p)
                if value is not None and len(id_N):
                    self._erase(value, id_N)
            self._save_if_due()

    def flush(self) -> None:
        """Save all unsaved rows, durably. Raises ServerError if they could not be saved."""
        with self._as_server_error():
            self._begin()
            self._save()

    def close(self) -> None:
        """Save all unsaved rows, and release the folder. If rows could not be saved, release it and raise
        ServerError."""
        if self._closed or self.forked:
            return
        self._closed = True
        with self._as_server_error():
            try:
                self._save()
            finally:
                self._release()

    def close_for(self, other: str) -> str:
        return IN_USE

    def force_close(self) -> int:
        raise LockedError(f"{self.name} serves embeddings of this process; close them, or release their folders")

    def _open(self, accept_loss: bool) -> None:
        self._names = ValueNames(self._fs, f"{self._path}/NAMES")
        with doing("list", self._path):
            there = set(self._fs.names(self._path))
        if self._names.new:
            # NAMES is written before the first table is made, so tables without NAMES mean that NAMES is lost.
            tables = sorted(name for name in there if name.startswith("width-"))
            if tables:
                raise ServerError(
                    f"{self.name} has rows in {', '.join(tables)} and no file NAMES, which says to which tables they"
                    " belong; restore NAMES from a copy of the folder, or give another path"
                )
            self._names.write()
        if "UNSAVED" in there:
            self._check_loss(accept_loss)
        for width in self._names.widths:
            self._open_table(width, new=False)
        if "UNSAVED" in there:
            self._unmark()

    def _open_table(self, width: int, *, new: bool) -> None:
        path = f"{self._path}/width-{width}"
        table = PersistentTable.open(
            path, row_width=width, threads=self._threads, fs=self._fs, background=self._background,
            mend="close the server and open it again",
        )  # fmt: skip
        self._tables[width] = table
        names = [info.name for info in table.snapshots()]
        if new and _SNAPSHOT not in names:
            table.save_snapshot(_SNAPSHOT, {"identity": self._names.identity})
            return
        try:
            meta = table.load_snapshot(_SNAPSHOT)
        except SnapshotNotFoundError as error:
            raise LostRowsError(
                f"{self.name} has lost its rows of {width} numbers: {error}; restore {path} from a copy of the whole"
                " folder"
            ) from error
        if meta.get("identity") != self._names.identity:
            raise ServerError(
                f"{path} holds rows of another folder than {self._names.path}: their identities are"
                f" {meta.get('identity')} and {self._names.identity}; restore the whole folder from one copy"
            )

    def _value(self, table: str, part: int, width: int) -> Value:
        """The number of a table's part. Makes the persistent table for values of this width if there is none."""
        known = self._names.find(table, part)
        if known is not None and width in known.widths:
            return known
        if width not in self._tables:
            # The table comes before its entry in NAMES, so that each width that NAMES lists has a snapshot.
            try:
                self._open_table(width, new=True)
            except BaseException:
                if width in self._tables:
                    self._tables.pop(width).close()
                raise
        return self._names.add(table, part, width)

    def _erase(self, value: Value, id_N: np.ndarray, but: int = 0) -> None:
        table_N = np.full(len(id_N), value.number, np.int32)
        for width in value.widths:
            if width != but and self._tables[width].contains(table_N, id_N).any():
                self._will_change(width, id_N.nbytes)
                self._tables[width].erase(table_N, id_N)

    def _will_change(self, width: int, nbytes: int) -> None:
        """Record that values of a width are going to change; with `save_bytes`, first write the file UNSAVED."""
        if self._save_bytes and not self._marked:
            writer = {"pid": self._pid, "host": socket.gethostname(), "since": time.time()}
            write_durably(self._fs, f"{self._path}/UNSAVED", json.dumps(writer).encode())
            self._marked = True
        self._unsaved_widths.add(width)
        self._unsaved_bytes += nbytes

    def _save_if_due(self) -> None:
        if self._unsaved_bytes and self._unsaved_bytes >= self._save_bytes:
            self._save()

    def _save(self) -> None:
        for width in sorted(self._unsaved_widths):
            self._tables[width].save_snapshot(_SNAPSHOT, {"identity": self._names.identity}, overwrite=True)
            self._unsaved_widths.discard(width)
        self._unsaved_bytes = 0
        if self._marked:
            self._unmark()
            self._marked = False

    def _unmark(self) -> None:
        path = f"{self._path}/UNSAVED"
        with doing("remove", path):
            with suppress(FileNotFoundError):
                self._fs.remove(path)
            self._fs.sync_directory(self._path)

    def _check_loss(self, accept: bool) -> None:
        """Raise LostRowsError, unless the loss is accepted: a process has ended with unsaved rows."""
        if accept:
            return
        who = "a process"
        with suppress(StorageError, OSError, ValueError, KeyError, TypeError, OverflowError):
            fields = json.loads(read_file(self._fs, f"{self._path}/UNSAVED") or b"")
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fields["since"]))
            who = f"process {fields['pid']} on host {fields['host']}, which pushed rows since {since},"
        raise LostRowsError(
            f"{self.name} has lost rows: {who} ended without saving or closing, while save_bytes let it push rows"
            " that were not saved. The folder has the state of its last save; to continue with that state, open the"
            f" server once with {self.name}?lost=accept"
        )

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that opened the folder."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise ServerError in a forked child."""
        if self.forked:
            raise ServerError(
                f"{self.name} was opened by process {self._pid}, and this is a forked child of it, {os.getpid()}; only"
                " one process at a time can use a folder: open another path in the child"
            )

    def _begin(self) -> None:
        self.check_process()
        if self._closed:
            raise ServerError(f"{self.name} is closed; open it again")
        self._lock.check()  # Raises if the folder was removed: a folder there now belongs to another process.

    def _release(self) -> None:
        with ExitStack() as last_first:
            last_first.callback(self._lock.release)
            for table in self._tables.values():
                last_first.callback(table.close)

    @contextmanager
    def _as_server_error(self) -> Iterator[None]:
        try:
            yield
        except ServerError:
            raise
        except StorageError as error:
            raise ServerError(f"{self.name}: {error}") from error


# ---- one server for all users of a URL in a process ------------------------------------------------------------------


_open: "weakref.WeakValueDictionary[tuple[int, str], _Shared]" = weakref.WeakValueDictionary()
"""{(process, path): server}."""

_opening = threading.RLock()  # Reentrant: the garbage collector may close a handle while this thread opens another.


class _Shared:
    def __init__(self, path: str, save_bytes: int, accept_loss: bool):
        self.save_bytes = save_bytes
        self.server = FileServer(path, save_bytes=save_bytes, accept_loss=accept_loss)
        self.one_at_a_time = threading.RLock()
        self.handles: weakref.WeakSet[FileHandle] = weakref.WeakSet()


def open_file_server(url_rest: str) -> "FileHandle":
    """The server of a URL, given without its `file://`. Raises the errors of `FileServer`, and ValueError if the URL is
    invalid (`read_file_url`) or the folder is open with another `save_bytes`."""
    path, save_bytes, accept_loss = read_file_url(url_rest)
    key = (os.getpid(), path)
    with _opening:
        shared = _open.get(key)
        if shared is None:
            shared = _open[key] = _Shared(path, save_bytes, accept_loss)
        elif shared.save_bytes != save_bytes:
            raise ValueError(
                f"file://{path} is open in this process with save_bytes={shared.save_bytes}, got {save_bytes}; open it"
                " with the same save_bytes"
            )
        return FileHandle(shared)


class FileHandle:
    """One user's access to a `FileServer` that several users of a process share."""

    def __init__(self, shared: _Shared):
        self.name = shared.server.name
        self._shared: _Shared | None = shared
        shared.handles.add(self)

    def pull(self, table: str, id_N: np.ndarray, widths: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        with self._server() as server:
            return server.pull(table, id_N, widths)

    def push(self, table: str, id_N: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        with self._server() as server:
            server.push(table, id_N, parts)

    def erase(self, table: str, id_N: np.ndarray, parts: int) -> None:
        with self._server() as server:
            server.erase(table, id_N, parts)

    def flush(self) -> None:
        """Save all unsaved rows, durably; see `FileServer.flush`."""
        with self._server() as server:
            server.flush()

    def close(self) -> None:
        if self._shared is None or self._shared.server.forked:
            return
        with _opening, self._shared.one_at_a_time:
            shared, self._shared = self._shared, None
            if shared is None:
                return
            shared.handles.discard(self)
            if not shared.handles:
                for key in [key for key, other in _open.items() if other is shared]:
                    del _open[key]
                shared.server.close()

    @contextmanager
    def _server(self) -> Iterator[FileServer]:
        """The server, which no other thread can use during the block."""
        if self._shared is None:
            raise ServerError(f"{self.name} is closed; open it again")
        self._shared.server.check_process()
        with self._shared.one_at_a_time:
            yield self._shared.server
