"""Imports of optional packages, and the error where one is missing.

Invariant: a feature imports its package when it is set up, before anything has changed, never within a lookup.
"""

import importlib
from types import ModuleType

_MORE = {
    "torchrec": "; on a machine without a GPU, pip install fbgemm-gpu-cpu tensordict pyre-extensions iopath, then"
    " pip install --no-deps torchrec"
}
"""{extra: further advice at the end of the error}."""


def need(module: str, what: str, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        what: the feature that needs it, for the error.
        extra: oneemb's extra that installs the package.

    Raises:
        ImportError: the module is missing or fails to import; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(what, error.name or module, extra) from error


def missing(what: str, package: str, extra: str) -> ImportError:
    """ImportError that says which package the feature `what` lacks and how to install it."""
    name = package.partition(".")[0]
    return ImportError(f"{what} needs {name}: pip install 'oneemb[{extra}]'{_MORE.get(extra, '')}")


def not_loaded(what: str, error: ImportError | OSError, extra: str) -> ImportError:
    """ImportError for the feature `what`, whose packages have raised `error`: one is missing, or its library does not
    fit the installed torch."""
    if isinstance(error, ImportError):
        return missing(what, error.name or extra, extra)
    return ImportError(f"{what}: {error}; releases of torchrec, fbgemm-gpu and torch must fit, see docs/torchrec.md")
