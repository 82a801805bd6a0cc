"""Replaces functions of other packages while one call runs, and restores them.

Invariants:
- one thread at a time has replacements in place; a second one waits;
- meanwhile other threads that call a replacement run the original; a replacement that somebody has kept runs the
  original once the call is over;
- when `call_replaced` has returned, or raised at whatever line, every original is back;
- a child of fork has the originals, unless the thread that forked is the one that has replacements in place.
"""

import builtins
import os
import threading
import types
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from oneemb.storage.turns import undisturbed

__all__ = ["Here", "Replacement", "call_replaced"]

T = TypeVar("T")

_ONE_AT_A_TIME = threading.RLock()
_ABSENT = object()
# How long a fork waits for what another thread traces, in seconds.
_FORK_PATIENCE = 60.0

Replacement = tuple[object, str | None, object]
"""A place, which is an object and its attribute, a dict and its key, or a cell and None; and what stands there."""


class Here:
    """True on the thread that made it, until it ends."""

    def __init__(self) -> None:
        self._thread: int | None = threading.get_ident()

    def __bool__(self) -> bool:
        return self._thread == threading.get_ident()

    def end(self) -> None:
        """From now on it is true nowhere."""
        self._thread = None


def call_replaced(here: Here, replacements: Callable[[], Sequence[Replacement]], function: Callable[[], T]) -> T:
    """What `function` gives, with replacements in place.

    Args:
        here: which thread they are for, and how long.
        replacements: gives places and what is to stand there. Functions are replaced for `here` alone, other values
            for all threads. It is called while no other thread has replacements in place, so it finds originals.
    """
    # Each of the nested calls ends what the one inside it has to end once more, which does no harm: an interrupt may
    # have come while the inner one did it.
    try:
        return _in_turn(here, replacements, function)
    finally:
        _end_turn()


def _in_turn(here: Here, replacements: Callable[[], Sequence[Replacement]], function: Callable[[], T]) -> T:
    try:
        _ONE_AT_A_TIME.acquire()
        made = replacements()
        before: list[Replacement] = [(owner, name, _read(owner, name)) for owner, name, _ in made]
        modes = torch._C._len_torch_function_stack()
        _state.here, _state.before = here, before
        try:
            return _call(here, made, before, modes, function)
        finally:
            _put_back(here, before, modes)
    finally:
        _end_turn()


def _end_turn() -> None:
    if _ONE_AT_A_TIME._is_owned():  # type: ignore[attr-defined]  # it has no public name
        _ONE_AT_A_TIME.release()


def _call(
    here: Here, made: Sequence[Replacement], before: Sequence[Replacement], modes: int, function: Callable[[], T]
) -> T:
    try:
        for owner, name, replacement in made:
            # A replacement that has `here` as an attribute tells threads apart by itself.
            if callable(replacement) and getattr(replacement, "here", None) is not here:
                replacement = _here_only(here, replacement, _found(owner, name))
            _write(owner, name, replacement)
        return function()
    finally:
        _put_back(here, before, modes)


def _put_back(here: Here, before: Sequence[Replacement], modes: int) -> None:
    here.end()
    for owner, name, original in reversed(before):
        _write(owner, name, original)
    _state.before = []
    while torch._C._len_torch_function_stack() > modes:
        torch._C._pop_torch_function_stack()


def _here_only(
    here: Here, replacement: Callable[..., object], original: Callable[..., object]
) -> Callable[..., object]:
    def run(*args: object, **kwargs: object) -> object:
        return (replacement if here else original)(*args, **kwargs)

    return run


def _read(owner: object, name: str | None) -> object:
    """What stands at a place itself, not what it inherits."""
    if isinstance(owner, types.CellType):
        return owner.cell_contents
    assert name is not None
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, _ABSENT)


def _found(owner: object, name: str | None) -> Callable[..., object]:
    """The function that is found at a place: what stands there, or is inherited or built in."""
    found = _read(owner, name)
    if name is not None and (found is _ABSENT or not isinstance(owner, dict)):
        found = getattr(builtins if isinstance(owner, dict) else owner, name)
    assert callable(found)
    return found


def _write(owner: object, name: str | None, value: object) -> None:
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
        return
    assert name is not None
    if isinstance(owner, dict):
        if value is not _ABSENT:
            owner[name] = value
        elif name in owner:
            del owner[name]
    elif value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


class _State:
    """Whose replacements are in place, and what stood there before."""

    def __init__(self) -> None:
        self.here = Here()
        self.before: Sequence[Replacement] = []
        self.forking: int | None = None
        """The thread that holds the lock because it forks."""


_state = _State()


# These hooks are registered after those of `turns`, so they run before them: a thread that traces may have to begin a
# block, which the hooks of `turns` would not let it, before it gives the lock back.


def _before_fork() -> None:
    undisturbed.hold_signals()
    if _ONE_AT_A_TIME.acquire(timeout=_FORK_PATIENCE):
        _state.forking = threading.get_ident()


def _in_parent() -> None:
    _let_go()
    undisturbed.signals_come_later()


def _let_go() -> bool:
    """Give the lock back, if this thread holds it because it forks. Returns whether it did."""
    held = _state.forking == threading.get_ident()
    if held:
        _state.forking = None
        _ONE_AT_A_TIME.release()
    return held


def _in_child() -> None:
    global _ONE_AT_A_TIME
    if _let_go():
        return
    _state.forking = None
    _ONE_AT_A_TIME = threading.RLock()  # The lock there was is held by a thread that the child does not have.
    _state.here.end()
    for owner, name, original in reversed(_state.before):
        _write(owner, name, original)
    _state.before = []


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
