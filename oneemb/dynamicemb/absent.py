"""Names of dynamicemb that this library does not have: an import of one raises an error with the reason and advice."""

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["absent"]


def absent(module: str, reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a module of `oneemb.dynamicemb`.

    Args:
        module: its `__name__`.
        reasons: by name, why the module does not have it, and what to use.

    Returns:
        A function of a name. It raises ImportError with the reason for these names, and AttributeError for others.
    """

    def getattr_of_module(name: str) -> Any:
        if name in reasons:
            raise ImportError(f"{module} has no {name}: {reasons[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module
