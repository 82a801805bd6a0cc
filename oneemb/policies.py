"""Policies of rows, for an embedding's argument `policy`: they say which ids get a row, and which rows are evicted.

policy = oneemb.policies.RowPolicy(evict=oneemb.policies.LFU(half_life=10_000), expire_after_steps=100_000) embedding =
oneemb.MultiTableEmbedding(..., store_options=make_..._options(path, capacity=10_000_000), policy=policy)
"""

from oneemb.storage.policies.row_policy import (
    LFU,
    LRU,
    AdmitAfter,
    AdmitChance,
    AdmitWhere,
    EpochLFU,
    EpochLRU,
    GivenScore,
    MixedLFU,
    RowPolicy,
    StepLRU,
)  # fmt: skip

__all__ = [
    "LFU", "LRU", "AdmitAfter", "AdmitChance", "AdmitWhere", "EpochLFU", "EpochLRU", "GivenScore", "MixedLFU",
    "RowPolicy", "StepLRU",
]  # fmt: skip
