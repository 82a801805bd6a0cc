"""Snapshots that checkpoints name: whether they exist, and their deletion, by all ranks together."""

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from oneemb.checkpoints.graph_state import State
from oneemb.checkpoints.named_snapshot import SnapshotName
from oneemb.embeddings.embedding import TableEmbedding
from oneemb.graph.ranks import AnyRanks
from oneemb.storage.errors import SnapshotNeededError
from oneemb.training.train_state import TrainState

_PREFIX = "checkpoint-"

DELTAS_MAX = 128
"""Largest number of deltas after a whole snapshot in a folder."""

STORED_DELTAS_MAX = 16
"""Largest number of deltas after a whole snapshot in an object store. Few, since each save asks the store for each."""

Embeddings = Mapping[str, TableEmbedding]
Snapshots = dict[str, SnapshotName]
"""{name of the module: snapshot of the embedding}."""


class CheckpointFile(State, total=False):
    """State of a graph, with entries for later saves to the same path."""

    path: str
    """Path or URL to which the file was saved."""
    earlier: list[Snapshots]
    """Snapshots of earlier saves to the path, newest first."""


def check_keep(keep: int | None) -> None:
    """Raise ValueError unless `keep` is a number of saves, or None for all."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep must be an int of at least 1, or None, got {keep!r}")


def name_of_save(train: TrainState) -> str:
    """Name for the snapshots of a save."""
    return f"{_PREFIX}{train.steps:012d}-{uuid.uuid4().hex[:8]}"


def new_snapshots(embeddings: Embeddings, changed: Mapping[str, bool], snapshot: str) -> Snapshots:
    """The snapshots that a save makes, all of the name `snapshot`. Embeddings that never had a row get none."""
    return {
        name: {"oneemb_snapshot": snapshot if changed[name] else None, "oneemb_identity": None} for name in embeddings
    }


def enter_parents(embeddings: Embeddings, made: Snapshots, newest: Snapshots, deltas_max: int, ranks: AnyRanks,
                  what: str) -> None:  # fmt: skip
    """Enter the parents of the snapshots `made` that are to be deltas. All ranks make the call together.

    Args:
        newest: snapshots of the checkpoint that the save replaces, the parents.
        deltas_max: largest number of deltas after a whole snapshot.
    """
    parents = {name: one for name, one in newest.items() if name in made and one["oneemb_snapshot"] is not None}

    def look() -> dict[str, bool]:
        return {
            name: embeddings[name].store.snapshots.may_go_on(
                str(one["oneemb_snapshot"]), one["oneemb_identity"], deltas_max
            )
            for name, one in parents.items()
        }

    of_all = ranks.all_gather(f"{what}: its parents", look)
    for name, one in parents.items():
        if made[name]["oneemb_snapshot"] is not None and all(may_go_on[name] for may_go_on in of_all):
            made[name]["oneemb_since"] = str(one["oneemb_snapshot"])


def save_snapshots(
    embeddings: Embeddings, made: Snapshots, sequences: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Save the snapshots `made`, and enter their identities. `sequences`: {name of the module: least sequence number of
    its snapshot}."""
    for name, embedding in embeddings.items():
        snapshot = made[name]["oneemb_snapshot"]
        if snapshot is not None:
            # `embedding.save_snapshot` would make state_dict() name this snapshot.
            made[name]["oneemb_identity"] = embedding.rank_snapshots.save(
                snapshot, embedding.description(), since=made[name].get("oneemb_since"),
                sequence=sequences.get(name, 0),
            )  # fmt: skip


def kept_and_removed(
    earlier: list[Snapshots], made: Snapshots, keep: int | None
) -> tuple[list[Snapshots], list[Snapshots]]:  # fmt: skip
    """(earlier saves to keep, snapshots to delete) once `made` is saved. `keep` counts the save of `made` too."""
    if keep is None:
        return earlier, []
    kept = earlier[: keep - 1]
    return kept, without_parents(earlier[keep - 1 :], [made, *kept])


def without_parents(superfluous: Sequence[Snapshots], kept: Sequence[Snapshots]) -> list[Snapshots]:
    """The superfluous snapshots that are no ancestors of kept ones.

    Args:
        superfluous, kept: snapshots of saves, newest first; the kept ones are newer.
    """
    needed = {(name, one.get("oneemb_since")) for snapshots in kept for name, one in snapshots.items()}
    found: list[Snapshots] = []
    for snapshots in superfluous:
        parents = {name: one for name, one in snapshots.items() if (name, one["oneemb_snapshot"]) in needed}
        needed |= {(name, one.get("oneemb_since")) for name, one in parents.items()}
        found.append({name: one for name, one in snapshots.items() if name not in parents})
    return [snapshots for snapshots in found if any(one["oneemb_snapshot"] for one in snapshots.values())]


def existing_snapshots(embeddings: Embeddings, of_saves: Sequence[Snapshots]) -> list[list[str]]:
    """For each save, the names of the modules whose snapshot still exists. A snapshot that cannot be read counts; a
    snapshot with another identity does not."""
    found: list[list[str]] = [[] for _ in of_saves]
    for name, embedding in embeddings.items():
        named = [(n, snapshots[name]) for n, snapshots in enumerate(of_saves) if name in snapshots]
        named = [(n, one) for n, one in named if one["oneemb_snapshot"] is not None]
        existing = embedding.rank_snapshots.existing(
            [(str(one["oneemb_snapshot"]), one["oneemb_identity"]) for _, one in named]
        )
        for (n, _), exists in zip(named, existing, strict=True):
            found[n] += [name] * exists
    return found


def delete_snapshots(embeddings: Embeddings, snapshots: Snapshots, kept: Sequence[Snapshots] = ()) -> None:
    """Delete `snapshots`, except those with another identity and parents of deltas. With `kept`, a parent goes together
    with its deltas if all of them are older than `kept`."""
    for name in existing_snapshots(embeddings, [snapshots])[0]:
        embedding, snapshot = embeddings[name], str(snapshots[name]["oneemb_snapshot"])
        if kept:
            names = {str(one[name]["oneemb_snapshot"]) for one in kept if name in one}
            for delta in embedding.rank_snapshots.deltas_before(snapshot, names):
                embedding.delete_snapshot(delta)
        with suppress(SnapshotNeededError):
            embedding.delete_snapshot(snapshot)
