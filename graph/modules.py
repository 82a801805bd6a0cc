"""Modules of a graph: which are embeddings, and which are not registered, so that torch does not know them."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from oneemb.storage.embedding_store import EmbeddingStore

# Number of elements of a list or dict that are searched for modules: a list that holds data may be long.
_SEARCHED_MAX = 1000

REGISTER = (
    "assign it to the module, self.name = ..., and keep lists and dicts of modules in torch.nn.ModuleList and"
    " ModuleDict"
)

Embeddings = Mapping[str, Any]
"""{qualified name: embedding module}. Any: the classes are in the package oneemb, which imports this package."""


def is_embedding(module: torch.nn.Module) -> bool:
    """Whether a module is an embedding of this library."""
    return isinstance(module.__dict__.get("store"), EmbeddingStore)


def embeddings_in(module: torch.nn.Module) -> dict[str, Any]:
    """{qualified name: embedding module} below `module`; a shared embedding occurs once."""
    found: dict[str, Any] = {}
    seen: set[torch.nn.Module] = set()
    waiting = [("", module)]
    while waiting:  # as `named_modules`, whose nested generators take longer than a lookup; every step runs this
        name, one = waiting.pop()
        if one in seen:
            continue
        if type(one).named_modules is not torch.nn.Module.named_modules:
            return {name: child for name, child in module.named_modules() if is_embedding(child)}
        seen.add(one)
        if isinstance(one.__dict__.get("store"), EmbeddingStore):
            found[name] = one
        for child_name, child in reversed(vars(one)["_modules"].items()):
            if child is not None:
                waiting.append((f"{name}.{child_name}" if name else child_name, child))
    return found


def unregistered_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(where, module) of each module in a plain list, tuple or dict below `root`, where torch does not find it."""
    known, own = set(root.modules()), vars(torch.nn.Module())
    for path, module in root.named_modules():
        for name, value in list(vars(module).items()):
            if name not in own:
                for where, held in _modules_in(value, f"{path}.{name}" if path else name):
                    if held not in known:
                        yield where, held


def _modules_in(value: object, where: str) -> Iterator[tuple[str, torch.nn.Module]]:
    if isinstance(value, torch.nn.Module):
        yield where, value
    elif isinstance(value, list | tuple | dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, element in itertools.islice(pairs, _SEARCHED_MAX):
            yield from _modules_in(element, f"{where}[{key!r}]")


def not_registered(root: torch.nn.Module, module: torch.nn.Module) -> str:
    """Text of the error for a module that is no part of a graph."""
    what = f"embedding {module.name!r}" if is_embedding(module) else type(module).__name__
    where = next((where for where, held in unregistered_modules(root) if held is module), "")
    place = f"kept in {where}, a plain list or the like" if where else "reached by a closure, a global or the like"
    return f"{what} is no part of {type(root).__name__} ({place}), which would not train, move or save it; {REGISTER}"
