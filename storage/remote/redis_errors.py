"""Causes of errors of the Redis client, and what to do about each.

Invariant: what a message has of an error is the server's or the client's text, which has no password in it.
"""

import redis

from oneemb.storage.remote.parameter_server import ServerError, ServerTimeoutError


def will_pass(error: BaseException) -> bool:
    """Whether a new connection may help: the old one is broken, or the server is not ready yet."""
    lasting = (redis.AuthenticationError, redis.exceptions.AuthorizationError)
    return isinstance(error, redis.ConnectionError) and not isinstance(error, lasting)


def server_error(error: redis.RedisError, name: str, tries: int = 1) -> ServerError:
    """The error that callers see.

    Args:
        name: the server's, without its password.
        tries: how often it was tried.
    """
    if isinstance(error, redis.TimeoutError):
        return ServerTimeoutError(
            f"{name}: no answer in time ({error}); what was asked may have been done. See whether the server is busy or"
            f" stopped, or give it longer by `timeout=` in the URL"
        )
    for kind, told in _MEANING:
        if isinstance(error, kind):
            return ServerError(f"{name}: {told} ({error})")
    for code, told in _CODES.items():
        if str(error).startswith(code):
            return ServerError(f"{name}: {told} ({error})")
    if isinstance(error, redis.ConnectionError):
        times = f" after {tries} tries in a row" if tries > 1 else ""
        return ServerError(
            f"{name}: the connection failed{times} ({error}). See whether a Redis server runs there, and with which"
            f" options: TLS takes rediss://. Once it can be reached the next call works"
        )
    return ServerError(f"{name}: the server refused ({error})")


_MEANING: list[tuple[type[BaseException] | tuple[type[BaseException], ...], str]] = [
    (
        redis.exceptions.OutOfMemoryError,
        "the server is at its memory limit and refuses writes; raise `maxmemory`, or erase rows. Rows that it had"
        " taken before are kept",
    ),
    (redis.ReadOnlyError, "the server is a replica, which takes no writes; name its primary in the URL"),
    (
        redis.AuthenticationError,
        "the server wants another user or password; write them into the URL as `user:password@` or `:password@`",
    ),
    (
        (redis.exceptions.NoPermissionError, redis.exceptions.AuthorizationError),
        "the user may not do this; allow it MGET, MSET, UNLINK, EXISTS, TYPE, PING, CLIENT INFO and CLIENT KILL",
    ),
    (redis.BusyLoadingError, "the server is still loading its data; try again when it is done"),
    (redis.exceptions.MasterDownError, "the server is a replica that has lost its primary; name another in the URL"),
    (
        (redis.exceptions.MovedError, redis.exceptions.AskError, redis.exceptions.ClusterCrossSlotError),
        "the server is a node of a cluster; add `cluster=true` to the URL",
    ),
    (redis.exceptions.ClusterDownError, "the cluster does not serve all keys; see `redis-cli cluster info`"),
]
_CODES = {
    "WRONGTYPE": "a row's key has a value of another type, that something else has put there; give rows a `prefix=`",
    "MISCONF": "the server cannot save to its disk and refuses writes; see its log",
    "DENIED": "the server is in protected mode, which takes loopback connections only; give it a password",
    "NOREPLICAS": "the server has fewer replicas than it is told to write to",
    "DB index is out of range": "the server has no such database; name another by `db=` in the URL",
}
