"""A whole model served: dense weights of a checkpoint, and rows of the snapshots that the checkpoint names.

Invariants:
- weights and rows of a version are of one checkpoint; a version never changes, and a call has one version;
- calls never wait for a newer version: it is loaded beside the version that serves, and takes its place at once;
- a checkpoint that is missing, damaged, older or that does not fit leaves the version that serves.
"""

import inspect
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from oneemb.checkpoints.named_snapshot import SnapshotName
from oneemb.checkpoints.state_bytes import load_bytes
from oneemb.checkpoints.state_names import named_embeddings
from oneemb.embeddings.unsaved_rows import taking_no_folder
from oneemb.kernels.threads import Threads
from oneemb.serving.build import Version, check_formats, is_gone, open_snapshot, served_folder, source_of
from oneemb.serving.following import Following
from oneemb.serving.frozen_modules import frozen_copy
from oneemb.serving.inference import InferenceEmbedding
from oneemb.serving.weights import set_weights, weights_for
from oneemb.storage.errors import OtherSnapshotError, StorageError
from oneemb.storage.fs import AnyPath, file_path
from oneemb.storage.objects.object_store import is_url
from oneemb.training.compiled_graph import CompiledGraph, EvalGraph

_RETRY_S_MAX = 60.0  # seconds between two attempts of the follower to load a checkpoint that has failed
_NO_ROWS = (
    "was made for serve_model, which reads its arguments alone, so it has no rows: the function must return the module"
    " without load_state_dict, an optimizer or a lookup in training mode; rows and weights come from the checkpoint"
)
_log = logging.getLogger("oneemb")

_FileState = tuple[int, int, int]
_Dtype = Literal["float32", "float16", "int8", "int4"]


@dataclass(frozen=True)
class ModelVersion:
    """One version of a served model. Calling it calls the module, in eval mode and without gradients."""

    module: torch.nn.Module
    """Copy of the module with the weights of the checkpoint and served rows."""
    snapshots: dict[str, Version]
    """{name of the embedding in the module: its snapshot}."""
    saved_at: float
    """Time at which the checkpoint was written, in seconds since 1970."""
    file: _FileState
    """State of the checkpoint's file, which changes when the file is replaced."""

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.module.build if isinstance(self.module, CompiledGraph) else self.module
        return call(*args, **kwargs)


class _Place(torch.nn.Module):
    """Stands where a module has an embedding."""

    def __init__(self, paths: list[str], dim: int, num_tables: int):
        super().__init__()
        self.paths, self.dim, self.num_tables = paths, dim, num_tables


class _Template(NamedTuple):
    """Copy of the user's module with places for its embeddings, and its parts by their names in checkpoints. A version
    is a copy of it."""

    module: torch.nn.Module
    places: dict[str, _Place]


class ServedModel(Following):
    """A model whose weights and rows are those of a checkpoint, made by `serve_model`. Any thread, and a child of fork,
    may call it.

    A call has the arguments and the result of the module's `forward`, or of `build` of an `EvalGraph`. Each call uses
    one version from beginning to end; `current` gives the version for several calls.
    """

    def __init__(
        self, path: str, make: Callable[..., torch.nn.Module] | torch.nn.Module, prefix: str | None, dtype: str,
        absent: str, folder: str | None, threads: Threads, check: Callable[[ModelVersion], Any] | None,
        on_change: Callable[["ServedModel"], Any] | None,
    ):  # fmt: skip
        super().__init__()
        self._path, self._prefix, self._check, self._on_change = path, prefix, check, on_change
        self._dtype, self._absent, self._folder, self._threads = dtype, absent, folder, threads
        self._template: _Template | None = None
        self._make: Callable[..., torch.nn.Module] | None = None  # a function, until it is called
        if isinstance(make, torch.nn.Module):
            self._template = _template_of(make)
        else:
            self._make = make
        self._current: ModelVersion | None = None
        self._closed = False
        self._failed_on: _FileState | None = None
        self._failures, self._next_try = 0, 0.0
        self._what = path

    @property
    def current(self) -> ModelVersion:
        """The version that serves.

        Raises:
            StorageError: the model is closed, or no version serves yet.
        """
        current = self._current
        if current is None:
            self._check_open()
            raise StorageError(f"no version serves yet: {self.error}") from self.error
        return current

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("the model is closed; serve it again")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._follower is not None:
            self._check_follower()
        return self.current(*args, **kwargs)

    def refresh(self, *, older: bool = False) -> bool:
        """Serve the checkpoint if it has been replaced since; returns whether another version serves now. Calls go on
        meanwhile. A refresh waits for that of another thread: one version is loaded at a time.

        Args:
            older: whether the version may have an older snapshot than the one that serves.

        Raises:
            FileNotFoundError, OSError: the checkpoint is missing or cannot be read.
            ValueError: it is damaged, or does not fit the module.
            StorageError: a snapshot that it names is missing, damaged, of another run or, without `older`, older.
            Any error of `make` and `check`. After an error, the version before still serves, and `error` is the error.
        """
        before = self._current
        with self._own_turn():
            self._load_newer(lambda: False, older=older)
        return self._current is not before

    def _refresh(self, stop: Callable[[], bool]) -> None:
        """Work of the follower: a checkpoint that has failed is tried more and more rarely. While another thread
        refreshes, the follower does nothing, so that `unfollow` does not wait for that thread."""
        turn = self._own_turn()
        if turn.acquire(blocking=False):
            try:
                self._refresh_in_turn(stop)
            finally:
                turn.release()

    def _refresh_in_turn(self, stop: Callable[[], bool]) -> None:
        follower = self._follower
        failed = self._failed_on
        if failed is not None and time.monotonic() < self._next_try and _state_at(self._path) == failed:
            return
        super()._refresh(stop)
        if self.error is not None:
            seconds = 1.0 if follower is None else follower.seconds
            wait = min(seconds * 2.0 ** min(self._failures - 1, 20), max(seconds, _RETRY_S_MAX))
            self._next_try = time.monotonic() + wait

    def _load_newer(self, stop: Callable[[], bool], *, older: bool = False) -> bool:
        """Serve the checkpoint if it has been replaced since. The caller has the turn."""
        now, found = self._current, _state_at(self._path)
        self._check_open()
        try:
            if now is not None and now.file == found:
                self._failed_on, self.error = None, None
                return False
            newer = self._load(stop)
            with self._own_lock():
                if newer is None or stop():
                    return False
                self._check_open()
                if self._current is not now:  # A signal handler has refreshed meanwhile.
                    return False
                if now is not None and not older:
                    self._check_not_older(newer, now)
                self._current, self.error, self._failed_on = newer, None, None  # Calls read `_current` once.
        except Exception as error:
            if not self._closed:
                self._failures = self._failures + 1 if found == self._failed_on else 1
                self._failed_on, self.error = found, error
                self._tell()
            raise
        _log.info("%s: serves %s", self._path, ", ".join(map(str, newer.snapshots.values())))
        self._tell()
        return True

    def _check_not_older(self, newer: ModelVersion, now: ModelVersion) -> None:
        assert self._template is not None
        for name, place in self._template.places.items():
            version, served = newer.snapshots[name], now.snapshots[name]
            if version.sequence < served.sequence and not is_gone(place.paths, served):
                raise StorageError(
                    f"{self._path} names {version}, older than {served}, which serves; refresh(older=True) takes it"
                )

    def _tell(self) -> None:
        if self._on_change is not None:
            try:
                self._on_change(self)
            except Exception:  # Of the user's function: the version serves all the same.
                _log.exception("%s: on_change raised an error", self._path)

    def _load(self, stop: Callable[[], bool]) -> ModelVersion | None:
        """The version of the checkpoint; None if `stop` returned True."""
        while True:
            with open(self._path, "rb") as file:
                state, found = (
                    os.fstat(file.fileno()),
                    load_bytes(file, self._path, problem="is not a checkpoint, or is damaged"),
                )
            try:
                return self._version_of(found, state, stop)
            except (StorageError, ValueError):
                # The job may have replaced the checkpoint meanwhile, and deleted its snapshots.
                if _state_at(self._path) in (None, _file_state(state)):
                    raise

    def _version_of(self, checkpoint: Any, state: os.stat_result, stop: Callable[[], bool]) -> ModelVersion | None:
        template = self._template
        if template is None:
            make = self._make
            assert make is not None
            with taking_no_folder(_NO_ROWS):  # The job may be training the embeddings, in this process or another.
                made = make(checkpoint) if _takes_one(make) else make()
            template = self._template = _template_of(made)
        weights = weights_for(template.module, template.places, checkpoint, self._prefix, self._path)
        rows: dict[torch.nn.Module, InferenceEmbedding] = {}
        snapshots: dict[str, Version] = {}
        for name, place in template.places.items():
            served = self._rows(place, weights.snapshots[name], name, stop)
            if served is None:
                return None
            rows[place], snapshots[name] = served, served.version
        module = frozen_copy(template.module, rows)
        set_weights(module, weights, self._path)
        version = ModelVersion(module, snapshots, state.st_mtime, _file_state(state))
        if self._check is not None:
            self._check(version)
        return version

    def _rows(
        self, place: _Place, snapshot: SnapshotName, name: str, stop: Callable[[], bool]
    ) -> InferenceEmbedding | None:
        """Rows of one embedding of the checkpoint; None if `stop` returned True."""
        wanted, identity = snapshot["oneemb_snapshot"], snapshot.get("oneemb_identity")
        if wanted is None:
            raise StorageError(f"{self._path} was saved before embedding {name!r} had a row; train it, and save again")
        # Of the files in a folder, the oldest are removed: each embedding has a folder of its own.
        folder = None if self._folder is None else os.path.join(self._folder, name)
        source = source_of(place.paths, folder, self._dtype, None)
        try:
            file = open_snapshot(source, wanted, threads=self._threads, stop=stop)
        except StorageError as error:
            raise type(error)(
                f"{self._path} names snapshot {wanted!r} for embedding {name!r}, which cannot be served from"
                f" {', '.join(place.paths)}: {error}"
            ) from error
        if file is None:
            return None
        info = file.info
        if identity is not None and info.identity != identity:
            raise OtherSnapshotError(
                f"{self._path} names snapshot {wanted!r} with identity {identity}, the one in {place.paths[0]} has"
                f" {info.identity}: it was replaced, or is of another run"
            )
        if (info.dim, info.num_tables) != (place.dim, place.num_tables):
            raise ValueError(
                f"embedding {name!r} must have the width and tables of snapshot {wanted!r}, {info.num_tables} tables of"
                f" {info.dim} weights, but the module has {place.num_tables} tables of {place.dim}"
            )
        return InferenceEmbedding(file, None, self._absent, self._threads)

    def close(self) -> None:
        """Stop following, and release the module and its files. Calls that run end as they would have."""
        with self._own_lock():
            self._closed, self._current, self._template, self.error = True, None, None, None
        self.unfollow()


def serve_model(
    path: AnyPath,
    model: torch.nn.Module | Callable[..., torch.nn.Module],
    *,
    dtype: _Dtype | torch.dtype = "float32",
    prefix: str | None = None,
    absent: Literal["initial", "zeros"] = "initial",
    folder: AnyPath | None = None,
    num_threads: int | None = None,
    check: Callable[[ModelVersion], Any] | None = None,
    on_change: Callable[[ServedModel], Any] | None = None,
    missing_ok: bool = False,
) -> ServedModel:
    """A model with the dense weights of a checkpoint and the rows of the snapshots that the checkpoint names, read-only
    and beside the training job.

    Args:
        path: the checkpoint: a file of `graph.save`, of `torch.save(module.state_dict(), path)`, of Lightning, or of a
            dict that holds a state dict. The job replaces the file by renaming.
        model: the module, or a function that makes it as training does, with `MultiTableEmbedding` of the same
            `persistent_path`. The function is called once; if it takes an argument, that is the content of the
            checkpoint. It may make the module on the meta device. The module is copied, its embeddings are replaced by
            served rows in the copy, and no lock of the job is taken. Its parameters, buffers and embeddings must be in
            the checkpoint, which may have more; names of torch's wrappers there, such as `_orig_mod` of
            `torch.compile`, do not matter. An `EvalGraph` serves its `build`.
        dtype: dtype of the served rows; "float32" = the weights as trained, with the bits of the module in eval mode.
        prefix: name of the module in the checkpoint, such as "model" for a graph with `self.model`, or "" for none;
            None = the only name that fits.
        absent: values of an id without a row: "initial" = its initial row in training, or "zeros".
        folder: folder for served files; None = `serving` in the path of each embedding.
        num_threads: number of threads of a lookup; None = number of cores. Dense modules use torch's own number.
        check: called with each version before it serves, for example to score an example; its error refuses the
            version.
        on_change: called with the `ServedModel` after each version taken and each failed attempt, for example to count
            them; `error` is None after a version taken. It must not raise.
        missing_ok: whether a checkpoint that cannot be served yet is no error: `error` says why, and calls raise
            `StorageError` until `refresh` or `follow` has taken one.

    Returns:
        A `ServedModel`: `model(...)`, `follow(seconds)`, `refresh()`, `current`, `error`, `close()`.

    Raises:
        TypeError: `model` is neither a module nor a function, is a `TrainGraph`, has no embedding, or has a tensor on
            the meta device that is in no state dict.
        StorageError: the function trains, loads or inserts rows; or as for `ServedModel.refresh`.
        FileNotFoundError, OSError, ValueError: as for `ServedModel.refresh`.

    Example:
        >>> import tempfile, torch, oneemb
        >>> folder = tempfile.mkdtemp()
        >>> def make():
        ...     rows = oneemb.MultiTableEmbedding(
        ...         "items", 4, torch.float32, torch.int64, [oneemb.make_table()],
        ...         oneemb.make_device_mem_store_options(folder + "/items"))
        ...     return torch.nn.Sequential(rows, torch.nn.Linear(4, 1))
        >>> trained = make()
        >>> scores = trained(torch.tensor([7, 9]))
        >>> torch.save(trained.state_dict(), folder + "/model.pt")
        >>> with oneemb.serve_model(folder + "/model.pt", make) as model:
        ...     torch.equal(model(torch.tensor([7, 9])), scores)
        True
    """
    served_dtype = check_formats(dtype, absent)
    if not callable(model):
        raise TypeError(f"model must be a module, or a function that makes it, got {type(model).__name__}")
    if is_url(path):
        raise ValueError(
            f"path must be that of a file on this machine, got the URL {path!r}; serve the rows by"
            f" InferenceEmbedding.open('{path}.rows/<embedding>', folder=...), which follows them"
        )
    path, folder = file_path(path, "the checkpoint"), None if folder is None else served_folder(folder)
    served = ServedModel(
        os.path.abspath(path), model, prefix, served_dtype, absent, folder, Threads(num_threads), check, on_change
    )
    try:
        served.refresh()
    except Exception as error:
        if not missing_ok or isinstance(error, TypeError):
            raise
    return served


# ---- the module ------------------------------------------------------------------------------------------------------


def _template_of(module: torch.nn.Module) -> _Template:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"the function must return a module, got {type(module).__name__}")
    if isinstance(module, CompiledGraph) and not isinstance(module, EvalGraph):
        raise TypeError(
            f"{type(module).__name__} is a graph that trains; give the module that scores, which the checkpoint has"
            " under its name in the graph, or an EvalGraph"
        )
    embeddings = named_embeddings(module)
    if not embeddings:
        raise TypeError(f"{type(module).__name__} has no oneemb embedding, so no snapshot belongs to its checkpoint")
    stands_for: dict[torch.nn.Module, torch.nn.Module] = {
        one: _Place(list(one.store_options.persistent_path), one.embedding_dim, one.num_tables)
        for one in embeddings.values()
    }
    copied = frozen_copy(module, stands_for, fills=True)  # without torch's wrappers, and without their names
    _check_filled(copied)
    return _Template(copied, {name: one for name, one in copied.named_modules() if isinstance(one, _Place)})


def _check_filled(module: torch.nn.Module) -> None:
    """Raise TypeError if a tensor that no checkpoint holds is on the meta device."""
    for name, part in module.named_modules():
        for own, tensor in {**dict(part.named_buffers(recurse=False)), **vars(part)}.items():
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                raise TypeError(
                    f"{f'{name}.{own}'.lstrip('.')} is on the meta device, and no checkpoint holds it, since it is"
                    " neither a parameter nor a persistent buffer; make the module on the CPU"
                )


def _takes_one(make: Callable[..., torch.nn.Module]) -> bool:
    """Whether a function must be given one argument."""
    parameters = inspect.signature(make).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in positional and one.default is one.empty for one in parameters)


def _file_state(found: os.stat_result) -> _FileState:
    return found.st_ino, found.st_mtime_ns, found.st_size


def _state_at(path: str) -> _FileState | None:
    """State of the file at `path`; None = there is none."""
    try:
        return _file_state(os.stat(path))
    except OSError:
        return None
