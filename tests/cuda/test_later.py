"""Numbers that a loop tells the host: the memory to which they go, and when it is free again."""

import pytest
import torch

from oneemb.kernels.finite_cuda import check_sums_cuda
from oneemb.kernels.later import Later


def tell(gpu, later, *, finite=1):
    finite_1, go_1 = (gpu.full(1, value=value, dtype=torch.int64) for value in (finite, 1))
    check_sums_cuda(finite_1, go_1, gpu=gpu, later=later)


@pytest.mark.parametrize("finite", [0, 1])
def test_numbers_come_after_the_loop_has_run(gpu, finite):
    later = Later(gpu, 1)
    assert later.values(wait=False) is None
    tell(gpu, later, finite=finite)
    assert later.values() == later.values() == later.values(wait=False) == [finite]


def test_memory_is_free_again_when_its_numbers_have_been_read_and_not_before(gpu):
    later, dropped = Later(gpu, 1), Later(gpu, 1)
    unread = {later.told_X.data_ptr(), dropped.told_X.data_ptr()}
    del dropped  # A loop may still write its numbers.
    others = [Later(gpu, 1) for _ in range(600)]
    places = {other.told_X.data_ptr() for other in others}
    assert len(places) == 600 and not places & unread
    tell(gpu, later)
    later.values()
    again = Later(gpu, 1)
    assert again.told_X.data_ptr() == later.told_X.data_ptr() and again.values(wait=False) is None
    assert later.values(wait=False) == [1]


def test_numbers_that_no_loop_tells_are_an_error_after_one_wait(gpu):
    waits, later = gpu.waits, Later(gpu, 4)
    with pytest.raises(AssertionError, match="told no numbers"):
        later.values()
    assert gpu.waits == waits + 1


def test_the_host_waits_for_the_stream_of_the_loop(gpu, monkeypatch):
    waited_for, waits = [], gpu.waits

    def wait_for(stream):
        waited_for.append(stream)
        later.told_X.copy_(torch.tensor([7, 1]))

    monkeypatch.setattr(gpu, "wait_for", wait_for)
    with monkeypatch.context() as at:
        at.setattr(gpu, "stream_now", lambda: 5)
        later = Later(gpu, 1)
    assert later.values() == [7] and waited_for == [5] and gpu.waits == waits + 1
