"""Embedding modules: what users assign to a model and look ids up in."""

import json
import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from oneemb.graph import ops
from oneemb.graph.ops.lookup import DTYPES
from oneemb.graph.row_optimizers import RowOptimizer
from oneemb.kernels import init_rows
from oneemb.kernels.hash_index import TABLE_MAX
from oneemb.kernels.threads import Threads
from oneemb.options import (
    CachedSsdStoreOptions,
    ColumnOptions,
    ConstantInitializer,
    DeviceMemStoreOptions,
    Initializer,
    NormalInitializer,
    StoreOptions,
    TableOptions,
    TruncNormalInitializer,
    UniformInitializer,
    normal_cdf,
    to_json,
)
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.row_store import StorageError
from oneemb.storage.step_lock import between_steps
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.table.snapshot_reader import read_snapshot_info
from oneemb.storage.tiers.stack import StorePlan

__all__ = ["MultiTableEmbedding", "MultiTableMultiColumnEmbedding"]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DEFAULT_INITIALIZER = NormalInitializer(0.0, 0.05)
_STATE_KEY, _IDENTITY_KEY = "oneemb_snapshot", "oneemb_identity"


class _TableEmbedding(torch.nn.Module):
    """What both embedding modules are: T tables whose rows are C columns side by side."""

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
    ):
        super().__init__()
        _check_arguments(name, dim_C, dtype, key_type, tables, store_options, default_initializer, padding_idx, seed)
        self.name = name
        self.embedding_dim = sum(dim_C)
        self.dtype = dtype
        self.key_type = key_type
        self.tables = tuple(tables)
        self.num_tables = len(self.tables)
        self.store_options = store_options
        self.padding_idx = padding_idx
        self.seed = seed
        self.store = EmbeddingStore(
            dim=self.embedding_dim,
            dtype=_NAMES[dtype],
            initial=_initial_rows(seed, dim_C, self.tables, default_initializer or _DEFAULT_INITIALIZER),
            plan=_store_plan(store_options),
            threads=Threads(num_threads),
        )
        self.weight = torch.nn.Parameter(torch.zeros(1))
        """Stands for all rows in parameter lists, so that any torch optimizer can be made on it; never has a grad."""
        self.weight.embedding_name = name  # type: ignore[attr-defined]
        self.row_optimizer: RowOptimizer | None = None
        """Whose state the rows hold; set by `oneemb.Optimizer` and `TrainGraph.add_optimizer`."""
        self.pending: list[ops.Lease] = []
        """Lookups whose gradient has come and whose update has not, in the order the gradients came."""
        self._saved: tuple[dict[str, str], int] | None = None
        """What names the snapshot that holds the rows as they are, and at which change."""
        if existing := self.store.snapshots():
            warnings.warn(
                f"embedding {name!r} starts empty, though {self.store.plan.persistent_path} holds the snapshots"
                f" {', '.join(map(repr, existing))}; load_snapshot(name) goes on from one",
                stacklevel=3,
            )

    # ---- lookups ----------------------------------------------------------------------------------------------------

    # A model around it may be compiled: torch.compile goes around the lookup, and not into the loops below it. This is
    # torch.compiler.disable, as torch.optim has it: what takes a second to import is imported by the first call.
    @torch._disable_dynamo
    def forward(
        self,
        ids: torch.Tensor,
        table_ids: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        pooling: str = "sum",
    ) -> torch.Tensor:
        """Look ids up, one by one or, with `offsets`, pooled in bags.

        In training mode unknown ids are inserted, beginning with their initial values; in eval mode they read as
        those same values and nothing is inserted.

        Args:
            ids: integers of `key_type`, where the embedding is. Shape [B, T]: column t is looked up in table t. With
                one table, or with `table_ids`, any shape. Every integer is legal.
                With `offsets`, [N].
            table_ids: the table, 0 to T-1, of each id: integers of the shape of `ids` or one that broadcasts to it.
                With `offsets`, the table of each bag, [P], or one for all bags.
            offsets: int64 [P + 1], from 0 to N: bag p holds ids[offsets[p]:offsets[p + 1]], any number of ids.
                Without `table_ids` bags lie sample by sample: P = B * T, and bag p is looked up in table p % T.
            per_sample_weights: float32 [N]; each id's weights are multiplied by it before a sum. It gets a gradient.
            pooling: "sum" or "mean" of a bag's ids. Those equal to `padding_idx` count for nothing.

        Returns:
            [*ids.shape, D] of the embedding's dtype, which `model.half()` and the like do not change; zeros where an id
            equals `padding_idx`. Of bags, [B, T, D], or [P, D] with `table_ids` or one table; zeros for an empty bag.
            A bag's rows are summed in float32 and rounded once.

        Raises:
            TypeError, ValueError: dtype, device, shape or range is not as above; nothing was inserted.
            StoreFullError: the rows of the step do not fit in the cache, or capacity is reached; nothing was inserted.
        """
        has_gradient = self.training and torch.is_grad_enabled() and self.weight.requires_grad
        if not has_gradient and offsets is None and per_sample_weights is None and pooling == "sum":
            read = ops.read_ids(
                self.store, ids, table_ids, self.num_tables, self.key_type, self.padding_idx, inserts=self.training
            )
            if read is not None:
                return read
        keys = ops.unique_keys(
            ids, table_ids, self.num_tables, self.key_type, self.padding_idx, offsets, threads=self.store.threads
        )
        ops.check_pooling(keys, per_sample_weights, pooling)
        if not self.training:
            return ops.peek(self.store, keys, per_sample_weights, pooling)
        lease = ops.acquire(self.store, keys, self.pending)
        rows = ops.gather(lease, self.weight, per_sample_weights, pooling)
        if not rows.requires_grad:
            ops.release([lease])
        elif self.row_optimizer is None and self.weight.requires_grad:
            rows.register_hook(self._refuse_gradient)
        return rows

    def _refuse_gradient(self, grad: torch.Tensor) -> None:
        raise RuntimeError(
            f"a gradient reached embedding {self.name!r}, which has no optimizer; make one with"
            " oneemb.Optimizer(torch_optimizer, [embedding]) or TrainGraph.add_optimizer before the lookup, or freeze"
            " the embedding with requires_grad_(False)"
        )

    # ---- optimizer --------------------------------------------------------------------------------------------------

    def attach(self, row_optimizer: RowOptimizer) -> None:
        """Give every row the state of this optimizer. Users call `oneemb.Optimizer` or `TrainGraph.add_optimizer`.

        Raises:
            ValueError: `size_factor` or `storage_dim` of the store options is too small for it.
            StorageError: the rows already hold another optimizer's state, or the path is in use.
        """
        need = row_optimizer.state_width(self.embedding_dim)
        state = np.zeros(_state_width(self.store_options, self.embedding_dim, row_optimizer.name, need), np.float32)
        state[:need] = row_optimizer.initial_state(self.embedding_dim)
        self.store.attach(row_optimizer.name, state)
        self.row_optimizer = row_optimizer

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def save_snapshot(self, name: str, *, overwrite: bool = False) -> None:
        """Save all rows and the optimizer's state, durably, under a name in `persistent_path`.

        The snapshot is there as a whole when the call returns, or not at all. Later training does not change it.

        Args:
            name: any text; it names a file, percent-encoded.
            overwrite: replace a snapshot of this name, atomically.

        Raises:
            StorageError: the name is taken or not a name, or the disk fails; the snapshots there are whole.
        """
        changes = self.store.changes
        info = self.store.save_snapshot(name, self._describe(), overwrite=overwrite)
        self._saved = {_STATE_KEY: info.name, _IDENTITY_KEY: info.identity}, changes

    def load_snapshot(self, name: str) -> None:
        """Go on from a snapshot: its rows, optimizer state and step take the place of those here.

        A snapshot without state, such as pretrained vectors, gets the state of new rows and begins at step 0.

        Raises:
            StorageError: there is no snapshot of this name (the message names those there are), or its rows have
                another width, dtype or optimizer, or are of more tables; the rows here are as they were.
            KeyboardInterrupt: the rows here are as they were; or, where some had been replaced, every call raises
                `BrokenStoreError` until another load.
        """
        changed = between_steps((self.store.step_lock,), "load_snapshot", lambda: self._load(name))
        if changed:
            warnings.warn(
                f"snapshot {name!r} was saved with other {' and '.join(changed)}: ids that it does not hold begin as"
                f" embedding {self.name!r} says, not as they would have begun",
                stacklevel=2,
            )

    def _load(self, name: str) -> list[str]:
        """Returns what this embedding has otherwise than the one that saved the snapshot."""
        info = read_snapshot_info(self.store.plan.persistent_path, name)
        saved = self._check_tables(info)
        whole = self.store.load_snapshot(name)
        own = self._describe()
        own["tables"] = own["tables"][: len(saved.get("tables", ()))]
        self.pending.clear()
        self._saved = ({_STATE_KEY: name, _IDENTITY_KEY: info.identity}, self.store.changes) if whole else None
        return [key for key in ("seed", "tables") if key in saved and saved[key] != own[key]]

    def check_fits(self, name: str) -> None:
        """Raise StorageError unless `load_snapshot` would find this snapshot, and rows in it that fit."""
        self._check_tables(read_snapshot_info(self.store.plan.persistent_path, name))
        self.store.check_fits(name)

    def _check_tables(self, info: SnapshotInfo) -> dict[str, Any]:
        """What the embedding that saved a snapshot said of itself, if it had no more tables than this one."""
        saved = info.meta.get("embedding") or {}
        if len(saved.get("tables", ())) > self.num_tables:
            raise StorageError(
                f"snapshot {info.name!r} holds rows of {len(saved['tables'])} tables, embedding {self.name!r} has"
                f" {self.num_tables}; make it with all of them"
            )
        return saved

    def delete_snapshot(self, name: str) -> None:
        """Delete a snapshot and free the disk space only it used.

        Raises:
            StorageError: there is no snapshot of this name.
        """
        if self._saved is not None and self._saved[0][_STATE_KEY] == name:
            self._saved = None  # Before it goes: whatever comes between, no state dict may name it.
        self.store.delete_snapshot(name)

    def snapshots(self) -> list[str]:
        """Names of the snapshots in `persistent_path`, oldest first."""
        return self.store.snapshots()

    def _describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "key_type": str(self.key_type).removeprefix("torch."),
            "tables": json.loads(to_json(self.tables)),
            "padding_idx": self.padding_idx,
            "seed": self.seed,
        }

    def get_extra_state(self) -> dict[str, str | None]:
        """What `state_dict()` carries for the rows: name and identity of a snapshot that holds them as they are now.

        Saves one, named `state-<step>-<digits>`, unless the last one saved or loaded still holds them. None of them is
        deleted by itself, as a state dict that someone keeps, or has written to a file, may name any of them: delete
        with `delete_snapshot` those that no such state dict needs any more.
        """
        if self.store.changes == 0:
            return {_STATE_KEY: None}
        if self._saved is None or self._saved[1] != self.store.changes:
            self.save_snapshot(f"state-{self.store.step:012d}-{uuid.uuid4().hex[:8]}")
        assert self._saved is not None
        return dict(self._saved[0])

    def set_extra_state(self, state: dict[str, str | None]) -> None:
        """Load the snapshot that a state dict names.

        Raises:
            StorageError: it is not in `persistent_path`, or the one of that name there is another run's; the message
                says what is there.
        """
        name = state[_STATE_KEY]
        if name is None:
            self.clear()
        else:
            self.store.check_snapshot(name, state.get(_IDENTITY_KEY), f"a state dict of embedding {self.name!r}")
            self.load_snapshot(name)

    # ---- the rest ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget every row and the optimizer's steps: all ids are new again. Snapshots stay.

        It also mends an embedding whose calls raise `BrokenStoreError`, as `load_snapshot` does.
        """
        between_steps((self.store.step_lock,), "clear", self._clear)

    def _clear(self) -> None:
        self.store.clear()
        self.pending.clear()
        self._saved = None

    def stats(self) -> dict[str, Any]:
        """Sizes now and counters since the tiers were made.

        Returns:
            `rows` (known ids, all tables), `step`, `hit_rate` (share of unique keys found in the hot tier; of ids, in
            lookups without gradient on the device store), and a dict for each tier: `device`, `host`, `persistent`.
        """
        stats = self.store.stats()
        hot = stats.get("device", {"hits": 0, "misses": 0})
        stats["hit_rate"] = hot["hits"] / max(1, hot["hits"] + hot["misses"])
        return stats

    def close(self) -> None:
        """Free memory, files and the lock on `persistent_path`. Rows that no snapshot holds are gone."""
        self.store.close()

    def extra_repr(self) -> str:
        return (
            f"{self.name!r}, tables={self.num_tables}, dim={self.embedding_dim},"
            f" dtype={str(self.dtype).removeprefix('torch.')}, store={type(self.store_options).__name__}"
        )

    def check_apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What a conversion of the module, such as `to` or `half`, makes of the weight. Changes nothing.

        Raises:
            RuntimeError, NotImplementedError: rows cannot be moved where the conversion moves its parameters.
        """
        moved, failure = self.weight.detach(), None
        try:
            moved = fn(moved)
        except (AssertionError, RuntimeError) as error:  # A torch without the device that was asked for.
            failure = error
        if failure is not None:
            raise RuntimeError(f"embedding {self.name!r} cannot move: {_why_no_gpu(failure)}") from failure
        if moved.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"embedding {self.name!r} runs on the CPU and on GPUs of NVIDIA, asked to move to {moved.device}; keep"
                " it on the CPU and move its output: embedding(ids).to(device)"
            )
        if moved.device != self.weight.device and self.pending:
            raise RuntimeError(
                f"embedding {self.name!r} holds lookups whose update is still to come; step the optimizer, then move it"
            )
        return moved

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        try:
            moved = self.check_apply(fn)
        except RuntimeError as error:  # and NotImplementedError, which is one
            # torch converts a model part by part, and asks nobody before it begins. A graph does.
            raise type(error)(
                f"{error}. Parts of the model that come before this embedding, if any do, are converted already; those"
                " on meta have lost their values: load them again"
            ) from error.__cause__
        if moved.dtype not in (self.weight.dtype, self.dtype):
            warnings.warn(
                f"embedding {self.name!r} keeps its {self.dtype} rows where the model becomes {moved.dtype}: cast what"
                f" it gives, embedding(ids).to({moved.dtype}), or make it with that dtype",
                stacklevel=2,
            )
        if moved.device != self.weight.device:
            self.store.move_to(moved.device)
        # The weight stands for the rows, whose dtype is fixed.
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(f"embedding {self.name!r} cannot be copied: its rows live in {self.store.plan.persistent_path}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"embedding {self.name!r} cannot be pickled; save its state_dict(), which names a snapshot")


class MultiTableEmbedding(_TableEmbedding):
    """Embedding tables of one width, keyed by (table, id), that grow with the ids they meet.

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

    Raises:
        TypeError, ValueError: an argument is not as above.
        StorageError: `persistent_path` cannot be made or written to.

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
    ):
        super().__init__(
            name, [embedding_dim], dtype, key_type, tables, store_options, default_initializer, padding_idx, seed,
            num_threads,
        )  # fmt: skip


class MultiTableMultiColumnEmbedding(_TableEmbedding):
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
    ):
        if not isinstance(embedding_dim, list | tuple):
            raise TypeError(f"embedding_dim must be a list of column widths, got {embedding_dim!r}")
        super().__init__(
            name, embedding_dim, dtype, key_type, tables, store_options, default_initializer, padding_idx, seed,
            num_threads,
        )  # fmt: skip


def _why_no_gpu(failure: BaseException) -> str:
    """What keeps a GPU from being used, and what to install, as far as that can be told."""
    from oneemb.kernels.launch import Gpu

    try:
        Gpu()
    except (ImportError, RuntimeError) as reason:
        return str(reason)
    return str(failure)


def _check_arguments(
    name: str,
    dim_C: Sequence[int],
    dtype: torch.dtype,
    key_type: torch.dtype,
    tables: Sequence[TableOptions],
    store_options: StoreOptions,
    default_initializer: Initializer | None,
    padding_idx: int | None,
    seed: int,
) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a word, got {name!r}")
    if not dim_C or any(isinstance(dim, bool) or not isinstance(dim, int) or dim < 1 for dim in dim_C):
        raise ValueError(f"embedding_dim must be 1 or more, got {list(dim_C)}")
    if dtype not in _NAMES:
        raise TypeError(f"dtype must be torch.float32, float16 or bfloat16, got {dtype}")
    if key_type not in (torch.int64, torch.int32):
        raise TypeError(f"key_type must be torch.int64 or torch.int32, got {key_type}")
    if not tables or not all(isinstance(table, TableOptions) for table in tables):
        raise TypeError(f"tables must be a list of one or more oneemb.make_table(...), got {tables!r}")
    if len(tables) > TABLE_MAX + 1:
        raise ValueError(f"an embedding has at most {TABLE_MAX + 1} tables, got {len(tables)}")
    for t, table in enumerate(tables):
        if len(table.columns) not in (1, len(dim_C)):
            raise ValueError(f"table {t} has {len(table.columns)} columns, embedding_dim has {len(dim_C)}")
        for column in table.columns:
            if column.initializer is not None:
                _check_range(f"table {t}", column.initializer, dtype)
    if default_initializer is not None:
        if not isinstance(default_initializer, Initializer):
            raise TypeError(
                f"default_initializer must be made by one of oneemb.make_*_initializer, got {default_initializer!r}"
            )
        _check_range("default_initializer", default_initializer, dtype)
    if not isinstance(store_options, StoreOptions):
        raise TypeError(f"store_options must be made by one of oneemb.make_*_store_options, got {store_options!r}")
    if len(store_options.persistent_path) != 1:
        raise ValueError(
            f"persistent_path names {len(store_options.persistent_path)} folders, one a rank; this job has 1 rank"
        )
    limits = torch.iinfo(key_type)
    if padding_idx is not None and (isinstance(padding_idx, bool) or not isinstance(padding_idx, int)):
        raise TypeError(f"padding_idx must be an int or None, got {padding_idx!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if padding_idx is not None and not limits.min <= padding_idx <= limits.max:
        raise ValueError(f"padding_idx must be a {key_type}, got {padding_idx}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must fit in 64 bits, got {seed}")


def _initial_rows(
    seed: int, dim_C: Sequence[int], tables: Sequence[TableOptions], default: Initializer
) -> init_rows.InitialRows:
    kind_TC = np.empty((len(tables), len(dim_C)), np.int64)
    param_TC4 = np.zeros((len(tables), len(dim_C), 4))
    for t, table in enumerate(tables):
        for c in range(len(dim_C)):
            column: ColumnOptions = table.columns[c if len(table.columns) > 1 else 0]
            kind_TC[t, c], params = _encode(column.initializer or default)
            param_TC4[t, c, : len(params)] = params
    return init_rows.InitialRows(seed % 2**64, kind_TC, param_TC4, np.cumsum(dim_C, dtype=np.int64))


def _encode(initializer: Initializer) -> tuple[int, list[float]]:
    match initializer:
        case ConstantInitializer(value):
            return init_rows.CONSTANT, [value]
        case UniformInitializer(low, high):
            return init_rows.UNIFORM, [low, high]
        case NormalInitializer(mean, std):
            return init_rows.NORMAL, [mean, std]
        case TruncNormalInitializer(mean, std, a, b):
            return init_rows.TRUNC_NORMAL, [mean, std, *(normal_cdf((bound - mean) / std) for bound in (a, b))]


def _check_range(what: str, initializer: Initializer, dtype: torch.dtype) -> None:
    """Raise ValueError if weights may begin infinite: float16 ends at 65504."""
    match initializer:
        case ConstantInitializer(value):
            largest = abs(value)
        case UniformInitializer(low, high):
            largest = max(abs(low), abs(high))
        case NormalInitializer(mean, std):
            largest = abs(mean) + 7 * std  # No draw from 32 bits lies farther out.
        case TruncNormalInitializer(_, _, a, b):
            largest = max(abs(a), abs(b))
    if largest > torch.finfo(dtype).max:
        raise ValueError(
            f"{what} begins with weights up to {largest:g}, {dtype} holds at most {torch.finfo(dtype).max:g}; choose a"
            " narrower initializer or another dtype"
        )


def _store_plan(options: StoreOptions) -> StorePlan:
    cache_bytes = None if isinstance(options, DeviceMemStoreOptions) else options.cache_budget_mb * 2**20
    if isinstance(options, CachedSsdStoreOptions):
        host_bytes: int | None = options.host_cache_budget_mb * 2**20
    else:
        host_bytes = 0 if isinstance(options, DeviceMemStoreOptions) else None
    (path,) = options.persistent_path
    policy = "lfu" if isinstance(options, DeviceMemStoreOptions) else options.cache_policy
    return StorePlan(path, cache_bytes, host_bytes, options.capacity, options.physical_block_size, policy)


def _state_width(options: StoreOptions, dim: int, optimizer: str, need: int) -> int:
    """Values of state a row has room for: as given, or as needed."""
    if options.storage_dim is not None:
        if options.storage_dim < dim + need:
            raise ValueError(
                f"storage_dim={options.storage_dim} is too small for {optimizer!r}: rows of {dim} weights need"
                f" storage_dim={dim + need}; give that, or leave it out"
            )
        return options.storage_dim - dim
    if options.size_factor is not None:
        factor = -(-(dim + need) // dim)
        if options.size_factor < factor:
            raise ValueError(
                f"size_factor={options.size_factor} is too small for {optimizer!r}: rows of {dim} weights need"
                f" size_factor={factor}; give that, or leave it out"
            )
        return (options.size_factor - 1) * dim
    return need
