"""A Kafka topic, read by offsets. Nothing is committed: the position is in the checkpoint.

A position is [[partition, offset], ...]. Messages of several partitions come in an order that depends on the brokers,
so each piece is of one partition, and can be read again alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import methodcaller
from typing import Any

from oneemb.data.lines import columns_of, parse_json, schema_of
from oneemb.data.source import POLL_S, ChangedSourceError, Piece, Position
from oneemb.kernels.extras import need

_MESSAGES = 8192
"""Largest number of messages that are taken at once."""
_TIMEOUT_S = 30.0


class KafkaTopic:
    """Rows of a Kafka topic, also of messages that are added later. Needs `pip install 'oneemb[kafka]'`.

    Each message's value is a JSON object. Ranks share partitions; each rank needs at least one. Partitions that are
    added later are not read. Tested with the mock broker of librdkafka, not with a cluster.

    Args:
        topic: name of the topic.
        config: configuration of `confluent_kafka.Consumer`, as {"bootstrap.servers": "HOST:PORT"}.
        schema: pyarrow.Schema, or {name of a column: pyarrow type, or its name such as "int64"}.
    """

    is_live = True

    def __init__(self, topic: str, config: Mapping[str, Any], schema: Any):
        self._kafka = need("confluent_kafka", "KafkaTopic", "kafka")
        self.name, self._topic = f"Kafka topic {topic!r}", topic
        self._config = {"group.id": "oneemb", **config, "enable.auto.commit": False, "auto.offset.reset": "error"}
        self._schema = schema_of(schema, "KafkaTopic")

    def begin(self, rank: int, world_size: int) -> Position:
        consumer = self._kafka.Consumer(self._config)
        try:
            topic = consumer.list_topics(self._topic, _TIMEOUT_S).topics[self._topic]
            if topic.error is not None:
                raise RuntimeError(f"{self.name} must exist and be readable: {topic.error}")
            partitions = [self._kafka.TopicPartition(self._topic, number) for number in sorted(topic.partitions)]
            first = [[one.partition, consumer.get_watermark_offsets(one, _TIMEOUT_S)[0]] for one in partitions]
        finally:
            consumer.close()
        return self._mine(first, rank, world_size)

    def share(self, positions: Sequence[Position], rank: int, world_size: int) -> Position:
        return self._mine(sorted(one for position in positions for one in position), rank, world_size)

    def _mine(self, offsets: list[list[int]], rank: int, world_size: int) -> Position:
        if len(offsets) < world_size:
            raise ValueError(
                f"{self.name} must have a partition for each of {world_size} ranks, and has {len(offsets)}; add some,"
                " or train on fewer ranks"
            )
        return offsets[rank::world_size]

    def read(self, position: Position, columns: Sequence[str]) -> Iterator[Piece | None]:
        schema = columns_of(self._schema, columns)
        offsets = {partition: offset for partition, offset in position}
        consumer = self._kafka.Consumer(self._config)
        try:
            consumer.assign([self._kafka.TopicPartition(self._topic, *one) for one in offsets.items()])
            while True:
                messages = consumer.consume(_MESSAGES, POLL_S)
                for message in messages:
                    if message.error() is not None:
                        raise self._error(message)
                messages.sort(key=methodcaller("partition"))
                for partition, group in groupby(messages, methodcaller("partition")):
                    some = list(group)
                    yield self._piece(some, partition, dict(offsets), schema)
                    offsets[partition] = some[-1].offset() + 1
                if len(messages) < _MESSAGES:
                    yield None
        finally:
            consumer.close()

    def _error(self, message: Any) -> Exception:
        error = message.error()
        if error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
            return ChangedSourceError(
                f"{self.name}, partition {message.partition()} must have the messages behind the loader's position, and"
                f" has not: {error}; begin anew without a position, and let the topic keep messages longer"
            )
        return RuntimeError(f"{self.name}: {error}")

    def _piece(self, messages: list[Any], partition: int, offsets: dict[int, int], schema: Any) -> Piece:
        texts = [text or b"" for text in map(methodcaller("value"), messages)]
        rows, bad = parse_json(texts, schema)
        begin, offset_N = offsets[partition], list(map(methodcaller("offset"), messages))

        def at(k: int) -> list[list[int]]:
            now = {**offsets, partition: offset_N[k - 1] + 1 if k else begin}
            return [list(one) for one in now.items()]

        def place(k: int) -> str:
            return f"{self.name}, partition {partition}, offset {offset_N[k]}"

        return Piece(rows, at, place, alone=lambda k: [one for one in at(k) if one[0] == partition], bad=bad)
