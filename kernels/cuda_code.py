"""Compiled CUDA loops in files: those that came with oneemb, and those that this machine has compiled.

A file is named after all that decides the code: the sources of the loop, the values of its constants, the types of its
arguments, the kind of GPU. In the cache of the user, the versions of the compilers decide too.

    <package>/kernels/cubins/gather_loop-1f0c...sm_90           of the package, or put there; see `oneemb warmup`
    <cache>/oneemb/kernels/cuda/gather_loop-1f0c...-77ab...sm_90

    first line    JSON: format, key, entry (name of the function), sha256 of the rest
    rest          cubin, or PTX and a zero byte, compressed by zlib

Invariants: a file is complete or does not count, since it is written under another name and renamed, and its digest is
checked; a folder that cannot be written to costs compiling, and is no error.
"""

import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from oneemb.kernels import jit
from oneemb.kernels.cuda_arguments import Signature, leaves, parameter_bytes
from oneemb.kernels.extras import missing
from oneemb.kernels.jit import CudaLoop

PACKAGE_FOLDER = Path(__file__).parent / "cubins"
"""Folder of loops that were compiled elsewhere."""

PTX_CAPABILITY = 8, 0
"""The oldest GPU that oneemb's loops run on. Its PTX runs on every later one, once the driver has compiled it."""

_FORMAT = 2
_BYTES = {"u8": 1, "b8": 1, "s8": 1, "u16": 2, "b16": 2, "u32": 4, "s32": 4, "b32": 4, "f32": 4, "u64": 8, "s64": 8,
          "b64": 8, "f64": 8}  # fmt: skip


class Image(NamedTuple):
    """Compiled code of one loop."""

    entry: str
    """Name of its function."""
    code: bytes
    """Cubin, or PTX with a zero byte at the end."""


def cache_folder() -> Path:
    """Folder of the loops that this user's processes have compiled."""
    return Path(jit.cache_folder()) / "cuda"


def compiles() -> bool:
    """Whether loops can be compiled here."""
    from oneemb.kernels import jit_cuda

    return jit_cuda.COMPILES


def images_of(loop: CudaLoop, signature: Signature, capability: tuple[int, int]) -> Iterator[Image]:
    """Forms of a loop for a GPU, the best first: a driver may be too old for one of them. A loop that is in no file is
    compiled, and kept.

    Raises:
        ImportError: nothing here can compile it; the message says what to install.
    """
    key = key_of(loop, signature)
    major, minor = capability
    for compatible in range(minor, -1, -1):  # A cubin runs on later GPUs of the same generation.
        if image := _read(PACKAGE_FOLDER, key, f"sm_{major}{compatible}"):
            yield image
    if image := _read(PACKAGE_FOLDER, key, "ptx"):
        yield image
    if not compiles():
        raise missing(f"{name_of(loop)} is not compiled for this GPU; compiling", "numba-cuda", "cuda")
    yield kept(None, loop, signature, capability, "cubin")[0]
    yield compiled(loop, signature, capability, "ptx")


def kept(
    folder: Path | None, loop: CudaLoop, signature: Signature, capability: tuple[int, int], form: str
) -> tuple[Image, bool]:
    """A loop from a folder, or the user's cache if it is None, and whether it had to be compiled. It is kept there.

    Raises:
        OSError: `folder` is given and cannot be written.
    """
    from oneemb.kernels import jit_cuda

    key = key_of(loop, signature)
    tools = jit_cuda.tools()  # fails where they do not fit each other
    must_keep = folder is not None  # a cache that cannot be written costs only time
    if folder is None:
        folder, key = cache_folder(), None if key is None else f"{key}\n{tools}"
    target = "ptx" if form == "ptx" else "sm_{}{}".format(*capability)
    if image := _read(folder, key, target):
        return image, False
    image = compiled(loop, signature, capability, form)
    if not keep(folder, key, target, image) and must_keep:
        raise OSError(f"compiled loops cannot be written to {folder}: make it a folder that this user may write to")
    return image, True


def compiled(loop: CudaLoop, signature: Signature, capability: tuple[int, int], form: str) -> Image:
    """A loop compiled now, as "cubin" or "ptx".

    Raises:
        TypeError: the parameters of the compiled loop are not those that a launch would pass.
    """
    from oneemb.kernels import jit_cuda

    ptx = jit_cuda.compile_ptx(loop, signature, capability)
    entry = entry_of(ptx, loop, signature)
    return Image(entry, ptx.encode() + b"\0" if form == "ptx" else jit_cuda.link(ptx, capability))


def entry_of(ptx: str, loop: CudaLoop, signature: Signature) -> str:
    """Name of the function of a loop's PTX, whose parameters must be those of the signature."""
    found = re.search(r"\.entry\s+(\w+)\s*\(([^)]*)\)", ptx)
    assert found is not None
    kinds = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,]*", found[2])
    sizes = [_BYTES.get(kind) for kind in kinds]
    if sizes != parameter_bytes(signature) or "[" in found[2]:
        raise TypeError(f"{name_of(loop)} was compiled to take {kinds}, and not {', '.join(leaves(signature))}")
    return found[1]


# ---- names -----------------------------------------------------------------------------------------------------------


def name_of(loop: CudaLoop) -> str:
    """A loop in errors: module and function."""
    return f"{loop.function.__module__.rpartition('.')[2]}.{loop.function.__name__}"


def key_of(loop: CudaLoop, signature: Signature) -> str | None:
    """All that decides what a loop is compiled to, but for the kind of GPU and the compilers; None if that cannot be
    told, as for a rule of a notebook."""
    files = {Path(__file__).parent / "jit_cuda.py"}
    try:
        described = _described(loop, files)
        digest = jit.sources_digest(frozenset(files))
    except OSError:
        return None
    return None if described is None else f"{described}\n{signature}\n{digest}"


def _described(value: Any, files: set[Path]) -> str | None:
    """A constant of a loop as text; adds the file that defines it to `files`."""
    function = value.function if isinstance(value, CudaLoop) else getattr(value, "py_func", None)
    if function is None:
        return repr(value) if isinstance(value, (bool, int, str)) else None
    if function.__closure__:
        return None
    files.add(Path(function.__code__.co_filename))
    constants = [(name, _described(one, files)) for name, one in getattr(value, "constants", ())]
    if any(one is None for _, one in constants):
        return None
    return f"{function.__module__}.{function.__qualname__}:{function.__code__.co_firstlineno}({constants})"


def _path(folder: Path, key: str, target: str) -> Path:
    loop = re.match(r".*?(\w+):", key)
    assert loop is not None
    return folder / f"{loop[1]}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.{target}"


# ---- files -----------------------------------------------------------------------------------------------------------


def _read(folder: Path, key: str | None, target: str) -> Image | None:
    if key is None:
        return None
    try:
        head, _, code = _path(folder, key, target).read_bytes().partition(b"\n")
        found = json.loads(head)
        right = (found["format"], found["key"], found["sha256"]) == (_FORMAT, key, hashlib.sha256(code).hexdigest())
        return Image(found["entry"], zlib.decompress(code)) if right else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(folder: Path, key: str | None, target: str, image: Image) -> bool:
    """Write compiled code, whole or not at all; returns whether it is there."""
    if key is None:
        return False
    code = zlib.compress(image.code)
    head = {"format": _FORMAT, "key": key, "entry": image.entry, "sha256": hashlib.sha256(code).hexdigest()}
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, temporary = tempfile.mkstemp(dir=folder, prefix=".")
        with os.fdopen(file, "wb") as writer:
            writer.write(json.dumps(head).encode() + b"\n" + code)
        os.chmod(temporary, 0o644)
        os.replace(temporary, _path(folder, key, target))
        return True
    except OSError:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        return False
