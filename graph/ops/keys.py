"""Which keys the ids of a batch are."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from oneemb.graph.ops import batch_ids
from oneemb.graph.ops.leases import Keys
from oneemb.graph.ops.op import LOOKUP, PREPARE, op
from oneemb.kernels.arrays import Array
from oneemb.kernels.host_loops import HostLoops
from oneemb.kernels.loops import Loops
from oneemb.kernels.places import loops_of
from oneemb.kernels.threads import Threads

__all__ = ["measure_unique_keys", "tables_and_ids", "unique_keys"]


_ONE_THREAD = Threads(1)


def measure_unique_keys(args: Any, keys: Any) -> tuple[int, int]:
    ids, unique = len(keys.unique.inverse_N), len(keys.unique.id_U)
    return ids, ids * (8 + 8 + 8) + unique * (4 + 8 + 8)


@op(LOOKUP | PREPARE, gives="keys", pure=True, measure=measure_unique_keys)
def unique_keys(
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    key_type: torch.dtype,
    padding_idx: int | None,
    offsets: torch.Tensor | None = None,
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
        threads: runs the loops on the CPU.

    Raises:
        TypeError, ValueError: dtype, device, shape or range is not as above.
    """
    loops = loops_of(ids, threads) if isinstance(ids, torch.Tensor) else HostLoops(threads)
    if offsets is not None:
        return _unique_keys_of_bags(ids, table_ids, num_tables, key_type, padding_idx, offsets, loops)
    table_N, id_N, check = tables_and_ids(ids, table_ids, num_tables, key_type, loops)
    unique = loops.unique_keys(table_N, id_N, tables=num_tables, padding_id=padding_idx, check=check)
    return Keys(ids.shape, unique, None, loops)


def tables_and_ids(
    ids: torch.Tensor, table_ids: torch.Tensor | None, num_tables: int, key_type: torch.dtype, loops: Loops
) -> tuple[Array, Array, Callable[[], None] | None]:
    """table_N, id_N and what checks the values of `table_ids`."""
    batch_ids.check_ids(ids, table_ids, num_tables, key_type)
    id_N = loops.array(ids.detach().reshape(-1).contiguous())
    if table_ids is None:
        return loops.tables_of_columns(len(id_N), num_tables), id_N, None
    check = functools.partial(
        batch_ids.check_tables, table_ids if ids.numel() else table_ids.reshape(-1)[:0], num_tables
    )
    table_N = loops.tables(table_ids, num_tables).expand(ids.shape).reshape(-1).contiguous()
    return loops.array(table_N), id_N, check


def _unique_keys_of_bags(
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    key_type: torch.dtype,
    padding_idx: int | None,
    offsets: torch.Tensor,
    loops: Loops,
) -> Keys:
    shape, offset_P1, table_P, check = batch_ids.bags_of_ids(ids, table_ids, num_tables, key_type, offsets, loops)
    id_N = loops.array(ids.detach().contiguous())
    unique, bags = loops.unique_keys_of_bags(
        id_N, loops.array(offset_P1), None if table_P is None else loops.array(table_P), tables=num_tables,
        padding_id=padding_idx, check=check,
    )  # fmt: skip
    return Keys(shape, unique, bags, loops)
