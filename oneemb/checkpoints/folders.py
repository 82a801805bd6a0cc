"""Release of folders that objects of this process hold."""

import os
from collections.abc import Sequence
from typing import Any

from oneemb.embeddings.averaged import AveragedEmbedding
from oneemb.embeddings.embedding import TableEmbedding
from oneemb.graph.build_error import warn_user
from oneemb.storage.errors import LockedError, SnapshotExistsError, UnsavedRowsWarning
from oneemb.storage.folder_holder import FolderHolder
from oneemb.storage.fs import AnyPath, LocalFileSystem, absolute_path
from oneemb.storage.table.writer_lock import holders_below, lock_holder


def release(path: AnyPath | Sequence[AnyPath], *, save: str | None = None) -> None:
    """Close the objects of this process that hold a folder: an embedding, its averages, a writer of rows.

    When a notebook cell runs again, the embedding of its first run may still exist, for example in a traceback, and
    hold its folder. A new embedding takes the folder over if all rows of the old embedding are in a snapshot, and is an
    error otherwise; this call closes the old embedding in any case. It does nothing if no object holds the folder.

    Args:
        path: the `persistent_path`, or the list of paths. Objects that hold folders below it are closed as well, such
            as ranks of one process and the tables of a collection. With `process_group` every rank makes the call.
        save: name of a snapshot that each embedding saves before any of them is closed; None = rows that no snapshot
            holds are lost.

    Warns:
        UnsavedRowsWarning: rows that no snapshot holds are lost; the warning gives their number and the object.

    Raises:
        TypeError: `path` is neither a path nor a list of paths.
        SnapshotExistsError: an embedding has a snapshot of the name `save`; none is saved, and all stay open.
        StorageError: an embedding could not save the snapshot; all stay open, and those before have saved it.
        RuntimeError: this thread is in the middle of a step with the object, which stays open. If another thread is in
            the middle of a step, the call waits for the end of the step.
        LockedError: another process holds the folder, or it is the folder of a `file://` server.

    Example:
        >>> import tempfile, torch, oneemb
        >>> folder = tempfile.mkdtemp()
        >>> def cell():
        ...     return oneemb.MultiTableEmbedding(
        ...         "clicks", 4, torch.float32, torch.int64, [oneemb.make_table()],
        ...         oneemb.make_device_mem_store_options(folder))
        >>> first = cell()
        >>> first(torch.arange(3)).shape
        torch.Size([3, 4])
        >>> second = cell()  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        oneemb.storage.errors.LockedError: ... held by embedding 'clicks' ..., whose 3 rows no snapshot holds ...
        >>> oneemb.release(folder, save="first")
        >>> second = cell()
        >>> second.load_snapshot("first")
        >>> len(second.ids())
        3
    """
    paths: Sequence[Any] = path if isinstance(path, list | tuple) else [path]
    if not all(isinstance(one, str | bytes | os.PathLike) for one in paths):
        raise TypeError(
            f"path must be the persistent_path of an embedding, or a list of paths, got {type(path).__name__}; to close"
            " an embedding that a variable names, call embedding.close()"
        )
    if save is not None:
        _save_all(paths, save)
    for one in paths:
        folder = absolute_path(one)
        for held_folder, holder in holders_below(folder):
            if lost := holder.force_close():
                warn_user(
                    f"{holder.what} in {held_folder} is closed, and its {lost:,} rows are gone, since no snapshot holds"
                    " them as they were last",
                    UnsavedRowsWarning,
                )
        if process := lock_holder(LocalFileSystem(), os.path.join(folder, "LOCK")):
            raise LockedError(f"{folder} is held by {process}; end that process, or its use of the folder")


def _save_all(paths: Sequence[AnyPath], name: str) -> None:
    """Save a snapshot of each embedding, and of each averages' rows, that holds a folder below `paths`. If one has a
    snapshot of this name already, save none."""
    holders = {id(holder): holder for path in paths for _, holder in holders_below(absolute_path(path))}
    owners = [holder.owner() for holder in holders.values() if isinstance(holder, FolderHolder)]
    found = [owner.rows if isinstance(owner, AveragedEmbedding) else owner for owner in owners]
    embeddings = [one for one in found if isinstance(one, TableEmbedding)]
    for embedding in embeddings:
        if name in embedding.snapshots():
            raise SnapshotExistsError.named(name, f"of embedding {embedding.name!r}")
    for embedding in embeddings:
        embedding.save_snapshot(name)
