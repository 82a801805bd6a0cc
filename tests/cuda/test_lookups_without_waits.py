"""Lookups of a resident tier for which the host does not wait, against those for which it does.

The numbers of a lookup come to the host late: in the simulator as late as a test says.
"""

import numpy as np
import pytest
import torch

from oneemb.kernels.arrays import BEYOND
from oneemb.kernels.cuda_backend import CudaBackend
from oneemb.kernels.init_rows import BY_ID, CONSTANT, InitialRows
from oneemb.storage.errors import StoreFullError
from oneemb.storage.tiers.device_tier import DeviceTier
from tests.cuda.conftest import SIMULATED
from tests.cuda.test_train import on_gpu
from tests.support.models import make_embedding
from tests.support.row_store_suite import keys_of

W = 5


class Begin:
    """First values of rows that say which key they are of: the id, and 1000 for each odd one."""

    def __init__(self, backend):
        self.backend = backend
        initial = InitialRows(
            0, np.array([[BY_ID, CONSTANT]] * 2), np.array([[[1e6, 0, 0, 0], [1000 * t, 0, 0, 0]] for t in range(2)]),
            np.array([1, W]),
        )  # fmt: skip
        self.initial = backend.initial_rows(initial)

    def __call__(self, row_SW, slot_M, table_M, id_M):
        self.backend.init_rows(
            row_SW, row_SW, slot_M, table_M, id_M, self.initial, np.empty(0, np.float32), state_begin=0
        )  # fmt: skip


class BeginThere(Begin):
    """`Begin` for keys of which the host does not know whether they are new."""

    def admission(self, arrays):
        return self.backend.admission(
            arrays, arrays.row_SW, self.initial, np.empty(0, np.float32), state_begin=0
        )  # fmt: skip


class Rows:
    """A resident tier, and batches with repeated ids that are looked up in it."""

    def __init__(self, gpu, *, begin=BeginThere, slots=3000, **options):
        self.backend = CudaBackend(gpu)
        self.tier = DeviceTier(
            "device", row_width=W, slots=slots, below=None, resident=True, init=begin(self.backend),
            backend=self.backend, **options,
        )  # fmt: skip

    def keys(self, id_N):
        table_N, id_N = (self.backend.put(array) for array in (np.array(id_N, np.int32) % 2, np.array(id_N, np.int64)))
        return self.backend.unique_keys(table_N, id_N, tables=2, padding_id=None, check=None)

    def acquire(self, id_N):
        """The slots of the unique keys, which stay pinned."""
        slot_U, keys = self.tier.acquire(self.keys(id_N))
        return slot_U, [int(id) for id in self.backend.counted(keys).id_U]

    def read(self, id_N):
        """The rows of ids, unknown ones too."""
        out_ND = torch.empty(len(id_N), W, device=self.backend.device)
        assert self.tier.gather(self.keys(id_N), lambda row_SW: row_SW, Begin(self.backend), out_ND)
        return out_ND


@pytest.mark.parametrize("numbers", ["at once", "late"])
def test_slots_rows_and_counts_are_those_of_lookups_that_wait(gpu, late, seed, numbers):
    rng = np.random.default_rng(seed)
    late.now = numbers == "late"
    one, other = Rows(gpu), Rows(gpu, begin=Begin)
    for rows in (one, other):
        rows.tier.release(rows.acquire([1, 2, 1])[0])  # gets memory
    for turn in range(25):
        id_N = rng.integers(0, 60, int(rng.integers(1, 20)))
        (slot_U, ids), (other_U, others) = one.acquire(id_N), other.acquire(id_N)
        assert ids == others
        assert slot_U.tolist() == other_U.tolist() + [BEYOND] * (len(slot_U) - len(ids))
        assert told(one.tier.row_SW[slot_U[: len(ids)]]) == [1000 * (id % 2) + id for id in ids]
        for rows, slots in ((one, slot_U), (other, other_U)):
            rows.tier.row_SW[slots[: len(ids)], 1] = turn + 0.5
            rows.tier.mark_dirty(slots)
            rows.tier.release(slots)
        if turn % 6 == 5:  # Slots come back.
            gone = keys_of((int(id) % 2, int(id)) for id in rng.permutation(60)[:20])
            assert one.tier.erase(*gone).tolist() == other.tier.erase(*gone).tolist()
            read = [rows.read(id_N) for rows in (one, other)]
            assert torch.equal(*read) and told(read[0]) == [1000 * (id % 2) + id for id in id_N]
        if turn % 7 == 0:
            assert len(one.tier) == len(other.tier)
    assert one.tier.check_slots() == other.tier.check_slots() == []
    found, expected = ({tuple(map(int, key)): row.tolist() for *key, row in scan(rows)} for rows in (one, other))
    assert found == expected and len(found) > 20
    assert (late.times > 0) == late.now
    stats, others = one.tier.stats(), other.tier.stats()
    for number in ("rows", "pinned", "dirty", "hits", "misses", "new_rows"):
        assert stats[number] == others[number], number


def told(row_NW):
    """Sums of the first and the last word of rows, which say with which first values the rows began."""
    return (row_NW[:, 0] + row_NW[:, W - 1]).tolist()


def scan(rows):
    for table_N, id_N, row_NW in rows.tier.scan(7):
        yield from zip(table_N, id_N, row_NW, strict=True)


def test_a_lookup_waits_for_nothing_where_there_is_room_for_as_many_rows_as_ids(gpu, late):
    rows = Rows(gpu)
    rows.acquire(range(10))  # gets memory
    keys = [rows.keys(range(begin, begin + 10)) for begin in (0, 5, 20)]
    late.now, waits = True, gpu.waits
    slots = [rows.tier.acquire(its)[0] for its in keys]
    if SIMULATED:
        assert gpu.waits == waits
    assert len(rows.tier) == 25 and [slot_U.tolist() for slot_U in slots] == [
        [*range(10)], [*range(5, 15)], [*range(15, 25)]
    ]  # fmt: skip


def test_a_lookup_waits_where_its_rows_may_not_fit_and_says_so_where_they_do_not(gpu, late):
    rows = Rows(gpu, slots=30)
    late.now = True
    for begin in (0, 10):
        rows.acquire(range(begin, begin + 10))
    rows.acquire([*range(15, 25)])
    assert late.times > 0
    with pytest.raises(StoreFullError, match="30 slots; 25 of them are taken and 6 more rows"):
        rows.acquire(range(20, 31))
    slot_U, _ = rows.acquire(range(20, 30))
    assert sorted(slot_U.tolist()) == [*range(20, 30)] and len(rows.tier) == 30
    assert rows.tier.check_slots() == []


def test_a_row_limit_holds_for_lookups_of_which_numbers_come_late(gpu, late):
    rows = Rows(gpu, row_limit=20)
    late.now = True
    rows.acquire(range(8))
    rows.acquire(range(6, 14))
    with pytest.raises(StoreFullError, match="capacity is 20 rows; 14 are kept and 7 new ones"):
        rows.acquire(range(14, 21))
    assert len(rows.tier) == 14 and late.times > 0


def test_a_row_that_cannot_begin_leaves_no_trace_of_its_lookup(gpu):
    rows = Rows(gpu)
    rows.acquire(range(10))

    class Fails(Begin):
        def admission(self, arrays):
            raise RuntimeError("no row")

    rows.tier.init_rows, begin = Fails(rows.backend), rows.tier.init_rows
    with pytest.raises(RuntimeError, match="no row"):
        rows.acquire(range(5, 15))
    rows.tier.init_rows = begin
    assert len(rows.tier) == 10 and rows.tier.check_slots() == []
    assert rows.tier.pin_S.sum() == 10
    rows.acquire(range(5, 15))
    assert len(rows.tier) == 15 and rows.tier.check_slots() == []


def test_memory_for_rows_to_come_that_is_not_there_makes_lookups_wait(gpu, monkeypatch):
    from oneemb.storage.tiers import device_slots

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_slots, "_SLOTS_MIN", 8)
    monkeypatch.setattr(device_slots, "enlarged", fail)
    rows = Rows(gpu)
    for begin in range(0, 40, 8):
        rows.acquire(range(begin, begin + 8))
    assert len(rows.tier) == 40 and rows.tier.check_slots() == []


def test_slots_that_could_not_grow_once_still_make_no_lookup_wait(gpu, monkeypatch):
    from oneemb.storage.tiers import device_slots

    def fail_for_rows(tensor):
        if tensor.dtype == torch.float32:
            raise MemoryError
        return tensor

    monkeypatch.setattr(device_slots, "_SLOTS_MIN", 8)
    rows = Rows(gpu)
    rows.acquire(range(10))
    with monkeypatch.context() as at:
        at.setattr(gpu, "kept", fail_for_rows)
        with pytest.raises(MemoryError):
            rows.acquire(range(100))
    keys, waits = rows.keys(range(10)), gpu.waits
    rows.tier.acquire(keys)
    if SIMULATED:
        assert gpu.waits == waits
    assert len(rows.tier) == 10 and rows.tier.check_slots() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [7, None])
def test_eval_reads_known_and_unknown_rows_without_a_wait_as_the_cpu_does(gpu, dtype, padding, tmp_path, late):
    options = dict(tables=2, dim=6, dtype=dtype, padding_idx=padding)
    there, here = (make_embedding(tmp_path / name, **options) for name in ("a", "b"))
    ids = torch.arange(24).reshape(-1, 2)
    asked = torch.cat([ids, ids.flip(1)])

    def learn(embedding):
        for known in (ids[:6], ids[:8]):
            embedding(known.to(embedding.store.backend.device))
        embedding.eval()

    learn(here)
    expected = here(asked)
    with on_gpu(gpu, there):
        learn(there)
        asked = asked.to(there.store.backend.device)
        late.now, waits = True, there.store.backend.gpu.waits
        with torch.no_grad():
            found = there(asked)
        later = there(asked)
        if SIMULATED:
            assert there.store.backend.gpu.waits == waits
        late.now = False
        assert torch.equal(found.cpu(), expected) and torch.equal(later, found)
        assert there.stats()["device"]["rows"] == here.stats()["device"]["rows"]
    there.close()
    here.close()


def test_sums_leave_out_room_for_more_keys(gpu):
    rows = Rows(gpu)
    keys, grad_NX = rows.keys([3, 5, 3, 3]), torch.arange(20, dtype=torch.float32, device=gpu.device).reshape(4, W)
    grad_UD, finite_1 = rows.backend.sum_segments(rows.backend.segments(keys, None, grad_NX, None))
    expected = torch.stack([grad_NX[[0, 2, 3]].sum(0), grad_NX[1]])
    assert torch.equal(grad_UD[:2], expected) and finite_1.tolist() == [1]
    exact = rows.backend.segments(keys, None, grad_NX, None).cut(2)
    assert exact.shape == (2, W) and torch.equal(rows.backend.sum_segments(exact)[0], expected)
