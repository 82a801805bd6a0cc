"""dynamicemb's module of tables: looks up bags of ids, trains rows in the backward pass, and reads and writes dumps."""

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    BoundsCheckMode,
    CounterBasedRegularizationDefinition,
    CowClipDefinition,
    WeightDecayMode,
)
from torch import distributed

from oneemb.adapters.tables import step_in_backward
from oneemb.dynamicemb.dynamicemb_config import DynamicEmbPoolingMode, DynamicEmbTableOptions, policy_of
from oneemb.dynamicemb.embedding_admission import MultiTableKVCounter
from oneemb.dynamicemb.key_value_table import DynamicEmbStorage, HybridStorage, Storage
from oneemb.dynamicemb.optimizer import EmbOptimType
from oneemb.dynamicemb.table_dumps import TableDumps
from oneemb.dynamicemb.tables import DynamicTables, NamedTable
from oneemb.dynamicemb.types import absent, initializer_of
from oneemb.embeddings.embedding import MultiTableEmbedding
from oneemb.embeddings.internals import stand_for_rows
from oneemb.foreign.dynamicemb_files import META, RANKED, names_in, part_of
from oneemb.options import make_cached_host_mem_store_options, make_device_mem_store_options, make_table
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.fs import LocalFileSystem
from oneemb.torchrec.optimizers import from_fused_params

__all__ = [
    "BatchedDynamicEmbeddingTables", "BatchedDynamicEmbeddingTablesV2", "encode_checkpoint_file_path",
    "encode_counter_checkpoint_file_path", "encode_meta_json_file_path", "find_files", "get_loading_files",
]  # fmt: skip


__getattr__ = absent(
    __name__,
    {
        "StorageLayout": "store options say where rows live; give DynamicEmbTableOptions an external_storage, made by"
        " one of oneemb.make_*_store_options, and read rows.stats()"
    },
)


class BatchedDynamicEmbeddingTablesV2(torch.nn.Module):
    """Tables of one width that are looked up together.

    Args:
        table_options: options of each table; all must have the same `dim`, `embedding_dtype`, `dist_type`, `training`
            and `external_storage`.
        table_names: names of the tables; None = t_0, t_1 and so on.
        feature_table_map: number of the table of each feature; None = feature f is looked up in table f.
        pooling_mode: pooling of bags.
        output_dtype: dtype of results.
        device: where lookups run; None = the current GPU, or the CPU if there is no GPU.
        optimizer, learning_rate, eps, initial_accumulator_value, momentum, weight_decay, weight_decay_mode, eta, beta1,
            beta2: the optimizer and its options, with FBGEMM's meanings.
        use_index_dedup, prefetch_pipeline, enforce_hbm, bounds_check_mode, stochastic_rounding: have no effect.
        gradient_clipping, max_gradient, max_norm, counter_based_regularization, cowclip_regularization: refused if
            their values would change results.
        tables: existing tables of a sharded module; None = make new ones.

    Raises:
        ValueError: an option is not as above; the message names it.
    """

    def __init__(
        self,
        table_options: list[DynamicEmbTableOptions],
        table_names: list[str] | None = None,
        feature_table_map: list[int] | None = None,
        use_index_dedup: bool = False,
        prefetch_pipeline: bool = False,
        pooling_mode: DynamicEmbPoolingMode = DynamicEmbPoolingMode.SUM,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        enforce_hbm: bool = False,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.WARNING,
        optimizer: EmbOptimType = EmbOptimType.SGD,
        stochastic_rounding: bool = True,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        max_norm: float = 0.0,
        learning_rate: float = 0.01,
        eps: float = 1.0e-8,
        initial_accumulator_value: float = 0.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE,
        eta: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        counter_based_regularization: CounterBasedRegularizationDefinition | None = None,
        cowclip_regularization: CowClipDefinition | None = None,
        *,
        tables: DynamicTables | None = None,
    ):
        super().__init__()
        names = [f"t_{t}" for t in range(len(table_options))] if table_names is None else list(table_names)
        self.feature_table_map = list(range(len(names))) if feature_table_map is None else list(feature_table_map)
        self.pooling_mode, self.output_dtype = pooling_mode, output_dtype
        _check(table_options, names, self.feature_table_map)
        if tables is None:
            make = from_fused_params({
                "optimizer": optimizer, "learning_rate": learning_rate, "eps": eps, "momentum": momentum,
                "weight_decay": weight_decay, "weight_decay_mode": weight_decay_mode, "eta": eta, "beta1": beta1,
                "beta2": beta2, "initial_accumulator_value": initial_accumulator_value,
                "gradient_clipping": gradient_clipping, "max_gradient": max_gradient, "max_norm": max_norm,
                "counter_based_regularization": counter_based_regularization,
                "cowclip_regularization": cowclip_regularization,
            })  # fmt: skip
            tables = self._made(table_options, names, make, device)
        self._dynamic = tables
        self._table_names = tables.names  # read by dynamicemb's tools
        self.rows = tables.rows
        """Embedding that holds the rows."""
        self._admission_counter = None
        if any(options.admit_strategy is not None for options in table_options):
            self._admission_counter = MultiTableKVCounter(tables)
        self._storage = _storage_of(tables, table_options)

    def _made(
        self, table_options: Sequence[DynamicEmbTableOptions], names: Sequence[str], make: Any,
        device: torch.device | None,
    ) -> DynamicTables:  # fmt: skip
        first = table_options[0]
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        store = first.external_storage
        if store is None:
            store = make_device_mem_store_options()
            if first.caching and device is not None and device.type == "cuda":
                budget = sum(options.local_hbm_for_values for options in table_options)
                store = make_cached_host_mem_store_options(max(1, budget >> 20))
        rows = MultiTableEmbedding(
            ", ".join(names), first.dim or 0, first.embedding_dtype or torch.float32, torch.int64,
            [make_table(initializer_of(options.initializer_args, None)) for options in table_options], store,
            policy=[policy_of(options, None, 1) for options in table_options],
        )  # fmt: skip
        if device is not None and device.type == "cuda":
            rows.to(device)
        # No module lists this parameter, so that no other optimizer steps the rows.
        weight = torch.nn.Parameter(rows.weight.detach().clone())
        is_kept = bool(first.external_storage and first.external_storage.persistent_path)
        stepper: torch.optim.Optimizer | None = None
        if first.training:
            stepper = make([weight])
            self._stepping = step_in_backward(rows, weight, stepper, is_kept=is_kept)
        else:
            stand_for_rows(rows, [weight], is_kept=is_kept)
            weight.requires_grad_(False)
        infos = [NamedTable(name, options, None) for name, options in zip(names, table_options, strict=True)]
        return DynamicTables(rows, infos, [stepper] * len(infos))

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        feature_requires_grad: torch.Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        total_unique_indices: int | None = None,
    ) -> torch.Tensor:
        """Look up ids and pool their rows.

        Args:
            indices: ids, integers [N], feature by feature.
            offsets: integers [F * B + 1]; the ids of feature f in sample b begin at `offsets[f * B + b]`.
            per_sample_weights: weights of the ids, float32 [N], for sums.
            feature_requires_grad, batch_size_per_feature_per_rank: must be None.
            total_unique_indices: has no effect.

        Returns:
            [B, sum of the features' widths]; with pooling mode NONE a row for each id, [N, D].

        Raises:
            ValueError: features have different numbers of bags, or an argument that must be None is given.
        """
        if feature_requires_grad is not None or batch_size_per_feature_per_rank is not None:
            raise ValueError(
                "feature_requires_grad and batch_size_per_feature_per_rank are not supported; leave them out"
            )
        bags, features = len(offsets) - 1, len(self.feature_table_map)
        if bags < 1 or bags % features:
            raise ValueError(
                f"offsets must have the same number of bags for each of {features} features, got {bags} bags"
            )
        ids, begins = indices.long(), offsets.long()
        if self.training:
            self._dynamic.before_lookup()
        table_F = torch.tensor(self.feature_table_map, device=ids.device)
        if self.pooling_mode is DynamicEmbPoolingMode.NONE:
            ids_F = begins[:: bags // features].diff()
            found = self.rows(ids, table_F.repeat_interleave(ids_F))
        else:
            pooling: Literal["mean", "sum"] = "mean" if self.pooling_mode is DynamicEmbPoolingMode.MEAN else "sum"
            table_P = table_F.repeat_interleave(bags // features)
            pooled = self.rows(ids, table_P, begins, per_sample_weights, pooling)
            found = pooled.view(features, bags // features, -1).transpose(0, 1).flatten(1)
        if self.training:
            self._dynamic.after_lookup()
        return found.to(self.output_dtype)

    def prefetch(self, indices: torch.Tensor, offsets: torch.Tensor, **_: Any) -> None:
        """No effect: pipelines send keys ahead through the sharded collection."""

    def flush(self) -> None:
        """No effect: reading rows also finds rows that are only in a cache."""

    def reset_cache_states(self) -> None:
        """No effect: caches have no state that a caller must reset."""

    def set_record_cache_metrics(self, record: bool) -> None:
        """No effect: `rows.stats()` always has the metrics."""

    @property
    def cache(self) -> None:
        """Always None: caches are a part of `rows`."""
        return

    # ---- tables -----------------------------------------------------------------------------------------------------

    @property
    def table_names(self) -> list[str]:
        """Names of the tables."""
        return self._dynamic.names

    @property
    def tables(self) -> Storage:
        """Access to the rows of the tables."""
        return self._storage

    @property
    def dynamic(self) -> DynamicTables:
        """The tables, with operations for scores, dumps and changed rows."""
        return self._dynamic

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Optimizer that steps the rows in the backward pass."""
        return self.rows.optimizer

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all tables, from the next backward pass on."""
        self._dynamic.set_learning_rate(lr)

    def split_embedding_weights(self) -> list[torch.Tensor]:
        """For each table an empty tensor [1, 1], since rows are in no tensor."""
        return [torch.empty(1, 1, dtype=self.rows.dtype, device=self.rows.weights[0].device) for _ in self.table_names]

    def set_score(self, named_score: dict[str, int]) -> None:
        """Set the score that later lookups give the rows of each named table: {table: score}.

        Raises:
            TypeError, ValueError: a table's score strategy is not CUSTOMIZED, or a score is not above 0.
        """
        self._dynamic.set_score(named_score)

    def get_score(self) -> dict[str, int]:
        """{table: current score}. Pass it to a later `incremental_dump` to get the rows that have changed since this
        call."""
        return self._dynamic.get_score()

    def incremental_dump(
        self, named_thresholds: dict[str, int], pg: "distributed.ProcessGroup | None" = None
    ) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, int]]:
        """Rows whose score, or time of last use, is at least a threshold: {table: (ids, weights)}, and {table:
        threshold for the next call}. With `pg` each rank gets the rows of all ranks, and every rank makes the call."""
        unknown = [name for name in named_thresholds if name not in self.table_names]
        if unknown:
            warnings.warn(
                f"named_thresholds must name tables of {self.table_names}, got also {unknown}, which are ignored",
                stacklevel=2,
            )
        known = {name: threshold for name, threshold in named_thresholds.items() if name not in unknown}
        return self._dynamic.incremental_dump(known, gather=pg is not None)

    def export_keys_values(
        self, table_name: str, device: torch.device, batch_size: int = 65536
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids, int64 [N], and weights, float32 [N, D], of a table, as in `Storage.export_keys_values`."""
        t = self._dynamic.index(table_name)
        batches = [batch[:2] for batch in self._storage.export_keys_values(device, batch_size, t)]
        if not batches:
            return torch.empty(0, dtype=torch.int64, device=device), torch.empty(
                0, 0, device=device, dtype=torch.float32
            )
        keys, values = zip(*batches, strict=True)
        return torch.cat(keys), torch.cat(values)

    def dump(
        self, save_dir: str, optim: bool = False, counter: bool = False, table_names: list[str] | None = None,
        pg: "distributed.ProcessGroup | None" = None, *, layout: Literal["today", "seed"] = "today",
    ) -> None:  # fmt: skip
        """Write a dump of the tables into an existing folder; see `DynamicEmbDump`."""
        names = [name for name in self.table_names if table_names is None or name in table_names]
        TableDumps(self._dynamic).dump(save_dir, names, optim=optim, counter=counter, layout=layout)

    def load(
        self, save_dir: str, optim: bool = False, counter: bool = False, table_names: list[str] | None = None,
        pg: "distributed.ProcessGroup | None" = None,
    ) -> None:  # fmt: skip
        """Load the rows of dumps; see `DynamicEmbLoad`."""
        names = [name for name in self.table_names if table_names is None or name in table_names]
        files = TableDumps(self._dynamic)
        dumps = files.check_load(save_dir, names, optim=optim, counter=counter)
        for name, dump in dumps.items():
            files.load(name, dump, optim=optim, counter=counter)


BatchedDynamicEmbeddingTables = BatchedDynamicEmbeddingTablesV2
"""Older name of `BatchedDynamicEmbeddingTablesV2`."""


def _check(options: Sequence[DynamicEmbTableOptions], names: Sequence[str], features: Sequence[int]) -> None:
    if not options or len(names) != len(options) or len(set(names)) < len(names):
        raise ValueError(
            f"table_options must be one or more, each with a name of its own, got {len(options)} options and the names"
            f" {names}"
        )
    if not all(0 <= t < len(names) for t in features):
        raise ValueError(f"feature_table_map must be numbers of tables, 0 to {len(names) - 1}, got {features}")
    for what in ("dim", "embedding_dtype", "external_storage", "training", "dist_type"):
        if len({getattr(one, what) for one in options}) > 1:
            raise ValueError(
                f"tables that are looked up together must have one {what}, got"
                f" {[getattr(one, what) for one in options]}"
            )
    if options[0].dim is None:
        raise ValueError(f"dim must be given for table {names[0]!r}, got None")


def _storage_of(tables: DynamicTables, options: Sequence[DynamicEmbTableOptions]) -> Storage:
    format = tables.rows.store.format
    row_bytes = tables.rows.dtype.itemsize * (format.dim + format.state_width)
    capacities = [math.inf if one.max_capacity is None else one.max_capacity for one in options]
    whole = sum(capacity * row_bytes for capacity in capacities)
    if any(one.caching for one in options) or sum(one.local_hbm_for_values for one in options) >= whole:
        return DynamicEmbStorage(tables)
    return HybridStorage(tables)


# ---- paths of the files of a dump of today's layout -----------------------------------------------------------------

_ITEMS = {"keys": "emb_keys", "values": "emb_values", "scores": "emb_scores", "opt_values": "opt_values"}
_COUNTER_ITEMS = {"keys": "counter_keys", "frequencies": "counter_frequencies"}
_SUFFIXES = (*_ITEMS.values(), *_COUNTER_ITEMS.values())


def _encoded(root_path: str, table_name: str, rank: int, world_size: int, suffix: str) -> str:
    return os.path.join(root_path, f"{table_name}_{suffix}.rank_{rank}.world_size_{world_size}")


def _suffix_of(items: dict[str, str], item: str) -> str:
    if item not in items:
        raise ValueError(f"item must be one of {list(items)}, got {item!r}")
    return items[item]


def encode_meta_json_file_path(root_path: str, table_name: str) -> str:
    """Path of the file with the options of a table and its optimizer."""
    return os.path.join(root_path, f"{table_name}_{META}")


def encode_checkpoint_file_path(root_path: str, table_name: str, rank: int, world_size: int, item: str) -> str:
    """Path of one rank's file of `item`: "keys", "values", "scores" or "opt_values"; ValueError for another item."""
    return _encoded(root_path, table_name, rank, world_size, _suffix_of(_ITEMS, item))


def encode_counter_checkpoint_file_path(root_path: str, table_name: str, rank: int, world_size: int, item: str) -> str:
    """Path of one rank's file of counts of ids without a row; `item` is "keys" or "frequencies", else ValueError."""
    return _encoded(root_path, table_name, rank, world_size, _suffix_of(_COUNTER_ITEMS, item))


def find_files(root_path: str, table_name: str, suffix: str) -> tuple[list[str], int]:
    """Paths of the files of all ranks, in the order of the ranks, and the number of ranks.

    Raises:
        ValueError: `suffix` is none of emb_keys, emb_values, emb_scores, opt_values, counter_keys, counter_frequencies.
        StorageError: the file of a rank is missing, files are from different numbers of ranks, or there is no folder.
    """
    if suffix not in _SUFFIXES:
        raise ValueError(f"suffix must be one of {list(_SUFFIXES)}, got {suffix!r}")
    matches = (part_of(table_name, name, RANKED) for name in names_in(LocalFileSystem(), root_path))
    found = {(int(match[2]), int(match[3])) for match in matches if match is not None and match[1] == suffix}
    ranks = max((ranks for _, ranks in found), default=0)
    if found != {(rank, ranks) for rank in range(ranks)}:
        raise CorruptTableError(
            f"the files {table_name}_{suffix} in {root_path} must be one for each of {ranks} ranks, got those of"
            f" (rank, ranks) {sorted(found)}; restore them from a copy"
        )
    return [_encoded(root_path, table_name, rank, ranks, suffix) for rank in range(ranks)], ranks


class LoadingFiles(NamedTuple):
    """Paths of the files that a rank reads. A list is empty if the dump has no such files."""

    keys: list[str]
    values: list[str]
    scores: list[str]
    opt_values: list[str]
    counter_keys: list[str]
    counter_frequencies: list[str]


def get_loading_files(root_path: str, name: str, rank: int, world_size: int) -> LoadingFiles:
    """Paths of the files of a table that a rank reads: its own files if the dump was written by `world_size` ranks,
    else the files of all ranks. StorageError if a file is missing, or there is no folder."""
    found = {suffix: find_files(root_path, name, suffix) for suffix in _SUFFIXES}
    counts = {suffix: count for suffix, (_, count) in found.items() if count or suffix == "emb_values"}
    ranks = found["emb_keys"][1]
    if any(count != ranks for count in counts.values()):
        raise CorruptTableError(
            f"the files of table {name!r} in {root_path} must be from one number of ranks, got {counts}; restore them"
            " from a copy"
        )
    own = slice(rank, rank + 1) if ranks == world_size else slice(None)
    return LoadingFiles(*(files[own] for files, _ in found.values()))
