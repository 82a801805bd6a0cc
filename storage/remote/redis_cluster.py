"""Requests to a cluster of Redis servers, by the client's own `RedisCluster`, which knows which node has which key.

The keys of one request lie on many nodes. So each key becomes a command, and the commands for a node are sent together.

Invariants:
- a process uses connections of its own only;
- a few times, the client repeats commands that nodes refuse while keys move, and commands on a broken connection. It
  closes a connection on which an answer is missing, but cannot make the server forget commands that were sent on it:
  after an error, a write of the failed call may still be carried out.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import redis

from oneemb.storage.remote.parameter_server import ServerError
from oneemb.storage.remote.redis_connections import RedisRequest, client_options, server_error
from oneemb.storage.remote.redis_url import RedisURL


class RedisClusterNodes:
    """Connections to the nodes of a cluster; the URL names one of the nodes. Raises ServerError if that node cannot be
    reached, refuses, or is not part of a cluster."""

    def __init__(self, url: RedisURL):
        self._url = url
        self._client: redis.RedisCluster | None = None
        self._pid = 0
        self._with_server_errors(self._client_here)

    def run(self, requests: Iterable[RedisRequest]) -> None:
        """Send all requests and take their answers, one request after another; see `RedisConnections.run`."""
        for request in requests:
            answers = self._with_server_errors(partial(self._answers, request))
            for answer in answers:
                if isinstance(answer, redis.RedisError):
                    raise server_error(answer, self._url.name) from answer
            request.take(_AS_ONE[request.command](answers))

    def close(self) -> None:
        """End connections."""
        if self._client is not None:
            self._client.close()
        self._client = None

    def _client_here(self) -> redis.RedisCluster:
        if self._client is None or self._pid != os.getpid():
            self.close()
            self._client = redis.RedisCluster(ssl=self._url.tls, **client_options(self._url))
            self._pid = os.getpid()
        return self._client

    def _answers(self, request: RedisRequest) -> list[Any]:
        pipeline = self._client_here().pipeline()
        command = _ONE_KEY.get(request.command, request.command)
        values = [()] * len(request.keys) if request.values is None else [(value,) for value in request.values]
        for key, value in zip(request.keys, values, strict=True):
            pipeline.execute_command(command, key, *value)
        return pipeline.execute(raise_on_error=False)

    def _with_server_errors(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except redis.RedisError as error:
            raise server_error(error, self._url.name) from error
        except redis.exceptions.RedisClusterException as error:
            raise ServerError(
                f"{self._url.name}: the cluster cannot be used ({error}); see `redis-cli cluster info`; if the server"
                " is no cluster, remove `cluster=true` from the URL"
            ) from error


_ONE_KEY = {"MGET": "GET", "MSET": "SET"}
_AS_ONE: dict[str, Callable[[list[Any]], Any]] = {
    "MGET": list,
    "MSET": lambda answers: b"OK" if all(answers) else answers,
    "UNLINK": sum,
    "EXISTS": sum,
    "TYPE": lambda answers: answers[0],
}
"""{command: function that joins the answers for single keys into one answer for the request}."""
