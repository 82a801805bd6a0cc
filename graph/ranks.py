"""The processes that own rows together, and their exchanges.

    received = ranks.exchange("look up 'items'", lambda: blocks)

Each exchange starts with headers. A rank sends each other rank a header: code of the operation, whether the rank has
failed, and how many bytes will follow. So if one rank has failed, or ranks do different things, every rank raises, and
no rank waits for a message that never comes. A rank that fails between two exchanges sends its header of the next
exchange at once, without waiting for the others (`fail`).

Invariants:
- after an exchange that raises, every rank has left the exchange: the group can be used again;
- a forked child sends nothing: an exchange raises in the child alone;
- a signal stops a rank between two exchanges, never within one: the next message on every rank is a header, and all
  headers have one size.
"""

import copy
import functools
import itertools
import math
import os
import pickle
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, Never, TypeVar, cast

import torch
from torch import distributed

from oneemb.graph.one_rank import Gradients, OneRank, check_between_ranks
from oneemb.graph.rank_messages import (
    Blocks,
    RankError,
    Received,
    Report,
    Traffic,
    bytes_of,
    is_reported,
    mark_reported,
    report,
    reported_error,
    what_has_failed,
    whole_exchange,
)
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import ForkedProcessError
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.step_lock import between_steps

T = TypeVar("T")

# Bytes of an answer's header: two int64, the code of the operation and whether the rank has failed.
_HEADER = 16

# Number in the header of a rank that has called `leave`.
_LEFT = -(1 << 40)

_NONE = pickle.dumps(None)

# Bytes that `of_first` sends to each rank at a time. The first rank has the copies for all ranks in memory at once.
_CHUNK = 4 << 20


def _tried(make: Callable[[], T]) -> tuple[T | None, list[BaseException]]:
    """(result of `make`, []), or (None, [error]) if it raises. `_raise` takes the error out of the list, so that no
    frame in the error's traceback refers to the error."""
    try:
        return make(), []
    except BaseException as error:
        return None, [error]


class Ranks:
    """The ranks of a process group.

    All ranks call a method together. They pass `what`, the name of the operation, which must be the same on all ranks.
    If another rank has failed or names another operation, the method raises RankError. If a function that the method
    is given raises, this rank raises the same error and every other rank a RankError.

    Args:
        group: process group of torch.distributed. Messages are CPU tensors with gloo, tensors of the current GPU with
            NCCL.
        gradients: "mean" or "sum": reduction of the gradients that ranks have for the same row.
        comm_dtype: dtype of rows and gradients in messages: torch.float32, float16 or bfloat16.
        name: name of the embedding.
        made: text of the embedding's arguments, which must be the same on all ranks.

    Raises:
        ValueError: this process is not in the group, or another argument is not as above.
        TypeError: `group` is no process group.
    """

    alone: Literal[False] = False
    """Whether this process owns all rows; True only for `OneRank`."""
    whole = signals_deferred
    """Block for a call that all ranks make together: signals and forks wait until it ends."""

    def __init__(
        self, group: "distributed.ProcessGroup", gradients: Gradients = "mean", comm_dtype: torch.dtype = torch.float32,
        name: str = "", made: str = "",
    ):  # fmt: skip
        check_between_ranks(gradients, comm_dtype)
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this process must be in the process_group of the embedding, and is not; make the embedding in all"
                " ranks of the process_group, and in no other process"
            )
        if not callable(getattr(group, "rank", None)):
            raise TypeError(
                f"process_group must be a group of torch.distributed, got {type(group).__name__} {group!r}; for all"
                " ranks, pass torch.distributed.group.WORLD"
            )
        self.group = group
        self.gradients, self.comm_dtype = gradients, comm_dtype
        self.name, self.made = name, made
        """`name` and `made` are the same on all ranks."""
        self.traffic = Traffic()
        self._pid = os.getpid()
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.first = self.rank == 0
        """Whether this is rank 0, which acts for all ranks."""
        on_gpu = group.name() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @property
    def grad_scale(self) -> float:
        """Factor of each rank's gradients before they are summed over ranks: 1 / `size` for "mean", 1 for "sum"."""
        return 1 / self.size if self.gradients == "mean" else 1.0

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of a rank. A child is no rank: it must not use its parent's
        connections."""
        return os.getpid() != self._pid

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.size})"

    @classmethod
    def joined(cls, several: Sequence["Ranks"]) -> "Ranks":
        """The ranks of several embeddings of one group, for one exchange about all these embeddings. The exchange
        checks that each embedding was made in the same way on all ranks."""
        if len(several) == 1:
            return several[0]
        joined = copy.copy(several[0])
        joined.name = ", ".join(one.name for one in several)
        joined.made = "; ".join(f"{one.name}: {one.made}" for one in several)
        return joined

    def again(self) -> "Ranks":
        """The same ranks with a second set of connections, by gloo, for another thread. Every rank must call it."""
        what = "connect once more"
        with self._exchanging(what):
            name = self.all_gather(what, lambda: uuid.uuid4().hex)[0]
            # `new_group` is no alternative: it numbers a rank's groups, so ranks in different numbers of groups hang.
            store = distributed.PrefixStore(f"oneemb/{name}", self.group.get_group_store())
            group: Any = self.group  # torch gives its timeout no public name.
            timeout = group._get_backend(self._device).options._timeout
            # ProcessGroupGloo has the methods of a ProcessGroup that this class calls.
            again: Any = distributed.ProcessGroupGloo(store, self.rank, self.size, timeout)
            # Wait for all: a rank that ended now would break connections that another rank is still making.
            self.all_gather(what, lambda: None)
        return Ranks(again, self.gradients, name="connections", made=name)

    def over(self, connections: "Ranks") -> "Ranks":
        """Copy of this object that sends over the process group of `connections`, a second set of connections that
        `again` has made."""
        over = copy.copy(self)
        over.group = connections.group
        return over

    def exchange(self, what: str, make: Callable[[], Blocks]) -> list[Received]:
        """The tensors that each rank has sent to this one. `make` returns the tensors to send to each rank."""

        def pack() -> tuple[torch.Tensor, list[int]]:
            flat = [[bytes_of(tensor) for tensor in block] for block in make()]
            parts = [part for block in flat for part in block]
            return torch.cat(parts) if parts else nothing, [sum(len(part) for part in block) for block in flat]

        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        packed, failed = _tried(pack)
        sent, sent_R = packed or (nothing, [0] * self.size)
        with self._exchanging(what):
            received_R = self._headers(what, failed, sent_R)
            received = torch.empty(sum(received_R), dtype=torch.uint8, device=self._device)
            self.all_to_all(received, sent.to(self._device), received_R, sent_R)
        return [Received(part) for part in received.split(received_R)]

    def answer(
        self, what: str, make: Callable[[], torch.Tensor], like: torch.Tensor, sent_R: Sequence[int],
        received_R: Sequence[int],
    ) -> torch.Tensor:  # fmt: skip
        """Send rows to the ranks and receive rows from them. Sender and receiver must know the numbers of rows already.

        The message to each rank begins with a header: code of the operation, and whether this rank has failed. So that
        rows need not be copied behind it, `make` returns a tensor with `self.heads(like)` unused rows before the rows
        of each rank, and the header is written into those.

        Args:
            what: name of the operation, which must be the same on all ranks.
            make: returns the rows to send, [sent, W], rows for rank 0 first, each rank's behind its unused rows.
            like: empty tensor, [0, W], with the dtype and device of the rows.
            sent_R, received_R: number of rows that go to each rank, and number that comes from each rank, without the
                rows of headers.

        Returns:
            The received rows, [received, W], rows of rank 0 first, with `self.heads(like)` header rows before each
            rank's rows; `behind_heads` gives the places of the others.

        Raises:
            RankError: another rank has failed or names another operation. If `make` raises, this rank raises that
                error.
        """
        heads = self.heads(like)
        going, coming = ([count + heads for count in counts] for counts in (sent_R, received_R))
        made, failed = _tried(make)
        sent = like.new_zeros(sum(going), like.shape[1]) if made is None else made
        header = torch.zeros(heads, like.shape[1] * like.element_size(), dtype=torch.uint8, device="cpu")
        header.view(-1)[:_HEADER] = torch.tensor([self._code(what), bool(failed)], device="cpu").view(torch.uint8)
        sent.view(torch.uint8)[self._heads_of(going, heads)] = header.to(sent.device)
        received = like.new_empty((sum(coming), like.shape[1]), device=self._device)
        with self._exchanging(what):
            self.all_to_all(received, sent.to(self._device), coming, going)
            got = received.view(torch.uint8)[self._heads_of(coming, heads)].view(self.size, -1)[:, :_HEADER]
            headers = got.clone(memory_format=torch.contiguous_format).view(torch.int64).tolist()
            if any(has_failed or code != self._code(what) for code, has_failed in headers):
                self._raise(what, failed)
        return received.to(like.device)

    def heads(self, like: torch.Tensor) -> int:
        """Number of rows that the header occupies before each rank's rows in `answer`, for rows of the width and dtype
        of `like`."""
        return -(-_HEADER // (like.shape[1] * like.element_size()))

    def behind_heads(self, count_R: Sequence[int], heads: int) -> list[slice]:
        """Slice of each rank's rows in an answer: rank r has `heads` header rows, then `count_R[r]` rows."""
        ends = itertools.accumulate(heads + count for count in count_R)
        return [slice(end - count, end) for end, count in zip(ends, count_R, strict=True)]

    def _heads_of(self, size_R: Sequence[int], heads: int) -> torch.Tensor:
        begin_R = torch.tensor([0, *size_R[:-1]], device="cpu").cumsum(0)
        return begin_R[:, None] + torch.arange(heads, device="cpu")

    def swap(self, sent: torch.Tensor, sent_R: Sequence[int], received_R: Sequence[int]) -> torch.Tensor:
        """Send gradients of rows to the ranks; returns the gradients received from them. Call it within
        `whole_exchange`, after an exchange of the numbers of rows.

        Args:
            sent: gradients to send, [sum(sent_R), ...], gradients for rank 0 first.
            sent_R, received_R: number of gradients that go to each rank, and number that comes from each rank.
        """
        received = sent.new_empty((sum(received_R), *sent.shape[1:]), device=self._device)
        with self._exchanging("bring gradients of rows to their owners"):
            self.all_to_all(received, sent.to(self._device), received_R, sent_R)
        return received.to(sent.device)

    def agree(self, what: str, check: Callable[[], Any] = lambda: None) -> Any:
        """Run `check` on all ranks, and wait for all. If it raises on one rank, all ranks raise.

        Returns:
            On all ranks, the result of the lowest rank whose result is not None; None if all are None. Any: an object
            that can be pickled.
        """
        pickled, failed = _tried(lambda: pickle.dumps(check()))
        with self._exchanging(what):
            if not any(self._headers(what, failed, [pickled not in (None, _NONE)] * self.size)):
                return None
            return next(result for result in self._gather(pickled or b"") if result is not None)

    def all_gather(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """Results of `make` on all ranks, in the order of the ranks. Any: objects that can be pickled."""
        pickled, failed = _tried(lambda: pickle.dumps(make()))
        with self._exchanging(what):
            self._headers(what, failed, [0] * self.size)
            return self._gather(pickled or b"")

    def by_first(self, what: str, call: Callable[[], T]) -> T:
        """Result of `call` on the first rank, returned on all ranks. Other ranks do not run `call`."""
        return cast(T, self.agree(what, lambda: call() if self.first else None))

    def of_first(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Bytes that `make` returns on the first rank, returned on all ranks. They are sent in pieces of `_CHUNK`."""
        data = bytearray()

        def keep() -> int:
            data[:] = make()
            return len(data)

        size, parts = self.by_first(what, keep), []
        if self.size == 1:
            return bytes(data)
        for begin in range(0, size, _CHUNK):
            count = min(_CHUNK, size - begin)
            sent = [torch.frombuffer(data, dtype=torch.uint8, offset=begin, count=count)] if self.first else []
            received = self.exchange(what, lambda sent=sent: [sent] * self.size)  # type: ignore[misc]
            parts.append(received[0].take(count, torch.uint8).cpu().numpy().tobytes())
        return b"".join(parts)

    def gather_number(self, what: str, make: Callable[[], int]) -> list[int]:
        """Number that `make` returns on each rank, in the order of the ranks."""
        mine, failed = _tried(make)
        with self._exchanging(what):
            return self._headers(what, failed, [mine or 0] * self.size)

    def leave(self, what: str) -> None:
        """Take part in a `gather_number` without waiting for its result. The other ranks get a number that is not 0
        for this rank. If a rank fails in that exchange, the others raise without waiting for error reports."""
        if self.forked:
            return
        with suppress(RuntimeError), whole_exchange():  # If connections are broken, no rank waits.
            self._post_header(what, failed=False, number=_LEFT)

    def fail(self, what: str, failure: BaseException, since: int = 0) -> None:
        """Report that this rank has failed before an exchange: all ranks raise at their next exchange. Does not wait
        for them, and does nothing if all ranks know the failure already.

        Args:
            since: the `moment` at which this rank began the operation that failed.
        """
        if self.forked or is_reported(failure, since):
            return
        with suppress(RuntimeError), whole_exchange():
            mark_reported(failure)
            self._post_header(what, failed=True)
            mine = self._words(what, failure)
            self.group.allgather([torch.empty_like(mine) for _ in range(self.size)], mine)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is True on any rank."""
        return any(self.gather_number("find whether a gradient is not finite", lambda: int(flag)))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum of each value over the ranks, in float64 and in the order of the ranks: the same bits on all ranks."""
        first, *others = self._gather_floats(values)
        for other in others:
            first += other
        return first.tolist()

    def norms(self, norms: Sequence[float], ord: float) -> list[float]:
        """Norm of each vector, of which every rank has a part. `norms` are the norms of this rank's parts, of order
        `ord`. The norm is NaN if the norm of a part is NaN."""
        if ord == math.inf:
            of_all = self._gather_floats(norms)
            return torch.stack(of_all).amax(0).tolist()
        return [total ** (1 / ord) for total in self.sum([norm**ord for norm in norms])]

    # ---- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _exchanging(self, what: str) -> Iterator[None]:
        """Block of an exchange: signals wait until it ends, and a broken connection raises a RankError."""
        if self.forked:
            raise ForkedProcessError(
                f"process {os.getpid()} is a forked child of rank {self.rank} (process {self._pid}), and cannot reach"
                f" the ranks to {what}. Look ids up in the process that made the embedding, and return ids from data"
                " loader workers"
            )
        with whole_exchange():
            try:
                yield
            except RuntimeError as error:
                if isinstance(error, RankError) or is_reported(error, 0):  # an error that all ranks know
                    raise
                raise reported_error(
                    f"rank {self.rank} was about to {what}, but another rank has ended, was killed, or did not start"
                    " the same operation within the timeout of the process group. The ranks cannot go on with this"
                    f" group: end the job, and start it anew from its last snapshot ({error})"
                ) from error

    def _code(self, what: str) -> int:
        return zlib.crc32(what.encode(), zlib.crc32(self.made.encode()))

    def _post_header(self, what: str, *, failed: bool, number: int = 0) -> None:
        header_R3 = torch.tensor([[self._code(what), failed, number]] * self.size, device=self._device)
        self.group.alltoall_base(torch.empty_like(header_R3), header_R3, [1] * self.size, [1] * self.size)

    def _headers(self, what: str, failed: list[BaseException], sent_R: Sequence[int]) -> list[int]:
        """Exchange headers: rank r gets the number `sent_R[r]`. Returns the number that each rank has sent to this
        one, such as bytes that follow. Raises if a rank has failed or names another operation."""
        doing = self._code(what)
        header_R3 = torch.tensor([[doing, bool(failed), sent] for sent in sent_R], device=self._device)
        got_R3 = torch.empty_like(header_R3)
        self.all_to_all(got_R3, header_R3, [1] * self.size, [1] * self.size)
        got = got_R3.tolist()
        if any(has_failed or code != doing for code, has_failed, _ in got):
            self._raise(what, failed, got)
        return [size for _, _, size in got]

    def _words(self, what: str, failure: BaseException | None) -> torch.Tensor:
        """Error report of this rank for the others: pickled, uint8 [_WORDS]."""
        words = report(what, failure, self.name, self.made)
        return torch.frombuffer(words, dtype=torch.uint8).to(self._device)

    def _raise(self, what: str, failed: list[BaseException], headers: Sequence[Sequence[int]] = ()) -> Never:
        """Raise this rank's error, taking it out of the list `failed`; if the list is empty, raise a RankError about
        the errors of other ranks. `headers`: the headers of all ranks, if the exchange sends numbers."""
        left = [rank for rank, (*_, number) in enumerate(headers) if number == _LEFT]
        of_all: list[Report] = []
        if not left:  # A rank that has left sends no report.
            words = self._all_gather(self._words(what, failed[0] if failed else None))
            of_all = [pickle.loads(pickled.numpy().tobytes()) for pickled in words]
        if failed:
            mark_reported(failed[0])
            raise failed.pop()
        if not left:
            raise reported_error(what_has_failed(of_all))
        others = ", ".join(str(rank) for rank, (_, has_failed, _) in enumerate(headers) if has_failed)
        how = f"has failed (see the error of rank {others})" if others else "does something else"
        raise reported_error(
            f"the ranks were to {what}, but rank {left[0]} has left, and another rank {how}; nothing was done here"
        )

    def _gather_floats(self, values: Sequence[float]) -> list[torch.Tensor]:
        what = f"add {len(values)} norms of gradients"
        with self._exchanging(what):
            self._headers(what, [], [0] * self.size)
            return self._all_gather(torch.tensor(values, dtype=torch.float64, device="cpu"))

    def _gather(self, pickled: bytes) -> list[Any]:
        """Unpickled objects of all ranks. Callers pickle before the exchange: an error within the exchange would leave
        other ranks waiting."""
        mine = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(mine)], device="cpu"))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = mine
        of_all = self._all_gather(padded)
        return [
            pickle.loads(padded_bytes[:size].numpy().tobytes())
            for padded_bytes, size in zip(of_all, sizes, strict=True)
        ]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """All-gather a tensor that has the same shape on each rank. The results are on the CPU."""
        begin, mine = time.perf_counter(), mine.to(self._device)
        of_all = [torch.empty_like(mine) for _ in range(self.size)]
        self.group.allgather(of_all, mine).wait()
        self.traffic.add(mine, len(mine) * (self.size - 1), begin)
        return [tensor.cpu() for tensor in of_all]

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_R: Sequence[int], sent_R: Sequence[int]
    ) -> None:
        begin = time.perf_counter()
        # Methods of the group: torch.distributed's functions take only groups that they have made.
        self.group.alltoall_base(received, sent, list(received_R), list(sent_R)).wait()
        self.traffic.add(sent, sum(sent_R) - sent_R[self.rank], begin)


AnyRanks = Ranks | OneRank
"""The ranks of an embedding: a process group, or this process alone."""


def ranks_of(
    group: "distributed.ProcessGroup | None", gradients: Gradients = "mean", comm_dtype: torch.dtype = torch.float32,
    name: str = "",
) -> AnyRanks:  # fmt: skip
    """The ranks of a process group; for None, this process alone. Arguments and errors are those of `Ranks`."""
    return OneRank(gradients, comm_dtype) if group is None else Ranks(group, gradients, comm_dtype, name)


def together(ranks: AnyRanks, stores: Sequence[EmbeddingStore], verb: str, what: str, call: Callable[[], T]) -> T:
    """Result of `call`, which all ranks run together between two steps; a process alone runs it alone. If a rank
    raises, all ranks raise, even if its error came before `call`. With ranks, interrupts wait until `call` has ended.

    Args:
        stores: stores of this rank, none of which may be in a step.
        verb: name of the call, for the error if a step is under way.
        what: name of the operation in the first exchange of `call`.
    """
    if ranks.forked:
        for store in stores:
            store.store_lock.check(changes=True)
    begun = False

    def run() -> T:
        nonlocal begun
        begun = True
        with ranks.whole:
            return call()

    try:
        return between_steps([store.step_lock for store in stores], verb, run)
    except BaseException as error:
        if not begun:
            ranks.agree(what, functools.partial(_throw, error))
        raise


def read_together(ranks: AnyRanks, stores: Sequence[EmbeddingStore], verb: str, what: str, call: Callable[[], T]) -> T:
    """Do as `together` for a call that changes nothing. A process that owns all rows runs it at any time."""
    return call() if ranks.alone else together(ranks, stores, verb, what, call)


def _throw(error: BaseException) -> Never:
    raise error
