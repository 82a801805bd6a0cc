"""Functions that torch.compile runs as they are, at no cost to a process that compiles nothing."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

# What torch's compiler has set for the frames that begin, None outside of what it has compiled.
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

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_dynamo_compiling() or _compiler_of_frames() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    # Frames of `call` are no use to torch's compiler: it would compile one for each function, up to its limit.
    _eval_frame.set_code_exec_strategy(call.__code__, _SKIPPED)  # type: ignore[attr-defined]
    return call
