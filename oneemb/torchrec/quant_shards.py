"""Places where quantized rows live: one device, several devices of this process, or ranks.

    place = OnDevices(devices)
    rows = place(tables, dim, data_type)        a module: (table_N, id_N) -> float32 [N, D]

Invariant: `kernels/owner.py` says on which device, or rank, a row lives. A lookup collects the rows of all ids before
it sums any, so that no result depends on the number of places.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torchrec.types import DataType

from oneemb.graph.rank_messages import whole_exchange
from oneemb.graph.ranks import Ranks
from oneemb.graph.tracers import uncompiled
from oneemb.kernels.owner import owner_of
from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_keys import unique_keys
from oneemb.torchrec.quant_index import IndexedRows
from oneemb.torchrec.quant_rows import RowsOfTable, frozen_rows, rows_of_table


class Place(Protocol):
    """Where the rows of quantized tables live."""

    def __call__(self, tables: Sequence[RowsOfTable], dim: int, data_type: DataType) -> torch.nn.Module:
        """Module that looks up the rows of these tables, like that of `frozen_rows`."""

    def together(self, call: Callable[[], Any]) -> Any:
        """Result of `call`, which checks a batch before a lookup. An error of one rank is raised on all ranks."""


class OnDevices:
    """Rows spread over devices of this process by their keys.

    Args:
        devices: may name a device several times; empty = rows stay where they were made.
    """

    def __init__(self, devices: Sequence[torch.device] = ()):
        self._devices = list(devices)

    def __call__(self, tables: Sequence[RowsOfTable], dim: int, data_type: DataType) -> torch.nn.Module:
        if not self._devices:
            return frozen_rows(tables, dim, data_type)
        shards = [
            frozen_rows([_of_owner(table, d, len(self._devices)).to(device) for table in tables], dim, data_type)
            for d, device in enumerate(self._devices)
        ]
        return RowsOnDevices(shards) if len(shards) > 1 else shards[0]

    def together(self, call: Callable[[], Any]) -> Any:
        return call()


class OnRanks:
    """Rows spread over ranks by their keys. All ranks make the same lookups at the same time."""

    def __init__(self, process_group: "torch.distributed.ProcessGroup"):
        self._ranks = Ranks(process_group, name="quantized rows")

    def __call__(self, tables: Sequence[RowsOfTable], dim: int, data_type: DataType) -> torch.nn.Module:
        own = [_of_owner(table, self._ranks.rank, self._ranks.size) for table in tables]
        return RowsOnRanks(frozen_rows(own, dim, data_type), self._ranks)

    def together(self, call: Callable[[], Any]) -> Any:
        found: list[Any] = []
        self._ranks.agree("check a batch of quantized collections", lambda: found.append(call()))
        return found[0]


def _of_owner(table: RowsOfTable, owner: int, owners: int) -> RowsOfTable:
    """Rows of a table whose keys belong to owner number `owner` of `owners`."""
    id_S = table.ids.cpu()
    table_S = torch.full_like(id_S, table.number, dtype=torch.int32)
    own = torch.from_numpy(owner_of(table_S.numpy(), id_S.numpy(), owners) == owner).to(table.ids.device)
    return RowsOfTable(table.ids[own], table.weight[own], table.absent)


def stored_rows(rows: torch.nn.Module, absent: torch.Tensor) -> RowsOfTable:
    """Rows of one table in a module that a place has made, in the order of their ids; on ranks only the rows of this
    rank."""
    if isinstance(rows, IndexedRows):
        return rows_of_table(rows, absent)
    parts = [rows_of_table(shard, absent).to(torch.device("cpu")) for shard in rows.shards]  # type: ignore[union-attr]
    ids, weight = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    order = torch.argsort(ids)
    return RowsOfTable(ids[order], weight[order], absent)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits, for int64 that stand for unsigned 64-bit numbers."""
    return torch.bitwise_right_shift(x, bits) & ((1 << (64 - bits)) - 1)


@torch.fx.wrap
def owner_of_keys(table_N: torch.Tensor, id_N: torch.Tensor, owners: int) -> torch.Tensor:
    """Owner of each key, int64 [N], by aten ops; equals `owner_of` of `kernels/owner.py`. Both inputs are int64 [N],
    and there are at most 2^31 owners."""
    # TorchScript reads no constants of modules. As unsigned numbers these are 0x9E3779B97F4A7C15, 0x6F776E6572730001,
    # 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB; products of int64 wrap around like unsigned ones.
    golden, salt, first, second = -7046029254386353131, 8032009842429460481, -4658895280553007687, -7723592293110705685
    x = (table_N + 1) * golden + salt
    x = (x ^ _shifted(x, 30)) * first
    x = (x ^ _shifted(x, 27)) * second
    x = (x ^ _shifted(x, 31)) ^ id_N
    x = (x ^ _shifted(x, 30)) * first
    x = (x ^ _shifted(x, 27)) * second
    x = x ^ _shifted(x, 31)
    return torch.bitwise_right_shift(_shifted(x, 32) * owners + _shifted((x & 0xFFFFFFFF) * owners, 32), 32)


class RowsOnDevices(torch.nn.Module):
    """Module that looks rows up on several devices. It can be scripted and exported."""

    def __init__(self, shards: Sequence[IndexedRows]):
        super().__init__()
        self.shards = torch.nn.ModuleList(shards)
        self.owners, self.dim = len(shards), shards[0].dim

    def forward(self, table_N: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
        """Read rows; see `FrozenRows.forward`."""
        owner_N = owner_of_keys(table_N, id_N, self.owners)
        weight_ND = id_N.new_zeros([id_N.size(0), self.dim], dtype=torch.float32)
        for d, shard in enumerate(self.shards):
            at_M = torch.nonzero(owner_N == d).squeeze(1)
            device: torch.device = shard.where()  # type: ignore[operator]
            found_MD = shard(table_N.index_select(0, at_M).to(device), id_N.index_select(0, at_M).to(device))
            weight_ND = weight_ND.index_copy(0, at_M, found_MD.to(weight_ND.device))
        return weight_ND


class RowsOnRanks(torch.nn.Module):
    """Module that looks rows up on the ranks that own them. Every rank makes the call, with its own keys."""

    def __init__(self, own: IndexedRows, ranks: Ranks):
        super().__init__()
        self.shards = torch.nn.ModuleList([own])
        self.dim = own.dim
        self._ranks = ranks

    @uncompiled
    def forward(self, table_N: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
        """Read rows; see `FrozenRows.forward`.

        Raises:
            RankError: another rank has failed.
        """
        (own,), ranks, device = self.shards, self._ranks, id_N.device
        sent: list[tuple[list[int], torch.Tensor]] = []

        def keys() -> list[list[torch.Tensor]]:
            unique = unique_keys(table_N.cpu().int().numpy(), id_N.cpu().numpy(), padding_id=None, threads=Threads())
            owner_U = torch.from_numpy(owner_of(unique.table_U, unique.id_U, ranks.size))
            order_U = torch.argsort(owner_U, stable=True)
            count_R = torch.bincount(owner_U, minlength=ranks.size).tolist()
            place_U = torch.empty_like(order_U)
            place_U[order_U] = torch.arange(len(order_U), device="cpu")
            sent.append((count_R, place_U[torch.from_numpy(unique.inverse_N)]))
            table_U, id_U = torch.from_numpy(unique.table_U), torch.from_numpy(unique.id_U)
            return [
                [torch.tensor([len(places)], device="cpu"), id_U[places], table_U[places]]
                for places in order_U.split(count_R)
            ]

        def rows() -> list[list[torch.Tensor]]:
            answers = []
            for block in asked:
                count = int(block.take(1, torch.int64))
                ids, table = block.take(count, torch.int64), block.take(count, torch.int32)
                answers.append([own(table.to(device).long(), ids.to(device)).cpu()])
            return answers

        with whole_exchange():
            asked = ranks.exchange("look up quantized rows", keys)
            received = ranks.exchange("answer with quantized rows", rows)
        (count_R, place_N), dim = sent[0], self.dim
        parts = [block.take(count * dim, torch.float32) for block, count in zip(received, count_R, strict=True)]
        return torch.cat(parts).view(-1, dim)[place_N].to(device)
