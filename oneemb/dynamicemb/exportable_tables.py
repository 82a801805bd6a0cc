"""Read-only tables for inference that torch.export can export.

    model = apply_inference_embedding_collection(model, {"users": True}, {"users": 1 << 20})
    model.embeddings.load_from_dynamicemb_file("dump/model.embeddings")
    torch.export.export(...)

The exported program contains all rows, and only torch's own ops.

N ids, F features, B bags, T tables, D weights of a row, S slots.

Invariants:
- table t has slots begin_T[t] to begin_T[t + 1] - 1; the first size_T[t] of them hold its ids, sorted;
- row 0 is zeros, for ids without a row; row s + 1 belongs to slot s.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torchrec
from torchrec.modules.embedding_configs import EmbeddingConfig

from oneemb.dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from oneemb.dynamicemb.types import DynamicEmbInitializerArgs, DynamicEmbInitializerMode
from oneemb.foreign.dynamicemb_files import ids_of_numbers
from oneemb.foreign.dynamicemb_reader import Dump, find_dump
from oneemb.storage.errors import StoreFullError
from oneemb.torchrec import EmbeddingCollection

__all__ = [
    "InferenceEmbeddingCollection", "InferenceLinearBucketTable", "apply_inference_embedding_collection",
    "create_inference_embedding_collection",
]  # fmt: skip

_NO_POOLING, _SUM, _MEAN = -1, 1, 2
_ROWS = 65536
"""Number of rows that are read from a dump at a time."""


def _device_of(device: torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class InferenceLinearBucketTable(torch.nn.Module):
    """Index of the ids of tables, by binary search.

    Args:
        capacity: largest number of ids of each table.
        key_type: torch.int64 or torch.uint64.
        bucket_capacity: has no effect, since there are no buckets.
        device: None = the current GPU, or the CPU if there is no GPU.
    """

    key_S: torch.Tensor
    begin_T: torch.Tensor
    size_T: torch.Tensor

    def __init__(
        self,
        capacity: list[int],
        key_type: torch.dtype = torch.int64,
        bucket_capacity: int = 128,
        device: torch.device | None = None,
    ):
        super().__init__()
        self.device = _device_of(device)
        self.key_type_, self.bucket_capacity_ = key_type, bucket_capacity
        self.num_tables_, self.capacity_ = len(capacity), sum(capacity)
        self._halvings = max(capacity, default=0).bit_length()
        begins = torch.tensor([0, *itertools.accumulate(capacity)], device=self.device)
        # One extra slot, which a search can read even if all tables have capacity 0.
        self.register_buffer("key_S", torch.zeros(self.capacity_ + 1, dtype=torch.int64, device=self.device))
        self.register_buffer("begin_T", begins)
        self.register_buffer("size_T", torch.zeros(len(capacity), dtype=torch.int64, device=self.device))

    def fill(self, table_id: int, keys: torch.Tensor) -> None:
        """Replace the ids of a table with `keys`, sorted and distinct. StoreFullError if they do not fit."""
        begin, end = self.begin_T[table_id : table_id + 2].tolist()
        if len(keys) > end - begin:
            raise StoreFullError(
                f"the ids of table {table_id} must be at most {end - begin}, got {len(keys)}; raise init_capacity or"
                " max_capacity"
            )
        self.key_S[begin : begin + len(keys)] = keys.to(self.key_S)
        self.size_T[table_id] = len(keys)

    def lookup(
        self,
        keys: torch.Tensor,
        table_ids: torch.Tensor,
        score_value: torch.Tensor | None = None,
        score_policy: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find ids in their tables.

        Args:
            keys, table_ids: ids, and the table of each: integers [N].
            score_value, score_policy: have no effect, since a lookup changes nothing.

        Returns:
            Scores, all 0, int64 [N]; whether each id was found, bool [N]; and its slot, counted from the table's first,
            int64
            [N], or -1 if not found.
        """
        id_N = keys.view(torch.int64) if keys.dtype == torch.uint64 else keys.long()
        begin_N = self.begin_T[table_ids]
        end_N = begin_N + self.size_T[table_ids]
        low_N, high_N = begin_N, end_N
        for _ in range(self._halvings):
            middle_N = (low_N + high_N) // 2
            is_below_N = (self.key_S[middle_N] < id_N) & (low_N < high_N)
            low_N, high_N = torch.where(is_below_N, middle_N + 1, low_N), torch.where(is_below_N, high_N, middle_N)
        found_N = (low_N < end_N) & (self.key_S[low_N] == id_N)
        return torch.zeros_like(id_N), found_N, torch.where(found_N, low_N - begin_N, -1)


class InferenceEmbeddingCollection(torch.nn.Module):
    """Read-only tables of one width, for an exported program.

    Args:
        table_options: options of each table; `dim` is the width, and `init_capacity` or `max_capacity` the number of
            rows.
        use_dynamic_hash: True = any int64 is an id; False = the ids of a table are 0 to its capacity - 1.
        pooling_mode: -1 = a row for each id; 1 = sum of each bag; 2 = mean of each bag, in which ids without a row
            count.
        table_names: None = table_0, table_1 and so on.
        feature_names: names of the features, for the user.
        feature_table_map: number of each feature's table, ascending; None = feature f is looked up in table f.
        output_dtype: float32 or float16.
        device: None = the current GPU, or the CPU if there is no GPU.
        key_type: torch.int64 or torch.uint64.

    Raises:
        ValueError: an argument is not as above; the message names it.

    Reference: dynamicemb.exportable_tables.InferenceEmbeddingCollection.
    """

    weight: torch.Tensor
    feature_table_map_: torch.Tensor

    def __init__(
        self,
        table_options: list[Any],
        use_dynamic_hash: bool,
        pooling_mode: int,
        table_names: list[str] | None = None,
        feature_names: list[str] | None = None,
        feature_table_map: list[int] | None = None,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        key_type: torch.dtype = torch.int64,
    ):
        super().__init__()
        capacities = [_capacity_of(options) for options in table_options]
        names = [f"table_{t}" for t in range(len(capacities))] if table_names is None else list(table_names)
        features = list(range(len(capacities))) if feature_table_map is None else list(feature_table_map)
        dims = {options.dim for options in table_options}
        _check_one_of("pooling_mode", pooling_mode, [_NO_POOLING, _SUM, _MEAN])
        _check_one_of("key_type", key_type, [torch.int64, torch.uint64])
        _check_one_of("output_dtype", output_dtype, [torch.float32, torch.float16])
        if len(dims) != 1 or not (dim := dims.pop()) or dim < 1:
            raise ValueError(
                f"all table_options must have the same dim, above 0, got {[options.dim for options in table_options]}"
            )
        if len(names) != len(capacities):
            raise ValueError(f"table_names must be one for each of {len(capacities)} tables, got {names}")
        if not features or features != sorted(features) or not 0 <= features[0] <= features[-1] < len(capacities):
            raise ValueError(
                f"feature_table_map must be numbers of tables, 0 to {len(capacities) - 1}, never falling, got"
                f" {features}"
            )
        self.embedding_configs = table_options
        self.device = _device_of(device)
        self.use_dynamic_hash, self.pooling_mode_, self.emb_dim_ = use_dynamic_hash, pooling_mode, dim
        self.output_dtype_, self.key_type_ = output_dtype, key_type
        self.num_tables_, self.table_names_, self.feature_names_ = len(capacities), names, feature_names
        self.hash_table = InferenceLinearBucketTable(capacities, key_type, device=self.device)
        self.register_buffer("feature_table_map_", torch.tensor(features, device=self.device))
        self.register_buffer("weight", torch.zeros(sum(capacities) + 1, dim, dtype=output_dtype, device=self.device))

    def load_from_embedding_table(self, table_weights: torch.Tensor) -> None:
        """Load `table_weights` [rows, D], table by table; there may be fewer rows than slots. With `use_dynamic_hash`
        row r of a table becomes id r.

        Raises:
            ValueError: there are more rows than slots, or rows have another width.
        """
        slots = len(self.weight) - 1
        if table_weights.dim() != 2 or table_weights.shape[1] != self.emb_dim_ or len(table_weights) > slots:
            raise ValueError(
                f"table_weights must be [at most {slots}, {self.emb_dim_}], got {list(table_weights.shape)}"
            )
        self.weight.zero_()
        self.weight[1 : len(table_weights) + 1] = table_weights.detach().to(self.weight)
        begins = self.hash_table.begin_T.tolist()
        for t, (begin, end) in enumerate(itertools.pairwise(begins)):
            there = max(0, min(end, len(table_weights)) - begin)
            self.hash_table.fill(t, torch.arange(there, device=self.hash_table.key_S.device))

    def load_from_dynamicemb_file(self, save_dir: str, table_names: list[str] | None = None) -> None:
        """Load rows of tables from a dump of any number of ranks. Other tables have no rows afterwards.

        Args:
            save_dir: the collection's folder in a dump that `DynamicEmbDump` has written.
            table_names: tables to load; None = all.

        Raises:
            ValueError: a name is not that of a table, or `use_dynamic_hash` is False.
            StorageError: a file is missing or damaged.
            StoreFullError: a table has no room for its rows; rows of other tables may have been loaded.
        """
        unknown = sorted(set(table_names or []) - set(self.table_names_))
        if unknown:
            raise ValueError(f"table_names must be some of {self.table_names_}, got {unknown}")
        if not self.use_dynamic_hash:
            raise ValueError(
                "use_dynamic_hash must be True to load a dump, whose ids are any int64, got False; call"
                " load_from_embedding_table"
            )
        named = self.table_names_ if table_names is None else table_names
        dumps = {name: find_dump(save_dir, name, dim=self.emb_dim_) for name in named}
        for name, dump in dumps.items():
            dump.check_distinct(self._num_embeddings(name, dump))
        self.weight.zero_()
        self.hash_table.size_T.zero_()
        for name, dump in dumps.items():
            self._take(self.table_names_.index(name), dump, self._num_embeddings(name, dump))

    def _num_embeddings(self, name: str, dump: Dump) -> int | None:
        """`num_embeddings` of the table when it was dumped, from which the key blocks of "continuous" follow; None =
        not known."""
        config = self.embedding_configs[self.table_names_.index(name)]
        return dump.meta.get("num_embeddings", getattr(config, "num_embeddings", None))

    def _take(self, t: int, dump: Dump, num_embeddings: int | None) -> None:
        dist = dump.meta.get("dist_type", "roundrobin") if dump.version == "today" else "roundrobin"
        ids, rows = [np.empty(0, np.int64)], [np.empty((0, self.emb_dim_), np.float32)]
        for part in dump.read(_ROWS, state=False):
            ids.append(ids_of_numbers(dist, part.rank, part.key_N, dump.ranks, num_embeddings))
            rows.append(part.value_ND)
        id_N, row_ND = np.concatenate(ids), np.concatenate(rows)
        order_N = np.argsort(id_N)
        self.hash_table.fill(t, torch.from_numpy(id_N[order_N]))
        first = 1 + int(self.hash_table.begin_T[t])
        self.weight[first : first + len(id_N)] = torch.from_numpy(row_ND[order_N]).to(self.weight)

    def forward(
        self,
        keys: torch.Tensor,
        offsets: torch.Tensor,
        pooling_offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look up ids.

        Args:
            keys: ids, int64 [N], feature by feature.
            offsets: first id of each feature, and N: integers [F + 1]; or first id of each bag, and N: integers [F * B
                + 1].
            pooling_offsets: first id of each bag, and N: integers [B + 1]; for `pooling_mode` 1 and 2.
            per_sample_weights: [N], factors of the rows before they are summed; for `pooling_mode` 1 and 2.

        Returns:
            Rows [N, D], or pooled bags [B, D].

        Raises:
            ValueError: an argument is not as above, is missing, or has no effect in this `pooling_mode`. An exported
                program checks the values of offsets while it runs, and raises RuntimeError with the same message.
        """
        if keys.dim() != 1 or keys.is_floating_point():
            raise ValueError(
                f"keys must be integers [N], feature by feature, got {keys.dtype} {list(keys.shape)}; call keys.long(),"
                " and order the ids by feature"
            )
        self._check_pooling(keys, pooling_offsets, per_sample_weights)
        features = self.feature_table_map_.shape[0]
        offsets = _checked_offsets("offsets", offsets, keys, features)
        bags = (offsets.shape[0] - 1) // features
        ends_F = offsets[torch.arange(1, features + 1, device=offsets.device) * bags]
        place_N = torch.arange(keys.shape[0], device=keys.device)
        table_N = self.feature_table_map_[torch.searchsorted(ends_F, place_N, right=True)]
        begin_N = self.hash_table.begin_T[table_N]
        if self.use_dynamic_hash:
            _, found_N, at_N = self.hash_table.lookup(keys, table_N)
        else:
            at_N = keys.long()
            found_N = (at_N >= 0) & (at_N < self.hash_table.begin_T[table_N + 1] - begin_N)
        rows_ND = self.weight[torch.where(found_N, begin_N + at_N + 1, 0)]
        if self.pooling_mode_ == _NO_POOLING:
            return rows_ND
        assert pooling_offsets is not None
        pooling_offsets = _checked_offsets("pooling_offsets", pooling_offsets, keys)
        bag_N = torch.searchsorted(pooling_offsets, place_N, right=True) - 1
        wide_ND = rows_ND.float()
        if per_sample_weights is not None:
            wide_ND = wide_ND * per_sample_weights[:, None]
        # One extra bag, so that the exported program also works for one bag, or none.
        sum_BD = wide_ND.new_zeros(pooling_offsets.shape[0], self.emb_dim_).index_add(0, bag_N, wide_ND)
        if self.pooling_mode_ == _MEAN:
            one_N = torch.ones_like(bag_N).float()
            count_B = wide_ND.new_zeros(pooling_offsets.shape[0]).index_add(0, bag_N, one_N)
            sum_BD = sum_BD / count_B.clamp(min=1)[:, None]
        return sum_BD[:-1].to(self.output_dtype_)

    def _check_pooling(
        self, keys: torch.Tensor, pooling_offsets: torch.Tensor | None, per_sample_weights: torch.Tensor | None
    ) -> None:
        if self.pooling_mode_ == _NO_POOLING:
            given = {"pooling_offsets": pooling_offsets, "per_sample_weights": per_sample_weights}
            if names := [name for name, value in given.items() if value is not None]:
                raise ValueError(
                    f"{' and '.join(names)} must be None with pooling_mode -1, which returns the row of each id; leave"
                    " it out, or make the tables with pooling_mode 1 or 2"
                )
            return
        if pooling_offsets is None:
            raise ValueError(
                f"pooling_offsets must be given with pooling_mode {self.pooling_mode_}, got None; pass the first id of"
                " each bag, and the number of ids, as integers [B + 1]"
            )
        if per_sample_weights is not None and per_sample_weights.shape != keys.shape:
            raise ValueError(
                f"per_sample_weights must be one for each of {keys.shape[0]} keys, got shape"
                f" {list(per_sample_weights.shape)}"
            )


def _checked_offsets(name: str, offsets: torch.Tensor, keys: torch.Tensor, features: int = 1) -> torch.Tensor:
    """`offsets` as int64. ValueError unless they begin with 0, never fall, end with the number of keys, and have a
    multiple of `features` parts."""
    if offsets.dim() != 1 or offsets.is_floating_point() or offsets.shape[0] < 1:
        advice = "; call .long()" if offsets.is_floating_point() else ""
        raise ValueError(
            f"{name} must be integers of one dimension, [number of parts + 1], got {offsets.dtype}"
            f" {list(offsets.shape)}{advice}"
        )
    counted = "" if features == 1 else f"; its length must be 1 + a multiple of the number of features, {features}"
    must = f"{name} must begin with 0, never fall and end with the number of keys{counted}"
    offsets = offsets.long()
    holds = (offsets[0] == 0) & (offsets[-1] == keys.shape[0]) & (offsets[1:] >= offsets[:-1]).all()
    holds = holds & (offsets.new_full((), (offsets.shape[0] - 1) % features) == 0)
    if torch.compiler.is_compiling() or type(holds) is not torch.Tensor:  # There are no values while a model is traced.
        torch._assert_async(holds, must)
    elif not holds:
        raise ValueError(f"{must}, got {offsets.tolist()[:20]} of {len(offsets)}, for {keys.shape[0]} keys")
    return offsets


def _capacity_of(options: DynamicEmbTableOptions) -> int:
    capacity = options.max_capacity if options.init_capacity is None else options.init_capacity
    if not capacity or capacity < 1:
        raise ValueError(f"table_options must have init_capacity or max_capacity above 0, got {options}")
    return capacity


def _check_one_of(name: str, given: object, known: Sequence[object]) -> None:
    if given not in known:
        raise ValueError(f"{name} must be one of {known}, got {given}")


def create_inference_embedding_collection(
    embedding_configs: list[EmbeddingConfig], pooling_mode: int = _NO_POOLING, use_dynamic: bool = True
) -> InferenceEmbeddingCollection:
    """Tables for TorchRec's configs, with `num_embeddings` slots each and no rows yet; other arguments are those of the
    class."""
    options = [
        DynamicEmbTableOptions(
            embedding_dtype=torch.float32, dim=config.embedding_dim, max_capacity=config.num_embeddings,
            initializer_args=DynamicEmbInitializerArgs(DynamicEmbInitializerMode.NORMAL), training=False,
        ) for config in embedding_configs
    ]  # fmt: skip
    made = InferenceEmbeddingCollection(
        options, use_dynamic, pooling_mode, [config.name for config in embedding_configs],
        [feature for config in embedding_configs for feature in config.feature_names],
        [t for t, config in enumerate(embedding_configs) for _ in config.feature_names],
    )  # fmt: skip
    made.embedding_configs = embedding_configs
    return made


def apply_inference_embedding_collection(
    model: torch.nn.Module, dynamic_table_configs: Mapping[str, bool], trained_emb_table_sizes: Mapping[str, int]
) -> torch.nn.Module:
    """Replace each EmbeddingCollection of a model, TorchRec's or one of `oneemb.torchrec`, by an
    `InferenceEmbeddingCollection` without rows.

    Args:
        model: the model, which is changed in place.
        dynamic_table_configs: {table: whether any int64 is an id (`use_dynamic_hash`)}. It must have at least one table
            of each collection, and equal values for all tables of a collection.
        trained_emb_table_sizes: {table: number of rows}; other tables get `num_embeddings` of their config.

    Returns:
        The same model; or the new collection if `model` itself is a collection.

    Raises:
        ValueError: tables of a collection differ in `dynamic_table_configs`, or none is named; nothing has changed.
    """
    kinds = torchrec.EmbeddingCollection, EmbeddingCollection
    found = {path: cast(Any, collection) for path, collection in model.named_modules() if isinstance(collection, kinds)}
    made = {
        path: _in_place_of(path, collection.embedding_configs(), dynamic_table_configs, trained_emb_table_sizes)
        for path, collection in found.items()
    }
    for path, collection in made.items():
        if not path:
            return collection
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, collection)
    return model


def _in_place_of(
    path: str, configs: list[EmbeddingConfig], dynamic: Mapping[str, bool], sizes: Mapping[str, int]
) -> InferenceEmbeddingCollection:
    by_table = {config.name: dynamic[config.name] for config in configs if config.name in dynamic}
    if len(set(by_table.values())) != 1:
        raise ValueError(
            f"dynamic_table_configs must have one value for all tables of {path or 'the model'!r}, and at least one of"
            f" them, {[config.name for config in configs]}, got {by_table}"
        )
    sized = [replace(config, num_embeddings=sizes.get(config.name, config.num_embeddings)) for config in configs]
    return create_inference_embedding_collection(sized, use_dynamic=by_table.popitem()[1])
