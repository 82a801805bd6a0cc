"""Embedding modules: `MultiTableEmbedding` and `MultiTableMultiColumnEmbedding`."""

import dataclasses
import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

import torch

import oneemb
import oneemb.training.step_hooks  # noqa: F401  # so that torch optimizers train rows
from oneemb.checkpoints.rank_snapshots import RankSnapshots
from oneemb.embeddings.data_parallel import check_lookup_in_ddp
from oneemb.embeddings.embedding_arguments import (
    DEFAULT_INITIALIZER,
    DTYPE_NAMES,
    check_arguments,
    initial_rows,
    own_constructor,
    policies_of,
    pretrained,
    rank_folders,
    store_plan,
    temporary_folder,
)
from oneemb.embeddings.lookups import LocalLookups, RankLookups
from oneemb.embeddings.row_calls import RowCalls
from oneemb.embeddings.snapshot_calls import SnapshotCalls
from oneemb.embeddings.stats import EmbeddingStats, metrics_of
from oneemb.embeddings.summary import facts_of, html_of, text_of
from oneemb.embeddings.unsaved_rows import take_folder, warn_of_lost_rows
from oneemb.flags import check_flags
from oneemb.graph.arguments import Lookup
from oneemb.graph.building import building_now
from oneemb.graph.modules import embeddings_in
from oneemb.graph.ops.keys import BagArguments, bags_of, columns_of, one_table, pooling_of
from oneemb.graph.ranks import ranks_of
from oneemb.graph.tracers import hidden_from_modes, refuse_tracers, uncompiled
from oneemb.kernels.threads import Threads
from oneemb.options import Initializer, StoreOptions, TableOptions, make_device_mem_store_options
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.fs import AnyPath, absolute_path
from oneemb.storage.policies.row_policy import RowPolicy
from oneemb.storage.store_rows import copy_rows
from oneemb.storage.tiered_rows import ChangeRows


class TableEmbedding(SnapshotCalls, RowCalls):
    """Base class of both embedding modules: T tables, whose rows have C columns side by side."""

    def __init__(
        self,
        name: str,
        embedding_dim: int | Sequence[int],
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
        keep_state_snapshots: int | None = None,
    ):
        super().__init__()
        if keep_state_snapshots is not None and (type(keep_state_snapshots) is not int or keep_state_snapshots < 1):
            given = repr(keep_state_snapshots)
            raise ValueError(f"keep_state_snapshots must be an int of at least 1, or None, got {given}")
        self.keep_state_snapshots = keep_state_snapshots
        dim_C = self._columns(embedding_dim)
        self.ranks = ranks_of(process_group, gradients_of_ranks, comm_dtype)
        """The ranks that own the rows together, or this process alone."""
        check_arguments(
            name, dim_C, dtype, key_type, tables, store_options, default_initializer, padding_idx, seed,
            self.ranks.size,
        )  # fmt: skip
        self.remove_folder = None
        self._counted: dict[str, int] = {}
        """Values of the counters at the last call of `metrics`."""
        self._one_table: dict[tuple[int, torch.device], torch.Tensor] = {}
        if not store_options.persistent_path:
            folder, self.remove_folder = temporary_folder(self)
            folders = self.ranks.all_gather(f"make temporary folders of {name!r}", lambda: folder)
            store_options = dataclasses.replace(store_options, persistent_path=tuple(folders))
        self.policies = policies_of(policy, tables, store_options, self.ranks)
        """Policy of each table; None = all tables keep all rows."""
        self.name = name
        self.column_dims = tuple(dim_C)
        self.embedding_dim = sum(dim_C)
        self.dtype, self.key_type = dtype, key_type
        self.tables = tuple(tables)
        self.num_tables = len(self.tables)
        replicated = all(table.replicate for table in self.tables)
        self.lookups = LocalLookups() if self.ranks.alone or replicated else RankLookups(self.ranks)
        """Makes the lookups: within this process if it has all rows or copies of all rows, otherwise with the ranks."""
        self.store_options = store_options
        self.default_initializer = default_initializer
        self.padding_idx, self.seed = padding_idx, seed
        if not self.ranks.alone:
            self.ranks.name, self.ranks.made = repr(name), self._made()
        plan = store_plan(name, store_options, self.tables, self.ranks)
        self.store = EmbeddingStore(
            dim=self.embedding_dim,
            dtype=DTYPE_NAMES[dtype],
            initial=initial_rows(seed, dim_C, self.tables, default_initializer or DEFAULT_INITIALIZER),
            plan=plan,
            threads=Threads(num_threads),
            policies=self.policies,
            name=name,
            refusal=take_folder(plan.persistent_path, name, self.ranks.size),
        )
        self.store.holder.owner = weakref.ref(self)
        self.rank_snapshots = RankSnapshots(
            name, self.store, store_options.persistent_path, rank_folders(store_options, self.ranks), self.ranks
        )
        """Saves and loads snapshots, together with the other ranks."""
        self.begin_weight()

    @classmethod
    def from_pretrained(
        cls,
        weight: torch.Tensor | Sequence[torch.Tensor],
        ids: torch.Tensor | Sequence[torch.Tensor] | None = None,
        *,
        freeze: bool = True,
        name: str = "pretrained",
        store_options: StoreOptions | None = None,
        **more: Any,
    ) -> Self:
        """An embedding with given rows, as `torch.nn.Embedding.from_pretrained`. Other ids may be looked up, too.

        Args:
            weight: rows of a table, float32, float16 or bfloat16 [rows, D]; or a list, one tensor for each table.
            ids: id of each row, integers [rows]; or a list, one tensor for each table; None = 0 to rows - 1.
            freeze: if True, rows are not trained: the weight has `requires_grad` False.
            name: name of the embedding in errors and snapshots.
            store_options: storage of the rows; None = in memory, with a temporary folder.
            more: further arguments of the class, such as `padding_idx`, `seed` or `tables`. For a class with columns,
                `embedding_dim` lists their widths, whose sum is D; without it there is one column.

        Raises:
            TypeError, ValueError: weights or ids are not as above, ids repeat, or a weight is not finite.

        Example:
            >>> import torch, oneemb
            >>> vectors = oneemb.MultiTableEmbedding.from_pretrained(torch.eye(3), torch.tensor([7, -1, 40]))
            >>> vectors(torch.tensor([40, 7])).tolist()
            [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
        """
        check_flags(freeze=freeze)
        options, given = pretrained(weight, ids, issubclass(cls, MultiTableMultiColumnEmbedding), more)
        embedding = cls(name, store_options=store_options or make_device_mem_store_options(), **options)
        try:
            for table, rows in enumerate(given):
                oneemb.import_rows(embedding, rows, table=table)
        except BaseException:
            embedding.close()
            raise
        return embedding.requires_grad_(not freeze)

    def _columns(self, embedding_dim: Any) -> Sequence[int]:
        """The width of each column. Any: a user's value, which `check_arguments` checks."""
        raise NotImplementedError

    # ---- lookups ----------------------------------------------------------------------------------------------------

    # torch.compile of a model around the embedding must not look into the loops of a lookup.
    @uncompiled
    def forward(
        self,
        ids: torch.Tensor,
        table_ids: torch.Tensor | int | None = None,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        pooling: Literal["sum", "mean", "max"] | None = None,
        *,
        columns: Sequence[int] | None = None,
        include_last_offset: bool = True,
    ) -> torch.Tensor:
        """The rows of ids, one for each id or, with `offsets` or `pooling`, one for each bag of ids.

        In training mode unknown ids are inserted with their initial values, also under `torch.no_grad()`; in eval mode
        they read as the same values and nothing is inserted. So call `eval()` before an evaluation.

        Args:
            ids: integers of `key_type`, on the device of the embedding; every integer is legal. Shape [B, T]: column t
                is looked up in table t. With one table, or with `table_ids`, any shape. With `offsets`, [N]. With
                `pooling` and without `offsets`, the last dimension is a bag: [B, L] with one table, [B, T, L] with T
                tables, any shape with `table_ids`; fill short bags with `padding_idx`.
            table_ids: table of each id, 0 to T-1: integers whose shape broadcasts to that of `ids`, or an int, the
                table of all ids. With bags, table of each bag: [P], or the shape of `ids` without L, or an int.
            offsets: int64 [P + 1], from 0 to N: bag p holds ids[offsets[p]:offsets[p + 1]], any number of ids. Without
                `table_ids`, P = B * T and bag p belongs to sample p // T and table p % T.
            per_sample_weights: float32 of the shape of `ids`, for bags: each id's row is multiplied by its factor
                before the sum. It may have a gradient.
            pooling: "sum" (the same as None if `offsets` is given), "mean" or elementwise "max" of the rows of a bag.
                Ids equal to `padding_idx` are left out. As in `torch.nn.EmbeddingBag`, the gradient of a maximum goes
                to the first id that has it; NaN is the maximum only if the first id of the bag has NaN.
            columns: with `offsets`, the table of each of C columns, 0 to T-1, none below the one before; columns may
                share a table. Then P = C * B, and bag p belongs to column p // B and sample p % B.
            include_last_offset: whether `offsets` ends with N, as in `torch.nn.EmbeddingBag`, whose default is False.
                If False, `offsets` is int64 [P].

        Returns:
            Rows [*ids.shape, D] of the embedding's dtype, which `model.half()` and the like do not change; zeros for
            ids equal to `padding_idx`. For bags given by `offsets`: [B, T, D]; [B, C, D] with `columns`; [P, D] with
            `table_ids` or one table. For bags in the last dimension: [*ids.shape[:-1], D]. Zeros for an empty bag. Sums
            and means of bags are computed in float32 and rounded once.

        Raises:
            TypeError, ValueError: dtype, device, shape or range is not as above; no id was inserted.
            StoreFullError: the rows of the step do not fit in the cache, or the store's capacity is reached; no id was
                inserted.
        """
        is_seen = refuse_tracers(self, ids)
        has_gradient = is_trained = torch.is_grad_enabled() and self.is_trained
        if not is_trained and isinstance(per_sample_weights, torch.Tensor):
            has_gradient = torch.is_grad_enabled() and per_sample_weights.requires_grad
        if has_gradient and not self.training and self.store.store_lock.forked:
            has_gradient = is_trained = False  # A forked child may read rows, but not train them.
        if is_trained:
            check_lookup_in_ddp(self)
        bags: BagArguments | None = None
        try:
            if table_ids is not None:
                table_ids = one_table(table_ids, self.num_tables, ids, self._one_table)
            if pooling is not None or include_last_offset is not True:
                bags = bags_of(
                    ids, table_ids, offsets, per_sample_weights, pooling, columns, self.num_tables, include_last_offset
                )
                ids, table_ids, offsets, per_sample_weights, _ = bags
            pools = "sum" if pooling is None else pooling_of(pooling, offsets)
        except (TypeError, ValueError) as error:
            if self.lookups.asks_ranks and building_now() is None:  # Within `build`, the graph reports errors.
                self.ranks.fail(f"look up {self.name!r}", error)
            raise
        tables_C = None if columns is None else columns_of(columns)
        lookup = Lookup(ids, table_ids, offsets, tables_C, per_sample_weights, pools)
        rows = self._looked_up(lookup, has_gradient, is_seen)
        return rows if bags is None else bags.shaped(rows)

    def _looked_up(self, lookup: Lookup, has_gradient: bool, is_seen: bool) -> torch.Tensor:
        if is_seen:
            with hidden_from_modes():
                return self._looked_up(lookup, has_gradient, False)
        if (building := building_now()) is not None:
            look_up = functools.partial(self.lookups.look_up, self, lookup, self.training, has_gradient)
            return building.look_up(self, lookup, has_gradient, look_up)
        if self.training and not has_gradient and self.store.step:
            return self.look_up_without_gradient(lookup)
        return self.lookups.look_up(self, lookup, self.training, has_gradient)

    @uncompiled
    def read(self, ids: torch.Tensor, table_ids: torch.Tensor | int | None = None) -> torch.Tensor:
        """The rows of ids, as in eval mode: without a gradient, and without inserting ids, in any mode of the module.

        Args:
            ids, table_ids: as for `forward`.
        """
        refuse_tracers(self, ids)
        with hidden_from_modes():
            tables = one_table(table_ids, self.num_tables, ids, self._one_table)
            return self.lookups.look_up(self, Lookup(ids, tables), False, False)

    if TYPE_CHECKING:
        __call__ = forward  # Editors see `forward` where torch.nn.Module has Callable[..., Any].

    # ---- copies -----------------------------------------------------------------------------------------------------

    def copy_to(self, persistent_path: AnyPath, *, weights_only: bool = False) -> Self:
        """Independent copy of the embedding at another path, with the same options and the current rows.

        The copy has the optimizer state of the rows and the step count, so an optimizer of the same class continues
        with them. Snapshots are not copied.

        Args:
            persistent_path: folder of the copy's rows.
            weights_only: if True, optimizer state is not copied: any optimizer starts anew, at step 0.

        Raises:
            ValueError: `persistent_path` is the path of this embedding.
            StorageError: the path is in use, cannot be made or written to, or its disk has no room for the rows.
        """
        return copied(self, persistent_path, weights_only=weights_only)

    # ---- rows, counters, memory -------------------------------------------------------------------------------------

    def stats(self) -> EmbeddingStats:
        """Current sizes, and counters since the tiers were made.

        Returns:
            `rows` (number of known ids of all tables; with `process_group`, of the rows that this rank owns and of its
            copies of rows of replicated tables), `replicated_rows` (number of these copies), `step`, `hit_rate` (share
            of unique keys found in the hot tier; share of ids for lookups without gradient on the device store), and a
            dict for each tier: `device`, `host`, `persistent`.

        Raises:
            StorageError: the embedding is closed, or broken.
        """
        self.store.check_open()
        stats = self.store.stats()
        hot = stats.get("device", {"hits": 0, "misses": 0})
        hit_rate = hot["hits"] / max(1, hot["hits"] + hot["misses"])
        return cast(EmbeddingStats, {**stats, "hit_rate": hit_rate})

    def metrics(self) -> dict[str, float]:
        """Figures of a training run for loggers, as a flat dict. Shares are of the lookups since the last call.

        Returns:
            `rows` and `step`, as in `stats`; `hit_rate`, the share of unique keys that were in the hot tier;
            `served_without_disk`, the share of unique keys whose rows were not read from the persistent table or a
            server; `memory_bytes` and `disk_bytes` of all tiers; and since the tiers were made, `rows_evicted` from
            caches, `rows_read` from and `rows_written` to the persistent table or server, and `rows_left`, rows evicted
            by a policy. With `process_group`, figures of this rank. Without lookups since the last call, shares are 1.

        Example:
            >>> import torch, oneemb
            >>> embedding = oneemb.MultiTableEmbedding(
            ...     "items", 4, torch.float32, torch.int64, [oneemb.make_table()],
            ...     oneemb.make_device_mem_store_options())
            >>> rows = embedding(torch.tensor([1, 2, 2]))
            >>> embedding.metrics()["rows"], embedding.metrics()["hit_rate"]
            (2, 1.0)
        """
        figures, self._counted = metrics_of(self.stats(), self._counted)
        return figures

    def close(self) -> None:
        """Free memory, files and the lock on `persistent_path`. Rows that no snapshot holds are lost; a temporary
        folder is removed. The end of a `with embedding:` block calls it.

        `oneemb.release(path)` closes an embedding that no variable names any more, as happens in notebooks.

        Warns:
            UnsavedRowsWarning: trained rows are lost. An embedding without a `persistent_path` never warns.
        """
        warn_of_lost_rows(self)
        self.store.close()
        if self.remove_folder is not None:
            self.remove_folder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # Then names of modules are None.
            warn_of_lost_rows(self, garbage=True)

    def explain(self) -> str:
        """Text of sizes and counters, a fact in each line. Times are in `explain` of a graph."""
        return text_of(facts_of(self))

    def extra_repr(self) -> str:
        return f"{self.name!r}, " + ", ".join(f"{name}={fact}" for name, fact in facts_of(self).items())

    def _repr_html_(self) -> str:
        return html_of(f"{type(self).__name__} {self.name!r}", facts_of(self))


Embedding = TypeVar("Embedding", bound=TableEmbedding)


def copied(
    embedding: Embedding, persistent_path: AnyPath, *, weights_only: bool, change: ChangeRows | None = None
) -> Embedding:
    """Result of `embedding.copy_to`. `change` changes the copied rows in place."""
    if not isinstance(persistent_path, str | bytes | os.PathLike):
        got = f"{type(persistent_path).__name__} {persistent_path!r}"
        raise TypeError(f"persistent_path must be the folder of the copy's rows, got {got}")
    options = dataclasses.replace(embedding.store_options, persistent_path=(absolute_path(persistent_path),))
    taken = [embedding.store.plan.persistent_path, *embedding.store_options.persistent_path]
    if os.path.realpath(*options.persistent_path) in map(os.path.realpath, taken):
        raise ValueError(
            f"a copy of embedding {embedding.name!r} needs a path of its own, got the path of the embedding,"
            f" {embedding.store.plan.persistent_path}"
        )
    copy, ranks = type(embedding).__new__(type(embedding)), embedding.ranks
    several = isinstance(embedding, MultiTableMultiColumnEmbedding)
    TableEmbedding.__init__(
        copy, embedding.name, embedding.column_dims if several else embedding.embedding_dim, embedding.dtype,
        embedding.key_type, embedding.tables, options, embedding.default_initializer, embedding.padding_idx,
        embedding.seed, embedding.store.threads.count, ranks.group, ranks.gradients,
        ranks.comm_dtype, embedding.policies, embedding.keep_state_snapshots,
    )  # fmt: skip
    copy.may_be_empty = False
    try:
        copy.to(embedding.store.backend.device).train(embedding.training)
        copy.weight.requires_grad_(embedding.is_trained)
        copy_rows(embedding.store, copy.store, with_state=not weights_only, change=change)
    except BaseException:
        copy.close()
        raise
    return copy


def embeddings_of(module: torch.nn.Module) -> dict[str, TableEmbedding]:
    """{qualified name: embedding} below a module; a shared embedding occurs once."""
    return cast("dict[str, TableEmbedding]", embeddings_in(module))  # The graph package cannot import this class.


@own_constructor
class MultiTableEmbedding(TableEmbedding):
    """Embedding tables of one width, keyed by (table, id), that get a row for each new id in training.

    Methods in addition to those of `torch.nn.Module`:

    - rows of ids: the call, `read`, `contains`, `ids`, `num_rows`; `from_pretrained` makes an embedding of given rows
    - snapshots: `save_snapshot`, `save_delta`, `load_snapshot`, `snapshots`, `delete_snapshot`, `copy_to`
    - figures: `print`, `metrics`, `stats`
    - removal of rows: `erase`, `evict`, `clear`; for policies `scores`, `set_scores`, `set_epoch`, `give_score`
    - the end: `detach_optimizer`, `close`, `with embedding:`

    `weight`, a parameter of shape [0, D], stands for all rows in `parameters()` and in param groups, so it is among the
    matrices where groups are made by `ndim`. Its `numel()` is 0 (there are `stats()["rows"] * embedding_dim` weights).
    Code that averages or copies parameters does nothing to rows: use `copy_to` and `oneemb.AveragedEmbedding`. Torch's
    initializers, `weight.data = ...` and other writes of values to the weight are errors: tables have initializers, and
    `oneemb.import_rows` imports pretrained vectors. `state_dict()` holds the name of a snapshot, not the weights.

    Args:
        name: name of the embedding in errors and snapshots.
        embedding_dim: number of weights of a row, D, at least 1.
        dtype: dtype of the weights: torch.float32, float16 or bfloat16. Optimizer state and arithmetic are float32.
        key_type: dtype of ids: torch.int64 or int32.
        tables: one `make_table(...)` for each logical table.
        store_options: storage of the rows, made by one of `make_*_store_options`.
        default_initializer: initializer of tables that name none; None = normal, mean 0, standard deviation 0.05.
        padding_idx: id that reads as zeros, and is never stored or updated; None = no such id.
        seed: initial weights of a row are a pure function of (seed, table, id).
        num_threads: number of threads of the kernels; None = number of cores. No result depends on it.
        process_group: group of torch.distributed, such as `torch.distributed.group.WORLD`, whose ranks own the rows
            together; each row has one owner. Every rank must make the embedding with the same arguments, and the same
            lookups, steps, saves and loads in the same order, with its own batches. `persistent_path` is then a folder
            that all ranks see, in which each rank has a subfolder, or a list with one folder for each rank. None = this
            process owns all rows.
        gradients_of_ranks: reduction of gradients over the ranks: "mean", as DistributedDataParallel does with dense
            gradients, or "sum".
        comm_dtype: dtype of rows and gradients in messages between ranks: torch.float32, float16 or bfloat16. Rows of
            the same or a smaller size are sent unrounded. Gradients are summed in float32. With float16, gradients
            beyond 65,504 are infinite, and the step is refused or, with a GradScaler, skipped. Where owners sum parts
            of long bags, the sums are rounded in place of the rows. Gradients of replicated tables are rounded too, and
            so are their rows unless all tables of the embedding are replicated.
        policy: rule for the rows that tables keep: a `oneemb.policies.RowPolicy` for all tables, or a list with one for
            each; None = keep all rows. With `process_group`, it must be the same on all ranks, and a capacity limits
            the rows that one rank owns.
        keep_state_snapshots: number of snapshots made by `state_dict()` to keep in addition to the newest, so that a
            job that calls `state_dict()` often does not fill the disk, yet the previous state dict stays valid until
            the new one is written. State dicts that name a deleted snapshot cannot be loaded. None = keep all.

    Raises:
        TypeError, ValueError: an argument is not as above.
        StorageError: `persistent_path` cannot be made or written to.
        LockedError: an embedding of this process has the path, with rows that no snapshot holds. With several ranks
            the first lookup raises it instead, whether or not a snapshot holds the rows.
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

    def _columns(self, embedding_dim: Any) -> Sequence[int]:
        return [embedding_dim]


@own_constructor
class MultiTableMultiColumnEmbedding(TableEmbedding):
    """Embedding tables whose rows have several columns side by side, each with its own initializer.

    Args:
        embedding_dim: list of the widths of the columns. A lookup returns the columns concatenated; D is the sum of the
            widths. A table that is made with one column uses its initializer for all columns.

    The other arguments are those of `MultiTableEmbedding`.

    Reference: OneFlow's one_embedding.MultiTableMultiColumnEmbedding.
    """

    def _columns(self, embedding_dim: Any) -> Sequence[int]:
        if not isinstance(embedding_dim, list | tuple):
            raise TypeError(f"embedding_dim must be a list of column widths, got {embedding_dim!r}")
        return embedding_dim
