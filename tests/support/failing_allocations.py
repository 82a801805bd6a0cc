"""Lets allocations of calls on an embedding fail, one at a time; run as a program with failing_malloc.c preloaded.

    python failing_allocations.py LIBRARY STORE FOLDER STRIDE [OPERATION ...]

After each failure the embedding says that it is broken, or its slots are all accounted for, nothing stays pinned, and
its rows are those from before the call or from after it. The oracle is a dict: a row of equal weights begins as
1 and loses 0.5 with each step. What does not hold is printed, a line each, and then how much was tried.
"""

import ctypes
import gc
import sys
import warnings

import numpy as np
import torch
from pytest import MonkeyPatch

import oneemb
from oneemb.kernels.checksum import xxh64
from oneemb.kernels.threads import Threads
from oneemb.policies import LFU, AdmitAfter, RowPolicy
from oneemb.storage import cold_index
from oneemb.storage.errors import BrokenStoreError
from oneemb.storage.hash_index import HashIndex
from tests.support.cold_shards import make_shards_small

STEP = 0.5


def options(kind, folder):
    match kind:
        case "device" | "policy":
            return oneemb.make_device_mem_store_options(folder, capacity=4000 if kind == "policy" else None)
        case "host":
            return oneemb.make_cached_host_mem_store_options(1, folder)
        case "ssd" | "ssd-policy":
            return oneemb.make_cached_ssd_store_options(1, folder, capacity=4000 if kind == "ssd-policy" else None)
        case "ssd-index":
            return oneemb.make_cached_ssd_store_options(1, folder, index_memory_mb=1)
        case "ssd-lru":
            return oneemb.make_cached_ssd_store_options(1, folder, host_cache_budget_mb=1, cache_policy="lru")
        case "remote":
            return oneemb.make_cached_remote_store_options("memory://failing", 1, folder)


class Subject:
    """An embedding, and what its rows should be."""

    def __init__(self, kind, folder, seed, *, dim=128, ids=4000, batch=800):
        self.kind, self.rng = kind, np.random.default_rng(seed)
        self.dim, self.id_count, self.batch = dim, ids, batch
        self.has_policy = "policy" in kind
        policy = RowPolicy(evict=LFU(half_life=None), admit=AdmitAfter(2)) if self.has_policy else None
        self.embedding = oneemb.MultiTableEmbedding(
            "rows", dim, torch.float32, torch.int64, [oneemb.make_table(oneemb.make_constant_initializer(1.0))],
            options(kind, folder), num_threads=2, policy=policy,
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.embedding.parameters(), lr=STEP)
        self.row = {}  # id -> its weight
        self.saved = {}  # name of a snapshot -> rows
        self.names = 0

    def ids(self):
        return self.rng.choice(self.id_count, self.batch, replace=False)

    # Each method returns a call and the rows expected after it.

    def lookup(self):
        ids = torch.from_numpy(self.ids())

        def call():
            self.embedding(ids)

        return call, self.row

    def step(self):
        ids = self.ids()

        def call():
            self.embedding(torch.from_numpy(ids)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        return call, {**self.row, **{id: self.row.get(id, 1.0) - STEP for id in ids.tolist()}}

    def two_lookups(self):
        ids = self.ids()

        def call():
            for part in np.split(ids, 2):
                self.embedding(torch.from_numpy(part)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        return call, {**self.row, **{id: self.row.get(id, 1.0) - STEP for id in ids.tolist()}}

    def prefetch(self):
        """Rows that are prefetched and then acquired, as a training loop does it on two threads."""
        ids, store = self.ids(), self.embedding.store
        put = store.backend.put

        def call():
            keys = store.backend.distinct_keys(put(np.zeros(self.batch, np.int32)), put(ids))
            prefetched = store.prefetch(keys)
            try:
                slot_U, _ = store.acquire(keys, prefetched, admits=True)
                store.release(slot_U)
            finally:
                store.unprefetch(prefetched)

        return call, self.row

    def bags(self):
        ids, offsets = torch.from_numpy(self.ids()), torch.arange(0, self.batch + 1, 4)

        def call():
            self.embedding(ids, offsets=offsets)

        return call, self.row

    def save(self):
        self.names += 1
        name, rows = f"s{self.names}", dict(self.row)
        self.saved[name] = rows  # if it is there

        def call():
            self.embedding.save_snapshot(name)

        return call, self.row

    def delta(self):
        self.step()[0]()
        call, _ = self.save()
        call()
        parent = f"s{self.names}"
        self.row = self.read(self.known())
        self.saved[parent] = dict(self.row)
        ids = self.ids()
        self.embedding(torch.from_numpy(ids)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.row = self.read(self.known() | set(ids.tolist()))
        self.names += 1
        name = f"s{self.names}"
        self.saved[name] = dict(self.row)

        def call():
            self.embedding.save_delta(name, parent)

        return call, self.row

    def load(self):
        if not self.saved:
            self.save()[0]()
        name = self.embedding.snapshots()[-1]

        def call():
            self.embedding.load_snapshot(name)

        return call, self.saved[name]

    def erase(self):
        ids = self.ids()

        def call():
            self.embedding.erase(torch.from_numpy(ids))

        return call, {id: weight for id, weight in self.row.items() if id not in set(ids.tolist())}

    def clear(self):
        return self.embedding.clear, {}

    def import_rows(self):
        ids = self.ids()
        rows = np.full((self.batch, self.dim), 3.0, np.float32)

        def call():
            oneemb.import_rows(self.embedding, (ids, rows))

        return call, {**self.row, **dict.fromkeys(ids.tolist(), 3.0)}

    # ---- what is there ----------------------------------------------------------------------------------------------

    def known(self):
        return set(self.row)

    def read(self, ids):
        """The weight of each of these ids; rows whose weights differ from each other are None."""
        id_N = np.array(sorted(ids), np.int64)
        found = {}
        for n in range(0, len(id_N), self.batch):
            its = id_N[n : n + self.batch]
            rows = self.embedding.read(torch.from_numpy(its)).numpy()
            same = (rows == rows[:, :1]).all(1)
            found |= {id: float(row[0]) if ok else None for id, row, ok in zip(its.tolist(), rows, same, strict=True)}
        return found

    def wrongs(self, before, after):
        """Violations found after a failed call; None if the embedding says that it is broken."""
        gc.collect()
        store = self.embedding.store
        try:
            found = self.read(set(before) | set(after))
            wrong = store.check_slots()
        except oneemb.StorageError as error:
            if isinstance(error, BrokenStoreError) or "load_snapshot" in str(error):
                return None
            return [f"{type(error).__name__}: {error}"]
        if pinned := sum(tier.get("pinned", 0) for tier in self.embedding.stats().values() if isinstance(tier, dict)):
            wrong.append(f"{pinned} rows are pinned")
        if self.has_policy:
            known = len(store.engine.usage)
            if known != self.embedding.stats()["rows"]:
                wrong.append(f"the policy knows {known} of {self.embedding.stats()['rows']} rows")
            allowed = [{before.get(id, 1.0), after.get(id, 1.0), 1.0} for id in found]  # It may have left.
            odd = [id for (id, weight), ok in zip(found.items(), allowed, strict=True) if weight not in ok]
        else:
            odd = min(
                ([id for id, weight in found.items() if weight != rows.get(id, 1.0)] for rows in (before, after)),
                key=len,
            )
        if odd:
            its = [(id, found[id], before.get(id), after.get(id)) for id in odd[:3]]
            wrong.append(f"{len(odd)} rows are neither as before nor as after: (id, is, was, would be) {its}")
        self.row = {id: weight for id, weight in found.items() if id in before or id in after}
        return wrong


class Preloaded:
    """Control of the preloaded library."""

    def __init__(self, library):
        self._library = ctypes.CDLL(library)
        self._library.counted.restype = ctypes.c_long

    def fail_after(self, n):
        self._library.fail_after(ctypes.c_long(n))

    def counted(self):
        return self._library.counted()


OPERATIONS = "lookup step two_lookups prefetch bags save load step erase import_rows delta load step clear".split()


def load_loops():
    """Load the loops that are first used when an index grows or a file of rows is full: LLVM ends the process where it
    gets no memory to load a loop."""
    xxh64(np.zeros(8, np.uint8))
    for count in (1, 2):  # One thread runs a loop in another form, as it does where a single shard grows.
        index = HashIndex(Threads(count))
        for begin in range(0, 400_000, 50_000):
            id_N = np.arange(begin, begin + 50_000)
            index.put(np.zeros(len(id_N), np.int32), id_N, id_N)
        index.erase(np.zeros(10, np.int32), np.arange(10))


def run(subject, allocations, operations=OPERATIONS, *, stride=1, most=400):
    """Let each `stride`-th allocation of each operation fail. Returns a line for each thing that did not hold, the
    number of failures, and how many of them broke the embedding."""
    wrong, failures, broken = [], 0, 0
    load_loops()
    for name in operations:
        for _ in range(2):
            subject.step()[0]()
        getattr(subject, name)()[0]()  # which compiles and imports what it needs
        subject.optimizer.zero_grad()
        subject.row = subject.read(range(subject.id_count))
        for n in range(0, most, stride):
            call, after = getattr(subject, name)()
            before, error = dict(subject.row), None
            allocations.fail_after(n)
            try:
                call()
            except Exception as raised:
                error = repr(raised)  # Its traceback would keep what the call has held.
            count = allocations.counted()
            allocations.fail_after(-1)
            subject.optimizer.zero_grad()
            found = subject.wrongs(before, after)
            failures += count > n
            if found is None:
                broken += 1
                subject.embedding.clear()
                subject.row = {}
                for _ in range(3):
                    subject.step()[0]()
                subject.embedding.save_snapshot(f"again{failures}")
                subject.row = subject.read(range(subject.id_count))
                subject.saved[f"again{failures}"] = dict(subject.row)
            elif found:
                wrong += [f"{subject.kind}: {name}, allocation {n} of {count}, {error}: {it}" for it in found]
            if error is None and count <= n:
                break
        print(f"{name}: {n} allocations", file=sys.stderr, flush=True)
        if len(wrong) > 20:
            break
    return wrong, failures, broken


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    library, kind, folder, stride = sys.argv[1:5]
    operations = sys.argv[5:] or OPERATIONS
    if kind == "ssd-index":
        patch = MonkeyPatch()
        make_shards_small(patch, overlay=300)
        patch.setattr(cold_index, "_OVERLAY_PART", 1 << 12)  # A quarter of the limit would hold all keys of the test.
    subject = Subject(kind, folder, 0)
    gc.collect()
    gc.freeze()  # Collections after failed calls skip what was there before.
    wrong, failures, broken = run(subject, Preloaded(library), operations, stride=int(stride))
    if kind == "ssd-index" and not subject.embedding.stats()["persistent"]["index_blocks_read"]:
        wrong.append("no block of the index was read")
    print(*wrong, sep="\n")
    print(f"{failures} failures, {broken} broken")
