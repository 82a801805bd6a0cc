"""`ComingBatches`: keys of batches that a loop has read ahead. The hot tier evicts their rows last."""

from oneemb.kernels.backend import Keys
from oneemb.storage.store_part import StorePart, with_store_lock
from oneemb.storage.tiers.hot_tier import HotTier
from oneemb.storage.tiers.victims import VictimClock


class ComingBatches(StorePart):
    """Part of a store: the batches that coming steps will look up.

    Each call is a hint. A hint changes which rows the cache evicts, and no result.
    """

    @property
    def are_useful(self) -> bool:
        """Whether the store uses hints: it has a cache on the host, over a disk or a server."""
        plan = self._store.plan
        on_host = self.rows.new_rows.backend.device.type == "cpu"
        return on_host and plan.cache_bytes is not None and (plan.host_bytes == 0 or plan.remote is not None)

    @with_store_lock
    def add(self, keys: Keys) -> int:
        """Add the keys of a batch that will be looked up. Returns the number of the batch; 0 = the store uses none."""
        victims = self._victims()
        if victims is None:
            return 0
        try:
            return victims.add_batch(keys.table_U, keys.id_U)
        except MemoryError:  # The loop goes on without the hint.
            victims.forget_batches()
            return 0

    @with_store_lock
    def reach(self, number: int) -> None:
        """Note that the batches up to this number have acquired their rows."""
        victims = self._victims()
        if victims is not None:
            victims.reach_batch(number)

    @with_store_lock
    def forget(self) -> None:
        """Forget the batches that were added and not reached."""
        victims = self._victims()
        if victims is not None:
            victims.forget_batches()

    def _victims(self) -> VictimClock | None:
        hot = self.rows.hot if self._store.built and self.are_useful else None
        return hot.victims if isinstance(hot, HotTier) else None
