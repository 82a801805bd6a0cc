"""Messages between ranks, tensors as bytes one after another, and the errors of exchanges."""

import itertools
import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from oneemb.storage.locking.signals_deferred import signals_deferred


class RankError(RuntimeError):
    """Another rank has failed, or does something else. The message names it, and repeats its error."""


@contextmanager
def whole_exchange() -> Iterator[None]:
    """Block of an exchange: no signal comes between its messages, for which the other ranks wait. Forks may."""
    with signals_deferred, signals_deferred.forks_allowed():
        yield


_REPORTED = (
    "_oneemb_reported"  # attribute of an error: moment since which all ranks know it, or will at their next exchange
)
_moments = itertools.count(1)


def moment() -> int:
    """Number of this moment, for `Ranks.fail`: later ones are greater."""
    return next(_moments)


def mark_reported(error: BaseException) -> None:
    """Mark an error as reported, so that `Ranks.fail` ignores it: all ranks know it, or none waits for this rank."""
    with suppress(AttributeError):
        setattr(error, _REPORTED, next(_moments))


def reported_error(words: str) -> RankError:
    """An error that all ranks raise."""
    error = RankError(words)
    mark_reported(error)
    return error


def is_reported(error: BaseException | None, since: int) -> bool:
    """Whether all ranks know of this error, or of one that it replaced, as the error of a signal may."""
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
    """Error report of one rank, pickled, and zeros up to the length that all have."""
    failed, pickled = None if failure is None else _failure_text(failure), b""
    for length in (_WORDS // 5, _WORDS // 20):  # characters of each, which may take four bytes
        pickled = pickle.dumps([None if text is None else text[:length] for text in (what, failed, name, made)])
        if len(pickled) <= _WORDS:
            break
    return bytearray(pickled.ljust(_WORDS, b"\0"))


def _failure_text(failure: BaseException) -> str:
    try:
        return f"{type(failure).__name__}: {failure}"
    except Exception:  # Its own __str__ has failed, and the others wait for some words.
        return type(failure).__name__


def what_has_failed(of_all: Sequence[Report]) -> str:
    for rank, (_, its, _, _) in enumerate(of_all):
        if its is not None:
            return f"rank {rank} has failed ({its}); nothing was done here"
    differ = len({what for what, *_ in of_all}) > 1
    doing, made = _by_rank(what for what, *_ in of_all), _by_rank(made for *_, made in of_all)
    one_name, ways = len({name for _, _, name, _ in of_all}) == 1, len({made for *_, made in of_all})
    # Other embeddings were made in other ways, which explains nothing.
    if not differ or one_name and ways > 1:
        what = f"do different things ({doing})" if differ else of_all[0][0]
        return (
            f"the ranks {what}, and have made it differently ({made}): each must make the same embeddings, in the same"
            " order and with the same arguments"
        )
    return (
        f"the ranks do different things ({doing}): each must make the same lookups, steps, saves and loads in the"
        " same order, with an empty batch where it has none"
    )


def _by_rank(of_all: Iterable[object]) -> str:
    return "; ".join(f"rank {rank}: {its}" for rank, its in enumerate(of_all))


Blocks = Sequence[Sequence[torch.Tensor]]
"""Tensors to send to each rank, of any shape, one after another."""


@dataclass
class Traffic:
    """Messages and bytes that a rank has sent to others, and the time that it has spent in exchanges."""

    messages: int = 0
    """Exchanges of one tensor each."""
    sent_bytes: int = 0
    seconds: float = 0.0
    """From the start of each exchange to its end, waits for other ranks included."""

    def add(self, sent: torch.Tensor, rows_to_others: int, begin: float) -> None:
        """Count an exchange of rows that started at this reading of time.perf_counter."""
        self.messages += 1
        self.sent_bytes += rows_to_others * (sent.numel() // max(1, len(sent))) * sent.element_size()
        self.seconds += time.perf_counter() - begin


class Received:
    """Tensors that a rank has sent, taken one after another."""

    def __init__(self, sent_N: torch.Tensor):
        self._sent_N = sent_N
        self._begin = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The next tensor, of so many elements: [count]."""
        size = count * dtype.itemsize
        part = self._sent_N[self._begin : self._begin + size]
        self._begin += padded(size)
        return part.view(dtype)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor, and zeros up to a multiple of 8, so that the next tensor is aligned."""
    if tensor.numel() == 0:  # whose strides may be any
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    more = padded(len(flat)) - len(flat)
    return torch.cat([flat, flat.new_zeros(more)]) if more else flat


def padded(size: int) -> int:
    return -(-size // 8) * 8
