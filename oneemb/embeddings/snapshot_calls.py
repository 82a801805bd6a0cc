"""The snapshots of an embedding, by name and in state dicts: a state dict holds no row, but the name of a snapshot."""

import functools
import json
import re
import uuid
import zlib
from collections.abc import Callable
from typing import Any

import torch

from oneemb.checkpoints.named_snapshot import SnapshotName, decode, encode
from oneemb.embeddings.embedding_arguments import DEFAULT_INITIALIZER, differences
from oneemb.embeddings.weight_of_rows import WeightOfRows, changes_no_row, drop_grads
from oneemb.graph.build_error import warn_user
from oneemb.options import Initializer, TableOptions, to_tree
from oneemb.storage.errors import SnapshotNeededError, StorageError
from oneemb.storage.policies.row_policy import RowPolicy, described
from oneemb.storage.table.json_lists import LongList
from oneemb.storage.table.snapshot_manifest import SnapshotInfo

_STATE = re.compile("state-[0-9]{12}-[0-9a-f]{8}")
"""Names of the snapshots that state dicts have made."""


class SnapshotCalls(WeightOfRows):
    """Part of an embedding: its snapshots, by name and in state dicts."""

    column_dims: tuple[int, ...]
    key_type: torch.dtype
    tables: tuple[TableOptions, ...]
    num_tables: int
    default_initializer: Initializer | None
    padding_idx: int | None
    seed: int
    policies: tuple[RowPolicy, ...] | None
    saved: tuple[SnapshotName, int] | None = None
    """The snapshot saved or loaded last, and the store's count of changes then."""
    remove_folder: Callable[[], object] | None
    """Removes a temporary folder of rows and snapshots; None = the folder is the user's."""
    keep_state_snapshots: int | None
    """Snapshots of state dicts to keep; None = all."""
    may_be_empty = True
    """Whether the warning of `warn_if_empty` may still come."""

    def save_snapshot(self, name: str, *, overwrite: bool = False) -> None:
        """Save all rows and the optimizer's state, durably, under a name in `persistent_path`.

        When the call returns, the snapshot is complete; if it raises, there is none. Later training does not change it.
        With `process_group` every rank makes the call, and saves the rows that it owns; where one fails, all raise.

        Args:
            name: any text; percent-encoded it is the name of a file.
            overwrite: replace a snapshot of this name, atomically.

        Raises:
            StorageError: the name is taken or cannot be a name, deltas go on from the snapshot that is to be replaced,
                or the disk fails; the snapshots there stay whole.
            ValueError: `expire_where` of a policy that evicts at snapshots raises; nothing is saved.
        """
        self._save(name, overwrite=overwrite)

    def save_delta(self, name: str, since: str, *, keep_evicted: bool = False, overwrite: bool = False) -> None:
        """Save the changes since a snapshot or delta: the rows that were trained, initialized or imported, and the keys
        of evicted ones. `load_snapshot(name)` loads the rows as they are now, from the snapshot and the
        deltas since, wherever it lies; `oneemb merge-deltas` makes the delta a whole snapshot.

        A delta counts as a snapshot: it is complete when the call returns, listed, deleted and named by state dicts as
        one. What it goes on from cannot be deleted or replaced as long as it is there.

        Args:
            name: as of `save_snapshot`.
            since: one of the last four snapshots and deltas that this embedding has saved, or loaded as they were
                saved by as many ranks.
            keep_evicted: leave out which rows a policy has evicted: a load of the delta has them as they were before,
                for serving. Those that `erase` has forgotten go all the same.
            overwrite: replace a snapshot of this name, atomically.

        Raises:
            TypeError, ValueError: `since` is no name, or is `name`.
            StorageError: `since` is none of those, or was saved with `keep_evicted` and this is not, the name is taken
                or cannot be a name, or the disk fails; the snapshots there stay whole.
        """
        if not isinstance(since, str):
            raise TypeError(f"since must be the name of a snapshot, got {since!r}")
        if since == name:
            raise ValueError(f"a delta needs a name of its own, got {name!r} for one since {since!r}")
        self._save(name, overwrite=overwrite, since=since, keep_evicted=keep_evicted)

    def _save(
        self, name: str, *, overwrite: bool = False, since: str | None = None, keep_evicted: bool = False
    ) -> None:
        if self.remove_folder is not None:
            warn_user(
                f"the rows of embedding {self.name!r} and their snapshots are in a temporary folder, which goes with"
                " the embedding and the process: nothing can load them afterwards; give the store options a"
                " persistent_path"
            )
        changes = self.store.changes
        identity = self.rank_snapshots.save(
            name, self.description(), overwrite=overwrite, since=since, keep_evicted=keep_evicted
        )
        saved = self.store.snapshots.saved
        if saved is not None and saved[0] == identity:
            changes = saved[1]  # Expired rows may have been evicted before it.
        if not keep_evicted:  # Else who loads it has other rows.
            self.saved = {"oneemb_snapshot": name, "oneemb_identity": identity}, changes

    def load_snapshot(self, name: str, *, weights_only: bool = False) -> None:
        """Go on from a snapshot: its rows, optimizer state and step replace those of the embedding.

        If the snapshot has no state, such as one of pretrained vectors, its rows get the state of new rows, and the
        embedding starts at step 0.

        The ranks that saved it may have been more or fewer than those of `process_group`, or none: each rank, and every
        one has to make the call, reads what it owns. With as many ranks as before it reads its own folder alone.

        Args:
            weights_only: do so with any snapshot, whatever optimizer's state it has.

        Raises:
            StorageError: there is no snapshot of this name (the message names those there are), or its rows have
                another width, dtype or optimizer, or are of more tables; the embedding's rows are as they were.
            KeyboardInterrupt: the embedding's rows are as they were; or, if some had been replaced, every call raises
                `BrokenStoreError` until another load.
        """
        changed = self.rank_snapshots.together(f"load_snapshot {name!r}", lambda: self._load(name, weights_only))
        if changed is not None and self.ranks.first:
            warn_user(
                f"snapshot {name!r} was saved with {changed[0]}, embedding {self.name!r} has {changed[1]}: ids that the"
                " snapshot lacks begin, and the padding reads, by the embedding's arguments; give it the snapshot's to"
                " go on as before"
            )

    def _load(self, name: str, weights_only: bool = False) -> tuple[str, str] | None:
        """Load a snapshot, and return the `differences` of the embedding that saved it from this one."""
        ours = self.description()  # First: a list of tables that is known already is not parsed.
        info, as_saved = self.rank_snapshots.load(
            name, weights_only=weights_only, check=functools.partial(_check_tables, self)
        )
        drop_grads(self)
        snapshot: SnapshotName = {"oneemb_snapshot": name, "oneemb_identity": info.identity}
        self.saved = (snapshot, self.store.changes) if as_saved else None
        return differences(_check_tables(self, info), ours)

    def delete_snapshot(self, name: str) -> None:
        """Delete a snapshot and free the disk space only it used.

        Raises:
            StorageError: there is no snapshot of this name, or deltas go on from it.
        """
        if self.saved is not None and self.saved[0]["oneemb_snapshot"] == name:
            self.saved = None  # First of all: no state dict may name a snapshot that is gone, whatever interrupts.
        self.rank_snapshots.delete(name)

    def snapshots(self) -> list[str]:
        """Names of the snapshots in `persistent_path`, oldest first, whatever number of ranks has saved them.

        With `process_group` every rank makes the call, and gets the same.
        """
        return self.rank_snapshots.names()

    @functools.cached_property
    def _table_trees(self) -> LongList:
        return LongList(to_tree(self.tables))

    def description(self) -> dict[str, Any]:
        """Description of the embedding, as snapshots hold it. Callers must not change its list of tables."""
        absent_T = [policy.absent for policy in self.policies or ()]
        absent = [one if isinstance(one, str) else to_tree(one) for one in absent_T]
        return {
            "name": self.name,
            "key_type": str(self.key_type).removeprefix("torch."),
            "tables": self._table_trees,
            "padding_idx": self.padding_idx,
            "seed": self.seed,
            "column_dims": list(self.column_dims),
            "default_initializer": to_tree(self.default_initializer or DEFAULT_INITIALIZER),
            **({"absent": absent} if absent else {}),
        }

    def _made(self) -> str:
        """Arguments of the embedding that must be the same on all ranks, as text."""
        initializers = json.dumps([self._table_trees, repr(self.default_initializer)])
        return (
            f"{self.num_tables} tables, embedding_dim={list(self.column_dims)}, dtype={self.dtype},"
            f" key_type={self.key_type}, seed={self.seed}, padding_idx={self.padding_idx},"
            f" gradients_of_ranks={self.ranks.gradients!r}, comm_dtype={self.ranks.comm_dtype},"
            f" keep_state_snapshots={self.keep_state_snapshots}, tables and"
            f" default_initializer {zlib.crc32(initializers.encode()):08x}{described(self.policies)}"
        )

    # The weight holds nothing: it is in no state dict. An empty one, as older ones have, is passed over.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.weights_of_another is not None:
            return
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}weight"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.weights_of_another is not None:
            return
        weight, given = self.weight, state_dict.get(f"{prefix}weight")
        super()._load_from_state_dict({**state_dict, f"{prefix}weight": weight.detach()}, prefix, *args)
        if isinstance(given, torch.Tensor) and given.numel():
            what = f"a state dict with {prefix}weight of shape {list(given.shape)}"
            args[-1].append(changes_no_row(self.name, what))  # as torch has it of tensors of another shape
        self.weight = weight  # load_state_dict(assign=True) has put another one in its place

    def get_extra_state(self) -> torch.Tensor:
        """Entry of `state_dict()` for the rows: name and identity of a snapshot that has them as they are now.

        Saves one, named `state-<step>-<digits>`, unless the last one saved or loaded still has the rows as they are.
        These snapshots stay until `delete_snapshot`, or until there are `keep_state_snapshots` newer ones: a state dict
        that is kept, or was written to a file, may name any of them. `oneemb.snapshot_name` gives the name. With
        `process_group` every rank makes the call, and gets the same.

        Returns:
            uint8 [1024]; a copy serves as well.
        """
        return encode(self.named_snapshot())

    def named_snapshot(self) -> SnapshotName:
        """The same as a dict."""
        changes, name = self.store.changes, f"state-{self.store.step:012d}-{uuid.uuid4().hex[:8]}"
        saved = self.saved is not None and self.saved[1] == changes
        of_all = self.rank_snapshots.of_all("state_dict", (changes, saved, name))
        if not any(changes for changes, _, _ in of_all):
            return {"oneemb_snapshot": None}
        if not all(saved for _, saved, _ in of_all):
            self.save_snapshot(of_all[0][2])
            if self.keep_state_snapshots is not None:
                self._delete_states(self.keep_state_snapshots)
        assert self.saved is not None
        return self.saved[0].copy()

    def _delete_states(self, keep: int) -> None:
        """Delete the snapshots of state dicts but for the newest, so many before it, and the parents of deltas."""
        states = [name for name in self.snapshots() if _STATE.fullmatch(name)]
        for name in states[: -keep - 1]:
            try:
                self.delete_snapshot(name)
            except SnapshotNeededError:
                pass
            except (StorageError, OSError) as error:  # The new snapshot is complete: the state dict is still of use.
                warn_user(f"embedding {self.name!r}: state_dict() could not delete the old snapshot {name!r}: {error}")

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Load the snapshot that a state dict names. With `process_group` every rank makes the call, with the same one.

        Raises:
            ValueError: it names none.
            StorageError: it is not in `persistent_path`, or the one of that name there is another run's; the message
                says what is there.
        """
        snapshots, named = self.rank_snapshots, list[SnapshotName]()
        what = snapshots.words("load_state_dict")
        snapshots.together("load_state_dict", lambda: snapshots.ranks.agree(what, lambda: named.append(decode(state))))
        load_named(self, named[0])

    def holds(self, snapshot: SnapshotName) -> bool:
        """Whether the rows are those of this snapshot still, saved or loaded last."""
        return self.saved == (snapshot, self.store.changes)

    def clear(self) -> None:
        """Forget every row and the optimizer's steps, and what policies have counted: all ids are new again. Snapshots
        stay.

        An embedding whose calls raise `BrokenStoreError` can be used again afterwards, as after `load_snapshot`.
        """
        snapshots = self.rank_snapshots
        snapshots.together("clear", lambda: snapshots.ranks.agree(snapshots.words("clear"), self._clear))

    def _clear(self) -> None:
        self.store.clear()
        drop_grads(self)
        self.saved = None

    def warn_if_empty(self) -> None:
        """Warn, once, if rows are about to be initialized in a folder with snapshots of which none was loaded."""
        asks, self.may_be_empty = self.may_be_empty, False
        if not asks or self.store.changes or self.saved is not None or not self.ranks.first:
            return
        if existing := self.rank_snapshots.seen():
            warn_user(
                f"embedding {self.name!r} starts empty, though {', '.join(self.store_options.persistent_path)} holds"
                f" the snapshots {', '.join(map(repr, existing))}; load_snapshot(name) goes on from one, before the"
                " first lookup"
            )


def check_fits(embedding: SnapshotCalls, name: str) -> None:
    """Raise StorageError unless there is a snapshot of this name whose rows fit, as `load_snapshot` does."""
    embedding.rank_snapshots.check_fits(name, functools.partial(_check_tables, embedding))


def load_named(embedding: SnapshotCalls, snapshot: SnapshotName) -> None:
    """Load the snapshot that `named_snapshot` gave; see `set_extra_state`."""
    name = snapshot["oneemb_snapshot"]
    if name is None:
        embedding.clear()
    else:
        identity = snapshot.get("oneemb_identity")
        embedding.rank_snapshots.check_named(name, identity, f"a state dict of embedding {embedding.name!r}")
        embedding.load_snapshot(name)


def _check_tables(embedding: SnapshotCalls, info: SnapshotInfo) -> dict[str, Any]:
    """The description that a snapshot was saved with, {} if it has none; an error if it has too many tables."""
    description = info.meta.get("embedding") or {}
    if len(description.get("tables", ())) > embedding.num_tables:
        raise StorageError(
            f"snapshot {info.name!r} holds rows of {len(description['tables'])} tables, embedding {embedding.name!r}"
            f" has {embedding.num_tables}; make it with all of them"
        )
    return description
