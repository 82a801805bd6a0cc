"""Memory of the device that runs out anywhere in a call: each op of torch that takes memory fails in turn.

The oracle and the calls are those of tests/support/failing_allocations.py.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import oneemb.embeddings.embedding
from oneemb.storage.tiers import device_tier
from tests.cuda.test_train import SIMULATED, on_gpu
from tests.support.failing_allocations import Subject, run

pytestmark = pytest.mark.skipif(not SIMULATED, reason="on a GPU torch's allocator cannot be told when to fail")

VIEWS = {
    "view",
    "_unsafe_view",
    "detach",
    "select",
    "slice",
    "as_strided",
    "expand",
    "t",
    "transpose",
    "alias",
    "unsqueeze",
}


class Allocations(TorchDispatchMode):
    """The n-th op from now on that takes memory fails, as with torch's allocator."""

    fails_at, seen = -1, 0

    def fail_after(self, n):
        self.fails_at, self.seen = n, 0

    def counted(self):
        return self.seen

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if name not in VIEWS and (not name.endswith("_") or name == "index_put_"):
            self.seen += 1
            if self.seen - 1 == self.fails_at:
                raise torch.OutOfMemoryError(f"CUDA out of memory, in {name}")
        return op(*args, **(kwargs or {}))


def wrongs(gpu, kind, folder, monkeypatch, operations, **options):
    monkeypatch.setattr(
        oneemb.embeddings.embedding, "hidden_from_modes", nullcontext
    )  # so that the mode below sees all ops
    made = device_tier.DeviceTier
    monkeypatch.setattr(device_tier, "DeviceTier", lambda *its, slots, **others: made(
        *its, slots=slots if kind != "host" else 15, **others))  # fmt: skip
    subject = Subject(kind, folder, 0, dim=4, ids=30, batch=6)
    with warnings.catch_warnings(), on_gpu(gpu, subject.embedding), Allocations() as allocations:
        warnings.simplefilter("ignore")
        wrong, failures, broken = run(subject, allocations, operations, **options)
    subject.embedding.close()
    assert broken < failures / 2 and failures > 10
    return "\n".join(wrong)


def test_memory_of_the_device_that_runs_out_harms_nothing_or_breaks_the_store(gpu, tmp_path, monkeypatch):
    assert not wrongs(gpu, "host", tmp_path / "rows", monkeypatch, ["lookup"], stride=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["device", "host", "policy"])
def test_memory_of_the_device_that_runs_out_in_any_call_harms_nothing_or_breaks_the_store(
    gpu, kind, tmp_path, monkeypatch
):
    assert not wrongs(gpu, kind, tmp_path / "rows", monkeypatch, ["lookup", "step", "erase"])
