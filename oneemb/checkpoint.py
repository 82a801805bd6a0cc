"""The whole state of a training graph in one file: written as a whole or not at all.

    file       dense parameters and buffers, optimizers, schedulers, scaler, steps, random generators,
               and for each embedding the name and identity of a snapshot in its `persistent_path`
    snapshot   the embedding's rows and their optimizer state

Invariants:
- the file exists with all it names, or the file that it was to replace does: snapshots are durable before the new file
  takes the place of the old one;
- a snapshot that a file names is deleted only by a save to the same path that was told how many to keep: a copy of the
  file may name it too, wherever the copy is;
- a checkpoint that does not fit the graph, or that names another run's snapshots, is refused before anything has
  changed;
- a file holds numbers, tensors and names only, and is read as such: loading it runs no code from it.
"""

import fcntl
import glob
import io
import json
import os
import pickle
import random
import uuid
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, TypedDict

import numpy as np
import torch

from oneemb.compiled_graph import CompiledGraph, step_locks
from oneemb.embedding import TableEmbedding, embeddings_of
from oneemb.named_snapshot import SnapshotName
from oneemb.new_files import close_dropped, make_durable
from oneemb.row_step import embedding_of
from oneemb.storage.errors import (
    CorruptTableError,
    FormatVersionError,
    OtherSnapshotError,
    SnapshotNotFoundError,
    StorageError,
)
from oneemb.storage.fs import LocalFileSystem, close_in_child, storage_error
from oneemb.storage.step_lock import between_steps
from oneemb.storage.turns import undisturbed
from oneemb.train_state import TrainState

__all__ = ["GraphState", "load_checkpoint", "save_checkpoint"]

_FORMAT = 2
_PREFIX = "checkpoint-"
# The suffix of the file that says what a save is about to make, and that file's last line.
_SAVING, _IN_PLACE = ".saving", "in place\n"

_Embeddings = Mapping[str, TableEmbedding]
# The snapshots of embeddings, by the name of the module.
_Snapshots = dict[str, SnapshotName]


class _Random(TypedDict):
    """States of the random generators."""

    torch: torch.Tensor
    cuda: list[torch.Tensor]
    python: tuple[Any, ...]
    numpy: list[Any]


class _State(TypedDict):
    """What the file holds."""

    format: int
    embeddings: _Snapshots
    tensors: dict[str, torch.Tensor]
    extra: dict[str, Any]
    optimizers: list[dict[str, Any]]
    optimizer_classes: list[str]
    skipped: list[int]
    lr_schedulers: list[dict[str, Any] | None]
    grad_scaler: dict[str, Any] | None
    own_grad_scalers: dict[str, dict[str, Any]]
    steps: int
    random: _Random


class _File(_State, total=False):
    """A state with what later saves to the same path have to know."""

    path: str
    earlier: list[_Snapshots]


def save_checkpoint(graph: CompiledGraph, train: TrainState, path: str, keep: int | None) -> int:
    """Write a checkpoint; see `TrainGraph.save`. Returns how many snapshots of earlier ones are kept."""
    _refuse_ranks(graph)
    return between_steps(step_locks(graph), "save", lambda: _save(graph, train, path, keep))


def load_checkpoint(graph: CompiledGraph, train: TrainState, path: str) -> None:
    """Read a checkpoint; see `TrainGraph.load`."""
    _refuse_ranks(graph)
    between_steps(step_locks(graph), "load", lambda: _restore(graph, train, _read(path), path))


def _refuse_ranks(graph: CompiledGraph) -> None:
    for name, embedding in embeddings_of(graph).items():
        if embedding.ranks is not None:
            raise RuntimeError(
                f"a checkpoint in one file is of one process, and ranks own the rows of {name} together: on every rank"
                " call embedding.save_snapshot(name), and on one of them torch.save the state_dict() of dense modules,"
                " optimizers and schedulers"
            )


class GraphState:
    """A graph's state for torch.distributed.checkpoint: an object with `state_dict` and `load_state_dict`.

    Example: `dcp.save({"graph": graph.state()}, checkpoint_id=path)`, and `dcp.load` of the same.

    The state names a snapshot of each embedding, as the embedding's own `state_dict` does.
    """

    def __init__(self, graph: CompiledGraph, train: TrainState):
        _refuse_ranks(graph)
        self._graph, self._train = graph, train

    def state_dict(self) -> dict[str, bytes]:
        """The state as one value, so that it fits whatever state the optimizers have added since."""
        return {"oneemb_graph": between_steps(step_locks(self._graph), "state_dict", self._to_bytes)}

    def _to_bytes(self) -> bytes:
        snapshots = {name: embedding.named_snapshot() for name, embedding in embeddings_of(self._graph).items()}
        return _to_bytes(_state_of(self._graph, self._train, snapshots))

    def load_state_dict(self, state_dict: Mapping[str, bytes]) -> None:
        """Load what `state_dict` gave.

        Raises:
            ValueError, StorageError: it does not fit the graph; nothing has changed.
        """
        state = _of_bytes(state_dict["oneemb_graph"], "the state")
        between_steps(
            step_locks(self._graph), "load_state_dict", lambda: _restore(self._graph, self._train, state, "the state")
        )


def _save(graph: CompiledGraph, train: TrainState, path: str, keep: int | None) -> int:
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep must be an int of at least 1, or None, got {keep!r}")
    path = os.path.realpath(os.path.expanduser(path))  # A link stays: the file it leads to is replaced.
    embeddings = embeddings_of(graph)
    earlier = _earlier(path, embeddings)
    kept, superfluous = (earlier, []) if keep is None else (earlier[: keep - 1], earlier[keep - 1 :])
    made: _Snapshots = {}
    for name, embedding in embeddings.items():
        snapshot = f"{_PREFIX}{train.steps:012d}-{uuid.uuid4().hex[:8]}" if embedding.store.changes else None
        made[name] = {"oneemb_snapshot": snapshot, "oneemb_identity": None}
    for intent_path in glob.glob(f"{glob.escape(path)}.{'[0-9a-f]' * 8}{_SAVING}"):
        if not _is_held(intent_path):
            _undo(intent_path, embeddings)
    try:
        with _Intent(path, made, embeddings) as intent:
            for name, embedding in embeddings.items():
                snapshot = made[name]["oneemb_snapshot"]
                if snapshot is not None:
                    # Not embedding.save_snapshot: state_dict() would name this snapshot from then on.
                    info = embedding.store.save_snapshot(snapshot, embedding.description())
                    made[name]["oneemb_identity"] = info.identity
            # The superfluous ones are named too: if their deletion fails, the next save tries again.
            file: _File = {**_state_of(graph, train, made), "path": path, "earlier": earlier}
            _write(intent.temporary, _to_bytes(file))
            intent.put_in_place()
    except OSError as error:
        raise storage_error(error, "write the checkpoint", path) from error
    LocalFileSystem().sync_directory(os.path.dirname(path))
    for snapshots in superfluous:
        _delete(embeddings, snapshots)
    return len(kept)


def _state_of(graph: CompiledGraph, train: TrainState, snapshots: _Snapshots) -> _State:
    if train.micro_batches:
        raise RuntimeError(
            f"{train.micro_batches} of {graph.config.accumulation_steps} micro-batches are not updated with yet; save"
            " after the call that ends with the update"
        )
    numpy_name, numpy_keys, *numpy_rest = np.random.get_state()
    return {
        "format": _FORMAT,
        "embeddings": dict(snapshots),
        "tensors": {name: tensor.detach() for name, tensor in _tensors(graph).items()},
        "extra": {name: module.get_extra_state() for name, module in _with_extra_state(graph).items()},
        "optimizers": [optimizer.state_dict() for optimizer in train.optimizers],
        "optimizer_classes": [type(optimizer.optimizer).__name__ for optimizer in train.optimizers],
        "skipped": [optimizer.skipped for optimizer in train.optimizers],
        "lr_schedulers": [None if scheduler is None else scheduler.state_dict() for scheduler in train.lr_schedulers],
        "grad_scaler": None if train.scaler is None else train.scaler.state_dict(),
        "own_grad_scalers": {name: scaler.state_dict() for name, scaler in _own_scalers(graph).items()},
        "steps": train.steps,
        "random": {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "python": random.getstate(),
            "numpy": [numpy_name, torch.from_numpy(np.asarray(numpy_keys).astype(np.int64)), *numpy_rest],
        },
    }


def _tensors(graph: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, but for weights that stand for rows, and the buffers that modules want saved."""
    found: dict[str, torch.Tensor] = {
        name: parameter for name, parameter in graph.named_parameters() if embedding_of(parameter) is None
    }
    for prefix, module in graph.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _own_scalers(graph: torch.nn.Module) -> dict[str, torch.amp.GradScaler]:
    """The GradScalers that are attributes of the graph, which its `build` scales with."""
    return {name: value for name, value in vars(graph).items() if isinstance(value, torch.amp.GradScaler)}


def _with_extra_state(graph: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that have extra state, embeddings left out."""
    plain = torch.nn.Module.get_extra_state
    return {
        name: module
        for name, module in graph.named_modules()
        if type(module).get_extra_state is not plain and not isinstance(module, TableEmbedding)
    }


def _restore(graph: CompiledGraph, train: TrainState, state: _State, where: str) -> None:
    tensors, embeddings = _tensors(graph), embeddings_of(graph)
    _check_fits(graph, train, state, tensors, embeddings, where)
    changed = False
    try:
        with undisturbed:
            for name, snapshot in state["embeddings"].items():
                embeddings[name].load_named(snapshot)
                changed = True
            changed = True
            _restore_dense(graph, train, state, tensors)
            changed = False
    except BaseException as error:
        if changed:  # Some rows or weights are the checkpoint's, others are not: nobody can go on from there.
            for embedding in embeddings.values():
                embedding.store.turns.cut_short(error)
        raise


def _restore_dense(graph: CompiledGraph, train: TrainState, state: _State, tensors: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(state["tensors"][name])
    for name, module in _with_extra_state(graph).items():
        module.set_extra_state(state["extra"][name])
    for optimizer, optimizer_state, skipped in zip(
        train.optimizers, state["optimizers"], state["skipped"], strict=True
    ):
        optimizer.load_state_dict(optimizer_state)
        optimizer.skipped = skipped
    for scheduler, scheduler_state in zip(train.lr_schedulers, state["lr_schedulers"], strict=True):
        if scheduler is not None and scheduler_state is not None:
            scheduler.load_state_dict(scheduler_state)
    if train.scaler is not None and state["grad_scaler"] is not None:
        train.scaler.load_state_dict(state["grad_scaler"])
    for name, scaler in _own_scalers(graph).items():
        if name in state["own_grad_scalers"]:
            scaler.load_state_dict(state["own_grad_scalers"][name])
    train.drop_gradients(() if train.scaled_by is None else (train.scaled_by,))
    train.steps = state["steps"]
    generators = state["random"]
    torch.set_rng_state(generators["torch"])
    if torch.cuda.is_available() and len(generators["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(generators["cuda"])
    random.setstate(generators["python"])
    name, keys, *rest = generators["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def _check_fits(
    graph: CompiledGraph, train: TrainState, state: _State, tensors: Mapping[str, torch.Tensor],
    embeddings: _Embeddings, where: str,
) -> None:  # fmt: skip
    if state.get("format") != _FORMAT:
        raise ValueError(f"{where} has format {state.get('format')!r}, this version of oneemb reads {_FORMAT}")
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    saved = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state["tensors"].items()}
    hold_nothing = {f"{name}.weight" for name in embeddings}
    for name in sorted({*shapes, *saved} - hold_nothing):
        if shapes.get(name) != saved.get(name):
            raise ValueError(
                f"{where} does not fit: {name} is {saved.get(name)} there, {shapes.get(name)} in the graph"
            )
    expected = (
        ("embeddings", sorted(state["embeddings"]), sorted(embeddings)),
        ("modules with extra state", sorted(state["extra"]), sorted(_with_extra_state(graph))),
        (
            "optimizers",
            state["optimizer_classes"],
            [type(optimizer.optimizer).__name__ for optimizer in train.optimizers],
        ),
        (
            "the numbers of parameters in each param group",
            [_group_sizes(optimizer_state) for optimizer_state in state["optimizers"]],
            [_group_sizes(optimizer.state_dict()) for optimizer in train.optimizers],
        ),
        (
            "learning rate schedulers",
            [scheduler_state is not None for scheduler_state in state["lr_schedulers"]],
            [scheduler is not None for scheduler in train.lr_schedulers],
        ),
        ("a GradScaler", state["grad_scaler"] is not None, train.scaler is not None),
        ("GradScalers of build", sorted(state.get("own_grad_scalers", ())), sorted(_own_scalers(graph))),
    )
    for what, there, here in expected:
        if there != here:
            raise ValueError(f"{where} does not fit: {what} are {there} there, {here} in the graph")
    for name, snapshot in state["embeddings"].items():
        if snapshot["oneemb_snapshot"] is not None:
            embeddings[name].store.check_snapshot(
                snapshot["oneemb_snapshot"], snapshot["oneemb_identity"], f"{where}, for embedding {name!r},"
            )
            embeddings[name].check_fits(snapshot["oneemb_snapshot"])


def _group_sizes(state: dict[str, Any]) -> list[int]:
    return [len(group["params"]) for group in state["param_groups"]]


def _earlier(path: str, embeddings: _Embeddings) -> list[_Snapshots]:
    """The snapshots, newest first, that saves to this path have made and that still exist."""
    if not os.path.lexists(path):
        return []
    try:
        with open(path, "rb"):
            pass  # torch's own error says less of a path that cannot be opened
        state = _load(path, path, mmap=True)  # Only names are needed: mmap leaves the tensors unread.
    except OSError as error:
        raise type(error)(error.errno, f"{error.strerror}; give the path of a file, to be written", path) from error
    except ValueError as error:
        raise ValueError(f"{error}; save to another path, or delete it first") from error
    if state.get("path") != path:  # It was copied or moved here: what it names belongs to the original.
        return []
    return [snapshots for snapshots in (state["embeddings"], *state["earlier"]) if _existing(embeddings, snapshots)]


class _Intent:
    """What a save is about to make, in a file beside the checkpoint that is locked while the save goes on.

        {"snapshots": {embedding: {"oneemb_snapshot": name, "oneemb_identity": null}, ...}}
        in place        appended when the checkpoint is written and about to be renamed

    The file is written before anything else: whatever kills the save, the next save knows what to remove. If the block
    ends with an error, it removes what it has made itself.
    """

    def __init__(self, path: str, made: _Snapshots, embeddings: _Embeddings):
        self._target, self._made, self._embeddings = path, made, embeddings
        self.path = f"{path}.{uuid.uuid4().hex[:8]}{_SAVING}"
        self.temporary = _temporary_of(self.path)
        self._file: IO[bytes] | None = None

    def put_in_place(self) -> None:
        """Rename the written checkpoint to its path: from then on a file names the snapshots."""
        with undisturbed:
            self._note(_IN_PLACE)
            os.replace(self.temporary, self._target)
            with suppress(FileNotFoundError):
                os.unlink(self.path)

    def __enter__(self) -> "_Intent":
        try:
            with undisturbed:
                self._file = open(self.path, "xb")
                close_in_child(self._file)
                with suppress(OSError):  # On a file system without locks, `_is_held` takes every save to go on.
                    fcntl.flock(self._file, fcntl.LOCK_EX)
                self._note(json.dumps({"snapshots": self._made}) + "\n")
            return self
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        with undisturbed:
            try:
                if error is not None and self._file is not None:
                    _undo(self.path, self._embeddings)
            except (OSError, StorageError) as failed:
                assert error is not None
                error.add_note(f"what the save had made could not be taken away, the next one tries again: {failed}")
            finally:
                if self._file is not None:
                    close_dropped(self._file)

    def _note(self, text: str) -> None:
        assert self._file is not None
        self._file.write(text.encode())
        make_durable(self._file)


def _temporary_of(intent: str) -> str:
    return f"{intent.removesuffix(_SAVING)}.tmp"


def _is_held(intent: str) -> bool:
    """Whether the save that wrote this intent still goes on."""
    try:
        with open(intent, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True  # It is locked; or it is gone, or cannot be locked, and is left alone.
    return False


def _undo(intent: str, embeddings: _Embeddings) -> None:
    """Remove what an unfinished save has made: snapshots that no file names, its temporary file and its intent."""
    made, in_place = _read_intent(intent)
    temporary = _temporary_of(intent)
    if not in_place or os.path.lexists(temporary):
        _delete(embeddings, made)
    for path in (temporary, intent):
        with suppress(FileNotFoundError):
            os.unlink(path)


def _read_intent(intent: str) -> tuple[_Snapshots, bool]:
    """The snapshots that a save would make, and whether its checkpoint was about to be renamed."""
    try:
        with open(intent, "rb") as file:
            text = file.read().decode()
        first_line, _, rest = text.partition("\n")
        made = json.loads(first_line)["snapshots"]
        if all(isinstance(snapshot["oneemb_snapshot"], str | None) for snapshot in made.values()):
            names = {name: snapshot["oneemb_snapshot"] for name, snapshot in made.items()}
            snapshots: _Snapshots = {
                name: {"oneemb_snapshot": snapshot, "oneemb_identity": None} for name, snapshot in names.items()
            }
            return snapshots, rest == _IN_PLACE
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return {}, False  # The save ended while it wrote this file, before it made anything else.


def _existing(embeddings: _Embeddings, snapshots: _Snapshots) -> list[tuple[TableEmbedding, str]]:
    """Those of these snapshots that still exist, with their embeddings."""
    found = []
    for name, named in snapshots.items():
        if name in embeddings and named["oneemb_snapshot"] is not None:
            embedding, snapshot = embeddings[name], str(named["oneemb_snapshot"])
            try:
                embedding.store.check_snapshot(snapshot, named["oneemb_identity"], "a checkpoint")
            except (SnapshotNotFoundError, OtherSnapshotError, ValueError):
                continue
            except (CorruptTableError, FormatVersionError):
                pass  # It exists, though it cannot be read.
            found.append((embedding, snapshot))
    return found


def _delete(embeddings: _Embeddings, snapshots: _Snapshots) -> None:
    """Delete those of these snapshots that still exist; snapshots of another identity stay."""
    for embedding, snapshot in _existing(embeddings, snapshots):
        embedding.delete_snapshot(snapshot)


def _to_bytes(state: _State) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _of_bytes(data: bytes, where: str) -> _File:
    return _load(io.BytesIO(data), where)


def _load(file: str | IO[bytes], where: str, *, mmap: bool = False) -> _File:
    try:
        if not mmap:  # torch does not look at the checksums of what it reads.
            with zipfile.ZipFile(file) as archive:
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"the checksum of {damaged} is wrong")
            if not isinstance(file, str):
                file.seek(0)
        state: _File = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError,
            ValueError, KeyError, UnicodeDecodeError) as error:  # fmt: skip
        raise ValueError(f"{where} is not a checkpoint of a TrainGraph, or is damaged: {error}") from error
    if not isinstance(state, dict) or not {"format", "embeddings", "tensors"} <= state.keys():
        raise ValueError(f"{where} is not a checkpoint of a TrainGraph: graph.save() has not written it")
    return state


def _read(path: str) -> _File:
    with open(os.path.expanduser(path), "rb") as file:
        return _load(file, path)


def _write(path: str, data: bytes) -> None:
    """Write a file whose content is durable; its name in the folder is not yet."""
    with open(path, "wb") as file:
        file.write(data)
        make_durable(file)
