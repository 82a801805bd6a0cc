"""Another library's name for a package of oneemb: both names give the same module objects, so classes are the same.

Invariant: nothing is imported before it is asked for, and a module is executed once, under its own name.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# From the name that scripts import to the package that it is.
MODULES = {"dynamicemb": "oneemb.dynamicemb", "torchrec_dynamic_embedding": "oneemb.tde"}


def install(name: str, *, replace: bool = False) -> None:
    """Make `import name`, and imports from its modules, give the modules of oneemb that have their names.

    Nothing is imported by the call itself. A second call changes nothing.

    Args:
        name: of the library to replace: `"dynamicemb"`.
        replace: take the place of a library of this name that is installed too. Without it that is an error.

    Raises:
        ValueError: there is no package for this name.
        ImportError: a library of this name is imported already, or is installed and `replace` is False.

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
    # Before all other finders: those of the path would make second copies of the package's modules.
    sys.meta_path.insert(0, Names(name, target))


class Names(MetaPathFinder):
    """Finds the modules of `target` under `name`, which scripts import."""

    def __init__(self, name: str, target: str) -> None:
        self.name, self.target = name, target

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of a module under this name; None for all others, ModuleNotFoundError if oneemb has no such module."""
        if fullname != self.name and not fullname.startswith(f"{self.name}."):
            return None
        real = self.target + fullname.removeprefix(self.name)
        found = importlib.util.find_spec(real)
        if found is None:
            raise ModuleNotFoundError(
                f"{fullname} is not there: imports of {self.name} give {self.target}, and oneemb has no {real}",
                name=fullname,
            )
        package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _Same(real), origin=found.origin, is_package=package)


class _Same(Loader):
    """Loads a module by importing it under its own name."""

    def __init__(self, real: str) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has replaced it by the spec of the other name
