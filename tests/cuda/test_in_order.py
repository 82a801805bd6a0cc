"""The order of a tier's calls on several streams, with streams that only note what they are asked for."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oneemb.storage.tiers import device_memory
from oneemb.storage.tiers.device_memory import PinnedRows, StreamOrder
from tests.support.row_store_suite import DictStore, keys_of


class Stream:
    def __init__(self, name, noted):
        self.name, self.noted, self.cuda_stream = name, noted, id(self)

    def record_event(self):
        self.noted.append(f"{self.name} marks")
        return f"{self.name}'s mark"

    def wait_event(self, event):
        self.noted.append(f"{self.name} waits for {event}")


class Gpu:
    device = torch.device("cuda")

    def stream_now(self):
        return torch.cuda.current_stream(self.device).cuda_stream


class Array:
    def __init__(self, noted):
        self.noted = noted

    def record_stream(self, stream):
        self.noted.append(f"used on {stream.name}")


@pytest.fixture
def on(monkeypatch):
    """Switches to a stream by name; `.noted` is what happened."""
    noted, streams = [], {}

    def on(name):
        stream = streams.setdefault(name, Stream(name, noted))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    on.noted = noted
    return on


def test_a_call_on_another_stream_comes_after_the_one_before_and_keeps_its_memory(on):
    order = StreamOrder(Gpu())
    arrays = [Array(on.noted)]
    for name in ("compute", "compute", "ahead", "compute"):
        on(name)
        with order(lambda: arrays):
            on.noted.append(f"call on {name}")
    assert on.noted == [
        "call on compute", "call on compute", "compute marks",
        "ahead waits for compute's mark", "used on ahead", "call on ahead", "ahead marks",
        "compute waits for ahead's mark", "used on compute", "call on compute", "compute marks",
    ]  # fmt: skip


def test_a_call_that_fails_is_waited_for_too(on):
    order = StreamOrder(Gpu())
    on("ahead")
    with pytest.raises(KeyError), order(list):
        raise KeyError
    on("compute")
    with order(list):
        pass
    assert "compute waits for ahead's mark" in on.noted


def test_evictions_come_after_the_releases_before_them(on):
    order = StreamOrder(Gpu())
    on("ahead")
    order.after_releases()
    assert on.noted == []
    on("compute")
    order.released(Array(on.noted))
    on("ahead")
    order.after_releases()
    assert on.noted == [
        "ahead marks", "used on compute", "compute marks", "ahead waits for ahead's mark",
        "ahead waits for compute's mark",
    ]  # fmt: skip


def test_releases_on_the_first_stream_are_waited_for_though_nobody_marked_them(on):
    order = StreamOrder(Gpu())
    on("compute")
    order.released(Array(on.noted))
    assert on.noted == []
    on("ahead")
    order.after_releases()
    assert on.noted == ["compute marks", "ahead waits for compute's mark"]


def test_a_release_on_one_stream_hides_none_on_another(on):
    order = StreamOrder(Gpu())
    for name in ("compute", "ahead", "compute"):
        on(name)
        order.released(Array(on.noted))
    on.noted.clear()
    on("third")
    order.after_releases()
    assert sorted(on.noted) == ["third waits for ahead's mark", "third waits for compute's mark"]


def test_without_a_gpu_nothing_is_asked_of_streams(on):
    order = StreamOrder(SimpleNamespace(device=torch.device("cpu"), stream_now=int))
    on("compute")
    with order(list):
        order.released(Array(on.noted))
        order.after_releases()
    assert on.noted == []


@pytest.fixture
def two_gpus(monkeypatch):
    """Streams of two GPUs, the first of them current; copies to and from page-locked memory are plain ones."""
    noted = []
    streams = [Stream(f"gpu {i}", noted) for i in range(2)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[device.index if device else 0])
    monkeypatch.setattr(Stream, "record_event", lambda self: Mark(self, noted))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **more: empty(*shape, **more))
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **more: to(self, "cpu", **more))
    return noted


class Mark:
    def __init__(self, stream, noted):
        self.name, self.noted = f"{stream.name}'s mark", noted
        noted.append(f"{stream.name} marks")

    def synchronize(self):
        self.noted.append(f"the host waits for {self.name}")


def test_two_buffers_in_turn_wait_for_copies_on_their_own_gpu_whichever_is_current(two_gpus, monkeypatch):
    monkeypatch.setattr(device_memory, "_BUFFER_BYTES", 4 * 3 * 4)  # four rows of three words
    below, gpu = DictStore(3), SimpleNamespace(device=torch.device("cuda", 1), waits=0)
    keys, rows = keys_of((0, i) for i in range(11)), np.arange(33, dtype=np.float32).reshape(11, 3)
    below.put(*keys, rows)
    found = [(part.start, row_NW.tolist()) for part, missing_N, row_NW in PinnedRows(3, gpu).read(below, *keys)]
    assert found == [(n, rows[n : n + 4].tolist()) for n in (0, 4, 8)]
    assert two_gpus == ["gpu 1 marks", "gpu 1 marks", "the host waits for gpu 1's mark", "gpu 1 marks"]
    assert gpu.waits == 1
