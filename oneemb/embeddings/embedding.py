"""Embedding modules: what users assign to a model and look ids up in."""

import dataclasses
import functools
import json
import os
import uuid
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never, Self, TypeVar, cast

import numpy as np
import torch

import oneemb.training.row_step  # noqa: F401  # so that torch optimizers train rows
from oneemb.checkpoints.named_snapshot import SnapshotName, decode, encode
from oneemb.checkpoints.rank_snapshots import RankSnapshots
from oneemb.embeddings.embedding_arguments import (
    DTYPE_NAMES,
    check_arguments,
    differences,
    initial_rows,
    policies_of,
    rank_folders,
    state_width_of,
    store_plan,
)
from oneemb.embeddings.row_calls import RowCalls
from oneemb.embeddings.row_weight import RowWeight, changes_no_row, refuse_values
from oneemb.embeddings.stats import EmbeddingStats
from oneemb.graph import ops
from oneemb.graph.arguments import Lookup
from oneemb.graph.build_error import warn_user
from oneemb.graph.building import building_now
from oneemb.graph.modules import embeddings_in
from oneemb.graph.ops.batch_ids import columns_of, pooling_of
from oneemb.graph.ranks import Ranks, check_between_ranks
from oneemb.graph.row_optimizers import SAME_STATE, RowOptimizer
from oneemb.kernels.threads import Threads
from oneemb.options import Initializer, NormalInitializer, StoreOptions, TableOptions, to_tree
from oneemb.storage.embedding_store import ChangeRows, EmbeddingStore
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import AnyPath, absolute_path
from oneemb.storage.policies.row_policy import GivenScore, RowPolicy, described
from oneemb.storage.table.json_lists import LongList
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.training.tracers import hidden_from_modes, refuse_tracers

__all__ = ["MultiTableEmbedding", "MultiTableMultiColumnEmbedding", "TableEmbedding", "copied", "embeddings_of"]

_DEFAULT_INITIALIZER = NormalInitializer(0.0, 0.05)


class TableEmbedding(torch.nn.Module):
    """Base of both embedding modules: T tables whose rows are C columns side by side."""

    def __init__(
        self,
        name: str,
        dim_C: Sequence[int],
        dtype: torch.dtype,
        key_type: torch.dtype,
        tables: Sequence[TableOptions],
        store_options: StoreOptions,
        default_initializer: Initializer | None,
        padding_idx: int | None,
        seed: int,
        num_threads: int | None,
        process_group: "torch.distributed.ProcessGroup | None",
        gradients_of_ranks: str = "mean",
        comm_dtype: torch.dtype = torch.float32,
        policy: RowPolicy | Sequence[RowPolicy] | None = None,
        *,
        starts_empty: bool = True,
    ):
        super().__init__()
        check_between_ranks(gradients_of_ranks, comm_dtype)
        self.ranks = None if process_group is None else Ranks(process_group, gradients_of_ranks, comm_dtype)
        """The ranks that own the rows together; None = this process has them all."""
        check_arguments(
            name, dim_C, dtype, key_type, tables, store_options, default_initializer, padding_idx, seed,
            1 if self.ranks is None else self.ranks.size,
        )  # fmt: skip
        self.policies = policies_of(policy, tables, store_options, self.ranks)
        """Which rows each table keeps; None = all of them."""
        self.name = name
        self.column_dims = tuple(dim_C)
        self.embedding_dim = sum(dim_C)
        self.dtype = dtype
        self.key_type = key_type
        self.tables = tuple(tables)
        self.num_tables = len(self.tables)
        self.asked_ranks = None if all(table.replicate for table in self.tables) else self.ranks
        """The ranks that a lookup asks for rows; None = it asks none, since this process has all rows, or copies."""
        self.store_options = store_options
        self.default_initializer = default_initializer
        self.padding_idx = padding_idx
        self.seed = seed
        if self.ranks is not None:
            self.ranks.name, self.ranks.made = repr(name), self._made()
        self.store = EmbeddingStore(
            dim=self.embedding_dim,
            dtype=DTYPE_NAMES[dtype],
            initial=initial_rows(seed, dim_C, self.tables, default_initializer or _DEFAULT_INITIALIZER),
            plan=store_plan(name, store_options, self.tables, self.ranks),
            threads=Threads(num_threads),
            policies=self.policies,
            name=name,
        )
        self.store.owner = weakref.ref(self)
        self.rank_snapshots = RankSnapshots(
            name, self.store, store_options.persistent_path, rank_folders(store_options, self.ranks), self.ranks
        )
        """The snapshots that the ranks have together."""
        self._row_calls = RowCalls(name, self.store, self.ranks, key_type, self.num_tables)
        self.weight = torch.nn.Parameter(torch.empty(0, self.embedding_dim, dtype=torch.float32, device="cpu"))
        """Stands for all rows in parameter lists, [0, D]: it holds none. Its gradient is a `RowGrad`."""
        self._stands_for(self.weight)
        self._weights_of_another: tuple[torch.nn.Parameter, ...] | None = None
        self.row_optimizer: RowOptimizer | None = None
        """How the rows are updated; set by the first step of a torch optimizer, `oneemb.Optimizer` or
        `TrainGraph.add_optimizer`."""
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._saved: tuple[SnapshotName, int] | None = None
        """The snapshot saved or loaded last, and the store's count of changes then."""
        self._may_be_empty = starts_empty
        """Whether the warning of `say_if_empty` may still come."""

    # ---- lookups ----------------------------------------------------------------------------------------------------

    # torch.compile of a model around the embedding must not look into the loops of a lookup. This decorator is
    # torch.compiler.disable as torch.optim uses it: the import, which takes a second, is left to the first call.
    @torch._disable_dynamo
    def forward(
        self,
        ids: torch.Tensor,
        table_ids: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        pooling: Literal["sum", "mean", "max"] | None = None,
        *,
        columns: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """The rows of ids, one for each id or, with `offsets`, one for each bag of ids.

        In training mode unknown ids are inserted with their initial values; in eval mode they read as the same values
        and nothing is inserted.

        Args:
            ids: integers of `key_type`, on the device of the embedding. Shape [B, T]: column t is looked up in table
                t. With one table, or with `table_ids`, any shape. With `offsets`, [N]. Every integer is legal.
            table_ids: the table, 0 to T-1, of each id: integers of the shape of `ids` or one that broadcasts to it.
                With `offsets`, the table of each bag, [P], or one for all bags.
            offsets: int64 [P + 1], from 0 to N: bag p holds ids[offsets[p]:offsets[p + 1]], any number of ids.
                Without `table_ids` bags lie sample by sample: P = B * T, and bag p is looked up in table p % T.
            per_sample_weights: float32 [N]; each id's weights are multiplied by it before a sum. It gets a gradient.
            pooling: with `offsets`, "sum" (None is the same), "mean" or elementwise "max" of a bag's ids. Those equal
                to `padding_idx` are left out. As in `torch.nn.EmbeddingBag` the gradient of a maximum goes to the id
                that gave it, the first of several; a NaN is the maximum where the first id of a bag has it, and is
                passed over elsewhere.
            columns: with `offsets`, the table of each of C columns, 0 to T-1, none below the one before. Bags then lie
                column by column: P = C * B, and bag p is of column p // B. Several columns may be of one table.

        Returns:
            [*ids.shape, D] of the embedding's dtype, which `model.half()` and the like do not change; zeros where an id
            equals `padding_idx`. For bags [B, T, D], with `columns` [B, C, D], or [P, D] with `table_ids` or one table;
            zeros for an empty bag.
            Sums and means of bags are made in float32 and rounded once.

        Raises:
            TypeError, ValueError: dtype, device, shape or range is not as above; nothing was inserted.
            StoreFullError: the rows of the step do not fit in the cache, or the store's capacity is reached; nothing
                was inserted.
        """
        refuse_tracers(self, ids)
        scaled = isinstance(per_sample_weights, torch.Tensor) and per_sample_weights.requires_grad
        is_trained = torch.is_grad_enabled() and self.is_trained
        has_gradient = is_trained or scaled and torch.is_grad_enabled()
        if not self.training and self.store.turns.forked:
            has_gradient = False  # A child of fork may read rows, not train them.
        if has_gradient and is_trained and _in_ddp(self):
            raise RuntimeError(
                f"embedding {self.name!r} is inside DistributedDataParallel, which would leave each rank with rows of"
                " its own; wrap the dense modules alone, and look ids up outside of them; TorchRec's"
                " DistributedModelParallel shards it by the sharders of oneemb.torchrec.get_default_sharders() alone"
            )
        pools = "sum" if pooling is None else self._pooling_of(pooling, offsets)
        tables_C = None if columns is None else columns_of(columns)
        lookup = Lookup(ids, table_ids, offsets, tables_C, per_sample_weights, pools)
        with hidden_from_modes():
            building = building_now()
            if building is None:
                return self._look_up(lookup, self.training, has_gradient)
            look_up = functools.partial(self._look_up, lookup, self.training, has_gradient)
            return building.look_up(self, lookup, has_gradient, look_up)

    def _pooling_of(self, pooling: str | None, offsets: object) -> str:
        try:
            return pooling_of(pooling, offsets)
        except ValueError as error:
            failure = error
        ranks = self.asked_ranks
        if ranks is None or building_now() is not None:  # A graph tells the ranks of whatever `build` raises.
            raise failure

        def fail() -> Never:
            raise failure

        # In the place of the lookup's own exchange, in which the others wait.
        ranks.agree(ops.lookup_of(self.name, self.training, ranks, ops.in_backward()), fail)
        raise AssertionError("ranks have agreed on a lookup that has failed")

    @torch._disable_dynamo
    def read(self, ids: torch.Tensor, table_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Look ids up as in eval mode, whatever the embedding's mode: without gradient, and without inserting.

        Args:
            ids, table_ids: as of `forward`.
        """
        refuse_tracers(self, ids)
        with hidden_from_modes():
            return self._look_up(Lookup(ids, table_ids), False, False)

    def _look_up(self, lookup: Lookup, inserts: bool, has_gradient: bool) -> torch.Tensor:
        store, scales, pooling = self.store, lookup.per_sample_weights, lookup.pooling
        if self.asked_ranks is not None:
            lease = ops.look_up_on_ranks(
                self.asked_ranks, store, self.name, functools.partial(self.keys_of, lookup, inserts), inserts=inserts,
                has_gradient=has_gradient, sums_bags=lookup.sums_bags, again=ops.in_backward(),
            )  # fmt: skip
            rows = ops.gather(lease, scales, pooling)
            return ops.with_grad(rows, lease, self.weights, scales) if has_gradient else rows
        is_plain = lookup.offsets is None and scales is None and lookup.columns is None
        if not has_gradient and is_plain and pooling == "sum":
            if inserts and self._may_be_empty:
                self.say_if_empty()
            read = ops.read_ids(
                store, lookup.ids, lookup.table_ids, self.num_tables, self.key_type, self.padding_idx, inserts=inserts
            )
            if read is not None:
                return read
        keys = self.keys_of(lookup, inserts)
        if not inserts and not has_gradient:
            return ops.peek(store, keys, scales, pooling)
        lease = ops.acquire(store, keys, again=ops.in_backward()) if inserts else ops.acquire_later(store, keys)
        rows = ops.gather(lease, scales, pooling)
        if has_gradient:
            return ops.with_grad(rows, lease, self.weights, scales, self.ranks)
        lease.unpin()
        return rows

    def keys_of(self, lookup: Lookup, inserts: bool = False) -> ops.Keys:
        """The unique keys of a lookup; raises as `forward` does of what is wrong with its arguments.

        Args:
            inserts: whether it is to insert unknown keys: see `say_if_empty`.
        """
        if inserts and self._may_be_empty:
            self.say_if_empty()
        keys = ops.unique_keys(
            lookup.ids, lookup.table_ids, self.num_tables, self.key_type, self.padding_idx, lookup.offsets,
            lookup.columns, threads=self.store.threads,
        )  # fmt: skip
        if lookup.per_sample_weights is not None or lookup.pooling != "sum":
            ops.check_pooling(keys, lookup.per_sample_weights, lookup.pooling)
        return keys

    def say_if_empty(self) -> None:
        """Warn, once, if rows are about to begin in a folder with snapshots of which none was loaded."""
        asks, self._may_be_empty = self._may_be_empty, False
        if not asks or self.store.changes or self._saved is not None or not self._speaks:
            return
        if existing := self.rank_snapshots.seen():
            warn_user(
                f"embedding {self.name!r} starts empty, though {', '.join(self.store_options.persistent_path)} holds"
                f" the snapshots {', '.join(map(repr, existing))}; load_snapshot(name) goes on from one, before the"
                " first lookup"
            )

    if TYPE_CHECKING:
        __call__ = forward  # Editors see `forward` where torch.nn.Module has Callable[..., Any].

    # ---- weights ----------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> tuple[torch.nn.Parameter, ...]:
        """The parameters that stand for rows: one for all, or see `belongs_to`."""
        if self._weights_of_another is not None:
            return self._weights_of_another
        # Asked anew each time: torch's tools, such as fully_shard, put other parameters in a module's place.
        weight = self._parameters.get("weight")
        return (self.weight if weight is None else weight,)

    @property
    def is_trained(self) -> bool:
        """Whether rows, of any table, are to get a gradient."""
        for weight in self.weights:  # a loop, which is quicker than `any`: every lookup asks
            if weight.requires_grad:
                return True
        return False

    def belongs_to(self, weights: Sequence[torch.nn.Parameter], *, is_kept: bool = True) -> None:
        """Let parameters of another module stand for the rows of each table, in place of `weight`: so tables can be
        frozen, and trained with options of their own, by groups of one optimizer. To be called before the first lookup.

        Parameters and state dicts then have nothing of this embedding: the other module is asked.

        Args:
            weights: of shape [0, D], one for each table, or one for all.
            is_kept: whether `persistent_path` stays when the other module is gone; otherwise no snapshot can be saved.
        """
        assert self.ranks is None or len(weights) == 1, "between ranks all rows have one gradient"
        self.rank_snapshots.are_kept = is_kept
        self._parameters.pop("weight", None)
        self._weights_of_another = tuple(weights)
        for weight in self.weights:
            self._stands_for(weight)

    def _stands_for(self, weight: torch.nn.Parameter) -> None:
        weight.__class__ = RowWeight  # whoever made it, another module or torch's tools
        weight.embedding = _RowsOf(self)  # type: ignore[attr-defined]
        weight.register_hook(ops.refuse_dense)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter; refuse one with values as `weight`, which stands for the rows."""
        if name == "weight" and param is not None and param.dim() and len(param):
            refuse_values(self.name, f"weight = a parameter of shape {list(param.shape)}")
        super().register_parameter(name, param)

    def drop_grads(self) -> None:
        """Forget the gradients of rows."""
        for weight in self.weights:
            weight.grad = None

    # ---- optimizer --------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer that trains the rows; None = there is none, or it is gone."""
        return None if self._optimizer is None else self._optimizer()

    def detach_optimizer(self, state: str = "keep") -> None:
        """Let another optimizer, or another graph's, train the rows from now on.

        Args:
            state: what becomes of the optimizer's state. "keep": an optimizer of the same class goes on with it;
                "drop": rows lose it, and any optimizer begins anew, at step 0; "adam", "adamw" or "sparse_adam", for
                rows of one of these three: another of them goes on with the moments.

        Raises:
            ValueError: `state` is none of these.
            StorageError: there is no room for the rows on the disk on their way; they are as they were.
        """
        name = self.store.format.optimizer
        if state not in ("keep", "drop") and not (state in SAME_STATE and (name is None or name in SAME_STATE)):
            raise ValueError(
                f"state must be 'keep', 'drop' or, for rows of Adam, one of {', '.join(SAME_STATE)}, got {state!r} for"
                f" rows of {name!r}"
            )
        self.store.detach(state)
        self.row_optimizer = self._optimizer = None

    def attach(self, row_optimizer: RowOptimizer, optimizer: torch.optim.Optimizer) -> None:
        """Give every row the state of this optimizer. Users call `oneemb.Optimizer` or `TrainGraph.add_optimizer`.

        Raises:
            ValueError: `size_factor` or `storage_dim` of the store options is too small for it.
            StorageError: the rows already hold another optimizer's state, or the path is in use.
        """
        needed = row_optimizer.state_width(self.embedding_dim)
        state = np.zeros(state_width_of(self.store_options, self.embedding_dim, row_optimizer.name, needed), np.float32)
        state[:needed] = row_optimizer.initial_state(self.embedding_dim)
        self.store.attach(row_optimizer.name, state)
        self.row_optimizer, self._optimizer = row_optimizer, weakref.ref(optimizer)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def save_snapshot(self, name: str, *, overwrite: bool = False) -> None:
        """Save all rows and the optimizer's state, durably, under a name in `persistent_path`.

        When the call returns, the snapshot is complete; if it raises, there is none. Later training does not change it.
        With `process_group` every rank makes the call, and saves the rows that it owns; where one fails, all raise.

        Args:
            name: any text; percent-encoded it is the name of a file.
            overwrite: replace a snapshot of this name, atomically.

        Raises:
            StorageError: the name is taken or cannot be a name, deltas go on from the snapshot that is to be replaced,
                or the disk fails; the snapshots there stay whole.
            ValueError: `expire_where` of a policy that evicts at snapshots raises; nothing is saved.
        """
        self._save(name, overwrite=overwrite)

    def save_delta(self, name: str, since: str, *, keep_evicted: bool = False, overwrite: bool = False) -> None:
        """Save what has changed since a snapshot or delta: the rows that were trained, begun or imported since, and the
        keys of those that have left. `load_snapshot(name)` loads the rows as they are now, from the snapshot and the
        deltas since, wherever it lies; `oneemb merge-deltas` makes the delta a whole snapshot.

        A delta counts as a snapshot: it is complete when the call returns, listed, deleted and named by state dicts as
        one. What it goes on from cannot be deleted or replaced as long as it is there.

        Args:
            name: as of `save_snapshot`.
            since: one of the last four snapshots and deltas that this embedding has saved, or loaded as they were
                saved by as many ranks.
            keep_evicted: do not say which rows have left by a policy: who loads the delta has them as they were before,
                for serving. Those that `erase` has forgotten go all the same.
            overwrite: replace a snapshot of this name, atomically.

        Raises:
            TypeError, ValueError: `since` is no name, or is `name`.
            StorageError: `since` is none of those, or was saved with `keep_evicted` and this is not, the name is taken
                or cannot be a name, or the disk fails; the snapshots there stay whole.
        """
        if not isinstance(since, str):
            raise TypeError(f"since must be the name of a snapshot, got {since!r}")
        if since == name:
            raise ValueError(f"a delta needs a name of its own, got {name!r} for one since {since!r}")
        self._save(name, overwrite=overwrite, since=since, keep_evicted=keep_evicted)

    def _save(
        self, name: str, *, overwrite: bool = False, since: str | None = None, keep_evicted: bool = False
    ) -> None:
        changes = self.store.changes
        identity = self.rank_snapshots.save(
            name, self.description(), overwrite=overwrite, since=since, keep_evicted=keep_evicted
        )
        saved = self.store.saved
        if saved is not None and saved[0] == identity:
            changes = saved[1]  # Rows that have expired may have left before it.
        if not keep_evicted:  # Else who loads it has other rows.
            self._saved = {"oneemb_snapshot": name, "oneemb_identity": identity}, changes

    def load_snapshot(self, name: str, *, weights_only: bool = False) -> None:
        """Go on from a snapshot: its rows, optimizer state and step replace those of the embedding.

        If the snapshot has no state, such as one of pretrained vectors, its rows get the state of new rows, and the
        embedding begins at step 0.

        The ranks that saved it may have been more or fewer than those of `process_group`, or none: each rank, and every
        one has to make the call, reads what it owns. With as many ranks as before it reads its own folder alone.

        Args:
            weights_only: do so with any snapshot, whatever optimizer's state it has.

        Raises:
            StorageError: there is no snapshot of this name (the message names those there are), or its rows have
                another width, dtype or optimizer, or are of more tables; the embedding's rows are as they were.
            KeyboardInterrupt: the embedding's rows are as they were; or, if some had been replaced, every call raises
                `BrokenStoreError` until another load.
        """
        changed = self.rank_snapshots.together(f"load_snapshot {name!r}", lambda: self._load(name, weights_only))
        if changed is not None and self._speaks:
            warn_user(
                f"snapshot {name!r} was saved with {changed[0]}, embedding {self.name!r} has {changed[1]}: ids that the"
                " snapshot lacks begin, and the padding reads, by the embedding's arguments; give it the snapshot's to"
                " go on as before"
            )

    def _load(self, name: str, weights_only: bool = False) -> tuple[str, str] | None:
        """Load a snapshot, and return the `differences` of the embedding that saved it from this one."""
        ours = self.description()  # First: a list of tables that is known already is not parsed.
        info, as_saved = self.rank_snapshots.load(name, weights_only=weights_only, check=self._check_tables)
        self.drop_grads()
        snapshot: SnapshotName = {"oneemb_snapshot": name, "oneemb_identity": info.identity}
        self._saved = (snapshot, self.store.changes) if as_saved else None
        return differences(self._check_tables(info), ours)

    def check_fits(self, name: str) -> None:
        """Raise StorageError unless there is a snapshot of this name whose rows fit, as `load_snapshot` does."""
        self.rank_snapshots.check_fits(name, self._check_tables)

    def _check_tables(self, info: SnapshotInfo) -> dict[str, Any]:
        """The description that a snapshot was saved with, {} if it has none; an error if it has too many tables."""
        description = info.meta.get("embedding") or {}
        if len(description.get("tables", ())) > self.num_tables:
            raise StorageError(
                f"snapshot {info.name!r} holds rows of {len(description['tables'])} tables, embedding {self.name!r} has"
                f" {self.num_tables}; make it with all of them"
            )
        return description

    def delete_snapshot(self, name: str) -> None:
        """Delete a snapshot and free the disk space only it used.

        Raises:
            StorageError: there is no snapshot of this name, or deltas go on from it.
        """
        if self._saved is not None and self._saved[0]["oneemb_snapshot"] == name:
            self._saved = None  # First of all: no state dict may name a snapshot that is gone, whatever interrupts.
        self.rank_snapshots.delete(name)

    def snapshots(self) -> list[str]:
        """Names of the snapshots in `persistent_path`, oldest first, whatever number of ranks has saved them.

        With `process_group` every rank makes the call, and gets the same.
        """
        return self.rank_snapshots.names()

    @functools.cached_property
    def _table_trees(self) -> LongList:
        return LongList(to_tree(self.tables))

    def description(self) -> dict[str, Any]:
        """Description of the embedding, as snapshots hold it. Callers must not change its list of tables."""
        said_T = [policy.absent for policy in self.policies or ()]
        absent = [said if isinstance(said, str) else to_tree(said) for said in said_T]
        return {
            "name": self.name,
            "key_type": str(self.key_type).removeprefix("torch."),
            "tables": self._table_trees,
            "padding_idx": self.padding_idx,
            "seed": self.seed,
            "column_dims": list(self.column_dims),
            "default_initializer": to_tree(self.default_initializer or _DEFAULT_INITIALIZER),
            **({"absent": absent} if absent else {}),
        }

    def _made(self) -> str:
        """Arguments of the embedding that must be the same on all ranks, as text."""
        assert self.ranks is not None
        initializers = json.dumps([self._table_trees, repr(self.default_initializer)])
        return (
            f"{self.num_tables} tables, embedding_dim={list(self.column_dims)}, dtype={self.dtype},"
            f" key_type={self.key_type}, seed={self.seed}, padding_idx={self.padding_idx},"
            f" gradients_of_ranks={self.ranks.gradients!r}, comm_dtype={self.ranks.comm_dtype}, tables and"
            f" default_initializer {zlib.crc32(initializers.encode()):08x}{described(self.policies)}"
        )

    # The weight holds nothing: it is in no state dict. An empty one, as older ones have, is passed over.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self._weights_of_another is not None:
            return
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}weight"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self._weights_of_another is not None:
            return
        weight, given = self.weight, state_dict.get(f"{prefix}weight")
        super()._load_from_state_dict({**state_dict, f"{prefix}weight": weight.detach()}, prefix, *args)
        if isinstance(given, torch.Tensor) and given.numel():
            what = f"a state dict with {prefix}weight of shape {list(given.shape)}"
            args[-1].append(changes_no_row(self.name, what))  # as torch has it of tensors of another shape
        self.weight = weight  # load_state_dict(assign=True) has put another one in its place

    @property
    def _speaks(self) -> bool:
        """Whether warnings that are the same on all ranks are this one's to give."""
        return self.ranks is None or self.ranks.rank == 0

    def get_extra_state(self) -> torch.Tensor:
        """Entry of `state_dict()` for the rows: name and identity of a snapshot that has them as they are now.

        Saves one, named `state-<step>-<digits>`, unless the last one saved or loaded still has the rows as they are.
        These snapshots stay until `delete_snapshot`: a state dict that is kept, or was written to a file, may name any
        of them. `oneemb.snapshot_name` gives the name. With `process_group` every rank makes the call, and gets the
        same.

        Returns:
            uint8 [1024], of which a copy says the same.
        """
        return encode(self.named_snapshot())

    def named_snapshot(self) -> SnapshotName:
        """The same as a dict."""
        changes, name = self.store.changes, f"state-{self.store.step:012d}-{uuid.uuid4().hex[:8]}"
        saved = self._saved is not None and self._saved[1] == changes
        of_all = self.rank_snapshots.of_all("state_dict", (changes, saved, name))
        if not any(changes for changes, _, _ in of_all):
            return {"oneemb_snapshot": None}
        if not all(saved for _, saved, _ in of_all):
            self.save_snapshot(of_all[0][2])
        assert self._saved is not None
        return self._saved[0].copy()

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Load the snapshot that a state dict names. With `process_group` every rank makes the call, with the same one.

        Raises:
            ValueError: it names none.
            StorageError: it is not in `persistent_path`, or the one of that name there is another run's; the message
                says what is there.
        """
        snapshots, named = self.rank_snapshots, list[SnapshotName]()
        what = snapshots.words("load_state_dict")
        snapshots.together("load_state_dict", lambda: snapshots.agree(what, lambda: named.append(decode(state))))
        self.load_named(named[0])

    def holds(self, snapshot: SnapshotName) -> bool:
        """Whether the rows are those of this snapshot still, saved or loaded last."""
        return self._saved == (snapshot, self.store.changes)

    def load_named(self, snapshot: SnapshotName) -> None:
        """The same with what `named_snapshot` gave."""
        name = snapshot["oneemb_snapshot"]
        if name is None:
            self.clear()
        else:
            identity = snapshot.get("oneemb_identity")
            self.rank_snapshots.check_named(name, identity, f"a state dict of embedding {self.name!r}")
            self.load_snapshot(name)

    # ---- copies -----------------------------------------------------------------------------------------------------

    def copy_to(self, persistent_path: AnyPath, *, weights_only: bool = False) -> Self:
        """An embedding of its own at another path, with the options of this one and its rows as they are now.

        It has the optimizer's state and the step too, and no optimizer: one of the same class goes on with them. The
        snapshots of this embedding stay with it.

        Args:
            persistent_path: the folder of the copy's rows.
            weights_only: leave the optimizer's state behind: any optimizer begins anew, at step 0.

        Raises:
            ValueError: it is the path of this embedding.
            StorageError: the path is in use, cannot be made or written to, or its disk has no room for the rows.
        """
        return copied(self, persistent_path, weights_only=weights_only)

    # ---- rows that come and go --------------------------------------------------------------------------------------

    def erase(self, ids: torch.Tensor, table: int = 0) -> int:
        """Forget the rows of ids, weights and optimizer state: one that is looked up again begins anew. Snapshots keep
        the rows that they have.

        With `process_group` every rank makes the call, each with ids of its own; what any of them names is erased.

        Args:
            ids: integers of `key_type`, any shape; those without a row, or several times the same, are fine.
            table: of these ids.

        Returns:
            How many rows there were, of all ranks together.

        Raises:
            TypeError, ValueError: ids or table are not as above.
            StorageError: a lookup whose step is still to come holds one; nothing has changed.
        """
        return self._row_calls.erase(ids, table)

    def evict(self) -> dict[str, int]:
        """Let all rows leave that have expired, by age, norm or `expire_where`, as the tables' policies say. With
        `process_group` every rank makes the call.

        Returns:
            How many, of all ranks together, by reason: "expired", "norm", "where", and "capacity" of tables that were
            loaded with more rows than they may have.

        Raises:
            ValueError: `expire_where` or a clock raises, or gives what it is not to give. On this rank no row has left.
        """
        return self._row_calls.evict()

    def scores(self, ids: torch.Tensor, table: int = 0) -> torch.Tensor:
        """The scores of rows, uint64 of the shape of `ids`: those of least score leave first. 0 where there is no row.

        What a score means is the policy's: the number of the last lookup of `LRU`, of the step of `StepLRU`, uses of
        `LFU` (with a half-life the bits of a float64, log2(uses) + step / half_life), the power and the step of
        `MixedLFU`, the epoch and the lookup or the uses of `EpochLRU` and `EpochLFU`, what was given of `GivenScore`.
        With `process_group` every rank makes the call, each with ids of its own.

        Raises:
            TypeError, ValueError: ids or table are not as of `erase`, or there is no policy.
        """
        return self._row_calls.scores(ids, table)

    def set_scores(self, ids: torch.Tensor, scores: torch.Tensor, table: int = 0) -> int:
        """Give rows other scores; the next use changes them as the policy says, which of `GivenScore` is not at all.

        With `process_group` every rank makes the call, each with ids of its own, which may be none.

        Args:
            ids: integers of `key_type`, any shape, each once, on all ranks together; others are passed over.
            scores: uint64, or int64 from 0 up, of the shape of `ids`.

        Returns:
            How many of the ids have a row.

        Raises:
            TypeError, ValueError: `scores` is not as above, ids repeat, or there is no policy.
            StoreFullError: so many rows do not fit in the hot tier at a time.
        """
        return self._row_calls.set_scores(ids, scores, table)

    def set_epoch(self, epoch: int) -> None:
        """Let uses from now on be of this epoch, for `EpochLRU` and `EpochLFU`; snapshots keep it. With
        `process_group` every rank makes the call, with the same one.

        Args:
            epoch: 0 to 2^32 - 1, not before the present one. A new embedding is at 0.

        Raises:
            TypeError, ValueError: it is not as above, or there is no policy.
        """
        self._row_calls.set_epoch(epoch)

    def give_score(self, score: int, table: int = 0) -> None:
        """Let lookups give the rows of a table whose policy is `GivenScore(on_use=True)` this score from now on, and
        new rows where it is `GivenScore()`. With `process_group` every rank makes the call.

        Args:
            score: 0 to 2^64 - 1. It is not in snapshots; the scores of rows are.

        Raises:
            TypeError, ValueError: it is not as above, or the table's policy is another one.
        """
        policy = None if self.policies is None or not 0 <= table < self.num_tables else self.policies[table]
        if policy is None or not isinstance(policy.evict, GivenScore):
            raise ValueError(f"table {table} must have a policy with evict=GivenScore(...), got {policy}")
        self.store.give_score(table, GivenScore(score).new)

    # ---- rows, counters, memory -------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget every row and the optimizer's steps, and what policies have counted: all ids are new again. Snapshots
        stay.

        An embedding whose calls raise `BrokenStoreError` can be used again afterwards, as after `load_snapshot`.
        """
        snapshots = self.rank_snapshots
        snapshots.together("clear", lambda: snapshots.agree(snapshots.words("clear"), self._clear))

    def _clear(self) -> None:
        self.store.clear()
        self.drop_grads()
        self._saved = None

    def stats(self) -> EmbeddingStats:
        """Sizes now and counters since the tiers were made.

        Returns:
            `rows` (known ids of all tables; with `process_group` those that this rank owns, and those of replicated
            tables that it has), `replicated_rows` (the latter), `step`, `hit_rate` (share of unique keys found in the
            hot tier; of ids, in lookups without gradient on the device store), and a dict for each tier: `device`,
            `host`, `persistent`.
        """
        stats = self.store.stats()
        hot = stats.get("device", {"hits": 0, "misses": 0})
        hit_rate = hot["hits"] / max(1, hot["hits"] + hot["misses"])
        return cast(EmbeddingStats, {**stats, "hit_rate": hit_rate})

    def close(self) -> None:
        """Free memory, files and the lock on `persistent_path`. Rows that no snapshot holds are gone.

        `oneemb.release(path)` closes an embedding that no variable names any more, as happens in notebooks.
        """
        self.store.close()

    def extra_repr(self) -> str:
        return (
            f"{self.name!r}, tables={self.num_tables}, dim={self.embedding_dim},"
            f" dtype={str(self.dtype).removeprefix('torch.')}, store={type(self.store_options).__name__}"
        )

    def check_apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The weight as a conversion of the module, such as `to` or `half`, would make it. Changes nothing.

        Raises:
            RuntimeError, NotImplementedError: rows cannot be moved where the conversion moves its parameters.
        """
        moved = torch.empty(0, self.embedding_dim, dtype=torch.float32, device=self.store.loops.device)
        failure = None
        try:
            moved = fn(moved)
        except (AssertionError, RuntimeError) as error:  # This build of torch lacks the device that was asked for.
            failure = error
        if failure is not None:
            raise RuntimeError(f"embedding {self.name!r} cannot move: {_why_no_gpu(failure)}") from failure
        if moved.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"embedding {self.name!r} runs on the CPU and on GPUs of NVIDIA, asked to move to {moved.device}; keep"
                " it on the CPU and move its output: embedding(ids).to(device)"
            )
        if moved.device != self.store.loops.device and any(weight.grad is not None for weight in self.weights):
            raise RuntimeError(
                f"embedding {self.name!r} holds lookups whose update is still to come; step the optimizer, then move it"
            )
        return moved

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        try:
            moved = self.check_apply(fn)
        except RuntimeError as error:  # NotImplementedError is one too.
            # torch converts a model module by module and cannot ask all of them first, as a graph does.
            raise type(error)(
                f"{error}. Parts of the model that come before this embedding, if any do, are converted already; those"
                " on meta have lost their values: load them again"
            ) from error.__cause__
        if moved.dtype not in (torch.float32, self.dtype):
            warnings.warn(
                f"embedding {self.name!r} keeps its {self.dtype} rows where the model becomes {moved.dtype}: cast what"
                f" it gives, embedding(ids).to({moved.dtype}), or make it with that dtype",
                stacklevel=2,
            )
        if moved.device != self.store.loops.device:
            self.store.move_to(moved.device)
        # The weight keeps its dtype, as the rows that it stands for keep theirs.
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)

    def __deepcopy__(self, memo: object) -> Never:
        raise TypeError(
            f"embedding {self.name!r} cannot be copied by copy.deepcopy: its rows live in"
            f" {self.store.plan.persistent_path}, and a copy needs a path of its own: embedding.copy_to(path). Copy and"
            " average (AveragedModel) the dense modules alone; oneemb.AveragedEmbedding averages rows"
        )

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(
            f"embedding {self.name!r} cannot be pickled, by torch.save of a model or for another process: save its"
            " state_dict(), which names a snapshot, and make the embedding anew where that is loaded"
        )


Embedding = TypeVar("Embedding", bound=TableEmbedding)


def copied(
    embedding: Embedding, persistent_path: AnyPath, *, weights_only: bool, change: ChangeRows | None = None
) -> Embedding:
    """Do as `copy_to`; `change` changes the rows on their way."""
    if not isinstance(persistent_path, str | bytes | os.PathLike):
        got = f"{type(persistent_path).__name__} {persistent_path!r}"
        raise TypeError(f"persistent_path must be the folder of the copy's rows, got {got}")
    options = dataclasses.replace(embedding.store_options, persistent_path=(absolute_path(persistent_path),))
    taken = [embedding.store.plan.persistent_path, *embedding.store_options.persistent_path]
    if os.path.realpath(*options.persistent_path) in map(os.path.realpath, taken):
        raise ValueError(
            f"a copy of embedding {embedding.name!r} needs a path of its own, got that of its rows,"
            f" {embedding.store.plan.persistent_path}"
        )
    copy, ranks = type(embedding).__new__(type(embedding)), embedding.ranks
    TableEmbedding.__init__(
        copy, embedding.name, embedding.column_dims, embedding.dtype, embedding.key_type, embedding.tables, options,
        embedding.default_initializer, embedding.padding_idx, embedding.seed, embedding.store.threads.count,
        None if ranks is None else ranks.group,
        "mean" if ranks is None else ranks.gradients,
        torch.float32 if ranks is None else ranks.comm_dtype,
        embedding.policies, starts_empty=False,
    )  # fmt: skip
    try:
        copy.to(embedding.store.loops.device).train(embedding.training)
        copy.weight.requires_grad_(embedding.is_trained)
        embedding.store.copy_to(copy.store, with_state=not weights_only, change=change)
    except BaseException:
        copy.close()
        raise
    return copy


def embeddings_of(module: torch.nn.Module) -> dict[str, TableEmbedding]:
    """The embeddings below a module, by qualified name, each once."""
    found: dict[str, TableEmbedding] = embeddings_in(module)  # The graph package cannot import this class.
    return found


class MultiTableEmbedding(TableEmbedding):
    """Embedding tables of one width, keyed by (table, id), that grow with the ids they meet.

    `weight`, a parameter of shape [0, D], stands for all rows in `parameters()` and in param groups. So it is in the
    group of matrices where groups are made by `ndim`, counts as no parameter (`numel()` is 0; there are
    `stats()["rows"] * embedding_dim` weights), and what averages or copies parameters does nothing to rows: `copy_to`
    and `oneemb.AveragedEmbedding` do. Initializers of torch, `weight.data = ...` and other writes of values to it are
    errors: tables have initializers, and pretrained vectors come in by `oneemb.import_rows`. `state_dict()` holds no
    weight but the name of a snapshot.

    Args:
        name: names the embedding in errors and snapshots.
        embedding_dim: weights of a row, D, from 1 up.
        dtype: torch.float32, float16 or bfloat16. Optimizer state is float32 and arithmetic too.
        key_type: torch.int64 or int32, the dtype of ids.
        tables: one `make_table(...)` for each logical table.
        store_options: where rows live, made by one of `make_*_store_options`.
        default_initializer: for tables that name none; None = normal with mean 0 and standard deviation 0.05.
        padding_idx: an id that reads as zeros, is never stored and never updated; None = no such id.
        seed: a row's initial weights are a pure function of (seed, table, id).
        num_threads: threads that run the embedding's kernels; None = the cores there are. No result depends on it.
        process_group: of torch.distributed, such as `torch.distributed.group.WORLD`: its ranks own the rows together,
            each row one rank. Every one of them makes the embedding, with the same arguments, and the same lookups,
            steps, saves and loads in the same order, with a batch of its own. `persistent_path` is a folder that all
            ranks see, in which each has a subfolder, or a list of folders, one a rank. None = this process has all
            rows.
        gradients_of_ranks: "mean" over the ranks, as DistributedDataParallel has it of dense gradients, or "sum".
        comm_dtype: torch.float32, float16 or bfloat16: rows and gradients are rounded to it on their way between ranks;
            rows whose `dtype` is no wider travel as they are. Gradients are summed in float32. Beyond 65,504 those of
            float16 are infinite, and the step is refused or, with a GradScaler, skipped. Where owners sum parts of long
            bags the sums are rounded in place of rows. Rows of replicated tables are rounded too, as gradients always
            are, but where all tables of the embedding are replicated.
        policy: which rows tables keep, a `oneemb.policies.RowPolicy` for all or a list of one for each; None = all
            rows. With `process_group` the same on all ranks; capacities are of the rows that each owns.

    Raises:
        TypeError, ValueError: an argument is not as above.
        StorageError: `persistent_path` cannot be made or written to.
        ImportError: the server of the store options needs a package that is not installed.

    Example:
        >>> import tempfile, torch, oneemb
        >>> embedding = oneemb.MultiTableEmbedding(
        ...     "clicks", embedding_dim=4, dtype=torch.float32, key_type=torch.int64,
        ...     tables=[oneemb.make_table(oneemb.make_constant_initializer(0.5)), oneemb.make_table()],
        ...     store_options=oneemb.make_device_mem_store_options(tempfile.mkdtemp()),
        ... )
        >>> rows = embedding(torch.tensor([[-7, 12], [8, 12]]))
        >>> rows.shape, rows[0, 0].tolist()
        (torch.Size([2, 2, 4]), [0.5, 0.5, 0.5, 0.5])

    Reference: OneFlow's one_embedding.MultiTableEmbedding, whose rows are keyed by the id alone.
    """

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        dtype: torch.dtype,
        key_type: torch.dtype,
        tables: Sequence[TableOptions],
        store_options: StoreOptions,
        default_initializer: Initializer | None = None,
        padding_idx: int | None = None,
        seed: int = 0,
        num_threads: int | None = None,
        process_group: "torch.distributed.ProcessGroup | None" = None,
        gradients_of_ranks: Literal["mean", "sum"] = "mean",
        comm_dtype: torch.dtype = torch.float32,
        policy: RowPolicy | Sequence[RowPolicy] | None = None,
    ):
        super().__init__(
            name, [embedding_dim], dtype, key_type, tables, store_options, default_initializer, padding_idx, seed,
            num_threads, process_group, gradients_of_ranks, comm_dtype, policy,
        )  # fmt: skip


class MultiTableMultiColumnEmbedding(TableEmbedding):
    """Embedding tables whose rows are several columns side by side, each with an initializer of its own.

    Args:
        embedding_dim: the width of each column, a list; a lookup gives their sum, concatenated. A table made with
            one column uses it for all of them.

    The other arguments are those of `MultiTableEmbedding`.

    Reference: OneFlow's one_embedding.MultiTableMultiColumnEmbedding.
    """

    def __init__(
        self,
        name: str,
        embedding_dim: Sequence[int],
        dtype: torch.dtype,
        key_type: torch.dtype,
        tables: Sequence[TableOptions],
        store_options: StoreOptions,
        default_initializer: Initializer | None = None,
        padding_idx: int | None = None,
        seed: int = 0,
        num_threads: int | None = None,
        process_group: "torch.distributed.ProcessGroup | None" = None,
        gradients_of_ranks: Literal["mean", "sum"] = "mean",
        comm_dtype: torch.dtype = torch.float32,
        policy: RowPolicy | Sequence[RowPolicy] | None = None,
    ):
        if not isinstance(embedding_dim, list | tuple):
            raise TypeError(f"embedding_dim must be a list of column widths, got {embedding_dim!r}")
        super().__init__(
            name, embedding_dim, dtype, key_type, tables, store_options, default_initializer, padding_idx, seed,
            num_threads, process_group, gradients_of_ranks, comm_dtype, policy,
        )  # fmt: skip


class _RowsOf(weakref.ref):
    """The embedding whose rows a weight stands for."""

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(
            "the weight of an embedding, or an optimizer or a list that holds it, cannot be pickled: save"
            " state_dict() of the model and of the optimizer"
        )


def _in_ddp(embedding: TableEmbedding) -> bool:
    """Whether DistributedDataParallel runs, and counts a weight of the embedding among the parameters whose gradients
    it sums over ranks."""
    ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None:
        return False
    return any(parameter is weight for parameter in ddp._module_parameters for weight in embedding.weights)


def _why_no_gpu(failure: BaseException) -> str:
    """Reason why no GPU can be used, and what to install, as far as known."""
    from oneemb.kernels.launch import Gpu

    try:
        Gpu()
    except (ImportError, RuntimeError) as reason:
        return str(reason)
    return str(failure)
