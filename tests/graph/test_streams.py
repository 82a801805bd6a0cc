"""The stream of preparation, with a stand-in for torch.cuda that notes what it is asked for."""

import contextlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oneemb.graph import prefetch, streams
from oneemb.graph.ops import Keys
from oneemb.kernels.unique_keys_cuda import DeviceKeys
from oneemb.storage.embedding_store import Staged


class Cuda:
    """torch.cuda with a stream a thread that are names, and a list of what happened."""

    def __init__(self):
        self.happened = []
        self._here = threading.local()

    def is_initialized(self):
        return True

    def Stream(self):
        return Stream("ahead", self.happened)

    def current_stream(self):
        return getattr(self._here, "stream", Stream("compute", self.happened))

    @contextlib.contextmanager
    def stream(self, stream):
        self._here.stream = stream
        yield
        del self._here.stream


class Stream:
    def __init__(self, name, happened):
        self.name, self._happened = name, happened

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
    monkeypatch.setattr(prefetch, "Ahead", lambda: streams.Ahead(cuda))
    made = []

    def prepare(batch):
        cuda.happened.append(f"prepare {batch[0]} on {cuda.current_stream().name}")
        made.append(torch.zeros(2))
        return prefetch.Prepared(batch, values=[made[-1]])

    def compute(prepared, admitted):
        cuda.happened.append(f"compute {prepared.batch[0]} on {cuda.current_stream().name}")
        return prepared.batch[0]

    batches = [(0, torch.zeros(1)), (1, torch.zeros(1))]
    assert list(prefetch.prefetch(batches, prepare, compute, 1)) == [0, 1]
    assert cuda.happened == [
        "ahead waits for compute",
        "prepare 0 on ahead", "ahead marks", "compute waits for mark of ahead", "compute 0 on compute",
        "prepare 1 on ahead", "ahead marks", "compute waits for mark of ahead", "compute 1 on compute",
    ]  # fmt: skip
    tensors = [batches[0][1], made[0], batches[1][1], made[1]]
    assert on_gpu == [(id(tensor), "compute") for tensor in tensors]


def test_tensors_are_found_in_keys_and_staged_rows_and_nowhere_else(on_gpu):
    tensors = [torch.zeros(1) for _ in range(8)]
    keys = DeviceKeys(*tensors[:5], check=lambda: None)
    store = SimpleNamespace(row_SW=torch.zeros(1))
    values = [
        Keys(torch.Size([1]), keys), Staged(store, tensors[5], 0, keys=None), {"a": [tensors[6]]}, (tensors[7], 3, "x"),
        np.zeros(2),
    ]  # fmt: skip
    assert [id(one) for one in streams._tensors(values)] == [id(one) for one in tensors]


def test_without_cuda_nothing_is_asked_of_it():
    ahead = streams.Ahead(SimpleNamespace(is_initialized=lambda: False))
    with ahead.working():
        assert ahead.mark() is None
    ahead.take_over(None, [torch.zeros(1)])
