"""Blocks of `build`: autocast, grad modes, profiler labels."""

from contextlib import AbstractContextManager

import torch

from oneemb.graph.ops.op import BUILD, Op

__all__ = ["enter_autocast", "enter_grad_mode", "enter_record_function", "exit_context"]


@Op(BUILD, context="enter")
def enter_autocast(
    device: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
) -> torch.autocast:
    """Enter torch.autocast."""
    context = torch.autocast(device, dtype, enabled, cache_enabled)
    context.__enter__()
    return context


@Op(BUILD, context="enter")
def enter_grad_mode(enabled: bool) -> torch.set_grad_enabled:
    """Enter torch.no_grad or torch.enable_grad."""
    context = torch.set_grad_enabled(enabled)
    context.__enter__()
    return context


@Op(BUILD, context="enter")
def enter_record_function(name: str, args: str | None = None) -> torch.autograd.profiler.record_function:
    """Enter torch.profiler.record_function."""
    context = torch.autograd.profiler.record_function(name, args)
    context.__enter__()
    return context


@Op(BUILD, context="exit")
def exit_context(context: AbstractContextManager[object]) -> None:
    """Leave a context that was entered."""
    context.__exit__(None, None, None)
