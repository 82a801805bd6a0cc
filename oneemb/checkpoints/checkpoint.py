"""Checkpoints: one file with the state of a training graph, and one snapshot of each embedding, saved all or nothing.

    file       the state of the graph without its rows (graph_state.py), and for each embedding the name and identity
               of a snapshot in its `persistent_path`
    snapshot   the rows of an embedding and their optimizer state

With ranks, all ranks make each call together: the first rank reads and writes the file for all ranks, and each rank
saves and loads its own rows (rank_snapshots.py).

    save       1. the intent is written                    4. the first rank renames the file to its path: now it is
               2. all ranks save each snapshot                the checkpoint
               3. each rank's own state is gathered        5. superfluous snapshots are deleted

Invariants:
- if any rank is killed at any point, either the new file or the file that it replaces is at the path, and all snapshots
  that this file names exist: snapshots are durable before the new file takes the place of the old one;
- a snapshot that a file names is deleted only by a save to the same path with `keep`, since a copy of the file, in any
  place, may name the snapshot too;
- a checkpoint that does not fit the graph, or that names another run's snapshots, is refused on all ranks before
  anything has changed.
"""

import glob
import io
import json
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import NamedTuple, TypeVar, cast

from oneemb.checkpoints.checkpoint_snapshots import (
    DELTAS_MAX,
    CheckpointFile,
    Embeddings,
    Snapshots,
    check_keep,
    delete_snapshots,
    enter_parents,
    existing_snapshots,
    kept_and_removed,
    name_of_save,
    new_snapshots,
    save_snapshots,
)
from oneemb.checkpoints.graph_state import (
    LoadedKeys,
    State,
    check_between_updates,
    check_fits,
    load_state,
    others_of,
    restore_dense,
    state_of,
)
from oneemb.checkpoints.state_bytes import to_bytes
from oneemb.checkpoints.state_names import named_embeddings
from oneemb.checkpoints.stored_checkpoint import (
    StoredCheckpoint,
    delete_stored_after,
    save_stored,
    with_stored_rows,
)
from oneemb.embeddings import internals
from oneemb.embeddings.embedding import embeddings_of
from oneemb.flags import check_flags
from oneemb.graph.one_rank import ALONE
from oneemb.graph.ranks import AnyRanks, together
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import LocalFileSystem, doing
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.new_files import NewFile, is_held
from oneemb.storage.objects.object_store import is_url
from oneemb.training.compiled_graph import CompiledGraph
from oneemb.training.train_state import TrainState

T = TypeVar("T")

# Suffix of the intent of a save, and the intent's last line.
_SAVING, _IN_PLACE = ".saving", "in place\n"


def save_checkpoint(
    graph: CompiledGraph, train: TrainState, path: str, keep: int | None, keep_deltas: bool = True, delta: bool = False
) -> int:
    """Save a checkpoint; see `TrainGraph.save`. Returns the number of earlier saves whose snapshots are kept; 0 on
    ranks after the first."""
    check_flags(keep_deltas=keep_deltas, delta=delta)
    ranks, what = ranks_of_graph(graph), f"save {path!r}, keep={keep}{'' if keep_deltas else ', keep_deltas=False'}"
    what += ", delta" * delta
    save = save_stored if is_url(path) else _save
    kept = _together(
        graph, ranks, "save", what, lambda: save(graph, train, path, keep, keep_deltas, delta, ranks, what)
    )
    return kept if ranks.first else 0


def load_checkpoint(
    graph: CompiledGraph, train: TrainState, path: str, strict: bool, delete_newer: bool = False
) -> LoadedKeys:
    """Load a checkpoint; see `TrainGraph.load`."""
    _check_strict(strict)
    check_flags(delete_newer=delete_newer)
    ranks, what = ranks_of_graph(graph), f"load {path!r}{'' if strict else ', strict=False'}"
    what += ", delete_newer" * delete_newer

    def load() -> LoadedKeys:
        state = _read_together(path, ranks, what)
        keys = _restore(graph, train, state, path, ranks, what, strict=strict)
        embeddings = named_embeddings(graph) if delete_newer else {}
        for name, snapshot in state["embeddings"].items():
            last = snapshot["oneemb_snapshot"]
            if name in embeddings and (last is None or last in embeddings[name].snapshots()):
                embeddings[name].delete_snapshots_after(last)
        if delete_newer and is_url(path):
            ranks.by_first(what, lambda: delete_stored_after(embeddings, state, path))
        return keys

    return _together(graph, ranks, "load", what, load)


def _together(graph: CompiledGraph, ranks: AnyRanks, verb: str, what: str, call: Callable[[], T]) -> T:
    """Result of `call`, which all ranks run together. Names of the embeddings' exchanges within it begin with
    `what`."""

    def run() -> T:
        with ExitStack() as stack:
            for embedding in embeddings_of(graph).values():
                stack.enter_context(embedding.rank_snapshots.part_of(what))
            return call()

    return together(ranks, [embedding.store for embedding in embeddings_of(graph).values()], verb, what, run)


def ranks_of_graph(graph: CompiledGraph) -> AnyRanks:
    """The ranks of a graph's embeddings; ValueError if embeddings have different process groups."""
    embeddings = list(embeddings_of(graph).values())
    ranks = {one.ranks.group: one.ranks for one in embeddings}
    if len(ranks) > 1:
        named = ", ".join(f"{one.name!r} of {one.ranks}" for one in embeddings)
        raise ValueError(
            f"the embeddings of {type(graph).__name__} must be of the same ranks, which save and load its state"
            f" together, got {named}; give all the same process_group"
        )
    return next(iter(ranks.values()), ALONE)


class GraphState:
    """A graph's state for torch.distributed.checkpoint: an object with `state_dict` and `load_state_dict`.

    Example: `dcp.save({"graph": graph.state()}, checkpoint_id=path)`, and `dcp.load` of the same.

    The state names a snapshot of each embedding, as the embedding's own `state_dict` does. With ranks, every rank must
    make each call, and gets the same state, so that any rank may write it.

    Args:
        graph: graph whose state is saved and loaded.
        train: the graph's optimizers and counts.
        strict: whether graph and state must have the same names; see `TrainGraph.load`.

    Raises:
        TypeError: `strict` is no bool.
        ValueError: the graph's embeddings have different process groups.
    """

    def __init__(self, graph: CompiledGraph, train: TrainState, strict: bool = True):
        _check_strict(strict)
        self._graph, self._train, self._strict = graph, train, strict
        self._ranks = ranks_of_graph(graph)
        self.loaded: LoadedKeys | None = None
        """Result of the last `load_state_dict`; `dcp.load` does not return it."""

    def state_dict(self) -> dict[str, bytes]:
        """The state as a single value of bytes: torch.distributed.checkpoint matches values by name, and optimizers
        may have added state since."""
        what = "state_dict of a graph"
        state = _together(self._graph, self._ranks, "state_dict", what, lambda: self._to_bytes(what))
        return {"oneemb_graph": state}

    def _to_bytes(self, what: str) -> bytes:
        graph, train, ranks = self._graph, self._train, self._ranks
        ranks.agree(what, lambda: check_between_updates(graph, train))
        snapshots = {name: embedding.named_snapshot() for name, embedding in named_embeddings(graph).items()}
        others = others_of(graph, ranks, what)
        return ranks.of_first(what, lambda: to_bytes(state_of(graph, train, snapshots, others)))

    def load_state_dict(self, state_dict: Mapping[str, bytes]) -> LoadedKeys:
        """Load a result of `state_dict`.

        Returns:
            `missing_keys` and `unexpected_keys`, as `TrainGraph.load` returns them; they are also kept in `loaded`.

        Raises:
            TypeError, ValueError, StorageError: the dict is no state of a graph, or does not fit this graph; nothing
                has changed.
        """
        what = f"load_state_dict of a graph{'' if self._strict else ', strict=False'}"
        where = "the state"

        def load() -> LoadedKeys:
            read = _parsed(lambda: _state_in(state_dict), where, self._ranks, what)
            return _restore(self._graph, self._train, read, where, self._ranks, what, strict=self._strict)

        self.loaded = _together(self._graph, self._ranks, "load_state_dict", what, load)
        return self.loaded


def _check_strict(strict: object) -> None:
    if not isinstance(strict, bool):
        raise TypeError(
            f"strict must be True or False, got {type(strict).__name__} {strict!r:.100}; False ignores names that only"
            " the graph or only the checkpoint has"
        )


def _state_in(state_dict: object) -> bytes:
    """The bytes in a result of `GraphState.state_dict`."""
    content = state_dict.get("oneemb_graph") if isinstance(state_dict, Mapping) else None
    if not isinstance(content, bytes):
        given = type(state_dict).__name__
        if isinstance(state_dict, Mapping):
            given += f" with {', '.join(map(repr, list(state_dict)[:5])) or 'nothing'}"
        raise TypeError(
            f"state_dict must be the result of graph.state().state_dict(), a dict with bytes at 'oneemb_graph', got"
            f" {given}; pass such a dict, or load a file of graph.save by graph.load"
        )
    return content


# ---- save -----------------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """Plan of a save, which the first rank makes from the files at the path."""

    earlier: list[Snapshots]
    """Snapshots of earlier saves to this path, newest first."""
    left: list[str]
    """Paths of the intents of saves that were stopped."""
    snapshot: str
    """Name of the snapshot that this save makes of each embedding."""


def _save(
    graph: CompiledGraph, train: TrainState, path: str, keep: int | None, keep_deltas: bool, delta: bool,
    ranks: AnyRanks, what: str,
) -> int:  # fmt: skip
    path = os.path.realpath(os.path.expanduser(path))  # If the path is a link, its target is replaced.
    embeddings = named_embeddings(graph)

    def begin() -> tuple[_Plan | None, dict[str, int]]:
        check_keep(keep)
        check_between_updates(graph, train)
        changes = {name: embedding.store.changes for name, embedding in embeddings.items()}
        if not ranks.first:
            return None, changes
        intents = glob.glob(f"{glob.escape(path)}.{'[0-9a-f]' * 8}{_SAVING}")
        left = [intent for intent in intents if not is_held(LocalFileSystem(), intent)]
        return _Plan(_named_by(path), left, name_of_save(train)), changes

    of_all = ranks.all_gather(what, begin)
    plan = cast(_Plan, of_all[0][0])
    existing = existing_snapshots(embeddings, plan.earlier)
    earlier = [snapshots for snapshots, names in zip(plan.earlier, existing, strict=True) if names]
    changed = {name: any(changes.get(name) for _, changes in of_all) for name in embeddings}
    made = new_snapshots(embeddings, changed, plan.snapshot)
    with doing("write the checkpoint", path):
        for intent_path in plan.left:
            _undo(intent_path, embeddings, ranks, what)
        if delta and plan.earlier:
            enter_parents(embeddings, made, plan.earlier[0], DELTAS_MAX, ranks, what)
        with Intent(path, made, embeddings, ranks, what) as intent:
            save_snapshots(embeddings, made)
            others = others_of(graph, ranks, what)

            def write() -> None:
                # `earlier` names the snapshots to delete too: if their deletion fails, the next save tries again.
                file: CheckpointFile = {**state_of(graph, train, made, others), "path": path, "earlier": earlier}
                intent.put_in_place(to_bytes(file))

            ranks.by_first(f"{what}: the file", write)
    folder = os.path.dirname(path)
    ranks.by_first(f"{what}: its folder", lambda: LocalFileSystem().sync_directory(folder))
    kept, removed = kept_and_removed(earlier, made, keep)
    for snapshots in removed:
        delete_snapshots(embeddings, snapshots, () if keep_deltas else [*kept, made])
    return len(kept)


# ---- load -----------------------------------------------------------------------------------------------------------


def _read_together(path: str, ranks: AnyRanks, what: str) -> State:
    """The state in a file or object, which the first rank reads for all ranks."""
    if is_url(path):
        stored = ranks.of_first(what, lambda: StoredCheckpoint(path).read())
        return _parsed(lambda: stored, path, ranks, what)
    if ranks.alone:
        with open(os.path.expanduser(path), "rb") as file:
            return load_state(file, path)

    def read() -> bytes:
        with open(os.path.expanduser(path), "rb") as file:
            return file.read()

    data = ranks.of_first(what, read)
    return _parsed(lambda: data, path, ranks, what)


def _parsed(data: Callable[[], bytes], where: str, ranks: AnyRanks, what: str) -> State:
    found: list[State] = []
    ranks.agree(what, lambda: found.append(load_state(io.BytesIO(data()), where)))
    return found[0]


def _restore(
    graph: CompiledGraph, train: TrainState, state: State, where: str, ranks: AnyRanks, what: str, *,
    strict: bool = True,
) -> LoadedKeys:  # fmt: skip
    embeddings, found = named_embeddings(graph), list[LoadedKeys]()
    ranks.agree(what, lambda: found.append(check_fits(graph, train, state, where, strict=strict)))
    with with_stored_rows(embeddings, state, where, ranks, what):
        _load_all(graph, train, state, where, ranks, what)
    return found[0]


def _load_all(graph: CompiledGraph, train: TrainState, state: State, where: str, ranks: AnyRanks, what: str) -> None:
    """Load a state that fits, and the snapshots that it names."""
    embeddings = named_embeddings(graph)
    snapshots = {name: snapshot for name, snapshot in state["embeddings"].items() if name in embeddings}
    for name, snapshot in snapshots.items():
        if snapshot["oneemb_snapshot"] is not None:
            embeddings[name].rank_snapshots.check_named(
                snapshot["oneemb_snapshot"], snapshot["oneemb_identity"], f"{where}, for embedding {name!r},"
            )
            internals.check_fits(embeddings[name], snapshot["oneemb_snapshot"])
    changed = False
    try:
        with signals_deferred:
            for name, snapshot in snapshots.items():
                internals.load_named(embeddings[name], snapshot)
                changed = True
            changed = True
            ranks.agree(what, lambda: restore_dense(graph, train, state, ranks))
            changed = False
    except BaseException as error:
        if changed:  # Only some rows or weights are from the checkpoint, so the graph cannot go on.
            for embedding in embeddings.values():
                embedding.store.store_lock.cut_short(error)
        raise


# ---- files ----------------------------------------------------------------------------------------------------------


def _named_by(path: str) -> list[Snapshots]:
    """Snapshots of saves to this path, newest first."""
    if not os.path.lexists(path):
        return []
    try:
        with open(path, "rb"):
            pass  # If the path cannot be opened, this error says more than torch's.
        # Only names are needed; mmap leaves tensors unread.
        state = cast(CheckpointFile, load_state(path, path, mmap=True))
    except OSError as error:
        raise type(error)(error.errno, f"{error.strerror}; give the path of a file, to be written", path) from error
    except ValueError as error:
        raise ValueError(f"{error}; save to another path, or delete it first") from error
    if state.get("path") != path:  # The file was copied or moved here: its snapshots belong to the original.
        return []
    return [state["embeddings"], *state.get("earlier", ())]


class Intent:
    """File beside the checkpoint that names the snapshots that a save will make. It is locked while the save runs.

        {"snapshots": {embedding: {"oneemb_snapshot": name, "oneemb_identity": null}, ...}}
        in place        appended when the checkpoint is written and about to be renamed

    The first rank writes the file before anything else, so that the next save can remove the remains of a killed save.
    A save that fails removes its own files and snapshots.
    """

    def __init__(self, path: str, made: Snapshots, embeddings: Embeddings, ranks: AnyRanks, what: str):
        self._target, self._made, self._embeddings = path, made, embeddings
        self._ranks, self._what = ranks, what
        self.path = f"{path}.{uuid.uuid4().hex[:8]}{_SAVING}"
        self.fs = LocalFileSystem()
        self.lock: int | None = None
        self._notes: NewFile | None = None

    def put_in_place(self, data: bytes) -> None:
        """Write the checkpoint and rename it to its path. From then on, the checkpoint names the snapshots, and the
        intent is removed."""
        new = NewFile(self._target, _temporary_of(self.path))
        try:
            new.write(data)
            new.sync()
            with signals_deferred:
                self._note(_IN_PLACE)
                new.put_in_place()
                with suppress(FileNotFoundError):
                    self.fs.remove(self.path)
        finally:
            new.close()

    def __enter__(self) -> "Intent":
        try:
            with signals_deferred:
                self._ranks.by_first(f"{self._what}: what it makes", self._begin)
            return self
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        with signals_deferred:
            try:
                if error is not None and (self._notes is not None or not self._ranks.alone):
                    _undo(self.path, self._embeddings, self._ranks, self._what)
            except (OSError, StorageError, RuntimeError) as failed:  # RuntimeError: another rank is gone.
                assert error is not None
                error.add_note(f"the remains of the save could not be removed, the next save tries again: {failed}")
            finally:
                if self._notes is not None:
                    self._notes.close()
                if self.lock is not None:
                    self.fs.unlock(self.lock)

    def _begin(self) -> None:
        self._notes = NewFile(self.path, self.path, self.fs)  # No rename is needed: a truncated intent is ignored.
        with suppress(OSError):  # On a file system without locks, `is_held` assumes that every save still runs.
            self.lock = self.fs.lock(self.path)
        self._note(json.dumps({"snapshots": self._made}) + "\n")

    def _note(self, text: str) -> None:
        assert self._notes is not None
        self._notes.write(text.encode())
        self._notes.sync()


def _temporary_of(intent: str) -> str:
    return f"{intent.removesuffix(_SAVING)}.tmp"


def _undo(intent: str, embeddings: Embeddings, ranks: AnyRanks, what: str) -> None:
    """Remove the remains of an unfinished save: snapshots that no file names, the temporary file and the intent. The
    first rank reads `intent`."""
    temporary = _temporary_of(intent)

    def read() -> Snapshots:
        made, in_place = _read_intent(intent)
        return made if not in_place or os.path.lexists(temporary) else {}

    def remove() -> None:
        for path in (temporary, intent):
            with suppress(FileNotFoundError):
                LocalFileSystem().remove(path)

    what = f"{what}: the remains of a save"
    delete_snapshots(embeddings, ranks.by_first(what, read))
    ranks.by_first(what, remove)


def _read_intent(intent: str) -> tuple[Snapshots, bool]:
    """(snapshots that a save was to make, whether its checkpoint was about to be renamed), from its intent."""
    try:
        with open(intent, "rb") as file:
            text = file.read().decode()
        first_line, _, rest = text.partition("\n")
        made = json.loads(first_line)["snapshots"]
        names = {name: snapshot["oneemb_snapshot"] for name, snapshot in made.items()}
        if all(isinstance(snapshot, str | None) for snapshot in names.values()):
            snapshots: Snapshots = {
                name: {"oneemb_snapshot": snapshot, "oneemb_identity": None} for name, snapshot in names.items()
            }
            return snapshots, rest == _IN_PLACE
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return {}, False  # The save ended while it wrote the intent, before it made a snapshot.
