"""The error of a `build` that cannot be part of a graph, and the line of the user's code that it names."""

import linecache
import sys
from types import FrameType

__all__ = ["BuildError", "user_line"]


class BuildError(RuntimeError):
    """`build` does something that cannot be part of a graph. The message says what, where, and what works."""


def user_line() -> str:
    """Where this thread is in the user's code, as " at file:line: code"; "" if nowhere.

    It is the innermost frame that is neither torch's nor ours.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    filename, line = frame.f_code.co_filename, frame.f_lineno
    return f" at {filename}:{line}: {linecache.getline(filename, line).strip()}"


def _is_users(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in ("oneemb", "torch", "contextlib") and "<" not in frame.f_code.co_filename
