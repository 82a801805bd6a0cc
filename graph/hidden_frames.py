"""Hides the frames of oneemb in the tracebacks that IPython shows, so that the user's own lines stand out.

IPython, and so Jupyter, leaves out frames with a local variable `__tracebackhide__`, and counts them in a line. The
traceback itself stays whole: `%debug` has every frame, and `%config InteractiveTB.skip_hidden` shows all. Outside of
IPython nothing is done.
"""

import inspect
import os
import sys
from collections.abc import Iterator
from types import FrameType

import torch

_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_TORCHS = os.path.join(os.path.dirname(torch.__file__), "")
_PYTHONS = os.path.join(os.path.dirname(os.__file__), "")
_INSTALLED = (os.path.join(_PYTHONS, "site-packages", ""), os.path.join(_PYTHONS, "dist-packages", ""))


def hide_frames(error: BaseException) -> None:
    """Hide, from IPython, the frames of oneemb that the error has passed and those that it will pass, and the frames of
    torch and Python that oneemb calls or that call it."""
    if "IPython" not in sys.modules:
        return
    here = sys._getframe(1)
    for chained in _chain(error):
        ours, trace = True, chained.__traceback__
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            ours = file.startswith(_OURS) or ours and _is_of_a_library(file)
            if ours or file.startswith(_TORCHS):
                _hide(trace.tb_frame)
            trace = trace.tb_next
    above: FrameType | None = here
    ours = True
    while above is not None:
        file = above.f_code.co_filename
        ours = file.startswith(_OURS) or ours and _is_of_a_library(file)
        if ours:
            _hide(above)
        above = above.f_back


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those during whose handling it was raised."""
    seen: set[int] = set()
    chained: BaseException | None = error
    while chained is not None and id(chained) not in seen:
        seen.add(id(chained))
        yield chained
        chained = chained.__cause__ or chained.__context__


def _is_of_a_library(file: str) -> bool:
    return file.startswith(_TORCHS) or file.startswith(_PYTHONS) and not file.startswith(_INSTALLED)


def _hide(frame: FrameType) -> None:
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return  # The variables of a module are no frame's own.
    variables = frame.f_locals
    if isinstance(variables, dict):  # Before Python 3.13 a copy, which would keep the variables' values.
        variables.clear()
    variables["__tracebackhide__"] = True
