"""The processes that own rows together, and their exchanges.

    received = ranks.exchange("look up 'items'", lambda: blocks)

Each exchange starts with a header: code of the rank's operation, whether it has failed, and how much it sends to whom.
So every rank raises where one has failed, or where ranks do different things, and none waits for a message that will
not come. A rank that fails between two exchanges posts a header for the next one, and waits for nobody: `fail`.

Invariants:
- after an exchange that raises, every rank has left it: the group can be used again;
- a child of fork sends nothing: an exchange is an error, there alone;
- a rank stops between two exchanges, never in one: the next message on any rank is a header, of one size.
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

# Bytes before an answer: code of the operation, and whether it has failed.
_HEADER = 16

# Number of a rank that has left a `gather_number`.
_LEFT = -(1 << 40)

_NONE = pickle.dumps(None)

# Bytes that `of_first` sends to each other rank at a time: all of them are in the first one's memory at once.
_CHUNK = 4 << 20


def _tried(make: Callable[[], T]) -> tuple[T | None, list[BaseException]]:
    """Result of `make`, or None and its error: in a list, since the traceback holds the frame that has the error."""
    try:
        return make(), []
    except BaseException as error:
        return None, [error]


class Ranks:
    """The ranks of a process group.

    Each call that ranks make together takes `what`: the name of their operation, the same on all of them. It raises
    RankError if another rank has failed, or does something else. An error of a function that it is given is raised on
    this rank, and a RankError on every other one.

    Args:
        group: of torch.distributed. Tensors go through it as they are with gloo; with NCCL by way of the current GPU.
        gradients: "mean" or "sum": reduction of the gradients that ranks have for a row.
        comm_dtype: torch.float32, float16 or bfloat16: of rows and gradients on their way between ranks.
        name: of the embedding.
        made: how that was made, in words that have to be the same on all of them.

    Raises:
        ValueError: this process is none of its ranks, or another argument is not as above.
    """

    alone: Literal[False] = False
    """Whether no other process can own rows; see `OneRank`."""
    whole = signals_deferred
    """Block around a call that ranks make together."""

    def __init__(
        self, group: "distributed.ProcessGroup", gradients: Gradients = "mean", comm_dtype: torch.dtype = torch.float32,
        name: str = "", made: str = "",
    ):  # fmt: skip
        check_between_ranks(gradients, comm_dtype)
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this process is not in the process_group; only its ranks may make an embedding with it, and every one"
                " of them must"
            )
        if not callable(getattr(group, "rank", None)):
            raise TypeError(
                f"process_group must be a group of torch.distributed, got {type(group).__name__} {group!r}; pass"
                " torch.distributed.group.WORLD for all ranks"
            )
        self.group = group
        self.gradients, self.comm_dtype = gradients, comm_dtype
        self.name, self.made = name, made
        """Both are the same on all ranks."""
        self.traffic = Traffic()
        self._pid = os.getpid()
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.first = self.rank == 0
        """Whether this rank is the one that acts for all."""
        on_gpu = group.name() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @property
    def grad_scale(self) -> float:
        """Factor of the gradients that ranks have for a row, before they are summed."""
        return 1 / self.size if self.gradients == "mean" else 1.0

    @property
    def forked(self) -> bool:
        """Whether this process is a child of a rank, which is none: its parent's connections are not its own."""
        return os.getpid() != self._pid

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.size})"

    @classmethod
    def joined(cls, several: Sequence["Ranks"]) -> "Ranks":
        """The ranks of several embeddings, of one group, for one exchange about all of them: it checks that each was
        made in the same way on all ranks."""
        if len(several) == 1:
            return several[0]
        joined = copy.copy(several[0])
        joined.name = ", ".join(one.name for one in several)
        joined.made = "; ".join(f"{one.name}: {one.made}" for one in several)
        return joined

    def again(self) -> "Ranks":
        """The same ranks with connections of their own, by gloo, for another thread; every rank calls it."""
        what = "connect once more"
        with self._exchanging(what):
            name = self.all_gather(what, lambda: uuid.uuid4().hex)[0]
            # new_group names a group by how many this rank has: ranks that are in different numbers wait for ever.
            store = distributed.PrefixStore(f"oneemb/{name}", self.group.get_group_store())
            group: Any = self.group  # torch gives its timeout no public name.
            timeout = group._get_backend(self._device).options._timeout
            # It has the methods of a ProcessGroup that are called here.
            again: Any = distributed.ProcessGroupGloo(store, self.rank, self.size, timeout)
            # A rank that went on and ended now would break the connections that another rank is still making.
            self.all_gather(what, lambda: None)
        return Ranks(again, self.gradients, name="connections", made=name)

    def over(self, connections: "Ranks") -> "Ranks":
        """The same ranks, by the connections that `again` gave."""
        over = copy.copy(self)
        over.group = connections.group
        return over

    def exchange(self, what: str, make: Callable[[], Blocks]) -> list[Received]:
        """Send blocks, a sequence of tensors for each rank, and receive the blocks of the ranks to this one."""

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
        """Send rows to the ranks, and receive theirs, where both sides know the numbers of rows.

        One message, without a copy: `make` leaves room for its header, see `heads`.

        Args:
            make: gives the rows, those for rank 0 first, each rank's behind its `heads`: [sent, W]. It is changed.
            like: a tensor of shape [0, W] and the dtype and device of the rows.
            sent_R, received_R: the rows that go to each rank, and come from it.

        Returns:
            The rows that the ranks have sent, each rank's behind its heads: [received, W].
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
            if any(its_failed or its != self._code(what) for its, its_failed in headers):
                self._raise(what, failed)
        return received.to(like.device)

    def heads(self, like: torch.Tensor) -> int:
        """Number of rows before those of each rank that hold the header of an answer of such rows."""
        return -(-_HEADER // (like.shape[1] * like.element_size()))

    def behind_heads(self, count_R: Sequence[int], heads: int) -> list[slice]:
        """Slice of each rank's rows, so many of each, if each rank's are behind heads."""
        ends = itertools.accumulate(heads + count for count in count_R)
        return [slice(end - count, end) for end, count in zip(ends, count_R, strict=True)]

    def _heads_of(self, size_R: Sequence[int], heads: int) -> torch.Tensor:
        begin_R = torch.tensor([0, *size_R[:-1]], device="cpu").cumsum(0)
        return begin_R[:, None] + torch.arange(heads, device="cpu")

    def swap(self, sent: torch.Tensor, sent_R: Sequence[int], received_R: Sequence[int]) -> torch.Tensor:
        """Swap gradients of rows with the ranks, within `whole_exchange`, after an exchange of their numbers.

        Args:
            sent: [sum(sent_R), ...], those for rank 0 first.
        """
        received = sent.new_empty((sum(received_R), *sent.shape[1:]), device=self._device)
        with self._exchanging("bring gradients of rows to their owners"):
            self.all_to_all(received, sent.to(self._device), received_R, sent_R)
        return received.to(sent.device)

    def agree(self, what: str, check: Callable[[], Any] = lambda: None) -> Any:
        """Wait for all ranks, and raise on each if one raises.

        Returns:
            Result of `check` on the first rank where it is not None, the same on all ranks; None if there is none. Any:
            an object that can be pickled.
        """
        pickled, failed = _tried(lambda: pickle.dumps(check()))
        with self._exchanging(what):
            if not any(self._headers(what, failed, [pickled not in (None, _NONE)] * self.size)):
                return None
            return next(its for its in self._gather(pickled or b"") if its is not None)

    def all_gather(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """Results of `make` on all ranks, in the order of the ranks. Any: objects that can be pickled."""
        pickled, failed = _tried(lambda: pickle.dumps(make()))
        with self._exchanging(what):
            self._headers(what, failed, [0] * self.size)
            return self._gather(pickled or b"")

    def by_first(self, what: str, call: Callable[[], T]) -> T:
        """Result of `call` on the first rank, for all ranks. Others do not call it."""
        return cast(T, self.agree(what, lambda: call() if self.first else None))

    def of_first(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Do as `by_first`, for any number of bytes."""
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
        """The number that `make` gives on each rank, in their order."""
        mine, failed = _tried(make)
        with self._exchanging(what):
            return self._headers(what, failed, [mine or 0] * self.size)

    def leave(self, what: str) -> None:
        """Take part in a `gather_number` without waiting for it: this rank's number is not 0. Where another rank fails
        in it, the ranks raise without waiting for its error report."""
        if self.forked:
            return
        with suppress(RuntimeError), whole_exchange():  # Where connections are broken, nobody waits.
            self._post_header(what, failed=False, number=_LEFT)

    def fail(self, what: str, failure: BaseException, since: int = 0) -> None:
        """Have all ranks raise at the exchange that they come to next, without waiting for them: this one has failed
        before it came there. Does nothing where they have raised with it already.

        Args:
            since: the `moment` at which this rank began to do it.
        """
        if self.forked or is_reported(failure, since):
            return
        with suppress(RuntimeError), whole_exchange():
            mark_reported(failure)
            self._post_header(what, failed=True)
            mine = self._words(what, failure)
            self.group.allgather([torch.empty_like(mine) for _ in range(self.size)], mine)

    def any(self, flag: bool) -> bool:
        """Whether a rank gives True."""
        return any(self.gather_number("find whether a gradient is not finite", lambda: int(flag)))

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of these over the ranks, in float64 and in their order: the same bits on each."""
        first, *others = self._gather_floats(values)
        for other in others:
            first += other
        return first.tolist()

    def norms(self, norms: Sequence[float], ord: float) -> list[float]:
        """The norms of vectors that lie in parts on the ranks, from the norms of the parts; NaN if one is."""
        if ord == math.inf:
            of_all = self._gather_floats(norms)
            return torch.stack(of_all).amax(0).tolist()
        return [total ** (1 / ord) for total in self.sum([norm**ord for norm in norms])]

    # ---- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _exchanging(self, what: str) -> Iterator[None]:
        """Block in which no signal comes, and a broken connection raises a RankError that explains it."""
        if self.forked:
            raise ForkedProcessError(
                f"this is process {os.getpid()}, a child of rank {self.rank}, process {self._pid}, and was about to"
                f" {what}: children cannot reach the ranks. Look ids up in the process that made the embedding, and"
                " return ids from data loader workers"
            )
        with whole_exchange():
            try:
                yield
            except RuntimeError as error:
                if isinstance(error, RankError) or is_reported(error, 0):  # Its own error, which all know now.
                    raise
                raise reported_error(
                    f"rank {self.rank} was about to {what}, and another rank has ended, was killed, or did not come"
                    " there within the timeout of the process group. The ranks cannot go on with this group: end the"
                    f" job and start it anew, from its last snapshot ({error})"
                ) from error

    def _code(self, what: str) -> int:
        return zlib.crc32(what.encode(), zlib.crc32(self.made.encode()))

    def _post_header(self, what: str, *, failed: bool, number: int = 0) -> None:
        header_R3 = torch.tensor([[self._code(what), failed, number]] * self.size, device=self._device)
        self.group.alltoall_base(torch.empty_like(header_R3), header_R3, [1] * self.size, [1] * self.size)

    def _headers(self, what: str, failed: list[BaseException], sent_R: Sequence[int]) -> list[int]:
        """Send the header of an exchange; returns how much each rank will send to this one."""
        doing = self._code(what)
        header_R3 = torch.tensor([[doing, bool(failed), sent] for sent in sent_R], device=self._device)
        got_R3 = torch.empty_like(header_R3)
        self.all_to_all(got_R3, header_R3, [1] * self.size, [1] * self.size)
        got = got_R3.tolist()
        if any(its_failed or its != doing for its, its_failed, _ in got):
            self._raise(what, failed, got)
        return [size for _, _, size in got]

    def _words(self, what: str, failure: BaseException | None) -> torch.Tensor:
        """Error report of this rank for the others, uint8."""
        words = report(what, failure, self.name, self.made)
        return torch.frombuffer(words, dtype=torch.uint8).to(self._device)

    def _raise(self, what: str, failed: list[BaseException], headers: Sequence[Sequence[int]] = ()) -> Never:
        """Raise the error of this rank, which is taken out of the list, or a RankError about those of others."""
        left = [rank for rank, (*_, number) in enumerate(headers) if number == _LEFT]
        of_all: list[Report] = []
        if not left:  # A rank that has left sends no report.
            words = self._all_gather(self._words(what, failed[0] if failed else None))
            of_all = [pickle.loads(its.numpy().tobytes()) for its in words]
        if failed:
            mark_reported(failed[0])
            raise failed.pop()
        if not left:
            raise reported_error(what_has_failed(of_all))
        others = ", ".join(str(rank) for rank, (_, its_failed, _) in enumerate(headers) if its_failed)
        how = f"has failed (rank {others} says how)" if others else "does something else"
        raise reported_error(
            f"rank {left[0]} has left, and another rank {how}, where they were to {what}; nothing was done here"
        )

    def _gather_floats(self, values: Sequence[float]) -> list[torch.Tensor]:
        what = f"add {len(values)} norms of gradients"
        with self._exchanging(what):
            self._headers(what, [], [0] * self.size)
            return self._all_gather(torch.tensor(values, dtype=torch.float64, device="cpu"))

    def _gather(self, pickled: bytes) -> list[Any]:
        """All-gather bytes. Callers pickle before the exchange: an error within it would leave other ranks waiting."""
        mine = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(mine)], device="cpu"))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = mine
        of_all = self._all_gather(padded)
        return [pickle.loads(its[:size].numpy().tobytes()) for its, size in zip(of_all, sizes, strict=True)]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """All-gather a tensor that has the same shape on each rank; the results are in the host's memory."""
        begin, mine = time.perf_counter(), mine.to(self._device)
        of_all = [torch.empty_like(mine) for _ in range(self.size)]
        self.group.allgather(of_all, mine).wait()
        self.traffic.add(mine, len(mine) * (self.size - 1), begin)
        return [its.cpu() for its in of_all]

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_R: Sequence[int], sent_R: Sequence[int]
    ) -> None:
        begin = time.perf_counter()
        # Methods, not torch.distributed's functions: those take no group that they have not made.
        self.group.alltoall_base(received, sent, list(received_R), list(sent_R)).wait()
        self.traffic.add(sent, sum(sent_R) - sent_R[self.rank], begin)


AnyRanks = Ranks | OneRank
"""The ranks of an embedding: a process group, or this process alone."""


def ranks_of(
    group: "distributed.ProcessGroup | None", gradients: Gradients = "mean", comm_dtype: torch.dtype = torch.float32,
    name: str = "",
) -> AnyRanks:  # fmt: skip
    """The ranks of a process group, None = this process alone; arguments and errors are those of `Ranks`."""
    return OneRank(gradients, comm_dtype) if group is None else Ranks(group, gradients, comm_dtype, name)


def together(ranks: AnyRanks, stores: Sequence[EmbeddingStore], verb: str, what: str, call: Callable[[], T]) -> T:
    """Result of `call`, which ranks make together between two steps; one process makes it alone. Where it raises on
    one rank it raises on all, before it has begun too; an interrupt comes before it or after it.

    Args:
        stores: of this rank; no step of theirs may be under way.
        verb: name of the call, for the error if a step is under way.
        what: operation in the first exchange of `call`.
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
    """Do as `together` for a call that changes nothing: a process that has all rows makes it at any time."""
    return call() if ranks.alone else together(ranks, stores, verb, what, call)


def _throw(error: BaseException) -> Never:
    raise error
