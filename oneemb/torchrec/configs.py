"""TorchRec's configs of tables: their checks, and the initializer, dtype and policy that each one asks for.

    use_virtual_table                   each row is initialized at its first lookup, also without `store_options`
    virtual_table_eviction_policy       which rows are evicted; for virtual tables only, as in TorchRec

    NoEvictionPolicy                    evicts no row
    TimestampBasedEvictionPolicy        evicts rows that were not looked up for eviction_ttl_mins
    FeatureL2NormBasedEvictionPolicy    evicts rows whose norm is below eviction_threshold
    FeatureScoreBasedEvictionPolicy     as TimestampBasedEvictionPolicy; refused without eviction_ttl_mins
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy   refused, unless all thresholds and ages are 0, so that no row is evicted

Each step checks 1/256 of the rows; it checks none while a rank has training_id_eviction_trigger_count rows or fewer.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
    EmbeddingBagConfig,
    FeatureL2NormBasedEvictionPolicy,
    FeatureScoreBasedEvictionPolicy,
    NoEvictionPolicy,
    PoolingType,
    TimestampBasedEvictionPolicy,
)
from torchrec.types import DataType

from oneemb.adapters.handed_rows import to_be_handed
from oneemb.options import (
    Initializer,
    make_constant_initializer,
    make_normal_initializer,
    make_trunc_normal_initializer,
    make_uniform_initializer,
)
from oneemb.policies import RowPolicy

_DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}
_POOLINGS = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}


class Column(NamedTuple):
    """One feature of one table: an embedding of the output."""

    table: int
    """Index of the table's config."""
    feature: str
    name: str
    """Name in the output: the feature, or feature@table if several tables have the feature."""


def check_configs(tables: Sequence[BaseEmbeddingConfig], kind: type[BaseEmbeddingConfig]) -> None:
    """Raise TypeError or ValueError unless `tables` are supported configs of class `kind`. A config without features
    gets the table's name as its only feature.

    Reference: TorchRec's modules, which fill `feature_names` in the same way.
    """
    if not all(isinstance(config, kind) for config in tables):
        raise TypeError(f"tables must be a list of TorchRec's {kind.__name__}, got {tables!r}")
    names = set[str]()
    for config in tables:
        if not config.name:
            raise ValueError(f"every table must have a name, got {config!r}")
        if hasattr(torch.nn.ModuleDict, config.name) or "." in config.name:
            raise ValueError(
                "the name of a table must have no dot and must not be an attribute of torch.nn.ModuleDict, which holds"
                f" the tables by name, got {config.name!r}; rename the table"
            )
        if config.name in names:
            raise ValueError(f"Duplicate table name {config.name}: names of tables must differ")
        names.add(config.name)
        if not config.feature_names:
            config.feature_names = [config.name]
        if len(set(config.feature_names)) < len(config.feature_names):
            raise ValueError(f"feature_names of table {config.name!r} must differ, got {config.feature_names}")
        if config.data_type not in _DTYPES:
            raise ValueError(
                f"table {config.name!r}: data_type must be FP32, FP16 or BF16, got {config.data_type}; quantize the"
                " trained collection"
            )
        if config.num_embeddings_post_pruning is not None:
            raise ValueError(
                f"table {config.name!r}: num_embeddings_post_pruning must be None, since it is for inference; leave it"
                " out"
            )
        if config.need_pos:
            raise ValueError(
                f"table {config.name!r}: need_pos must be False, since position-weighted features are not supported"
            )
        if config.enable_embedding_update:
            raise ValueError(
                f"table {config.name!r}: enable_embedding_update, for DistributedModelParallel.write, is not supported;"
                " leave it out, and write rows by load_state_dict or import_rows"
            )
        policy_of(config)


def columns_of(tables: Sequence[BaseEmbeddingConfig]) -> list[Column]:
    """Columns of the output, table by table."""
    features = [feature for config in tables for feature in config.feature_names]
    return [
        Column(t, feature, f"{feature}@{config.name}" if features.count(feature) > 1 else feature)
        for t, config in enumerate(tables)
        for feature in config.feature_names
    ]


def dtype_of(config: BaseEmbeddingConfig) -> torch.dtype:
    """Dtype of the table's weights."""
    return _DTYPES[config.data_type]


def pooling_of(config: BaseEmbeddingConfig) -> str:
    """Pooling of a table's bags: "sum" or "mean"; ValueError if the config has another."""
    pooling = config.pooling if isinstance(config, EmbeddingBagConfig) else PoolingType.SUM
    if pooling not in _POOLINGS:
        raise ValueError(f"table {config.name!r}: pooling must be SUM or MEAN, got {pooling}")
    return _POOLINGS[pooling]


def initializer_of(config: BaseEmbeddingConfig) -> Initializer:
    """Initializer of new rows, from `init_fn`. For TorchRec's default `init_fn` it draws between `bounds_of`.
    ValueError if `init_fn` is none of the functions in torch.nn.init that can initialize one row without the others."""
    function: Any = config.init_fn
    options: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        if function.args:
            raise ValueError(_init_fn_error(config))
        function, options = function.func, dict(function.keywords)
    options.pop("generator", None)  # The module's seed takes the generator's place.
    default = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    if function is torch.nn.init.uniform_ and options == default:
        options = dict(zip("ab", bounds_of(config, dtype_of(config)), strict=True))
    make = _INITIALIZERS.get(function)
    if make is None:
        raise ValueError(_init_fn_error(config))
    try:
        return make(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"table {config.name!r}: init_fn {config.init_fn!r}: {error}") from error


def _init_fn_error(config: BaseEmbeddingConfig) -> str:
    known = ", ".join(sorted(function.__name__ for function in _INITIALIZERS))
    return (
        f"table {config.name!r}: init_fn must be one of torch.nn.init's {known}, with options by functools.partial(...,"
        f" name=value), got {config.init_fn!r}: new rows begin one by one, as they are met. Load other weights by"
        " load_state_dict"
    )


def _uniform(a: float = 0.0, b: float = 1.0) -> Initializer:
    return make_uniform_initializer(a, b) if a != b else make_constant_initializer(a)


def _normal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    return make_normal_initializer(mean, std) if std else make_constant_initializer(mean)


_INITIALIZERS: dict[Callable[..., Any], Callable[..., Initializer]] = {
    torch.nn.init.uniform_: _uniform,
    torch.nn.init.normal_: _normal,
    torch.nn.init.trunc_normal_: make_trunc_normal_initializer,
    torch.nn.init.constant_: lambda val: make_constant_initializer(val),
    torch.nn.init.zeros_: functools.partial(make_constant_initializer, 0.0),
    torch.nn.init.ones_: functools.partial(make_constant_initializer, 1.0),
}


def drawn_weights(config: BaseEmbeddingConfig) -> torch.Tensor:
    """Weights of all rows, [num_embeddings, D], as torch.nn.Embedding draws them, before `init_fn` fills them. The call
    takes as many numbers from torch's generator as TorchRec's module does, so that a seeded script later draws the same
    numbers as with TorchRec. ValueError if the rows are larger than memory."""
    size = config.num_embeddings, config.embedding_dim
    try:
        weights = to_be_handed(size, dtype_of(config))
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"table {config.name!r}: its first {size[0]:,} rows of {size[1]} weights must fit in memory, there is no"
            " memory for them; give store_options, and each row is initialized at its first lookup"
        ) from error
    return weights.normal_()


def later_rows(config: BaseEmbeddingConfig) -> Initializer:
    """Initializer of rows that do not come from `drawn_weights`: from `init_fn`, or TorchRec's default if `init_fn` can
    only fill a whole table."""
    try:
        return initializer_of(config)
    except ValueError:
        return make_uniform_initializer(*bounds_of(config, dtype_of(config)))


_ENDLESS = 4_000_000_000
"""Tables with more rows use the bounds of a virtual table, since 1 / sqrt(num_embeddings) could be 0 in float16."""


def bounds_of(config: BaseEmbeddingConfig, dtype: torch.dtype) -> tuple[float, float]:
    """Lower and upper bound of new weights: `weight_init_min` and `weight_init_max`, or TorchRec's defaults.

    Reference: torchrec.distributed.batched_embedding_kernel, `_generate_init_range_for_virtual_tables`.
    """
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    if config.use_virtual_table or config.num_embeddings > _ENDLESS:
        bound = math.sqrt(1 / _ENDLESS) if dtype == torch.float32 else 0.001
        low = -bound if config.weight_init_min is None else low
        high = bound if config.weight_init_max is None else high
    return low, high


def policy_of(config: BaseEmbeddingConfig) -> RowPolicy | None:
    """Policy of a table's rows; None = no row is evicted. ValueError if the config's policy is not supported."""
    policy: Any = config.virtual_table_eviction_policy
    if policy is None or not config.use_virtual_table or isinstance(policy, NoEvictionPolicy):
        return None
    above = getattr(policy, "training_id_eviction_trigger_count", 0) or None
    age = getattr(policy, "eviction_ttl_mins", 0)
    norm = getattr(policy, "eviction_threshold", 0)
    match policy:
        case FeatureScoreBasedEvictionPolicy(enable_eviction=False):
            return None
        case TimestampBasedEvictionPolicy() | FeatureScoreBasedEvictionPolicy() if age:
            return RowPolicy(expire_after_seconds=60 * age, sweep_above=above)
        case FeatureL2NormBasedEvictionPolicy() if norm:
            return RowPolicy(expire_below_norm=norm, sweep_weights=True, sweep_above=above)
        case _ if type(policy) in _OFF_AT_0 and not age and not norm:
            return None
    raise ValueError(
        f"table {config.name!r}: virtual_table_eviction_policy must be NoEvictionPolicy, TimestampBasedEvictionPolicy"
        f" or FeatureL2NormBasedEvictionPolicy, got {policy!r}. Tables of oneemb.dynamicemb evict their least used"
        " rows, by max_capacity and score_strategy"
    )


_OFF_AT_0 = (
    TimestampBasedEvictionPolicy, FeatureL2NormBasedEvictionPolicy, CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
)  # fmt: skip
"""Policies that evict no row while their thresholds are 0."""
