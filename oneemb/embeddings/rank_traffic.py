"""Messages between ranks in a step of training: which, when, and of how many bytes.

The one place that knows it beside the code that sends (graph/ranks.py, graph/ops): `oneemb.plan` asks it.

Invariant: `messages_of` lists all that goes through the process group, byte for byte; benchmarks/bench_plan.py and
tests/test_planning.py compare the two. Replicated tables and the norms of clipping are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_ID_BYTES, _TABLE_BYTES, _PLACE_BYTES, _COUNT_BYTES = 8, 4, 4, 8
_COUNTS_BYTES = 3 * _COUNT_BYTES
"""Bytes of a lookup's counts: keys, parts of bags and ids of parts that a rank is asked for."""
_PAD_BYTES = 8
"""Every tensor of a message takes a multiple of it."""
_HEADER_BYTES = 24
"""Bytes of an exchange's header, a message of its own: the rank's operation, whether it has failed, sizes to follow."""
_ANSWER_HEADER_BYTES = 16
"""Bytes of a header in the same message, where the sizes are known."""


@dataclass(frozen=True)
class Message:
    """One collective call of all ranks."""

    name: str
    sent_R: tuple[int, ...]
    """Bytes that this rank sends to each rank, itself among them."""
    ahead: bool
    """Whether it is sent while the step before computes."""


@dataclass(frozen=True)
class PartCounts:
    """The parts of bags of one lookup, of which owners send sums: see graph/ops/requests.py.

    Args:
        asks_R: parts that this rank asks each rank for.
        ids_R: how many ids they have together.
        asked_R: parts that each rank asks this one for.
    """

    asks_R: Sequence[int]
    ids_R: Sequence[int]
    asked_R: Sequence[int]


@dataclass(frozen=True)
class KeyCounts:
    """The unique keys of one lookup.

    Args:
        dim: weights of a row.
        weight_bytes: of a weight on its way, 4 or 2.
        asks_R: keys that this rank asks each rank for.
        asked_R: keys that each rank asks this one for.
        gradient_bytes: of a number of a gradient on its way, 4 or 2.
        parts: where all ranks cut their bags; None = a row comes for each key.
    """

    dim: int
    weight_bytes: int
    asks_R: Sequence[int]
    asked_R: Sequence[int]
    gradient_bytes: int = 4
    parts: PartCounts | None = None

    def key_bytes(self, r: int) -> int:
        """Bytes of the keys that rank r is asked for, and of their parts."""
        size = self.asks_R[r] * _ID_BYTES + _padded(self.asks_R[r] * _TABLE_BYTES)
        if self.parts is not None:
            size += _padded(self.parts.ids_R[r] * _PLACE_BYTES) + _padded(self.parts.asks_R[r] * _PLACE_BYTES)
        return size


def messages_of(lookups: Sequence[KeyCounts], *, in_run: bool = True) -> list[Message]:
    """The messages of a step that looks rows up in so many embeddings, and trains them, in their order.

    Args:
        lookups: one for each lookup, of an embedding of its own.
        in_run: whether it is a step of `graph.run`, where the ranks agree on whether each has another batch, announce
            what they expect to look up in it, and look that up.
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
