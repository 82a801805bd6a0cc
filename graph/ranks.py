"""The processes that own rows together, and how they exchange what they have.

    received = ranks.exchange("look up 'items'", lambda: blocks)

Each exchange begins with a header: what the rank is doing, whether that has failed, and how much it sends to whom. So
every rank raises where one has failed, and ranks that do different things say so; none waits for what will not come.

Invariant: after an exchange that raises, every rank has left it: the group can be used again.
"""

import math
import pickle
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import distributed

from oneemb.storage.turns import undisturbed

__all__ = ["Blocks", "RankError", "Ranks", "Received", "Traffic", "together", "whole_exchange"]

Blocks = Sequence[Sequence[torch.Tensor]]
"""What to send to each rank: tensors of any shape, one after another."""


_COMM_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Bytes before an answer: what the rank is doing, and whether that has failed.
_HEADER = 16


class RankError(RuntimeError):
    """Another rank has failed, or does something else. The message says which one, and what it said."""


@dataclass
class Traffic:
    """What a rank has sent to others, and how long it has taken part in exchanges."""

    messages: int = 0
    """Exchanges of one tensor each."""
    sent_bytes: int = 0
    seconds: float = 0.0
    """From the begin of each to its end: the time that others are waited for is in it."""

    def add(self, sent: torch.Tensor, rows_to_others: int, begin: float) -> None:
        """Count an exchange of rows that has begun at this reading of time.perf_counter."""
        self.messages += 1
        self.sent_bytes += rows_to_others * (sent.numel() // max(1, len(sent))) * sent.element_size()
        self.seconds += time.perf_counter() - begin


class Received:
    """What a rank has sent: its tensors, taken one after another."""

    def __init__(self, sent_N: torch.Tensor):
        self._sent_N = sent_N
        self._begin = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The next tensor, of so many elements: [count]."""
        size = count * dtype.itemsize
        part = self._sent_N[self._begin : self._begin + size]
        self._begin += _padded(size)
        return part.view(dtype)


def together(ranks: "Ranks", loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of this rank's loader, as long as every rank has one: where the first loader ends, all end.

    Raises:
        RankError: the loader of another rank has failed.
    """
    iterator = iter(loader)
    batch: list[Any] = []

    def load() -> str | None:
        batch[:] = [value for _, value in zip(range(1), iterator, strict=False)]
        return None if batch else "ended"

    try:
        while ranks.agree(_NEXT, load) is None:
            yield batch.pop()
    except GeneratorExit:
        ranks.agree(_NEXT, lambda: "left")  # Who has come to the next batch must not wait for this rank.
        raise


_NEXT = "give the next batch of a loop over a loader"


class Ranks:
    """The ranks of a process group.

    Args:
        group: of torch.distributed. Tensors go through it as they are with gloo; with NCCL by way of the current GPU.
        gradients: "mean" or "sum": what becomes of the gradients that ranks have for a row.
        comm_dtype: torch.float32, float16 or bfloat16: of rows and gradients on their way between ranks.

    Raises:
        ValueError: this process is none of its ranks, or another argument is not as above.
    """

    def __init__(
        self, group: "distributed.ProcessGroup", gradients: str = "mean", comm_dtype: torch.dtype = torch.float32
    ):
        if gradients not in ("mean", "sum"):
            raise ValueError(f'gradients_of_ranks must be "mean" or "sum", got {gradients!r}')
        if comm_dtype not in _COMM_DTYPES:
            raise ValueError(f"comm_dtype must be torch.float32, torch.float16 or torch.bfloat16, got {comm_dtype!r}")
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this process is not in the process_group; only its ranks may make an embedding with it, and every one"
                " of them must"
            )
        self.group = group
        self.gradients, self.comm_dtype = gradients, comm_dtype
        self.traffic = Traffic()
        self.rank: int = group.rank()
        self.size: int = group.size()
        on_gpu = group.name() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @property
    def grad_scale(self) -> float:
        """By what the gradients that ranks have for a row are multiplied before they are summed."""
        return 1 / self.size if self.gradients == "mean" else 1.0

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.size})"

    def again(self) -> "Ranks":
        """The same ranks with connections of their own, by gloo, for another thread; every rank calls it."""
        name = self.all_gather("connect once more", lambda: uuid.uuid4().hex)[0]
        # new_group names a group by how many this rank has: ranks that are in different numbers wait for ever.
        store = distributed.PrefixStore(f"oneemb/{name}", self.group.get_group_store())
        group: Any = self.group  # torch gives its timeout no public name.
        timeout = group._get_backend(self._device).options._timeout
        # It has the methods of a ProcessGroup that are called here.
        again: Any = distributed.ProcessGroupGloo(store, self.rank, self.size, timeout)
        return Ranks(again, self.gradients)

    def exchange(self, what: str, make: Callable[[], Blocks]) -> list[Received]:
        """Send blocks to the ranks, and get those that they send to this one.

        Args:
            what: what the ranks are doing, in words that are the same on all of them.
            make: gives the blocks, a sequence of tensors for each rank. If it raises, every rank does.

        Returns:
            What each rank has sent, in their order.

        Raises:
            RankError: another rank has failed, or does something else.
            What `make` raises.
        """
        failure: BaseException | None = None
        sent = torch.empty(0, dtype=torch.uint8)
        sent_R = [0] * self.size
        try:
            blocks = make()
            flat = [[_bytes_of(tensor) for tensor in block] for block in blocks]
            sent_R = [sum(len(part) for part in block) for block in flat]
            parts = [part for block in flat for part in block]
            sent = torch.cat(parts) if parts else sent
        except BaseException as error:
            failure = error
        with whole_exchange():
            received_R = self._headers(what, failure, sent_R)
            received = torch.empty(sum(received_R), dtype=torch.uint8, device=self._device)
            self._all_to_all(received, sent.to(self._device), received_R, sent_R)
        return [Received(part) for part in received.split(received_R)]

    def answer(
        self, what: str, make: Callable[[], torch.Tensor], like: torch.Tensor, sent_R: Sequence[int],
        received_R: Sequence[int],
    ) -> torch.Tensor:  # fmt: skip
        """Send rows to the ranks, and get those that they send to this one, where both sides know how many.

        One message, without a copy: what makes the rows leaves room for its header, see `heads`.

        Args:
            what: as for `exchange`.
            make: gives the rows, those for rank 0 first, each rank's behind its `heads`: [sent, W]. It is changed.
            like: a tensor of shape [0, W] and the dtype and device of the rows.
            sent_R, received_R: the rows that go to each rank, and come from it.

        Returns:
            What the ranks have sent, each rank's behind its heads: [received, W].

        Raises:
            As `exchange`.
        """
        failure: BaseException | None = None
        heads = self.heads(like)
        going, coming = ([count + heads for count in counts] for counts in (sent_R, received_R))
        sent = like.new_zeros(0)
        try:
            sent = make()
        except BaseException as error:
            failure = error
            sent = like.new_zeros(sum(going), like.shape[1])
        header = torch.zeros(heads, like.shape[1] * like.element_size(), dtype=torch.uint8)
        header.view(-1)[:_HEADER] = torch.tensor([_code(what), failure is not None]).view(torch.uint8)
        sent.view(torch.uint8)[self._heads_of(going, heads)] = header.to(sent.device)
        received = like.new_empty((sum(coming), like.shape[1]), device=self._device)
        with whole_exchange():
            self._all_to_all(received, sent.to(self._device), coming, going)
            got = received.view(torch.uint8)[self._heads_of(coming, heads)].view(self.size, -1)[:, :_HEADER]
            headers = got.clone(memory_format=torch.contiguous_format).view(torch.int64).tolist()
            if any(failed or its != _code(what) for its, failed in headers):
                self._raise(what, failure)
        return received.to(like.device)

    def heads(self, like: torch.Tensor) -> int:
        """How many rows before those of each rank hold the header of an answer of such rows."""
        return -(-_HEADER // (like.shape[1] * like.element_size()))

    def behind_heads(self, count_R: Sequence[int], heads: int) -> torch.Tensor:
        """Where rows of the ranks are, so many of each, if each rank's are behind heads: int64 [sum]."""
        return torch.arange(sum(count_R)) + heads * (1 + torch.arange(self.size)).repeat_interleave(
            torch.tensor(count_R)
        )

    def _heads_of(self, size_R: Sequence[int], heads: int) -> torch.Tensor:
        begin_R = torch.tensor([0, *size_R[:-1]]).cumsum(0)
        return begin_R[:, None] + torch.arange(heads)

    def swap(self, sent: torch.Tensor, sent_R: Sequence[int], received_R: Sequence[int]) -> torch.Tensor:
        """Rows from the ranks for rows to them, within `whole_exchange`, once an exchange has said how many.

        Args:
            sent: [sum(sent_R), ...], those for rank 0 first.
        """
        received = sent.new_empty((sum(received_R), *sent.shape[1:]), device=self._device)
        self._all_to_all(received, sent.to(self._device), received_R, sent_R)
        return received.to(sent.device)

    def agree(self, what: str, check: Callable[[], Any] = lambda: None) -> Any:
        """Wait for all ranks, and raise on each if one raises.

        Args:
            what: as for `exchange`.
            check: what this rank has to do.

        Returns:
            What `check` gives on the first rank where it is not None, the same on all ranks; None if there is none.
            Any: an object that can be pickled.

        Raises:
            As `exchange`.
        """
        failure: BaseException | None = None
        found = None
        try:
            found = check()
        except BaseException as error:
            failure = error
        with whole_exchange():
            if not any(self._headers(what, failure, [found is not None] * self.size)):
                return None
            return next(its for its in self._gather(found) if its is not None)

    def all_gather(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """What `make` gives on each rank, in their order. Any: objects that can be pickled.

        Args:
            what: as for `exchange`.

        Raises:
            As `exchange`.
        """
        failure: BaseException | None = None
        mine = None
        try:
            mine = make()
        except BaseException as error:
            failure = error
        with whole_exchange():
            self._headers(what, failure, [0] * self.size)
            return self._gather(mine)

    def tell(self, what: str, number: int) -> list[int]:
        """What each rank tells, in their order.

        Args:
            what: as for `exchange`.

        Raises:
            As `exchange`.
        """
        with whole_exchange():
            return self._headers(what, None, [number] * self.size)

    def fail(self, what: str, failure: BaseException) -> None:
        """Have all ranks raise at their `tell` or `exchange`: this one has failed before it came to its own."""
        try:
            with whole_exchange():
                self._headers(what, failure, [0] * self.size)
        except BaseException as error:
            if error is not failure and not isinstance(error, RuntimeError):  # nor for those that fail as well
                raise

    def any(self, flag: bool) -> bool:
        """Whether a rank gives True."""
        return any(bool(its) for its in self._all_gather(torch.tensor([flag], dtype=torch.int32)))

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of these over the ranks, in float64 and in their order: the same bits on each."""
        first, *others = self._gather_floats(values)
        for other in others:
            first += other
        return first.tolist()

    def norms(self, norms: Sequence[float], ord: float) -> list[float]:
        """The norms of vectors of which each rank has a part, from those of the parts; NaN if one is."""
        if ord == math.inf:
            of_all = self._gather_floats(norms)
            return torch.stack(of_all).amax(0).tolist()
        return [total ** (1 / ord) for total in self.sum([norm**ord for norm in norms])]

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _headers(self, what: str, failure: BaseException | None, sent_R: Sequence[int]) -> list[int]:
        """Tell the ranks what this one is about to send them; returns what each of them will send."""
        doing = _code(what)
        header_R3 = torch.tensor([[doing, failure is not None, sent] for sent in sent_R], device=self._device)
        got_R3 = torch.empty_like(header_R3)
        self._all_to_all(got_R3, header_R3, [1] * self.size, [1] * self.size)
        got = got_R3.tolist()
        if any(failed or its != doing for its, failed, _ in got):
            self._raise(what, failure)
        return [size for _, _, size in got]

    def _raise(self, what: str, failure: BaseException | None) -> Never:
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        of_all: list[tuple[str, str | None]] = self._gather((what, said))
        if failure is not None:
            raise failure
        for rank, (_, its) in enumerate(of_all):
            if its is not None:
                raise RankError(f"rank {rank} has failed ({its}); nothing was done here")
        doing = "; ".join(f"rank {rank}: {its}" for rank, (its, _) in enumerate(of_all))
        raise RankError(
            f"the ranks do different things ({doing}): each must make the same lookups, steps, saves and loads in the"
            " same order, with an empty batch where it has none"
        )

    def _gather_floats(self, values: Sequence[float]) -> list[torch.Tensor]:
        return self._all_gather(torch.tensor(values, dtype=torch.float64))

    def _gather(self, value: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(mine)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = mine
        of_all = self._all_gather(padded)
        return [pickle.loads(its[:size].numpy().tobytes()) for its, size in zip(of_all, sizes, strict=True)]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Of all ranks, this tensor, which has the same shape on each; in memory of the host."""
        begin, mine = time.perf_counter(), mine.to(self._device)
        of_all = [torch.empty_like(mine) for _ in range(self.size)]
        self.group.allgather(of_all, mine).wait()
        self.traffic.add(mine, len(mine) * (self.size - 1), begin)
        return [its.cpu() for its in of_all]

    def _all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_R: Sequence[int], sent_R: Sequence[int]
    ) -> None:
        begin = time.perf_counter()
        # Methods, not torch.distributed's functions: those take no group that they have not made.
        self.group.alltoall_base(received, sent, list(received_R), list(sent_R)).wait()
        self.traffic.add(sent, sum(sent_R) - sent_R[self.rank], begin)


@contextmanager
def whole_exchange() -> Iterator[None]:
    """Within it no signal comes between the messages of an exchange, for which the other ranks wait. Forks may."""
    with undisturbed, undisturbed.forks_allowed():
        yield


def _code(what: str) -> int:
    return zlib.crc32(what.encode())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, and zeros up to a multiple of 8, as views of what follows need it."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    more = _padded(len(flat)) - len(flat)
    return torch.cat([flat, flat.new_zeros(more)]) if more else flat


def _padded(size: int) -> int:
    return -(-size // 8) * 8
