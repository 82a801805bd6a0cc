"""Results of `embedding.stats()` and `embedding.metrics()`: current sizes, and counters since the tiers were made."""

from typing import Any, NotRequired, TypedDict, cast


class TierStats(TypedDict):
    """Sizes and counters of one tier in memory."""

    rows: int
    slots: int
    """Number of slots, with and without rows."""
    pinned: int
    """Number of slots pinned for lookups that wait for their update."""
    dirty: int
    """Number of rows that have changed since they were written to the tier below."""
    hits: int
    """Number of unique keys found; of ids, for lookups without gradient on the device store."""
    misses: int
    new_rows: int
    evicted: int
    written_down: int
    """Number of rows written to the tier below."""
    bytes: int
    """Memory of the rows and of the index."""


class RemoteStats(TypedDict):
    """Sizes and counters of the rows on a parameter server."""

    rows: int
    dirty: int
    """Number of rows that were pushed since the last snapshot."""
    rows_pulled: int
    rows_pushed: int
    rows_left_behind: int
    """Number of rows that the embedding has erased or replaced, and that may still be on the server."""
    bytes: int
    """Memory of the index in this process."""


class TableStats(TypedDict):
    """Sizes and counters of the persistent table."""

    rows: int
    physical_block_size: int
    chunk_bytes: int
    chunks: int
    snapshots: int
    disk_bytes: int
    live_bytes: int
    loose_bytes: int
    snapshot_bytes: int
    memory_bytes: int
    index_bytes: int
    index_disk_bytes: int
    """Bytes of the index on the disk; 0 without `index_memory_mb`."""
    index_blocks_read: int
    bytes_written: int
    bytes_removed: int
    rows_moved: int
    rows_got: int
    rows_missing: int
    rows_put: int
    io: str
    """Way of reading blocks."""
    read_depth: int
    """Largest number of reads in flight."""
    read_requests: int
    bytes_read: int


class PolicyStats(TypedDict):
    """Counters and memory of a policy."""

    left: dict[str, int]
    """{reason: number of rows evicted since the embedding was made}, with the reasons "capacity", "expired", "norm",
    "where" and "erased"."""
    bytes: int
    """Memory of the policy, without rows and their usage metadata."""
    admitted: NotRequired[int]
    """Number of ids that a rule of admission gave a row; an id counts once for each lookup."""
    refused: NotRequired[int]
    """Number of ids that a rule of admission gave no row; an id counts once for each lookup."""
    turned_away: NotRequired[int]
    """Number of ids that got no row since the table was full (`when_full="refuse"`); an id counts once a lookup."""


class EmbeddingStats(TypedDict):
    """Sizes and counters of an embedding, with a dict for each tier. Before the first lookup there are no tiers."""

    rows: int
    """Number of known ids of all tables; with `process_group`, of ids whose rows or copies this rank has."""
    replicated_rows: int
    """Number of known ids of replicated tables, whose rows all ranks copy; 0 without `process_group`."""
    step: int
    """Number of updates made."""
    hit_rate: float
    """Share of unique keys found in the hot tier; of ids, for lookups without gradient on the device store."""
    policy: NotRequired[PolicyStats]
    """Counters of the policy, if the embedding has one."""
    device: NotRequired[TierStats]
    host: NotRequired[TierStats]
    remote: NotRequired[RemoteStats]
    persistent: NotRequired[TableStats]


def memory_of(stats: EmbeddingStats) -> int:
    """Bytes of memory of all tiers, including the indexes of the persistent table or server."""
    by_name = cast("dict[str, Any]", stats)  # Keys of a TypedDict are literals.
    tiers = sum(by_name[place]["bytes"] for place in ("device", "host", "remote") if place in by_name)
    return int(tiers + by_name.get("persistent", {}).get("memory_bytes", 0))


def metrics_of(stats: EmbeddingStats, before: dict[str, int]) -> tuple[dict[str, float], dict[str, int]]:
    """(result of `embedding.metrics()`, counters to pass as `before` in the next call; {} in the first call)."""
    by_name = cast("dict[str, Any]", stats)  # Keys of a TypedDict are literals.
    hot, table, remote = (by_name.get(place, {}) for place in ("device", "persistent", "remote"))
    read = table.get("rows_got", 0) - table.get("rows_missing", 0) + remote.get("rows_pulled", 0)
    counted = {"hits": hot.get("hits", 0), "misses": hot.get("misses", 0), "read": read}
    if any(counted[name] < then for name, then in before.items()):
        before = {}  # The tiers were made anew, so counters began at 0.
    hits, misses, read_now = (counted[name] - before.get(name, 0) for name in ("hits", "misses", "read"))
    tiers = [by_name[place] for place in ("device", "host") if place in by_name]
    figures: dict[str, float] = {
        "rows": stats["rows"],
        "step": stats["step"],
        "hit_rate": hits / (hits + misses) if hits + misses else 1.0,
        "served_without_disk": 1 - min(1.0, read_now / (hits + misses)) if hits + misses else 1.0,
        "memory_bytes": memory_of(stats),
        "disk_bytes": table.get("disk_bytes", 0),
        "rows_evicted": sum(tier["evicted"] for tier in tiers),
        "rows_read": read,
        "rows_written": table.get("rows_put", 0) + remote.get("rows_pushed", 0),
        "rows_left": sum(by_name.get("policy", {}).get("left", {}).values()),
    }
    return figures, counted
