"""Decorators for rules and loops, and the folder in which compiled code is kept.

Five modules import numba, and no others: this one, jit_code (instructions that Python lacks), jit_lanes (vectors for
CPU loops), jit_team (the threads of CPU loops) and jit_cuda.

A **rule** is a scalar function with arithmetic: an optimizer step, a hash, a random draw. It has no explicit
signature, so that a loop of any backend may call it. A **CPU loop** moves data. Its first arguments are its range of
work, `begin, end`; `oneemb.kernels.threads.Threads` calls it, without the interpreter lock.

A **CUDA loop** is the work of one GPU thread in a launch. Its body uses numba's `cuda` module under that name, and
`oneemb.kernels.launch` launches it. CUDA modules are not imported before the first launch: `oneemb.kernels.jit_cuda`
then binds `cuda`, `load`, `store` and `move` to their meaning on a GPU or in numba's simulator.
"""

import builtins
import fcntl
import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import llvmlite
import numba
from numba import types
from numba.core import caching
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from oneemb.kernels.compile_notice import compile_notice

Number = Any
"""A number in compiled code, or a vector of numbers. numba infers the type at every call, and Python has no type that
covers all of them. Arrays of compiled code are `oneemb.kernels.arrays.Array`."""

CpuLoop = Callable[..., Any]
"""A compiled CPU loop: called with begin, end and its own arguments."""

_F = TypeVar("_F", bound=Callable[..., Any])

SIMULATED = bool(numba.config.ENABLE_CUDASIM)
"""Whether CUDA loops run in numba's simulator, on arrays in the host's memory."""

# fastmath=False gives the same numbers on every run. error_model="numpy": a division by zero gives inf or nan, as in
# torch, instead of a Python exception in the middle of a loop.
_OPTIONS = dict(nogil=True, error_model="numpy", fastmath=False)


# While any thread exports a program, torch replaces `min`, `max` and `math.pow` by objects of its own. So numba has to
# learn here, and not at its first compilation, what Python's own functions mean.
_BUILTINS = dict(vars(builtins))
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()

# numba's lock: held while a loop is compiled or loaded.
compiling = global_compiler_lock


class Compiling:
    """Callbacks before and after a compilation, set by storage/locking/signals.py. They defer signals: numba would
    never release its lock if an interrupt ended a compilation."""

    def __init__(self) -> None:
        self.begin: Callable[[], None] = lambda: None
        self.end: Callable[[], None] = lambda: None


around_compiling = Compiling()


def _bind_builtins(function: Any) -> None:
    """Add the builtins that a function uses, Python's own `min` and so on, to the function's globals. So compilation
    finds them even while `builtins` holds other objects under these names."""
    for name in function.__code__.co_names:
        if name in _BUILTINS:
            function.__globals__.setdefault(name, _BUILTINS[name])


def rule(function: _F) -> _F:
    """Compile a scalar function that loops may call, for the types of its arguments."""
    return _cached(numba.njit(function, **_OPTIONS))


def cpu(function: _F) -> _F:
    """Compile a CPU loop: one core's share of the work, run without the interpreter lock."""
    return _cached(numba.njit(function, **_OPTIONS))


def part(function: _F) -> _F:
    """Compile a part of CPU loops, inlined into each loop that calls it, because passing arrays to a call is slow."""
    return _cached(numba.njit(function, forceinline=True, **_OPTIONS))


def written(name: str, source: str, scope: dict[str, Any], *, beside: Any) -> FunctionType:
    """Python function made from a source text, with these globals, for `cpu` to compile. Its compiled code is cached as
    if the text stood in the file of `beside`, a compiled function. So the text may use only kernels that this file
    imports: a change of other kernels would not invalidate the cache."""
    code = beside.py_func.__code__
    scope = {**scope, "__name__": beside.py_func.__module__}
    exec(compile(source, code.co_filename, "exec"), scope)
    function: FunctionType = scope[name]
    function.__qualname__ = f"{beside.py_func.__qualname__}.{name}"
    function.__code__ = function.__code__.replace(co_firstlineno=code.co_firstlineno)
    return function


def external(name: str, result: str, arguments: list[str]) -> Any:
    """A function of the C library, for loops to call. Types have numba's names; `int32*` is a pointer."""

    def of(type_name: str) -> Any:
        return types.CPointer(of(type_name[:-1])) if type_name.endswith("*") else getattr(types, type_name)

    return types.ExternalFunction(name, of(result)(*map(of, arguments)))


class CudaLoop:
    """A CUDA loop, or a function that CUDA loops call, not compiled yet: jit_cuda compiles it before its first run.

    `loop.at(V=4)` is a variant of the loop in which the global name V is the constant 4, in the loop and in each
    function that it calls. A constant may also be a rule.
    """

    def __init__(self, function: Any, *, inner: bool = False, constants: tuple[tuple[str, Any], ...] = ()):
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.function = function
        _bind_builtins(function)
        self.inner = inner
        self.constants = constants
        self._variants: dict[tuple[tuple[str, Any], ...], CudaLoop] = {}
        self._asked: dict[tuple[tuple[str, Any], ...], CudaLoop] = {}  # the same, by arguments of `at`

    def at(self, **constants: Any) -> "CudaLoop":
        """The same loop with these names bound to constants. Equal constants give the same object."""
        asked = tuple(constants.items())
        found = self._asked.get(asked)
        if found is None:
            key = tuple(sorted({**dict(self.constants), **constants}.items()))
            found = self._variants.setdefault(key, CudaLoop(self.function, inner=self.inner, constants=key))
            self._asked[asked] = found
        return found


class _Cuda:
    """Type of `cuda`: `@cuda` marks a CUDA loop, `@cuda.inner` a function that CUDA loops call. In the bodies of both,
    `cuda` is numba's module."""

    def __call__(self, function: Any) -> CudaLoop:
        return CudaLoop(function)

    def inner(self, function: Any) -> CudaLoop:
        return CudaLoop(function, inner=True)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"cuda.{name} has a meaning in CUDA loops only")


cuda: Any = _Cuda()


def load(out_V: Any, array: Any, row: Any, column: Any) -> None:
    """In CUDA loops: out_V[i] = to_float32(array[row, column + i]) for V weights, 16 bytes at a time where V > 1."""
    raise TypeError("load is for CUDA loops")


def store(array: Any, row: Any, column: Any, in_V: Any) -> None:
    """In CUDA loops: array[row, column + i] = from_float32(in_V[i]) for V weights, 16 bytes at a time where V > 1."""
    raise TypeError("store is for CUDA loops")


def move(to: Any, to_row: Any, to_column: Any, array: Any, row: Any, column: Any) -> None:
    """In CUDA loops: copy V elements bit for bit between arrays of the same dtype, 16 bytes at a time where V > 1."""
    raise TypeError("move is for CUDA loops")


def pair(array: Any, row: Any) -> Any:
    """In CUDA loops: (array[row, 0], array[row, 1]) of an int64 array with two columns, read 16 bytes at a time."""
    raise TypeError("pair is for CUDA loops")


_IMPORT = re.compile(
    r"^\s*(?:from|import) oneemb\.kernels(?:\.(\w+)| import (?:\(([\w,\s]+)\)|([\w, ]+)))", re.MULTILINE
)

_FOLDER = Path(__file__).parent


def imported_kernels(text: str) -> set[Path]:
    """Files of the kernels that a source text imports."""
    text = re.sub(r"#.*", "", text)
    names = {name for match in _IMPORT.findall(text) for name in " ".join(match).replace(",", " ").split()}
    return {found for name in names if (found := _FOLDER / f"{name}.py").exists()}


@functools.cache
def _source(path: Path) -> tuple[bytes, set[Path]]:
    text = path.read_bytes()
    return text, imported_kernels(text.decode())


@functools.cache
def sources_digest(files: frozenset[Path], more: str = "") -> str:
    """Digest of files, the kernels that they import, directly or through others, and a text."""
    found = set(front := files)
    while front := frozenset({one for path in front for one in _source(path)[1]} - found):
        found |= front
    digest = hashlib.sha256(more.encode())
    for path in sorted(found, key=lambda path: path.name):
        digest.update(path.name.encode() + b"\0" + _source(path)[0])
    return digest.hexdigest()[:24]


def cache_folder() -> str:
    """Folder of compiled code; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(root, "oneemb", "kernels")


class _Locator(caching._CacheLocator):
    """Keeps compiled code in the user's cache folder, under the digest of its sources.

    numba's own locators compare only the loop's file, and would still use a compiled loop after a rule in another file
    has changed. This locator also works if oneemb's folder is read-only, and finds the code again if the same version
    is installed anew.
    """

    def __init__(self, function: Any, file: Any) -> None:
        self._name = f"{Path(file).stem}-{function.__code__.co_firstlineno}"
        files = frozenset({Path(file), _FOLDER / "jit_team.py"})  # Launchers of loops are made by jit_team.
        self._digest = sources_digest(files, f"{numba.__version__} {llvmlite.__version__}")

    def get_cache_path(self) -> Any:
        return os.path.join(cache_folder(), self._digest)

    def get_source_stamp(self) -> Any:
        return self._digest

    def get_disambiguator(self) -> Any:
        return self._name

    @classmethod
    def from_function(cls, function: Any, file: Any) -> Any:
        locator = cls(function, file)
        try:
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator


class _CacheImpl(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]


class _Cache(caching.FunctionCache):
    """Cache files of one function's compiled forms. If several processes need a form at the same time, one of them
    compiles it and the others wait for it."""

    _impl_class = _CacheImpl
    _compiling: dict["_Cache", tuple[int, int]] = {}
    """{cache of a function that this process is compiling: (thread, locked file)}."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None and self not in self._compiling:
            self._lock()
            found = super().load_overload(sig, target_context)  # Another process may have compiled it meanwhile.
        if found is None:
            compile_notice.begin()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        finally:
            compile_notice.end()
            self._unlock()

    def _lock(self) -> None:
        """Wait until no other process compiles this function, for `_COMPILING_S` at most."""
        path = os.path.join(self._cache_path, f"{self._impl.filename_base}.lock")
        try:
            file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:  # A folder that cannot be written to: each process compiles for itself.
            return
        self._compiling[self] = threading.get_ident(), file
        end = time.monotonic() + _COMPILING_S
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break

    def _unlock(self) -> None:
        if (held := self._compiling.pop(self, None)) is not None:
            os.close(held[1])

    @classmethod
    def unlock_all(cls) -> bool:
        """Release the locks of all functions that this thread was compiling, for other processes to compile them.
        Returns whether there were any."""
        had_any = False
        for cache, (thread, file) in list(cls._compiling.items()):
            if thread == threading.get_ident() and cls._compiling.pop(cache, None) is not None:
                os.close(file)
                had_any = True
        return had_any


# Longest wait for another process, in seconds. A compilation takes longer only on a very busy machine.
_COMPILING_S = 60.0


def _cached(dispatcher: Any) -> Any:
    """Let the dispatcher keep its compiled code in files, or only in memory if no folder can be written to."""
    _bind_builtins(getattr(dispatcher, "py_func", dispatcher))
    try:
        dispatcher._cache = _Cache(dispatcher.py_func)
    except (AttributeError, RuntimeError):  # jit is switched off; no locator found a folder
        pass
    compile_for_args = getattr(dispatcher, "_compile_for_args", None)
    if compile_for_args is not None:

        def compile_whole(*args: Any, **kwargs: Any) -> Any:
            around_compiling.begin()
            try:
                return compile_for_args(*args, **kwargs)
            finally:
                if _Cache.unlock_all():
                    compile_notice.give_up()
                around_compiling.end()

        dispatcher._compile_for_args = compile_whole
    return dispatcher
