"""Results of `embedding.stats()` and `embedding.metrics()`: sizes now, and counters since the tiers were made."""

from typing import Any, NotRequired, TypedDict, cast


class TierStats(TypedDict):
    """One tier in memory."""

    rows: int
    slots: int
    """Places for rows."""
    pinned: int
    """Slots held for lookups whose update is still to come."""
    dirty: int
    """Rows that have changed since they were written to the store below."""
    hits: int
    """Unique keys found; in lookups without gradient on the device store, ids."""
    misses: int
    new_rows: int
    evicted: int
    written_down: int
    """Rows written to the store below."""
    bytes: int
    """Memory of the rows and of their index."""


class RemoteStats(TypedDict):
    """Rows on a parameter server."""

    rows: int
    dirty: int
    """Rows that were pushed since the last snapshot."""
    rows_pulled: int
    rows_pushed: int
    rows_left_behind: int
    """Rows that were erased or replaced here, and may be on the server still."""
    bytes: int
    """Memory of the index here."""


class TableStats(TypedDict):
    """The persistent table."""

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
    bytes_written: int
    bytes_removed: int
    rows_moved: int
    rows_got: int
    rows_missing: int
    rows_put: int
    io: str
    """Kind of block reads."""
    read_depth: int
    """Reads in flight at most."""
    read_requests: int
    bytes_read: int


class PolicyStats(TypedDict):
    """Counters of a policy, and its memory."""

    left: dict[str, int]
    """Rows evicted since the embedding was made, by reason: "capacity", "expired", "norm", "where", "erased"."""
    bytes: int
    """Memory beside rows and their records."""
    admitted: NotRequired[int]
    """Ids that were looked up, each once a lookup, and got a row by a rule of admission."""
    refused: NotRequired[int]
    """Ids that were looked up, and got no row by a rule of admission."""
    turned_away: NotRequired[int]
    """Ids of lookups that got no row since their table was full, with `when_full="refuse"`."""


class EmbeddingStats(TypedDict):
    """An embedding, with a dict for each place that keeps its rows. There are none before the first lookup."""

    rows: int
    """Known ids of all tables; with `process_group`, those whose rows this rank has."""
    replicated_rows: int
    """Known ids of replicated tables, of which other ranks have copies too; 0 without `process_group`."""
    step: int
    """Updates made."""
    hit_rate: float
    """Share of unique keys found in the hot tier; of ids, in lookups without gradient on the device store."""
    policy: NotRequired[PolicyStats]
    """Counters of the policy, if the embedding has one."""
    device: NotRequired[TierStats]
    host: NotRequired[TierStats]
    remote: NotRequired[RemoteStats]
    persistent: NotRequired[TableStats]


def memory_of(stats: EmbeddingStats) -> int:
    """Bytes of memory of all tiers, with indexes of the store below them."""
    its = cast("dict[str, Any]", stats)  # Keys of a TypedDict are literals.
    tiers = sum(its[place]["bytes"] for place in ("device", "host", "remote") if place in its)
    return int(tiers + its.get("persistent", {}).get("memory_bytes", 0))


def metrics_of(stats: EmbeddingStats, before: dict[str, int]) -> tuple[dict[str, float], dict[str, int]]:
    """Figures of `embedding.metrics()`, and the counters to give the next call as `before`; none at the first."""
    its = cast("dict[str, Any]", stats)  # Keys of a TypedDict are literals.
    hot, table, remote = (its.get(place, {}) for place in ("device", "persistent", "remote"))
    read = table.get("rows_got", 0) - table.get("rows_missing", 0) + remote.get("rows_pulled", 0)
    counted = {"hits": hot.get("hits", 0), "misses": hot.get("misses", 0), "read": read}
    if any(counted[name] < then for name, then in before.items()):
        before = {}  # The tiers have been made anew.
    hits, misses, read_now = (counted[name] - before.get(name, 0) for name in ("hits", "misses", "read"))
    tiers = [its[place] for place in ("device", "host") if place in its]
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
        "rows_left": sum(its.get("policy", {}).get("left", {}).values()),
    }
    return figures, counted
