"""The tiers of an embedding, stacked.

device store     hot tier (all rows)   ->  persistent table (snapshots)
cached host      hot tier (cache)      ->  host tier (all rows)  ->  persistent table (snapshots)
cached SSD       hot tier (cache)     [->  host tier (cache)]    ->  persistent table (all rows)
cached remote    hot tier (cache)      ->  remote tier (all rows) -> persistent table (snapshots)
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from oneemb.kernels.arrays import Array
from oneemb.kernels.backend import Backend
from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StoreFullError
from oneemb.storage.policies.row_policy import RowPolicy, rows_instead
from oneemb.storage.remote.servers import open_server
from oneemb.storage.row_store import RowStore
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.tiers.hot_rows import HotRows, Tier
from oneemb.storage.tiers.hot_tier import SLOT_OVERHEAD_BYTES, HotTier
from oneemb.storage.tiers.remote_tier import RemoteTier
from oneemb.storage.tiers.reservation import granted, usable_bytes

# Share of the GPU's free memory that a tier without a budget may use.
_MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class RemotePlan:
    """A parameter server that stores all rows: its URL for `open_server`, and the prefix of the names of its tables."""

    url: str = field(repr=False)  # It may have a password.
    name: str


@dataclass(frozen=True)
class StorePlan:
    """The tiers, and their sizes.

    Args:
        persistent_path: folder of the persistent table.
        cache_bytes: budget of the hot tier; None = it holds all rows.
        host_bytes: budget of a host tier under the hot tier; 0 = no host tier, None = it holds all rows.
        capacity: largest number of rows in all; None = only memory limits it.
        physical_block_size: bytes of a device's block, 512 or 4096.
        cache_policy: rule for the rows that caches evict first, "lru" or "lfu" (hot_tier.py).
        owner, owners: rank of this store, and number of ranks among which `owner_of` divides rows.
        replicated: numbers of the replicated tables, of which every rank stores all rows.
        has_temporary_rows: whether lookups may make temporary rows.
        remote: the parameter server that stores all rows, in place of a host tier; None = there is none.
        max_space_amplification, expected_rows, index_memory_bytes: of the persistent table, see `PersistentTable.open`.
    """

    persistent_path: str
    cache_bytes: int | None
    host_bytes: int | None
    capacity: int | None
    physical_block_size: int
    cache_policy: str = "lfu"
    owner: int = 0
    owners: int = 1
    replicated: tuple[int, ...] = ()
    has_temporary_rows: bool = False
    remote: RemotePlan | None = None
    max_space_amplification: float = 2.0
    expected_rows: int = 0
    index_memory_bytes: int | None = None

    @property
    def caches(self) -> list[str]:
        """Names of the tiers that hold some rows of the store below."""
        on_host = self.remote is None and self.host_bytes not in (None, 0)
        return ["device"] * (self.cache_bytes is not None) + ["host"] * on_host

    @property
    def copies_rows(self) -> bool:
        """Whether a tier above the store at the bottom holds all rows too."""
        return self.cache_bytes is None or self.host_bytes is None or self.remote is not None


class NewRows:
    """Function, an `InitRows`, that initializes new rows of one format. `policies` decide which values absent and
    temporary rows have; None = the initial values."""

    def __init__(
        self, format: RowFormat, initial: InitialRows, backend: Backend, policies: Sequence[RowPolicy] | None = None
    ):
        self.format = format
        self.initial = initial
        self.backend = backend
        self._policies = policies
        self._initial = self._of_absent = self._of_refused = backend.initial_rows(initial)
        if policies is not None:
            self._of_absent = backend.initial_rows(rows_instead(policies, initial, "absent"))
            self._of_refused = backend.initial_rows(rows_instead(policies, initial, "refused"))

    @property
    def absent_rows(self) -> InitialRows:
        """Values of absent rows: a read returns them for keys without a row."""
        return self.initial if self._policies is None else rows_instead(self._policies, self.initial, "absent")

    def of(self, format: RowFormat, backend: Backend) -> "NewRows":
        """A `NewRows` with the same initial values for another format and backend."""
        return NewRows(format, self.initial, backend, self._policies)

    def __call__(self, row_SW: Array, slot_M: Array, table_M: Array, id_M: Array) -> None:
        self._write(row_SW, slot_M, table_M, id_M, self._initial)

    def admission(self, arrays: Any) -> Any:
        """A `DeviceAdmission` for a tier of these `TierArrays`: its host need not know which keys are new. Only for the
        backend of a GPU."""
        backend: Any = self.backend
        return backend.admission(
            arrays, self.format.weights(arrays.row_SW), self._initial, self.format.new_words,
            state_begin=self.format.usage_begin,
        )  # fmt: skip

    def absent(self, row_SW: Array, slot_M: Array, table_M: Array, id_M: Array) -> None:
        """Write the values of absent rows, for keys without a row; an `InitRows`."""
        self._write(row_SW, slot_M, table_M, id_M, self._of_absent)

    @functools.cached_property
    def _no_state(self) -> Array:
        """State of rows that have none."""
        with torch.inference_mode(False):  # Later lookups, in no such mode, use the tensor too.
            return self.backend.array(torch.empty(0, 1, dtype=torch.float32, device=self.backend.device))

    def absent_weights(self, weight_UX: Array, place_R: Array, table_U: Array, id_U: Array) -> None:
        """Write the weights, as bits, that keys without a row read as, to these rows: `ListedSlots` of a GPU."""
        self.backend.init_rows(
            weight_UX, self._no_state, place_R, table_U, id_U, self._of_absent, np.empty(0, np.float32), state_begin=0
        )

    def refused(self, row_SW: Array, slot_M: Array, table_M: Array, id_M: Array) -> None:
        """Write the values of temporary rows, for keys to which a policy refuses a row; an `InitRows`."""
        self._write(row_SW, slot_M, table_M, id_M, self._of_refused)

    def _write(self, row_SW: Array, slot_M: Array, table_M: Array, id_M: Array, initial: Any) -> None:
        format = self.format
        self.backend.init_rows(
            format.weights(row_SW), row_SW, slot_M, table_M, id_M, initial, format.new_words,
            state_begin=format.usage_begin,
        )  # fmt: skip


def make_tiers(
    plan: StorePlan, new_rows: NewRows, bottom: RowStore, threads: Threads, writing: AbstractContextManager[Any]
) -> list[Tier]:
    """Make the tiers above the store `bottom`. Returns them from the top down: first the hot tier, a `HotRows` on the
    device of `new_rows.backend`. Tiers that hold all rows copy the rows of `bottom`.

    Raises:
        StoreFullError: the rows of `bottom` do not fit, or there is no memory for a tier.
        MemoryError, OutOfMemoryError: there is no memory for the rows of `bottom`.
        ValueError, StorageError: the URL names no server, or one that cannot be reached.
    """
    below, between = bottom, list[Tier]()
    if plan.remote is not None:
        between = [
            RemoteTier(
                open_server(plan.remote.url),
                plan.remote.name,
                row_width=new_rows.format.row_width,
                below=below,
                threads=threads,
            )  # fmt: skip
        ]
    elif plan.host_bytes != 0:
        between = [
            _host_tier(
                "host", plan, plan.host_bytes, new_rows.format, below, None, None, threads, None, reads_ahead=False
            )
        ]
    if between:
        below = between[0]
    if isinstance(new_rows.backend, HostBackend):
        hot: HotRows = _host_tier(
            "device", plan, plan.cache_bytes, new_rows.format, below, plan.capacity, new_rows, threads, writing,
            reads_ahead=below is bottom,
        )  # fmt: skip
    else:
        hot = _device_tier(plan, new_rows, below)
    tiers: list[Tier] = [hot, *between]
    if plan.copies_rows and (rows := len(bottom)):
        for tier in reversed(tiers):
            tier.check_holds(rows)
            tier.reload()
    return tiers


def _host_tier(
    name: str, plan: StorePlan, budget_bytes: int | None, format: RowFormat, below: RowStore, row_limit: int | None,
    new_rows: NewRows | None, threads: Threads, writing: AbstractContextManager[Any] | None, *, reads_ahead: bool,
) -> HotTier:  # fmt: skip
    return HotTier(
        name, row_width=format.row_width, slots=_host_slots(plan, format, budget_bytes), below=below,
        resident=budget_bytes is None, row_limit=row_limit, policy=plan.cache_policy, init=new_rows,
        absent=None if new_rows is None else new_rows.absent, refused=None if new_rows is None else new_rows.refused,
        threads=threads, writing=writing, expected=plan.capacity or 0, reads_ahead=reads_ahead,
    )  # fmt: skip


def _device_tier(plan: StorePlan, new_rows: NewRows, below: RowStore) -> HotRows:
    from oneemb.kernels.cuda_backend import CudaBackend
    from oneemb.storage.tiers import device_tier

    assert isinstance(new_rows.backend, CudaBackend)
    slot_bytes = -(-new_rows.format.row_bytes // 16) * 16 + device_tier.SLOT_OVERHEAD_BYTES
    budget_bytes = plan.cache_bytes
    if budget_bytes is None:
        budget_bytes = int(new_rows.backend.gpu.free_bytes() * _MEMORY_SHARE)
    slots = max(budget_bytes // slot_bytes, 1)
    if plan.cache_bytes is None and plan.capacity is not None and not plan.has_temporary_rows:
        slots = min(slots, plan.capacity)
    tier = device_tier.DeviceTier(
        "device", row_width=new_rows.format.row_width, slots=slots, below=below, resident=plan.cache_bytes is None,
        row_limit=plan.capacity, policy=plan.cache_policy, init=new_rows, absent=new_rows.absent,
        refused=new_rows.refused, backend=new_rows.backend,
    )  # fmt: skip
    # The type is wider: this tier takes only keys that its backend has made (tensors), and no caller has other keys.
    return cast(HotRows, tier)


@contextmanager
def with_room(plan: StorePlan, tiers: Sequence[Tier], format: RowFormat, backend: Backend, rows: int) -> Iterator[None]:
    """Reserve memory during a `with` block: for new tiers with `rows` rows of this format that replace `tiers`, and for
    making `tiers` again if that fails. Raises StoreFullError, with nothing changed, if a resident tier on the host
    could not hold all rows."""
    bytes = 0
    for name, budget_bytes in (("device", plan.cache_bytes), ("host", plan.host_bytes)):
        on_host = name == "host" or isinstance(backend, HostBackend)
        if budget_bytes is None and on_host:
            if rows > (slots := _host_slots(plan, format, None)):
                raise StoreFullError(
                    f"the {name} tier must hold all of {rows} rows of {format.row_bytes} bytes, it has room for"
                    f" {slots}; nothing has changed. Give the tier more memory or capacity, or use an optimizer with"
                    " less state"
                )
            bytes += rows * (format.row_bytes + SLOT_OVERHEAD_BYTES)
    instead = [tier.reserved for tier in tiers if isinstance(tier, HotTier) and tier.stable_slots]
    with granted(tiers[0].name, bytes, instead):
        yield


def _host_slots(plan: StorePlan, format: RowFormat, budget_bytes: int | None) -> int:
    slot_bytes = format.row_bytes + SLOT_OVERHEAD_BYTES
    if budget_bytes is not None:
        return max(budget_bytes // slot_bytes, 1)
    slots = usable_bytes() // slot_bytes
    # Temporary rows need slots beyond the capacity.
    return max(slots if plan.capacity is None or plan.has_temporary_rows else min(slots, plan.capacity), 1)
