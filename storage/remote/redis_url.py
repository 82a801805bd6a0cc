"""URL of a Redis server: `redis://[user[:password]@]host[:port][/][?key=value&&key=value]`.

Invariants:
- no error and no name contains a password;
- an unknown option and an invalid value are errors; none is ignored;
- keys of rows never collide if two URLs differ only in `prefix`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote


@dataclass(frozen=True)
class RedisURL:
    """Address and options of a Redis server. Times are in seconds."""

    name: str
    host: str
    port: int
    tls: bool
    user: str | None
    password: str | None = field(repr=False)
    db: int = 0
    prefix: str = ""
    num_threads: int = 1
    timeout_s: float = 10.0
    heartbeat_s: float = 100.0
    retry_limit: int = 3
    chunk_size: int = 1024
    cluster: bool = False
    verify: bool = True
    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None


def read_redis_url(scheme: str, rest: str) -> RedisURL:
    """Parse `scheme://rest`.

    Args:
        scheme: `redis`, or `rediss` for TLS.
        rest: `[[user]:password@]host[:port][/[db]][?options]`. In user, password, host and values, write characters
            that have a meaning in URLs as `%XX`. Options are joined by `&&` or `&` (defaults in brackets):

            - `db` (0): number of the database; `prefix` (none): beginning of all keys, an identifier;
            - `num_threads` (1): number of connections in use at a time;
            - `chunk_size` (1024): largest number of values in one request;
            - `timeout` (10s): for connecting and for each answer; `heartbeat` (100s): a connection that was idle for
              longer is tested before use. Both are a number and `ms`, `s` or `m`;
            - `retry_limit` (3): how often in a row a broken connection is made anew;
            - `cluster` (false): whether the server is a node of a cluster;
            - for TLS only: `verify` (true), `ca_certs`, `certfile` and `keyfile`.

    Raises:
        ValueError: the URL is invalid.
    """
    name = f"{scheme}://{_without_password(rest)}"
    before, _, query = rest.partition("?")
    login, at, place = before.rpartition("@")
    user, colon, password = login.partition(":")
    if at and not (colon and password):
        raise ValueError(f"{name}: the part before `@` must be `user:password` or `:password`")
    place, _, path = place.partition("/")
    if "@" in query:
        raise ValueError(f"{name}: write `@` in an option as %40, and `?` in a password as %3F")
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@\s]+)(?::(\d{1,5}))?", place)
    port = int(found[2] or 6379) if found else 0
    if not found or not 0 < port < 2**16:
        raise ValueError(f"{name}: after `{scheme}://` must come `[user:password@]host[:port]`, port 1 to 65535")
    options: dict[str, Any] = {}
    given = [option for option in re.split("&&?", query) if option]
    if path:
        given.append(f"db={path}")
    for option in given:
        key, equals, value = option.partition("=")
        if not equals or key not in _OPTIONS:
            raise ValueError(f"{name}: no option {key!r}; the options of a Redis server are {', '.join(_OPTIONS)}")
        into, read, meaning = _OPTIONS[key]
        if into in options:
            raise ValueError(f"{name}: `{key}` is given twice")
        try:
            options[into] = read(unquote(value))
        except ValueError:
            raise ValueError(f"{name}: `{key}` must be {meaning}, got {value!r}") from None
    tls = scheme == "rediss"
    for_tls = options.keys() & {"verify", "ca_certs", "certfile", "keyfile"}
    if for_tls and not tls:
        raise ValueError(f"{name}: `{'`, `'.join(sorted(for_tls))}` is for TLS: begin the URL with rediss://")
    if options.get("cluster") and options.get("db"):
        raise ValueError(f"{name}: a cluster has one database, db=0; leave `db=` out")
    host = unquote(found[1].strip("[]"))
    return RedisURL(name, host, port, tls, unquote(user) or None, unquote(password) or None, **options)


def _without_password(rest: str) -> str:
    """Part of a URL after `://`, with *** in place of the password, or of the whole login if the user is no plain
    word."""
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{user}:***@{place}" if re.fullmatch(r"\w*", user) and colon else f"***@{place}" if at else rest


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    def read(value: str) -> int:
        if not re.fullmatch(r"\d{1,10}", value, re.ASCII) or not least <= int(value) <= most:
            raise ValueError
        return int(value)

    return read


def _seconds(value: str) -> float:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m)", value, re.ASCII)
    seconds = float(found[1]) * {"ms": 1e-3, "s": 1.0, "m": 60.0}[found[2]] if found else 0.0
    if not 0 < seconds < 1e6:
        raise ValueError
    return seconds


def _flag(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError
    return value == "true"


def _prefix(value: str) -> str:
    """Check a prefix. Keys begin with `{prefix}_table_{table}_gid_`, and the end of the prefix must follow from the
    key."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) or "_table_" in f"{value}_":
        raise ValueError
    return value


def _path(value: str) -> str:
    if not value:
        raise ValueError
    return value


_DURATION = "a time above zero, as 1.5s, 200ms or 2m"
_OPTIONS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "num_threads": ("num_threads", _whole(1, 64), "a number of connections, 1 to 64"),
    "db": ("db", _whole(0), "the number of a database, 0 or more"),
    "prefix": ("prefix", _prefix, "an identifier, without `_table_` in it and without `_table` at its end"),
    "timeout": ("timeout_s", _seconds, _DURATION),
    "heartbeat": ("heartbeat_s", _seconds, _DURATION),
    "retry_limit": ("retry_limit", _whole(0), "a number of times, 0 or more"),
    "chunk_size": ("chunk_size", _whole(1, 2**20), "a number of values, 1 to 1048576"),
    "cluster": ("cluster", _flag, "true or false"),
    "verify": ("verify", _flag, "true or false"),
    "ca_certs": ("ca_certs", _path, "the path of a file"),
    "certfile": ("certfile", _path, "the path of a file"),
    "keyfile": ("keyfile", _path, "the path of a file"),
}
"""{option in a URL: (field of `RedisURL`, function that reads the value, description for errors)}."""
