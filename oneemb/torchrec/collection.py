"""Base of both collections: tables by name, and the embeddings that hold their rows.

Tables of one width, dtype and pooling in one store are one embedding underneath (`rows`), so that their ids are found,
read and updated by one loop each. Each table has a parameter of its own, [0, D], that stands for its rows.
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
from oneemb.torchrec.configs import Column, check_configs, columns_of, dtype_of, first_rows, policy_of, pooling_of
from oneemb.torchrec.jagged import is_call_on_values
from oneemb.torchrec.ops import ON_META, LooksUpJagged, know
from oneemb.torchrec.optimizers import MakeOptimizer, options_now, row_stepper, same_optimizer
from oneemb.torchrec.tables import Table, TableRows, fill, kind_of_steps
from oneemb.training.eager import Optimizer


@dataclasses.dataclass(frozen=True)
class OnRanks:
    """Options that a sharder gives to tables whose rows ranks own together."""

    process_group: "torch.distributed.ProcessGroup | None"
    """None = there is one rank, which exchanges nothing."""
    gradients: Literal["mean", "sum"]
    comm_dtype: torch.dtype
    steppers: Sequence[MakeOptimizer]
    """Functions that make the optimizer of each table."""
    begin: Sequence[torch.Tensor | None]
    """First rows of each table; None = none."""
    tables: Sequence[TableRows] | None = None
    """Options of each table that are not in its config; None = no table has any. State dicts hold no such rows without
    a path."""


class Group(NamedTuple):
    """Tables that are one embedding."""

    rows: MultiTableEmbedding
    tables: tuple[int, ...]
    """Numbers of their configs."""
    columns: tuple[int, ...]
    """Numbers of their embeddings in the output."""
    tables_of_columns: tuple[int, ...]
    """Table of `rows` for each column."""
    pooling: str


class Lookups(NamedTuple):
    """Lookups of one call of a collection: one of each embedding."""

    groups: Sequence[Group]
    arguments: Sequence[dict[str, Any]]
    """Arguments of each group's lookup, as `MultiTableEmbedding.forward` takes them."""
    output: Callable[[Sequence[torch.Tensor]], Any]
    """Function of the rows of each group that returns the result of the call."""

    def look_up(self) -> Any:
        """Make the lookups and return the result of the call."""
        its = zip(self.groups, self.arguments, strict=True)
        return self.output([group.rows(**arguments) for group, arguments in its])


class Collection(torch.nn.Module):
    """Base of both collections.

    Args:
        tables: TorchRec's configs.
        device: where lookups run; None = torch's default device. On meta there are no rows until the module is moved.
        store_options, seed: as of `EmbeddingBagCollection`.
        num_threads: threads that run the kernels; None = the cores there are.
        on_ranks: of tables whose rows ranks own together; None = this process has them all.
        pools: whether bags are pooled.
        named: the attribute that has the tables by name.
    """

    # Attributes that TorchScript need not know.
    __jit_ignored_attributes__ = ["rows", "_regrouping", "_tables"]
    __jit_unused_properties__ = ["states", "device", "process_group"]

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        device: torch.device | str | None,
        store_options: StoreOptions | Mapping[str, StoreOptions] | None,
        seed: int,
        num_threads: int | None,
        on_ranks: OnRanks | None,
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
        """The attribute that has the tables by name."""
        self.rows = torch.nn.ModuleList()
        """The embeddings that hold the rows: `rows[0].stats()`, `rows[0].save_snapshot(name)` and the like."""
        self._groups: list[Group] = []
        self._in_backward: list[Optimizer] = []
        """Optimizers that step rows in the backward pass, one for each embedding whose tables are stepped there."""
        self._regrouping = threading.RLock()
        self._introduce()
        if on_ranks is not None:
            for table, make in zip(self._tables, on_ranks.steppers, strict=True):
                table.parameter.is_stepped_by(make([table.parameter.weight]))
        if on_ranks is not None and self._device.type != "meta":
            its = zip(self._tables, on_ranks.begin, strict=True)
            self._make_rows([table.rows_drawn_together() if rows is None else rows for table, rows in its])
            self._on_ranks = dataclasses.replace(on_ranks, begin=())  # The rows have them now.
        elif self._device.type != "meta":
            self._make_rows(self._first_rows())

    # ---- rows -------------------------------------------------------------------------------------------------------

    def _tables_of(self, given: StoreOptions | Mapping[str, StoreOptions] | None) -> list[Table]:
        names = [config.name for config in self.configs]
        unknown = sorted(set(given) - set(names)) if isinstance(given, Mapping) else []
        if unknown:
            raise ValueError(f"store_options are by table, of {names}; got some for {unknown}")
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

    def _first_rows(self) -> list[torch.Tensor | None]:
        """First rows of each table, as TorchRec draws them; None = none."""
        begin: list[torch.Tensor | None] = []
        for table in self._tables:
            weights = None if table.starts_empty else first_rows(table.config)
            begin.append(weights if weights is None or self._pools else fill(table.config, weights))
        if self._pools:  # TorchRec's module of bags makes all tables before it fills them.
            for table, weights in zip(self._tables, begin, strict=True):
                if weights is not None:
                    fill(table.config, weights)
        return begin

    def _make_rows(self, begin: Sequence[torch.Tensor | None]) -> None:
        """Make the embeddings, with the first rows of each table; None = none."""
        alike: dict[tuple[object, ...], list[int]] = {}
        self._in_backward.clear()
        for t, table in enumerate(self._tables):
            table.steppers = in_backward_optimizers(table.parameter.weight)
            alike.setdefault(table.kind(), []).append(t)
        folders = set[str]()
        self._groups = [self._make_group(tuple(its), folders) for its in alike.values()]
        self.rows = torch.nn.ModuleList(group.rows for group in self._groups)
        self.rows.train(self.training)
        self._put_rows(begin)

    def _put_rows(self, begin: Sequence[torch.Tensor | None]) -> None:
        for group in self._groups:
            for place, t in enumerate(group.tables):
                if (weights := begin[t]) is not None:
                    put_rows(group.rows, place, weights)

    def _make_group(self, tables: tuple[int, ...], folders: set[str]) -> Group:
        its = [self._tables[t] for t in tables]
        first, configs = its[0], [table.config for table in its]
        paths, words = () if first.options is None else first.options.persistent_path, first.words()
        while paths and os.path.join(paths[0], "-".join(words)) in folders:
            words.append("other")
        its_folders = [os.path.join(path, "-".join(words)) for path in paths]
        folders.update(its_folders[:1])
        is_kept = bool(paths)
        policies = [policy for config in configs if (policy := policy_of(config)) is not None]  # of all or of none
        ranks, of_ranks = self._on_ranks, dict[str, Any]()
        if ranks is not None:
            of_ranks = {"process_group": ranks.process_group, "gradients_of_ranks": ranks.gradients,
                        "comm_dtype": ranks.comm_dtype}  # fmt: skip
        rows = MultiTableEmbedding(
            ", ".join(config.name for config in configs), first.config.embedding_dim, dtype_of(first.config),
            torch.int64, [make_table(table.initializer()) for table in its], first.store_at(its_folders),
            seed=(self.seed + zlib.crc32(first.config.name.encode())) % 2**64,  # another one for each embedding
            num_threads=self._num_threads,
            policy=[table.extra.policy for table in its if table.extra is not None] or policies or None,
            **of_ranks,
        )  # fmt: skip
        self._give_weights(rows, its, is_kept=is_kept)
        if self._device.type != "cpu":
            rows.to(self._device)
        columns = tuple(c for c, column in enumerate(self._columns) if column.table in tables)
        of_columns = tuple(tables.index(self._columns[c].table) for c in columns)
        of_rows: list[TableState] = []
        for place, (t, table) in enumerate(zip(tables, its, strict=True)):
            is_empty = table.extra is not None
            table.state = TableState(rows, place, configs, of_rows, is_kept=is_kept, is_empty=is_empty)
            table.parameter.serves(functools.partial(_state_of, weakref.ref(self), t))
        return Group(rows, tables, columns, of_columns, first.pooling)

    def _give_weights(self, rows: MultiTableEmbedding, tables: Sequence[Table], *, is_kept: bool) -> None:
        """Make the tables' parameters stand for the rows. If their optimizers step in the backward pass, a parameter of
        its own does, so that the rows of all tables are stepped as one."""
        weights = [table.parameter.weight for table in tables]
        if not tables[0].steppers:
            stand_for_rows(rows, weights, is_kept=is_kept)
            return
        optimizers = [table.steppers[0] for table in tables]
        steppers = [row_stepper(optimizer) for optimizer in optimizers]
        one = torch.nn.Parameter(torch.empty_like(weights[0]))

        def options() -> list[Options | None]:
            """Options of each table at this step, from its own optimizer."""
            return [
                options_now(its, stepper) if weight.requires_grad else None
                for weight, its, stepper in zip(weights, optimizers, steppers, strict=True)
            ]

        optimizer = same_optimizer(steppers[0], one)
        self._in_backward.append(step_in_backward(rows, one, optimizer, options, is_kept=is_kept))

    def ready(self) -> list[Group]:
        """Embeddings, grouped by the tables' current optimizers."""
        if self._device.type == "meta":
            raise RuntimeError(ON_META)
        self.regroup()
        for table in self._tables:
            weight = table.parameter.weight
            if len(weight) or version_of(weight) != getattr(weight, "stepped_version", 0):
                raise RuntimeError(
                    f"the weight of table {table.config.name!r} was written to, by an initializer or an average of"
                    " parameters; it stands for the rows and holds none. Give rows to load_state_dict(), average them"
                    " by oneemb.AveragedEmbedding"
                )
        self._bring_in()
        let_go(state for state in self.states if state is not None)
        for group in self._groups:
            its = [self._tables[t] for t in group.tables]
            if its[0].steppers:
                trained = any(table.parameter.weight.requires_grad for table in its)
                group.rows.weights[0].requires_grad_(trained)
        return self._groups

    def regroup(self) -> None:
        """Group tables by their current optimizers, if these have changed."""
        with self._regrouping:  # Threads may take state dicts while others train.
            if any(table.is_regrouped for table in self._tables):
                if self._on_ranks is not None:
                    raise RuntimeError("apply_optimizer_in_backward comes before the module is sharded")
                self._make_rows_anew()

    def _bring_in(self) -> None:
        """Bring tensors of state dicts that were written to into the rows."""
        write_back(state for state in self.states if state is not None)

    def rows_to_shard(self) -> list[torch.Tensor | None]:
        """Rows of each table for the sharded one in its place; None = it begins with none. RuntimeError if rows are in
        a path of the user's, where snapshots are to be used."""
        self._bring_in()
        for group in self._groups:
            its = [self._tables[t] for t in group.tables]
            if group.rows.stats()["rows"] and its[0].starts_empty:
                raise RuntimeError(
                    f"tables {group.rows.name} have rows that lookups began; make the collection on the meta device,"
                    " shard it, and load a snapshot of these rows"
                )
            for table in its:
                if table.state is not None and not table.starts_empty:
                    table.state.check_in_range()
            if group.rows.stats()["step"] and its[0].steppers:
                warnings.warn(
                    f"tables {group.rows.name} were trained in the backward pass before they are sharded: their weights"
                    " go along, their optimizer's state does not",
                    stacklevel=2,
                )
        return self._dense_rows()

    def _dense_rows(self) -> list[torch.Tensor | None]:
        """Rows of each table that began with some; None = it began empty."""
        begin: list[torch.Tensor | None] = [None] * len(self.configs)
        for group in self._groups:
            for place, t in enumerate(group.tables):
                if not self._tables[t].starts_empty:
                    begin[t] = dense_rows(group.rows, place, self.configs[t])
        return begin

    def _make_rows_anew(self) -> None:
        """Make the embeddings again, grouped by the tables' current optimizers."""
        for table in self._tables:  # One that rows cannot follow is refused with all rows there.
            kind_of_steps(in_backward_optimizers(table.parameter.weight))
        self._bring_in()
        for group in self._groups:
            stats = group.rows.stats()
            if stats["step"] or stats["rows"] and self._tables[group.tables[0]].starts_empty:
                raise RuntimeError(
                    f"apply_optimizer_in_backward comes before the first lookup; tables {group.rows.name} have rows"
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
        self._introduce()
        was, self._device = self._device, device
        if was.type == "meta" and device.type != "meta":
            self._make_rows(self._first_rows())
        return moved

    def empty_copy(self) -> Self:
        """A collection of the same tables on the meta device, without rows."""
        raise NotImplementedError

    def __deepcopy__(self, memo: object) -> Self:
        if self._on_ranks is not None or any(table.options is not None for table in self._tables):
            names = ", ".join(repr(config.name) for config in self.configs)
            raise TypeError(
                f"the collection of tables {names} cannot be copied: its rows live in a path, or with other ranks, and"
                " a copy needs a path of its own; make another collection, and have it load a state dict of this one"
            )
        self._bring_in()
        copied = self.empty_copy()
        for own, its in zip(self.parameters(), copied.parameters(), strict=True):
            its.requires_grad_(own.requires_grad)
        if self._device.type != "meta":
            copied.take_rows(self._device, self._groups)
        return copied.train(self.training)

    def __reduce_ex__(self, protocol: object) -> Never:
        names = ", ".join(repr(config.name) for config in self.configs)
        raise TypeError(
            f"the collection of tables {names} cannot be pickled, by torch.save of a model or for another process: save"
            " its state_dict(), and make the collection anew where that is loaded"
        )

    def take_rows(self, device: torch.device, groups: Sequence[Group]) -> None:
        """Leave the meta device with copies of the rows of another collection of the same tables; TypeError if its
        tables are grouped differently."""
        torch.nn.Module._apply(self, lambda tensor: torch.empty_like(tensor, device=device))
        self._device = device
        self._introduce()
        self._make_rows([None] * len(self.configs))
        if [group.tables for group in self._groups] != [group.tables for group in groups]:
            raise TypeError(
                "tables that apply_optimizer_in_backward steps by optimizers of different classes cannot be copied"
                " together; copy the collection before that"
            )
        for own, theirs in zip(self._groups, groups, strict=True):
            copy_rows(theirs.rows.store, own.rows.store, with_state=True)

    @torch.jit.unused
    def _is_called(self, features: KeyedJaggedTensor) -> bool:
        """Whether this is a call on values: not while a model is traced or exported, nor on meta."""
        return is_call_on_values(features) and self._device.type != "meta"

    def _introduce(self) -> None:
        for table in self._tables:
            know(table.parameter.weight, cast(LooksUpJagged, self))

    def close(self) -> None:
        """Free memory, files and the locks on the paths. Rows that no snapshot holds are gone."""
        for group in self._groups:
            group.rows.close()

    # ---- interface of TorchRec --------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device of lookups."""
        return self._device

    @property
    def process_group(self) -> "torch.distributed.ProcessGroup | None":
        """Ranks that own the rows together; None = this process has them all."""
        return None if self._on_ranks is None else self._on_ranks.process_group

    def reset_parameters(self) -> None:
        """Reset all tables to their state after construction."""
        begin = self._first_rows()
        for state in self.states:
            if state is not None:
                state.given.clear()
        for group in self._groups:
            group.rows.clear()
        self._put_rows(begin)


def _state_of(reference: "weakref.ref[Collection]", table: int) -> TableState:
    """Current state of a table of a collection; state dicts need it before the first lookup too."""
    collection = reference()
    if collection is None:
        raise RuntimeError("the collection of this table is gone, and its rows with it")
    collection.regroup()
    state = collection.states[table]
    assert state is not None
    return state
