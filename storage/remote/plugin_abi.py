"""The C interface of a parameter server in a shared library (a plugin), as in TorchRec's dynamic embedding, by ctypes.

A library has these five names; structures are passed by value:

    const char* IO_type;                               scheme of the URLs that use the library
    void* IO_Initialize(const char* config);           config = the URL behind `scheme://`; returns NULL on failure
    void  IO_Finalize(void* instance);
    void  IO_Pull(void* instance, PullParameter);
    void  IO_Push(void* instance, PushParameter);

Invariants:
- order and types of the fields are those of the structures with which plugins were compiled;
- a loaded library stays loaded, since its threads may run its code at any time.

Reference: `contrib/dynamic_embedding/src/tde/details/io_registry.h` of TorchRec.
"""

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from oneemb.storage.fs import AnyPath, absolute_path
from oneemb.storage.remote.parameter_server import ServerError

_U32, _I64S, _ADDRESS = ctypes.c_uint32, ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p

OnFetched = ctypes.CFUNCTYPE(None, _ADDRESS, _U32, _U32, _ADDRESS, _U32)
"""Callback for each value of a pull: (context, offset = row * columns + column, part, address, number of bytes)."""

OnAllFetched = OnPushed = ctypes.CFUNCTYPE(None, _ADDRESS)
"""Callbacks for the end of a pull and the end of a push: (context)."""


class PullParameter(ctypes.Structure):
    """Argument of `IO_Pull`."""

    _fields_ = (
        ("table_name", ctypes.c_char_p),
        ("num_cols", _U32),
        ("num_ids", _U32),
        ("col_ids", _I64S),
        ("ids", _I64S),
        ("num_parts", _U32),
        ("context", _ADDRESS),
        ("on_fetched", OnFetched),
        ("on_all_fetched", OnAllFetched),
    )


class PushParameter(ctypes.Structure):
    """Argument of `IO_Push`. Values are in the order [id][column][part]; the bytes of value v are `data[offsets[v] :
    offsets[v + 1]]`."""

    _fields_ = (
        ("table_name", ctypes.c_char_p),
        ("num_cols", _U32),
        ("num_ids", _U32),
        ("col_ids", _I64S),
        ("ids", _I64S),
        ("num_parts", _U32),
        ("part_ids", ctypes.POINTER(_U32)),
        ("num_offsets", _U32),
        ("offsets", ctypes.POINTER(ctypes.c_uint64)),
        ("data", _ADDRESS),
        ("context", _ADDRESS),
        ("on_pushed", OnPushed),
    )


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "IO_Initialize": (_ADDRESS, [ctypes.c_char_p]),
    "IO_Finalize": (None, [_ADDRESS]),
    "IO_Pull": (None, [_ADDRESS, PullParameter]),
    "IO_Push": (None, [_ADDRESS, PushParameter]),
}


@dataclass(frozen=True)
class Plugin:
    """A loaded library: its `IO_type`, path and functions. The functions run without the interpreter lock."""

    type: str
    path: str
    initialize: Any
    finalize: Any
    pull: Any
    push: Any


def load_plugin(path: AnyPath) -> Plugin:
    """Load a plugin from a shared library, which runs the library's own initialization. Raises ServerError if the
    library cannot be loaded, lacks a name of the interface, or has an `IO_type` that is no scheme of a URL."""
    name = os.fsdecode(path)
    # A name without a folder that is no file here is left to the system, which searches its folders of libraries.
    name = absolute_path(name) if os.path.sep in name or os.path.exists(name) else name
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise ServerError(
            f"the plugin {name} could not be loaded: {error}; give the path of a shared library (.so) that was compiled"
            " for this machine, with all libraries that it needs"
        ) from error
    missing = [symbol for symbol in ("IO_type", *_SIGNATURES) if not hasattr(library, symbol)]
    if missing:
        raise ServerError(
            f"the plugin {name} lacks {', '.join(missing)}; a parameter server's plugin has IO_type, IO_Initialize,"
            ' IO_Finalize, IO_Pull and IO_Push; in C++ they are declared extern "C"'
        )
    functions = []
    for symbol, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, symbol)
        function.restype, function.argtypes = result, arguments
        functions.append(function)
    return Plugin(_type_of(library, name), name, *functions)


def _type_of(library: ctypes.CDLL, name: str) -> str:
    data = ctypes.c_char_p.in_dll(library, "IO_type").value
    type = (data or b"").decode(errors="replace")
    if not type or not type.isprintable() or any(letter in type for letter in ":/?# \ufffd"):
        raise ServerError(
            f"the plugin {name} has IO_type {data!r}, which is no scheme of a URL; it must be letters and digits, such"
            ' as const char* IO_type = "your-ps";'
        )
    return type
