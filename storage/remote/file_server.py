"""A parameter server in a folder, `file://PATH`: rows in persistent tables, for one process at a time.

    PATH/LOCK            says who has the folder
    PATH/NAMES           the number of each table and part; see `value_names.py`
    PATH/width-16/       the persistent table of all values of 16 numbers, whatever table and part they are of
    PATH/UNSAVED         is there while rows are kept that no snapshot holds: with `save_bytes` only

Each part of a row is a row of its own in a persistent table, whose table number says the part and the user's table: so
a row may have some parts only, and parts of any widths. A value takes about 30 bytes of memory beside the disk.

Invariants:
- a push or an erase that has returned outlives the process and a loss of power: it has saved a snapshot, which costs
  some syncs and a bit for each value; with `save_bytes` those do which a save, a flush or a close has followed;
- what was kept and is gone is an error when the folder is opened: UNSAVED is durable before the first row that is not
  saved, and NAMES before the first row of a name; a width that NAMES knows has a snapshot;
- every byte is compared with its checksum, by the persistent table;
- all who open a URL in one process (a model's embeddings, their averages and copies) share a server: calls are made
  one at a time, the folder is released when the last has closed, and a forked child has none of its parent's.
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
    """Path, `save_bytes` and `accept_loss` of a URL without its `file://`: `PATH`, `PATH?save_bytes=N`,
    `PATH?lost=accept`, or both options with `&` between them. ValueError if there is no path, or an option is
    unknown."""
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
    """Rows in a folder.

    Args:
        path: the folder; it is made if it is not there. `~` is the user's home.
        save_bytes: bytes that may be pushed before they are saved. 0 = each push is saved before it returns.
        accept_loss: go on with the rows of the last save where a process has ended without saving others.
        background: write in background threads; False = in the calls themselves.

    Raises:
        LostRowsError: rows that were pushed are gone.
        ServerError: another process has the folder, or files cannot be read or are damaged.
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
                                f" of {other} numbers, since a push was cut short; push it again, or erase it"
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
        """Save what is not saved yet; durable when this returns. ServerError if it could not be saved."""
        with self._as_server_error():
            self._begin()
            self._save()

    def close(self) -> None:
        """Save what is not saved yet, and release the folder, even if a ServerError says that rows could not be
        saved."""
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
        raise LockedError(f"{self.name} serves embeddings of this process: close those, or release their folders")

    def _open(self, accept_loss: bool) -> None:
        self._names = ValueNames(self._fs, f"{self._path}/NAMES")
        with doing("list", self._path):
            there = set(self._fs.names(self._path))
        if self._names.new:
            # The first table is made after NAMES.
            tables = sorted(name for name in there if name.startswith("width-"))
            if tables:
                raise ServerError(
                    f"{self.name} has rows in {', '.join(tables)} and no file NAMES, which says whose they are; restore"
                    " it from a copy of the folder, or give another path"
                )
            self._names.write()
        if "UNSAVED" in there:
            self._tell_lost(accept_loss)
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
        """A part's number, with a table for values of this width."""
        known = self._names.find(table, part)
        if known is not None and width in known.widths:
            return known
        if width not in self._tables:
            # First, so that a width which NAMES knows has a snapshot.
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
        """Note that values of a width are going to change, in memory and, where they will stay unsaved, on the disk."""
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

    def _tell_lost(self, accept: bool) -> None:
        """A process has ended with rows that it had not saved."""
        if accept:
            return
        who = "a process"
        with suppress(StorageError, OSError, ValueError, KeyError, TypeError, OverflowError):
            fields = json.loads(read_file(self._fs, f"{self._path}/UNSAVED") or b"")
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fields["since"]))
            who = f"process {fields['pid']} on host {fields['host']}, which pushed rows since {since},"
        raise LostRowsError(
            f"{self.name} has lost rows: {who} ended without saving or closing, while save_bytes let it push rows"
            " that were not saved. What is there is the state of its last save; to go on with that, open the server"
            f" once with {self.name}?lost=accept"
        )

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that has the folder."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise ServerError in a forked child."""
        if self.forked:
            raise ServerError(
                f"{self.name} was opened by process {self._pid}, and this is a forked child of it, {os.getpid()}; one"
                " process has a folder at a time: open another path in the child"
            )

    def _begin(self) -> None:
        self.check_process()
        if self._closed:
            raise ServerError(f"{self.name} is closed; open it again")
        self._lock.check()  # Who removes the folder gives up its rows: what is there now is somebody else's.

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


# ---- one server for all who open its URL in a process ----------------------------------------------------------------


_open: "weakref.WeakValueDictionary[tuple[int, str], _Shared]" = weakref.WeakValueDictionary()
"""By process and path."""

_opening = threading.RLock()  # The garbage collector may close one while another is opened.


class _Shared:
    def __init__(self, path: str, save_bytes: int, accept_loss: bool):
        self.save_bytes = save_bytes
        self.server = FileServer(path, save_bytes=save_bytes, accept_loss=accept_loss)
        self.one_at_a_time = threading.RLock()
        self.handles: weakref.WeakSet[FileHandle] = weakref.WeakSet()


def open_file_server(url_rest: str) -> "FileHandle":
    """The server of a URL, without its `file://`; see `read_file_url`. Raises as `FileServer`, and ValueError if the
    URL is invalid or the folder is open with another `save_bytes`."""
    path, save_bytes, accept_loss = read_file_url(url_rest)
    key = (os.getpid(), path)
    with _opening:
        shared = _open.get(key)
        if shared is None:
            shared = _open[key] = _Shared(path, save_bytes, accept_loss)
        elif shared.save_bytes != save_bytes:
            raise ValueError(
                f"file://{path} is open in this process with save_bytes={shared.save_bytes}, got {save_bytes}; open it"
                " with the same one"
            )
        return FileHandle(shared)


class FileHandle:
    """A `FileServer` for one who opened it."""

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
        """See `FileServer`."""
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
                for key in [key for key, its in _open.items() if its is shared]:
                    del _open[key]
                shared.server.close()

    @contextmanager
    def _server(self) -> Iterator[FileServer]:
        """The server, for this thread alone."""
        if self._shared is None:
            raise ServerError(f"{self.name} is closed; open it again")
        self._shared.server.check_process()
        with self._shared.one_at_a_time:
            yield self._shared.server
