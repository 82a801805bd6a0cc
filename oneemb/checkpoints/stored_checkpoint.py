"""Checkpoints in an object store: `graph.save("s3://bucket/job/checkpoint.pt")`.

    <url>                          state of the graph without its rows: the bytes that a file would have
    <url>.saving                   names of the snapshots that a running save makes
    <url>.rows/<embedding>/        snapshots of the embedding (storage/objects)

Rows are saved as local snapshots first, by each rank on its own disk, and pushed from there.

    save       1. the intent is written to <url>.saving    4. the first rank looks whether all parts are in the store,
               2. all ranks save each snapshot locally        and writes <url>: now it is the checkpoint
               3. each rank pushes its part                5. superfluous snapshots go, locally and in the store

Invariants:
- an object at <url> names snapshots that are complete in the store, wherever any rank is killed;
- a snapshot is deleted only if neither the object at <url> nor one that a running save may write there names it: a save
  that ends in the middle of step 4 leaves its snapshots to the next save, which reads <url> first.
"""

import errno
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, cast
from urllib.parse import quote

from oneemb.checkpoints.checkpoint_snapshots import (
    STORED_DELTAS_MAX,
    CheckpointFile,
    Embeddings,
    Snapshots,
    check_keep,
    delete_snapshots,
    enter_parents,
    kept_and_removed,
    name_of_save,
    new_snapshots,
    save_snapshots,
    without_parents,
)
from oneemb.checkpoints.graph_state import State, check_between_updates, load_state, others_of, state_of
from oneemb.checkpoints.named_snapshot import SnapshotName
from oneemb.checkpoints.pulled_snapshots import pulled
from oneemb.checkpoints.state_bytes import to_bytes
from oneemb.checkpoints.state_names import named_embeddings
from oneemb.graph.build_error import warn_user
from oneemb.graph.ranks import AnyRanks
from oneemb.storage.errors import CorruptTableError, LockedError, StorageError
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.objects.deletion import clean_parts, clean_store, forget_stored
from oneemb.storage.objects.manifests import current_of, has_snapshot, names_in, newest_in
from oneemb.storage.objects.object_store import ObjectStore, is_url
from oneemb.storage.objects.push import push_of_writer
from oneemb.training.compiled_graph import CompiledGraph
from oneemb.training.train_state import TrainState

_WRITER = "save"


class StoredCheckpoint:
    """The objects of a checkpoint. ValueError unless `url` names an object below a bucket or folder."""

    def __init__(self, url: str):
        parent, _, name = url.rpartition("/")
        if not name or parent.endswith("/") or not parent:
            raise ValueError(
                f"path must be the URL of an object, such as 's3://bucket/job/checkpoint.pt', got {url!r}; name the"
                " object to write"
            )
        self.url, self._name, self._store = url, name, ObjectStore(parent)

    def rows_of(self, embedding: str) -> ObjectStore:
        """Store of the snapshots of an embedding, by its name in the graph."""
        return ObjectStore(f"{self.url}.rows/{quote(embedding, safe='') or '%'}", calls=self._store.calls)

    def late_call(self, seconds: float) -> str | None:
        """The call of the store that began `seconds` ago or earlier, in words; None = there is none."""
        return self._store.calls.late(seconds)

    def read(self) -> bytes:
        """Bytes of the checkpoint. FileNotFoundError if there is none."""
        data = self._store.get_object(self._name)
        if data is None:
            raise FileNotFoundError(errno.ENOENT, "there is no checkpoint; save one, or correct the URL", self.url)
        return data

    def version(self) -> str | None:
        """Text that changes when the checkpoint is replaced; None = there is no checkpoint."""
        return self._store.version_of(self._name)

    def written_at(self) -> float | None:
        """Time at which the checkpoint was written, as for `ObjectStore.written_at`."""
        return self._store.written_at(self._name)

    def named(self) -> list[Snapshots]:
        """Snapshots of saves to this URL, newest first."""
        data = self._store.get_object(self._name)
        if data is None:
            return []
        try:
            state = cast(CheckpointFile, load_state(io.BytesIO(data), self.url))
        except ValueError as error:
            raise ValueError(f"{error}; save to another URL, or delete it first") from error
        if state.get("path") != self.url:  # The object was copied here: its snapshots belong to the original.
            return []
        return [state["embeddings"], *state.get("earlier", ())]

    def write(self, data: bytes) -> None:
        """Write a checkpoint in place of the former one."""
        self._store.write(self._name, data)

    def put_intent(self, made: Snapshots) -> None:
        """Write the names of the snapshots that a save makes."""
        self._store.put_text(f"{self._name}.saving", {"snapshots": made})

    def intent(self) -> Snapshots | None:
        """Snapshots of a save that has not ended; None = every save has ended."""
        try:
            text = self._store.get_text(f"{self._name}.saving")
        except CorruptTableError:  # Only the remains of a killed save are not found then.
            return {}
        if text is None:
            return None
        made = text.get("snapshots")
        return cast(Snapshots, made) if isinstance(made, dict) else {}

    def remove_intent(self) -> None:
        """Remove the intent: the save has ended."""
        self._store.remove(f"{self._name}.saving")

    def has(self, name: str, snapshot: SnapshotName) -> bool:
        """Whether the store of embedding `name` has a snapshot."""
        saved_as = snapshot["oneemb_snapshot"]
        return saved_as is not None and has_snapshot(self.rows_of(name), saved_as, snapshot["oneemb_identity"])

    def forget(self, of_saves: Sequence[Snapshots], kept: list[Snapshots] | None = None) -> None:
        """Delete the snapshots of saves, newest first, from the store; `kept` as for `forget_stored`, for each
        embedding."""
        for name in dict.fromkeys(name for snapshots in of_saves for name in snapshots):
            found = [one[name] for one in of_saves if name in one and self.has(name, one[name])]
            names = None if kept is None else {str(one[name]["oneemb_snapshot"]) for one in kept if name in one}
            if found:
                forget_stored(self.rows_of(name), [str(one["oneemb_snapshot"]) for one in found], names)

    def clean(self, embeddings: Iterable[str], *, thorough: bool = False) -> None:
        """Remove objects that no snapshot needs. While a push of a user runs, they stay until a later save."""
        for name in embeddings:
            with suppress(LockedError):
                if thorough:
                    clean_store(self.rows_of(name).url, 0.0, writer=_WRITER)
                else:
                    clean_parts(self.rows_of(name), _WRITER)


# ---- save -----------------------------------------------------------------------------------------------------------


class _StoredPlan(NamedTuple):
    """Plan of a save, which the first rank makes from the objects at the URL."""

    named: list[Snapshots]
    """Snapshots of the checkpoint and of earlier saves, newest first."""
    earlier: list[Snapshots]
    """The members of `named` of which the store still has at least one snapshot."""
    left: Snapshots | None
    """Snapshots of a save that was stopped; None = no save was."""
    snapshot: str
    """Name of the snapshot that this save makes of each embedding."""
    sequences: dict[str, int]
    """{name of an embedding: sequence number above that of the newest snapshot in the store}. The rows may have been
    copied from there into a folder that begins to count anew, and servers follow the greatest number."""


def save_stored(
    graph: CompiledGraph, train: TrainState, url: str, keep: int | None, keep_deltas: bool, delta: bool,
    ranks: AnyRanks, what: str,
) -> int:  # fmt: skip
    """Save a checkpoint to an object store. Returns the number of earlier saves whose snapshots are kept."""
    embeddings, opened = named_embeddings(graph), list[StoredCheckpoint]()

    def begin() -> tuple[_StoredPlan | None, dict[str, int]]:
        check_keep(keep)
        check_between_updates(graph, train)
        opened.append(StoredCheckpoint(url))
        changes = {name: embedding.store.changes for name, embedding in embeddings.items()}
        return _plan(opened[0], name_of_save(train), embeddings) if ranks.first else None, changes

    of_all = ranks.all_gather(what, begin)
    plan, stored = cast(_StoredPlan, of_all[0][0]), opened[0]
    changed = {name: any(changes.get(name) for _, changes in of_all) for name in embeddings}
    made = new_snapshots(embeddings, changed, plan.snapshot)
    if plan.left is not None:
        _remove_save(stored, plan.left, embeddings, ranks, what)
    if delta and plan.earlier:
        enter_parents(embeddings, made, plan.earlier[0], STORED_DELTAS_MAX, ranks, what)
    ranks.by_first(f"{what}: the intent", lambda: stored.put_intent(made))
    with _removed_on_error(stored, made, embeddings, ranks, what):
        save_snapshots(embeddings, made, plan.sequences)
        for name, embedding in embeddings.items():
            if (snapshot := made[name]["oneemb_snapshot"]) is not None:
                push = _pushes(stored.rows_of(name), embedding.rank_snapshots.folder, snapshot, ranks.rank)
                ranks.agree(f"{what}: the upload of {name!r}", push)
        others = others_of(graph, ranks, what)

    def write() -> None:
        for name, snapshot in made.items():
            if snapshot["oneemb_snapshot"] is not None and not stored.has(name, snapshot):
                raise StorageError(
                    f"{stored.rows_of(name).url} must have all parts of snapshot {snapshot['oneemb_snapshot']!r}, it"
                    " lacks one that was there just now; give each job a URL of its own, and save again"
                )
        file: CheckpointFile = {**state_of(graph, train, made, others), "path": url, "earlier": plan.earlier}
        stored.write(to_bytes(file))
        stored.remove_intent()

    ranks.by_first(f"{what}: the checkpoint", write)
    # The store has all others. The newest one stays here, with its parents, for a quick start and for deltas.
    for snapshots in without_parents(plan.named, [made]):
        delete_snapshots(embeddings, snapshots, () if keep_deltas else [made])
    kept, removed = kept_and_removed(plan.earlier, made, keep)

    def remove() -> None:
        try:
            if removed:
                stored.forget(removed, None if keep_deltas else [*kept, made])
                stored.clean(embeddings)
        except (StorageError, OSError) as error:
            warn_user(f"{url} is saved, but older snapshots could not be removed; the next save tries again: {error}")

    ranks.by_first(f"{what}: older snapshots", remove)
    return len(kept)


def _plan(stored: StoredCheckpoint, snapshot: str, embeddings: Iterable[str]) -> _StoredPlan:
    named, left = stored.named(), stored.intent()
    if left is not None:
        names = {(name, one["oneemb_snapshot"]) for snapshots in named for name, one in snapshots.items()}
        left = {name: one for name, one in left.items() if (name, one["oneemb_snapshot"]) not in names}
    there = {name: set(names_in(stored.rows_of(name))) for snapshots in named for name in snapshots}
    earlier = [
        snapshots for snapshots in named
        if any(one["oneemb_snapshot"] in there[name] and stored.has(name, one) for name, one in snapshots.items())
    ]  # fmt: skip
    newest = {name: newest_in(stored.rows_of(name)) for name in embeddings}
    sequences = {name: one[2] + 1 for name, one in newest.items() if one is not None}
    return _StoredPlan(named, earlier, left, snapshot, sequences)


def _pushes(store: ObjectStore, folder: str, snapshot: str, rank: int) -> Callable[[], None]:
    """Function that pushes this rank's part of a snapshot."""

    def push() -> None:
        result = push_of_writer(store, folder, snapshot, _WRITER, rank)
        if problem := result.damaged.get(snapshot) or ("it was deleted meanwhile" if snapshot in result.gone else ""):
            raise CorruptTableError(f"snapshot {snapshot!r} in {folder} cannot be uploaded to {store.url}: {problem}")

    return push


@contextmanager
def _removed_on_error(
    stored: StoredCheckpoint, made: Snapshots, embeddings: Embeddings, ranks: AnyRanks, what: str
) -> Iterator[None]:
    """Block at whose error the snapshots `made` are removed. If that fails too, the next save does it."""
    try:
        yield
    except BaseException as error:
        try:
            with signals_deferred:
                _remove_save(stored, made, embeddings, ranks, what)
        except (OSError, StorageError, RuntimeError) as failed:  # RuntimeError: another rank is gone.
            error.add_note(f"the remains of the save could not be removed, the next save tries again: {failed}")
        raise


def _remove_save(stored: StoredCheckpoint, made: Snapshots, embeddings: Embeddings, ranks: AnyRanks, what: str) -> None:
    """Remove the remains of a save that has not written its checkpoint, here and in the store."""
    made = {name: snapshot for name, snapshot in made.items() if name in embeddings}
    delete_snapshots(embeddings, made)

    def remove() -> None:
        stored.forget([made])
        stored.clean(embeddings, thorough=True)
        stored.remove_intent()

    ranks.by_first(f"{what}: the remains of a save", remove)


# ---- load -----------------------------------------------------------------------------------------------------------


@contextmanager
def with_stored_rows(embeddings: Embeddings, state: State, path: str, ranks: AnyRanks, what: str) -> Iterator[None]:
    """Block in which the snapshots that a checkpoint names can be loaded, if it was saved to an object store. Snapshots
    that are not on this machine are pulled.

    Args:
        path: path or URL from which the checkpoint was read.
    """
    urls = [url for url in dict.fromkeys((path, state.get("path"))) if is_url(url)]
    snapshots = {name: one for name, one in state["embeddings"].items() if name in embeddings}
    if not urls:
        yield
        return

    def store_of(name: str) -> ObjectStore:
        """The store with the snapshot of an embedding: beside the checkpoint, or where the checkpoint was saved."""
        for url in urls[:-1]:
            if StoredCheckpoint(str(url)).has(name, snapshots[name]):
                return StoredCheckpoint(str(url)).rows_of(name)
        return StoredCheckpoint(str(urls[-1])).rows_of(name)

    with pulled(embeddings, snapshots, store_of, ranks, what):
        yield


def delete_stored_after(embeddings: Embeddings, state: State, url: str) -> None:
    """Delete snapshots and deltas that were saved after those of a checkpoint from the store."""
    stored = StoredCheckpoint(url)
    for name, snapshot in state["embeddings"].items():
        if name not in embeddings:
            continue
        store = stored.rows_of(name)
        order = {one: current_of(store, one)[2] for one in names_in(store)}
        last = order.get(str(snapshot["oneemb_snapshot"]), -1)
        for one in sorted(order, key=lambda one: -order[one]):
            if order[one] > last:
                forget_stored(store, [one])
