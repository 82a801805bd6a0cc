"""The processes that own rows together, and how they exchange what they have.

    received = ranks.exchange("look up 'items'", lambda: blocks)

Each exchange begins with a header: what the rank is doing, whether that has failed, and how much it sends to whom. So
every rank raises where one has failed, and ranks that do different things say so; none waits for what will not come.

Invariant: after an exchange that raises, every rank has left it: the group can be used again.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Never

import torch
from torch import distributed

__all__ = ["RankError", "Ranks"]

Blocks = Sequence[Sequence[torch.Tensor]]
"""What to send to each rank: tensors of any shape, one after another."""


class RankError(RuntimeError):
    """Another rank has failed, or does something else. The message says which one, and what it said."""


class Ranks:
    """The ranks of a process group.

    Args:
        group: of torch.distributed. Tensors go through it as they are with gloo; with NCCL by way of the current GPU.

    Raises:
        ValueError: this process is none of its ranks.
    """

    def __init__(self, group: "distributed.ProcessGroup"):
        self.group = group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                "this process is not in the process_group; only its ranks may make an embedding with it, and every one"
                " of them must"
            )
        on_gpu = distributed.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.size})"

    def exchange(self, what: str, make: Callable[[], Blocks]) -> list[torch.Tensor]:
        """Send blocks to the ranks, and get those that they send to this one.

        Args:
            what: what the ranks are doing, in words that are the same on all of them.
            make: gives the blocks, a sequence of tensors for each rank. If it raises, every rank does.

        Returns:
            From each rank the bytes that it has sent: uint8, in the order of the ranks, aligned to 8 bytes if each
            tensor's bytes are a multiple of 8.

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
        received_R = self._headers(what, failure, sent_R)
        received = torch.empty(sum(received_R), dtype=torch.uint8, device=self._device)
        distributed.all_to_all_single(received, sent.to(self._device), received_R, sent_R, group=self.group)
        return list(received.split(received_R))

    def agree(self, what: str, check: Callable[[], object] = lambda: None) -> None:
        """Wait for all ranks, and raise on each if one raises.

        Args:
            what: as for `exchange`.
            check: what this rank has to do.

        Raises:
            As `exchange`.
        """
        failure: BaseException | None = None
        try:
            check()
        except BaseException as error:
            failure = error
        self._headers(what, failure, [0] * self.size)

    def all_gather(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """What `make` gives on each rank, in their order. Any: objects that can be pickled.

        Args:
            what: as for `exchange`.

        Raises:
            As `exchange`.
        """
        mine: list[Any] = []
        self.agree(what, lambda: mine.append(make()))
        return self._gather(mine[0])

    def any(self, flag: bool) -> bool:
        """Whether a rank gives True."""
        any_rank = torch.tensor([flag], dtype=torch.int32, device=self._device)
        distributed.all_reduce(any_rank, distributed.ReduceOp.MAX, group=self.group)
        return bool(any_rank)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of these over the ranks, in float64 and in their order: the same bits on each."""
        mine = torch.tensor(values, dtype=torch.float64, device=self._device)
        of_all = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(of_all, mine, group=self.group)
        total = of_all[0].clone()
        for other in of_all[1:]:
            total += other
        return total.tolist()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _headers(self, what: str, failure: BaseException | None, sent_R: Sequence[int]) -> list[int]:
        """Tell the ranks what this one is about to send them; returns what each of them will send."""
        doing = zlib.crc32(what.encode())
        header_R3 = torch.tensor([[doing, failure is not None, sent] for sent in sent_R], device=self._device)
        got_R3 = torch.empty_like(header_R3)
        distributed.all_to_all_single(got_R3, header_R3, group=self.group)
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

    def _gather(self, value: Any) -> list[Any]:
        of_all: list[Any] = [None] * self.size
        distributed.all_gather_object(of_all, value, group=self.group)
        return of_all


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
