"""Parameter servers by their URLs."""

import warnings
from collections.abc import Callable, Sequence

import numpy as np

from oneemb.kernels.extras import need
from oneemb.storage.fs import AnyPath
from oneemb.storage.remote.parameter_server import ParameterServer, wrong_length
from oneemb.storage.remote.plugin_abi import Plugin, load_plugin
from oneemb.storage.remote.plugin_server import TIMEOUT_S, PluginServer


class MemoryServer:
    """Rows in the memory of this process, for tests and trials: `values` by table, id and part, which servers may
    share."""

    def __init__(self, values: dict[tuple[str, int, int], bytes], name: str = "memory://"):
        self.name = name
        self._values = values

    def pull(self, table: str, id_N: np.ndarray, widths: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        parts = [np.empty((len(id_N), width), np.float32) for width in widths]
        found_NP = np.zeros((len(id_N), len(widths)), np.bool_)
        for n, id in enumerate(id_N.tolist()):
            for p, part in enumerate(parts):
                value = self._values.get((table, id, p))
                if value is None:
                    continue
                if len(value) != part[n].nbytes:
                    raise wrong_length(self.name, table, id, p, len(value), part[n].nbytes)
                part[n] = np.frombuffer(value, np.float32)
                found_NP[n, p] = True
        return parts, found_NP

    def push(self, table: str, id_N: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        for n, id in enumerate(id_N.tolist()):
            for p, part in enumerate(parts):
                self._values[table, id, p] = part[n].tobytes()

    def erase(self, table: str, id_N: np.ndarray, parts: int) -> None:
        for id in id_N.tolist():
            for p in range(parts):
                self._values.pop((table, id, p), None)

    def close(self) -> None:
        """See `ParameterServer`."""


_in_memory: dict[str, dict[tuple[str, int, int], bytes]] = {}
"""Values of the servers in memory, by the server's name: a server opened again by its name has its rows."""

_plugins: dict[str, tuple[Plugin, float]] = {}
"""The plugins that were registered and their timeouts, by scheme."""


def open_server(url: str) -> ParameterServer:
    """The parameter server at a URL, `scheme://what the scheme takes`.

        redis://HOST, rediss://HOST     a Redis server, or a cluster; `redis_url.py` has the options
        memory://NAME                   this process's memory, shared by all who open the name
        file://PATH                     a folder; each push is durable when it returns
        file://PATH?save_bytes=N        a folder; rows are saved when so many bytes were pushed, and on `close`
        file://PATH?lost=accept         a folder whose process ended without saving: its last save
        the IO_type of a plugin         what `register_io` has loaded

    Raises:
        ValueError: no scheme of the name is known, or it takes other options.
        ServerError: it cannot be reached.
        ImportError: what it needs is not installed; the message says what to install.
    """
    scheme, rest = check_url(url)
    if scheme in _plugins:
        plugin, timeout = _plugins[scheme]
        return PluginServer(plugin, rest, timeout)
    return _OPEN[scheme](rest)


def check_url(url: str) -> tuple[str, str]:
    """The scheme of a URL, and what follows it. ValueError if no scheme of the name is known."""
    scheme, separator, rest = url.partition("://")
    known = dict.fromkeys([*_OPEN, *_plugins])
    if not separator or scheme not in known:
        raise ValueError(
            f"a parameter server's URL begins with one of {', '.join(f'{s}://' for s in known)}; got"
            f" {f'{scheme}://' if separator else 'none of these'}; register_io adds the scheme of a plugin"
        )
    return scheme, rest


def check_installed(url: str) -> None:
    """Raise ImportError unless all is installed that the server at a URL needs, and say what to install."""
    scheme = url.partition("://")[0]
    if scheme in ("redis", "rediss"):
        need("redis", f"{scheme}://", "redis")


def register_io(path: AnyPath, timeout: float = TIMEOUT_S) -> None:
    """Let `scheme://config` name the parameter server in a shared library, whose `IO_type` is the scheme.

    A scheme that is known already is left as it is, with a warning; but a plugin may take the place of `memory://`.

    Args:
        path: of the library, a plugin of TorchRec's dynamic embedding.
        timeout: seconds that it has for each request.

    Raises:
        ServerError: it cannot be loaded, or is no such plugin.
        ValueError: the timeout is not above 0.

    Reference: `torch.ops.tde.register_io` of TorchRec's dynamic embedding.
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds, got {timeout}")
    plugin = load_plugin(path)
    if plugin.type in _plugins or (plugin.type in _OPEN and plugin.type != "memory"):
        its = f"the plugin {_plugins[plugin.type][0].path}" if plugin.type in _plugins else "a server of oneemb's own"
        warnings.warn(
            f"{plugin.type}:// is {its} already; the plugin {plugin.path} of the same IO_type was ignored", stacklevel=2
        )
        return
    _plugins[plugin.type] = (plugin, timeout)


def _memory(name: str) -> ParameterServer:
    return MemoryServer(_in_memory.setdefault(name, {}), f"memory://{name}")


def _file(path: str) -> ParameterServer:
    from oneemb.storage.remote.file_server import open_file_server

    return open_file_server(path)


def _redis(scheme: str) -> Callable[[str], ParameterServer]:
    def opened(rest: str) -> ParameterServer:
        check_installed(f"{scheme}://")
        from oneemb.storage.remote.redis_server import RedisServer

        return RedisServer(scheme, rest)

    return opened


_OPEN: dict[str, Callable[[str], ParameterServer]] = {
    "memory": _memory,
    "redis": _redis("redis"),
    "rediss": _redis("rediss"),
    "file": _file,
}
