"""Loads some tables of an embedding from a snapshot; the rows of the other tables stay as they are.

A state dict has an entry for each table and may lack entries of some. If the lacking tables have no rows now, the whole
snapshot is loaded and then their rows are erased; the embedding then has the step of the snapshot. Otherwise only the
rows of the named tables, with optimizer state, are read from the snapshot, and the embedding keeps its step.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from oneemb.checkpoints.named_snapshot import SnapshotName
from oneemb.embeddings.embedding import MultiTableEmbedding
from oneemb.embeddings.internals import check_fits, load_named
from oneemb.rows.values import encode_rows, state_of, weights_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.snapshots.owned_rows import owned_rows
from oneemb.storage.snapshots.snapshot_parts import PartedSnapshot
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows
from oneemb.storage.store_rows import set_rows, visit_rows

_BATCH = 1 << 16
"""Number of rows that are read at a time."""


def load_tables(rows: MultiTableEmbedding, snapshot: SnapshotName, tables: Sequence[int]) -> None:
    """Load the rows of `tables`, and of no other table, from a snapshot. A table that the snapshot lacks has no rows
    afterwards. Every rank makes the call.

    Args:
        snapshot: name and identity, as `named_snapshot` returns them.

    Raises:
        StorageError: the snapshot does not exist, its rows do not fit, or a row that must be erased is pinned by a
            lookup whose step is still to come. No row has changed.
    """
    others = [t for t in range(rows.num_tables) if t not in tables]
    name, identity = snapshot["oneemb_snapshot"], snapshot.get("oneemb_identity")
    named_by = f"a state dict of embedding {rows.name!r}"
    if name is not None:
        rows.rank_snapshots.check_named(name, identity, named_by)
        check_fits(rows, name)
    ids = _ids_of(rows.store)
    if not any(rows.rank_snapshots.of_all("load_state_dict", any(len(ids.get(t, ())) for t in others))):
        load_named(rows, snapshot)
        _erase(rows, _ids_of(rows.store), others)
        return
    _erase(rows, ids, tables)
    if name is not None:
        snapshots = rows.rank_snapshots
        what = f"load tables {list(tables)} of snapshot {name!r}"

        def load() -> None:
            found = snapshots.find(snapshots.words(what), name, identity, named_by)
            snapshots.ranks.agree(snapshots.words(what), lambda: _put(rows, found, tables))

        snapshots.together(what, load)


def _ids_of(store: EmbeddingStore) -> dict[int, np.ndarray]:
    """{table: ids of the rows that this rank has}."""
    found: dict[int, list[np.ndarray]] = {}

    def note(table_N: np.ndarray, id_N: np.ndarray, _: np.ndarray) -> None:
        for t in np.unique(table_N).tolist():
            found.setdefault(t, []).append(id_N[table_N == t].astype(np.int64))

    visit_rows(store, note)
    return {t: np.concatenate(ids) for t, ids in found.items()}


def _erase(rows: MultiTableEmbedding, ids: Mapping[int, np.ndarray], tables: Sequence[int]) -> None:
    for t in tables:
        rows.erase(torch.from_numpy(ids.get(t, np.empty(0, np.int64))), t)


def _put(rows: MultiTableEmbedding, snapshot: PartedSnapshot, tables: Sequence[int]) -> None:
    """Write the snapshot's rows that this rank owns into the store, for these tables."""
    store, saved = rows.store, SnapshotRows.of_meta(snapshot.info.meta, snapshot.info.name)
    store.build()
    has_state = bool(saved.format.state_width) and bool(store.format.state_width)
    if saved.format.state_width and not has_state:
        warnings.warn(
            f"rows of tables {rows.name} are loaded without the optimizer state in snapshot {snapshot.info.name!r},"
            " since no optimizer has stepped these tables; load it before the first lookup to go on with the state",
            stacklevel=2,
        )
    row_format = replace(store.format, state=store.format.state if has_state else ())
    # Write at most half a cache of rows at once, so that a running step's rows can stay pinned.
    most = max(1, store.stats()["device"]["slots"] // 2)
    owned = owned_rows(snapshot, store.plan.owner, store.plan.owners)
    try:
        for table_N, id_N, row_NW in owned.scan(min(most, _BATCH)):
            n = np.isin(table_N, tables)
            weight_ND, state_NZ = weights_of(saved.format, row_NW[n]), state_of(saved.format, row_NW[n])
            if n.any():
                words_NW = encode_rows(row_format, weight_ND, state_NZ if has_state else None)
                set_rows(store, table_N[n], id_N[n], words_NW)
        if has_state and store.step == 0:
            store.step = saved.step
    except BaseException as error:
        store.store_lock.cut_short(error)
        raise
    finally:
        owned.close()
