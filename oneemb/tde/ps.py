"""Moves rows between static tables and the parameter server, which keeps the rows that have no place in a table.

A row is sent as float32 values, in parts: the weights, then each part of the optimizer state.

Invariants:
- an evicted row is read in the call that evicts it; the copy is sent later;
- `FetchHandle.wait` writes a fetched row into the table, on the thread that calls it;
- a fetch is an error if the server has only some parts of a row: weights never come without their optimizer state.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from oneemb.kernels.init_rows import UNIFORM, InitialRows, init_rows
from oneemb.kernels.threads import Threads
from oneemb.storage.remote.parameter_server import LostRowsError, ParameterServer, ServerError
from oneemb.storage.remote.servers import open_server
from oneemb.tde.table_tensors import new_states, table_tensors
from oneemb.tde.traffic import ServerCalls

__all__ = ["PS", "FetchHandle", "PSCollection"]

DEFAULT_CHUNK_SIZE = 8 * 1024 * 1024


_Pulled = tuple[np.ndarray, list[np.ndarray], np.ndarray]
"""(ids and their cache ids int64 [N, 2], parts of their rows, whether the server has each row bool [N])."""


class _Shard(NamedTuple):
    """Rows `begin` to `end` - 1 of a table, which this process has."""

    begin: int
    end: int
    tensors: list[torch.Tensor]
    """Parts of the rows, [rows, width] each: weights, then optimizer state."""


class PS:
    """Pushes rows of one table to its server, and fetches them.

    Args:
        table_name: the table's name on the server.
        tensors: the table, [rows, D], and each part of its optimizer state, [rows, D] or [rows]; or ShardedTensors of
            them, of which this process has some rows.
        url: URL of the parameter server.
        chunk_size: number of float32 values that one call of the server pushes.
        server: an open server, used in place of `url`.
        traffic: queue for calls of several tables' servers; None = a queue for this table only.
        pushes: whether this process pushes rows; False = another process has the same rows and pushes them.
        rank: this process's rank.
        new_state: value that fills the optimizer state of a new row.

    Raises:
        ValueError: a shard lacks columns of its rows.
        ServerError: the server cannot be reached.

    Reference: torchrec_dynamic_embedding's PS.
    """

    def __init__(
        self, table_name: str, tensors: Sequence[torch.Tensor], url: str, chunk_size: int = DEFAULT_CHUNK_SIZE, *,
        server: ParameterServer | None = None, traffic: ServerCalls | None = None, pushes: bool = True,
        rank: int = 0, new_state: float = 0.0,
    ):  # fmt: skip
        self.table_name = table_name
        self._new_state = new_state
        self.traffic = ServerCalls() if traffic is None else traffic
        self._shards = list(_shards_of(table_name, tensors))
        self._widths = [tensor.shape[1] for tensor in self._shards[0].tensors] if self._shards else []
        self._server = open_server(url) if server is None else server
        self._pushes = pushes
        self._mark = PushMark(self._server, table_name, rank)
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be 1 or more, got {chunk_size}")
        self._chunk = max(1, chunk_size // max(1, sum(self._widths)))

    def evict(self, ids_to_evict: torch.Tensor) -> None:
        """Push rows, and return when the server has them. Rows of other ranks are skipped.

        Args:
            ids_to_evict: ids, each with its cache id: int64 [N, 2].
        """
        self.traffic.wait(self.evict_later(ids_to_evict.numpy()))

    def evict_later(self, pair_N2: np.ndarray) -> int:
        """Read rows now, and add their push to `traffic`; returns its ticket. `pair_N2` has ids, each with its cache
        id."""
        if not self._pushes or not len(pair_N2):
            return self.traffic.last_ticket
        for shard, pairs in self._own(pair_N2):
            where = torch.from_numpy(pairs[:, 1] - shard.begin)
            parts = [
                tensor.detach().index_select(0, where.to(tensor.device)).to("cpu", torch.float32).numpy()
                for tensor in shard.tensors
            ]
            self.traffic.add(functools.partial(self._push, np.ascontiguousarray(pairs[:, 0]), parts))
        return self.traffic.last_ticket

    def fetch(
        self, ids_to_fetch: torch.Tensor, time: int, reinit: bool = False, weight_init_max: float = 0.0,
        weight_init_min: float = 0.0,
    ) -> "FetchHandle":  # fmt: skip
        """Start to bring rows into the table; returns a handle, whose `wait` returns when they are there.

        Args:
            ids_to_fetch: ids, each with its new cache id: int64 [N, 2].
            time: number of the batch; has no effect.
            reinit: True = initialize rows that the server lacks: weights are uniform between the bounds and depend only
                on table and id, and the state is `new_state`. False = such rows keep the table's numbers.
            weight_init_max, weight_init_min: bounds of initial weights, in any order.
        """
        del time
        low, high = sorted((float(weight_init_min), float(weight_init_max)))
        return self.fetch_later(ids_to_fetch.numpy(), (low, high) if reinit else None)

    def fetch_later(
        self, pair_N2: np.ndarray, bounds: tuple[float, float] | None, seed: int = 0,
        written: Callable[[], None] | None = None,
    ) -> "FetchHandle":  # fmt: skip
        """Start to bring rows into the table, like `fetch`, and return the handle.

        Args:
            pair_N2: ids, each with its new cache id: int64 [N, 2].
            bounds: bounds of the initial weights of rows that the server lacks; None = such rows keep the table's
                numbers.
            seed: seed of these initial weights.
            written: called once the rows are in the table.
        """
        return FetchHandle(self, pair_N2, bounds, seed, written)

    def close(self) -> None:
        """Close the connection to the server."""
        self._server.close()

    # ---- calls of handles -------------------------------------------------------------------------------------------

    def pull(self, pair_N2: np.ndarray) -> list[_Pulled]:
        """Read rows from the server, for each shard of this process. `pair_N2` has ids, each with its cache id."""
        found: list[_Pulled] = []
        for _, pairs in self._own(pair_N2):
            parts, found_NP = self._server.pull(self.table_name, np.ascontiguousarray(pairs[:, 0]), self._widths)
            some_N, all_N = np.logical_or.reduce(found_NP, axis=1), np.logical_and.reduce(found_NP, axis=1)
            if (some_N != all_N).any():
                n = int(np.flatnonzero(some_N != all_N)[0])
                raise ServerError(
                    f"{self._server.name}: row {pairs[n, 0]} of table {self.table_name!r} must have {len(self._widths)}"
                    f" parts (weights, then the optimizer's state), but the server has {int(found_NP[n].sum())}: a job"
                    " with another optimizer pushed it, or the server has lost values; begin with an empty server, or"
                    " with the optimizer of that job"
                )
            found.append((pairs, parts, all_N))
        self._mark.check()
        return found

    def write(self, pulled: list[_Pulled], bounds: tuple[float, float] | None, seed: int) -> None:
        """Write the result of `pull` into the table; `bounds` and `seed` are those of `fetch_later`."""
        for pairs, parts, found_N in pulled:
            shard = next(one for one in self._shards if one.begin <= pairs[0, 1] < one.end)
            if bounds is not None:
                missing = np.flatnonzero(~found_N)
                parts[0][missing] = _first_weights(self.table_name, pairs[missing, 0], self._widths[0], bounds, seed)
                for part in parts[1:]:
                    part[missing] = self._new_state
                found_N = np.ones(len(pairs), np.bool_)
            where = torch.from_numpy(pairs[found_N, 1] - shard.begin)
            with torch.no_grad():
                for tensor, part in zip(shard.tensors, parts, strict=True):
                    rows = torch.from_numpy(part[found_N]).to(tensor.device, tensor.dtype)
                    tensor.detach().index_copy_(0, where.to(tensor.device), rows)

    def _own(self, pair_N2: np.ndarray) -> list[tuple[_Shard, np.ndarray]]:
        """Shards of this process, each with those pairs (id, cache id) whose rows it holds."""
        own = [(s, pair_N2[(pair_N2[:, 1] >= s.begin) & (pair_N2[:, 1] < s.end)]) for s in self._shards]
        return [(shard, pairs) for shard, pairs in own if len(pairs)]

    def _push(self, id_N: np.ndarray, parts: list[np.ndarray]) -> None:
        self._mark.check()
        for begin in range(0, len(id_N), self._chunk):
            some = slice(begin, begin + self._chunk)
            self._server.push(self.table_name, id_N[some], [part[some] for part in parts])
        self._mark.advance()


class FetchHandle:
    """Handle of a fetch of rows into a table; the arguments are those of `PS.fetch_later`."""

    def __init__(
        self, ps: PS, pair_N2: np.ndarray, bounds: tuple[float, float] | None, seed: int,
        written: Callable[[], None] | None,
    ):  # fmt: skip
        self._ps, self._pair_N2, self._bounds, self._seed, self._written = ps, pair_N2, bounds, seed, written
        self._ticket: int | None = None
        self._pulled: list[_Pulled] | None = None
        self.done = False

    def ask(self) -> None:
        """Add the pull of the rows to the queue of calls, after all pushes that were added earlier."""
        if self._ticket is None:
            self._ticket = self._ps.traffic.add(self._pull)

    def wait(self) -> None:
        """Wait for the pull, and write the rows into the table. An error, such as ServerError, leaves the table
        unchanged, and the call may be repeated."""
        if self.done:
            return
        self.ask()
        assert self._ticket is not None
        self._ps.traffic.wait(self._ticket)
        assert self._pulled is not None
        self._ps.write(self._pulled, self._bounds, self._seed)
        self._pulled, self.done = None, True
        if self._written is not None:
            self._written()

    def _pull(self) -> None:
        self._pulled = self._ps.pull(self._pair_N2)


class PSCollection:
    """The `PS` of each table of one collection.

    Args:
        path: path of the collection's module.
        plan: {table: (its ParameterSharding, its tensors, see `PS`)}.
        url: URL of the parameter server; or a function that returns the URL for a table.
        ps_config: `{"chunk_size": ...}`, see `PS`.
        traffic: queue for calls of servers; None = a queue for this collection only.
        rank: this process's rank; rank 0 pushes the rows of data-parallel tables.
        new_states: {table: value that fills the optimizer state of a new row}; None = 0 for all.

    Raises:
        ValueError: an option is unknown, or a table is sharded by its columns.
        ServerError: a server cannot be reached.

    Reference: torchrec_dynamic_embedding's PSCollection.
    """

    def __init__(
        self, path: str, plan: Mapping[str, tuple[Any, Sequence[torch.Tensor]]], url: str | Callable[[str], str],
        ps_config: Mapping[str, Any] | None = None, *, traffic: ServerCalls | None = None, rank: int = 0,
        new_states: Mapping[str, float] | None = None,
    ):  # fmt: skip
        ps_config = ps_config or {}
        unknown = set(ps_config) - {"chunk_size", "optimizers", "seed"}
        if unknown:
            raise ValueError(
                f"ps_config must have no options but chunk_size, optimizers and seed, got {sorted(unknown)}"
            )
        self._path = path
        self.traffic = ServerCalls() if traffic is None else traffic
        servers: dict[str, ParameterServer] = {}
        self._of_table: dict[str, PS] = {}
        for table, (_, tensors) in plan.items():
            address = url if isinstance(url, str) else url(table)
            if address not in servers:
                servers[address] = open_server(address)
            self._of_table[table] = PS(
                f"{path}.{table}", tensors, address, ps_config.get("chunk_size", DEFAULT_CHUNK_SIZE),
                server=servers[address], traffic=self.traffic, rank=rank,
                pushes=rank == 0 or isinstance(tensors[0], ShardedTensor), new_state=(new_states or {}).get(table, 0.0),
            )  # fmt: skip

    def table_names(self) -> list[str]:
        """The tables' names."""
        return list(self._of_table)

    def __getitem__(self, table_name: str) -> PS:
        return self._of_table[table_name]

    def close(self) -> None:
        """Close the connections to the servers."""
        for ps in self._of_table.values():
            ps.close()

    @staticmethod
    def fromModule(
        path: str, sharded_module: torch.nn.Module, params_plan: Mapping[str, Any],
        url: str | Callable[[str, str], str], ps_config: Mapping[str, Any] | None = None, *,
        traffic: ServerCalls | None = None, rank: int = 0,
    ) -> "PSCollection":  # fmt: skip
        """`PSCollection` for a module that TorchRec has sharded.

        Args:
            path, url, traffic, rank: see `PSCollection`; `url` may be a function of a path and a table.
            sharded_module: TorchRec's sharded collection.
            params_plan: {table: its ParameterSharding}.
            ps_config: see `PSCollection`; `"optimizers"` has the user's optimizers of data-parallel tables.

        Raises:
            ValueError: the module is not TorchRec's, has other tables than its plan, or an option is unknown.
        """
        optimizers = (ps_config or {}).get("optimizers", ())
        tensors = table_tensors(path, sharded_module, params_plan, optimizers)
        plan = {table: (params_plan[table], parts) for table, parts in tensors.items()}
        table_url = url if isinstance(url, str) else lambda table: url(path, table)
        begins = new_states(sharded_module, optimizers)
        return PSCollection(path, plan, table_url, ps_config, traffic=traffic, rank=rank, new_states=begins)


# ---- helpers --------------------------------------------------------------------------------------------------------


def _shards_of(table: str, tensors: Sequence[torch.Tensor]) -> list[_Shard]:
    first = tensors[0]
    if not isinstance(first, ShardedTensor):
        return [_Shard(0, first.shape[0], [_rows(table, tensor, first.shape[0]) for tensor in tensors])]
    shards = []
    for i, local in enumerate(first.local_shards()):
        row, column = local.metadata.shard_offsets
        rows, columns = local.metadata.shard_sizes
        if column != 0 or columns != first.size(1):
            raise ValueError(
                f"table {table} must not be sharded by its columns, since a row is sent as a whole, but a shard has"
                f" {columns} of {first.size(1)} columns; use row_wise, table_wise or data_parallel sharding"
            )
        parts = [tensor.local_shards()[i].tensor for tensor in tensors]  # type: ignore[attr-defined]
        shards.append(_Shard(row, row + rows, [_rows(table, part, rows) for part in parts]))
    return [shard for shard in shards if shard.end > shard.begin]


def _rows(table: str, tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor as [rows, width], sharing its memory."""
    if tensor.dim() not in (1, 2) or tensor.shape[0] != rows:
        raise ValueError(
            f"table {table}: a tensor of its {rows} rows must have the shape [rows] or [rows, width], got"
            f" {tuple(tensor.shape)}"
        )
    return tensor.detach().view(rows, -1)


def _first_weights(table: str, id_N: np.ndarray, width: int, bounds: tuple[float, float], seed: int) -> np.ndarray:
    """Initial weights of rows that the server lacks, float32 [N, width]: a pure function of seed, table and id."""
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    initial = InitialRows(
        int.from_bytes(digest, "little"), np.array([[UNIFORM]]), np.array([[[*bounds, 0.0, 0.0]]]), np.array([width])
    )
    weight_NX = np.empty((len(id_N), width), np.float32)
    init_rows(
        weight_NX, weight_NX, np.arange(len(id_N)), np.zeros(len(id_N), np.int32), np.ascontiguousarray(id_N), initial,
        np.empty(0, np.float32), state_begin=width, threads=Threads(1),
    )  # fmt: skip
    return weight_NX


# The count is stored as digits below 2^16, since a server keeps float32 values, which are exact only up to 2^24.
_DIGIT = 1 << 16
_DIGITS = 4


class PushMark:
    """Number of pushes of one rank to one table, stored on the server beside the table. A server that has lost rows has
    lost the number too.

    Invariant: the server's number equals the number here; it is one higher if a push that raised an error was carried
    out. A server that restarts empty, or from an older copy, has no number or a lower one.

    Args:
        server: the table's server.
        table: name of the table on the server.
        rank: the rank whose pushes are counted.
    """

    def __init__(self, server: ParameterServer, table: str, rank: int):
        self._server, self._table, self._of = server, table, f"{table}#pushes"
        self._id = np.array([rank], np.int64)
        self._count: int | None = None  # None = not read from the server yet
        self._pushed = False

    def advance(self) -> None:
        """Count a push that the server has carried out."""
        if self._count is None:
            self._count = self._read()
        digits = [float((self._count + 1) // _DIGIT**d % _DIGIT) for d in range(_DIGITS)]
        self._server.push(self._of, self._id, [np.array([digits], np.float32)])
        self._count += 1
        self._pushed = True

    def check(self) -> None:
        """Raise LostRowsError if the server lacks pushes of this process, or pushes that it had at the first check."""
        found = self._read()
        if self._count is None or (found > self._count and not self._pushed):
            self._count = found  # Another job may push while this job only reads.
        elif found not in (self._count, self._count + 1):
            raise LostRowsError(
                f"{self._server.name}: table {self._table!r} was pushed to {self._count} times, but the server says"
                f" {found}: it has restarted empty or from an older copy, or another job pushes to the same table."
                " Trained rows would be initialized again: restore the server, or start the job anew"
            )

    def _read(self) -> int:
        """Number of pushes that the server has; 0 if it has no number."""
        (digits,), found = self._server.pull(self._of, self._id, [_DIGITS])
        return sum(int(digits[0, d]) * _DIGIT**d for d in range(_DIGITS)) if found.all() else 0
