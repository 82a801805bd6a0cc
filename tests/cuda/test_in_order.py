"""The order of a tier's calls on several streams, with streams that only note what they are asked for."""

from types import SimpleNamespace

import pytest
import torch

from oneemb.storage.device_tier import _InOrder


class Stream:
    def __init__(self, name, noted):
        self.name, self.noted = name, noted

    def record_event(self):
        self.noted.append(f"{self.name} marks")
        return f"{self.name}'s mark"

    def wait_event(self, event):
        self.noted.append(f"{self.name} waits for {event}")


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
    order = _InOrder(SimpleNamespace(device=torch.device("cuda")))
    arrays = [Array(on.noted)]
    for name in ("compute", "compute", "ahead", "compute"):
        on(name)
        with order(lambda: arrays):
            on.noted.append(f"call on {name}")
    assert on.noted == [
        "call on compute", "compute marks",
        "call on compute", "compute marks",
        "ahead waits for compute's mark", "used on ahead", "call on ahead", "ahead marks",
        "compute waits for ahead's mark", "used on compute", "call on compute", "compute marks",
    ]  # fmt: skip


def test_a_call_that_fails_is_waited_for_too(on):
    order = _InOrder(SimpleNamespace(device=torch.device("cuda")))
    on("ahead")
    with pytest.raises(KeyError), order(list):
        raise KeyError
    on("compute")
    with order(list):
        pass
    assert "compute waits for ahead's mark" in on.noted


def test_evictions_come_after_the_releases_before_them(on):
    order = _InOrder(SimpleNamespace(device=torch.device("cuda")))
    on("ahead")
    order.after_releases()
    assert on.noted == []
    on("compute")
    order.released()
    on("ahead")
    order.after_releases()
    assert on.noted == ["compute marks", "ahead waits for compute's mark"]


def test_without_a_gpu_nothing_is_asked_of_streams(on):
    order = _InOrder(SimpleNamespace(device=torch.device("cpu")))
    on("compute")
    with order(list):
        order.released()
        order.after_releases()
    assert on.noted == []
