"""Messages between ranks in a training step: their order and their bytes, for `oneemb.plan`.

The numbers follow the code that sends the messages (graph/ranks.py, graph/ops).

Invariant: `messages_of` lists all messages of the process group, byte for byte; benchmarks/bench_plan.py and
tests/test_planning.py compare it with the messages sent. Replicated tables and norms for clipping are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_ID_BYTES, _TABLE_BYTES, _PLACE_BYTES, _COUNT_BYTES = 8, 4, 4, 8
_COUNTS_BYTES = 3 * _COUNT_BYTES
"""Bytes of a request's counts: numbers of keys, of parts of bags, and of ids in these parts."""
_PAD_BYTES = 8
"""Every tensor of a message takes a multiple of these bytes."""
_HEADER_BYTES = 24
"""Bytes of an exchange's header, a separate message: operation, whether the rank has failed, bytes that follow."""
_ANSWER_HEADER_BYTES = 16
"""Bytes of the header of an answer, which is in the same message, since its size is known."""


@dataclass(frozen=True)
class Message:
    """One collective call of all ranks."""

    name: str
    sent_R: tuple[int, ...]
    """Bytes that this rank sends to each rank, including itself."""
    ahead: bool
    """Whether the message is sent while the step before computes."""


@dataclass(frozen=True)
class PartCounts:
    """Numbers of parts of bags of one lookup, whose sums the owners send (graph/ops/requests.py).

    Args:
        asks_R: number of parts that this rank requests from each rank.
        ids_R: number of ids in these parts.
        asked_R: number of parts that each rank requests from this one.
    """

    asks_R: Sequence[int]
    ids_R: Sequence[int]
    asked_R: Sequence[int]


@dataclass(frozen=True)
class KeyCounts:
    """Numbers of unique keys of one lookup.

    Args:
        dim: number of weights of a row.
        weight_bytes: bytes of a weight in a message, 4 or 2.
        asks_R: number of keys that this rank requests from each rank.
        asked_R: number of keys that each rank requests from this one.
        gradient_bytes: bytes of a gradient's value in a message, 4 or 2.
        parts: numbers of parts, if all ranks cut their bags; None = owners send a row for each key.
    """

    dim: int
    weight_bytes: int
    asks_R: Sequence[int]
    asked_R: Sequence[int]
    gradient_bytes: int = 4
    parts: PartCounts | None = None

    def key_bytes(self, r: int) -> int:
        """Bytes of the keys, and of the parts of bags, in the request to rank `r`."""
        size = self.asks_R[r] * _ID_BYTES + _padded(self.asks_R[r] * _TABLE_BYTES)
        if self.parts is not None:
            size += _padded(self.parts.ids_R[r] * _PLACE_BYTES) + _padded(self.parts.asks_R[r] * _PLACE_BYTES)
        return size


def messages_of(lookups: Sequence[KeyCounts], *, in_run: bool = True) -> list[Message]:
    """The messages of a step with one lookup in each of several embeddings, all trained, in the order of sending.

    Args:
        lookups: numbers of each lookup.
        in_run: whether the step is one of `graph.run`, where ranks agree on whether all have a next batch, announce
            the lookups that they expect, and make the announced lookups.
    """
    ranks = len(lookups[0].asks_R)
    header = (_HEADER_BYTES,) * ranks
    keys_of_all = tuple(sum(_COUNTS_BYTES + one.key_bytes(r) for one in lookups) for r in range(ranks))
    messages = []
    if in_run:
        announced = tuple(_COUNT_BYTES + size for size in keys_of_all)
        messages += [
            Message("whether all have a next batch", header, ahead=True),
            Message("headers of announced keys", header, ahead=True),
            Message("announced keys", announced, ahead=True),
        ]
    for lookup in lookups:
        dim, weight_bytes = lookup.dim, lookup.weight_bytes
        row_bytes = dim * weight_bytes
        heads = -(-_ANSWER_HEADER_BYTES // row_bytes)
        if in_run:
            messages.append(Message("whether all look up what they announced", header, ahead=False))
        else:
            keys = tuple(_COUNTS_BYTES + lookup.key_bytes(r) for r in range(ranks))
            messages += [Message("headers of keys", header, ahead=False), Message("keys", keys, ahead=False)]
        answers_R = lookup.asked_R if lookup.parts is None else lookup.parts.asked_R
        messages.append(Message("rows", tuple((heads + n) * row_bytes for n in answers_R), ahead=False))
    messages += [
        Message("headers of gradients", header, ahead=False),
        Message("keys of gradients", keys_of_all, ahead=False),
    ]
    for one in lookups:
        asks_R = one.asks_R if one.parts is None else one.parts.asks_R
        gradients = tuple(n * one.dim * one.gradient_bytes for n in asks_R)
        messages.append(Message("gradients", gradients, ahead=False))
    return [*messages, Message("whether all may step", header, ahead=False)]


def _padded(size: int) -> int:
    return -(-size // _PAD_BYTES) * _PAD_BYTES
