"""What ranks send each other in a step of training: which messages, when, and of how many bytes.

The one place that knows it beside the code that sends (graph/ranks.py, graph/ops/shuffle.py): `oneemb.plan` asks it.

Invariant: `messages_of` says what goes through the process group, byte for byte; benchmarks/bench_plan.py and
tests/test_planning.py compare the two. Not said: what replicated tables save and cost, and the norms of clipping.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KeyCounts", "Message", "messages_of"]

_ID_BYTES, _TABLE_BYTES, _COUNT_BYTES = 8, 4, 8
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
        weight_bytes: of a weight on its way, 4 or 2.
        asks_R: keys that this rank asks each rank for.
        asked_R: keys that each rank asks this one for.
        gradient_bytes: of a number of a gradient on its way, 4 or 2.
    """

    dim: int
    weight_bytes: int
    asks_R: Sequence[int]
    asked_R: Sequence[int]
    gradient_bytes: int = 4


def messages_of(lookups: Sequence[KeyCounts], *, in_run: bool = True) -> list[Message]:
    """The messages of a step that looks rows up in so many embeddings, and trains them, in their order.

    Args:
        lookups: one for each lookup, of an embedding of its own.
        in_run: whether it is a step of `graph.run`, where the ranks agree on whether each has another batch, announce
            what they expect to look up in it, and look that up.
    """
    ranks = len(lookups[0].asks_R)
    header = (_HEADER_BYTES,) * ranks
    keys_of_all = tuple(sum(_COUNT_BYTES + _keys(one.asks_R[r]) for one in lookups) for r in range(ranks))
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
            keys = tuple(_COUNT_BYTES + _keys(n) for n in lookup.asks_R)
            messages += [Message("headers of keys", header, ahead=False), Message("keys", keys, ahead=False)]
        messages.append(Message("rows", tuple((heads + n) * row_bytes for n in lookup.asked_R), ahead=False))
    messages += [
        Message("headers of gradients", header, ahead=False),
        Message("keys of gradients", keys_of_all, ahead=False),
    ]
    for one in lookups:
        gradients = tuple(n * one.dim * one.gradient_bytes for n in one.asks_R)
        messages.append(Message("gradients", gradients, ahead=False))
    return [*messages, Message("whether all may step", header, ahead=False)]


def _keys(count: int) -> int:
    return count * _ID_BYTES + _padded(count * _TABLE_BYTES)


def _padded(size: int) -> int:
    return -(-size // _PAD_BYTES) * _PAD_BYTES
