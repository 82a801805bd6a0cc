"""Sizes with which an index of few keys has shards in its file, and a list of keys that wait for it."""

from oneemb.storage import cold_index, compact_index
from oneemb.storage.table import pending_keys
from oneemb.storage.table.persistent_table import PersistentTable


def make_shards_small(patch, small=1, overlay=30):
    """Set the most keys of a shard that has no blocks, and the most keys of the overlay if the limit of memory is
    small. Few blocks are read at once, so that few are kept. Lists of pending keys hold up to two overlays, so that
    they take whole puts of the tests."""
    patch.setattr(compact_index, "_SMALL", small)
    patch.setattr(cold_index, "_OVERLAY_MIN", overlay)
    patch.setattr(cold_index, "_READ_BLOCKS", 16)
    patch.setattr(pending_keys, "_LIST_MIN", 1)
    patch.setattr(pending_keys, "_LISTS_MIN", 2)


def keep_index_on_disk(patch, overlay=30):
    """Let every table that is opened have its index on disk, as far as it can."""
    make_shards_small(patch, overlay=overlay)
    opened = PersistentTable.open
    patch.setattr(PersistentTable, "open", lambda *args, **more: opened(*args, **more | {"index_memory_bytes": 1}))
