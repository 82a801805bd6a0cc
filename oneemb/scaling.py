"""Watches the losses of a call of `build`: whether a GradScaler scales them, and how often gradients are taken."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from oneemb.graph.build_error import BuildError, user_line
from oneemb.storage.turns import undisturbed

__all__ = ["Scaling", "scalers_in", "scalers_of"]


class Scaling:
    """Has every loss scaled that `build` calls `backward` on, within `watching`, if a scaler is given.

    If `build` itself calls `scale` of a GradScaler that it knows, that one is taken, and nothing is scaled twice.

    Args:
        known: the GradScalers that `build` knows: its attributes, globals, closures.
        given: what `set_grad_scaler` was given.
        before: what has scaled the losses of the micro-batches before.
        on_second_pass: called before a second backward pass; None = any number is fine.
    """

    def __init__(
        self,
        known: Iterable[torch.amp.GradScaler],
        given: torch.amp.GradScaler | None,
        before: torch.amp.GradScaler | None = None,
        on_second_pass: Callable[[], None] | None = None,
    ):
        self.scaler = given
        """What has scaled the losses; None = nothing has."""
        self._given, self._before = given, before
        self._on_second_pass = on_second_pass
        self._passes = 0
        self._by_build = False
        self._watched: dict[torch.amp.GradScaler, None] = {} if given is None else {given: None}
        self._watched |= dict.fromkeys(known)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it calls of `scale` are noted. A generator: Python ends it, wherever an interrupt comes."""
        own = {scaler: vars(scaler).get("scale") for scaler in self._watched}
        try:
            for scaler in own:
                scaler.scale = self._noting(scaler, scaler.scale)  # type: ignore[method-assign]  # hides the class's
            yield
        finally:
            with undisturbed:
                for scaler, scale in own.items():
                    vars(scaler).pop("scale", None)
                    if scale is not None:  # the user's own
                        vars(scaler)["scale"] = scale

    def _noting(self, scaler: torch.amp.GradScaler, scale: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_scale(outputs: Any) -> Any:
            if any(other is not None and other is not scaler for other in (self.scaler, self._before)):
                raise BuildError(f"build scales its losses with two GradScalers{user_line()}; use one")
            self.scaler, self._by_build = scaler, True
            return scale(outputs)

        return note_and_scale

    @property
    def backward(self) -> Callable[..., None] | None:
        """What to call in place of `Tensor.backward`; None = it can be left alone."""
        return self._backward if self._given is not None or self._on_second_pass else None

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self._passes += 1
        if self._passes == 2 and self._on_second_pass is not None:
            self._on_second_pass()
        if self._given is not None and not self._by_build:
            loss = type(self._given).scale(self._given, loss)
        loss.backward(*args, **kwargs)

    def check(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        """Raise BuildError if gradients have come that are not scaled, though they should be."""
        if self._given is None or self._passes or self._by_build or not self._given.is_enabled():
            return
        if any(parameter.grad is not None for parameter in parameters):
            raise BuildError(
                "build takes gradients by torch.autograd.backward, which set_grad_scaler does not see; call"
                " loss.backward(), or scale the losses by scaler.scale(loss)"
            )


def scalers_in(values: Iterable[object]) -> list[torch.amp.GradScaler]:
    """The GradScalers among these."""
    return [value for value in values if isinstance(value, torch.amp.GradScaler)]


def scalers_of(build: Callable[..., object]) -> list[torch.amp.GradScaler]:
    """The GradScalers that a function, or one that a decorator has wrapped, knows as globals or by a closure."""
    function = inspect.unwrap(build)
    if not inspect.isroutine(function):
        return []
    known = inspect.getclosurevars(function)
    return scalers_in([*known.nonlocals.values(), *known.globals.values()])
