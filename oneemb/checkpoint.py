"""The whole state of a training graph in one file: written as a whole or not at all.

    file       dense parameters and buffers, optimizers, schedulers, scaler, steps, random generators,
               and for each embedding the name and identity of a snapshot in its `persistent_path`
    snapshot   the embedding's rows and their optimizer state

Invariants:
- the file is there with all it names, or what was there before is: snapshots are durable before the file takes the
  place of the one before it;
- a snapshot that a file names is deleted only by a save to the same path that was told how many to keep: a copy of the
  file, wherever it is, names it too;
- a checkpoint that does not fit the graph, or that names another run's snapshots, is refused before anything has
  changed;
- a file holds numbers, tensors and names only, and is read as such: no code of it runs.
"""

import fcntl
import glob
import io
import json
import os
import pickle
import random
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from oneemb.graph.modules import embeddings_in
from oneemb.rows.files import close_dropped
from oneemb.storage.errors import (
    CorruptTableError,
    FormatVersionError,
    OtherSnapshotError,
    SnapshotNotFoundError,
    StorageError,
)
from oneemb.storage.fs import LocalFileSystem, close_in_child, storage_error
from oneemb.storage.turns import undisturbed

if TYPE_CHECKING:
    from oneemb.train_graph import TrainGraph

__all__ = ["GraphState", "load_checkpoint", "save_checkpoint"]

_FORMAT = 2
_PREFIX = "checkpoint-"
# How the name of the file ends that says what a save is about to make, and its last line.
_SAVING, _IN_PLACE = ".saving", "in place\n"

# What names the snapshots of the embeddings, by module: as their `get_extra_state` gives it.
_Named = dict[str, dict[str, str | None]]


def save_checkpoint(graph: "TrainGraph", path: str, keep: int | None) -> int:
    """Write a checkpoint; see `TrainGraph.save`. Returns how many snapshots of earlier ones are kept."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep must be an int of at least 1, or None, got {keep!r}")
    path = os.path.realpath(os.path.expanduser(path))  # what a link leads to is written, not the link
    embeddings = embeddings_in(graph)
    earlier = _earlier(path, embeddings)
    kept, over = (earlier, []) if keep is None else (earlier[: keep - 1], earlier[keep - 1 :])
    made: _Named = {}
    for name, embedding in embeddings.items():
        snapshot = f"{_PREFIX}{graph.steps:012d}-{uuid.uuid4().hex[:8]}" if embedding.store.changes else None
        made[name] = {"oneemb_snapshot": snapshot, "oneemb_identity": None}
    for left in glob.glob(f"{glob.escape(path)}.{'[0-9a-f]' * 8}{_SAVING}"):
        if not _is_held(left):
            _undo(left, embeddings)
    try:
        with _Intent(path, made, embeddings) as intent:
            for name, embedding in embeddings.items():
                snapshot = made[name]["oneemb_snapshot"]
                if snapshot is not None:
                    # Not through the embedding, which would take the snapshot for the one that its state_dict names.
                    info = embedding.store.save_snapshot(snapshot, embedding._describe())
                    made[name]["oneemb_identity"] = info.identity
            # Those that are about to go as well: if that fails, the next save tries again.
            state = _state_of(graph, made) | {"path": path, "earlier": earlier}
            _write(intent.temporary, _to_bytes(state))
            intent.put_in_place()
    except OSError as error:
        raise storage_error(error, "write the checkpoint", path) from error
    LocalFileSystem().sync_directory(os.path.dirname(path))
    for named in over:
        _delete(embeddings, named)
    return len(kept)


def load_checkpoint(graph: "TrainGraph", path: str) -> None:
    """Read a checkpoint; see `TrainGraph.load`."""
    _restore(graph, _read(path), path)


class GraphState:
    """A graph's state for torch.distributed.checkpoint: an object with `state_dict` and `load_state_dict`.

    Example: `dcp.save({"graph": graph.state()}, checkpoint_id=path)`, and `dcp.load` of the same.

    The state names a snapshot of each embedding, as the embedding's own `state_dict` does.
    """

    def __init__(self, graph: "TrainGraph"):
        self._graph = graph

    def state_dict(self) -> dict[str, bytes]:
        """The state as one value, which fits whatever the optimizers have made since."""
        return {"oneemb_graph": self._graph._between_steps("state_dict", self._to_bytes)}

    def _to_bytes(self) -> bytes:
        named = {name: one.get_extra_state() for name, one in embeddings_in(self._graph).items()}
        return _to_bytes(_state_of(self._graph, named))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave.

        Raises:
            ValueError, StorageError: it does not fit the graph; nothing has changed.
        """
        state = _of_bytes(state_dict["oneemb_graph"], "the state")
        self._graph._between_steps("load_state_dict", lambda: _restore(self._graph, state, "the state"))


def _state_of(graph: "TrainGraph", snapshots: _Named) -> dict[str, Any]:
    if graph._calls:
        raise RuntimeError(
            f"{graph._calls} of {graph.config.accumulation_steps} micro-batches are not updated with yet; save after"
            " the call that ends with the update"
        )
    numpy_name, numpy_keys, *numpy_rest = np.random.get_state()
    return {
        "format": _FORMAT,
        "embeddings": dict(snapshots),
        "tensors": {name: tensor.detach() for name, tensor in _tensors(graph).items()},
        "extra": {name: module.get_extra_state() for name, module in _with_extra_state(graph).items()},
        "optimizers": [one.state_dict() for one in graph.optimizers],
        "optimizer_classes": [type(one.optimizer).__name__ for one in graph.optimizers],
        "skipped": [one.skipped for one in graph.optimizers],
        "lr_schedulers": [None if one is None else one.state_dict() for one in graph._lr_schedulers],
        "grad_scaler": None if graph._scaler is None else graph._scaler.state_dict(),
        "steps": graph.steps,
        "random": {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "python": random.getstate(),
            "numpy": [numpy_name, torch.from_numpy(np.asarray(numpy_keys).astype(np.int64)), *numpy_rest],
        },
    }


def _tensors(graph: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and the buffers that modules want saved."""
    found: dict[str, torch.Tensor] = dict(graph.named_parameters())
    for prefix, module in graph.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _with_extra_state(graph: torch.nn.Module) -> dict[str, torch.nn.Module]:
    embeddings = embeddings_in(graph)
    plain = torch.nn.Module.get_extra_state
    return {
        name: one
        for name, one in graph.named_modules()
        if type(one).get_extra_state is not plain and name not in embeddings
    }


def _restore(graph: "TrainGraph", state: dict[str, Any], where: str) -> None:
    tensors, embeddings = _tensors(graph), embeddings_in(graph)
    _check_fits(graph, state, tensors, embeddings, where)
    changed = False
    try:
        with undisturbed:
            for name, named in state["embeddings"].items():
                embeddings[name].set_extra_state(named)
                changed = True
            changed = True
            _restore_dense(graph, state, tensors)
            changed = False
    except BaseException as error:
        if changed:  # Rows of the one and weights of the other are nothing to go on from.
            for embedding in embeddings.values():
                embedding.store.turns.cut_short(error)
        raise


def _restore_dense(graph: "TrainGraph", state: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(state["tensors"][name])
    for name, module in _with_extra_state(graph).items():
        module.set_extra_state(state["extra"][name])
    for one, of_one, skipped in zip(graph.optimizers, state["optimizers"], state["skipped"], strict=True):
        one.load_state_dict(of_one)
        one.skipped = skipped
    for scheduler, of_one in zip(graph._lr_schedulers, state["lr_schedulers"], strict=True):
        if scheduler is not None:
            scheduler.load_state_dict(of_one)
    if graph._scaler is not None:
        graph._scaler.load_state_dict(state["grad_scaler"])
    graph._drop_gradients()
    graph.steps = state["steps"]
    drawn = state["random"]
    torch.set_rng_state(drawn["torch"])
    if torch.cuda.is_available() and len(drawn["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(drawn["cuda"])
    random.setstate(drawn["python"])
    name, keys, *rest = drawn["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def _check_fits(
    graph: "TrainGraph", state: dict[str, Any], tensors: Mapping[str, torch.Tensor], embeddings: Any, where: str
) -> None:
    if state.get("format") != _FORMAT:
        raise ValueError(f"{where} has format {state.get('format')!r}, this version of oneemb reads {_FORMAT}")
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    saved = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state["tensors"].items()}
    for name in sorted({*shapes, *saved}):
        if shapes.get(name) != saved.get(name):
            raise ValueError(
                f"{where} does not fit: {name} is {saved.get(name)} there, {shapes.get(name)} in the graph"
            )
    expected = (
        ("embeddings", sorted(state["embeddings"]), sorted(embeddings)),
        ("modules with extra state", sorted(state["extra"]), sorted(_with_extra_state(graph))),
        ("optimizers", state["optimizer_classes"], [type(one.optimizer).__name__ for one in graph.optimizers]),
        (
            "the numbers of parameters in each param group",
            [_group_sizes(one) for one in state["optimizers"]],
            [_group_sizes(one.state_dict()) for one in graph.optimizers],
        ),
        (
            "learning rate schedulers",
            [one is not None for one in state["lr_schedulers"]],
            [one is not None for one in graph._lr_schedulers],
        ),
        ("a GradScaler", state["grad_scaler"] is not None, graph._scaler is not None),
    )
    for what, there, here in expected:
        if there != here:
            raise ValueError(f"{where} does not fit: {what} are {there} there, {here} in the graph")
    for name, named in state["embeddings"].items():
        if named["oneemb_snapshot"] is not None:
            embeddings[name].store.check_snapshot(
                named["oneemb_snapshot"], named["oneemb_identity"], f"{where}, for embedding {name!r},"
            )
            embeddings[name].check_fits(named["oneemb_snapshot"])


def _group_sizes(state: dict[str, Any]) -> list[int]:
    return [len(group["params"]) for group in state["param_groups"]]


def _earlier(path: str, embeddings: Mapping[str, Any]) -> list[_Named]:
    """The snapshots, newest first, that saves to this path have made, as far as they are still there."""
    if not os.path.lexists(path):
        return []
    try:
        with open(path, "rb"):
            pass  # torch says less of a path that cannot be opened
        state = _load(path, path, mmap=True)  # for what it names: tensors are not read
    except OSError as error:
        raise type(error)(error.errno, f"{error.strerror}; give the path of a file, to be written", path) from error
    except ValueError as error:
        raise ValueError(f"{error}; save to another path, or delete it first") from error
    if state.get("path") != path:  # It was copied or moved here: what it names is the original's.
        return []
    return [named for named in (state["embeddings"], *state["earlier"]) if _there(embeddings, named)]


class _Intent:
    """What a save is about to make, in a file beside the checkpoint that is locked as long as the save goes on.

        {"snapshots": {embedding: {"oneemb_snapshot": name, "oneemb_identity": null}, ...}}
        in place        added when the checkpoint is written and is about to get its name

    It is there before anything else is: whatever kills the save, the next one knows what to take away. A block that
    ends in an error takes it away itself.
    """

    def __init__(self, path: str, made: _Named, embeddings: Mapping[str, Any]):
        self._target, self._made, self._embeddings = path, made, embeddings
        self.path = f"{path}.{uuid.uuid4().hex[:8]}{_SAVING}"
        self.temporary = _temporary_of(self.path)
        self._file: IO[bytes] | None = None

    def put_in_place(self) -> None:
        """Give the checkpoint its name: from then on it names what was made."""
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
                with suppress(OSError):  # Where a file system has no locks, nobody takes a save for a dead one.
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
        self._file.flush()
        os.fsync(self._file.fileno())


def _temporary_of(intent: str) -> str:
    return f"{intent.removesuffix(_SAVING)}.tmp"


def _is_held(intent: str) -> bool:
    """Whether the save goes on."""
    try:
        with open(intent, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True  # Or it is gone, or nobody can say.
    return False


def _undo(intent: str, embeddings: Mapping[str, Any]) -> None:
    """Take away what a save has made that did not come to its end: snapshots that no file names, and its own files."""
    made, in_place = _read_intent(intent)
    temporary = _temporary_of(intent)
    if not in_place or os.path.lexists(temporary):
        _delete(embeddings, made)
    for path in (temporary, intent):
        with suppress(FileNotFoundError):
            os.unlink(path)


def _read_intent(intent: str) -> tuple[_Named, bool]:
    """The snapshots that a save would make, and whether its checkpoint was about to get its name."""
    try:
        with open(intent, "rb") as file:
            text = file.read().decode()
        found, _, rest = text.partition("\n")
        made = json.loads(found)["snapshots"]
        if all(isinstance(named["oneemb_snapshot"], str | None) for named in made.values()):
            names = {name: named["oneemb_snapshot"] for name, named in made.items()}
            made = {name: {"oneemb_snapshot": snapshot, "oneemb_identity": None} for name, snapshot in names.items()}
            return made, rest == _IN_PLACE
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return {}, False  # Its writer ended before anything else was made.


def _there(embeddings: Mapping[str, Any], named: _Named) -> list[tuple[Any, str]]:
    """Those of these snapshots that are still there, with their embeddings."""
    found = []
    for name, one in named.items():
        if name in embeddings and one["oneemb_snapshot"] is not None:
            embedding, snapshot = embeddings[name], str(one["oneemb_snapshot"])
            try:
                embedding.store.check_snapshot(snapshot, one["oneemb_identity"], "a checkpoint")
            except (SnapshotNotFoundError, OtherSnapshotError, ValueError):
                continue
            except (CorruptTableError, FormatVersionError):
                pass  # It is there.
            found.append((embedding, snapshot))
    return found


def _delete(embeddings: Mapping[str, Any], named: _Named) -> None:
    """Delete those of these snapshots that are still there, and are themselves."""
    for embedding, snapshot in _there(embeddings, named):
        embedding.delete_snapshot(snapshot)


def _to_bytes(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _of_bytes(data: bytes, where: str) -> dict[str, Any]:
    return _load(io.BytesIO(data), where)


def _load(file: Any, where: str, *, mmap: bool = False) -> dict[str, Any]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"{where} is not a checkpoint of a TrainGraph, or is damaged: {error}") from error
    if not isinstance(state, dict) or not {"format", "embeddings", "tensors"} <= state.keys():
        raise ValueError(f"{where} is not a checkpoint of a TrainGraph: graph.save() has not written it")
    return state


def _read(path: str) -> dict[str, Any]:
    with open(os.path.expanduser(path), "rb") as file:
        return _load(file, path)


def _write(path: str, data: bytes) -> None:
    """Write a file durably, but for its name."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
