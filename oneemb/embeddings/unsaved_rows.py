"""Rows that no snapshot holds: a new embedding does not take their folder, and an embedding that loses them warns.

Invariant: within one rank, a folder is taken over when the new embedding is made, or the new embedding is not made; a
training loop that is under way never learns of it. Several ranks take over nothing: see `FolderHolder`.
"""

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from oneemb.graph.build_error import warn_user
from oneemb.graph.modules import embeddings_in
from oneemb.storage.errors import LockedError, StorageError, UnsavedRowsWarning
from oneemb.storage.folder_holder import FolderHolder
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.table.writer_lock import holder_at

warns_of_garbage = True
"""Whether an embedding that the garbage collector closes gives a warning. Tests set it to False, since garbage of
one test would warn in the middle of another."""

_refusal: ContextVar[str] = ContextVar("_refusal", default="")


@contextmanager
def taking_no_folder(why: str) -> Iterator[None]:
    """Block in which new embeddings take no folder, because only their arguments are read. Any later call that needs
    the folder of such an embedding raises StorageError; `why` follows the name of the embedding in the error."""
    token = _refusal.set(why)
    try:
        yield
    finally:
        _refusal.reset(token)


def take_folder(folder: str, name: str, ranks: int) -> str:
    """Close the embedding of this process that holds `folder`, if there is one, for a new embedding `name`. Returns ""
    or, in a block of `taking_no_folder`, the text of the error that calls on the folder shall raise.

    Args:
        ranks: number of ranks; folders of several ranks are not taken over.

    Raises:
        LockedError: rows of that embedding are in no snapshot, or it is in the middle of a step. It stays open.
    """
    if _refusal.get():
        return f"embedding {name!r} {_refusal.get()}"
    why = _ask(folder, name) if ranks == 1 else ""
    if why:
        gc.collect()  # The holder may be garbage.
        why = _ask(folder, name)
    if why:
        raise LockedError(why)
    return ""


def _ask(folder: str, name: str) -> str:
    """Ask the embedding that holds `folder` to close. Returns "", or the text of an error."""
    holder = holder_at(LocalFileSystem(), os.path.join(folder, "LOCK"))
    # Other holders, such as a writer of rows, may end before the first lookup, which asks again.
    if not isinstance(holder, FolderHolder) or not (why := holder.close_for(f"embedding {name!r}")):
        return ""
    places = ", ".join(_places_of(holder.owner()))
    other = f"{holder.what} ({places})" if places else holder.what
    return (
        f"embedding {name!r} cannot be made: {folder} is held by {other} of this process, {why}. To keep its rows, call"
        f" oneemb.release({folder!r}, save='a-name'), which saves them and closes it; to drop them,"
        f" oneemb.release({folder!r}); or give the new embedding another persistent_path"
    )


def _places_of(embedding: object) -> Iterator[str]:
    """Expressions of a notebook or script that give the embedding: variables, their attributes, and outputs of cells,
    such as `graph.rows` and `Out[3]`."""
    variables = vars(sys.modules["__main__"])
    outputs = variables.get("Out")
    named = [(name, value) for name, value in list(variables.items()) if not name.startswith("_")]
    named += [(f"Out[{n}]", value) for n, value in outputs.items()] if isinstance(outputs, dict) else []
    for name, value in named:
        if isinstance(value, torch.nn.Module):
            found = [path for path, one in embeddings_in(value).items() if one is embedding]
            yield from (f"{name}.{path}" if path else name for path in found)


def warn_of_lost_rows(embedding: Any, *, garbage: bool = False) -> None:
    """Warn if trained rows of an embedding that is about to be closed are in no snapshot. An embedding without a
    path never warns.

    Args:
        embedding: a `TableEmbedding`, perhaps not fully made. Any: the module of this class imports this one.
        garbage: whether the garbage collector closes the embedding: no lock may be taken then.
    """
    made = vars(embedding)
    store, saves = made.get("store"), made.get("rank_snapshots")
    if garbage and not warns_of_garbage:
        return
    if saves is None or made["remove_folder"] is not None or not saves.are_kept or sys.is_finalizing():
        return
    # No lock: in the garbage collector's hands the store has lost its weak references.
    lost = store.built and store.snapshots.lacks_steps(store.changes, store.step) and not store.broken
    if not lost or store.holder.is_forced or store.store_lock.forked:
        return
    try:
        rows = f"{len(store.rows):,} rows"
    except StorageError:  # The garbage collector has closed the table first.
        rows = "rows"
    text = (
        f"embedding {embedding.name!r} in {store.plan.persistent_path} {'was dropped' if garbage else 'is closed'}, and"
        f" its {rows} are gone, since no snapshot holds them as they were last: call"
        " embedding.save_snapshot(name) before, or embedding.clear() if the rows may go"
    )
    if garbage:  # The line that runs now may be unrelated to the embedding.
        warnings.warn(text, UnsavedRowsWarning, stacklevel=3)
    else:
        warn_user(text, UnsavedRowsWarning)
