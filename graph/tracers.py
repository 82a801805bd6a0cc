"""Questions about torch's compiler and tracers: whether a call computes values or is recorded; functions that
torch.compile leaves uncompiled.

Invariant: an answer concerns the tensors of the call and the calling thread. Torch's flags, such as
`torch.compiler.is_exporting`, hold for the whole process: also for threads that train while another thread exports.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import fx

from oneemb.graph.hidden_frames import hide_frames

_tracing_state = torch._C._get_tracing_state
_transform = torch._C._functorch.peek_interpreter_stack
_mode_of, _dispatch_modes = torch._C._get_dispatch_mode, torch._C._len_torch_dispatch_stack
_functions_seen_by, _function_modes = torch._C._get_function_stack_at, torch._C._len_torch_function_stack
_PROXY = torch._C._TorchDispatchModeKey.PROXY
hidden_from_modes = torch._C._DisableTorchDispatch
"""Block in which torch's dispatch modes see no op. Selective activation checkpointing is a mode that counts ops; a
lookup repeated in the backward pass runs other ops than the first lookup, so the mode would mix up their results."""

_STAND_INS = {"FakeTensor", "FunctionalTensor"}
"""Names of the classes of tensors without values that exporters use."""


def tracer_of(*values: object) -> str | None:
    """Name of the tool that records the call on this thread, or that has made tensors of the call without values; None
    = no tool.

    Args:
        values: tensors of the call; None is ignored.
    """
    if _tracing_state() is not None:
        return "torch.jit.trace"
    if _mode_of(_PROXY) is not None or _function_modes() and _is_traced_before_dispatch():
        return "make_fx or torch.export"
    for value in values:
        if type(value) is not torch.Tensor and value is not None:
            if isinstance(value, fx.Proxy):
                return "torch.fx"
            if type(value).__name__ in _STAND_INS:
                return "torch.export"
    return None


def _is_traced_before_dispatch() -> bool:
    """Whether make_fx(pre_dispatch=True) or torch.export traces this thread. The answer is in the stack of function
    modes: torch's own stack of pre-dispatch modes belongs to the process, and its key stays set on a thread that
    compiles meanwhile."""
    modes = (_functions_seen_by(k) for k in range(_function_modes()))
    return any(type(mode).__name__ == "PreDispatchTorchFunctionMode" for mode in modes)


def refuse_tracers(embedding: torch.nn.Module, ids: object) -> bool:
    """Raise RuntimeError if torch records or transforms a lookup: a recording would hold the rows as constants. Returns
    whether there are modes of torch that would see ops of the lookup."""
    plain = type(ids) is torch.Tensor and _tracing_state() is None and _transform() is None
    if plain and not _dispatch_modes() and not _function_modes():
        return False  # Most lookups return here. Every lookup pays for the calls above, so they are few.
    if (tracer := tracer_of(ids)) is not None:
        raise RuntimeError(
            f"ids must have values when {_name_of(embedding)} looks them up, got ids without values from {tracer},"
            " which would record the rows of one batch as constants; put the model in an oneemb.EvalGraph and call"
            " graph.export(path, example_ids), or look ids up outside of the traced function"
        )
    if _transform() is not None:
        raise RuntimeError(
            f"{_name_of(embedding)} must not look ids up inside of a function that torch.func or torch.vmap transforms,"
            " where rows get no gradient and no batch dimension; look ids up outside, and pass the rows to the function"
        )
    return True


def _name_of(embedding: torch.nn.Module) -> str:
    kind, name = type(embedding).__name__, getattr(embedding, "name", None)
    return kind if name is None else f"{kind} {name!r}"


def is_exported_by_compiler() -> bool:
    """Whether the compiler traces the current frame for torch.export. Only a frame that is being traced may call this;
    the compiler treats the answer as a constant."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(InstructionTranslator.current_tx().export)


# As by torch.compiler.assume_constant_result, which would import the compiler; the import takes a second.
vars(is_exported_by_compiler)["_dynamo_marked_constant"] = True


# The callback of torch's compiler for new frames; None outside of compiled code.
_eval_frame = torch._C._dynamo.eval_frame
_compiler_of_frames = _eval_frame.get_eval_frame_callback
_SKIPPED = torch._C._dynamo.eval_frame._FrameExecStrategy(
    torch._C._dynamo.eval_frame._FrameAction.SKIP, torch._C._dynamo.eval_frame._FrameAction.DEFAULT
)

_P = ParamSpec("_P")
_T = TypeVar("_T")


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Do as torch.compiler.disable, but import torch's compiler only where code is compiled, since the import takes a
    second and 100 MB. A call from uncompiled code takes no longer than the function."""
    disabled = torch._disable_dynamo(function)
    is_compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if is_compiling() or _compiler_of_frames() is not None:
            return disabled(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            hide_frames(error)
            raise

    # Keep torch's compiler from frames of `call`: it would compile `call` for each function, up to its limit.
    _eval_frame.set_code_exec_strategy(call.__code__, _SKIPPED)  # type: ignore[attr-defined]
    return call
