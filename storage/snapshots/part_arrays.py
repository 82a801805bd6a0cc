"""Arrays of snapshots beside their rows, by name, joined from several parts for one owner of keys.

sightings of table t     of ids that have no row: see admission.py
"""

from collections.abc import Mapping, Sequence

import numpy as np

from oneemb.storage.table.snapshot_reader import Keep

_SIGHTINGS = "sightings of table "


def sightings_name(table: int) -> str:
    """The name of the array that has the sightings of a table's ids."""
    return f"{_SIGHTINGS}{table}"


def joined_arrays(parts: Sequence[Mapping[str, np.ndarray]], is_own: Keep) -> dict[str, np.ndarray]:
    """One owner's share of the arrays that parts of a snapshot have beside their rows.

    Args:
        parts: arrays of each part, by name.
        is_own: whether keys are the owner's.
    """
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        arrays = [part[name] for part in parts if name in part]
        table = name.removeprefix(_SIGHTINGS)
        if name.startswith(_SIGHTINGS) and table.isdecimal():
            joined[name] = _joined_sightings(arrays, int(table), is_own)
        else:
            joined[name] = arrays[0]
    return joined


def _joined_sightings(arrays: Sequence[np.ndarray], table: int, is_own: Keep) -> np.ndarray:
    """Counts of several parts. A sketch of each counts none of its own ids too low, so neither does the maximum."""
    first, same = arrays[0], [array for array in arrays if array.dtype == arrays[0].dtype and array.ndim == 2]
    if first.dtype == np.uint32:
        return np.maximum.reduce([array for array in same if array.shape == first.shape] or [first])
    if first.dtype != np.int64 or any(len(array) == 0 or array.shape[1] != 3 for array in same) or not same:
        return first  # which whoever reads it refuses
    head = np.max([array[0] for array in same], axis=0)
    body_N3 = np.concatenate([array[1:] for array in same])
    body_N3 = body_N3[is_own(np.full(len(body_N3), table, np.int32), np.ascontiguousarray(body_N3[:, 0]))]
    # Of an id that several have counted, which they have not together, the latest counts.
    body_N3 = body_N3[np.lexsort((body_N3[:, 1].view(np.uint64), body_N3[:, 0]))]
    last_N = np.append(body_N3[1:, 0] != body_N3[:-1, 0], True)[: len(body_N3)]
    return np.concatenate([head[None], body_N3[last_N]])
