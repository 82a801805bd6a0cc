"""Which parameter server a URL names."""

from collections.abc import Callable

from oneemb.storage.remote.memory_server import MemoryServer
from oneemb.storage.remote.parameter_server import ParameterServer

__all__ = ["check_url", "open_server"]

_in_memory: dict[str, dict[tuple[str, int, int], bytes]] = {}
"""What the servers in memory keep, by name: whoever opens a name again finds its rows."""


def open_server(url: str) -> ParameterServer:
    """The parameter server at a URL, `scheme://what the scheme takes`.

    Raises:
        ValueError: no scheme of the name is known, or it takes other options.
        ServerError: it cannot be reached.
    """
    scheme, rest = check_url(url)
    return _OPEN[scheme](rest)


def check_url(url: str) -> tuple[str, str]:
    """The scheme of a URL, and what follows it.

    Raises:
        ValueError: no scheme of the name is known.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _OPEN:
        raise ValueError(
            f"a parameter server's URL begins with one of {', '.join(f'{s}://' for s in _OPEN)}; got"
            f" {f'{scheme}://' if separator else 'none of these'}"
        )
    return scheme, rest


def _memory(name: str) -> ParameterServer:
    return MemoryServer(_in_memory.setdefault(name, {}), f"memory://{name}")


def _redis(scheme: str) -> Callable[[str], ParameterServer]:
    def opened(rest: str) -> ParameterServer:
        try:
            from oneemb.storage.remote.redis_server import RedisServer
        except ModuleNotFoundError as error:
            if error.name not in ("redis", "hiredis"):
                raise
            raise ImportError(f"{scheme}:// needs {error.name}: pip install 'oneemb[redis]'") from error
        return RedisServer(scheme, rest)

    return opened


_OPEN: dict[str, Callable[[str], ParameterServer]] = {
    "memory": _memory,
    "redis": _redis("redis"),
    "rediss": _redis("rediss"),
}
