"""Where a served model finds its checkpoint and the rows of it: files of this machine, or objects of a store.

Invariant: two states are equal only if the checkpoint was not replaced between them.
"""

import io
import os
import time
from typing import Any, NamedTuple, Protocol

from oneemb.checkpoints.named_snapshot import SnapshotName
from oneemb.checkpoints.state_bytes import load_bytes
from oneemb.checkpoints.stored_checkpoint import StoredCheckpoint
from oneemb.serving.build import Source, Version, is_gone, served_folder, source_of, stored_source
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import AnyPath, file_path
from oneemb.storage.objects.object_store import is_url

State = tuple[int, int, int] | str
"""State of a file, or of an object. It changes when the file or the object is replaced."""

_PROBLEM = "is not a checkpoint, or is damaged"


class Checkpoint(NamedTuple):
    """A checkpoint as it was read."""

    content: Any
    state: State
    saved_at: float
    """Time at which it was written, in seconds since 1970."""


class CheckpointSource(Protocol):
    """Place of a checkpoint and of the rows of its embeddings."""

    path: str
    """Path or URL."""

    def state(self) -> State | None:
        """State of the checkpoint; None = there is none, or it cannot be read."""

    def read(self) -> Checkpoint:
        """Read the checkpoint. OSError if it cannot be read, ValueError if it is damaged."""

    def rows(self, checkpoint: Any, snapshot: SnapshotName, paths: list[str], name: str, dtype: str) -> Source:
        """Source of the rows of one embedding.

        Args:
            checkpoint: content of the checkpoint.
            snapshot: entry of the embedding in it.
            paths: persistent paths of the embedding in the module.
            name: name of the embedding in the module.
        """

    def late_call(self, seconds: float) -> str | None:
        """The call of an object store that began `seconds` ago or earlier, in words; None = there is none."""

    def has_lost(self, source: Source, served: Version) -> bool:
        """Whether a snapshot that serves was deleted or replaced at its source."""


class FileSource:
    """A checkpoint file, and snapshots in the persistent paths of the module's embeddings."""

    def __init__(self, path: AnyPath, folder: AnyPath | None):
        self.path = os.path.abspath(file_path(path, "the checkpoint"))
        self._folder = None if folder is None else served_folder(folder)

    def state(self) -> State | None:
        """See `CheckpointSource`."""
        try:
            return _file_state(os.stat(self.path))
        except OSError:
            return None

    def read(self) -> Checkpoint:
        """See `CheckpointSource`."""
        with open(self.path, "rb") as file:
            found = os.fstat(file.fileno())
            return Checkpoint(load_bytes(file, self.path, problem=_PROBLEM), _file_state(found), found.st_mtime)

    def rows(self, checkpoint: Any, snapshot: SnapshotName, paths: list[str], name: str, dtype: str) -> Source:
        """See `CheckpointSource`."""
        return source_of(paths, _folder_of(self._folder, name), dtype, None)

    def has_lost(self, source: Source, served: Version) -> bool:
        """See `CheckpointSource`."""
        return is_gone(source.looks, served)

    def late_call(self, seconds: float) -> str | None:
        """See `CheckpointSource`."""
        return None


class StoredSource:
    """A checkpoint of `graph.save(url)`, and its snapshots in the same object store. ValueError if `folder`, for the
    copies and served files of this machine, is None."""

    def __init__(self, url: str, folder: AnyPath | None):
        self._stored = StoredCheckpoint(url)
        self.path = url
        if folder is None:
            raise ValueError(
                f"folder must name a folder on this machine for the rows of {url}, got None; give one that all"
                " processes of the machine share"
            )
        self._folder = served_folder(folder)

    def state(self) -> State | None:
        """See `CheckpointSource`."""
        try:
            return self._stored.version()
        except (OSError, StorageError):
            return None

    def read(self) -> Checkpoint:
        """See `CheckpointSource`. FileNotFoundError if there is none."""
        # The state comes first: a checkpoint that is replaced meanwhile is then read once more, instead of never.
        state, written = self._stored.version(), self._stored.written_at()
        content = load_bytes(io.BytesIO(self._stored.read()), self.path, problem=_PROBLEM)
        return Checkpoint(content, state or "", time.time() if written is None else written)

    def rows(self, checkpoint: Any, snapshot: SnapshotName, paths: list[str], name: str, dtype: str) -> Source:
        """See `CheckpointSource`. ValueError unless `graph.save` has written the checkpoint."""
        entries = checkpoint.get("embeddings", {})
        saved_as = next((saved for saved, entry in entries.items() if entry is snapshot), None)
        if saved_as is None:
            raise ValueError(
                f"{self.path} must be a checkpoint of graph.save, which puts the rows beside it, got a state dict; save"
                " it by graph.save to a URL"
            )
        return stored_source(self._stored.rows_of(saved_as), _folder_of(self._folder, name), dtype, None)

    def has_lost(self, source: Source, served: Version) -> bool:
        """See `CheckpointSource`."""
        return source.stored is not None and not source.stored.is_offered(served.name, served.identity)

    def late_call(self, seconds: float) -> str | None:
        """See `CheckpointSource`."""
        return self._stored.late_call(seconds)


def checkpoint_source(path: AnyPath, folder: AnyPath | None) -> CheckpointSource:
    """Source for the path or URL of a checkpoint.

    Args:
        folder: folder for served files; each embedding has a folder there. None = `serving` in the embedding's path.
    """
    return StoredSource(path, folder) if is_url(path) else FileSource(path, folder)


def _folder_of(folder: str | None, name: str) -> str | None:
    """Folder of one embedding, since of the files in a folder the oldest are removed."""
    return None if folder is None else os.path.join(folder, name)


def _file_state(found: os.stat_result) -> State:
    return found.st_ino, found.st_mtime_ns, found.st_size
