"""Run a script that imports another library, and that was written for GPUs.

    python -m oneemb.compat [OPTIONS] NAME SCRIPT [ARGUMENTS]
    python -m oneemb.compat [OPTIONS] NAME -m MODULE [ARGUMENTS]

NAME is the library that the script imports, such as dynamicemb; it is given the modules of oneemb. Where torch finds no
GPU, GPUs are replaced by the CPU in the script and in the modules of its folder that it imports; with -m, in those of
the current folder. torch itself, and what is installed, stay as they are.

options:
  --keep-devices   replace no GPU
  --gpu-name NAME  tell the script that there is one GPU of this name, for scripts that refuse others or none
  --replace        take the place of a library NAME that is installed
  -h, --help       show this text
"""

import builtins
import importlib.util
import multiprocessing.spawn
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from oneemb.compat import cuda
from oneemb.compat.names import MODULES, Names, install
from oneemb.compat.rewrite import rewrite

# Name under which spawned processes import the script.
_SCRIPT = "__oneemb_compat_script__"
_PYTEST = ("pytest", "py.test")


def main(arguments: Sequence[str]) -> None:
    """Run the script or module of a command line as Python itself would; `arguments` follow `python -m oneemb.compat`.

    Raises:
        SystemExit: the command line is wrong (code 2), or the script exits.
        BaseException: any error of the script.
    """
    command = _parsed(list(arguments))
    folder = os.path.dirname(os.path.realpath(command.script)) if command.script is not None else os.getcwd()
    if not sys.flags.safe_path:
        sys.path[0] = folder
    try:
        install(command.name, replace=command.replace)
    except ImportError as error:
        _refuse(str(error).replace("replace=True", "--replace"))
    except ValueError as error:
        _refuse(str(error))
    rewriting = not command.keep_devices and not _torch_has_gpu()
    script = os.path.abspath(command.script) if command.script is not None else None
    job = _Job(command.name, MODULES[command.name], script, folder if rewriting else None, command.gpu_name)
    job.begin()
    if script is not None:
        _run_script(job, script, command)
    else:
        _run_module(job, command)


# ---- the command line -----------------------------------------------------------------------------------------------


@dataclass
class _Command:
    name: str = ""
    script: str | None = None
    module: str = ""
    arguments: Sequence[str] = ()
    keep_devices: bool = False
    replace: bool = False
    gpu_name: str | None = None


def _parsed(words: list[str]) -> _Command:
    command = _Command()
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            print(__doc__.strip())
            raise SystemExit(0)
        if word == "--keep-devices":
            command.keep_devices = True
        elif word == "--replace":
            command.replace = True
        elif option == "--gpu-name":
            command.gpu_name = value if equals else _next(words, "--gpu-name needs the name of a GPU, such as A100")
        elif not command.name and not word.startswith("-"):
            command.name = word
        elif command.name and word == "-m":
            command.module = _next(words, "-m needs the name of a module, such as pytest")
            command.arguments = words
            return command
        elif command.name and not word.startswith("-"):
            if not os.path.isfile(word):
                _refuse(f"the script must be a file, got {word}; give the path of one")
            command.script, command.arguments = word, words
            return command
        else:
            _refuse(f"{word} is no option here")
    _refuse("there is no script to run" if command.name else "there is no name of a library")


def _next(words: list[str], missing: str) -> str:
    if not words:
        _refuse(missing)
    return words.pop(0)


def _refuse(text: str) -> NoReturn:
    print(f"oneemb.compat: {text}; see python -m oneemb.compat --help", file=sys.stderr)
    raise SystemExit(2)


# ---- running --------------------------------------------------------------------------------------------------------


def _torch_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _run_script(job: "_Job", script: str, command: _Command) -> None:
    assert command.script is not None
    sys.argv = [command.script, *command.arguments]
    source, what = Path(script).read_bytes(), ""
    if job.folder is None:
        code = compile(source, script, "exec", dont_inherit=True)
    else:
        tree, replaced = rewrite(source, script)
        code = compile(tree, script, "exec", dont_inherit=True)
        counts = ", ".join(f"{count} x {kind}" for kind, count in replaced.items())
        what = f" ({os.path.basename(script)}: {counts or 'nothing'})"
    job.tell(what)
    _run_as_main(code, script, SourceFileLoader("__main__", script), None)


def _run_module(job: "_Job", command: _Command) -> None:
    arguments = list(command.arguments)
    if job.folder is not None and command.module in _PYTEST:
        # pytest's assertion rewriting would read the files itself, and so leave their GPUs as they are.
        if any(word.startswith("--assert") and word != "--assert=plain" for word in arguments):
            _refuse("pytest runs with --assert=plain where GPUs are replaced; leave out --assert")
        arguments.insert(0, "--assert=plain")
    spec = _spec_of(command.module)
    code = getattr(spec.loader, "get_code", lambda name: None)(spec.name)
    if code is None:
        _refuse(f"{spec.name} is no Python module that can be run")
    sys.argv = [spec.origin or spec.name, *arguments]
    job.tell("")
    _run_as_main(code, spec.origin, spec.loader, spec)


def _spec_of(module: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError as error:
        _refuse(f"module {module} cannot be run: {error}")
    if spec is None:
        _refuse(f"there is no module {module} that can be run")
    return spec


def _run_as_main(code: CodeType, path: str | None, loader: Any, spec: ModuleSpec | None) -> None:
    """Execute `code` as the module `__main__`."""
    module = ModuleType("__main__")
    module.__file__, module.__loader__, module.__spec__ = path, loader, spec
    module.__package__ = spec.parent if spec is not None else None
    module.__dict__["__cached__"] = None
    module.__dict__["__builtins__"] = builtins
    # multiprocessing, which torch has imported, registered the old main module as __mp_main__.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, module.__dict__)


# ---- imported modules -----------------------------------------------------------------------------------------------


class _Loader(SourceFileLoader):
    """Import loader that executes a module's rewritten tree, and caches nothing in __pycache__."""

    def get_code(self, fullname: str) -> CodeType:
        tree, _ = rewrite(Path(self.path).read_bytes(), self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Import finder for the modules of a folder, which are rewritten, and for the script in spawned processes."""

    def __init__(self, folder: str, script: str | None) -> None:
        self.folder, self.script = Path(os.path.realpath(folder)), script
        self.standard = Path(os.path.realpath(sysconfig.get_path("stdlib")))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _SCRIPT and self.script is not None:
            return importlib.util.spec_from_file_location(_SCRIPT, self.script, loader=_Loader(_SCRIPT, self.script))
        if fullname.partition(".")[0] == "oneemb":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or not self._has(str(spec.origin)):
            return None
        spec.loader, spec.cached = _Loader(fullname, str(spec.origin)), None
        return spec

    def _has(self, path: str) -> bool:
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(self.folder):
            return False
        installed = {"site-packages", "dist-packages"} & set(real.relative_to(self.folder).parts)
        return not installed and not real.is_relative_to(self.standard)


# ---- spawned processes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """Facts that a process needs to run the script's code.

    A spawned process gets only the data that multiprocessing sends, and then imports the script by its path. So this
    object travels with that data, and starts rewriting when it is unpickled, before the import. No environment variable
    is needed, and processes that are started in other ways are not affected.

    Args:
        name: name of the library that is replaced.
        target: package of oneemb in its place.
        script: path of the script; None for a module.
        folder: folder whose modules are rewritten; None = rewrite nothing.
        gpu_name: name of the GPU that scripts are told of; None = no GPU.
    """

    name: str
    target: str
    script: str | None
    folder: str | None
    gpu_name: str | None

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _begin_in_child, astuple(self)

    def begin(self) -> None:
        """Rewrite modules that are imported from now on, in this process and in processes that it spawns."""
        cuda.pretend(self.gpu_name)
        if self.folder is not None:
            # Just before the path's own finder, so that built-in modules still come first.
            place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
            sys.meta_path.insert(place, _Finder(self.folder, self.script))
        # A patch, since multiprocessing has no other way to send data to a child.
        usual = multiprocessing.spawn.get_preparation_data

        def with_job(name: str) -> dict[str, Any]:
            data = usual(name)
            if self.folder is not None and self.script is not None and "init_main_from_path" in data:
                if data["init_main_from_path"] == os.path.normpath(self.script):
                    del data["init_main_from_path"]
                    data["init_main_from_name"] = _SCRIPT
            return {"oneemb_compat": self} | data

        multiprocessing.spawn.get_preparation_data = with_job

    def tell(self, what: str) -> None:
        """Print what is replaced, on one rank only; `what` describes the script's replacements."""
        if self.folder is not None and os.environ.get("RANK", "0") == "0":
            print(
                f"oneemb.compat: torch finds no GPU; in modules of {self.folder}{what} 'cuda' is 'cpu', 'nccl' is"
                " 'gloo' and torch.cuda is oneemb.compat.cuda; --keep-devices leaves them",
                file=sys.stderr,
            )


def _begin_in_child(name: str, target: str, *rest: Any) -> None:
    if not any(isinstance(finder, Names) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, Names(name, target))
        _Job(name, target, *rest).begin()
