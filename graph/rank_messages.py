"""Messages between ranks (the bytes of tensors, one after another) and the errors of exchanges."""

import itertools
import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from oneemb.storage.locking.signals_deferred import signals_deferred


class RankError(RuntimeError):
    """Another rank has failed, or the ranks do different things. The message names the rank and repeats its error."""


@contextmanager
def whole_exchange() -> Iterator[None]:
    """Block of an exchange: signals wait until it ends, since other ranks wait for its messages. Forks do not wait."""
    with signals_deferred, signals_deferred.forks_allowed():
        yield


# Attribute of an error that all ranks know, or will know at their next exchange: the `moment` of the report.
_REPORTED = "_oneemb_reported"
_moments = itertools.count(1)


def moment() -> int:
    """Number of the current moment, for `Ranks.fail`. Later moments have greater numbers."""
    return next(_moments)


def mark_reported(error: BaseException) -> None:
    """Mark an error as reported: all ranks know it, or no rank waits for this one. `Ranks.fail` then ignores it."""
    with suppress(AttributeError):
        setattr(error, _REPORTED, next(_moments))


def reported_error(words: str) -> RankError:
    """RankError that all ranks raise, marked as reported."""
    error = RankError(words)
    mark_reported(error)
    return error


def is_reported(error: BaseException | None, since: int) -> bool:
    """Whether this error, or an error that it has replaced (as Ctrl-C may), was reported after the moment `since`."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if getattr(error, _REPORTED, 0) > since:
            return True
        seen.append(error)
        error = error.__context__
    return False


Report = tuple[str, str | None, str, str]
"""Error report of one rank: operation, error, object, configuration."""


# Bytes of an error report, the same on all ranks.
_WORDS = 8192


def report(what: str, failure: BaseException | None, name: str, made: str) -> bytearray:
    """Error report of one rank: pickled, padded with zeros to `_WORDS` bytes."""
    failed, pickled = None if failure is None else _failure_text(failure), b""
    for length in (_WORDS // 5, _WORDS // 20):  # characters of each text; a character takes up to four bytes
        pickled = pickle.dumps([None if text is None else text[:length] for text in (what, failed, name, made)])
        if len(pickled) <= _WORDS:
            break
    return bytearray(pickled.ljust(_WORDS, b"\0"))


def _failure_text(failure: BaseException) -> str:
    try:
        return f"{type(failure).__name__}: {failure}"
    except Exception:  # `__str__` of the error has failed, and the other ranks wait for a report.
        return type(failure).__name__


def what_has_failed(of_all: Sequence[Report]) -> str:
    for rank, (_, failure, _, _) in enumerate(of_all):
        if failure is not None:
            return f"rank {rank} has failed ({failure}); nothing was done here"
    differ = len({what for what, *_ in of_all}) > 1
    doing, made = _by_rank(what for what, *_ in of_all), _by_rank(made for *_, made in of_all)
    one_name, ways = len({name for _, _, name, _ in of_all}) == 1, len({made for *_, made in of_all})
    # Ranks that are at different embeddings differ in `made` anyway, which explains nothing.
    if not differ or one_name and ways > 1:
        what = f"do different things ({doing})" if differ else of_all[0][0]
        return (
            f"the ranks {what}, and have made the embedding differently ({made}): each rank must make the same"
            " embeddings, in the same order and with the same arguments"
        )
    return (
        f"the ranks do different things ({doing}): each rank must make the same lookups, steps, saves and loads in the"
        " same order; a rank without a batch passes an empty one"
    )


def _by_rank(of_all: Iterable[object]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(of_all))


Blocks = Sequence[Sequence[torch.Tensor]]
"""For each rank, the tensors to send to it, of any shapes."""


@dataclass
class Traffic:
    """Messages and bytes that a rank has sent to others, and the time that the rank has spent in exchanges."""

    messages: int = 0
    """Number of exchanges, each of one tensor."""
    sent_bytes: int = 0
    seconds: float = 0.0
    """From the start of each exchange to its end, waits for other ranks included."""

    def add(self, sent: torch.Tensor, rows_to_others: int, begin: float) -> None:
        """Count an exchange that sent `rows_to_others` rows of `sent` to other ranks. `begin`: time.perf_counter() at
        its start."""
        self.messages += 1
        self.sent_bytes += rows_to_others * (sent.numel() // max(1, len(sent))) * sent.element_size()
        self.seconds += time.perf_counter() - begin


class Received:
    """Message of one rank, from which `take` returns the tensors one after another."""

    def __init__(self, sent_N: torch.Tensor):
        self._sent_N = sent_N
        self._begin = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The next tensor: `count` elements of `dtype`, [count]."""
        size = count * dtype.itemsize
        part = self._sent_N[self._begin : self._begin + size]
        self._begin += padded(size)
        return part.view(dtype)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor, padded with zeros to a multiple of 8, so that the next tensor is aligned."""
    if tensor.numel() == 0:  # an empty tensor may have any strides
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    more = padded(len(flat)) - len(flat)
    return torch.cat([flat, flat.new_zeros(more)]) if more else flat


def padded(size: int) -> int:
    return -(-size // 8) * 8
