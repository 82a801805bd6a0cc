"""The error of a `build` that cannot be part of a graph, and the line of the user's code that it names."""

import ast
import linecache
import os
import sys
import traceback
from types import FrameType

import torch

__all__ = ["BuildError", "assert_at", "user_frame", "user_line"]

_HERE = os.path.dirname(os.path.abspath(__file__))
_NOT_THE_USERS = (os.path.dirname(torch.__file__), _HERE, os.path.dirname(os.__file__) + "/contextlib")


class BuildError(RuntimeError):
    """`build` does something that cannot be part of a graph. The message says what, where, and what works."""


def user_line(error: BaseException | None = None) -> str:
    """Where the user's code is, as " at file:line: code"; "" if nowhere.

    It is the innermost frame that is neither torch's nor ours: of the traceback of an error, or of this thread now.
    """
    if error is not None:
        for walked, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            if _is_users(walked.f_code.co_filename):
                return _at(walked.f_code.co_filename, line)
        return ""
    frame = user_frame()
    return _at(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def user_frame() -> FrameType | None:
    """The innermost frame of this thread that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def assert_at(frame: FrameType | None) -> str:
    """The text of the assert statement that a frame is at, if it holds only where every value asked for is true.

    "" if the frame is at no assert, or at one with `or`, `not`, a conditional expression or a comprehension.
    """
    if frame is None:
        return ""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and node.lineno <= frame.f_lineno <= (node.end_lineno or 0):
            inside = ast.walk(node.test)
            if any(isinstance(part, ast.Or | ast.Not | ast.IfExp | ast.comprehension) for part in inside):
                return ""
            return f"{ast.unparse(node)}{_at(frame.f_code.co_filename, frame.f_lineno)}"
    return ""


def _is_users(filename: str) -> bool:
    return not filename.startswith(_NOT_THE_USERS) and "<" not in filename


def _at(filename: str, line: int) -> str:
    return f" at {filename}:{line}: {linecache.getline(filename, line).strip()}"
