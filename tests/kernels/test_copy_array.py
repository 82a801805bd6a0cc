"""Copies have the bits of what they are of, and memory of their own."""

import numpy as np
import pytest
import torch

from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.threads import Threads


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 5), (1 << 10, 8), (5, 1 << 13), (9000, 33), (9000, 259)])
def test_a_copy_has_the_bits_and_memory_of_its_own(shape, dtype, count):
    threads = Threads(count)
    bits = torch.from_numpy(np.random.default_rng(0).integers(-(1 << 15), 1 << 15, shape, np.int16))
    given = bits.view(dtype) if dtype.itemsize == 2 else (bits.to(torch.int32) << 16 | 77).view(dtype)
    copy = HostBackend(threads).copy(given)
    assert copy.dtype == dtype and copy.is_contiguous() and copy.shape == given.shape
    word = torch.int16 if dtype.itemsize == 2 else torch.int32
    before = given.view(word).clone()
    assert torch.equal(copy.view(word), before)
    given.view(word).zero_()
    assert torch.equal(copy.view(word), before)
    threads.close()


@pytest.mark.parametrize("rows, streamed", [(9000, True), (900, False)])
def test_a_large_array_is_copied_past_the_caches(rows, streamed, monkeypatch):
    loops, run = [], Threads.run

    def noted(self, loop, *args, **kwargs):
        loops.append(loop.__name__)
        run(self, loop, *args, **kwargs)

    monkeypatch.setattr(Threads, "run", noted)
    given = torch.rand(rows, 259)
    assert torch.equal(HostBackend(Threads(2)).copy(given), given)
    assert loops == ["_stream_cpu" if streamed else "_copy_cpu"]


def test_what_lies_in_strides_is_copied_together():
    given = torch.arange(12.0).reshape(3, 4).T
    copy = HostBackend(Threads(1)).copy(given)
    assert copy.is_contiguous() and torch.equal(copy, given)
