"""Base of both collections: tables by name, and the embeddings that hold their rows.

Tables of one width, dtype and pooling in one store are one embedding underneath (`rows`), so that their ids are found,
read and updated by one loop each. Each table has a parameter of its own, [0, D], that stands for its rows.
"""

import dataclasses
import functools
import os
import shutil
import tempfile
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any, Literal, NamedTuple, Never, Self, cast

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oneemb.embeddings.embedding import MultiTableEmbedding
from oneemb.embeddings.internals import stand_for_rows
from oneemb.graph.ranks import Ranks
from oneemb.graph.row_optimizers import Group as Options, row_optimizer_of
from oneemb.graph.tape import version_of
from oneemb.options import (
    Initializer,
    StoreOptions,
    make_cached_host_mem_store_options,
    make_device_mem_store_options,
    make_table,
)
from oneemb.policies import RowPolicy
from oneemb.storage.errors import StorageError
from oneemb.torchrec.configs import (
    Column,
    check_configs,
    columns_of,
    dtype_of,
    first_rows,
    initializer_of,
    later_rows,
    pooling_of,
)
from oneemb.torchrec.jagged import is_call_on_values
from oneemb.torchrec.ops import ON_META, LooksUpJagged, know
from oneemb.torchrec.optimizers import MakeOptimizer, options_now, row_stepper, same_optimizer
from oneemb.torchrec.table_state import TableState, dense_rows, let_go, load_together, put_rows, write_back
from oneemb.torchrec.virtual_tables import policy_of
from oneemb.training.eager import Optimizer

__all__ = [
    "Collection", "Group", "Lookups", "OnRanks", "TableRows", "arguments_of", "at_paths", "holder_of",
    "in_backward_optimizers",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TableRows:
    """How the rows of a table begin, and which it keeps, where its config does not say."""

    initializer: Initializer
    policy: RowPolicy
    cache_budget_mb: int | None = None
    """Size of the cache on the device, for rows in the host's memory; None = rows are where lookups run. Not used with
    `store_options`, which say where rows are."""


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
    """The rows that each table begins with; None = none."""
    tables: Sequence[TableRows] | None = None
    """Options of each table that are not in its config; None = no table has any. State dicts hold no such rows without
    a path."""


class Group(NamedTuple):
    """Tables that are one embedding."""

    rows: MultiTableEmbedding
    tables: tuple[int, ...]
    """Which of the configs they are."""
    columns: tuple[int, ...]
    """Which of the embeddings of the output they give."""
    tables_of_columns: tuple[int, ...]
    """Which table of `rows` each column is of."""
    pooling: str


class Lookups(NamedTuple):
    """Lookups of one call of a collection."""

    groups: Sequence[Group]
    arguments: Sequence[dict[str, Any]]
    """Arguments of the lookup of each group, as `MultiTableEmbedding.keys_of` takes them."""
    output: Callable[[Sequence[torch.Tensor]], Any]
    """Makes the result of the call from the rows of each group."""

    def look_up(self) -> Any:
        """Make the lookups; returns the result of the call."""
        its = zip(self.groups, self.arguments, strict=True)
        return self.output([group.rows(**arguments) for group, arguments in its])


class TableParameter(torch.nn.Module):
    """One table of a collection: `weight` stands for its rows, [0, D]."""

    def __init__(self, config: BaseEmbeddingConfig, device: torch.device | None):
        super().__init__()
        self.num_embeddings = config.num_embeddings
        self.embedding_dim = config.embedding_dim
        self.weight = torch.nn.Parameter(torch.empty(0, config.embedding_dim, device=device, dtype=torch.float32))
        self._dtype = dtype_of(config)
        self._state: Callable[[], TableState] | None = None

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"

    def is_stepped_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what steps the table in the backward pass, where TorchRec's tools, and torch's that would add another,
        see it."""
        vars(self.weight).update(
            _in_backward_optimizers=[optimizer], _optimizer_classes=[type(optimizer)],
            _optimizer_kwargs=[dict(optimizer.defaults)],
        )  # fmt: skip

    def serves(self, state: Callable[[], TableState]) -> None:
        """Have state dicts hold, and load, what `state` has of the table at that time."""
        self._state = state

    def state_now(self) -> TableState | None:
        """State of the table now, by the function that `serves` was given; None on meta."""
        return None if self._state is None else self._state()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # The weight keeps its dtype, as the rows that it stands for keep theirs.
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self._state is not None:
            destination[f"{prefix}weight"] = self._state().give()
            return
        # On meta there are no rows.
        destination[f"{prefix}weight"] = torch.empty(
            self.num_embeddings, self.embedding_dim, dtype=self._dtype, device=self.weight.device
        )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: object, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key != f"{prefix}weight"]
        state = state_dict.get(f"{prefix}weight")
        if state is None:
            missing_keys.append(f"{prefix}weight")
        elif self._state is None:
            warnings.warn(
                f"{prefix}weight is on the meta device and has no rows: what is loaded into it has no effect; move the"
                " collection first, to_empty(device='cpu')",
                stacklevel=2,
            )
        else:
            try:
                self._state().load(state)
            except (StorageError, TypeError, ValueError) as error:
                error_msgs.append(f"{prefix}weight: {error}")


def holder_of(tables: Mapping[str, torch.nn.Module]) -> torch.nn.ModuleDict:
    """Module of tables by name; it loads tables together whose entries in a state dict name one snapshot."""
    holder = torch.nn.ModuleDict(dict(tables))
    holder.register_load_state_dict_pre_hook(_load_together)
    return holder


def _load_together(holder: Any, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
    its = [(name, table.state_now()) for name, table in holder.items() if isinstance(table, TableParameter)]
    load_together((state, state_dict.get(f"{prefix}{name}.weight")) for name, state in its if state is not None)


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

    # What TorchScript need not know.
    __jit_ignored_attributes__ = ["rows", "_regrouping"]
    __jit_unused_properties__ = ["_tables", "device", "process_group"]

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
        self._pools = pools
        self._pooling = [pooling_of(config) if pools else "none" for config in tables]
        self._device = torch.empty(0, device=device, dtype=torch.float32).device
        self.seed, self._num_threads = seed, num_threads
        self.store_options = store_options
        self._on_ranks = on_ranks
        self._paths: list[str] = []
        """Temporary folders of tables without a path, one a rank."""
        self._remove_own: Callable[[], object] = lambda: None
        """Removes this rank's temporary folder."""
        self._options = self._options_of(store_options)
        holders = {config.name: TableParameter(config, self._device) for config in tables}
        setattr(self, named, holder_of(holders))
        self.holders = named
        """The attribute that has the tables by name."""
        self.rows = torch.nn.ModuleList()
        """The embeddings that hold the rows: `rows[0].stats()`, `rows[0].save_snapshot(name)` and the like."""
        self._groups: list[Group] = []
        self._steppers: list[tuple[torch.optim.Optimizer, ...]] = []
        """Optimizers that step each table in the backward pass, as `apply_optimizer_in_backward` gives them."""
        self._in_backward: list[Optimizer] = []
        """Optimizers that step rows in the backward pass, one for each embedding whose tables are stepped there."""
        self._regrouping = threading.RLock()
        self.states: list[TableState | None] = [None] * len(self.configs)
        """State of each table for state dicts; None = the table has no rows yet."""
        self._introduce()
        if on_ranks is not None:
            for table, make in zip(self._tables, on_ranks.steppers, strict=True):
                table.is_stepped_by(make([table.weight]))
        if on_ranks is not None and self._device.type != "meta":
            self._make_rows(self._rows_on_ranks(on_ranks.begin))
            self._on_ranks = dataclasses.replace(on_ranks, begin=())  # The rows have them now.
        elif self._device.type != "meta":
            self._make_rows(self._first_rows())

    # ---- rows -------------------------------------------------------------------------------------------------------

    def _options_of(self, given: StoreOptions | Mapping[str, StoreOptions] | None) -> list[StoreOptions | None]:
        names = [config.name for config in self.configs]
        if not isinstance(given, Mapping):
            return [given] * len(names)
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ValueError(f"store_options are by table, of {names}; got some for {unknown}")
        return [given.get(name) for name in names]

    @property
    def _tables(self) -> list[TableParameter]:
        return list(getattr(self, self.holders).values())

    def _first_rows(self) -> list[torch.Tensor | None]:
        """The rows that each table begins with, as TorchRec draws them; None = none."""
        begin: list[torch.Tensor | None] = []
        for t, config in enumerate(self.configs):
            begin.append(None if self._begins_empty(t) else first_rows(config))
            if not self._pools:
                _fill(config, begin[-1])
        if self._pools:  # TorchRec's module of bags fills its tables when it has made them all.
            for config, weights in zip(self.configs, begin, strict=True):
                _fill(config, weights)
        return begin

    def _begins_empty(self, t: int) -> bool:
        """Whether a table begins without rows, so that each begins at its first lookup."""
        return self._options[t] is not None or self.configs[t].use_virtual_table

    def _rows_on_ranks(self, begin: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The rows that each table begins with: those that there are, and those of an `init_fn` that fills a whole
        table in its own way."""
        found = list(begin)
        for t, config in enumerate(self.configs):
            if found[t] is None and not self._begins_empty(t) and self._table_rows(t) is None:
                try:
                    initializer_of(config)
                except ValueError:
                    found[t] = first_rows(config)
                    _fill(config, found[t])
        return found

    def _make_rows(self, begin: Sequence[torch.Tensor | None]) -> None:
        """Make the embeddings.

        Args:
            begin: the rows that each table begins with; None = none.
        """
        alike: dict[tuple[object, ...], list[int]] = {}
        self._steppers = [in_backward_optimizers(table.weight) for table in self._tables]
        self._in_backward.clear()
        for t, config in enumerate(self.configs):
            steps = _kind_of(self._steppers[t])
            its = self._table_rows(t)
            budget = None if its is None else its.cache_budget_mb
            keeps = policy_of(config)
            if keeps is not None and its is not None:
                raise ValueError(
                    f"table {config.name!r}: virtual_table_eviction_policy and the options of oneemb.dynamicemb both"
                    " say which rows leave; leave out the policy"
                )
            where = self._options[t], budget, self._begins_empty(t)
            kind = config.embedding_dim, dtype_of(config), self._pooling[t], steps, keeps, *where
            alike.setdefault(kind, []).append(t)
        self._groups = [self._make_group(tuple(its), places) for places in [set[str]()] for its in alike.values()]
        self.rows = torch.nn.ModuleList(group.rows for group in self._groups)
        self.rows.train(self.training)
        for group in self._groups:
            for place, t in enumerate(group.tables):
                if (weights := begin[t]) is not None:
                    put_rows(group.rows, place, weights)

    def _make_group(self, tables: tuple[int, ...], places: set[str]) -> Group:
        configs = [self.configs[t] for t in tables]
        first, options = configs[0], self._options[tables[0]]
        words = [f"{first.embedding_dim}x{str(dtype_of(first)).removeprefix('torch.')}", self._pooling[tables[0]]]
        if steps := _kind_of(self._steppers[tables[0]]):
            words.append(steps[1])
        paths = self._temporary_folders() if options is None else list(options.persistent_path)
        while os.path.join(paths[0], "-".join(words)) in places:
            words.append("other")
        own = [os.path.join(path, "-".join(words)) for path in paths]
        places.add(own[0])
        its = [self._table_rows(t) for t in tables]
        made = self._store_of(tables[0], own)
        names = ", ".join(config.name for config in configs)
        policies = [policy for config in configs if (policy := policy_of(config)) is not None]  # of all or of none
        seed = (self.seed + zlib.crc32(first.name.encode())) % 2**64  # another one for each embedding
        rows = MultiTableEmbedding(
            names, first.embedding_dim, dtype_of(first), torch.int64,
            [
                make_table(self._initializer(t) if kept is None else kept.initializer)
                for t, kept in zip(tables, its, strict=True)
            ],
            made, seed=seed, num_threads=self._num_threads,
            policy=[kept.policy for kept in its if kept is not None] or policies or None, **self._of_ranks(),
        )  # fmt: skip
        self._give_weights(rows, tables, is_kept=options is not None)
        if self._device.type != "cpu":
            rows.to(self._device)
        columns = tuple(c for c, column in enumerate(self._columns) if column.table in tables)
        of_columns = tuple(tables.index(self._columns[c].table) for c in columns)
        group = Group(rows, tables, columns, of_columns, self._pooling[tables[0]])
        of_rows: list[TableState] = []
        for place, t in enumerate(tables):
            state = TableState(
                rows, place, configs, of_rows, is_kept=options is not None, is_empty=its[place] is not None
            )
            self.states[t] = state
            self._tables[t].serves(functools.partial(_state_of, weakref.ref(self), t))
        return group

    def _initializer(self, t: int) -> Initializer:
        """Initializer of the rows of a table that begin at a lookup."""
        return initializer_of(self.configs[t]) if self._begins_empty(t) else later_rows(self.configs[t])

    def _table_rows(self, t: int) -> TableRows | None:
        ranks = self._on_ranks
        return None if ranks is None or ranks.tables is None else ranks.tables[t]

    def _store_of(self, t: int, paths: Sequence[str]) -> StoreOptions:
        """Where the rows of a table are, and its like."""
        options, its = self._options[t], self._table_rows(t)
        if options is not None:
            return at_paths(options, paths)
        if its is not None and its.cache_budget_mb is not None:
            return make_cached_host_mem_store_options(its.cache_budget_mb, list(paths))
        return make_device_mem_store_options(list(paths))

    def _of_ranks(self) -> dict[str, Any]:
        its = self._on_ranks
        if its is None or its.process_group is None:
            return {}
        return {
            "process_group": its.process_group, "gradients_of_ranks": its.gradients, "comm_dtype": its.comm_dtype,
        }  # fmt: skip

    def _give_weights(self, rows: MultiTableEmbedding, tables: Sequence[int], *, is_kept: bool) -> None:
        """Let the tables' parameters stand for the rows; or where their optimizers step in the backward pass, one that
        nobody else has, so that the rows of all are stepped as one."""
        weights = [self._tables[t].weight for t in tables]
        if not self._steppers[tables[0]]:
            stand_for_rows(rows, weights, is_kept=is_kept)
            return
        optimizers = [self._steppers[t][0] for t in tables]
        steppers = [row_stepper(optimizer) for optimizer in optimizers]
        one = torch.nn.Parameter(torch.empty_like(weights[0]))
        stand_for_rows(rows, [one], is_kept=is_kept)
        optimizer = Optimizer(same_optimizer(steppers[0], one), [rows], fused=True)

        def options() -> list[Options | None]:
            """Options of each table at this step, from its own optimizer."""
            return [
                options_now(optimizer, stepper) if weight.requires_grad else None
                for weight, optimizer, stepper in zip(weights, optimizers, steppers, strict=True)
            ]

        optimizer.row_step.groups_of_tables = options
        self._in_backward.append(optimizer)

    def _temporary_folders(self) -> list[str]:
        if not self._paths:
            own = tempfile.mkdtemp(prefix="oneemb-torchrec-")
            # Not weakref.finalize, which does nothing when a process of multiprocessing ends, and too much in a fork.
            self._remove_own = Finalize(
                self, shutil.rmtree, args=(own,), kwargs={"ignore_errors": True}, exitpriority=0
            )
            ranks = self._on_ranks
            self._paths = [own]
            if ranks is not None and ranks.process_group is not None:
                self._paths = Ranks(ranks.process_group).all_gather("make temporary folders of tables", lambda: own)
        return self._paths

    def ready(self) -> list[Group]:
        """The embeddings, as the optimizers of tables now ask for them."""
        if self._device.type == "meta":
            raise RuntimeError(ON_META)
        self.regroup()
        for config, table in zip(self.configs, self._tables, strict=True):
            if len(table.weight) or version_of(table.weight) != getattr(table.weight, "stepped_version", 0):
                raise RuntimeError(
                    f"the weight of table {config.name!r} was written to, by an initializer or an average of"
                    " parameters; it stands for the rows and holds none. Give rows to load_state_dict(), average them"
                    " by oneemb.AveragedEmbedding"
                )
        self._bring_in()
        let_go(state for state in self.states if state is not None)
        for group in self._groups:
            if self._steppers[group.tables[0]]:
                trained = any(self._tables[t].weight.requires_grad for t in group.tables)
                group.rows.weights[0].requires_grad_(trained)
        return self._groups

    def regroup(self) -> None:
        """Group tables by what steps them now, if that is something else than before."""
        with self._regrouping:  # Threads may take state dicts while others train.
            its = zip(self._tables, self._steppers, strict=True)
            if any(in_backward_optimizers(table.weight) != steppers for table, steppers in its):
                if self._on_ranks is not None:
                    raise RuntimeError("apply_optimizer_in_backward comes before the module is sharded")
                self._make_rows_anew()

    def _bring_in(self) -> None:
        """Bring what was written into tensors of state dicts into the rows."""
        write_back(state for state in self.states if state is not None)

    def rows_to_shard(self) -> list[torch.Tensor | None]:
        """The rows of each table for those that take its place; None = it begins with none.

        Raises:
            RuntimeError: they are in a path of the user's, where snapshots are to be used.
        """
        self._bring_in()
        begin: list[torch.Tensor | None] = [None] * len(self.configs)
        for group in self._groups:
            begins_empty = self._begins_empty(group.tables[0])
            if group.rows.stats()["rows"] and begins_empty:
                raise RuntimeError(
                    f"tables {group.rows.name} have rows that lookups began; make the collection on the meta device,"
                    " shard it, and load a snapshot of these rows"
                )
            for place, t in enumerate(group.tables):
                if not begins_empty:
                    state = self.states[t]
                    assert state is not None
                    state.check_in_range()
                    begin[t] = dense_rows(group.rows, place, self.configs[t])
            if group.rows.stats()["step"] and self._steppers[group.tables[0]]:
                warnings.warn(
                    f"tables {group.rows.name} were trained in the backward pass before they are sharded: their weights"
                    " go along, their optimizer's state does not",
                    stacklevel=2,
                )
        return begin

    def _make_rows_anew(self) -> None:
        """Group tables by what steps them now."""
        for table in self._tables:  # One that rows cannot follow is refused with all rows there.
            _kind_of(in_backward_optimizers(table.weight))
        self._bring_in()
        begin: list[torch.Tensor | None] = [None] * len(self.configs)
        for group in self._groups:
            begins_empty = self._begins_empty(group.tables[0])
            if group.rows.stats()["step"] or group.rows.stats()["rows"] and begins_empty:
                raise RuntimeError(
                    f"apply_optimizer_in_backward comes before the first lookup; tables {group.rows.name} have rows"
                )
            for place, t in enumerate(group.tables):
                if not begins_empty:
                    begin[t] = dense_rows(group.rows, place, self.configs[t])
        for group in self._groups:
            group.rows.close()
        self._make_rows(begin)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        moved: Self = super()._apply(fn, recurse)
        device = self._tables[0].weight.device if self.configs else self._device
        weights = [table.weight for table in self._tables]
        for group in self._groups:
            its = [weights[t] for t in group.tables]
            if self._steppers[group.tables[0]]:
                group.rows.weights[0].data = group.rows.weights[0].data.to(device)
            elif any(one is not other for one, other in zip(its, group.rows.weights, strict=True)):
                stand_for_rows(group.rows, its, is_kept=self._options[group.tables[0]] is not None)
        self._introduce()
        was, self._device = self._device, device
        if was.type == "meta" and device.type != "meta":
            self._make_rows(self._first_rows())
        return moved

    def empty_copy(self) -> Self:
        """The same on the meta device, without rows."""
        raise NotImplementedError

    def __deepcopy__(self, memo: object) -> Self:
        if self._on_ranks is not None or any(options is not None for options in self._options):
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
        """Leave the meta device with copies of the rows of another collection of the same tables.

        Raises:
            TypeError: its tables are grouped otherwise.
        """
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
            theirs.rows.store.copy_to(own.rows.store, with_state=True)

    @torch.jit.unused
    def _is_called(self, features: KeyedJaggedTensor) -> bool:
        """Whether this is a call on values; it is not where a model is traced or exported, or has none."""
        return is_call_on_values(features) and self._device.type != "meta"

    def _introduce(self) -> None:
        for table in self._tables:
            know(table.weight, cast(LooksUpJagged, self))

    def close(self) -> None:
        """Free memory, files and the locks on the paths. Rows that no snapshot holds are gone."""
        for group in self._groups:
            group.rows.close()
        self._remove_own()

    # ---- what TorchRec's modules have -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where lookups run."""
        return self._device

    @property
    def process_group(self) -> "torch.distributed.ProcessGroup | None":
        """The ranks that own the rows together; None = this process has them all."""
        return None if self._on_ranks is None else self._on_ranks.process_group

    def reset_parameters(self) -> None:
        """Begin anew, as after the module was made."""
        begin = self._first_rows()
        for state in self.states:
            if state is not None:
                state.given.clear()
        for group in self._groups:
            group.rows.clear()
            for place, t in enumerate(group.tables):
                if (weights := begin[t]) is not None:
                    put_rows(group.rows, place, weights)


def _state_of(reference: "weakref.ref[Collection]", table: int) -> TableState:
    """Current state of a table of a collection; state dicts need it before the first lookup too."""
    collection = reference()
    if collection is None:
        raise RuntimeError("the collection of this table is gone, and its rows with it")
    collection.regroup()
    state = collection.states[table]
    assert state is not None
    return state


def arguments_of(
    ids: torch.Tensor,
    table_ids: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
    pooling: str | None = None,
    columns: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """The arguments of a lookup."""
    return {
        "ids": ids, "table_ids": table_ids, "offsets": offsets, "per_sample_weights": per_sample_weights,
        "pooling": pooling, "columns": columns,
    }  # fmt: skip


def in_backward_optimizers(weight: torch.Tensor) -> tuple[torch.optim.Optimizer, ...]:
    """Optimizers that torch's `_apply_optimizer_in_backward` has given a parameter."""
    return tuple(getattr(weight, "_in_backward_optimizers", ()))


def _kind_of(steppers: Sequence[torch.optim.Optimizer]) -> tuple[Any, ...] | None:
    """Key that tables share which can be stepped as one in the backward pass; None = they are not stepped there.

    Raises:
        ValueError: there are several of one table, or the class is not supported for rows.
    """
    if not steppers:
        return None
    if len(steppers) > 1:
        raise ValueError("apply_optimizer_in_backward was called twice for a table, which one optimizer steps")
    stepper = row_stepper(steppers[0])
    found = row_optimizer_of(stepper, stepper.param_groups[0])
    return type(stepper), found.name, found.weight_state, found.row_state, found.fixed


def _fill(config: BaseEmbeddingConfig, weights: torch.Tensor | None) -> None:
    if weights is not None:
        assert config.init_fn is not None, "TorchRec's configs give it one"
        with torch.no_grad():
            config.init_fn(weights)


def at_paths(options: StoreOptions, paths: Sequence[str]) -> StoreOptions:
    """The same options with other folders."""
    return dataclasses.replace(options, persistent_path=tuple(paths))
