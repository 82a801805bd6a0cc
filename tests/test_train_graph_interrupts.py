"""A loop over batches prepared ahead that is interrupted, forgotten or stuck: it ends, and nothing of it is left."""

import gc
import signal
import sys
import threading
import time

import pytest
import torch

from oneemb.graph import prefetch
from tests.support.graph_models import rows_of, weights_of
from tests.support.interrupts import interrupted
from tests.test_train_graph_prefetch import batches_of, graph_of, pinned, threads

FILE = prefetch.__file__
EVERY = [4, pytest.param(1, marks=pytest.mark.slow)]
"""`make test` interrupts each fourth place, `make test-slow` each."""


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    gc.collect()
    assert threads() == []


PATIENCE_S = 600


def wait_for_threads(place=""):
    """Until each is gone. Not by `join`: a thread whose `join` was interrupted counts as ended."""
    end = time.monotonic() + PATIENCE_S
    while threads() and time.monotonic() < end:
        time.sleep(1e-4)
    assert threads() == [], place


def check_after_interrupts(depth, files, functions, lines):
    """Interrupt a loop at each of these lines in turn. Each time all is given back, and what has been trained is what
    plain calls train with as many batches."""
    graph, plain = graph_of("ssd"), graph_of("ssd")
    batches = batches_of(4, 20, 60)
    list(graph.run(batches))
    for batch in batches:
        plain(*batch)
    interrupts = 0
    for line in lines:
        steps = graph.steps
        loop = graph.run(batches, prefetch_depth=depth)
        _, place = interrupted(lambda loop=loop: list(loop), line, "signal", files=files, functions=functions)
        wait_for_threads(f"the {line}th: {place}")
        assert pinned(graph) == 0, f"the {line}th: {place}"
        for batch in batches[: graph.steps - steps]:
            plain(*batch)
        if place is None:
            break
        interrupts += 1
    assert rows_of(graph.embedding) == rows_of(plain.embedding)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(graph.mlp), weights_of(plain.mlp), strict=True))
    assert list(graph.run(batches)) == [plain(*batch) for batch in batches]
    return interrupts


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_interrupt_at_any_line_of_the_loop_leaves_nothing(depth, every):
    assert check_after_interrupts(depth, [FILE], None, range(1, 1000, every)) > 80 // every


@pytest.mark.parametrize("every", EVERY)
def test_an_interrupt_at_any_line_of_waiting_for_the_thread_leaves_nothing(every):
    waiting = {"join", "_wait_for_tstate_lock", "is_alive", "current_thread", "close", "_wait"}
    assert check_after_interrupts(1, [FILE, threading.__file__], waiting, range(1, 200, every)) > 8 // every


def test_the_comparison_notices_a_loop_that_is_not_closed(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE_S", 0.1)
    close = prefetch.PrefetchWorker.close
    workers = []
    monkeypatch.setattr(prefetch.PrefetchWorker, "close", lambda worker: workers.append(worker))
    with pytest.raises(AssertionError, match="the 9th: oneemb/graph/prefetch.py:"):
        check_after_interrupts(1, [FILE], None, [9])
    for worker in workers:
        close(worker)


def wait_until_in(thread, *names):
    """Until this thread runs a function of one of these names, as far as can be seen."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        frame = sys._current_frames()[thread.ident]
        while frame is not None:
            if frame.f_code.co_name in names:
                return
            frame = frame.f_back
        time.sleep(1e-4)
    raise AssertionError(f"{thread} came to none of {names}")


def interrupt_main():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_ctrl_c_while_the_loader_is_waited_for_and_again_while_the_thread_is():
    graph = graph_of("ssd")
    batches = batches_of(3, 20, 60)
    moments = []

    def loader():
        yield batches[0]
        yield batches[1]
        for moment in ("next", "_wait"):
            wait_until_in(threading.main_thread(), moment)
            moments.append(moment)
            interrupt_main()
        wait_until_in(threading.main_thread(), "close")
        yield batches[2]

    with pytest.raises(KeyboardInterrupt):
        list(graph.run(loader()))
    assert moments == ["next", "_wait"] and threads() == [] and pinned(graph) == 0


@pytest.mark.parametrize("every", EVERY)
def test_ctrl_c_while_torch_makes_a_node_of_a_graph_comes_afterwards(monkeypatch, every):
    # In torch's C code what Ctrl-C raises would become a SystemError.
    begun, made = [], []
    create_node = torch.fx.Graph.create_node

    def interrupted_at(at, graph):
        def create(*args, **kwargs):
            begun.append(args)
            if len(begun) == at:
                signal.raise_signal(signal.SIGINT)
            made.append(create_node(*args, **kwargs))
            return made[-1]

        begun.clear(), made.clear()
        with monkeypatch.context() as patched:
            patched.setattr(torch.fx.Graph, "create_node", create)
            graph(*batches[0])

    graph, batches = graph_of(), batches_of(3, 20, 60)
    interrupted_at(None, graph)
    nodes = len(made)
    expected = [graph(*batch) for batch in batches[1:]]
    for at in range(1, nodes + 1, every):
        graph = graph_of()
        with pytest.raises(KeyboardInterrupt):
            interrupted_at(at, graph)
        assert len(made) == len(begun) >= at
        for batch in batches[graph.steps : 1]:
            graph(*batch)
        assert [graph(*batch) for batch in batches[1:]] == expected
        graph.embedding.close()


def test_a_loop_that_is_left_while_its_loader_is_stuck_says_so_and_gives_back_when_it_is_not(monkeypatch):
    monkeypatch.setattr(prefetch, "_PATIENCE_S", 0.05)
    graph, go_on, stuck = graph_of("ssd"), threading.Event(), threading.Event()
    batches = batches_of(3, 20, 60)

    def loader():
        yield from batches
        stuck.set()
        go_on.wait(600)

    with pytest.warns(RuntimeWarning, match="its loader has given no batch"):
        for t, _ in enumerate(graph.run(loader(), prefetch_depth=3)):
            if t == 1:
                assert stuck.wait(600)
                break
    assert len(threads()) == 1
    go_on.set()
    wait_for_threads()
    assert pinned(graph) == 0


def test_a_loop_closed_by_the_collector_under_a_lock_that_its_thread_wants_does_not_hang(monkeypatch):
    monkeypatch.setattr(prefetch, "_PATIENCE_S", 0.05)
    graph, may_load = graph_of("ssd"), threading.Event()
    batches = batches_of(6, 20, 60)
    list(graph.run(batches))

    def loader():
        yield batches[0]
        may_load.wait(600)
        yield from batches[1:]

    forgotten = [graph.run(loader(), prefetch_depth=2, lookahead=0)]
    next(forgotten[0])
    forgotten.append(forgotten)
    (worker,) = threads()
    with graph.embedding.store.store_lock.lock:
        may_load.set()
        wait_until_in(worker, "prefetch", "_turn")
        del forgotten
        with pytest.warns(RuntimeWarning, match="its loader has given no batch"):
            gc.collect()
    wait_for_threads()
    assert pinned(graph) == 0


def test_a_loop_closed_by_the_collector_on_its_own_thread_ends():
    graph = graph_of("ssd")
    batches = batches_of(4, 20, 60)
    list(graph.run(batches))
    may_collect = threading.Event()

    def loader():
        yield batches[0]
        yield batches[1]
        may_collect.wait(600)
        gc.collect()
        yield from batches[2:]

    forgotten = [graph.run(loader(), prefetch_depth=3)]
    next(forgotten[0])
    forgotten.append(forgotten)
    gc.disable()
    try:
        del forgotten
        may_collect.set()
        wait_for_threads()
    finally:
        gc.enable()
    assert pinned(graph) == 0


def test_a_worker_that_never_began_or_was_closed_before_is_closed_at_once():
    def worker():
        return prefetch.PrefetchWorker([1, 2, 3], lambda batch, follow: prefetch.Prepared(batch), 1, [], lambda: None)

    never = worker()
    never.close()
    never.start()  # as where an interrupt came in the middle of it
    wait_for_threads()
    assert not never.made
    waits = worker()
    waits.start()
    assert waits.next().batch == 1
    waits.close()
    waits.close()
    assert threads() == [] and not waits.made
