"""config.cuda_graph: which modules are captured and when, with a stand-in for torch.cuda.make_graphed_callables."""

import contextlib
import threading
import warnings

import pytest
import torch

import oneemb
from oneemb.graph import dense, streams
from tests.support.graph_models import adam, make_embedding, make_graph, weights_of

GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 50, (40, 6, 2), generator=GENERATOR)
LABEL = torch.randint(0, 2, (40, 6), generator=GENERATOR).float()


def build(self, ids, label):
    logit = self.dense(self.embedding(ids).flatten(1))
    loss = torch.nn.functional.mse_loss(logit.squeeze(1), label)
    loss.backward()
    return loss.detach(), logit.detach()


def graph_of(captured, module=None, build=build):
    torch.manual_seed(0)
    module = module() if module else oneemb.nn.FusedMLP(8, [8], 1, skip_final_activation=True)
    graph = make_graph({"embedding": make_embedding(), "dense": module}, build, adam)
    graph.config.cuda_graph = captured
    return graph


@pytest.fixture
def captures(monkeypatch):
    """Graphs on the CPU: as a real one does, each keeps what it gives in one place, and runs the module beforehand."""
    made = []

    def make_graphed_callables(module, samples):
        for _ in range(3):
            module(*samples)
        kept = {}
        shapes = [one.shape for one in samples]
        made.append(shapes)

        def graphed(*args):
            assert [one.shape for one in args] == shapes, "a graph is replayed for what it was captured with"
            out = module(*args)
            buffer = kept.setdefault("out", torch.empty_like(out))
            with torch.no_grad():
                buffer.copy_(out)
            return Kept.apply(out, buffer)

        return graphed

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out, buffer):
            return buffer.detach()

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed_callables)
    monkeypatch.setattr(dense, "on_gpu", lambda tensor: True)
    return made


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_module_is_captured_after_three_steps_and_gives_the_same_numbers(captures):
    class Noisy(torch.nn.Module):
        """With buffers that a step changes, and random numbers."""

        def __init__(self):
            super().__init__()
            self.norm, self.top, self.drop = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1), torch.nn.Dropout(0.3)

        def forward(self, x):
            return self.top(self.drop(self.norm(x)))

    runs = []
    for captured in (False, True):
        graph = graph_of(captured, Noisy)
        torch.manual_seed(1)
        with no_warning():
            given = [graph(*batch) for batch in zip(IDS[:8], LABEL[:8], strict=True)]
        runs.append([*given, list(graph.dense.buffers()), weights_of(graph.dense)])
        assert len(captures) == captured
    for plain, found in zip(*runs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(plain, found, strict=True))
    assert captures == [[torch.Size([6, 8])]]


def test_evaluation_runs_the_module_itself(captures):
    graph, plain = graph_of(True), graph_of(False)
    for one in (graph, plain):
        for batch in zip(IDS[:5], LABEL[:5], strict=True):
            one(*batch)
        one.eval()
    with no_warning():
        assert torch.equal(graph(IDS[7], LABEL[7])[1], plain(IDS[7], LABEL[7])[1])
    assert len(captures) == 1


def test_each_shape_is_captured_up_to_a_few(captures):
    graph = graph_of(True)
    sizes = [6, 5, 4, 3, 2, 1]
    with pytest.warns(UserWarning, match="cuda_graph: FusedMLP is called with inputs of more than 4 shapes") as caught:
        for step in range(4 * len(sizes)):
            size = sizes[step % len(sizes)]
            graph(IDS[step, :size], LABEL[step, :size])
    assert len(caught) == 1
    assert sorted(shapes[0][0] for shapes in captures) == [3, 4, 5, 6]


def test_parameters_that_lie_elsewhere_are_captured_anew(captures):
    graph = graph_of(True)
    for step in range(4):
        graph(IDS[step], LABEL[step])
    for parameter in graph.dense.parameters():
        parameter.data = parameter.data.clone()
    for step in range(4):
        graph(IDS[step], LABEL[step])
    assert len(captures) == 2


def twice(self, ids, label):
    rows = self.embedding(ids).flatten(1)
    loss = torch.nn.functional.mse_loss((self.dense(rows) + self.dense(2 * rows)).squeeze(1), label)
    loss.backward()
    return loss.detach()


def two_losses(self, ids, label):
    logit = self.dense(self.embedding(ids).flatten(1)).squeeze(1)
    torch.nn.functional.mse_loss(logit, label).backward(retain_graph=True)
    loss = logit.square().sum()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    "build, message", [(twice, "build calls it more than once"), (two_losses, "build runs several backward passes")]
)
def test_what_a_second_replay_would_spoil_is_not_captured(captures, build, message):
    graph, plain = graph_of(True, build=build), graph_of(False, build=build)
    with pytest.warns(UserWarning, match=f"cuda_graph: FusedMLP runs without one: {message}") as caught:
        for step in range(6):
            assert torch.equal(graph(IDS[step], LABEL[step]), plain(IDS[step], LABEL[step]))
    assert captures == [] and len(caught) == 1


def test_accumulated_gradients_are_not_captured(captures):
    graph = graph_of(True)
    graph.config.accumulation_steps = 2
    with pytest.warns(UserWarning, match="accumulated over several calls"):
        for step in range(6):
            graph(IDS[step], LABEL[step])
    assert captures == []


def test_on_the_cpu_one_warning_says_so():
    graph, plain = graph_of(True), graph_of(False)
    with pytest.warns(UserWarning, match="FusedMLP runs without one: is not on a GPU") as caught:
        for step in range(6):
            assert torch.equal(graph(IDS[step], LABEL[step])[0], plain(IDS[step], LABEL[step])[0])
    assert len(caught) == 1


def test_a_capture_forbids_nothing_to_other_threads(captures, monkeypatch):
    modes, before = [], torch.cuda.make_graphed_callables

    class Graph:
        def __init__(self, graph, pool=None, capture_error_mode="global"):
            modes.append(capture_error_mode)

    def make_graphed_callables(module, samples):
        torch.cuda.graph("of the forward pass", pool=None)  # as torch's own does
        return before(module, samples)

    monkeypatch.setattr(torch.cuda, "graph", Graph)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed_callables)
    graph = graph_of(True)
    for ids, label in zip(IDS[:6], LABEL[:6], strict=True):
        graph(ids, label)
    assert captures and set(modes) == {"thread_local"} and torch.cuda.graph is Graph


def test_what_cannot_be_captured_runs_as_it_is_with_one_warning(captures, monkeypatch):
    def fails(module, samples):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fails)
    graph, plain = graph_of(True), graph_of(False)
    with pytest.warns(UserWarning, match="FusedMLP runs without one: RuntimeError: operation not permitted") as caught:
        for step in range(6):
            assert torch.equal(graph(IDS[step], LABEL[step])[0], plain(IDS[step], LABEL[step])[0])
    assert len(caught) == 1


def test_modules_are_compiled_and_captured_together(captures, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda module, **kwargs: compiled.append(module) or module)
    graph = graph_of(True)
    graph.config.compile_dense = True
    for step in range(5):
        graph(IDS[step], LABEL[step])
    assert compiled == [graph.dense] and len(captures) == 1


def test_batches_are_not_prepared_while_a_graph_is_captured(captures):
    graph = graph_of(True)
    busy, overlaps = threading.Event(), []

    class Loader:
        def __iter__(self):
            for batch in zip(IDS[:12], LABEL[:12], strict=True):
                busy.set()
                yield batch
                busy.clear()

    capture = torch.cuda.make_graphed_callables

    def captured(module, samples):
        overlaps.append(streams.capture_gate.preparing_threads)
        return capture(module, samples)

    torch.cuda.make_graphed_callables = captured  # the fixture restores it
    assert len(list(graph.run(Loader(), prefetch_depth=2))) == 12
    assert overlaps == [0]


def test_a_thread_that_is_never_done_leaves_the_module_as_it_is(captures, monkeypatch):
    monkeypatch.setattr(dense, "_PATIENCE_S", 0.01)
    graph, plain = graph_of(True), graph_of(False)
    with streams.capture_gate.preparing():
        for step in range(5):
            assert torch.equal(graph(IDS[step], LABEL[step])[0], plain(IDS[step], LABEL[step])[0])
    assert captures == []
    graph(IDS[5], LABEL[5])
    assert len(captures) == 1


def test_a_thread_that_is_never_done_is_not_waited_for_for_ever(captures, monkeypatch):
    monkeypatch.setattr(dense, "_PATIENCE_S", 0.01)
    graph = graph_of(True)
    with streams.capture_gate.preparing(), pytest.warns(UserWarning, match="batches were being prepared") as caught:
        for step in range(8):
            graph(IDS[step], LABEL[step])
    graph(IDS[8], LABEL[8])
    assert captures == [] and len(caught) == 1
