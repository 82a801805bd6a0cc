"""A tier that is used on several streams, each busy with something long: every call comes after what it needs.

In the simulator there are no streams, and these tests say no more than that rows are right; on a GPU a wait that is
forgotten reads rows that are not written yet.
"""

import contextlib

import numpy as np
import pytest
import torch

from oneemb.kernels.cuda_backend import CudaBackend
from oneemb.storage.tiers import device_slots
from oneemb.storage.tiers.device_tier import DeviceTier
from tests.cuda.conftest import SIMULATED
from tests.support.row_store_suite import DictStore, keys_of

W = 5
BUSY_CYCLES = 200_000_000  # a tenth of a second


class Streams:
    """Two streams of the tier's GPU; nothing in the simulator."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.pair = [None, None] if SIMULATED else [torch.cuda.Stream(gpu.device) for _ in range(2)]

    @contextlib.contextmanager
    def on(self, i, *, busy=False):
        with contextlib.nullcontext() if SIMULATED else torch.cuda.stream(self.pair[i]):
            if busy and not SIMULATED:
                torch.cuda._sleep(BUSY_CYCLES)
            yield


@pytest.fixture
def streams(gpu):
    return Streams(gpu)


@pytest.fixture
def make(gpu):
    def make(below=None, slots=3000):
        return DeviceTier(
            "device", row_width=W, slots=slots, below=below, resident=below is None, init=begin_row,
            backend=CudaBackend(gpu),
        )  # fmt: skip

    return make


def begin_row(row_SW, slot_M, table_M, id_M):
    row_SW[slot_M, :W] = id_M.to(torch.float32)[:, None].expand(-1, W)


def distinct(gpu, begin, end):
    return CudaBackend(gpu).distinct_keys(*map(gpu.put, keys_of([(0, i) for i in range(begin, end)])))


def acquire(tier, gpu, begin, end):
    return tier.acquire(distinct(gpu, begin, end))[0]


def rows_of(tier, begin, end):
    out_UW = np.zeros((end - begin, W), np.float32)
    assert not tier.get(*keys_of([(0, i) for i in range(begin, end)]), out_UW).any()
    return out_UW[:, 0].tolist()


def update(tier, slot_U):
    """What a step does to rows: it adds 0.5 and releases them."""
    tier.row_SW[slot_U, :W] += 0.5
    tier.mark_dirty(slot_U)
    tier.release(slot_U)


def test_a_tier_made_on_one_stream_is_there_for_another(make, gpu, streams):
    with streams.on(0, busy=True):
        tier = make()
    with streams.on(1):
        slot_U = acquire(tier, gpu, 0, 40)
        assert len(set(slot_U.tolist())) == 40 and tier.stats()["new_rows"] == 40
        assert rows_of(tier, 0, 40) == list(range(40))


@pytest.mark.parametrize("how", ["get", "scan", "flush"])
def test_what_a_step_wrote_on_another_stream_is_read(make, gpu, streams, how):
    below = DictStore(W)
    tier = make(below if how != "scan" else None)
    with streams.on(0):
        slot_U = acquire(tier, gpu, 0, 20)
    with streams.on(0, busy=True):
        update(tier, slot_U)
    expected = [i + 0.5 for i in range(20)]
    with streams.on(1):
        if how == "get":
            assert rows_of(tier, 0, 20) == expected
        elif how == "scan":
            found = {}
            for _, id_N, row_NW in tier.scan(batch=7):
                found.update(zip(id_N.tolist(), row_NW[:, 0].tolist(), strict=True))
            assert [found[i] for i in range(20)] == expected
        else:
            tier.flush()
            out_UW = np.zeros((20, W), np.float32)
            below.get(*keys_of([(0, i) for i in range(20)]), out_UW)
            assert out_UW[:, 0].tolist() == expected


def test_a_slab_that_grows_keeps_what_another_stream_is_still_writing(make, gpu, streams, monkeypatch):
    monkeypatch.setattr(device_slots, "_SLOTS_MIN", 64)
    tier = make()
    with streams.on(0):
        slot_U, again_U = acquire(tier, gpu, 0, 50), acquire(tier, gpu, 0, 50)
    with streams.on(0, busy=True):
        update(tier, slot_U)
    with streams.on(1):
        slab = tier.row_SW
        acquire(tier, gpu, 50, 130)
        assert tier.row_SW is not slab
    with streams.on(0):  # An update of this moment is not lost to the copy of the slab.
        update(tier, again_U)
    assert rows_of(tier, 0, 130) == [i + 1.0 for i in range(50)] + list(range(50, 130))


def test_slots_that_are_released_on_another_stream_are_not_overwritten_before(make, gpu, streams):
    tier = make(DictStore(W))
    with streams.on(0):
        tier.release(acquire(tier, gpu, 0, 32))
        held = acquire(tier, gpu, 0, 1)
        slot_U, _, missing = tier.pin_resident(distinct(gpu, 1, 32))
        assert len(missing) == 0
    with streams.on(1, busy=True):
        tier.release(slot_U, elsewhere=True)
    with streams.on(0):
        size = len(slot_U)
        del slot_U
        others = [gpu.full(size, value=int(held[0]), dtype=torch.int64) for _ in range(100)]
    gpu.wait()
    assert len(others) == 100 and tier.pinned == 1


@pytest.mark.skipif(not SIMULATED, reason="a GPU says so by the test above")
def test_the_array_of_released_slots_is_kept_for_the_stream_that_reads_it(make, gpu, monkeypatch):
    class Stream:
        def __init__(self, handle):
            self.cuda_stream = handle

        def record_event(self):
            return "event"

        def wait_event(self, event):
            pass

    tier, first, stream, noted = make(), Stream(1), Stream(2), []
    monkeypatch.setattr(gpu, "stream_now", lambda: torch.cuda.current_stream(None).cuda_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: first)
    slot_U = acquire(tier, gpu, 0, 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, on: noted.append((id(self), on)))
    tier.release(slot_U, elsewhere=True)
    assert (id(slot_U), stream) in noted


@pytest.mark.skipif(SIMULATED or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tier_need_not_be_on_the_current_gpu():
    from oneemb.kernels.launch import Gpu

    other = Gpu("cuda:1")
    with torch.cuda.device(0):
        tier = DeviceTier(
            "device", row_width=W, slots=500, below=DictStore(W), resident=False, init=begin_row,
            backend=CudaBackend(other),
        )  # fmt: skip
        for begin in range(0, 3000, 300):
            update(tier, acquire(tier, other, begin, begin + 300))
        assert rows_of(tier, 0, 500) == [i + 0.5 for i in range(500)]
