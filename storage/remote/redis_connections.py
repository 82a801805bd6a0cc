"""Requests to one Redis server, over several connections at a time; and the errors of its client, as callers see them.

Several requests are under way on a connection; answers come in the order of requests.

Invariants:
- an answer is taken only from the connection on which its request was sent, in the order of requests. A connection on
  which anything fails is closed, and requests that were not answered are sent again on a new connection;
- an abandoned write is never carried out later: before anything else is sent, the server is told to end the connection
  of the write (CLIENT KILL), by the connection's number and address, which no other connection has;
- a process uses connections of its own only; connections from before a fork are closed and made anew;
- no call waits longer than the timeout for the next bytes, nor reconnects more than `retry_limit` times in a row;
- an error contains the server's or the client's own text, which has no password in it.
"""

import os
import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from oneemb.storage.remote.parameter_server import ServerError, ServerTimeoutError
from oneemb.storage.remote.redis_url import RedisURL

_AHEAD = 3
"""Requests under way on a connection, so that the server works on one while this process reads the answer before."""
_READ_BYTES = 2**18
_FIRST_WAIT_S, _LAST_WAIT_S = 0.1, 3.0


@dataclass(frozen=True)
class RedisRequest:
    """A command on some keys. `values`: values of equal length to write, one for each key. `take`: function that
    receives the complete answer."""

    command: str
    keys: list[bytes]
    take: Callable[[Any], None]
    values: list[bytes] | None = None


def client_options(url: RedisURL) -> dict[str, Any]:
    """Arguments for the client's classes."""
    options: dict[str, Any] = {
        "host": url.host,
        "port": url.port,
        "username": url.user,
        "password": url.password,
        "socket_timeout": url.timeout_s,
        "socket_connect_timeout": url.timeout_s,
        "health_check_interval": url.heartbeat_s,
        "protocol": 2,
    }
    if url.tls:
        options |= {
            "ssl_cert_reqs": "required" if url.verify else "none",
            "ssl_check_hostname": url.verify,
            "ssl_ca_certs": url.ca_certs,
            "ssl_certfile": url.certfile,
            "ssl_keyfile": url.keyfile,
        }
    return options


class RedisConnections:
    """Connections to one server. Raises ServerError if the server cannot be reached or refuses the login."""

    def __init__(self, url: RedisURL):
        self._url = url
        self._links: list[_Link] = []
        self._threads: ThreadPoolExecutor | None = None
        self._pid = 0
        self._begin()
        self._drive(self._links[0], _Queue(()))

    def run(self, requests: Iterable[RedisRequest]) -> None:
        """Send all requests and take their answers. After a failure no answer is taken any more, and requests may have
        been carried out: ServerTimeoutError if an answer is late, ServerError if the server cannot be reached or
        refuses."""
        if not self._links or self._pid != os.getpid():
            self._begin()
        for link in self._links:
            if link.given_up is not None:
                self._drive(link, _Queue(()))
        queue = _Queue(requests)
        others = [self._threads.submit(self._drive, link, queue) for link in self._links[1:]] if self._threads else []
        try:
            self._drive(self._links[0], queue)
        finally:
            failed = [error for other in others if (error := other.exception()) is not None]
        if failed:
            raise failed[0]

    def close(self) -> None:
        """End connections and threads."""
        if self._threads is not None and self._pid == os.getpid():
            self._threads.shutdown()
        for link in self._links:
            link.close()
        self._links, self._threads = [], None

    def _begin(self) -> None:
        self.close()
        self._pid = os.getpid()
        self._links = [_Link(self._url) for _ in range(self._url.num_threads)]
        if len(self._links) > 1:
            self._threads = ThreadPoolExecutor(len(self._links) - 1, "oneemb-redis")

    def _drive(self, link: "_Link", queue: "_Queue") -> None:
        """Send requests of the queue on a connection and take their answers, until none is left."""
        sent: deque[RedisRequest] = deque()
        failures = 0
        while True:
            try:
                link.make_ready()
                while True:
                    while len(sent) < _AHEAD and (request := queue.next()) is not None:
                        sent.append(request)
                        link.send(request)
                    if not sent:
                        return
                    sent[0].take(link.answer())
                    sent.popleft()
                    failures = 0
            except BaseException as error:
                link.give_up(writes=any(request.values is not None for request in sent))
                failures += 1
                if will_pass(error) and failures <= self._url.retry_limit:
                    queue.put_back(sent)
                    sent.clear()
                    wait_s = min(_FIRST_WAIT_S * 2 ** (failures - 1), _LAST_WAIT_S) * random.uniform(0.75, 1.25)
                    if queue.stopped.wait(wait_s):
                        return
                    continue
                queue.stopped.set()
                if isinstance(error, redis.RedisError):
                    raise server_error(error, self._url.name, failures) from error
                raise


class _Queue:
    """Queue of requests that several threads send."""

    def __init__(self, requests: Iterable[RedisRequest]):
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._again: deque[RedisRequest] = deque()
        self._requests = iter(requests)

    def next(self) -> RedisRequest | None:
        """The next request to send; None if there is none, or if a thread has failed."""
        with self._lock:
            if self.stopped.is_set():
                return None
            return self._again.popleft() if self._again else next(self._requests, None)

    def put_back(self, requests: Iterable[RedisRequest]) -> None:
        """Put unanswered requests back, to be sent again."""
        with self._lock:
            self._again.extend(requests)


class _Link:
    """One connection to the server, made anew after a failure. `given_up` names an earlier connection with abandoned
    writes that the server has not ended yet."""

    def __init__(self, url: RedisURL):
        self.given_up: tuple[str, ...] | None = None
        self._url = url
        self._open = False
        self._known: tuple[str, ...] = ()
        make = redis.SSLConnection if url.tls else redis.Connection
        never = Retry(NoBackoff(), 0)
        self._connection = make(db=url.db, retry=never, socket_read_size=_READ_BYTES, **client_options(url))

    def make_ready(self) -> None:
        """Connect if necessary, and make sure that no answer is due and no abandoned write of an earlier connection can
        still be carried out."""
        if self._open:
            try:
                if not self._connection.can_read(0):
                    self._connection.check_health()
                    return
            except (redis.ConnectionError, redis.TimeoutError):
                pass
            self.give_up(writes=False)
        self._connection.connect()
        self._known = self._client_info()
        if self.given_up is not None:
            self._forget(self.given_up)
            self.given_up = None
        self._open = True

    def send(self, request: RedisRequest) -> None:
        if request.values is None:
            self._send(self._connection.pack_command(request.command, *request.keys))
        else:
            self._send([_packed_pairs(request.command, request.keys, request.values)])

    def answer(self) -> Any:
        return self._connection.read_response()

    def give_up(self, writes: bool) -> None:
        """Close the connection. `writes`: whether writes are under way on it, which the server must then abandon."""
        if writes and self._open:
            self.given_up = self._known
        self._open = False
        self._connection.disconnect()

    def close(self) -> None:
        self.give_up(writes=False)

    def _send(self, packed: Any) -> None:
        self._connection.send_packed_command(packed, check_health=False)

    def _ask(self, *words: str) -> Any:
        self._send(self._connection.pack_command(*words))
        return self.answer()

    def _client_info(self) -> tuple[str, ...]:
        """(number, address) by which the server knows this connection; () if the server does not say."""
        try:
            info = self._ask("CLIENT", "INFO").decode()
        except redis.ResponseError:
            return ()
        known = re.match(r"id=(\d+) addr=(\S+) ", info)
        return known.groups() if known else ()

    def _forget(self, known: tuple[str, ...]) -> None:
        try:
            if known:
                self._ask("CLIENT", "KILL", "ID", known[0], "ADDR", known[1])
                return
            reason = "it does not say the number of a connection"
        except redis.ResponseError as error:
            reason = str(error)
        raise ServerError(
            f"{self._url.name}: writes of a broken connection may still be carried out, since the server does not end"
            f" the connection ({reason}); the server must be Redis 6.2 or later and allow CLIENT INFO and CLIENT KILL."
            " Open the server again when it is idle"
        )


def _packed_pairs(command: str, keys: list[bytes], values: list[bytes]) -> bytes:
    """Bytes of a command with a value behind each key: an array of strings, each with its length before it. Takes half
    the time of the client's `pack_command`. https://redis.io/docs/latest/develop/reference/protocol-spec/"""
    pieces = [b""] * (2 * len(keys))
    size = len(values[0])
    pieces[0::2] = [b"\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, size) for key in keys]
    pieces[1::2] = values
    return b"*%d\r\n$%d\r\n%b%b\r\n" % (len(pieces) + 1, len(command), command.encode(), b"".join(pieces))


# ---- errors ----------------------------------------------------------------------------------------------------------


def will_pass(error: BaseException) -> bool:
    """Whether a new connection may help: the old one is broken, or the server is not ready yet."""
    lasting = (redis.AuthenticationError, redis.exceptions.AuthorizationError)
    return isinstance(error, redis.ConnectionError) and not isinstance(error, lasting)


def server_error(error: redis.RedisError, name: str, tries: int = 1) -> ServerError:
    """The error that callers see in place of the client's. `name`: the server's URL without its password; `tries`:
    number of failures in a row."""
    if isinstance(error, redis.TimeoutError):
        return ServerTimeoutError(
            f"{name}: no answer in time ({error}); the call may have been carried out. See whether the server is busy"
            f" or stopped, or set a longer `timeout=` in the URL"
        )
    for kind, meaning in _MEANING:
        if isinstance(error, kind):
            return ServerError(f"{name}: {meaning} ({error})")
    for code, meaning in _CODES.items():
        if str(error).startswith(code):
            return ServerError(f"{name}: {meaning} ({error})")
    if isinstance(error, redis.ConnectionError):
        times = f" after {tries} tries in a row" if tries > 1 else ""
        return ServerError(
            f"{name}: the connection failed{times} ({error}). See whether a Redis server runs there, and with which"
            f" options: TLS takes rediss://. Once the server can be reached, the next call works"
        )
    return ServerError(f"{name}: the server refused ({error})")


_MEANING: list[tuple[type[BaseException] | tuple[type[BaseException], ...], str]] = [
    (
        redis.exceptions.OutOfMemoryError,
        "the server is at its memory limit and refuses writes; raise `maxmemory`, or erase rows. Rows that were pushed"
        " before are kept",
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
    "WRONGTYPE": "a row's key has a value of another type, which another program has written; give rows a `prefix=`",
    "MISCONF": "the server cannot save to its disk and refuses writes; see its log",
    "DENIED": "the server is in protected mode, which takes loopback connections only; give it a password",
    "NOREPLICAS": "the server has fewer replicas than it is told to write to",
    "DB index is out of range": "the server has no such database; name another by `db=` in the URL",
}
