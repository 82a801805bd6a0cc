"""Scaling of losses in `build`, and stand-ins for methods whose calls in `build` a graph must see.

    with standing_in([(scheduler, "step", refuse)]):        refuse(scheduler) runs before a call of step in `build`

Invariant: if an interrupt leaves a stand-in in place, it only calls the method that it hides.
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
    """Scaling of the losses of one call of `build`: by the scaler of `set_grad_scaler` when `build` calls `backward`,
    or by `build` itself, which calls `scale` of a GradScaler that it knows. No loss is scaled twice.

    Args:
        known: GradScalers that `build` knows: attributes of the graph, globals, closures.
        given: scaler of `set_grad_scaler`; None = none is set.
        before: scaler that has scaled the losses of earlier micro-batches; None = no scaler.
        on_second_pass: called before a second backward pass; None = no call.
        parameters: parameters of the graph, whose gradients `check` watches.
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
        """The scaler that scales the losses; None = losses are not scaled."""
        self._given, self._before = given, before
        self._on_second_pass = on_second_pass
        self._passes = 0
        self._by_build = False
        self._watched: dict[torch.amp.GradScaler, None] = {} if given is None else {given: None}
        self._watched |= dict.fromkeys(known)
        self._parameters = [] if given is None else list(parameters)
        self._grads = self._read_grads()

    def methods(self) -> list[tuple[Any, str, Callable[[Any], None]]]:
        """Arguments for `standing_in` while `build` runs: calls of `scale` are noted, calls of `update` refused."""
        methods: list[tuple[Any, str, Callable[[Any], None]]] = []
        for scaler in self._watched:
            methods += [(scaler, "scale", self.note), (scaler, "update", self.refuse_update)]
        return methods

    def note(self, scaler: torch.amp.GradScaler) -> None:
        """Note that `build` scales its losses by `scaler`; BuildError if another scaler has scaled losses."""
        if any(other is not None and other is not scaler for other in (self.scaler, self._before)):
            raise BuildError(f"build scales its losses with two GradScalers{user_line()}; use one")
        self.scaler, self._by_build = scaler, True

    def refuse_update(self, scaler: torch.amp.GradScaler) -> None:
        """Raise BuildError if `scaler` scales the losses of this call."""
        if scaler is self.scaler:
            raise BuildError(
                f"build updates the GradScaler{user_line()}, which the graph does after build; leave the call out"
            )

    @property
    def backward(self) -> Callable[..., None] | None:
        """Function to call in place of `Tensor.backward`; None = no replacement."""
        return self._backward if self._given is not None or self._on_second_pass else None

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self._passes += 1
        if self._passes == 2 and self._on_second_pass is not None:
            self._on_second_pass()
        if self._given is not None and not self._by_build:
            loss = type(self._given).scale(self._given, loss)
        loss.backward(*args, **kwargs)

    def _read_grads(self) -> list[tuple[int, int] | None]:
        """(id, version) of each parameter's gradient, or None. A different result means new or changed gradients."""
        read: list[tuple[int, int] | None] = []
        for parameter in self._parameters:
            grad = parameter.grad
            read.append(None if grad is None else (id(grad), version_of(grad)))
        return read

    def check(self) -> None:
        """Raise BuildError if `build` has computed gradients of losses that should be scaled and were not."""
        if self._given is None or self._passes or self._by_build or not self._given.is_enabled():
            return
        pairs = zip(self._grads, self._read_grads(), strict=True)
        if any(now is not None and now != before for before, now in pairs):  # Earlier micro-batches may have left some.
            raise BuildError(
                "build computes gradients by torch.autograd.backward, whose losses set_grad_scaler cannot scale; call"
                " loss.backward(), or scale the losses by scaler.scale(loss)"
            )


def idle_copy(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """Copy of a scaler that scales losses, but does not unscale, step or update. No call of it changes the scaler."""
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
    """Replace a scaler by its `idle_copy` on this thread; other threads still use the scaler.

    Returns:
        A function that ends the replacement. No two threads may start or end one for the same scaler at the same time.
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
        while vars(kind).get("is_over"):  # Classes of several replacements may lie over each other.
            kind = kind.of
        scaler.__class__ = kind

    Apart.__name__, Apart.__qualname__, Apart.__module__ = before.__name__, before.__qualname__, before.__module__
    scaler.__class__ = Apart
    return end


def scalers_in(values: Iterable[object], others: set[type] | None = None) -> list[torch.amp.GradScaler]:
    """The GradScalers among `values`.

    Args:
        others: classes that earlier calls have found to be no GradScalers; the classes of this call are added.
    """
    # `type`, since `isinstance` would make a lazy object load its class. Each step searches all globals of a module,
    # perhaps thousands, so known classes are skipped.
    values, others = list(values), set() if others is None else others
    try:
        kinds = set(map(type, values))
        if kinds <= others:
            return []
    except Exception:  # A metaclass may define a hash that raises.
        kinds = set()
    found = [value for value in values if issubclass(type(value), torch.amp.GradScaler)]
    if not found:
        others |= kinds
    return cast("list[torch.amp.GradScaler]", found)


def scalers_of(
    build: Callable[..., object], values: Iterable[object] = (), others: set[type] | None = None
) -> list[torch.amp.GradScaler]:
    """The GradScalers that a function knows now: among `values`, in its closure, and among all globals of its module,
    since functions that it calls may use them. A wrapped function is unwrapped first.

    Args:
        others: see `scalers_in`.
    """
    function = inspect.unwrap(build) if hasattr(build, "__wrapped__") else build
    if type(function) is not MethodType and not isinstance(function, FunctionType) and not inspect.isroutine(function):
        return scalers_in(values, others)
    cells = getattr(function, "__closure__", None)
    held = [cell.cell_contents for cell in cells if cell != CellType()] if cells else []  # without empty ones
    return scalers_in([*values, *held, *getattr(function, "__globals__", {}).values()], others)


class StandIn:
    """Function that replaces method `name` of the object `owner`. Before each call within `build`, it calls
    `tell(owner)`, which may raise."""

    def __init__(self, owner: Any, name: str, tell: Callable[[Any], None]):
        self._owner, self._name, self._tell = owner, name, tell
        self.own = vars(owner).get(name)
        """Attribute `name` that the user has set on the object; None = the class's method is used."""
        if isinstance(self.own, StandIn):
            self.own = self.own.own

    def hide(self) -> None:
        """Replace the method."""
        vars(self._owner)[self._name] = self

    def show(self) -> None:
        """Restore the method."""
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
    """Block in which methods are replaced. `methods`: arguments of a `StandIn` for each."""
    stand_ins = [StandIn(*method) for method in methods]
    try:
        for one in stand_ins:
            one.hide()
        yield
    finally:
        with signals_deferred:
            for one in stand_ins:
                one.show()
