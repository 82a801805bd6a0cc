"""Changes between any two snapshots of one table, found by comparing the places of rows. The newer snapshot need not be
a delta since the older one.

The place of a row is its folder, its chunk and its number in the chunk. Each write of a row takes a new place. So a row
that has the same place in both snapshots has not changed. A row that compaction has moved counts as changed. A key that
has a row in the older snapshot and none in the newer one is gone.

Invariants:
- a place that is in both snapshots holds the same row: the keys file of the chunk is compared with the checksums that
  both snapshots have of it;
- memory grows with the number of changed keys, and by one bit for each row of the two snapshots.
"""

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import OtherSnapshotError, SnapshotNotFoundError, StorageError
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.snapshots.linked_rows import LinkedRows, every_key
from oneemb.storage.snapshots.owned_rows import open_part
from oneemb.storage.snapshots.snapshot_parts import PartedSnapshot
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows
from oneemb.storage.table.snapshot_reader import SnapshotReader

SHARE_MAX = 2
"""All rows must be read if more than 1 / `SHARE_MAX` of them have changed."""

_Links = list[list[SnapshotReader]]
"""Readers of the parts of each snapshot of a chain, the oldest snapshot first."""
_Bits = dict[tuple[str, int], np.ndarray]
"""{(folder, chunk): uint8, one bit for each row of the chunk}."""


def changed_rows(old: PartedSnapshot, new: PartedSnapshot) -> LinkedRows | None:
    """Rows of snapshot `new` that snapshot `old` lacks or has at another place; `gone()` of the result returns the keys
    that had a row in `old` and have none in `new`. The result can be used after its `close`, since files are opened
    when rows are read. None = the caller must read all rows: more than half of them have changed, the formats of rows
    differ, or one of the snapshots has been removed meanwhile.

    Raises:
        StorageError: files of one of the two are damaged or cannot be read.
    """
    if not _format_of(old).same_words(_format_of(new)):
        return None
    try:
        return _changed_rows(old, new)
    except StorageError:
        if _is_removed(old) or _is_removed(new):
            return None
        raise


def _changed_rows(old: PartedSnapshot, new: PartedSnapshot) -> LinkedRows | None:
    before, after = _opened(old), _opened(new)
    _check_chunks([*before, *after])
    old_bits, new_bits = _current(before), _current(after)
    changed = _without(new_bits, old_bits)
    count = sum(map(_count, changed.values()))
    if SHARE_MAX * count > sum(map(_count, new_bits.values())):
        return None
    chosen, written = _choose(after, changed), HashIndex(Threads(1), count)
    written.put(*LinkedRows([chosen]).keys(every_key), np.zeros(count, np.int64))
    former = LinkedRows([_choose(before, _without(old_bits, new_bits))])
    return LinkedRows([chosen], gone=former.keys(lambda table_N, id_N: written.find(table_N, id_N) < 0))


def _opened(snapshot: PartedSnapshot) -> _Links:
    return [[open_part(part) for part in link.parts] for link in (*snapshot.before, snapshot)]


def _current(links: _Links) -> _Bits:
    """Places of the rows that a load of the chain gives: the newest place of each key that is not gone."""
    later, found = HashIndex(Threads(1)), _Bits()
    for n in range(len(links) - 1, -1, -1):
        for reader in links[n]:
            for number in reader.parts:
                bit_N = reader.bits(number)
                if len(later):
                    row_N, table_N, id_N = reader.rows_of(number)
                    current_N = np.zeros(8 * len(bit_N), np.bool_)
                    current_N[row_N[later.find(table_N, id_N) < 0]] = True
                    bit_N = np.packbits(current_N, bitorder="little")
                place = reader.folder, number
                found[place] = bit_N if place not in found else _either(found[place], bit_N)
        if n:
            for reader in links[n]:
                for keys in [*reader.keys(every_key), reader.gone()]:
                    later.put(*keys, np.zeros(len(keys[1]), np.int64))
    return found


def _check_chunks(links: _Links) -> None:
    """Raise CorruptTableError unless all parts with the same chunk were saved with the same file: if their ends differ,
    the keys file must have the checksum of each."""
    numbers: dict[tuple[str, int], list[SnapshotReader]] = {}
    for link in links:
        for reader in link:
            for number in reader.parts:
                numbers.setdefault((reader.folder, number), []).append(reader)
    for (_, number), readers in numbers.items():
        parts = [reader.parts[number] for reader in readers]
        if len({(part.blocks, part.keys_bytes, part.keys_sum) for part in parts}) > 1:
            for reader in readers:
                reader.check_keys_end(number)


def _choose(links: _Links, wanted: _Bits) -> list[SnapshotReader]:
    """Readers that read only the wanted places, each place from the newest snapshot that has it."""
    left, chosen = dict(wanted), []
    for reader in (reader for link in reversed(links) for reader in link):
        only = {}
        for number in reader.parts:
            place = reader.folder, number
            if place in left and (taken_N := _both(left[place], reader.bits(number))).any():
                only[number], left[place] = taken_N, _minus(left[place], taken_N)
        if only:
            chosen.append(reader.only(only))
    return chosen


def _without(bits: _Bits, others: _Bits) -> _Bits:
    """Places of `bits` that `others` does not have."""
    return {place: _minus(bit_N, others[place]) if place in others else bit_N for place, bit_N in bits.items()}


def _minus(bit_N: np.ndarray, other_M: np.ndarray) -> np.ndarray:
    bit_N, size = bit_N.copy(), min(len(bit_N), len(other_M))
    bit_N[:size] &= ~other_M[:size]
    return bit_N


def _both(bit_N: np.ndarray, other_M: np.ndarray) -> np.ndarray:
    size = min(len(bit_N), len(other_M))
    return bit_N[:size] & other_M[:size]


def _either(bit_N: np.ndarray, other_M: np.ndarray) -> np.ndarray:
    longer, shorter = (bit_N, other_M) if len(bit_N) > len(other_M) else (other_M, bit_N)
    longer = longer.copy()
    longer[: len(shorter)] |= shorter
    return longer


def _count(bit_N: np.ndarray) -> int:
    return int(np.count_nonzero(np.unpackbits(bit_N)))


def _format_of(snapshot: PartedSnapshot) -> RowFormat:
    return SnapshotRows.of_meta(snapshot.info.meta, snapshot.name).format


def _is_removed(snapshot: PartedSnapshot) -> bool:
    """Whether a snapshot, or one of its ancestors, has been removed or replaced since it was listed."""
    try:
        _opened(snapshot)
    except (SnapshotNotFoundError, OtherSnapshotError):
        return True
    except StorageError:
        pass  # It is damaged.
    return False
