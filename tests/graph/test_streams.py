"""The stream of preparation, with a stand-in for torch.cuda that notes what it is asked for."""

import contextlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oneemb.graph import prefetch, streams
from oneemb.graph.ops import BatchKeys
from oneemb.kernels.unique_keys_cuda import DeviceKeys
from oneemb.storage.tiers.hot_rows import Prefetched
from tests.support.interrupts import interrupted

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Cuda:
    """torch.cuda with streams that are names, one a device in each thread, and a list of what happened."""

    def __init__(self, here=0):
        self.happened = []
        self.here = threading.local()
        self._device = here

    def is_initialized(self):
        return True

    def current_device(self):
        return self._device

    def Stream(self, device):
        return Stream(f"ahead{device.index or ''}", device, self.happened)

    def current_stream(self, device):
        plain = Stream(f"compute{device.index or ''}", device, self.happened)
        return getattr(self.here, f"stream{device.index}", plain)

    @contextlib.contextmanager
    def stream(self, stream):
        setattr(self.here, f"stream{stream.device.index}", stream)
        self.here.device = stream.device
        yield
        delattr(self.here, f"stream{stream.device.index}")


class Stream:
    def __init__(self, name, device, happened):
        self.name, self.device, self._happened = name, device, happened

    def wait_stream(self, other):
        self._happened.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self._happened.append(f"{self.name} marks")
        return self.name

    def wait_event(self, event):
        self._happened.append(f"{self.name} waits for mark of {event}")


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors of the host count as a GPU's; which of them a stream was told to be used on."""
    noted = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: noted.append((id(self), stream.name)))
    return noted


def test_a_step_waits_for_what_was_prepared_and_no_memory_of_it_is_given_away(monkeypatch, on_gpu):
    cuda = Cuda()
    monkeypatch.setattr(prefetch, "Ahead", lambda devices: streams.Ahead(devices, cuda))
    monkeypatch.setattr(torch.Tensor, "device", FIRST)
    made = []

    def prepare(batch, follow):
        cuda.happened.append(f"prepare {batch[0]} on {cuda.current_stream(FIRST).name}")
        made.append(torch.zeros(2))
        return prefetch.Prepared(batch, values=[made[-1]])

    def compute(prepared, acquired):
        cuda.happened.append(f"compute {prepared.batch[0]} on {cuda.current_stream(FIRST).name}")
        return prepared.batch[0]

    batches = [(0, torch.zeros(1)), (1, torch.zeros(1))]
    assert list(prefetch.prefetch(batches, prepare, compute, 1)) == [0, 1]
    assert cuda.happened == [
        "ahead waits for compute",
        "prepare 0 on ahead", "ahead marks", "compute waits for mark of ahead", "compute 0 on compute",
        "prepare 1 on ahead", "ahead marks", "compute waits for mark of ahead", "compute 1 on compute",
        "compute waits for ahead", "compute waits for ahead",
    ]  # fmt: skip
    tensors = [batches[0][1], made[0], batches[1][1], made[1]]
    assert on_gpu == [(id(tensor), "compute") for tensor in tensors]


def test_tensors_are_found_in_keys_and_prefetched_rows_and_nowhere_else(on_gpu):
    tensors = [torch.zeros(1) for _ in range(8)]
    keys = DeviceKeys(*tensors[:5], check=lambda: None)
    store = SimpleNamespace(row_SW=torch.zeros(1))
    values = [
        BatchKeys(torch.Size([1]), keys, None, None), Prefetched(store, None, tensors[5], 0, 0), {"a": [tensors[6]]},
        (tensors[7], 3, "x"),
        np.zeros(2),
    ]  # fmt: skip
    assert [id(one) for one in streams.tensors_in(values)] == [id(one) for one in tensors]


def test_without_cuda_nothing_is_asked_of_it():
    ahead = streams.Ahead(SimpleNamespace(is_initialized=lambda: False))
    with ahead.working():
        ahead.follow([(1, 0)])
        assert ahead.mark([torch.zeros(1)]) == []
    ahead.take_over([], [torch.zeros(1)])
    ahead.leave()


def test_batches_of_an_embedding_on_another_gpu_than_the_current_one_are_made_on_a_stream_of_that_one(on_gpu):
    cuda = Cuda()
    ahead = streams.Ahead([torch.device("cpu"), SECOND, SECOND], cuda)
    with ahead.working():
        assert cuda.current_stream(SECOND).name == "ahead1" and cuda.current_stream(FIRST).name == "ahead"
        assert cuda.here.device == FIRST, "the current device of the loop is that of the worker"
        mark = ahead.mark([])
    ahead.take_over(mark, [])
    ahead.leave()
    assert sorted(cuda.happened) == [
        "ahead marks", "ahead waits for compute", "ahead1 marks", "ahead1 waits for compute1",
        "compute waits for ahead", "compute waits for mark of ahead",
        "compute1 waits for ahead1", "compute1 waits for mark of ahead1",
    ]  # fmt: skip


def test_what_a_loader_puts_on_a_gpu_of_no_embedding_is_waited_for_there(on_gpu, monkeypatch):
    cuda = Cuda()
    ahead = streams.Ahead([], cuda)
    monkeypatch.setattr(torch.Tensor, "device", SECOND)
    tensor = torch.zeros(1)
    with ahead.working():
        mark = ahead.mark([tensor])
    ahead.take_over(mark, [tensor])
    assert "compute1 waits for mark of compute1" in cuda.happened
    assert on_gpu == [(id(tensor), "compute1")]


def test_a_buffer_that_a_step_has_changed_is_read_ahead_after_that_step():
    cuda = Cuda()
    ahead = streams.Ahead([], cuda)
    assert cuda.happened.pop() == "ahead waits for compute", "what is there before the loop is there for the worker"
    ahead.follow([(1, 0)])
    ahead.follow([(1, 0)])
    assert cuda.happened == ["ahead waits for compute"], "once for what stays as it is"
    ahead.follow([(1, 1)])
    assert cuda.happened == ["ahead waits for compute"] * 2


def test_a_capture_that_is_interrupted_lets_batches_be_prepared():
    for line in range(1, 40):
        gate = streams.CaptureGate()

        def capture(gate=gate):
            with gate.capturing(0.1) as may:
                assert may

        if not interrupted(capture, line, "signal", files=[streams.__file__])[0]:
            break
        assert gate.capturing_block is None
        with gate.preparing():
            pass
        with gate.capturing(0.1) as may:
            assert may
    assert line > 8
