"""Runs dense modules through torch.compile, and as they are where that fails.

Invariant: what fails to compile costs one warning, which says why, and no step.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["DenseCompiler"]


class DenseCompiler:
    """Compiles each module at its first call, for any batch size."""

    def __init__(self) -> None:
        self._compiled: dict[int, tuple[torch.nn.Module, Callable[..., Any]]] = {}
        self._warned = False

    def of(self, module: torch.nn.Module) -> Callable[..., Any]:
        """What to call in the module's place."""
        if id(module) not in self._compiled:
            self._compiled[id(module)] = module, self._first_call(module)
        return self._compiled[id(module)][1]

    def _first_call(self, module: torch.nn.Module) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(module, dynamic=True)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = compiled(*args, **kwargs)
            except Exception as error:
                # An error of the module itself is raised here again, as the module raises it.
                result = module(*args, **kwargs)
                self._warn(module, error)
                self._compiled[id(module)] = module, module
                return result
            self._compiled[id(module)] = module, compiled
            return result

        return call

    def _warn(self, module: torch.nn.Module, error: Exception) -> None:
        if not self._warned:
            why = (str(error).strip().splitlines() or [""])[0]
            warnings.warn(
                f"config.compile_dense: torch.compile cannot compile {type(module).__name__}, which runs as it is:"
                f" {type(error).__name__}: {why}",
                stacklevel=2,
            )
        self._warned = True
