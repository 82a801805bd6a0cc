"""What ranks send each other in a step of training: which messages, when, and of how many bytes.

The one place that knows it beside the code that sends (graph/ranks.py, graph/ops/shuffle.py): `oneemb.plan` asks it.

Invariant: `messages_of` says what goes through the process group, byte for byte; benchmarks/bench_plan.py and
tests/test_planning.py compare the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KeyCounts", "Message", "messages_of"]

_ID_BYTES, _TABLE_BYTES, _COUNT_BYTES, _GRADIENT_BYTES = 8, 4, 8, 4
_PAD_BYTES = 8
"""Every tensor of a message takes a multiple of it."""
_HEADER_BYTES = 24
"""Of an exchange, in a message of its own: what the rank does, whether that has failed, how much follows."""
_ANSWER_HEADER_BYTES = 16
"""Where the sizes are known, in the same message."""


@dataclass(frozen=True)
class Message:
    """One collective call of all ranks."""

    name: str
    sent_R: tuple[int, ...]
    """Bytes that this rank sends to each rank, itself among them."""
    ahead: bool
    """Whether it is sent while the step before computes."""


@dataclass(frozen=True)
class KeyCounts:
    """The unique keys of one lookup.

    Args:
        dim: weights of a row.
        weight_bytes: of a weight, 4 or 2.
        asks_R: keys that this rank asks each rank for.
        asked_R: keys that each rank asks this one for.
    """

    dim: int
    weight_bytes: int
    asks_R: Sequence[int]
    asked_R: Sequence[int]


def messages_of(lookups: Sequence[KeyCounts], *, in_run: bool = True) -> list[Message]:
    """The messages of a step that looks rows up in so many embeddings, and trains them, in their order.

    Args:
        lookups: one for each lookup, of an embedding of its own.
        in_run: whether it is a step of `graph.run`, where the ranks first agree on whether each has another batch.
    """
    ranks = len(lookups[0].asks_R)
    header = (_HEADER_BYTES,) * ranks
    messages = [Message("whether all have a next batch", header, ahead=True)] if in_run else []
    for lookup in lookups:
        dim, weight_bytes = lookup.dim, lookup.weight_bytes
        messages += [
            Message("headers of keys", header, ahead=False),
            Message("keys", tuple(_COUNT_BYTES + _keys(n) for n in lookup.asks_R), ahead=False),
            Message(
                "rows",
                tuple(_ANSWER_HEADER_BYTES + _padded(n * dim * weight_bytes) for n in lookup.asked_R),
                ahead=False,
            ),
        ]
    gradients = (
        sum(_COUNT_BYTES + _keys(one.asks_R[r]) + _padded(one.asks_R[r] * one.dim * _GRADIENT_BYTES) for one in lookups)
        for r in range(ranks)
    )
    return [
        *messages,
        Message("headers of gradients", header, ahead=False),
        Message("gradients", tuple(gradients), ahead=False),
        Message("whether all may step", header, ahead=False),
        # The graph steps torch's optimizer, whose own hooks ask once more for gradients of rows: there are none left.
        Message("headers of gradients, again", header, ahead=False),
        Message("gradients, again", (_COUNT_BYTES * len(lookups),) * ranks, ahead=False),
        Message("whether all may step, again", header, ahead=False),
    ]


def _keys(count: int) -> int:
    return count * _ID_BYTES + _padded(count * _TABLE_BYTES)


def _padded(size: int) -> int:
    return -(-size // _PAD_BYTES) * _PAD_BYTES
