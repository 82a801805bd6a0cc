"""Counts of a ledger, as a snapshot keeps them."""

from dataclasses import dataclass, fields
from typing import Any

from oneemb.storage.errors import CorruptTableError
from oneemb.storage.hash_index import SHARDS

SECONDS_MAX = 2**32 - 1
"""Most seconds that a ledger counts."""

_UNLIMITED = 2**62


@dataclass
class LedgerClock:
    """Counts of a ledger; a snapshot keeps them."""

    lookups: int = 0
    shard: int = 0
    """Where the next round of eviction begins."""
    swept: int = 0
    """The shard at which the next sweep begins."""
    swept_step: int = 0
    """The step of the last sweep."""
    seconds: int = 0
    """On the ledger's own clock, which stands while there is no job."""
    epoch: int = 0
    steps: int = 0
    """Steps before those of the store, which begins to count them anew where rows lose their optimizer's state."""

    @classmethod
    def of_meta(cls, meta: dict[str, Any], name: str) -> "LedgerClock | None":
        """The clock that `Ledger.to_meta` has put into the meta of snapshot `name`; None = it is not there.

        Raises:
            CorruptTableError: the entry is none that a ledger writes.
        """
        found = meta.get("ledger")
        if found is None:
            return None
        names = {field.name for field in fields(cls)}
        most = {"shard": SHARDS - 1, "swept": SHARDS - 1, "seconds": SECONDS_MAX, "epoch": 2**32 - 1}
        if not isinstance(found, dict) or found.keys() != names or not all(
            type(value) is int and 0 <= value <= most.get(key, _UNLIMITED) for key, value in found.items()
        ):  # fmt: skip
            raise CorruptTableError(
                f"snapshot {name!r} says of the uses of its rows what no embedding says: {repr(found)[:100]}; restore"
                " its file from a copy, or load another one"
            )
        return cls(**found)
