"""Makes an inference program from a graph: a trace of `build`, with frozen rows in place of embeddings.

Invariants:
- an export changes nothing of the graph, its modules and embeddings, since it traces a copy;
- the file at the path is always complete: the new one, or the one before it;
- a program that would work for only one batch size is an error.
"""

import functools
import inspect
import io
import json
import os
import re
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import oneemb
from oneemb.embeddings.embedding import TableEmbedding, embeddings_of
from oneemb.graph.build_error import BuildError
from oneemb.kernels.threads import Threads
from oneemb.serving.build import DTYPES, find_snapshot, make_file
from oneemb.serving.frozen_embedding import FrozenEmbedding
from oneemb.serving.frozen_modules import frozen_copy
from oneemb.serving.frozen_op import HashedRows
from oneemb.serving.frozen_rows import FrozenRows
from oneemb.storage.bottom import EXPORTED
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path, doing, file_path, storage_error
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.step_lock import between_steps
from oneemb.storage.new_files import begin, remove_unfinished, replace_file
from oneemb.storage.serving.served_file import ServedFile
from oneemb.storage.snapshots.snapshot_looks import SnapshotLooks
from oneemb.storage.snapshots.snapshot_parts import PartedSnapshot
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows
from oneemb.training.scaling import scalers_of, set_apart

FORMATS = ("export", "aot_inductor", "torchscript")
METADATA = "oneemb.json"
"""Name of a program's description: an extra file for torch.export and TorchScript, a metadata entry for AOTInductor."""

_DIGITS = 8  # digits in the name of a temporary folder

_Alone = Callable[[Callable[[], Any]], Any]


class _Options(NamedTuple):
    format: str
    dtype: str
    lookup: str
    absent: str
    snapshot: str | None


def export_graph(
    graph: torch.nn.Module,
    build: Callable[..., Any],
    path: AnyPath,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    *,
    format: str,
    dtype: str,
    lookup: str,
    absent: str,
    snapshot: str | None,
    dynamic_shapes: Any,
) -> None:
    """Implementation of `CompiledGraph.export`, which documents the arguments."""
    options = _Options(format, dtype, lookup, absent, snapshot)
    _check_options(options)
    path = absolute_path(file_path(path, "the file to write"))
    if os.path.isdir(path):
        raise IsADirectoryError(f"path must be a file, got the folder {path}; give the path of the file to write in it")
    if not os.path.isdir(os.path.dirname(path)):
        raise FileNotFoundError(
            f"the folder of path must exist, {os.path.dirname(path)} is not a folder; make it first"
        )
    if not isinstance(kwargs, Mapping | None) or not isinstance(snapshot, str | None):
        name, value = ("snapshot", snapshot) if isinstance(kwargs, Mapping | None) else ("kwargs", kwargs)
        needed = "the name of a snapshot" if name == "snapshot" else "a dict of build's arguments by name"
        raise TypeError(f"{name} must be {needed}, or None, got {type(value).__name__} {value!r:.100}")
    given = dict(kwargs or {})
    _check_places(graph, args, given)
    if dynamic_shapes is None:
        _check_batch(args, given)
    locks = [embedding.store.step_lock for embedding in embeddings_of(graph).values()]
    alone = functools.partial(between_steps, locks, "export")
    _export(graph, build, path, args, given, options, dynamic_shapes, alone)


def _check_options(options: _Options) -> None:
    for name, value, allowed in (
        ("format", options.format, FORMATS), ("dtype", options.dtype, DTYPES),
        ("lookup", options.lookup, ("aten", "op")), ("absent", options.absent, ("initial", "zeros")),
    ):  # fmt: skip
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    if options.lookup == "op" and options.format == "aot_inductor":
        raise ValueError('an AOTInductor package runs without Python, where the op is not; export with lookup="aten"')


def _check_places(graph: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    own = [(f"{name} of the graph", one) for name, one in (*graph.named_parameters(), *graph.named_buffers())]
    given = [(f"input {n}", one) for n, one in enumerate(pytree.tree_leaves((args, kwargs)))]
    for what, one in (*own, *given):
        if isinstance(one, torch.Tensor) and one.device.type != "cpu" and one.numel():
            raise ValueError(
                f"{what} must be on the CPU, where programs run, got {one.device}; call .cpu() on the graph and inputs"
            )


def _check_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for n, one in enumerate(pytree.tree_leaves((args, kwargs))):
        if isinstance(one, torch.Tensor) and one.dim() and one.shape[0] < 2:
            raise ValueError(
                f"the example batch must have 2 examples or more, so that their number stays free: input {n} has shape"
                f" {list(one.shape)}; give more, or dynamic_shapes= if its first dimension is fixed"
            )


def _export(
    graph: torch.nn.Module, build: Callable[..., Any], path: str, args: tuple[Any, ...], kwargs: dict[str, Any],
    options: _Options, dynamic_shapes: Any, alone: _Alone,
) -> None:  # fmt: skip
    """Write the file. `alone` calls a function while no step runs."""
    copies, apart, fs = ExitStack(), ExitStack(), LocalFileSystem()
    with doing("write", path):
        work, lock = work_folder(fs, path)
    try:
        described: dict[str, Any] = {
            "oneemb": oneemb.__version__, "graph": type(graph).__name__, "steps": None,
            "format": options.format, "dtype": options.dtype, "lookup": options.lookup, "absent": options.absent,
            "embeddings": {},
        }  # fmt: skip
        embeddings = embeddings_of(graph)
        stands_for: dict[torch.nn.Module, FrozenEmbedding] = {
            one: FrozenEmbedding(one, one.dtype) for one in embeddings.values()
        }

        def copied() -> tuple[list[PartedSnapshot], torch.nn.Module]:
            described["steps"] = getattr(graph, "steps", None)
            snapshots = [copies.enter_context(_snapshot_of(one, options.snapshot)) for one in embeddings.values()]
            copy = frozen_copy(graph, stands_for)
            for scaler in dict.fromkeys(scalers_of(build)):  # Scalers that are attributes are copied with the graph.
                apart.callback(set_apart(scaler))
            return snapshots, copy

        snapshots, copy = alone(copied)
        for found, (name, embedding) in zip(snapshots, embeddings.items(), strict=True):
            stands_for[embedding].lookup, described["embeddings"][name] = _frozen(embedding, found, work, options)
        copies.close()
        program = _Program(copy, functools.partial(_build_of(build, graph), copy), build)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", category=FutureWarning)  # torch warns of its own calls
            warnings.filterwarnings("ignore", "The tensor attribute", UserWarning)  # of the traced copy
            content = _made(program, args, kwargs, options, dynamic_shapes, json.dumps(described), alone)
        alone(apart.close)
        replace_file(fs, path, content.getbuffer(), os.path.join(work, "program.pt2"))
    except OSError as error:
        raise storage_error(error, "write", path) from error
    finally:
        with signals_deferred:
            copies.close()
            apart.close()
            shutil.rmtree(work, ignore_errors=True)
            fs.unlock(lock)


def work_folder(fs: FileSystem, path: str) -> tuple[str, int]:
    """Make a new folder beside the file, and lock it; returns its path and the lock. Folders that killed exports of the
    same file have left are removed."""
    folder, name = os.path.split(path)
    remove_unfinished(fs, folder, rf"\.{re.escape(name)}", _DIGITS, shutil.rmtree)
    return begin(fs, os.path.join(folder, f".{name}"), _DIGITS, os.mkdir)


# ---- rows -----------------------------------------------------------------------------------------------------------


def _frozen(
    embedding: TableEmbedding, found: PartedSnapshot, work: str, options: _Options
) -> tuple[FrozenRows | HashedRows, dict[str, Any]]:
    """Rows of an embedding in a snapshot, as a module, and the description of the embedding for the program."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        threads, file_path = Threads(torch.get_num_threads()), os.path.join(folder, "rows")
        make_file(file_path, found, options.dtype, None, threads=threads)
        file = ServedFile(file_path, threads=threads)
        info, absent = file.info, options.absent
        if info.num_tables > embedding.num_tables or info.dim != embedding.embedding_dim:
            raise ValueError(
                f"snapshot {found.name!r} must have the tables and width of embedding {embedding.name!r},"
                f" {embedding.num_tables} tables of {embedding.embedding_dim} weights, got {info.num_tables} tables of"
                f" {info.dim}"
            )
        if options.lookup == "op":
            rows: FrozenRows | HashedRows = HashedRows(file, absent, embedding.policies)
        else:
            rows = FrozenRows.of_file(file, absent=absent, policies=embedding.policies)
        temporary = found.name.startswith(EXPORTED)
        description = {
            "name": embedding.name, "snapshot": None if temporary else found.name,
            "identity": None if temporary else info.identity,
            "step": SnapshotRows.of_meta(found.info.meta, found.name).step, "rows": info.rows,
            "error_max": info.error_max, "error_rms": info.error_rms,
        }  # fmt: skip
        return rows, description


@contextmanager
def _snapshot_of(embedding: TableEmbedding, name: str | None) -> Iterator[PartedSnapshot]:
    """Context of the snapshot to export. Without a name it is the newest if that holds the current rows, else a
    temporary one that is deleted afterwards."""
    looks = SnapshotLooks(embedding.store_options.persistent_path)
    if name is not None:
        yield find_snapshot(looks, name)
        return
    if embedding.snapshots():
        newest = find_snapshot(looks, None)
        if embedding.holds({"oneemb_snapshot": newest.name, "oneemb_identity": newest.identity}):
            yield newest
            return
    if not embedding.ranks.alone:
        raise ValueError(
            f"embedding {embedding.name!r} has its rows on {embedding.ranks.size} ranks, so they must be in a snapshot;"
            " save one on all ranks, and export it with snapshot="
        )
    store, own = embedding.store, f"{EXPORTED}{uuid.uuid4().hex[:8]}"
    try:
        store.snapshots.save(own, embedding.description())
        yield find_snapshot(looks, own)
    finally:
        with signals_deferred:
            if own in store.snapshots.names():
                store.snapshots.delete(own)


# ---- programs -------------------------------------------------------------------------------------------------------


def _build_of(build: Callable[..., Any], graph: torch.nn.Module) -> Callable[..., Any]:
    """`build`, a method of the graph, as a function whose first argument is the graph."""
    function = getattr(build, "__func__", None)
    if function is None or getattr(build, "__self__", None) is not graph:
        raise ValueError(f"build of {type(graph).__name__} must be a method of it, got {build!r}")
    return function


class _WithoutBackward(TorchFunctionMode):
    """Context in which `Tensor.backward` does nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return None if func is torch.Tensor.backward else func(*args, **(kwargs or {}))


class _Program(torch.nn.Module):
    """Module that is traced. Its call is `build(graph, ...)`, with the signature of `signature_of`."""

    def __init__(self, graph: torch.nn.Module, build: Callable[..., Any], signature_of: Callable[..., Any]):
        super().__init__()
        self.model = graph  # torch.fx uses the name "graph" itself
        self.eval()

        @functools.wraps(signature_of)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with _WithoutBackward():
                return build(*args, **kwargs)

        self.forward = forward


def _made(
    program: _Program, args: tuple[Any, ...], kwargs: dict[str, Any], options: _Options, dynamic_shapes: Any,
    described: str, alone: _Alone,
) -> io.BytesIO:  # fmt: skip
    """Content of the file. It is made in memory, since torch's own writer ends the process when the disk is full."""
    # Also for TorchScript: only torch.export refuses a `build` that depends on values.
    exported = _exported(program, args, kwargs, dynamic_shapes)
    content = io.BytesIO()
    try:
        if options.format == "export":
            torch.export.save(exported, content, extra_files={METADATA: described})
        elif options.format == "aot_inductor":
            from torch._inductor import aoti_compile_and_package, config

            configs: dict[str, Any] = {"aot_inductor.metadata": {METADATA: described}}
            if hasattr(config.aot_inductor, "check_lowerbound"):
                # Otherwise a package that runs with AOTI_RUNTIME_CHECK_INPUTS=1 refuses a batch of one example.
                configs["aot_inductor.check_lowerbound"] = False
            aoti_compile_and_package(exported, package_path=content, inductor_configs=configs)
        else:
            script = functools.partial(_scripted, program, args, kwargs)

            def with_generator_kept() -> torch.jit.ScriptModule:
                with torch.random.fork_rng(devices=[]):
                    return script()

            # A trace computes, and may draw from the process's generator: steps wait until its state is restored.
            traced = alone(with_generator_kept) if _may_draw(exported) else script()
            torch.jit.save(traced, content, _extra_files={METADATA: described})
    except (OSError, ValueError, MemoryError, BuildError):
        raise
    except Exception as error:
        raise BuildError(f"build cannot be exported: {_why(error)}") from error
    return content


def _exported(
    program: _Program, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    if dynamic_shapes is None:
        dynamic_shapes = torch.export.ShapesCollection()
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                dynamic_shapes[tensor] = {0: torch.export.Dim.DYNAMIC}
    try:
        exported = torch.export.export(
            program, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )  # fmt: skip
    except (KeyboardInterrupt, BuildError):
        raise
    except Exception as error:
        raise BuildError(f"build cannot be exported: {_why(error)}") from error
    for module in program.modules():
        if isinstance(module, FrozenEmbedding):
            module.free_sizes.take_back(exported)
    for given in exported.graph_signature.output_specs:
        value = getattr(given.arg, "value", None)
        if not isinstance(value, bool | int | float | None):  # torch saves such a program but cannot load it.
            raise BuildError(f"build cannot be exported: it returns {value!r}; a program returns tensors and numbers")
    return exported


def _why(error: Exception) -> str:
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if "DataDependent" in type(error).__name__ or "data-dependent" in text.lower():
        return (
            f"it branches on values, or takes shapes from them, which a program cannot: {first}; use torch.where, or"
            " leave that part to the caller"
        )
    if "static shape" in text or "Constraints violated" in text:
        return (
            f"it fixes the number of examples, as len(...), int(...) or a comparison with a number do: {text.strip()};"
            " or pass dynamic_shapes= for inputs whose first dimension is fixed"
        )
    return f"{type(error).__name__}: {first}"


def _may_draw(exported: torch.export.ExportedProgram) -> bool:
    """Whether a program may draw random numbers."""
    graphs = [one for one in exported.graph_module.modules() if isinstance(one, torch.fx.GraphModule)]
    targets = [node.target for one in graphs for node in one.graph.nodes if node.op == "call_function"]
    return any(torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) for target in targets)


def _scripted(program: _Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.jit.ScriptModule:
    bound = inspect.signature(program.forward).bind(*args, **kwargs)
    if bound.kwargs:
        raise ValueError(
            f"inputs of a TorchScript program must be given by position, but {list(bound.kwargs)} of build can only be"
            " named"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in program.modules():
            if isinstance(module, FrozenEmbedding):
                module.lookup = torch.jit.script(module.lookup)
        script = torch.jit.trace(program, bound.args, check_trace=False, strict=False)
    # torch.export has refused branches on shapes, but a number made of a shape is fixed only by this trace.
    ours = os.path.dirname(os.path.abspath(oneemb.__file__))
    fixed = [one for one in caught if issubclass(one.category, torch.jit.TracerWarning)]
    fixed = [one for one in fixed if "Python boolean" not in str(one.message) and not one.filename.startswith(ours)]
    if fixed:
        raise BuildError(
            f"build cannot be traced for TorchScript: at {fixed[0].filename}:{fixed[0].lineno} it makes a number of a"
            ' tensor or its shape, which a trace would fix; use tensor ops, or format="export"'
        )
    return script
