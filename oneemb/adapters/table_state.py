"""State of a table in state dicts: the name of a snapshot if the rows have a path, else tensors like TorchRec's.

    state = TableState(rows, table, configs, of_rows, is_kept=False)
    state.give()                    rows 0 to num_embeddings - 1, [N, D]
    state.load(tensor)              loads such rows, or a snapshot by its name
    state.of_optimizer()            {"momentum1": [N, D], ...}, by FBGEMM's names

These tensors are copies of the rows. Tools that load checkpoints write into tensors of a state dict, so changes in
place are written into the rows at the next lookup or state dict. N rows, D weights of a row, Z values of optimizer
state of a row, U rows at a time.
"""

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from oneemb.adapters.handed_rows import hand_over
from oneemb.adapters.table_snapshots import load_tables
from oneemb.checkpoints.named_snapshot import decode, encode
from oneemb.embeddings.embedding import MultiTableEmbedding
from oneemb.embeddings.internals import load_named
from oneemb.graph.row_optimizers import RowOptimizer
from oneemb.kernels.owner import owner_of
from oneemb.rows.import_rows import import_rows
from oneemb.rows.values import encode_rows, state_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StorageError
from oneemb.storage.store_rows import set_rows

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_CHUNK = 1 << 16
"""Number of rows that are read at a time."""


class TableConfig(Protocol):
    """Fields of a table's config that this module reads; configs of all libraries have them."""

    name: str
    num_embeddings: int
    embedding_dim: int


class _Given:
    """Tensor that a state dict holds: a copy of rows, or of a part of their optimizer state, at one moment."""

    def __init__(self, tensor: torch.Tensor, changes: int, put: Callable[[torch.Tensor], None], part: str):
        self.part = part
        """Kind of the tensor: "weight", "step", or the name of a part of the optimizer's state."""
        self._held: torch.Tensor | None = tensor
        self._tensor = weakref.ref(tensor)
        self._version, self._changes = tensor._version, changes
        self._put = put

    def changed(self, changes: int, what: str) -> bool:
        """Whether the tensor was changed in place since the copy. RuntimeError if rows have changed since then, too.

        Args:
            changes: current count of changes of the rows.
            what: name of the rows, for the message.
        """
        tensor = self._tensor()
        if tensor is None or tensor._version == self._version:
            return False
        if changes != self._changes:
            raise RuntimeError(
                f"a tensor of a state dict was changed in place after the rows of {what} had changed, as training"
                " changes them; take a new state dict and change that, or pass the changed one to load_state_dict()"
            )
        return True

    def write(self) -> None:
        tensor = self._tensor()
        assert tensor is not None
        self._put(tensor)

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor; None if the user no longer holds it."""
        return self._tensor()

    def let_go(self) -> None:
        """Stop keeping the tensor alive."""
        self._held = None

    def is_current(self, changes: int) -> bool:
        """Whether rows have not changed since the tensor was copied or written back; `changes` is their current count
        of changes."""
        return changes == self._changes

    def keep(self, changes: int) -> None:
        """Record that the tensor equals the rows at this count of changes; -1 = it is older than the rows."""
        tensor = self._tensor()
        if tensor is not None:
            self._version, self._changes = tensor._version, changes


def write_back(states: Iterable["TableState"]) -> None:
    """Write tensors that were changed in place into the rows; RuntimeError if the rows have changed since the copy,
    too."""
    pairs = [(state, given) for state in states for given in state.given]
    written = [(state, given) for state, given in pairs if given.changed(state.rows.store.changes, state.rows.name)]
    if not written:
        return
    current = [(state, given) for state, given in pairs if given.is_current(state.rows.store.changes)]
    for _, given in written:
        given.write()
    last = {(state, given.part): given for state, given in written}
    for state, given in current:
        # Any other tensor of these rows is now older than the rows.
        is_older = last.get((state, given.part), given) is not given
        given.keep(-1 if is_older else state.rows.store.changes)


def let_go(states: Iterable["TableState"]) -> None:
    """Stop keeping the tensors alive: a user who will still change one holds it."""
    for state in states:
        for given in state.given:
            given.let_go()
        state.given[:] = [given for given in state.given if given.tensor is not None]


def load_together(entries: Iterable[tuple["TableState", object]]) -> None:
    """Record which tables of a state dict name the same snapshot, so that `TableState.load` loads them together.

    Args:
        entries: state of each table, and its entry in the state dict.
    """
    named: dict[tuple[object, ...], list[TableState]] = {}
    for state, entry in entries:
        state.loads_with = frozenset()
        if isinstance(entry, torch.Tensor) and not hasattr(entry, "full_tensor") and entry.dim() == 1:
            with suppress(ValueError):  # the load of that table raises it
                snapshot = decode(entry)
                snapshot.pop("oneemb_table", None)
                named.setdefault((state.rows, *sorted(snapshot.items())), []).append(state)
    for states in named.values():
        for state in states:
            state.loads_with = frozenset(other.table for other in states)


class TableState:
    """State of one table in state dicts.

    Args:
        rows: embedding that holds the table's rows.
        table: number of the table in `rows`.
        configs: configs of all tables of `rows`.
        of_rows: list of the states of all tables of `rows`, to which this one is appended.
        is_kept: whether the rows live in a path of the user's.
        is_empty: True = state dicts hold no rows, since the adapter saves them in another way; no effect with a path.
    """

    def __init__(
        self, rows: MultiTableEmbedding, table: int, configs: Sequence[TableConfig],
        of_rows: "list[TableState]", *, is_kept: bool, is_empty: bool = False,
    ):  # fmt: skip
        self.rows = rows
        of_rows.append(self)
        self._of_rows = of_rows
        self.checked = -1
        """Count of changes when the last check found only ids 0 to num_embeddings - 1; only that of the first table is
        used."""
        self.is_kept, self._is_empty = is_kept, is_empty and not is_kept
        self.given: list[_Given] = []
        """Tensors that state dicts hold."""
        self._configs, self._config = configs, configs[table]
        self.table = table
        """Number of the table in `rows`."""
        self.loads_with: frozenset[int] = frozenset()
        """Numbers of the tables of `rows` that name the same snapshot in the state dict that is being loaded."""

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._config.name

    def give(self) -> torch.Tensor:
        """Entry of a state dict: the name of a snapshot, or rows 0 to num_embeddings - 1. Every rank makes the call.
        StorageError if rows have no path and there are rows of other ids."""
        rows, config = self.rows, self._config
        if self.is_kept:
            return encode({**rows.named_snapshot(), "oneemb_table": [self.table, config.name]})
        if self._is_empty:
            return torch.empty(0, config.embedding_dim, dtype=rows.dtype, device="cpu")
        write_back(self._of_rows)
        let_go([self])
        weights = _empty_rows(rows, config)
        self.check_in_range()
        if self.table == 0:
            row_optimizer = rows.row_optimizer
            has_state = row_optimizer is not None and row_optimizer.state_width(config.embedding_dim)
            if rows.store.step and has_state and rows.ranks.alone:
                assert row_optimizer is not None
                warnings.warn(
                    f"the state dict of tables {rows.name} holds their weights, but not the state that"
                    f" {row_optimizer.name!r} has of each row, which a job that resumes from it initializes; give"
                    " store_options with a path, where a state dict names a snapshot, which has both",
                    stacklevel=2,
                )
        weights = dense_rows(rows, self.table, config, weights)
        self._give(weights, self._put_weights, "weight")
        return weights

    def check_in_range(self) -> None:
        """Raise StorageError if any table of `rows` has rows of other ids than 0 to num_embeddings - 1."""
        first = self._of_rows[0]
        if first.checked == self.rows.store.changes and self.rows.ranks.alone:
            return
        if self.rows.ranks.alone or self.table == 0:  # On ranks a state dict has all tables.
            self.rows.ranks.agree(f"make a state dict of {self.rows.name}", self._check_own)
        first.checked = self.rows.store.changes

    def _check_own(self) -> None:
        rows, known = self.rows, 0
        store = rows.store
        if not store.built:
            return
        for table, config in enumerate(self._configs):
            for table_U, id_U in _chunks(table, config.num_embeddings):
                prefetched = store.prefetch(_keys(store, table_U, id_U))
                known += len(id_U) - prefetched.missing
                store.unprefetch(prefetched)
        if known < rows.stats()["rows"]:
            raise StorageError(
                f"a state dict can hold only rows that TorchRec's would hold, but tables {rows.name} have"
                f" {rows.stats()['rows'] - known} rows of ids that are not from 0 to num_embeddings - 1; give"
                " store_options with a path, where a state dict names a snapshot"
            )

    def load(self, state: "torch.Tensor | ShardedTensor | DTensor") -> None:
        """Load an entry of a state dict: the name of a snapshot, or num_embeddings rows, of which row r becomes id r.
        Rows may be sharded over ranks. Every rank makes the call.

        Raises:
            ValueError: the entry is neither, belongs to another table, or has another number of rows.
            StorageError: the snapshot cannot be loaded.
        """
        rows, config = self.rows, self._config
        state = _whole(state, rows)
        if state.dim() == 1:
            snapshot = decode(state)
            at, name = snapshot.pop("oneemb_table", (self.table, config.name))
            if (at, name) != (self.table, config.name):
                raise ValueError(
                    f"the snapshot must have table {config.name!r} as number {self.table} of its embedding, got"
                    f" {name!r} as number {at}; make the collection with the same tables in the same order"
                )
            tables, self.loads_with = self.loads_with | {self.table}, frozenset()
            if rows.holds(snapshot) or self.table != min(tables):  # one call loads all these tables
                return
            if len(tables) == rows.num_tables:
                load_named(rows, snapshot)
            else:
                load_tables(rows, snapshot, sorted(tables))
            return
        if self._is_empty:
            if len(state):
                raise ValueError(
                    f"table {config.name!r} must be loaded from a dump or a snapshot, got {len(state)} rows of a state"
                    " dict"
                )
            return
        if state.dim() != 2 or state.shape[1] != config.embedding_dim or not state.dtype.is_floating_point:
            raise ValueError(
                f"rows must be floats [rows, {config.embedding_dim}], or the name of a snapshot, got {state.dtype}"
                f" {list(state.shape)}"
            )
        if len(state) != config.num_embeddings:
            raise ValueError(
                f"table {config.name!r} must be given as many rows as its num_embeddings, {config.num_embeddings}, got"
                f" {len(state)}; make its config with num_embeddings={len(state)}, or bring in rows of some ids by"
                f" oneemb.import_rows(rows, (ids, vectors), table={self.table}) for its embedding in collection.rows"
            )
        # Forget changes of weight tensors, which these rows replace; write back changes of tensors of optimizer state.
        self.given[:] = [given for given in self.given if given.part != "weight"]
        write_back(self._of_rows)
        current = [
            given
            for table_state in self._of_rows
            for given in table_state.given
            if given.is_current(rows.store.changes)
        ]
        put_rows(rows, self.table, state)
        for given in current:
            given.keep(rows.store.changes)

    # ---- optimizer --------------------------------------------------------------------------------------------------

    def of_optimizer(self) -> dict[str, torch.Tensor]:
        """Optimizer state of rows 0 to num_embeddings - 1: {FBGEMM's name: float32 [N, D] or [N]}, and `step` if the
        optimizer counts steps. Empty if rows have a path, since snapshots hold the state. Every rank makes the call."""
        rows, row_optimizer = self.rows, self.rows.row_optimizer
        if self.is_kept or self._is_empty or row_optimizer is None:
            return {}
        dim, size = self._config.embedding_dim, self._config.num_embeddings
        found: dict[str, torch.Tensor] = {}
        if row_optimizer.state_width(dim):
            state_NZ = self._states(size, row_optimizer.initial_state(dim))
            for k, part in enumerate(state_NZ.split(widths_of_state(row_optimizer, dim), 1)):
                is_of_row = k >= len(row_optimizer.weight_state)
                found[_state_name(k)] = (part.squeeze(1) if is_of_row else part).clone()
                self._give(found[_state_name(k)], functools.partial(self._put_state, k), _state_name(k))
        if row_optimizer.counts_steps({} if rows.optimizer is None else rows.optimizer.param_groups[0]):
            found["step"] = torch.tensor(float(rows.store.step), dtype=torch.float32, device="cpu")
            self._give(found["step"], self._put_step, "step")
        return found

    @property
    def written_step(self) -> float | None:
        """Count of steps in the newest `step` tensor that a state dict holds; None = there is no such tensor."""
        tensors = [given.tensor for given in self.given if given.part == "step"]
        return next((float(tensor) for tensor in reversed(tensors) if tensor is not None), None)

    def _give(self, tensor: torch.Tensor, put: Callable[[torch.Tensor], None], part: str) -> None:
        """Record a tensor of a state dict; `put` writes it into the rows."""
        self.given.append(_Given(tensor, self.rows.store.changes, put, part))

    def _states(self, size: int, initial_Z: np.ndarray) -> torch.Tensor:
        rows, store = self.rows, self.rows.store
        own: list[tuple[np.ndarray, np.ndarray]] = []
        if store.built:
            for table_U, id_U in self._own_chunks(size):
                words_UW = read_words(store, table_U, id_U)
                own.append((id_U, state_of(store.format, words_UW)[:, : len(initial_Z)].copy()))
        of_all = rows.ranks.all_gather(f"state of table {self.name!r}", lambda: own)
        state_NZ = np.tile(initial_Z, (size, 1))
        for of_rank in of_all:
            for ids, states in of_rank:
                state_NZ[ids] = states
        return torch.from_numpy(state_NZ)

    def _put_weights(self, weight_ND: torch.Tensor) -> None:
        """Set the weights of the rows. Each rank sets the rows that it owns, without a message."""
        store = self.rows.store
        store.build()
        for table_U, id_U in self._own_chunks(len(weight_ND)):
            words_UW = encode_rows(store.format, weight_ND.detach()[torch.from_numpy(id_U)].float().cpu().numpy())
            set_rows(store, table_U, id_U, np.ascontiguousarray(words_UW[:, : store.format.state_begin]))

    def _put_state(self, k: int, part: torch.Tensor) -> None:
        """Set part number k of the optimizer state, in the form of `of_optimizer`. Every id below its length has a row
        afterwards."""
        store, dim, row_optimizer = self.rows.store, self._config.embedding_dim, self.rows.row_optimizer
        if row_optimizer is None:
            raise RuntimeError(
                f"the optimizer state of table {self.name!r} can change only if an optimizer trains its rows, but a"
                " tensor of the state was changed in place, and there is no optimizer; make it first"
            )
        widths = widths_of_state(row_optimizer, dim)
        columns = slice(sum(widths[:k]), sum(widths[: k + 1]))
        part_NZ = part.detach().reshape(len(part), -1).float().cpu().numpy()
        store.build()
        for table_U, id_U in self._own_chunks(len(part_NZ)):
            words_UW = read_words(store, table_U, id_U).copy()
            state_of(store.format, words_UW)[:, columns] = part_NZ[id_U]
            set_rows(store, table_U, id_U, words_UW)

    def _put_step(self, step: torch.Tensor) -> None:
        self.rows.store.step = int(step)
        self.rows.store.changes += 1

    def _own_chunks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        plan = self.rows.store.plan
        for table_U, id_U in _chunks(self.table, size):
            own_U = owner_of(table_U, id_U, plan.owners) == plan.owner
            if own_U.any():
                yield table_U[own_U], id_U[own_U]


def _whole(state: "torch.Tensor | ShardedTensor | DTensor", rows: MultiTableEmbedding) -> torch.Tensor:
    """Whole tensor, assembled from the ranks' shards."""
    if hasattr(state, "full_tensor"):
        return state.full_tensor()
    if not isinstance(state, ShardedTensor):
        return state
    own = [(shard.metadata.shard_offsets, shard.tensor.detach().cpu()) for shard in state.local_shards()]
    of_all = rows.ranks.all_gather(f"load rows of {rows.name}", lambda: own)
    shards = [shard for of_rank in of_all for shard in of_rank]
    size = list(state.size())
    if sum(part.numel() for _, part in shards) != math.prod(size):
        raise ValueError(
            f"a ShardedTensor must have its {math.prod(size)} weights on the ranks of {rows.name}, got"
            f" {sum(part.numel() for _, part in shards)}; load a checkpoint of another number of ranks with"
            " torch.distributed.checkpoint"
        )
    whole = torch.empty(size, dtype=state.dtype, device="cpu")
    for offsets, part in shards:
        whole[tuple(slice(at, at + length) for at, length in zip(offsets, part.shape, strict=True))] = part
    return whole


def _state_name(k: int) -> str:
    return ["momentum1", "exp_avg_sq"][k] if k < 2 else f"state{k + 1}"


def _chunks(table: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (tables, ids) of rows 0 to `size` - 1, some at a time."""
    for begin in range(0, size, _CHUNK):
        id_U = np.arange(begin, min(begin + _CHUNK, size))
        yield np.full(len(id_U), table, np.int32), id_U


def _keys(store: EmbeddingStore, table_U: np.ndarray, id_U: np.ndarray) -> Any:
    return store.backend.distinct_keys(store.backend.put(table_U), store.backend.put(id_U))


def read_words(store: EmbeddingStore, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
    """Words of the rows of distinct keys, in host memory: float32 [U, W]."""
    return store.backend.tensor(store.read(_keys(store, table_U, id_U))[0]).cpu().numpy()


def widths_of_state(row_optimizer: RowOptimizer, dim: int) -> list[int]:
    """Number of values in each part of the optimizer state of a row."""
    return [dim] * len(row_optimizer.weight_state) + [1] * len(row_optimizer.row_state)


@torch.inference_mode(False)  # Inference tensors have no version, which shows changes in place.
def _empty_rows(rows: MultiTableEmbedding, config: TableConfig) -> torch.Tensor:
    size: list[Any] = [config.num_embeddings, config.embedding_dim]
    try:
        return torch.empty(size, dtype=rows.dtype, device=rows.store.backend.device)
    except RuntimeError as error:  # torch raises it when memory is short
        raise StorageError(
            f"a state dict with {size[0]:,} rows of table {config.name!r} must fit in memory, there is no memory for"
            " it; give store_options with a path, where a state dict names a snapshot"
        ) from error


@torch.inference_mode(False)
def dense_rows(
    rows: MultiTableEmbedding, table: int, config: TableConfig, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows 0 to num_embeddings - 1 of a table: [N, D]."""
    weights = _empty_rows(rows, config) if out is None else out
    for begin in range(0, len(weights), _CHUNK):
        ids = torch.arange(begin, min(begin + _CHUNK, len(weights)), device=weights.device)
        weights[begin : begin + _CHUNK] = rows.read(ids, torch.full_like(ids, table))
    return weights


def put_rows(rows: MultiTableEmbedding, table: int, weights: torch.Tensor) -> None:
    """Set the row of each id r to row r of `weights`. A tensor made by `to_be_handed` holds no rows afterwards."""
    import_rows(rows, hand_over(weights), table=table, allow_nonfinite=True)
