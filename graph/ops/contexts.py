"""Blocks of `build`: autocast, grad modes, profiler labels."""

from typing import Any

import torch

from oneemb.graph.ops.op import BUILD, op

__all__ = ["enter_autocast", "enter_grad_mode", "enter_record_function", "exit_context"]


@op(BUILD, context="enter")
def enter_autocast(device: str, **options: Any) -> Any:
    """Enter torch.autocast."""
    context = torch.autocast(device, **options)
    context.__enter__()
    return context


@op(BUILD, context="enter")
def enter_grad_mode(enabled: bool) -> Any:
    """Enter torch.no_grad or torch.enable_grad."""
    context = torch.set_grad_enabled(enabled)
    context.__enter__()
    return context


@op(BUILD, context="enter")
def enter_record_function(name: str, args: str | None = None) -> Any:
    """Enter torch.profiler.record_function."""
    context = torch.autograd.profiler.record_function(name, args)
    context.__enter__()
    return context


@op(BUILD, context="exit")
def exit_context(context: Any) -> None:
    """Leave a context that was entered."""
    context.__exit__(None, None, None)
