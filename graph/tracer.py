"""Records what a `build` method does, as a torch.fx graph.

A module that holds no embedding is a leaf: its code may be any Python. Modules that hold one, and `build` itself, are
traced through. What plain fx tracing would run once, while tracing, and then forget is recorded here (functions of no
traced value, such as `torch.rand` and `no_grad` blocks) or refused with the line (autocast, gradient clipping).
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from unittest import mock

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from oneemb.storage.embedding_store import EmbeddingStore

__all__ = ["BuildError", "LookupModule", "embeddings_in", "trace_build"]


class BuildError(RuntimeError):
    """`build` does something that cannot be part of a graph. The message says what, where, and what works."""


class LookupModule(Protocol):
    """What the compiler reads of an embedding module."""

    name: str
    store: EmbeddingStore
    weight: torch.nn.Parameter
    num_tables: int
    key_type: torch.dtype
    padding_idx: int | None
    training: bool


def embeddings_in(module: torch.nn.Module) -> dict[str, Any]:
    """The embedding modules below a module, by qualified name, each once."""
    return {name: one for name, one in module.named_modules() if _is_embedding(one)}


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module.__dict__.get("store"), EmbeddingStore)


def trace_build(root: torch.nn.Module) -> fx.Graph:
    """The graph of `root.build`: embedding lookups and leaf modules as calls of modules.

    Raises:
        BuildError: `build` branches on the value of a tensor, or uses something that tracing would lose.
    """
    tracer = _Tracer()
    try:
        with _refuse_what_would_be_lost(), _RecordFunctions(tracer):
            return tracer.trace(root)
    except BuildError:
        raise
    except (fx.proxy.TraceError, TypeError) as error:
        if isinstance(error, TypeError) and "Proxy" not in str(error):
            raise
        raise BuildError(
            f"build cannot be traced{_user_line(error)}: {error}. What it does must not depend on values of tensors:"
            " use torch.where or a mask in place of if, or move the code into a module of its own that holds no"
            " embedding"
        ) from error


class _Tracer(fx.Tracer):
    traced_func_name = "build"

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return _is_embedding(m) or not embeddings_in(m)


# Questions about a real tensor whose answers are plain values: they are asked, not recorded.
_QUESTIONS = frozenset({"__get__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__len__"})


class _RecordFunctions(TorchFunctionMode):
    """Records torch functions that no traced value goes into, in place of running them once while tracing."""

    def __init__(self, tracer: fx.Tracer):
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves) or getattr(func, "__name__", "") in _QUESTIONS:
            return func(*args, **kwargs)
        if not hasattr(self.tracer, "graph"):
            return func(*args, **kwargs)
        return self.tracer.create_proxy("call_function", func, args, kwargs)


@contextmanager
def _refuse_what_would_be_lost() -> Iterator[None]:
    def refuse(what: str, instead: str) -> Any:
        def raise_error(*args: Any, **kwargs: Any) -> Any:
            raise BuildError(f"{what} in build would be lost by tracing{_user_line()}; {instead}")

        return raise_error

    autocast = refuse("torch.autocast", "put it inside a module that holds no embedding, around its forward")
    clip = refuse("gradient clipping", "it is not part of a TrainGraph; train eagerly with oneemb.Optimizer to clip")
    with (
        mock.patch.object(torch.amp.autocast_mode.autocast, "__enter__", autocast),
        mock.patch.object(torch.nn.utils.clip_grad, "_get_total_norm", clip),
        mock.patch.object(torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype", clip),
    ):
        yield


def _user_line(error: BaseException | None = None) -> str:
    """ " at file:line: code" of the innermost frame that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else traceback.extract_stack()
    for frame in reversed(frames):
        theirs = f"{torch.__path__[0]}", __file__, mock.__file__
        if not frame.filename.startswith(theirs) and "<" not in frame.filename and "contextlib" not in frame.filename:
            return f" at {frame.filename}:{frame.lineno}: {frame.line}"
    return ""
