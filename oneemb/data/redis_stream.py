"""A Redis stream, read by the ids of its entries. Nothing is acknowledged: the position is in the checkpoint.

A place is [milliseconds and sequence number of the entry read last, number of entries up to it since the stream began].
The number shows whether entries behind the place were trimmed before they were read.
"""

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from oneemb.data.lines import columns_of, parse_json, parse_strings, schema_of
from oneemb.data.source import POLL_S, ChangedSourceError, Piece, Position, read_stretches, share_stretches
from oneemb.kernels.extras import need

_ENTRIES = 8192
"""Largest number of entries in one answer of the server."""
_FIRST_ENTRIES = 64
_ANSWER_BYTES = 1 << 24
"""Size of an answer, about, to which the number of entries is fitted."""


class RedisStream:
    """Rows of a Redis stream, also of entries that are added later. Needs Redis 7 and `pip install 'oneemb[redis]'`.

    Each entry is a row: its fields are the columns, as text; or one field has a JSON object. The stream's MAXLEN or
    MINID must leave all entries behind the last checkpoint.

    Args:
        url: URL of the server, `redis://HOST:PORT/DATABASE` or `rediss://...`, as `redis.Redis.from_url` takes it.
        key: key of the stream.
        schema: pyarrow.Schema, or {name of a column: pyarrow type, or its name such as "int64"}.
        json_field: name of the field with a JSON object. None = fields are columns.
    """

    is_live = True

    def __init__(self, url: str, key: str, schema: Any, json_field: str | None = None):
        self._redis = need("redis", "RedisStream", "redis")
        self._url, self._key, self._json_field = url, key, json_field
        self._schema = schema_of(schema, "RedisStream")
        self.name = f"stream {key!r} of {url.rpartition('@')[2]}"

    def begin(self, rank: int, world_size: int) -> Position:
        return [[[0, 0, -1], None, rank, world_size]]

    def share(self, positions: Sequence[Position], rank: int, world_size: int) -> Position:
        return share_stretches(positions, rank, world_size)

    def read(self, position: Position, columns: Sequence[str]) -> Iterator[Piece | None]:
        schema = columns_of(self._schema, columns)
        client = self._redis.Redis.from_url(self._url, protocol=2)
        for command in ("XRANGE", "XREAD", "XINFO STREAM"):
            client.set_response_callback(command, lambda answer, **_: answer)

        def stretch(at: Any, end: Any, rank: int, world_size: int) -> Iterator[Piece | None]:
            count = _FIRST_ENTRIES
            while end is None or at < end:
                entries, at = self._entries(client, at, end, min(count, _ENTRIES))
                if not entries:
                    if end is not None:
                        return
                    yield None
                    client.xread({self._key: _id(at)}, 1, round(POLL_S * 1000))
                    continue
                first, count = at[2], _fitting(entries)
                mine = [n for n, entry in enumerate(entries) if zlib.crc32(entry[0]) % world_size == rank]
                if mine:
                    yield self._piece([entries[n] for n in mine], [first + n for n in mine], schema)
                at = [*_numbers(entries[-1][0]), first + len(entries)]

        try:
            yield from read_stretches(position, stretch)
        finally:
            client.close()

    def _entries(self, client: Any, at: Any, end: Any, count: int) -> tuple[list[Any], Any]:
        """(at most `count` entries behind a place, the place with its number of entries).

        Raises:
            ChangedSourceError: entries behind the place are gone.
        """
        last = "+" if end is None else _id(end)
        with client.pipeline(transaction=True) as pipe:
            pipe.xrange(self._key, f"({_id(at)}", last, count)
            pipe.execute_command("XINFO STREAM", self._key)
            entries, info = pipe.execute(raise_on_error=False)
        if isinstance(entries, Exception):
            raise entries
        if isinstance(info, self._redis.ResponseError) and "no such key" in str(info):
            if at[2] > 0:
                raise self._gone("the stream is gone")
            return [], at
        if isinstance(info, Exception):
            raise info
        facts = dict(zip(info[::2], info[1::2], strict=True))
        added, length = facts.get(b"entries-added"), facts[b"length"]
        if added is None:
            raise RuntimeError(f"{self.name} must be on Redis 7 or newer, which counts the entries that were added")
        removed = added - length
        if at[2] < 0:  # the oldest entry that is there
            at = [*at[:2], removed]
        if removed > at[2]:
            raise self._gone(f"{removed - at[2]} entries behind {_id(at)} were trimmed before they were read")
        first = facts[b"first-entry"]
        # If fewer entries were removed than were read, an entry that was read is still there, at or before the place.
        has_none = at[2] > removed and (first is None or _numbers(first[0]) > at[:2])
        if has_none or added < at[2] or _numbers(facts[b"last-generated-id"]) < at[:2]:
            raise self._gone(f"the stream is another one, which has had {added} entries only")
        return entries, at

    def _gone(self, why: str) -> ChangedSourceError:
        return ChangedSourceError(
            f"{self.name} must have the entries behind the loader's position, and {why}; begin anew without a position,"
            " and let MAXLEN or MINID leave the entries since the last checkpoint"
        )

    def _piece(self, entries: list[Any], numbers: list[int], schema: Any) -> Piece:
        rows, bad = self._rows(list(map(itemgetter(1), entries)), schema)
        ids = list(map(itemgetter(0), entries))

        def at(k: int) -> list[int]:
            # The place before entry k is the place behind entry k - 1.
            if k:
                return [*_numbers(ids[k - 1]), numbers[k - 1] + 1]
            milliseconds, number = _numbers(ids[0])
            before = [milliseconds, number - 1] if number else [milliseconds - 1, (1 << 64) - 1]
            return [*before, numbers[0]]

        return Piece(rows, at, lambda k: f"{self.name}, entry {ids[k].decode()}", bad=bad)

    def _rows(self, fields: list[list[bytes]], schema: Any) -> tuple[Any, dict[int, str]]:
        """(table, {row: why it is bad}) of entries, each [name, value, name, value, ...]."""
        width = len(fields[0])
        flat = list(chain.from_iterable(fields))
        names = flat[:width:2]
        # Producers give all entries the same fields; others are read one by one.
        columns: dict[str, Any]
        if set(map(len, fields)) == {width} and all(
            flat[2 * n :: width].count(name) == len(fields) for n, name in enumerate(names)
        ):
            columns = {name.decode(errors="replace"): flat[2 * n + 1 :: width] for n, name in enumerate(names)}
        else:
            rows = [dict(zip(one[::2], one[1::2], strict=True)) for one in fields]
            wanted = schema.names if self._json_field is None else [self._json_field]
            columns = {name: [row.get(name.encode()) for row in rows] for name in wanted}
        if self._json_field is None:
            return parse_strings({name: columns.get(name, [None] * len(fields)) for name in schema.names}, schema)
        texts = columns.get(self._json_field, [None] * len(fields))
        table, bad = parse_json([text or b"" for text in texts], schema)
        return table, {row: why if texts[row] else f"it has no field {self._json_field!r}" for row, why in bad.items()}


def _fitting(entries: list[Any]) -> int:
    """Number of entries of an answer, if further entries are as large as some of these."""
    some = entries[:: max(1, len(entries) // 16)]
    return max(1, _ANSWER_BYTES // max(sum(map(len, fields)) for _, fields in some))


def _numbers(entry_id: bytes) -> list[int]:
    return [int(part) for part in entry_id.split(b"-")]


def _id(at: Any) -> str:
    return f"{at[0]}-{at[1]}"
