"""The tiers of an embedding, stacked.

device store     hot tier (all rows)   ->  persistent table (snapshots)
cached host      hot tier (cache)      ->  host tier (all rows)  ->  persistent table (snapshots)
cached SSD       hot tier (cache)     [->  host tier (cache)]    ->  persistent table (all rows)
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.host_loops import HostLoops
from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.loops import Loops
from oneemb.kernels.threads import Threads
from oneemb.storage.row_layout import RowLayout
from oneemb.storage.row_store import RowStore, StoreFullError
from oneemb.storage.tiers.hot_rows import HotRows
from oneemb.storage.tiers.hot_tier import SLOT_OVERHEAD_BYTES, HotTier

__all__ = ["NewRows", "StorePlan", "check_room", "make_tiers"]

# Of the machine's memory, or the GPU's, what a tier without a budget may come to use.
_MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class StorePlan:
    """Which tiers there are and how large.

    Args:
        persistent_path: folder of the persistent table.
        cache_bytes: budget of the hot tier; None = it holds all rows.
        host_bytes: budget of a host tier under the hot tier; 0 = no host tier, None = it holds all rows.
        capacity: rows in all at most; None = no limit but the memory's.
        physical_block_size: 512 or 4096.
        cache_policy: which rows caches evict first, "lru" or "lfu"; oneemb.storage.tiers.hot_tier says what they mean.
    """

    persistent_path: str
    cache_bytes: int | None
    host_bytes: int | None
    capacity: int | None
    physical_block_size: int
    cache_policy: str = "lfu"


class NewRows:
    """How rows begin: a `BeginRows`.

    Args:
        state: float32 [Z], what their optimizer's state holds.
    """

    def __init__(self, layout: RowLayout, initial: InitialRows, state: np.ndarray, loops: Loops):
        self.layout = layout
        self.initial = initial
        self.state = state
        self.loops = loops
        self._initial = loops.initial_rows(initial)

    def __call__(self, row_SW: Array, slot_M: Array, table_M: Array, id_M: Array) -> None:
        self.loops.init_rows(
            self.layout.weights(row_SW), row_SW, slot_M, table_M, id_M, self._initial, self.state,
            state_begin=self.layout.state_begin,
        )  # fmt: skip


def make_tiers(plan: StorePlan, begin: NewRows, table: RowStore, threads: Threads, writing: Any) -> list[HotRows]:
    """The tiers from the hot one, where the loops of `begin` run, down to the one above the persistent table.

    Args:
        threads: runs what is done on the host.
        writing: the lock that is held by whoever writes rows in place.
    """
    below, host = table, []
    if plan.host_bytes != 0:
        host = [_host_tier("host", plan, plan.host_bytes, begin.layout, below, None, None, threads, None)]
        below = host[0]
    if isinstance(begin.loops, HostLoops):
        hot: HotRows = _host_tier(
            "device", plan, plan.cache_bytes, begin.layout, below, plan.capacity, begin, threads, writing
        )
    else:
        hot = _device_tier(plan, begin, below)
    return [hot, *host]


def _host_tier(
    name: str, plan: StorePlan, budget_bytes: int | None, layout: RowLayout, below: RowStore, row_limit: int | None,
    begin: NewRows | None, threads: Threads, writing: Any,
) -> HotTier:  # fmt: skip
    return HotTier(
        name, row_width=layout.row_width, slots=_host_slots(plan, layout, budget_bytes), below=below,
        resident=budget_bytes is None, row_limit=row_limit, policy=plan.cache_policy, begin=begin, threads=threads,
        writing=writing,
    )  # fmt: skip


def _device_tier(plan: StorePlan, begin: NewRows, below: RowStore) -> HotRows:
    from oneemb.kernels.cuda_loops import CudaLoops
    from oneemb.storage.tiers import device_tier

    assert isinstance(begin.loops, CudaLoops)
    slot_bytes = -(-begin.layout.row_bytes // 16) * 16 + device_tier.SLOT_OVERHEAD_BYTES
    budget_bytes = plan.cache_bytes
    if budget_bytes is None:
        budget_bytes = int(begin.loops.gpu.free_bytes() * _MEMORY_SHARE)
    slots = max(budget_bytes // slot_bytes, 1)
    if plan.cache_bytes is None and plan.capacity is not None:
        slots = min(slots, plan.capacity)
    return device_tier.DeviceTier(
        "device", row_width=begin.layout.row_width, slots=slots, below=below, resident=plan.cache_bytes is None,
        row_limit=plan.capacity, policy=plan.cache_policy, begin=begin, loops=begin.loops,
    )  # fmt: skip


def check_room(plan: StorePlan, layout: RowLayout, loops: Loops, rows: int) -> None:
    """Raise StoreFullError if a tier on the host that holds all rows could not hold so many of this layout."""
    for name, budget_bytes in (("device", plan.cache_bytes), ("host", plan.host_bytes)):
        slots = _host_slots(plan, layout, budget_bytes)
        on_host = name == "host" or isinstance(loops, HostLoops)
        if budget_bytes is None and on_host and rows > slots:
            raise StoreFullError(
                f"the {name} tier has room for {slots} rows of {layout.row_bytes} bytes and must hold all of"
                f" {rows}; they are as they were. Give it more memory or capacity, or an optimizer with less state"
            )


def _host_slots(plan: StorePlan, layout: RowLayout, budget_bytes: int | None) -> int:
    slot_bytes = layout.row_bytes + SLOT_OVERHEAD_BYTES
    if budget_bytes is not None:
        return max(budget_bytes // slot_bytes, 1)
    slots = int(_memory_bytes() * _MEMORY_SHARE) // slot_bytes
    return max(slots if plan.capacity is None else min(slots, plan.capacity), 1)


def _memory_bytes() -> int:
    """Memory this process may use: the machine's, or what its control group allows."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))
