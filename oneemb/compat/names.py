"""Gives a package of oneemb the name of another library. Both names give the same module objects, hence the same
classes.

Invariant: a module is imported only when it is first asked for, and executed once, under its own name.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# {name that scripts import: package of oneemb}.
MODULES = {"dynamicemb": "oneemb.dynamicemb", "torchrec_dynamic_embedding": "oneemb.tde"}


def install(name: str, *, replace: bool = False) -> None:
    """Make `import name`, and imports of its modules, return the modules of oneemb.

    The call itself imports nothing. A second call changes nothing.

    Args:
        name: name of the library to replace, such as `"dynamicemb"`.
        replace: True = replace the library even if it is installed, which is an error otherwise.

    Raises:
        ValueError: oneemb has no package for this name.
        ImportError: the library was imported already, or is installed and `replace` is False.

    Example:
        >>> from oneemb.compat import install
        >>> install("tensorflow")
        Traceback (most recent call last):
        ...
        ValueError: name must be one of 'dynamicemb', 'torchrec_dynamic_embedding', got 'tensorflow'
    """
    if name not in MODULES:
        raise ValueError(f"name must be one of {', '.join(map(repr, sorted(MODULES)))}, got {name!r}")
    target = MODULES[name]
    if any(isinstance(finder, Names) and finder.name == name for finder in sys.meta_path):
        return
    if name in sys.modules and sys.modules[name] is not sys.modules.get(target):
        where = getattr(sys.modules[name], "__file__", None) or "a place that has no file"
        raise ImportError(
            f"{name} is imported already, from {where}; call install({name!r}) before anything imports it", name=name
        )
    if not replace and name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:  # a bare folder of that name is no library
            raise ImportError(
                f"{name} is installed at {spec.origin}; uninstall it, or pass replace=True to import {target} in its"
                " place",
                name=name,
            )
    # First of all finders: a finder of the path would load second copies of the package's modules.
    sys.meta_path.insert(0, Names(name, target))


class Names(MetaPathFinder):
    """Import finder that finds the modules of `target` under `name`."""

    def __init__(self, name: str, target: str) -> None:
        self.name, self.target = name, target

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of a module below `name`; None for other modules, ModuleNotFoundError if oneemb has no such module."""
        if fullname != self.name and not fullname.startswith(f"{self.name}."):
            return None
        real = self.target + fullname.removeprefix(self.name)
        found = importlib.util.find_spec(real)
        if found is None:
            raise ModuleNotFoundError(
                f"{fullname} is not there, since {self.name} is {self.target} here, and oneemb has no {real}",
                name=fullname,
            )
        package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _Same(real), origin=found.origin, is_package=package)


class _Same(Loader):
    """Import loader that imports a module under its own name."""

    def __init__(self, real: str) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has set the other name's spec
