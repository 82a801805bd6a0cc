"""A parameter server in a shared library: `scheme://config`, where the scheme is the library's `IO_type`.

A plugin answers at any time, on threads of its own. Invariants, whatever a plugin does:
- memory that a plugin may read stays allocated until it has answered, for good if it never does (`plugin_calls.py`);
- values are copied into arrays of the request, one at a time, and only while the caller still waits;
- a value of another length than was asked for is not copied; a value that the plugin does not give is zero, not found;
- no caller waits longer than the timeout.

A plugin that reads or writes outside of its memory, or that passes an invalid address, crashes the process.
"""

import ctypes
import weakref
from collections.abc import Sequence
from functools import partial

import numpy as np

from oneemb.storage.remote.parameter_server import ServerError, wrong_length
from oneemb.storage.remote.plugin_abi import OnAllFetched, OnFetched, OnPushed, Plugin, PullParameter, PushParameter
from oneemb.storage.remote.plugin_calls import Call, Calls, answered, fetched

TIMEOUT_S = 30.0
"""Seconds that a plugin has for each request."""

# Largest number of values in one request: the interface counts values in 32 bits.
_VALUES_MAX = 1 << 22

_I64, _U64, _U32 = ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint32

# Callbacks that any thread of any plugin may call at any time, so they are never freed.
_on_fetched, _on_all_fetched, _on_pushed = OnFetched(fetched), OnAllFetched(answered), OnPushed(answered)


class PluginServer:
    """A parameter server that is an instance of a plugin.

    Args:
        config: argument of the plugin's `IO_Initialize`.
        timeout: seconds in which each request, of at most four million values, must have ended; starting and ending the
            instance are requests too.

    Raises:
        ServerError: the plugin returned no instance.
        ServerTimeoutError: the plugin did not return in time.
    """

    def __init__(self, plugin: Plugin, config: str, timeout: float = TIMEOUT_S):
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {timeout}")
        # Errors show nothing of `config`, since only the plugin knows which part of it is secret.
        self.name = f"{plugin.type}:// (the plugin {plugin.path})"
        config_bytes = config.encode()
        if b"\0" in config_bytes:
            raise ValueError("a plugin gets the URL after :// as a C string, which cannot hold the character 0")
        self._calls = Calls(self.name, timeout)
        try:
            instance = self._calls.run("IO_Initialize", partial(plugin.initialize, config_bytes))
            if not instance:
                raise ServerError(
                    f"{self.name} gave no instance: IO_Initialize returned NULL; see what the plugin has written to the"
                    " terminal, and whether the text after :// in the URL is valid for it"
                )
        except BaseException:
            self._calls.stop()
            raise
        self._plugin, self._instance = plugin, instance
        # Ends the instance when this object is closed or garbage collected, or when the process ends.
        self._end = weakref.finalize(self, _end, self._calls, plugin, instance)

    def pull(self, table: str, id_N: np.ndarray, widths: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        pieces = []
        for n in self._pieces(len(id_N), len(widths)):
            pull = _Pull(self.name, table, id_N[n], widths)
            call = Call(pull.what, pull, pull.take)
            parameter = PullParameter(
                pull.table, 1, len(pull.id_N), (_I64 * 1)(0), _as(pull.id_N, _I64), len(widths), call.number,
                _on_fetched, _on_all_fetched,
            )  # fmt: skip
            self._calls.ask(call, partial(self._plugin.pull, self._instance, parameter))
            pieces.append(pull)
        if len(pieces) == 1:
            return pieces[0].parts, pieces[0].found_NP
        if not pieces:
            return [np.zeros((len(id_N), w), np.float32) for w in widths], np.zeros((len(id_N), len(widths)), np.bool_)
        parts = [np.concatenate([pull.parts[p] for pull in pieces]) for p in range(len(widths))]
        return parts, np.concatenate([pull.found_NP for pull in pieces])

    def push(self, table: str, id_N: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        for part in parts:
            if part.dtype != np.float32 or part.ndim != 2 or len(part) != len(id_N):
                raise ValueError(f"parts must be float32 of shape [{len(id_N)}, width], got {part.dtype} {part.shape}")
        for n in self._pieces(len(id_N), len(parts)):
            push = _Push(table, id_N[n], [part[n] for part in parts])
            call = Call(push.what, push, None)
            parameter = PushParameter(
                push.table, 1, len(push.id_N), (_I64 * 1)(0), _as(push.id_N, _I64), len(parts),
                _as(push.part_P, _U32), len(push.offset_V), _as(push.offset_V, _U64), push.data_NW.ctypes.data,
                call.number, _on_pushed,
            )  # fmt: skip
            self._calls.ask(call, partial(self._plugin.push, self._instance, parameter))

    def close(self) -> None:
        """End the instance. Raises ServerTimeoutError if a call of the plugin has not returned; the instance then ends
        once the call returns."""
        self._end()

    def _pieces(self, ids: int, parts: int) -> list[slice]:
        """Divide `ids` ids into requests."""
        if not self._end.alive:
            raise ServerError(f"{self.name} is closed; open it again")
        self._calls.check_process()
        if not parts:
            return []
        size = max(1, _VALUES_MAX // parts)
        return [slice(begin, min(begin + size, ids)) for begin in range(0, ids, size)]


def _end(calls: Calls, plugin: Plugin, instance: int) -> None:
    if calls.forked:
        return  # The instance is the parent's.
    calls.wait_for_answers()
    try:
        calls.run("IO_Finalize", partial(plugin.finalize, instance), late=True)
    finally:
        calls.stop()


class _Pull:
    """One pull: the ids, and the values that the plugin has given so far."""

    def __init__(self, server: str, table: str, id_N: np.ndarray, widths: Sequence[int]):
        self._server, self._table_name = server, table
        self.what = f"IO_Pull of {len(id_N)} rows of table {table!r}"
        self.table = _table_name(table)
        self.id_N = np.array(id_N, np.int64)  # a copy, since the plugin may read it after the caller has left
        self.parts = [np.zeros((len(id_N), width), np.float32) for width in widths]
        self.found_NP = np.zeros((len(id_N), len(widths)), np.bool_)
        self.nbytes = self.id_N.nbytes + sum(part.nbytes for part in self.parts)
        self._given_NP = np.zeros((len(id_N), len(widths)), np.bool_)
        self._parts_at = [(part.ctypes.data, 4 * width) for part, width in zip(self.parts, widths, strict=True)]

    def take(self, n: int, p: int, data: int | None, size: int) -> None:
        """Receive a value, `size` bytes at the address `data`; size 0 = the plugin has no value. Called under the
        call's lock."""
        if n >= len(self.id_N) or p >= len(self.parts):
            raise ServerError(
                f"{self._server} answered {self.what} with a value at offset {n}, part {p}; offsets must be below"
                f" {len(self.id_N)} and parts below {len(self.parts)}: the plugin is wrong, or answered another request"
            )
        begin, expected = self._parts_at[p]
        if size and size != expected:
            raise wrong_length(self._server, self._table_name, self.id_N[n], p, size, expected)
        if size and not data:
            raise ServerError(f"{self._named(n, p)} came as {size} bytes at NULL: the plugin is wrong")
        if self._given_NP[n, p]:
            same = bool(self.found_NP[n, p]) == bool(size)
            if size and same:
                same = ctypes.string_at(data or 0, size) == self.parts[p][n].tobytes()
            if not same:
                raise ServerError(f"{self._named(n, p)} came twice, with two values: the plugin is wrong")
            return
        if size:
            ctypes.memmove(begin + n * expected, data or 0, size)
        self._given_NP[n, p] = True
        self.found_NP[n, p] = bool(size)

    def _named(self, n: int, p: int) -> str:
        return f"{self._server}: part {p} of row {self.id_N[n]} of table {self._table_name!r}"


class _Push:
    """One push: copies of the values, since the plugin may read them after the caller has returned."""

    def __init__(self, table: str, id_N: np.ndarray, parts: Sequence[np.ndarray]):
        self.what = f"IO_Push of {len(id_N)} rows of table {table!r}"
        self.table = _table_name(table)
        self.id_N = np.array(id_N, np.int64)
        self.part_P = np.arange(len(parts), dtype=np.uint32)
        # All values of a row stand one after another, as the interface requires.
        self.data_NW = np.concatenate([*parts, np.empty((len(id_N), 0), np.float32)], axis=1)
        size_P = np.array([4 * part.shape[1] for part in parts], np.uint64)
        self.offset_V = np.zeros(len(id_N) * len(parts) + 1, np.uint64)
        np.cumsum(np.tile(size_P, len(id_N)), out=self.offset_V[1:])
        self.nbytes = self.id_N.nbytes + self.data_NW.nbytes + self.offset_V.nbytes


def _as(array: np.ndarray, type: type) -> "ctypes._Pointer":
    return array.ctypes.data_as(ctypes.POINTER(type))


def _table_name(table: str) -> bytes:
    """A name as a C string. The character 0 becomes two bytes that never occur in UTF-8."""
    return table.encode(errors="surrogatepass").replace(b"\0", b"\xc0\x80")
