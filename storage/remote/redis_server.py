"""Rows in a Redis server: `redis://host:port/?prefix=model`, or with TLS `rediss://`.

Each part of a row is a string of raw float32 under the key

    {prefix}_table_{table}_gid_{id}_cid_0_osid_{part}

This is the layout of TorchRec's dynamic embedding, except that the key has the whole id and not the id modulo 2^32.

Invariants:
- table, id and part follow from a key. A table's name may contain anything, since the text behind it has a fixed form;
- a value is copied only from a complete answer, and only if it has the length that was asked for;
- requests have at most `chunk_size` values and about a megabyte.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from oneemb.storage.remote.parameter_server import ServerError, wrong_length
from oneemb.storage.remote.redis_cluster import RedisClusterNodes
from oneemb.storage.remote.redis_connections import RedisConnections, RedisRequest
from oneemb.storage.remote.redis_url import read_redis_url

_REQUEST_BYTES = 2**20
_KEY_BYTES = 64
_VALUE_BYTES = 2**29
"""Largest number of bytes of a Redis string."""


class RedisServer:
    """A Redis server as a parameter server.

    Args:
        scheme: `redis` or `rediss`.
        rest: URL after `://`; see `read_redis_url`, which raises ValueError.

    Raises:
        ServerError: the server cannot be reached or refuses the login.
    """

    def __init__(self, scheme: str, rest: str):
        url = read_redis_url(scheme, rest)
        self.name = url.name
        self._prefix, self._chunk_size = url.prefix, url.chunk_size
        self._server = RedisClusterNodes(url) if url.cluster else RedisConnections(url)

    def pull(self, table: str, id_N: np.ndarray, widths: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        parts = [np.empty((len(id_N), width), np.float32) for width in widths]
        found_NP = np.zeros((len(id_N), len(widths)), np.bool_)

        def requests() -> Iterator[RedisRequest]:
            for p, part in enumerate(parts):
                for begin, end in self._chunks(len(id_N), part.itemsize * part.shape[1]):
                    receiver = _Receiver(self.name, table, p, id_N[begin:end], part[begin:end], found_NP[begin:end, p])
                    yield RedisRequest("MGET", self._keys(table, id_N[begin:end], p), receiver.take)

        self._server.run(requests())
        self._check_missing(table, id_N, found_NP)
        return parts, found_NP

    def push(self, table: str, id_N: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        for p, part in enumerate(parts):
            if part.dtype != np.float32 or part.ndim != 2 or len(part) != len(id_N):
                raise ValueError(
                    f"part {p} must be float32 of shape [{len(id_N)}, width], got {part.dtype} {list(part.shape)}"
                )
            if not 0 < part.shape[1] * part.itemsize <= _VALUE_BYTES:
                raise ValueError(f"part {p} must have 1 to {_VALUE_BYTES // 4} numbers, got {part.shape[1]}")

        def requests() -> Iterator[RedisRequest]:
            for p, part in enumerate(parts):
                size = part.itemsize * part.shape[1]
                for begin, end in self._chunks(len(id_N), size):
                    values = np.ascontiguousarray(part[begin:end]).view(f"V{size}").ravel().tolist()
                    yield RedisRequest("MSET", self._keys(table, id_N[begin:end], p), self._check_ok, values)

        self._server.run(requests())

    def erase(self, table: str, id_N: np.ndarray, parts: int) -> None:
        self._server.run(
            RedisRequest("UNLINK", self._keys(table, id_N[begin:end], p), _ignore)
            for p in range(parts)
            for begin, end in self._chunks(len(id_N), 0)
        )

    def close(self) -> None:
        self._server.close()

    def _chunks(self, size: int, value_bytes: int) -> Iterable[tuple[int, int]]:
        """Ranges of values, one for each request."""
        step = max(1, min(self._chunk_size, _REQUEST_BYTES // (value_bytes + _KEY_BYTES)))
        return ((begin, min(begin + step, size)) for begin in range(0, size, step))

    def _keys(self, table: str, id_N: np.ndarray, part: int) -> list[bytes]:
        return row_keys(self._prefix, table, id_N, part)

    def _check_missing(self, table: str, id_N: np.ndarray, found_NP: np.ndarray) -> None:
        """Raise ServerError if a key that MGET calls missing has a value that is no string: it would pass for a new
        row."""
        suspects: list[bytes] = []

        def take_count(keys: list[bytes], count: Any) -> None:
            suspects.extend(keys if count else ())

        def take_type(key: bytes, kind: Any) -> None:
            if kind not in (b"none", b"string"):  # "string" means that the value was written after MGET.
                raise ServerError(
                    f"{self.name}: the key {key.decode(errors='replace')} of a row of table {table!r} has a value of"
                    f" type {kind.decode()}, which another program has written; give rows a `prefix=` of their own"
                )

        def requests() -> Iterator[RedisRequest]:
            for p in range(found_NP.shape[1]):
                missing_M = id_N[~found_NP[:, p]]
                for begin, end in self._chunks(len(missing_M), 0):
                    keys = self._keys(table, missing_M[begin:end], p)
                    yield RedisRequest("EXISTS", keys, partial(take_count, keys))

        self._server.run(requests())
        self._server.run(RedisRequest("TYPE", [key], partial(take_type, key)) for key in suspects)

    def _check_ok(self, answer: Any) -> None:
        if answer != b"OK":
            raise ServerError(f"{self.name}: the server must answer OK to a write, it answered {str(answer)[:80]}")


def row_keys(prefix: str, table: str, id_N: np.ndarray, part: int) -> list[bytes]:
    """Redis keys of a part of rows."""
    head = f"{prefix}_table_{table}_gid_".encode("utf-8", "surrogatepass").replace(b"%", b"%%")
    key = head + b"%d_cid_0_osid_" + str(part).encode()
    return [key % id for id in id_N.tolist()]


class _Receiver:
    """Receiver of the values of one MGET request: it copies them to `value_ND`."""

    def __init__(
        self, name: str, table: str, part: int, id_N: np.ndarray, value_ND: np.ndarray, found_N: np.ndarray
    ) -> None:
        self._what = name, table, part
        self._id_N, self._value_ND, self._found_N = id_N, value_ND, found_N

    def take(self, answer: Any) -> None:
        """Check an answer to MGET and copy its values to `value_ND`; `found_N` = which keys have a value."""
        name, table, part = self._what
        if not isinstance(answer, list) or len(answer) != len(self._id_N):
            raise ServerError(f"{name}: the server answered {str(answer)[:80]} to MGET of {len(self._id_N)} keys")
        values = answer
        found_N: Any = slice(None)
        if None in answer:
            found_N = np.array([value is not None for value in answer], np.bool_)
            values = [value for value in answer if value is not None]
        size = self._value_ND.shape[1] * self._value_ND.itemsize
        if set(map(len, values)) - {size}:
            n = next(n for n, value in enumerate(answer) if value is not None and len(value) != size)
            raise wrong_length(name, table, self._id_N[n], part, len(answer[n]), size)
        self._value_ND[found_N] = np.frombuffer(b"".join(values), np.float32).reshape(len(values), size // 4)
        self._found_N[found_N] = True


def _ignore(answer: Any) -> None:
    pass
