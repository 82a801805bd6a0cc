"""Packages that only some calls need, and what is said where one of them is missing.

Invariant: who needs one asks for it first, before anything has changed: not in the middle of a lookup.
"""

import importlib
from types import ModuleType

__all__ = ["missing", "need"]

_MORE = {
    "torchrec": "; on a machine without a GPU, pip install fbgemm-gpu-cpu tensordict pyre-extensions iopath, then"
    " pip install --no-deps torchrec"
}
"""What else to know of an extra."""


def need(module: str, what: str, extra: str) -> ModuleType:
    """A module of a package that oneemb does not install by itself.

    Args:
        module: its full name.
        what: needs it, in words.
        extra: of oneemb, which installs it.

    Raises:
        ImportError: it is not there, or cannot be imported; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(what, error.name or module, extra) from error


def missing(what: str, package: str, extra: str) -> ImportError:
    """The error that says that something needs a package, or a module of one, and how to install it."""
    name = package.partition(".")[0]
    return ImportError(f"{what} needs {name}: pip install 'oneemb[{extra}]'{_MORE.get(extra, '')}")
