"""Several stores whose rows have one format, used as one store, so that one loop runs over the rows of all of them.

    merged table   tables of the first member, then those of the second, ...: merged = first table of the member + table
    merged slot    index of a row in one array that begins at the slab with the lowest address and spans all slabs:
                   merged = slot + (address of the member's slab - lowest address) / bytes of a row

Loops take merged slots and this array as they take a store's slots and slab. Addresses between the slabs may be
unmapped: loops may read and write the slots of members only. M members, V rows of the merged array.

Invariants:
- each member keeps its rows, pins, steps and usage words, and may still be used by itself;
- arrays of keys and of slots list the first member's entries first, then the second member's, and so on;
- a call that raises leaves no pin, in any member.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.backend import Keys
from oneemb.kernels.hash_index import find_each
from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.slot_marks import set_marks
from oneemb.storage.coming_batches import ComingBatches
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.tiers.growing_array import array_at
from oneemb.storage.tiers.hot_rows import Prefetched
from oneemb.storage.tiers.hot_tier import HotTier


@dataclass(eq=False)
class MergedPrefetched:
    """Result of `MergedStore.prefetch`: pinned rows of a coming lookup, one part for each member."""

    store: "MergedStore"
    parts: list[Prefetched]
    slot_U: np.ndarray
    """int64 [U], all -1; only its length, the number of keys, is used."""


class MergedStore:
    """Several stores on the host, whose rows have one format, used as one store.

    Args:
        stores: the M members.
        tables: number of tables of each member.
        names: name of each member in errors.
    """

    def __init__(self, stores: Sequence[EmbeddingStore], tables: Sequence[int], names: Sequence[str]):
        self.members = tuple(stores)
        self.names = tuple(names)
        self.first_table_M1 = np.concatenate([[0], np.cumsum(tables)]).astype(np.int32)
        """int32 [M + 1]: the first merged table of each member, then the total number of tables."""
        self._member_T = np.repeat(np.arange(len(self.members), dtype=np.int32), tables)
        self.threads = max((store.threads for store in self.members), key=lambda threads: threads.count)
        """The threads of the member that has the most."""
        self.backend = HostBackend(self.threads)
        self._in_order = sorted(self.members, key=lambda store: id(store.store_lock))
        self._slabs: list[np.ndarray] = []
        self._row_VW = np.empty((0, 0), np.float32)
        self._begin_M = np.empty(0, np.int64)

    # ---- what loops are given ---------------------------------------------------------------------------------------

    @property
    def format(self) -> RowFormat:
        """Format of a row, the same in every member."""
        return self.members[0].format

    @property
    def row_SW(self) -> np.ndarray:
        """The array that merged slots index: float32 [V, W]. Read it anew for every use."""
        self._look_at_slabs()
        return self._row_VW

    @property
    def weight_SX(self) -> np.ndarray:
        """View of `row_SW` as the bits of weights: [V, X], the first `dim` entries of each row being its weights."""
        return self.format.weights(self.row_SW)

    @property
    def generation(self) -> int:
        """Version of the merged slots: changes whenever merged slots that were returned before become invalid."""
        return sum(store.generation for store in self.members)

    def _look_at_slabs(self) -> None:
        slabs = [store.row_SW for store in self.members]
        if len(slabs) == len(self._slabs) and all(a is b for a, b in zip(slabs, self._slabs, strict=True)):
            return
        self._row_VW, self._begin_M = _one_array(slabs)
        self._mark_V, self._mark_begin_M = _one_array([tier.dirty_S for tier in self._tiers()])
        self._slabs = slabs

    # ---- rows -------------------------------------------------------------------------------------------------------

    @property
    def built(self) -> bool:
        """Whether the tiers of every member have been made."""
        return all(store.built for store in self.members)

    def build(self) -> None:
        """Make the tiers of members whose tiers are not made yet."""
        for store in self.members:
            store.build()

    def begins(self, first_table_P: np.ndarray, begin_P1: np.ndarray) -> np.ndarray:
        """Bounds of each member's keys: [M + 1], key u belongs to member m if result[m] <= u < result[m + 1].

        Args:
            first_table_P: [P], first merged table of each member that has lookups.
            begin_P1: [P + 1], bounds of these members' keys.
        """
        return begin_P1[np.searchsorted(first_table_P, self.first_table_M1)]

    def acquire_found(
        self, keys: Keys, begin_M1: np.ndarray, prefetched: MergedPrefetched | None = None
    ) -> list[Array | None]:
        """Add one pin to each row of every member that has rows for all of its keys, begin_M1[m] to begin_M1[m + 1] -
        1. No row is added. Returns each member's own slots; None for a member that lacks a row: call `acquire_rest` for
        it."""
        with self._turn():
            if prefetched is None:
                return self._pin_found(keys, begin_M1)
            return self._take_over(prefetched, begin_M1)

    def acquire_rest(
        self, m: int, keys: Keys, begin_M1: np.ndarray, prefetched: MergedPrefetched | None = None
    ) -> Array:
        """Acquire the rows of member `m`, and return its own slots; see `EmbeddingStore.acquire`."""
        own = self._own_keys(m, keys, begin_M1)
        return self.members[m].acquire(own, None if prefetched is None else prefetched.parts[m])[0]

    def merged_slots(self, members: Sequence[int], slots: Sequence[Array]) -> np.ndarray:
        """Merged slots, int64, of these members' own slots, concatenated in the order of `members`."""
        self._look_at_slabs()
        slot_U = np.concatenate(slots)
        slot_U += np.repeat(self._begin_M[members], [len(own) for own in slots])
        return slot_U

    def prefetch(self, keys: Keys, begin_M1: np.ndarray) -> MergedPrefetched:
        """Read the rows that a coming lookup's keys have already, and pin as many as fit; see
        `EmbeddingStore.prefetch`."""
        own_M = [self._own_keys(m, keys, begin_M1) for m in range(len(self.members))]
        held: dict[int, Prefetched] = {}
        try:
            if self.built:
                with self._turn():
                    for m, slot_U in enumerate(self._pin_found(keys, begin_M1)):
                        if slot_U is not None:
                            held[m] = self.members[m].hold(own_M[m], slot_U)
            for m, store in enumerate(self.members):
                if m not in held:
                    held[m] = store.prefetch(own_M[m])
        except BaseException:
            for part in held.values():
                part.store.unprefetch(part)
            raise
        parts = [held[m] for m in range(len(self.members))]
        return MergedPrefetched(self, parts, np.broadcast_to(np.int64(-1), len(keys.id_U)))

    def add_coming(self, keys: Keys, begin_M1: np.ndarray) -> list[tuple[ComingBatches, int]]:
        """Tell each member its keys of a batch that will be looked up. Returns the number of the batch in each member
        that uses the keys."""
        parts = enumerate(store.coming for store in self.members)
        return [(part, part.add(self._own_keys(m, keys, begin_M1))) for m, part in parts if part.are_useful]

    def unprefetch(self, prefetched: MergedPrefetched) -> None:
        """Unpin the rows that `prefetch` pinned, unless a call of `acquire_found` or `acquire_rest` has taken over the
        pins."""
        for part in prefetched.parts:
            part.store.unprefetch(part)

    def mark_dirty(self, table_U: np.ndarray, slot_U: np.ndarray) -> None:
        """Set the dirty bits of these merged slots, whose rows, of keys of any members, have changed."""
        self._look_at_slabs()
        member_U = self.members_of(table_U)
        with signals_deferred:
            set_marks(
                self._mark_V, slot_U + (self._mark_begin_M - self._begin_M).take(member_U), True, threads=self.threads
            )
            for m in np.flatnonzero(np.bincount(member_U, minlength=len(self.members))).tolist():
                self.members[m].changes += 1

    def members_of(self, table_U: np.ndarray) -> np.ndarray:
        """The member that each merged table belongs to: int32 [U]."""
        return self._member_T.take(table_U)

    def describe_key(self, table: int, id: int) -> str:
        """Text that names a key, with its embedding, in errors."""
        m = int(self._member_T[table])
        return f"id {id} in table {table - int(self.first_table_M1[m])} of embedding {self.names[m]!r}"

    # ---- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Run a block under the store locks of all members. Every merged store takes locks in the same order."""
        with signals_deferred, ExitStack() as held:
            for store in self._in_order:
                held.enter_context(store.store_lock)
            for store in self._in_order:
                store.store_lock.check(changes=True)
            yield

    def _tiers(self) -> list[HotTier]:
        return [store.hot for store in self.members]  # type: ignore[misc]  # loops that merge are those of the host

    def _own_keys(self, m: int, keys: Keys, begin_M1: np.ndarray) -> Keys:
        """The keys of member `m`, with the member's own table numbers."""
        own = slice(begin_M1[m], begin_M1[m + 1])
        return self.backend.distinct_keys(keys.table_U[own] - self.first_table_M1[m], keys.id_U[own])

    def _pin_found(self, keys: Keys, begin_M1: np.ndarray) -> list[Array | None]:
        """Find the keys of all members in one loop. Pin the rows of each member that has rows for all of its keys; see
        `acquire_found`."""
        tiers = self._tiers()
        shards = [tier.index.shards for tier in tiers]
        address_MP, cells_MP = (np.array([shard[i] for shard in shards]) for i in (0, 1))
        local_U = keys.table_U - np.repeat(self.first_table_M1[:-1], np.diff(begin_M1))
        slot_U = find_each(address_MP, cells_MP, begin_M1, local_U, keys.id_U, threads=self.threads)
        missing = set(np.searchsorted(begin_M1, np.flatnonzero(slot_U < 0), side="right").tolist())
        begins = begin_M1.tolist()
        slots: list[Array | None] = [None] * len(tiers)
        for m, tier in enumerate(tiers):
            if m + 1 not in missing and not self.members[m].pins.abandoned:
                own = slot_U[begins[m] : begins[m + 1]]
                tier.pin_found(own)
                slots[m] = own
        return slots

    def _take_over(self, prefetched: MergedPrefetched, begin_M1: np.ndarray) -> list[Array | None]:
        """Take over the pins of each member whose rows were all prefetched. Returns its slots; None for other
        members."""
        slots: list[Array | None] = [None] * len(self.members)
        for m, (store, part) in enumerate(zip(self.members, prefetched.parts, strict=True)):
            if part.missing == 0 and not store.pins.abandoned and store.pins.take(part):
                slots[m] = part.slot_U
            elif begin_M1[m] == begin_M1[m + 1]:  # Without keys, no later call would unpin this part.
                store.unprefetch(part)
        return slots


def _one_array(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """One array that spans the memory of all parts, each [S, ...]; and the index in it of each part's first row: int64
    [M]."""
    first = parts[0]
    address_M = np.array([part.ctypes.data for part in parts], np.int64)
    lowest, row_bytes = int(address_M.min()), first.strides[0]
    assert all(
        part.flags.c_contiguous and part.shape[1:] == first.shape[1:] and part.dtype == first.dtype for part in parts
    )
    assert not np.any((address_M - lowest) % row_bytes)
    begin_M = (address_M - lowest) // row_bytes
    rows = max(begin + len(part) for begin, part in zip(begin_M.tolist(), parts, strict=True))
    return array_at(lowest, (rows, *first.shape[1:]), first.dtype, parts), begin_M
