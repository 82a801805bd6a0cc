"""Calls of `build` that a graph watches: losses scaled by a GradScaler, methods that stand-ins replace.

    with standing_in([(scheduler, "step", refuse)]):        refuse(scheduler) comes before a call that `build` makes

Invariant: a stand-in that an interrupt has left in place only calls the method that it hides.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch

from oneemb.graph.build_error import BuildError, user_line
from oneemb.graph.building import building_now
from oneemb.graph.tape import version_of
from oneemb.storage.locking.signals_deferred import signals_deferred


class Scaling:
    """Has every loss scaled that `build` calls `backward` on, within `watching`, if a scaler is given.

    If `build` itself calls `scale` of a GradScaler that it knows, that one is taken, and nothing is scaled twice.

    Args:
        known: the GradScalers that `build` knows: attributes of the graph, globals, closures.
        given: the argument of `set_grad_scaler`.
        before: the scaler of the micro-batches before.
        on_second_pass: called before a second backward pass; None = any number is fine.
        parameters: those whose losses `given` scales.
    """

    def __init__(
        self,
        known: Iterable[torch.amp.GradScaler],
        given: torch.amp.GradScaler | None = None,
        before: torch.amp.GradScaler | None = None,
        on_second_pass: Callable[[], None] | None = None,
        parameters: Iterable[torch.nn.Parameter] = (),
    ):
        self.scaler = given
        """The scaler that has scaled the losses; None = none has."""
        self._given, self._before = given, before
        self._on_second_pass = on_second_pass
        self._passes = 0
        self._by_build = False
        self._watched: dict[torch.amp.GradScaler, None] = {} if given is None else {given: None}
        self._watched |= dict.fromkeys(known)
        self._parameters = [] if given is None else list(parameters)
        self._grads = self._read_grads()

    def methods(self) -> list[tuple[Any, str, Callable[[Any], None]]]:
        """Methods to stand in for while `build` runs: calls of `scale` are noted, and those of `update` refused."""
        methods: list[tuple[Any, str, Callable[[Any], None]]] = []
        for scaler in self._watched:
            methods += [(scaler, "scale", self.note), (scaler, "update", self.refuse_update)]
        return methods

    def note(self, scaler: torch.amp.GradScaler) -> None:
        """Note that `build` scales by this one; BuildError if there is another."""
        if any(other is not None and other is not scaler for other in (self.scaler, self._before)):
            raise BuildError(f"build scales its losses with two GradScalers{user_line()}; use one")
        self.scaler, self._by_build = scaler, True

    def refuse_update(self, scaler: torch.amp.GradScaler) -> None:
        """Raise BuildError if this one has scaled the losses."""
        if scaler is self.scaler:
            raise BuildError(
                f"build updates the GradScaler{user_line()}, which the graph does after build; leave it out"
            )

    @property
    def backward(self) -> Callable[..., None] | None:
        """Function to call in place of `Tensor.backward`; None = no replacement is needed."""
        return self._backward if self._given is not None or self._on_second_pass else None

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self._passes += 1
        if self._passes == 2 and self._on_second_pass is not None:
            self._on_second_pass()
        if self._given is not None and not self._by_build:
            loss = type(self._given).scale(self._given, loss)
        loss.backward(*args, **kwargs)

    def _read_grads(self) -> list[tuple[int, int] | None]:
        """Other readings mean that gradients have come."""
        read: list[tuple[int, int] | None] = []
        for parameter in self._parameters:
            grad = parameter.grad
            read.append(None if grad is None else (id(grad), version_of(grad)))
        return read

    def check(self) -> None:
        """Raise BuildError if gradients have come that are not scaled, though they should be."""
        if self._given is None or self._passes or self._by_build or not self._given.is_enabled():
            return
        pairs = zip(self._grads, self._read_grads(), strict=True)
        if any(now is not None and now != before for before, now in pairs):  # Micro-batches before may have left some.
            raise BuildError(
                "build takes gradients by torch.autograd.backward, which set_grad_scaler does not see; call"
                " loss.backward(), or scale the losses by scaler.scale(loss)"
            )


def idle_copy(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """A copy that scales losses, and unscales, steps and updates nothing: no call of it changes the scaler."""
    kind: Any = type(scaler)
    made = kind.__new__(kind)
    for name, value in vars(scaler).items():
        value = value.own if isinstance(value, StandIn) else value
        if value is not None or name not in ("scale", "update"):
            vars(made)[name] = value.clone() if isinstance(value, torch.Tensor) else value
    vars(made).update(unscale_=_nothing, step=_nothing, update=_nothing)
    return cast(torch.amp.GradScaler, made)


def _nothing(*args: object, **kwargs: object) -> None:
    """Do nothing, with any arguments."""


def set_apart(scaler: torch.amp.GradScaler) -> Callable[[], None]:
    """Let this thread's calls of a scaler be those of an idle copy, while other threads' calls are as before.

    Returns:
        A function that ends it. No two threads make one of these calls for one scaler at the same moment.
    """
    idle, before, thread = idle_copy(scaler), cast(Any, type(scaler)), threading.get_ident()

    class Apart(before):  # type: ignore[misc, valid-type]
        is_over, of = False, before

        def __getattribute__(self, name: str) -> Any:
            here = self is scaler and not Apart.is_over and threading.get_ident() == thread
            return getattr(idle, name) if here else super().__getattribute__(name)

    def end() -> None:
        Apart.is_over = True
        kind: Any = type(scaler)
        while vars(kind).get("is_over"):  # Another export's class may lie over this one until it ends, too.
            kind = kind.of
        scaler.__class__ = kind

    Apart.__name__, Apart.__qualname__, Apart.__module__ = before.__name__, before.__qualname__, before.__module__
    scaler.__class__ = Apart
    return end


def scalers_in(values: Iterable[object], others: set[type] | None = None) -> list[torch.amp.GradScaler]:
    """The GradScalers among these.

    Args:
        others: classes of earlier calls that are none of GradScalers. Those of this call are added.
    """
    # By `type`: `isinstance` asks a stand-in that loads something lazily for its class, and loads it. A step asks for
    # the globals of a module: thousands, maybe, and seldom a scaler.
    values, others = list(values), set() if others is None else others
    try:
        kinds = set(map(type, values))
        if kinds <= others:
            return []
    except Exception:  # A metaclass may have any hash, or none.
        kinds = set()
    found = [value for value in values if issubclass(type(value), torch.amp.GradScaler)]
    if not found:
        others |= kinds
    return cast("list[torch.amp.GradScaler]", found)


def scalers_of(
    build: Callable[..., object], values: Iterable[object] = (), others: set[type] | None = None
) -> list[torch.amp.GradScaler]:
    """The GradScalers among some values, and those that a function, or one that a decorator has wrapped, has in a
    closure or as globals now: all globals of its module, since a function that it calls may name them.

    Args:
        others: of `scalers_in`.
    """
    function = inspect.unwrap(build) if hasattr(build, "__wrapped__") else build
    if type(function) is not MethodType and not isinstance(function, FunctionType) and not inspect.isroutine(function):
        return scalers_in(values, others)
    cells = getattr(function, "__closure__", None)
    held = [cell.cell_contents for cell in cells if cell != CellType()] if cells else []  # without empty ones
    return scalers_in([*values, *held, *getattr(function, "__globals__", {}).values()], others)


class StandIn:
    """Stands in for method `name` of an object: `tell`, which may raise, gets the object before each call that `build`
    makes."""

    def __init__(self, owner: Any, name: str, tell: Callable[[Any], None]):
        self._owner, self._name, self._tell = owner, name, tell
        self.own = vars(owner).get(name)
        """Attribute that the user has set on the object; None = the class's method counts."""
        if isinstance(self.own, StandIn):
            self.own = self.own.own

    def hide(self) -> None:
        """Take the method's place."""
        vars(self._owner)[self._name] = self

    def show(self) -> None:
        """Give the method its place back."""
        vars(self._owner).pop(self._name, None)
        if self.own is not None:
            vars(self._owner)[self._name] = self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if building_now() is not None:
            self._tell(self._owner)
        method = self.own or getattr(type(self._owner), self._name).__get__(self._owner)
        return method(*args, **kwargs)


@contextmanager
def standing_in(methods: Iterable[tuple[Any, str, Callable[[Any], None]]]) -> Iterator[None]:
    """Replace methods by stand-ins, made of these arguments, during a block."""
    stand_ins = [StandIn(*method) for method in methods]
    try:
        for one in stand_ins:
            one.hide()
        yield
    finally:
        with signals_deferred:
            for one in stand_ins:
                one.show()
