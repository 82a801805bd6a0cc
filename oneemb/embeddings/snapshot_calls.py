"""Snapshots of an embedding, by name and in state dicts. A state dict holds the name of a snapshot, and no rows."""

import functools
import json
import re
import uuid
import zlib
from collections.abc import Callable
from typing import Any, Never

import torch

from oneemb.checkpoints.named_snapshot import SnapshotName, decode, encode
from oneemb.embeddings.embedding_arguments import DEFAULT_INITIALIZER, differences
from oneemb.embeddings.weight_of_rows import WeightOfRows, changes_no_row, drop_grads
from oneemb.flags import check_flags
from oneemb.graph.build_error import warn_user
from oneemb.options import Initializer, TableOptions, to_tree
from oneemb.storage.errors import SnapshotNeededError, SnapshotNotFoundError, StorageError
from oneemb.storage.policies.row_policy import RowPolicy, described
from oneemb.storage.table.json_lists import LongList
from oneemb.storage.table.snapshot_manifest import SnapshotInfo

_STATE = re.compile("state-[0-9]{12}-[0-9a-f]{8}")
"""Pattern of the names of snapshots that `state_dict()` has saved."""


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        got = f"{type(name).__name__} {name!r:.100}"
        raise TypeError(f"name must be the name of a snapshot, got {got}; embedding.snapshots() lists them")


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
    """(snapshot saved or loaded last, `changes` of the store at that time)."""
    remove_folder: Callable[[], object] | None
    """Removes the temporary folder of rows and snapshots; None = the folder is the user's."""
    keep_state_snapshots: int | None
    """Number of snapshots of state dicts to keep in addition to the newest; None = keep all."""
    may_be_empty = True
    """Whether `warn_if_empty` may still warn."""

    def save_snapshot(self, name: str, *, overwrite: bool = False) -> None:
        """Save all rows and the optimizer's state, durably, under a name in `persistent_path`.

        When the call returns, the snapshot is complete; if it raises, no snapshot exists. Later training does not
        change the snapshot. With `process_group` every rank makes the call and saves the rows that it owns; if one rank
        fails, all raise.

        Args:
            name: any text; percent-encoded, it is the name of a file.
            overwrite: if True, replace a snapshot of the same name, atomically.

        Raises:
            TypeError: `overwrite` is no bool.
            StorageError: the name is taken or invalid, the snapshot to replace is the parent of deltas, or the disk
                fails; existing snapshots stay complete.
            ValueError: `expire_where` of a policy that evicts at snapshots raises; nothing is saved.
        """
        check_flags(overwrite=overwrite)
        self._save(name, overwrite=overwrite)

    def save_delta(self, name: str, since: str, *, keep_evicted: bool = False, overwrite: bool = False) -> None:
        """Save the changes since a snapshot or delta: the rows that were trained, initialized or imported, and the keys
        of evicted rows. `load_snapshot(name)` loads the complete rows, from the snapshot and all deltas since;
        `oneemb merge-deltas` makes a delta a complete snapshot.

        A delta counts as a snapshot: it is complete when the call returns, and can be listed, deleted and named by
        state dicts. Its parent `since` cannot be deleted or replaced while the delta exists.

        Args:
            name: as for `save_snapshot`.
            since: one of the last four snapshots and deltas that this embedding has saved, or has loaded unchanged with
                as many ranks as had saved it.
            keep_evicted: if True, leave the keys of rows that a policy has evicted out of the delta, so that its
                readers keep these rows, for serving. Rows forgotten by `erase` are removed in any case.
            overwrite: if True, replace a snapshot of the same name, atomically.

        Raises:
            TypeError, ValueError: `since` is no name, or is `name`; or a flag is no bool.
            StorageError: `since` is not as above, or was saved with `keep_evicted` while this delta is not; the name is
                taken or invalid; or the disk fails. Existing snapshots stay complete.
        """
        if not isinstance(since, str):
            raise TypeError(f"since must be the name of a snapshot, got {since!r}")
        check_flags(keep_evicted=keep_evicted, overwrite=overwrite)
        if since == name:
            raise ValueError(f"a delta needs a name of its own, got {name!r} for a delta since {since!r}")
        self._save(name, overwrite=overwrite, since=since, keep_evicted=keep_evicted)

    def _save(
        self, name: str, *, overwrite: bool = False, since: str | None = None, keep_evicted: bool = False
    ) -> None:
        if self.remove_folder is not None:
            warn_user(
                f"the rows of embedding {self.name!r} and their snapshots are in a temporary folder, which is removed"
                " with the embedding or the process, so nothing can load the snapshots afterwards; give the store"
                " options a persistent_path"
            )
        changes = self.store.changes
        identity = self.rank_snapshots.save(
            name, self.description(), overwrite=overwrite, since=since, keep_evicted=keep_evicted
        )
        saved = self.store.snapshots.saved
        if saved is not None and saved[0] == identity:
            changes = saved[1]  # The save itself may have evicted expired rows first, which is a change.
        if not keep_evicted:  # With keep_evicted, the saved rows are not the embedding's rows.
            self.saved = {"oneemb_snapshot": name, "oneemb_identity": identity}, changes

    def load_snapshot(self, name: str, *, weights_only: bool = False) -> None:
        """Load a snapshot: its rows, optimizer state and step replace those of the embedding.

        If the snapshot has no optimizer state, for example if it was imported from pretrained vectors, its rows get the
        state of new rows, and the embedding starts at step 0.

        The number of ranks that saved the snapshot may differ from that of `process_group`. Every rank must make the
        call, and reads the rows that it owns; with an equal number of ranks it reads only its own folder.

        Args:
            name: name of the snapshot.
            weights_only: if True, load only weights: treat the snapshot as one without optimizer state.

        Raises:
            TypeError: `name` is no text, or `weights_only` no bool; the embedding has not changed.
            StorageError: there is no snapshot of this name (the message lists the names), or its rows have another
                width, dtype or optimizer, or belong to more tables; the embedding has not changed.
            KeyboardInterrupt: the embedding has not changed; or, if some rows had been replaced, every call raises
                `BrokenStoreError` until another load.
        """
        _check_name(name)
        check_flags(weights_only=weights_only)
        changed = self.rank_snapshots.together(f"load_snapshot {name!r}", lambda: self._load(name, weights_only))
        if changed is not None and self.ranks.first:
            warn_user(
                f"snapshot {name!r} was saved with {changed[0]}, embedding {self.name!r} has {changed[1]}, which now"
                " initialize new rows and choose the padding; to continue as before, make the embedding with the"
                " arguments of the snapshot"
            )

    def _load(self, name: str, weights_only: bool = False) -> tuple[str, str] | None:
        """Load a snapshot. Returns the `differences` between the description in the snapshot and this embedding's."""
        ours = self.description()  # before the load, which then need not parse an equal list of tables
        info, as_saved = self.rank_snapshots.load(
            name, weights_only=weights_only, check=functools.partial(_check_tables, self)
        )
        drop_grads(self)
        self.rank_snapshots.last = None if self.rank_snapshots.reads_elsewhere else name
        snapshot: SnapshotName = {"oneemb_snapshot": name, "oneemb_identity": info.identity}
        self.saved = (snapshot, self.store.changes) if as_saved else None
        return differences(_check_tables(self, info), ours)

    def delete_snapshot(self, name: str) -> None:
        """Delete a snapshot and free the disk space that only this snapshot used.

        Raises:
            StorageError: there is no snapshot of this name, or it is the parent of deltas.
            TypeError: `name` is no text.
        """
        _check_name(name)
        if self.saved is not None and self.saved[0]["oneemb_snapshot"] == name:
            self.saved = None  # before the deletion: after an interrupt, no state dict may name a deleted snapshot
        self.rank_snapshots.delete(name)

    def delete_snapshots_after(self, name: str | None) -> list[str]:
        """Delete all snapshots and deltas that were saved after a snapshot, for example those of steps that are made
        again after a resume. `TrainGraph.load(path, delete_newer=True)` does it for all embeddings.

        Args:
            name: name of the snapshot that stays; None = delete all.

        Returns:
            Names of the deleted snapshots, newest first.

        Raises:
            StorageError: there is no snapshot of this name, and nothing has changed; or the disk fails.
        """
        names = self.snapshots()
        if name is not None and name not in names:
            raise SnapshotNotFoundError(
                f"no snapshot named {name!r}; there are: {', '.join(map(repr, names)) or 'none'}"
            )
        newer = names[::-1] if name is None else names[: names.index(name) : -1]
        for one in newer:
            self.delete_snapshot(one)
        return newer

    @property
    def last_snapshot(self) -> str | None:
        """Name of the snapshot or delta that was saved or loaded last, by any call: for `since` of `save_delta`, and
        after `TrainGraph.load` the one that the checkpoint names. None = none was, or it has been deleted."""
        return self.rank_snapshots.last

    def snapshots(self) -> list[str]:
        """Names of the snapshots in `persistent_path`, oldest first, saved by any number of ranks.

        With `process_group` every rank makes the call, and gets the same names.
        """
        return self.rank_snapshots.names()

    @functools.cached_property
    def _table_trees(self) -> LongList:
        return LongList(to_tree(self.tables))

    def description(self) -> dict[str, Any]:
        """Description of the embedding that is stored in snapshots. Callers must not change its list of tables."""
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
        """Text of the embedding's arguments that must be the same on all ranks."""
        initializers = json.dumps([self._table_trees, repr(self.default_initializer)])
        return (
            f"{self.num_tables} tables, embedding_dim={list(self.column_dims)}, dtype={self.dtype},"
            f" key_type={self.key_type}, seed={self.seed}, padding_idx={self.padding_idx},"
            f" gradients_of_ranks={self.ranks.gradients!r}, comm_dtype={self.ranks.comm_dtype},"
            f" keep_state_snapshots={self.keep_state_snapshots}, tables and"
            f" default_initializer {zlib.crc32(initializers.encode()):08x}{described(self.policies)}"
        )

    # The weight holds no rows, so it is in no state dict. An empty weight, as in older state dicts, is ignored.

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
            args[-1].append(changes_no_row(self.name, what))  # as torch does for a tensor of a wrong shape
        self.weight = weight  # load_state_dict(assign=True) has replaced the weight

    def get_extra_state(self) -> torch.Tensor:
        """Entry of `state_dict()` for the rows: name and identity of a snapshot that holds the current rows.

        If rows have changed since the last snapshot that was saved or loaded, a new one is saved, named
        `state-<step>-<digits>`. Such snapshots stay until `delete_snapshot`, or until more than `keep_state_snapshots`
        newer ones exist: state dicts that are kept or in files may name them. `oneemb.snapshot_name` returns the name
        in an entry. With `process_group` every rank makes the call, and gets the same entry.

        Returns:
            uint8 [1024]. A copy of the tensor can be loaded as well.
        """
        return encode(self.named_snapshot())

    def named_snapshot(self) -> SnapshotName:
        """Name and identity of a snapshot that holds the current rows; see `get_extra_state`."""
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
        """Delete snapshots of state dicts, except the newest one, the `keep` before it, and parents of deltas."""
        states = [name for name in self.snapshots() if _STATE.fullmatch(name)]
        for name in states[: -keep - 1]:
            try:
                self.delete_snapshot(name)
            except SnapshotNeededError:
                pass
            except (StorageError, OSError) as error:  # The new snapshot is complete, so the state dict can be used.
                warn_user(f"embedding {self.name!r}: state_dict() could not delete the old snapshot {name!r}: {error}")

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Load the snapshot that an entry of a state dict names. With `process_group` every rank makes the call, with
        the same entry.

        Raises:
            ValueError: the entry names no snapshot.
            StorageError: the snapshot is not in `persistent_path`, or the snapshot of this name there belongs to
                another run; the message lists the snapshots.
        """
        snapshots, named = self.rank_snapshots, list[SnapshotName]()
        what = snapshots.words("load_state_dict")
        snapshots.together("load_state_dict", lambda: snapshots.ranks.agree(what, lambda: named.append(decode(state))))
        load_named(self, named[0])

    def holds(self, snapshot: SnapshotName) -> bool:
        """Whether `snapshot` is the one saved or loaded last, and no row has changed since."""
        return self.saved == (snapshot, self.store.changes)

    def clear(self) -> None:
        """Forget all rows, the optimizer's step count and the counts of policies: all ids are new again. Snapshots
        stay.

        An embedding whose calls raise `BrokenStoreError` can be used again after this call, or after `load_snapshot`.
        """
        snapshots = self.rank_snapshots
        snapshots.together("clear", lambda: snapshots.ranks.agree(snapshots.words("clear"), self._clear))

    def _clear(self) -> None:
        self.store.clear()
        drop_grads(self)
        self.saved = None

    def warn_if_empty(self) -> None:
        """Warn, once, if the first rows are about to be initialized though the folder has snapshots and none was
        loaded."""
        asks, self.may_be_empty = self.may_be_empty, False
        if not asks or self.store.changes or self.saved is not None or not self.ranks.first:
            return
        if existing := self.rank_snapshots.seen():
            warn_user(
                f"embedding {self.name!r} starts empty, though {', '.join(self.store_options.persistent_path)} holds"
                f" the snapshots {', '.join(map(repr, existing))}; to continue from a snapshot, call"
                " load_snapshot(name) before the first lookup"
            )

    def __deepcopy__(self, memo: object) -> Never:
        raise TypeError(
            f"embedding {self.name!r} cannot be copied by copy.deepcopy, since its rows are in"
            f" {self.store.plan.persistent_path} and a copy needs another path; call embedding.copy_to(path). Copy and"
            " average (AveragedModel) only the dense modules; oneemb.AveragedEmbedding averages rows"
        )

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(
            f"embedding {self.name!r} cannot be pickled, by torch.save of a model or for another process: save its"
            " state_dict(), which names a snapshot, and load it into a new embedding"
        )


def check_fits(embedding: SnapshotCalls, name: str) -> None:
    """Raise StorageError unless there is a snapshot `name` that `load_snapshot` could load."""
    embedding.rank_snapshots.check_fits(name, functools.partial(_check_tables, embedding))


def load_named(embedding: SnapshotCalls, snapshot: SnapshotName) -> None:
    """Load the snapshot in a result of `named_snapshot`; see `set_extra_state`."""
    name = snapshot["oneemb_snapshot"]
    if name is None:
        embedding.clear()
    else:
        identity = snapshot.get("oneemb_identity")
        embedding.rank_snapshots.check_named(name, identity, f"a state dict of embedding {embedding.name!r}")
        embedding.load_snapshot(name)


def _check_tables(embedding: SnapshotCalls, info: SnapshotInfo) -> dict[str, Any]:
    """Description of the embedding that saved a snapshot; {} = the snapshot has none. StorageError if it has more
    tables than `embedding`."""
    description = info.meta.get("embedding") or {}
    if len(description.get("tables", ())) > embedding.num_tables:
        raise StorageError(
            f"snapshot {info.name!r} holds rows of {len(description['tables'])} tables, embedding {embedding.name!r}"
            f" has {embedding.num_tables}; make the embedding with all tables of the snapshot"
        )
    return description
