"""The error of a `build` that cannot be part of a graph, and the line of the user's code that it names."""

import linecache
import sys
import warnings
from types import FrameType

_NOT_THE_USERS = {"oneemb", "torch", "contextlib", "threading", "concurrent"}
"""Packages and modules whose frames are not the user's code."""


class BuildError(RuntimeError):
    """`build` does something that cannot be part of a graph. The message names the call and its line, and says what
    works."""


def user_line() -> str:
    """Location of the user's code, as " at file:line: code"; "" if there is none."""
    frame = _user_frame()
    if frame is None:
        return ""
    filename = frame.f_code.co_filename
    return f" at {filename}:{frame.f_lineno}: {linecache.getline(filename, frame.f_lineno).strip()}"


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Give a warning at the line of the user's code, also if frames of torch lie between."""
    frame = _user_frame()
    if frame is None:
        warnings.warn(text, category, stacklevel=3)
    else:
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, registry=registry)


def _user_frame() -> FrameType | None:
    """Innermost frame of this thread that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package, filename = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_filename
        if package not in _NOT_THE_USERS and "<" not in filename:
            return frame
        frame = frame.f_back
    return None
