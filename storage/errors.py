"""Errors and warnings of row stores."""


class StorageError(RuntimeError):
    """A call on a store has failed. The message says which call, on which store, and what to do."""


class StoreFullError(StorageError):
    """The store has no room for a row and can make none. The call has changed nothing."""

    pinned = False
    """Whether the store would have room if lookups had pinned fewer rows."""

    @classmethod
    def of_pins(cls, message: str) -> "StoreFullError":
        """An error with `pinned` set."""
        error = cls(message)
        error.pinned = True
        return error


class BrokenStoreError(StorageError):
    """A call was cut short, so that what is in memory may be wrong. The message says how to go on."""


class ForkedProcessError(StorageError):
    """A child of fork has made a call that only the process that made the object may make."""


class CorruptTableError(StorageError):
    """A file has other bytes than were written. The message names file and offset."""


class FormatVersionError(StorageError):
    """A file has a format that this release does not read. The message names the release that wrote it."""


class IndexMemoryError(StorageError, MemoryError):
    """No memory is left for the index to hold the keys of new rows. The call has changed nothing; rows that have an
    entry can still be used."""


class LockedError(StorageError):
    """Another table object, here or in another process, writes to this path. The message names it."""


class OtherSnapshotError(StorageError):
    """The snapshot of this name has another identity than expected: another run has saved it."""

    @classmethod
    def named_by(cls, what: str, name: str, identity: str, where: str, found: object) -> "OtherSnapshotError":
        """The error for a state dict or checkpoint that names a snapshot, where another snapshot has that name."""
        return cls(
            f"{what} names the snapshot {name!r} with identity {identity}; the one of that name in {where} is another"
            f" run's: {found}. Use the persistent_path of the run that saved {what}"
        )


class OtherTableError(StorageError):
    """A copy has chunks of another table, or of a job that went on from an older snapshot in another folder."""


class SnapshotNotFoundError(StorageError):
    """No snapshot has this name. The message names the snapshots that exist."""


class SnapshotNeededError(StorageError):
    """A snapshot can be neither deleted nor replaced, because deltas are based on it. The message names the deltas."""


class SnapshotExistsError(StorageError):
    """A snapshot of this name exists, and `overwrite` was not given."""

    @classmethod
    def named(cls, name: str, where: str) -> "SnapshotExistsError":
        """Return the error for this name; `where` says where the snapshot is, such as "in /data"."""
        return cls(
            f"there is a snapshot named {name!r} already, {where}; pass overwrite=True to replace it, or delete it, or"
            " choose another name"
        )


class RowWidthError(StorageError):
    """A snapshot holds rows of another width than the table's."""


class UnsavedRowsWarning(UserWarning):
    """An embedding with a `persistent_path` is closed, and trained rows that no snapshot holds are lost with it."""
