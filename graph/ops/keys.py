"""The unique keys of a batch of ids.

N ids, U unique keys, P bags, B samples, T tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import oneemb.graph.ops.batch_ids as batch_ids
from oneemb.graph.ops.op import PREPARE, Op
from oneemb.kernels import loops as kernels
from oneemb.kernels.arrays import Bags
from oneemb.kernels.host_loops import HostLoops
from oneemb.kernels.loops import Loops
from oneemb.kernels.places import loops_of
from oneemb.kernels.threads import Threads

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_ONE_THREAD = Threads(1)
_NO_LOOPS = HostLoops(_ONE_THREAD)


@dataclass(frozen=True)
class Keys:
    """The unique keys of a batch of ids and the shape the ids had."""

    shape: torch.Size
    """Shape of the ids; with bags, [B, T] or [P]."""
    unique: kernels.Keys
    bags: Bags | None
    loops: Loops
    """Loops that work where the ids are."""
    uses_U: np.ndarray | None = None
    """int64: number of ids in the ranks' batches that each key has, for policies; None = the number in `unique`."""


def measure_unique_keys(args: object, keys: Any) -> tuple[int, int]:
    """Ids and bytes. Any: the keys are `Keys` or, from another file, `MergedKeys`."""
    ids, unique = len(keys.unique.inverse_N), len(keys.unique.id_U)
    return ids, ids * (8 + 8 + 8) + unique * (4 + 8 + 8)


@Op(PREPARE, gives="keys", measure=measure_unique_keys)
def unique_keys(
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    key_type: torch.dtype,
    padding_idx: int | None,
    offsets: torch.Tensor | None = None,
    columns: Sequence[int] | None = None,
    *,
    threads: Threads = _ONE_THREAD,
) -> Keys:
    """The unique (table, id) pairs of a batch, in order of first occurrence, padding left out.

    Of bags, where no `table_ids` are given, they come table by table on the CPU.

    Args:
        ids: [B, T] of `key_type`: column t is looked up in table t. With one table, or with `table_ids`, any shape.
        table_ids: integers from 0 to T-1 of a shape that broadcasts to that of `ids`: the table of each id.
        offsets: integers [P + 1] from 0 to N, none below the one before: `ids` is [N] and bag p holds the ids from
            offsets[p] to offsets[p + 1] - 1. `table_ids` then says the table of each bag, [P], or of all; without it
            bags are those of B samples one after another, P = B * T, bag p of table p % T.
        columns: the table of each of C columns, none below the one before: bags are those of C columns one after
            another, P = C * B, bag p of column p // B. They give [B, C].
        threads: runs the loops on the CPU.

    Raises:
        TypeError, ValueError: dtype, device, shape or range is not as above.
    """
    loops = loops_of(ids, threads) if isinstance(ids, torch.Tensor) else _NO_LOOPS  # which is refused just below
    if offsets is None:
        if columns is not None:
            batch_ids.check_no_columns(columns)
        batch_ids.check_ids(ids, table_ids, num_tables, key_type)
        table_N, id_N, check = batch_ids.tables_and_ids(ids, table_ids, num_tables, loops)
        unique = loops.unique_keys(table_N, id_N, tables=num_tables, padding_id=padding_idx, check=check)
        return Keys(ids.shape, unique, None, loops)
    shape, offset_P1, table_P, check_bags = batch_ids.bags_of_ids(
        ids, table_ids, num_tables, key_type, offsets, columns, loops
    )
    id_N = loops.array(ids.detach().contiguous())
    unique, bags = loops.unique_keys_of_bags(
        id_N, loops.array(offset_P1), None if table_P is None else loops.array(table_P), tables=num_tables,
        columns=columns, padding_id=padding_idx, check=check_bags,
    )  # fmt: skip
    return Keys(shape, unique, bags, loops)
