"""Replacements while a build is traced: one thread's alone, and gone afterwards whatever happens."""

import builtins
import math
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import fx
from torch.utils._device import DeviceContext

from oneemb.graph.build_error import user_line
from oneemb.graph.fx_tracer import BuildTracer
from oneemb.graph.modules import embeddings_in
from oneemb.graph.patches import Here, call_replaced
from oneemb.graph.text import graph_text
from oneemb.graph.tracer import trace
from oneemb.graph.tracer_replacements import replacements
from tests.support.models import make_embedding


class Root(torch.nn.Module):
    def __init__(self, path, name="items"):
        super().__init__()
        self.embedding = make_embedding(path / name, name=name)
        self.linear = torch.nn.Linear(4, 1)

    def build(self, ids):
        with torch.no_grad():
            noise = torch.rand(1)
        loss = (self.linear(self.embedding(ids)) * noise * math.sqrt(ids.shape[0])).sum()
        torch.nn.utils.clip_grad_norm_(self.linear.parameters(), 1.0)
        return loss


@pytest.fixture
def root(tmp_path):
    root = Root(tmp_path)
    yield root
    root.embedding.close()


def places():
    """Every attribute that tracing might replace, by name, as it is now."""
    grad_mode = torch.autograd.grad_mode
    owners = [
        builtins, math, torch, torch.autograd, torch.random, torch.nn.Module, torch.optim.Optimizer,
        torch.amp.autocast_mode.autocast, torch.amp.grad_scaler.GradScaler, grad_mode.no_grad, grad_mode.enable_grad,
        grad_mode.set_grad_enabled, grad_mode.inference_mode, torch.autograd.graph.saved_tensors_hooks,
        torch.autograd.profiler.record_function, torch.overrides.TorchFunctionMode, DeviceContext,
        torch.utils._python_dispatch.TorchDispatchMode, fx._symbolic_trace,
    ]  # fmt: skip
    found = {(owner, name): id(value) for owner in owners for name, value in list(vars(owner).items())}
    for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        found |= {(clip, i): id(cell.cell_contents) for i, cell in enumerate(clip.__closure__)}
    return found


def nothing_is_left(before):
    after = places()
    assert all(after.get(place) == value for place, value in before.items())
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch.is_grad_enabled()


def test_two_threads_trace_in_turn_and_leave_nothing(tmp_path):
    before, texts, errors = places(), [], []
    begin = threading.Barrier(3)

    def trace_often(i):
        try:
            root = Root(tmp_path, f"rows{i}")
            begin.wait()
            for _ in range(40):
                texts.append(graph_text(trace(root).graph))
            root.embedding.close()
        except BaseException as error:
            errors.append(error)

    def train():
        """A plain loop beside them, which must not see that anything is traced."""
        try:
            linear = torch.nn.Linear(2, 1)
            begin.wait()
            while len(texts) < 80 and not errors:
                with torch.no_grad():
                    assert not (linear(torch.ones(1, 2)) * torch.rand(1)).requires_grad
                linear(torch.ones(1, 2)).sum().backward()
                linear.zero_grad()
                linear.note = math.sqrt(4)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=trace_often, args=(i,)) for i in range(2)] + [threading.Thread(target=train)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(texts) == 80 and len(set(texts)) == 1
    nothing_is_left(before)


OURS = (call_replaced, trace, replacements, BuildTracer.record, user_line, embeddings_in)
FILES = (*(function.__code__.co_filename for function in OURS), torch.overrides.__file__)


def lines_of(function, raise_at=None):
    """The lines of these files that a function runs, in order; KeyboardInterrupt is raised at that of this number."""
    lines = []

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) - 1 == raise_at:
                raise KeyboardInterrupt
        return trace

    outside = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        assert raise_at is not None
    finally:
        sys.settrace(outside)
    return lines


def free(lock):
    """Whether another thread could take the lock."""
    taken = []

    def take():
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def test_an_interrupt_at_any_line_leaves_nothing(root):
    from oneemb.graph.patches import _ONE_AT_A_TIME

    trace(root)
    before = places()
    lines = lines_of(lambda: trace(root).graph)
    times = {line: [i for i, one in enumerate(lines) if one == line] for line in lines}
    # Of a line that comes often: where a loop begins, is under way, and ends.
    chosen = {i for all in times.values() for i in (all[0], all[len(all) // 2], all[-1])}
    assert len(times) > 100 and sum(line[0] == FILES[0] for line in times) > 30
    for i in sorted(chosen):
        lines_of(lambda: trace(root).graph, raise_at=i)
        after = places()
        assert all(after.get(place) == value for place, value in before.items()), lines[i]
        assert torch.overrides._get_current_function_mode_stack() == [] and free(_ONE_AT_A_TIME), lines[i]
    nothing_is_left(before)
    assert "math" not in graph_text(trace(root).graph) and "sqrt(" in graph_text(trace(root).graph)


def test_a_replacement_that_someone_keeps_is_the_original_afterwards():
    class Owner:
        def method(self):
            return "original"

    kept, here = [], Here()
    call_replaced(here, lambda: [(Owner, "method", lambda self: "replaced")], lambda: kept.append(Owner().method))
    assert kept[0]() == "original" and Owner().method() == "original"


def test_what_a_place_inherits_is_not_written_there():
    class Base:
        def method(self):
            return "inherited"

    class Owner(Base):
        pass

    one = Owner()
    assert call_replaced(Here(), lambda: [(one, "method", lambda: "mine")], lambda: one.method()) == "mine"
    assert one.method() == "inherited" and "method" not in vars(one)


def test_a_kernel_may_be_compiled_for_the_first_time_beside_a_trace(tmp_path):
    """Numba knows functions of `math` by what they are, and looks at them once: here, in a process of its own."""
    code = f"""
import sys, threading, time
sys.path.insert(0, {os.getcwd()!r})
import torch, oneemb
from tests.support.models import make_embedding
traced, other = make_embedding({str(tmp_path / "a")!r}), make_embedding({str(tmp_path / "b")!r})
begun, go_on = threading.Event(), threading.Event()
class Slow(oneemb.EvalGraph):
    def __init__(self):
        super().__init__()
        self.embedding = traced
    def build(self, ids):
        begun.set()
        assert go_on.wait(60)
        self.embedding.stats()  # a turn, while the other thread may be in one and compile
        return self.embedding(ids).sum(1)
thread = threading.Thread(target=Slow(), args=(torch.tensor([1]),))
thread.start()
begun.wait()
try:
    print(other(torch.tensor([1])).shape)
finally:
    go_on.set()
    thread.join()
"""
    nothing_compiled = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=nothing_compiled)
    assert ended.returncode == 0 and ended.stdout == "torch.Size([1, 4])\n", ended.stderr
