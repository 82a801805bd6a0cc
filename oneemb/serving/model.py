"""A whole model served: dense weights of a checkpoint, and rows of the snapshots that the checkpoint names.

Invariants:
- weights and rows of a model version are of one checkpoint; it never changes, and a call uses one model version;
- calls never wait for a newer version: it is loaded beside the version that serves, and takes its place at once;
- a checkpoint that is missing, damaged, older or that does not fit leaves the version that serves.
"""

import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from oneemb.checkpoints.named_snapshot import SnapshotName
from oneemb.checkpoints.state_names import named_embeddings
from oneemb.embeddings.unsaved_rows import taking_no_folder
from oneemb.kernels.threads import Threads
from oneemb.serving.beside import WholeFiles
from oneemb.serving.build import Source, Version, check_formats, open_snapshot
from oneemb.serving.checkpoint_source import Checkpoint, CheckpointSource, State, checkpoint_source
from oneemb.serving.following import Following
from oneemb.serving.frozen_modules import frozen_copy
from oneemb.serving.inference import InferenceEmbedding
from oneemb.serving.weights import set_weights, weights_for
from oneemb.storage.errors import OtherSnapshotError, StorageError
from oneemb.storage.fs import AnyPath
from oneemb.storage.serving.layered_file import LayeredFile
from oneemb.storage.snapshots.row_cap import RowCap
from oneemb.training.compiled_graph import CompiledGraph, EvalGraph

_RETRY_S_MAX = 60.0  # seconds between two attempts of the follower to load a checkpoint that has failed
_NO_ROWS = (
    "was made for serve_model, which reads its arguments alone, so it has no rows: the function must return the module"
    " without load_state_dict, an optimizer or a lookup in training mode; rows and weights come from the checkpoint"
)
_log = logging.getLogger("oneemb")

_Dtype = Literal["float32", "float16", "int8", "int4"]


@dataclass(frozen=True)
class ModelVersion:
    """A version of a served model: the weights and rows of one checkpoint. A call of it calls the module, in eval mode
    and without gradients."""

    module: torch.nn.Module
    """Copy of the module with the weights of the checkpoint and served rows."""
    snapshots: dict[str, Version]
    """{name of the embedding in the module: its snapshot}."""
    saved_at: float
    """Time at which the checkpoint was written, in seconds since 1970; if the store of a URL does not tell this
    time, the time at which the checkpoint was read."""
    file: State
    """State of the checkpoint's file or object, which changes when the checkpoint is replaced."""
    rows: dict[str, LayeredFile] = field(repr=False)
    """{name of the embedding in the module: open file of its rows}."""

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
    """Copy of the user's module with a place for each embedding, of which each model version is a copy; and the places
    by the names of the embeddings in checkpoints."""

    module: torch.nn.Module
    places: dict[str, _Place]


class ServedModel(Following):
    """A model whose weights and rows are those of a checkpoint, made by `serve_model`. Any thread, and a child of fork,
    may call it.

    A call has the arguments and the result of the module's `forward`, or of `build` of an `EvalGraph`. Each call uses
    one version from beginning to end; `current` gives the version for several calls.
    """

    def __init__(
        self, source: CheckpointSource, make: Callable[..., torch.nn.Module] | torch.nn.Module, prefix: str | None,
        dtype: str, absent: str, threads: Threads, check: Callable[[ModelVersion], Any] | None,
        on_change: Callable[["ServedModel"], Any] | None, max_rows: int | None,
    ):  # fmt: skip
        super().__init__()
        self._source, self._path, self._prefix, self._check = source, source.path, prefix, check
        self._on_change, self._dtype, self._absent, self._threads = on_change, dtype, absent, threads
        self._template: _Template | None = None
        self._make: Callable[..., torch.nn.Module] | None = None  # a function, until it is called
        if isinstance(make, torch.nn.Module):
            self._template = _template_of(make)
        else:
            self._make = make
        self._current: ModelVersion | None = None
        self._closed = False
        self._max_rows, self._caps = max_rows, dict[str, RowCap]()  # {name of the embedding in the module: its cap}
        self._whole_files: dict[str, WholeFiles] = {}
        self._failed_on: State | None = None
        self._failures, self._next_try = 0, 0.0
        self._what = source.path

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
        if failed is not None and time.monotonic() < self._next_try and self._source.state() == failed:
            return
        super()._refresh(stop)
        if self.error is not None:
            seconds = 1.0 if follower is None else follower.seconds
            wait = min(seconds * 2.0 ** min(self._failures - 1, 20), max(seconds, _RETRY_S_MAX))
            self._next_try = time.monotonic() + wait

    def _load_newer(self, stop: Callable[[], bool], *, older: bool = False) -> bool:
        """Serve the checkpoint if it has been replaced since. The caller has the turn."""
        now, found = self._current, self._source.state()
        self._check_open()
        try:
            if now is not None and now.file == found:
                self._failed_on, self.error = None, None
                return False
            newer = self._load(stop, None if older else now)
            with self._own_lock():
                if newer is None or stop():
                    return False
                self._check_open()
                if self._current is not now:  # A signal handler has refreshed meanwhile.
                    return False
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

    def _tell(self) -> None:
        if self._on_change is not None:
            try:
                self._on_change(self)
            except Exception:  # Of the user's function: the version serves all the same.
                _log.exception("%s: on_change raised an error", self._path)

    def _load(self, stop: Callable[[], bool], after: ModelVersion | None) -> ModelVersion | None:
        """Model version of the checkpoint; None if `stop` returned True. StorageError if it is older than `after`."""
        while True:
            checkpoint = self._source.read()
            try:
                return self._version_of(checkpoint, stop, after)
            except (StorageError, ValueError):
                # The job may have replaced the checkpoint meanwhile, and deleted its snapshots.
                if self._source.state() in (None, checkpoint.state):
                    raise

    def _version_of(
        self, checkpoint: Checkpoint, stop: Callable[[], bool], after: ModelVersion | None
    ) -> ModelVersion | None:
        content = checkpoint.content
        template = self._template
        if template is None:
            make = self._make
            assert make is not None
            with taking_no_folder(_NO_ROWS):  # The job may be training the embeddings, in this process or another.
                made = make(content) if _takes_one(make) else make()
            template = self._template = _template_of(made)
        weights = weights_for(template.module, template.places, content, self._prefix, self._path)
        rows: dict[torch.nn.Module, InferenceEmbedding] = {}
        snapshots: dict[str, Version] = {}
        files: dict[str, LayeredFile] = {}
        sources: dict[str, Source] = {}
        now = self._current
        for name, place in template.places.items():
            snapshot, before = weights.snapshots[name], None if after is None else after.snapshots[name]
            source = self._source.rows(content, snapshot, place.paths, name, self._dtype)
            if self._max_rows is not None:
                source = source._replace(cap=self._caps.setdefault(name, RowCap(self._max_rows)))
            file = self._rows(source, place, snapshot, name, stop, before, None if now is None else now.rows[name])
            if file is None:
                return None
            rows[place] = InferenceEmbedding(file, None, self._absent, self._threads)
            snapshots[name], files[name], sources[name] = rows[place].version, file, source
        module = frozen_copy(template.module, rows)
        set_weights(module, weights, self._path)
        version = ModelVersion(module, snapshots, checkpoint.saved_at, checkpoint.state, files)
        if self._check is not None:
            self._check(version)
        for name, source in sources.items():
            self._whole_files.setdefault(name, WholeFiles()).serves(source, snapshots[name], files[name])
        return version

    def _rows(
        self, source: Source, place: _Place, snapshot: SnapshotName, name: str, stop: Callable[[], bool],
        before: Version | None, now: LayeredFile | None,
    ) -> LayeredFile | None:  # fmt: skip
        """Open rows of one embedding of the checkpoint; None if `stop` returned True. StorageError if the snapshot is
        older than `before`, which is still at its source. `now`: the rows that serve, with which the result
        may share memory."""
        wanted, identity = snapshot["oneemb_snapshot"], snapshot.get("oneemb_identity")
        if wanted is None:
            raise StorageError(f"{self._path} was saved before embedding {name!r} had a row; train it, and save again")
        try:
            file = open_snapshot(source, wanted, threads=self._threads, before=now, stop=stop)
        except StorageError as error:
            raise type(error)(
                f"{self._path} names snapshot {wanted!r} for embedding {name!r}, which cannot be served from"
                f" {source.name}: {error}"
            ) from error
        if file is None:
            return None
        info = file.info
        if identity is not None and info.identity != identity:
            raise OtherSnapshotError(
                f"{self._path} names snapshot {wanted!r} with identity {identity}, the one in {source.name} has"
                f" {info.identity}: it was replaced, or is of another run"
            )
        if (info.dim, info.num_tables) != (place.dim, place.num_tables):
            raise ValueError(
                f"embedding {name!r} must have the width and tables of snapshot {wanted!r}, {info.num_tables} tables of"
                f" {info.dim} weights, but the module has {place.num_tables} tables of {place.dim}"
            )
        found = Version(info.name, info.identity, info.sequence)
        if before is not None and found.sequence < before.sequence and not self._source.has_lost(source, before):
            raise StorageError(
                f"{self._path} names {found}, older than {before}, which serves; refresh(older=True) takes it"
            )
        return file

    def _late_call(self, seconds: float) -> str | None:
        return self._source.late_call(seconds)

    def unfollow(self) -> None:
        """Stop following; the current version still serves."""
        super().unfollow()
        for whole_files in self._whole_files.values():
            whole_files.stop()

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
    max_rows: int | None = None,
) -> ServedModel:
    """A model with the dense weights of a checkpoint and the rows of the snapshots that the checkpoint names, read-only
    and beside the training job.

    Args:
        path: the checkpoint: a file of `graph.save`, of `torch.save(module.state_dict(), path)`, of Lightning, or of a
            dict that holds a state dict. The job replaces the file by renaming. Or the URL of a `graph.save(url)`.
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
        folder: folder for served files; None = `serving` in the path of each embedding. With a URL it must be given,
            and has copies of the served snapshots, too.
        num_threads: number of threads of a lookup; None = number of cores. Dense modules use torch's own number.
        check: called with each version before it serves, for example to score an example; its error refuses the
            version.
        on_change: called with the `ServedModel` after each version taken and each failed attempt, for example to count
            them; `error` is None after a version taken. It must not raise.
        missing_ok: whether a checkpoint that cannot be served yet is no error: `error` says why, and calls raise
            `StorageError` until `refresh` or `follow` has taken one.
        max_rows: largest number of served rows of each embedding, of all its tables together; None = all.
            [A cap](../publish.md#a-cap) says which rows stay.

    Returns:
        A `ServedModel`: `model(...)`, `follow(seconds)`, `refresh()`, `current`, `error`, `close()`.

    Raises:
        TypeError: `model` is neither a module nor a function, is a `TrainGraph`, has no embedding, or has a tensor on
            the meta device that is in no state dict.
        StorageError: the function trains, loads or inserts rows; or as for `ServedModel.refresh`.
        FileNotFoundError, OSError, ValueError: as for `ServedModel.refresh`; or `max_rows` is no int of 1 or more.

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
    source = checkpoint_source(path, folder)
    if max_rows is not None:
        RowCap(max_rows)  # raises ValueError
    served = ServedModel(source, model, prefix, served_dtype, absent, Threads(num_threads), check, on_change, max_rows)
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
