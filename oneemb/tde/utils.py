"""Finds the sharded modules of a model, and loads parameter servers from shared libraries."""

from typing import Any

import torch
from torch import library

from oneemb.storage.remote import servers

__all__ = ["sharded_modules"]


def sharded_modules(module: torch.nn.Module, path: str, plan: Any) -> dict[str, tuple[torch.nn.Module, Any]]:
    """{path: (module, plan of its tables)} for the modules in a model's ShardingPlan at and below `path`."""
    of_tables = plan.get_plan_for_module(path)
    if of_tables:
        return {path: (module, of_tables)}
    found: dict[str, tuple[torch.nn.Module, Any]] = {}
    for name, child in module.named_children():
        found.update(sharded_modules(child, f"{path}.{name}" if path else name, plan))
    return found


_get_sharded_modules_recursive = sharded_modules
"""Name of `sharded_modules` in upstream."""


def register_io(path: str) -> None:
    """Load a parameter server from a shared library, whose `IO_type` becomes the scheme of the server's URLs.
    `torch.ops.tde.register_io` does the same. ServerError if the library cannot be loaded, or is no such plugin."""
    servers.register_io(path)


_library = library.Library("tde", "FRAGMENT")
_library.define("register_io(str path) -> ()")
_library.impl("register_io", register_io, "CompositeExplicitAutograd")
