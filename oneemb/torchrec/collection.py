"""Base of both collections: tables by name, and the embeddings that hold their rows.

Tables of equal width, dtype and pooling in one store share one `MultiTableEmbedding` (an entry of `Collection.rows`),
so that one loop finds, reads and updates the rows of all of them. Each table has a parameter [0, D] that stands for its
rows.
"""

import dataclasses
import functools
import os
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Never, Self, cast

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oneemb.adapters.table_state import TableState, dense_rows, let_go, put_rows, write_back
from oneemb.adapters.tables import TableParameter, holder_of, in_backward_optimizers, step_in_backward
from oneemb.embeddings.embedding import MultiTableEmbedding
from oneemb.embeddings.internals import stand_for_rows
from oneemb.graph.row_optimizers import Group as Options
from oneemb.graph.tape import version_of
from oneemb.options import StoreOptions, make_table
from oneemb.storage.store_rows import copy_rows
from oneemb.torchrec.configs import Column, check_configs, columns_of, drawn_weights, dtype_of, policy_of, pooling_of
from oneemb.torchrec.jagged import is_call_on_values
from oneemb.torchrec.ops import ON_META, LooksUpJagged, register_collection
from oneemb.torchrec.optimizers import MakeOptimizer, copy_optimizer_for, options_now, row_stepper
from oneemb.torchrec.tables import Table, TableRows, fill, kind_of_steps
from oneemb.training.eager import Optimizer


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """Options that a sharder gives to a collection whose rows are spread over ranks."""

    process_group: "torch.distributed.ProcessGroup | None"
    """Ranks that share the rows; None = this process has all rows and exchanges nothing."""
    gradients: Literal["mean", "sum"]
    comm_dtype: torch.dtype
    steppers: Sequence[MakeOptimizer]
    """For each table, the function that makes its optimizer."""
    begin: Sequence[torch.Tensor | None]
    """For each table, its first rows [rows, D]; None = the table starts empty."""
    tables: Sequence[TableRows] | None = None
    """For each table, options that its config lacks; None = no table has such options. State dicts leave out the rows
    of such tables, unless the store has a path."""


class Group(NamedTuple):
    """Tables whose rows one embedding holds."""

    rows: MultiTableEmbedding
    tables: tuple[int, ...]
    """Index of each table in `Collection.configs`."""
    columns: tuple[int, ...]
    """Indices of the tables' features in `Collection._columns`, the order of the output."""
    tables_of_columns: tuple[int, ...]
    """For each entry of `columns`, the number of its table in `rows`."""
    pooling: str


class Lookups(NamedTuple):
    """Lookups of one call of a collection: one lookup for each group of tables."""

    groups: Sequence[Group]
    arguments: Sequence[dict[str, Any]]
    """Keyword arguments of `MultiTableEmbedding.forward`, for each group."""
    output: Callable[[Sequence[torch.Tensor]], Any]
    """Function that makes the result of the call from the rows of each group."""

    def look_up(self) -> Any:
        """Make the lookups and return the result of the call."""
        pairs = zip(self.groups, self.arguments, strict=True)
        return self.output([group.rows(**arguments) for group, arguments in pairs])


class Collection(torch.nn.Module):
    """Base of `EmbeddingBagCollection` and `EmbeddingCollection`.

    Args:
        tables: TorchRec's configs.
        device: where lookups run; None = torch's default device. On meta there are no rows until the module is moved.
        store_options, seed: same as for `EmbeddingBagCollection`.
        num_threads: threads that run the kernels; None = one for each core.
        on_ranks: options for rows that are spread over ranks; None = this process has all rows.
        pools: whether lookups pool bags.
        named: name of the attribute that holds the tables by name.
    """

    # Attributes that TorchScript leaves out.
    __jit_ignored_attributes__ = ["rows", "_regrouping", "_tables"]
    __jit_unused_properties__ = ["states", "device", "process_group"]

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        device: torch.device | str | None,
        store_options: StoreOptions | Mapping[str, StoreOptions] | None,
        seed: int,
        num_threads: int | None,
        on_ranks: ShardOptions | None,
        *,
        pools: bool,
        named: str,
    ):
        super().__init__()
        check_configs(tables, EmbeddingBagConfig if pools else EmbeddingConfig)
        self.configs = list(tables)
        self._columns: list[Column] = columns_of(tables)
        self._feature_names: list[str] = [column.feature for column in self._columns]
        self._embedding_names: list[str] = [column.name for column in self._columns]
        self._pools = pools
        self._device = torch.empty(0, device=device, dtype=torch.float32).device
        self.seed, self._num_threads = seed, num_threads
        self.store_options = store_options
        self._on_ranks = on_ranks
        self._tables = self._tables_of(store_options)
        setattr(self, named, holder_of({table.config.name: table.parameter for table in self._tables}))
        self.holders = named
        """Name of the attribute that holds the tables by name."""
        self.rows = torch.nn.ModuleList()
        """Embeddings that hold the rows, for calls such as `rows[0].stats()` and `rows[0].save_snapshot(name)`."""
        self._groups: list[Group] = []
        self._in_backward: list[Optimizer] = []
        """Optimizers that step rows in the backward pass: one for each embedding whose tables have such an
        optimizer."""
        self._regrouping = threading.RLock()
        self._register_weights()
        if on_ranks is not None:
            for table, make in zip(self._tables, on_ranks.steppers, strict=True):
                table.parameter.is_stepped_by(make([table.parameter.weight]))
        if on_ranks is not None and self._device.type != "meta":
            pairs = zip(self._tables, on_ranks.begin, strict=True)
            self._make_rows([table.rows_drawn_together() if rows is None else rows for table, rows in pairs])
            self._on_ranks = dataclasses.replace(on_ranks, begin=())  # The embeddings hold these rows now.
        elif self._device.type != "meta":
            self._make_rows(self._initial_weights())

    # ---- rows -------------------------------------------------------------------------------------------------------

    def _tables_of(self, given: StoreOptions | Mapping[str, StoreOptions] | None) -> list[Table]:
        names = [config.name for config in self.configs]
        unknown = sorted(set(given) - set(names)) if isinstance(given, Mapping) else []
        if unknown:
            raise ValueError(f"store_options must have names of tables as keys, {names}, got {unknown}")
        ranks, tables = self._on_ranks, []
        for t, config in enumerate(self.configs):
            options = given.get(config.name) if isinstance(given, Mapping) else given
            extra = None if ranks is None or ranks.tables is None else ranks.tables[t]
            parameter = TableParameter(config, dtype_of(config), self._device)
            tables.append(Table(config, pooling_of(config) if self._pools else "none", options, extra, parameter))
        return tables

    @property
    def states(self) -> list[TableState | None]:
        """State of each table for state dicts; None = the table has no rows yet."""
        return [table.state for table in self._tables]

    def _initial_weights(self) -> list[torch.Tensor | None]:
        """Initial weights of all rows of each table, from the random numbers that TorchRec would draw; None = the table
        starts empty, and each row is initialized at its first lookup."""
        begin: list[torch.Tensor | None] = []
        for table in self._tables:
            weights = None if table.starts_empty else drawn_weights(table.config)
            begin.append(weights if weights is None or self._pools else fill(table.config, weights))
        # EmbeddingCollection allocates and fills one table after another; EmbeddingBagCollection allocates all tables,
        # then fills them. Both steps draw random numbers, so only the same order draws the same ones.
        if self._pools:
            for table, weights in zip(self._tables, begin, strict=True):
                if weights is not None:
                    fill(table.config, weights)
        return begin

    def _make_rows(self, begin: Sequence[torch.Tensor | None]) -> None:
        """Make the embeddings. `begin` has the initial weights of all rows of each table; None = the table starts
        empty."""
        alike: dict[tuple[object, ...], list[int]] = {}
        self._in_backward.clear()
        for t, table in enumerate(self._tables):
            table.steppers = in_backward_optimizers(table.parameter.weight)
            alike.setdefault(table.kind(), []).append(t)
        folders = set[str]()
        self._groups = [self._make_group(tuple(numbers), folders) for numbers in alike.values()]
        self.rows = torch.nn.ModuleList(group.rows for group in self._groups)
        self.rows.train(self.training)
        self._put_rows(begin)

    def _put_rows(self, begin: Sequence[torch.Tensor | None]) -> None:
        for group in self._groups:
            for place, t in enumerate(group.tables):
                if (weights := begin[t]) is not None:
                    put_rows(group.rows, place, weights)

    def _make_group(self, tables: tuple[int, ...], folders: set[str]) -> Group:
        members = [self._tables[t] for t in tables]
        first, configs = members[0], [table.config for table in members]
        paths, words = () if first.options is None else first.options.persistent_path, first.words()
        while paths and os.path.join(paths[0], "-".join(words)) in folders:
            words.append("other")
        own_folders = [os.path.join(path, "-".join(words)) for path in paths]
        folders.update(own_folders[:1])
        is_kept = bool(paths)
        policies = [policy for config in configs if (policy := policy_of(config)) is not None]  # all have one, or none
        ranks, of_ranks = self._on_ranks, dict[str, Any]()
        if ranks is not None:
            of_ranks = {"process_group": ranks.process_group, "gradients_of_ranks": ranks.gradients,
                        "comm_dtype": ranks.comm_dtype}  # fmt: skip
        rows = MultiTableEmbedding(
            ", ".join(config.name for config in configs), first.config.embedding_dim, dtype_of(first.config),
            torch.int64, [make_table(table.initializer()) for table in members], first.store_at(own_folders),
            seed=(self.seed + zlib.crc32(first.config.name.encode())) % 2**64,  # embeddings must not draw equal rows
            num_threads=self._num_threads,
            policy=[table.extra.policy for table in members if table.extra is not None] or policies or None,
            **of_ranks,
        )  # fmt: skip
        self._give_weights(rows, members, is_kept=is_kept)
        if self._device.type != "cpu":
            rows.to(self._device)
        columns = tuple(c for c, column in enumerate(self._columns) if column.table in tables)
        of_columns = tuple(tables.index(self._columns[c].table) for c in columns)
        of_rows: list[TableState] = []
        for place, (t, table) in enumerate(zip(tables, members, strict=True)):
            is_empty = table.extra is not None
            table.state = TableState(rows, place, configs, of_rows, is_kept=is_kept, is_empty=is_empty)
            table.parameter.serves(functools.partial(_state_of, weakref.ref(self), t))
        return Group(rows, tables, columns, of_columns, first.pooling)

    def _give_weights(self, rows: MultiTableEmbedding, tables: Sequence[Table], *, is_kept: bool) -> None:
        """Make the tables' parameters stand for the rows. If the tables' optimizers step in the backward pass, one new
        parameter stands for the rows of all tables instead, so that one step updates all of them."""
        weights = [table.parameter.weight for table in tables]
        if not tables[0].steppers:
            stand_for_rows(rows, weights, is_kept=is_kept)
            return
        optimizers = [table.steppers[0] for table in tables]
        steppers = [row_stepper(optimizer) for optimizer in optimizers]
        one = torch.nn.Parameter(torch.empty_like(weights[0]))

        def options() -> list[Options | None]:
            """Current options of each table's optimizer; None = the table is not trained."""
            return [
                options_now(optimizer, stepper) if weight.requires_grad else None
                for weight, optimizer, stepper in zip(weights, optimizers, steppers, strict=True)
            ]

        optimizer = copy_optimizer_for(one, steppers[0])
        self._in_backward.append(step_in_backward(rows, one, optimizer, options, is_kept=is_kept))

    def ready(self) -> list[Group]:
        """Groups of tables, ready for a lookup: regrouped if optimizers have changed, with tensors of state dicts
        written back. RuntimeError on the meta device, or if a table's parameter was written to."""
        if self._device.type == "meta":
            raise RuntimeError(ON_META)
        self.regroup()
        for table in self._tables:
            weight = table.parameter.weight
            if len(weight) or version_of(weight) != getattr(weight, "stepped_version", 0):
                raise RuntimeError(
                    f"the weight of table {table.config.name!r} must not be written to, since it stands for the rows"
                    " and holds none, but an initializer or an average of parameters was written to it; give rows to"
                    " load_state_dict(), average them by oneemb.AveragedEmbedding"
                )
        self._write_back()
        let_go(state for state in self.states if state is not None)
        for group in self._groups:
            members = [self._tables[t] for t in group.tables]
            if members[0].steppers:
                trained = any(table.parameter.weight.requires_grad for table in members)
                group.rows.weights[0].requires_grad_(trained)
        return self._groups

    def regroup(self) -> None:
        """Group the tables anew if their optimizers have changed."""
        with self._regrouping:  # Threads may take state dicts while others train.
            if any(table.optimizers_changed for table in self._tables):
                if self._on_ranks is not None:
                    raise RuntimeError("apply_optimizer_in_backward must be called before the module is sharded")
                self._make_rows_anew()

    def _write_back(self) -> None:
        """Write tensors of state dicts that the user has changed into the rows."""
        write_back(state for state in self.states if state is not None)

    def rows_to_shard(self) -> list[torch.Tensor | None]:
        """Rows of each table, for the sharded collection that replaces this one; None = the table starts empty.
        RuntimeError if a table that starts empty has rows, which lookups have initialized: these rows must be loaded
        from a snapshot."""
        self._write_back()
        for group in self._groups:
            members = [self._tables[t] for t in group.tables]
            if group.rows.stats()["rows"] and members[0].starts_empty:
                raise RuntimeError(
                    f"tables {group.rows.name} must have no rows before they are sharded, but lookups have initialized"
                    " some; make the collection on the meta device, shard it, and load a snapshot of these rows"
                )
            for table in members:
                if table.state is not None and not table.starts_empty:
                    table.state.check_in_range()
            if group.rows.stats()["step"] and members[0].steppers:
                warnings.warn(
                    f"tables {group.rows.name} were trained in the backward pass before they are sharded; the sharded"
                    " tables get their weights, but not their optimizer's state",
                    stacklevel=2,
                )
        return self._dense_rows()

    def _dense_rows(self) -> list[torch.Tensor | None]:
        """Rows of each table; None = the table started empty."""
        begin: list[torch.Tensor | None] = [None] * len(self.configs)
        for group in self._groups:
            for place, t in enumerate(group.tables):
                if not self._tables[t].starts_empty:
                    begin[t] = dense_rows(group.rows, place, self.configs[t])
        return begin

    def _make_rows_anew(self) -> None:
        """Make the embeddings again, grouped by the tables' current optimizers."""
        for table in self._tables:  # Refuse an unsupported optimizer before any embedding is closed.
            kind_of_steps(in_backward_optimizers(table.parameter.weight))
        self._write_back()
        for group in self._groups:
            stats = group.rows.stats()
            if stats["step"] or stats["rows"] and self._tables[group.tables[0]].starts_empty:
                raise RuntimeError(
                    f"apply_optimizer_in_backward must be called before the first lookup, but tables {group.rows.name}"
                    " have rows"
                )
        begin = self._dense_rows()
        for group in self._groups:
            group.rows.close()
        self._make_rows(begin)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        moved: Self = super()._apply(fn, recurse)
        device = self._tables[0].parameter.weight.device if self._tables else self._device
        for group in self._groups:
            first, weights = self._tables[group.tables[0]], [self._tables[t].parameter.weight for t in group.tables]
            if first.steppers:
                group.rows.weights[0].data = group.rows.weights[0].data.to(device)
            elif any(one is not other for one, other in zip(weights, group.rows.weights, strict=True)):
                stand_for_rows(group.rows, weights, is_kept=first.options is not None)
        self._register_weights()
        was, self._device = self._device, device
        if was.type == "meta" and device.type != "meta":
            self._make_rows(self._initial_weights())
        return moved

    def empty_copy(self) -> Self:
        """Collection of the same tables on the meta device, without rows."""
        raise NotImplementedError

    def __deepcopy__(self, memo: object) -> Self:
        if self._on_ranks is not None or any(table.options is not None for table in self._tables):
            names = ", ".join(repr(config.name) for config in self.configs)
            raise TypeError(
                f"the collection of tables {names} cannot be copied, since its rows live in a path, or on several"
                " ranks, and a copy needs a path of its own; make another collection, and load a state dict of this"
                " one into it"
            )
        self._write_back()
        copied = self.empty_copy()
        for own, made in zip(self.parameters(), copied.parameters(), strict=True):
            made.requires_grad_(own.requires_grad)
        if self._device.type != "meta":
            copied.take_rows(self._device, self._groups)
        return copied.train(self.training)

    def __reduce_ex__(self, protocol: object) -> Never:
        names = ", ".join(repr(config.name) for config in self.configs)
        raise TypeError(
            f"the collection of tables {names} cannot be pickled, by torch.save of a model or for another process; save"
            " its state_dict(), and load that into a new collection"
        )

    def take_rows(self, device: torch.device, groups: Sequence[Group]) -> None:
        """Move this collection from the meta device to `device`, with copies of the rows of `groups`, which belong to a
        collection of the same tables. TypeError if that collection groups its tables in another way."""
        torch.nn.Module._apply(self, lambda tensor: torch.empty_like(tensor, device=device))
        self._device = device
        self._register_weights()
        self._make_rows([None] * len(self.configs))
        if [group.tables for group in self._groups] != [group.tables for group in groups]:
            raise TypeError(
                "tables that are copied together must be stepped in the backward pass by optimizers of one class, got"
                " several classes; copy the collection before apply_optimizer_in_backward"
            )
        for own, theirs in zip(self._groups, groups, strict=True):
            copy_rows(theirs.rows.store, own.rows.store, with_state=True)

    @torch.jit.unused
    def _is_called(self, features: KeyedJaggedTensor) -> bool:
        """Whether the call has values: False while a model is traced or exported, and on the meta device."""
        return is_call_on_values(features) and self._device.type != "meta"

    def _register_weights(self) -> None:
        for table in self._tables:
            register_collection(table.parameter.weight, cast(LooksUpJagged, self))

    def close(self) -> None:
        """Free memory and files, and release the locks on the paths. Rows that are in no snapshot are lost."""
        for group in self._groups:
            group.rows.close()

    # ---- interface of TorchRec --------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device on which lookups run."""
        return self._device

    @property
    def process_group(self) -> "torch.distributed.ProcessGroup | None":
        """Ranks that share the rows; None = this process has all rows."""
        return None if self._on_ranks is None else self._on_ranks.process_group

    def reset_parameters(self) -> None:
        """Give all tables the rows that they had after construction."""
        begin = self._initial_weights()
        for state in self.states:
            if state is not None:
                state.given.clear()
        for group in self._groups:
            group.rows.clear()
        self._put_rows(begin)


def _state_of(reference: "weakref.ref[Collection]", table: int) -> TableState:
    """Current state of table number `table` of a collection. State dicts call it, also before the first lookup."""
    collection = reference()
    if collection is None:
        raise RuntimeError(
            "the collection of this table is gone, and its rows with it; keep the collection as long as its state"
            " dicts are used"
        )
    collection.regroup()
    state = collection.states[table]
    assert state is not None
    return state
