"""Puts replacements in the place of functions of others while one call runs, and takes them out again.

Invariants:
- one thread at a time has replacements in place; a second one waits;
- other threads are given the originals meanwhile, and so is whoever has kept a replacement for later;
- when `call_replaced` has returned, or raised at whatever line, every original is back.
"""

import builtins
import contextlib
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Here", "call_replaced"]

_ONE_AT_A_TIME = threading.RLock()
_ABSENT = object()

Place = tuple[Any, Any]
"""An object and its attribute, a dict and its key, or a cell and None."""
Replacements = Sequence[tuple[Any, Any, Any]]
"""A place, and what stands there."""


class Here:
    """True on the thread that made it, until it ends."""

    def __init__(self) -> None:
        self._thread: int | None = threading.get_ident()

    def __bool__(self) -> bool:
        return self._thread == threading.get_ident()

    def end(self) -> None:
        """From now on it is true nowhere."""
        self._thread = None


def call_replaced(here: Here, replacements: Callable[[], Replacements], function: Callable[[], Any]) -> Any:
    """What `function` gives, with replacements in place.

    Args:
        here: which thread they are for, and how long.
        replacements: gives (object, dict or cell; attribute, key or None; what takes its place). Functions are
            replaced for `here` alone; other values are replaced for all threads. It is called while no other thread
            has replacements in place, so what it finds are originals.
    """
    # What ends each of the nested calls is ended by the one around it again, and cannot hurt twice: an interrupt may
    # have come while the inner one did it.
    try:
        return _in_turn(here, replacements, function)
    finally:
        _end_turn()


def _in_turn(here: Here, replacements: Callable[[], Replacements], function: Callable[[], Any]) -> Any:
    try:
        _ONE_AT_A_TIME.acquire()
        made = replacements()
        before = [(owner, name, _read((owner, name))) for owner, name, _ in made]
        modes = torch._C._len_torch_function_stack()
        try:
            return _call(here, made, before, modes, function)
        finally:
            _put_back(here, before, modes)
    finally:
        _end_turn()


def _end_turn() -> None:
    with contextlib.suppress(RuntimeError):  # it is not this thread's turn
        _ONE_AT_A_TIME.release()


def _call(here: Here, made: Replacements, before: Replacements, modes: int, function: Callable[[], Any]) -> Any:
    try:
        for owner, name, replacement in made:
            if callable(replacement):
                replacement = _here_only(here, replacement, _found((owner, name)))
            _write((owner, name), replacement)
        return function()
    finally:
        _put_back(here, before, modes)


def _put_back(here: Here, before: Replacements, modes: int) -> None:
    here.end()
    for owner, name, original in reversed(before):
        _write((owner, name), original)
    while torch._C._len_torch_function_stack() > modes:
        torch._C._pop_torch_function_stack()


def _here_only(here: Here, replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return (replacement if here else original)(*args, **kwargs)

    return run


def _read(place: Place) -> Any:
    """What stands at a place itself, not what it inherits."""
    owner, name = place
    if isinstance(owner, types.CellType):
        return owner.cell_contents
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, _ABSENT)


def _found(place: Place) -> Any:
    """What a place gives: what stands there, or is inherited or built in."""
    owner, name = place
    own = _read(place)
    if own is _ABSENT or not isinstance(owner, dict | types.CellType):
        return getattr(builtins if isinstance(owner, dict) else owner, name)
    return own


def _write(place: Place, value: Any) -> None:
    owner, name = place
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, dict):
        if value is not _ABSENT:
            owner[name] = value
        elif name in owner:
            del owner[name]
    elif value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)
