"""Opens parameter servers by their URLs; and the server in memory."""

import warnings
from collections.abc import Callable, Sequence

import numpy as np

from oneemb.kernels.extras import need
from oneemb.storage.fs import AnyPath
from oneemb.storage.remote.parameter_server import ParameterServer, wrong_length
from oneemb.storage.remote.plugin_abi import Plugin, load_plugin
from oneemb.storage.remote.plugin_server import TIMEOUT_S, PluginServer


class MemoryServer:
    """A parameter server in the memory of this process, for tests and trials. `values`: {(table, id, part): bytes};
    several servers may share it."""

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
        """Do nothing: there are no connections and threads to end."""


_in_memory: dict[str, dict[tuple[str, int, int], bytes]] = {}
"""{name of a server in memory: its values}. A server that is opened again by its name has its old rows."""

_plugins: dict[str, tuple[Plugin, float]] = {}
"""{scheme: (registered plugin, timeout)}."""


def open_server(url: str) -> ParameterServer:
    """Open the parameter server at a URL.

        redis://HOST, rediss://HOST     a Redis server, or a cluster; `redis_url.py` has the options
        memory://NAME                   this process's memory, shared by all servers with the same name
        file://PATH                     a folder; each push is durable when it returns
        file://PATH?save_bytes=N        a folder; rows are saved after each N bytes of pushes, and on `close`
        file://PATH?lost=accept         a folder that was not closed: opens it as last saved; later pushes are lost
        SCHEME://CONFIG                 a plugin that `register_io` has loaded and whose IO_type is SCHEME

    Raises:
        ValueError: the scheme is unknown, or the rest of the URL is invalid.
        ServerError: the server cannot be reached.
        ImportError: a package is not installed; the message says what to install.
    """
    scheme, rest = check_url(url)
    if scheme in _plugins:
        plugin, timeout = _plugins[scheme]
        return PluginServer(plugin, rest, timeout)
    return _OPEN[scheme](rest)


def check_url(url: str) -> tuple[str, str]:
    """(scheme of a URL, rest of the URL after `://`). Raises ValueError if the scheme is unknown."""
    scheme, separator, rest = url.partition("://")
    known = dict.fromkeys([*_OPEN, *_plugins])
    if not separator or scheme not in known:
        raise ValueError(
            f"a parameter server's URL begins with one of {', '.join(f'{s}://' for s in known)}; got"
            f" {f'{scheme}://' if separator else 'none of these'}; register_io adds the scheme of a plugin"
        )
    return scheme, rest


def check_installed(url: str) -> None:
    """Raise ImportError, which says what to install, if the server at a URL needs a package that is not installed."""
    scheme = url.partition("://")[0]
    if scheme in ("redis", "rediss"):
        need("redis", f"{scheme}://", "redis")


def register_io(path: AnyPath, timeout: float = TIMEOUT_S) -> None:
    """Register a plugin: from now on `scheme://config` opens the parameter server in a shared library, where the scheme
    is the library's `IO_type`.

    If the scheme is known already, the plugin is ignored with a warning; but a plugin may replace `memory://`.

    Args:
        path: the shared library, a plugin for TorchRec's dynamic embedding.
        timeout: seconds that the plugin has for each request.

    Raises:
        ServerError: the library cannot be loaded, or is no such plugin.
        ValueError: the timeout is not above 0.

    Reference: `torch.ops.tde.register_io` of TorchRec's dynamic embedding.
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds, got {timeout}")
    plugin = load_plugin(path)
    if plugin.type in _plugins or (plugin.type in _OPEN and plugin.type != "memory"):
        known = f"the plugin {_plugins[plugin.type][0].path}" if plugin.type in _plugins else "a server of oneemb's own"
        warnings.warn(
            f"{plugin.type}:// is {known} already; the plugin {plugin.path} of the same IO_type was ignored",
            stacklevel=2,
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
