"""Virtual tables of TorchRec's configs: how their rows begin, and which of them leave.

    use_virtual_table                   a row begins at its first lookup, without `store_options` too
    virtual_table_eviction_policy       which rows leave; for virtual tables only, as in TorchRec

    NoEvictionPolicy                    no row leaves
    TimestampBasedEvictionPolicy        rows leave that were not looked up for eviction_ttl_mins
    FeatureL2NormBasedEvictionPolicy    rows leave whose norm is below eviction_threshold
    FeatureScoreBasedEvictionPolicy     the same as TimestampBasedEvictionPolicy; refused without eviction_ttl_mins
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy   are refused, unless thresholds and ages are 0, by which no row leaves

Each step checks a 256th of the rows, or none while a rank has training_id_eviction_trigger_count rows or fewer.
"""

import math
from typing import Any

import torch
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
    FeatureL2NormBasedEvictionPolicy,
    FeatureScoreBasedEvictionPolicy,
    NoEvictionPolicy,
    TimestampBasedEvictionPolicy,
)

from oneemb.policies import RowPolicy

_ENDLESS = 4_000_000_000
"""A table with more rows has the bounds of a virtual one: 1 / sqrt(num_embeddings) could be 0 in float16."""


def bounds_of(config: BaseEmbeddingConfig, dtype: torch.dtype) -> tuple[float, float]:
    """Bounds of new weights, unless `init_fn` makes them: `weight_init_min` and `_max`, or defaults.

    Reference: torchrec.distributed.batched_embedding_kernel, `_generate_init_range_for_virtual_tables`.
    """
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    if config.use_virtual_table or config.num_embeddings > _ENDLESS:
        bound = math.sqrt(1 / _ENDLESS) if dtype == torch.float32 else 0.001
        low = -bound if config.weight_init_min is None else low
        high = bound if config.weight_init_max is None else high
    return low, high


def policy_of(config: BaseEmbeddingConfig) -> RowPolicy | None:
    """Policy of the rows of a table; None = every row stays.

    Raises:
        ValueError: the config's policy is refused; see the head of this file.
    """
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
        f" or FeatureL2NormBasedEvictionPolicy, by which rows can leave here, got {policy!r}. The least used rows leave"
        " the tables of oneemb.dynamicemb, by max_capacity and score_strategy"
    )


_OFF_AT_0 = (
    TimestampBasedEvictionPolicy, FeatureL2NormBasedEvictionPolicy, CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
)  # fmt: skip
"""Policies by which no row leaves if their thresholds are 0."""
