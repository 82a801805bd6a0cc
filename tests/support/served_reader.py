"""Reads a file of served rows as its FORMAT.md says, in plain Python: an oracle that shares no code with oneemb."""

import json
import struct

_MASK = (1 << 64) - 1


def _mixed(x, shifts, factors):
    for shift, factor in zip(shifts, factors, strict=True):
        x = (x ^ x >> shift) * factor & _MASK
    return x


def _seed(table, salt):
    """splitmix64's finaliser of the table and the salt, and again of id 0."""
    x = (salt + (table + 1) * 0x9E3779B97F4A7C15) & _MASK
    for _ in range(2):
        x = _mixed(x, (30, 27), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
        x ^= x >> 31
    return x


def slot_of(table, id, counts, slots, salt, pilots):
    """The slot of a key.

    Args:
        counts, slots: of tables, {table: rows} and {table: slots of one part}, rising.
        pilots: of all tables.
    """
    first_bucket = first_slot = 0
    for t, rows in counts.items():
        parts = -(-rows // 65536)
        buckets = parts * -(-rows // (4 * max(parts, 1)))
        if t == table:
            x = _mixed((id & _MASK) ^ _seed(table, salt), (32, 32), (0xD6E8FEB86659FD93,) * 2)
            hash = x ^ x >> 32
            pilot = pilots[first_bucket + (hash * buckets >> 64)]
            mixed = (hash ^ pilot * 0x9E3779B97F4A7C15 & _MASK) * 0xBF58476D1CE4E5B9 & _MASK
            return first_slot + (hash * parts >> 64) * slots[t] + (mixed * slots[t] >> 64)
        first_bucket, first_slot = first_bucket + buckets, first_slot + parts * slots[t]
    raise KeyError(table)


class ServedReader:
    """The rows of a file, as bytes."""

    def __init__(self, path):
        with open(path, "rb") as file:
            self._data = file.read()
        begin, length = struct.unpack_from("<2Q", self._data, 40)
        self.manifest = json.loads(self._data[begin : begin + length])
        m = self.manifest
        its = sorted(zip(m["tables"], m["rows_of_tables"], m["slots_of_tables"], strict=True))
        self.counts, self.slots = {t: rows for t, rows, _ in its}, {t: slots for t, _, slots in its}
        self.record_bytes = -(-m["row_bytes"] // 8) * 8 + 8
        parts = {t: -(-rows // 65536) for t, rows in self.counts.items()}
        self.all_slots = sum(parts[t] * self.slots[t] for t in parts)
        blocks = -(-max(1, self.all_slots) * self.record_bytes // 4096)
        buckets = sum(parts[t] * -(-rows // (4 * max(parts[t], 1))) for t, rows in self.counts.items())
        self._pilots = struct.unpack_from(f"<{max(1, buckets)}H", self._data, 4096 * (1 + blocks))

    def record(self, slot):
        """Its row and its id."""
        begin = 4096 + slot * self.record_bytes
        record = self._data[begin : begin + self.record_bytes]
        return record[: self.manifest["row_bytes"]], struct.unpack("<q", record[-8:])[0]

    def slot_of(self, table, id):
        """Where the row of a key would be."""
        return slot_of(table, id, self.counts, self.slots, self.manifest["salt"], self._pilots)

    def row_of(self, table, id):
        """Bytes of the row of a key, None if it has none."""
        if not self.counts.get(table):
            return None
        row, its_id = self.record(self.slot_of(table, id))
        return row if its_id == id else None
