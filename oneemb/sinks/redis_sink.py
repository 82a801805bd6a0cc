"""Sink of rows in a Redis server, in the layout of `storage/remote/redis_server.py`, and the version beside them.

    {prefix}_table_{embedding}.{table}_gid_{id}_cid_0_osid_0    weights, float32
    {prefix}_table_{embedding}.{table}_gid_{id}_cid_0_osid_1    optimizer state, float32, if it is published
    {prefix}_version                                            JSON: {"version": {...} or null, "choice": {...}}

Rows are written by transactions. Each one watches the key of the version and changes it. So a transaction that the
server carries out late, or that a second publisher sends, is refused.

Invariants:
- the rows, erased rows and the version of changes of at most `atomic_bytes` are written by one transaction;
- while the rows of larger changes are written, and after a kill in between, the version is null.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from oneemb.kernels.extras import need
from oneemb.kernels.threads import Threads
from oneemb.sinks.changes import Changes
from oneemb.sinks.version import PublishError, TableVersion, choice_of, load_json
from oneemb.storage.hash_index import HashIndex

_PIECE_BYTES = 8 << 20
_KEY_BYTES = 64
_SCANNED = 10_000

_Pairs = list[bytes]
"""Keys and values of MSET: [key, value, key, value, ...]."""


class RedisSink:
    """Rows in a Redis server. Needs `pip install 'oneemb[redis]'`.

    A row of `id` in table 0 of embedding "items" is the value of `{prefix}_table_items.0_gid_{id}_cid_0_osid_0`:
    weights as float32. `{prefix}_version` is JSON with the name, identity and sequence of the version.

    Args:
        url: URL of the server, as for [parameter servers](../remote.md), with a `prefix` of its own. Clusters cannot be
            used, since they have no transactions.
        tables: numbers of the tables to publish; None = all.
        with_state: if True, publish the optimizer state too.
        atomic_bytes: changes of at most so many bytes of rows are written by one transaction, so that readers see one
            version. The server does nothing else meanwhile. Larger changes are written in pieces, and the version is
            null until the last one.
        max_rows: largest number of rows, of these tables together; None = all.
            [A cap](../publish.md#a-cap) says which rows stay.

    Raises:
        ValueError: the URL is invalid.
        ImportError: the package is not installed.
    """

    wants_whole = False

    def __init__(
        self, url: str, *, tables: Sequence[int] | None = None, with_state: bool = False, atomic_bytes: int = 64 << 20,
        max_rows: int | None = None,
    ):  # fmt: skip
        need("redis", "a sink in Redis", "redis")
        from oneemb.storage.remote.redis_url import read_redis_url

        scheme, separator, rest = url.partition("://")
        if scheme not in ("redis", "rediss") or not separator:
            raise ValueError(f"url must begin with redis:// or rediss://, got {scheme!r} before ://")
        self._url = read_redis_url(scheme, rest)
        self.name = self._url.name
        if not self._url.prefix or self._url.cluster:
            raise ValueError(f"{self.name}: the URL of a sink must have a `prefix=` of its own, and no `cluster=true`")
        self._key = f"{self._url.prefix}_version".encode()
        self._choice, self.max_rows = choice_of(tables, with_state, max_rows), max_rows
        self._tables, self._with_state, self._atomic_bytes = self._choice["tables"], with_state, atomic_bytes
        self._client: Any = None

    def version(self) -> TableVersion | None:
        with _server_errors(self.name):
            found = self._connected().get(self._key)
        if found is None:
            return None
        state = load_json(found, f"{self.name}, key {self._key.decode()}")
        shown = state.get("version", 0) if isinstance(state, dict) else state
        if isinstance(state, dict) and state.get("choice", self._choice) != self._choice:
            return None  # Rows that were not chosen before are missing.
        return None if shown is None else TableVersion.of_fields(shown, f"{self.name}, key {self._key.decode()}")

    def apply(self, changes: Changes) -> None:
        with _server_errors(self.name):
            client = self._connected()
            before = client.get(self._key)
            done = json.dumps({"version": changes.version.to_fields(), "choice": self._choice}).encode()
            index = HashIndex(Threads(1)) if changes.is_whole else None
            size = changes.num_rows * (_KEY_BYTES + 4 * changes.rows.format.storage_dim)
            if size <= self._atomic_bytes:
                pairs = [one for piece in self._pieces(changes, index) for one in piece]
                gone = [key for keys in self._gone(changes, index) for key in keys]
                self._write(before, pairs, gone, done)
                return
            piece = 0
            for pairs in self._pieces(changes, index):
                before, piece = self._write(before, pairs, [], self._unfinished(changes, piece)), piece + 1
            for gone in self._gone(changes, index):
                before, piece = self._write(before, [], gone, self._unfinished(changes, piece)), piece + 1
            self._write(before, [], [], done)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> Any:
        if self._client is None:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry

            from oneemb.storage.remote.redis_connections import client_options

            options = client_options(self._url)
            if self._url.tls:
                options["ssl"] = True
            self._client = redis.Redis(db=self._url.db, retry=Retry(NoBackoff(), 0), **options)
        return self._client

    def _write(self, before: bytes | None, pairs: _Pairs, gone: list[bytes], after: bytes) -> bytes:
        """Write rows and erase others, if the version's value is still `before`, and make the value `after`. Returns
        `after`."""
        import redis

        with self._client.pipeline(transaction=True) as pipe:
            pipe.watch(self._key)
            try:
                if pipe.get(self._key) != before:
                    raise redis.WatchError
                pipe.multi()
                if pairs:
                    pipe.execute_command("MSET", *pairs)
                if gone:
                    pipe.execute_command("UNLINK", *gone)
                pipe.set(self._key, after)
                answers = pipe.execute()
            except redis.WatchError:
                raise PublishError(
                    f"{self.name}: key {self._key.decode()} must stay as this publisher has written it, another"
                    " publisher has changed it, or the connection was lost; see whether two publishers have this prefix"
                ) from None
        if len(answers) != 1 + bool(pairs) + bool(gone) or not all(answer is not None for answer in answers):
            raise PublishError(f"{self.name}: the server must answer to each write, it answered {str(answers)[:80]}")
        return after

    def _unfinished(self, changes: Changes, piece: int) -> bytes:
        return json.dumps({"version": None, "writing": changes.version.to_fields(), "piece": piece}).encode()

    def _pieces(self, changes: Changes, index: HashIndex | None) -> Iterator[_Pairs]:
        """Keys and values of the rows, in pieces. Puts the rows' keys into `index`, if there is one."""
        row_bytes = _KEY_BYTES + 4 * changes.rows.format.storage_dim
        batch_size = max(1, _PIECE_BYTES // row_bytes)
        for batch in changes.batches(batch_size, tables=self._tables, with_state=self._with_state):
            assert batch.table_N is not None
            if index is not None:
                index.put(batch.table_N, batch.id_N, np.zeros(len(batch.id_N), np.int64))
            pairs: _Pairs = [b""] * (2 * len(batch.id_N))
            keys = self._keys(changes, batch.table_N, batch.id_N, 0)
            pairs[0::2], pairs[1::2] = keys, _values(batch.weight_ND)
            if batch.state_NZ is not None and batch.state_NZ.shape[1]:
                states = [b""] * len(pairs)
                states[0::2] = self._keys(changes, batch.table_N, batch.id_N, 1)
                states[1::2] = _values(batch.state_NZ)
                pairs += states
            yield pairs

    def _gone(self, changes: Changes, index: HashIndex | None) -> Iterator[list[bytes]]:
        """Keys to erase, in pieces. `index`: keys of all rows, if the changes are whole."""
        if index is None:
            table_N, id_N = changes.gone(tables=self._tables)
            for begin in range(0, len(id_N), _SCANNED):
                n = slice(begin, begin + _SCANNED)
                keys = self._keys(changes, table_N[n], id_N[n], 0)
                yield keys + (self._keys(changes, table_N[n], id_N[n], 1) if self._with_state else [])
            return
        head = f"{self._url.prefix}_table_{changes.version.embedding}.".encode("utf-8", "surrogatepass")
        cursor = -1
        while cursor:
            cursor, keys = self._client.scan(max(cursor, 0), match=_pattern(head) + b"*", count=_SCANNED)
            there = [(key, *where) for key in set(keys) if (where := _table_and_id(key, head)) is not None]
            if there:
                table_N = np.array([table for _, table, _ in there], np.int32)
                place_N = index.find(table_N, np.array([id for _, _, id in there], np.int64))
                old = [
                    key
                    for (key, _, _), place in zip(there, place_N.tolist(), strict=True)
                    if place < 0 or not self._with_state and key.endswith(b"_osid_1")
                ]
                if old:
                    yield old

    def _keys(self, changes: Changes, table_N: np.ndarray, id_N: np.ndarray, part: int) -> list[bytes]:
        from oneemb.storage.remote.redis_server import row_keys

        keys = [b""] * len(id_N)
        for table in np.unique(table_N).tolist():
            at_N = np.flatnonzero(table_N == table)
            name = f"{changes.version.embedding}.{table}"
            for n, key in zip(at_N.tolist(), row_keys(self._url.prefix, name, id_N[at_N], part), strict=True):
                keys[n] = key
        return keys


def _values(value_ND: np.ndarray) -> list[bytes]:
    """Bytes of each row."""
    value_ND = np.ascontiguousarray(value_ND, np.float32)
    return value_ND.view(f"V{4 * value_ND.shape[1]}").ravel().tolist()


def _pattern(text: bytes) -> bytes:
    """Pattern of SCAN that matches a text literally."""
    return b"".join(b"\\" + bytes([one]) if one in b"*?[]^\\-" else bytes([one]) for one in text)


def _table_and_id(key: bytes, head: bytes) -> tuple[int, int] | None:
    """(table, id) in the key of a part of a row; None = another key."""
    table, _, rest = key[len(head) :].partition(b"_gid_")
    id, _, part = rest.partition(b"_cid_0_osid_")
    try:
        return (int(table), int(id)) if part in (b"0", b"1") else None
    except ValueError:
        return None


class _server_errors:
    """Context that turns errors of the client into `ServerError`. `name`: the server's URL without its password."""

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        import redis

        from oneemb.storage.remote.redis_connections import server_error

        if isinstance(error, redis.RedisError):
            raise server_error(error, self._name) from error
