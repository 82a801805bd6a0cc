"""Puts replacements in the place of functions of others while one call runs, and takes them out again.

Invariants:
- one thread at a time has replacements in place; a second one waits;
- calls of other threads run the originals meanwhile, and so do those of whoever has kept a replacement for later;
- when `call_replaced` has returned, or raised at whatever line, every original is back;
- a child of fork has the originals, but on the thread that is tracing itself.
"""

import builtins
import os
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from oneemb.storage.turns import undisturbed

__all__ = ["Here", "call_replaced"]

_ONE_AT_A_TIME = threading.RLock()
_ABSENT = object()
# How long a fork waits for what another thread traces, in seconds.
_FORK_PATIENCE = 60.0

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
        _state.here, _state.before = here, before
        try:
            return _call(here, made, before, modes, function)
        finally:
            _put_back(here, before, modes)
    finally:
        _end_turn()


def _end_turn() -> None:
    if _ONE_AT_A_TIME._is_owned():  # type: ignore[attr-defined]
        _ONE_AT_A_TIME.release()


def _call(here: Here, made: Replacements, before: Replacements, modes: int, function: Callable[[], Any]) -> Any:
    try:
        for owner, name, replacement in made:
            # What tells threads apart by itself says so by its `here`.
            if callable(replacement) and getattr(replacement, "here", None) is not here:
                replacement = _here_only(here, replacement, _found((owner, name)))
            _write((owner, name), replacement)
        return function()
    finally:
        _put_back(here, before, modes)


def _put_back(here: Here, before: Replacements, modes: int) -> None:
    here.end()
    for owner, name, original in reversed(before):
        _write((owner, name), original)
    _state.before = []
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


class _State:
    """Whose replacements are in place, and the threads that hold the turn because they fork."""

    def __init__(self) -> None:
        self.here = Here()
        self.before: Replacements = []
        self.forking: set[int] = set()


_state = _State()


# Registered after the hooks of `turns`, so asked before them: who traces may have to begin a block to come to its end.


def _before_fork() -> None:
    undisturbed.hold_signals()
    if _ONE_AT_A_TIME.acquire(timeout=_FORK_PATIENCE):
        _state.forking.add(threading.get_ident())


def _in_parent() -> None:
    _let_go()
    undisturbed.signals_come_later()


def _let_go() -> bool:
    """Whether this thread held the turn because it forks."""
    held = threading.get_ident() in _state.forking
    if held:
        _state.forking.discard(threading.get_ident())
        _ONE_AT_A_TIME.release()
    return held


def _in_child() -> None:
    global _ONE_AT_A_TIME
    held = _let_go()
    _state.forking.clear()
    if held:
        return
    _ONE_AT_A_TIME = threading.RLock()  # The other is of a thread that is not there.
    _state.here.end()
    for owner, name, original in reversed(_state.before):
        _write((owner, name), original)
    _state.before = []


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
