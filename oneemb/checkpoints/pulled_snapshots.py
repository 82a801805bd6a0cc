"""Snapshots that ranks pull from an object store before a load.

Each rank pulls the parts that it will read into `<folder>.pull`, beside the folder of its table. If the snapshot has as
many parts as there are ranks, and the embedding has no rows yet, each rank then links its part into its own folder: the
load takes the rows where they are, deltas go on from the snapshot, and the next push uploads only what is new.
Otherwise, or if a folder has other files of the same names, ranks copy their rows out of `<folder>.pull`.

Invariant: rows of embeddings are as before when the block begins.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from oneemb.checkpoints.checkpoint_snapshots import Embeddings
from oneemb.checkpoints.named_snapshot import SnapshotName
from oneemb.checkpoints.rank_snapshots import RankSnapshots
from oneemb.graph.ranks import AnyRanks
from oneemb.kernels.owner import owners_share_keys
from oneemb.storage.errors import OtherSnapshotError, StorageError
from oneemb.storage.objects.manifests import StoredPart
from oneemb.storage.objects.object_store import ObjectStore
from oneemb.storage.objects.pull import Pull, parts_in, remove_left
from oneemb.storage.snapshots.backup import link_parts
from oneemb.storage.snapshots.snapshot_parts import look_at


@contextmanager
def pulled(
    embeddings: Embeddings, snapshots: Mapping[str, SnapshotName], store_of: Callable[[str], ObjectStore],
    ranks: AnyRanks, what: str,
) -> Iterator[None]:  # fmt: skip
    """Block in which the embeddings can load these snapshots. All ranks make the call together.

    Args:
        store_of: the store that has the snapshot of an embedding.

    Raises:
        SnapshotNotFoundError, OtherSnapshotError: a snapshot is neither here nor in the store.
        CorruptTableError: an object is missing or damaged.
        StorageError: the store, or a file here, cannot be used.
    """
    folders: list[str] = []
    with ExitStack() as stack:
        for name, snapshot in snapshots.items():
            wanted, rank_snapshots = snapshot["oneemb_snapshot"], embeddings[name].rank_snapshots
            if wanted is None or rank_snapshots.existing([(wanted, snapshot["oneemb_identity"])])[0]:
                folders.append(f"{rank_snapshots.folder}.pull")  # of a load that has ended once the snapshot was here
                continue
            work = _SnapshotPull(rank_snapshots, wanted, snapshot["oneemb_identity"], f"{what}: the rows of {name!r}")
            folders.append(work.folder)
            ranks.agree(work.what, lambda work=work, name=name: work.pull(store_of(name)))  # type: ignore[misc]
            store = embeddings[name].store.snapshots
            if all(ranks.all_gather(work.what, lambda work=work, store=store: store.with_closed_table(work.link))):  # type: ignore[misc]
                ranks.agree(work.what, rank_snapshots.keep_linked)
            else:
                ranks.agree(work.what, work.pull_lists)
                stack.enter_context(rank_snapshots.reading(look_at([work.folder])))
        yield
    for folder in folders:  # After an error the folders stay, and the next load continues the pull.
        remove_left(folder)


class _SnapshotPull:
    """Pull of a snapshot by one rank."""

    def __init__(self, snapshots: RankSnapshots, name: str, identity: str | None, what: str):
        self._snapshots, self._name, self._identity, self.what = snapshots, name, identity, what
        self.folder = f"{snapshots.folder}.pull"

    def pull(self, store: ObjectStore) -> None:
        """Pull the parts that may have rows of this rank."""
        rank, size = self._snapshots.ranks.rank, self._snapshots.ranks.size
        self._store, self._parts = store, parts_in(store, [self._name])
        found = self._parts[-1].identity
        if self._identity not in (None, found):
            raise OtherSnapshotError(
                f"snapshot {self._name!r} in {store.url} must have identity {self._identity}, it has {found}: another"
                " job has saved to this URL; give each job a URL of its own"
            )
        self._needed = [one for one in self._parts if owners_share_keys(rank, size, one.shard, one.shards)]
        with Pull(store, self.folder) as work:
            work.run(self._needed, {part.folder: self._snapshots.folder for part in self._own()})

    def _own(self) -> list[StoredPart]:
        """The parts that this rank saved, if there are as many ranks as at the save."""
        ranks = self._snapshots.ranks
        return [part for part in self._parts if (part.shard, part.shards) == (ranks.rank, ranks.size)]

    def link(self) -> bool:
        """Link this rank's parts into the folder of its table. Returns whether that was possible."""
        own = self._own()
        if {part.identity for part in own} != {part.identity for part in self._parts}:
            return False
        try:
            link_parts(os.path.normpath(f"{self.folder}/{own[0].folder}"), self._snapshots.folder)
        except (StorageError, OSError):
            return False
        return True

    def pull_lists(self) -> None:
        """Pull the lists of rows of all other parts, without their rows, so that the snapshot is complete."""
        with Pull(self._store, self.folder) as work:
            needed = {id(part) for part in self._needed}
            work.run(self._parts, {}, lambda part: id(part) in needed)
