"""Loops that are left, that fail, that are interrupted and forgotten, with forks and saves in them: no pin, no thread,
no memory and no file stays behind, and the rows are those of a plain run."""

import contextlib
import multiprocessing
import random
import signal
import sys
import threading

import numpy as np
import pytest
import torch

import oneemb
from oneemb.storage.errors import ForkedProcessError
from tests.support.graph_models import adam, make_embedding, make_graph, rows_of, weights_of
from tests.support.keys import read_rows
from tests.support.resources import open_files, resident_bytes

EVENTS = ["end", "break", "raise", "loader fails", "bad batch", "forget", "interrupt", "fork", "save"]


def build(self, ids, label):
    rows = torch.cat([self.embedding(ids).flatten(1), self.users(ids[:, :1]).flatten(1)], 1)
    loss = torch.nn.functional.mse_loss(self.mlp(rows).squeeze(1), label)
    loss.backward()
    return loss.detach()


def graph_of():
    torch.manual_seed(0)
    modules = {
        "embedding": make_embedding("items", 16, 2, "ssd"),
        "users": make_embedding("users", 16, 1, "ssd"),  # merged with the other
        "mlp": oneemb.nn.FusedMLP(48, [8], 1),
    }
    return make_graph(modules, build, adam)


def batch_of(rng, size=200):
    return torch.from_numpy(rng.integers(0, 8000, (size, 2))), torch.from_numpy(rng.random(size, np.float32))


def state():
    """Open files, but for the chunks of tables, which grow in number; and threads, but for those that stores keep."""
    files = open_files("oneemb-test-")
    names = sorted(one.name for one in threading.enumerate())
    threads = [name for name in names if not name.startswith("oneemb-") or name.startswith("oneemb-prefetch")]
    return files, threads


class Interrupts:
    """SIGALRM at a random moment of a block, with a handler that raises as that of Ctrl-C does."""

    def __init__(self, choose):
        self.choose = choose

    def __enter__(self):
        self.before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, self.choose.uniform(0.001, 0.2))

    def __exit__(self, *error):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


ROWS_MOVED = 3


def fork(graph):
    """A child that reads rows, and ends. One that is told that the parent has moved rows is forked anew."""
    id_N = np.arange(8000)
    expected = read_rows(graph.embedding.store, np.zeros(8000), id_N).tobytes()

    def check():
        try:
            assert read_rows(graph.embedding.store, np.zeros(8000), id_N).tobytes() == expected
        except ForkedProcessError as error:
            assert "has moved rows to other files since" in str(error)
            sys.exit(ROWS_MOVED)

    for _ in range(10):
        child = multiprocessing.get_context("fork").Process(target=check)
        child.start()
        child.join(600)
        if child.exitcode != ROWS_MOVED:
            break
    assert child.exitcode == 0


def soak(steps, seed, folder, batches_max=30):
    """Two graphs see the same steps: one in loops with everything that may happen to them, one in plain calls.

    Each event comes once before any comes again.
    """
    graph, plain = graph_of(), graph_of()
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    memory, before, done, events = [], None, 0, []
    while done < steps or events:
        batches = [batch_of(rng) for _ in range(choose.randint(1, batches_max))]
        events = events or choose.sample(EVENTS, len(EVENTS))
        how = events.pop()
        stop = choose.randrange(len(batches))
        if how == "bad batch":
            loader = [*batches[:stop], (batches[stop][0].int(), batches[stop][1])]
        elif how == "loader fails":
            loader = failing(batches[:stop])
        else:
            loader = batches
        begun = graph.steps
        loop = graph.run(loader, prefetch_depth=choose.choice([1, 1, 2, 4]))
        interrupts = Interrupts(choose) if how == "interrupt" else contextlib.nullcontext()
        try:
            with interrupts:
                run(graph, loop, how, stop, batches, choose, folder)
        except (KeyError, OSError, TypeError, KeyboardInterrupt) as error:
            del error
        if how != "forget":
            loop.close()
        del loop
        graph.train()
        taken = graph.steps - begun
        if how == "interrupt" and taken < len(batches):  # whose ids may have been inserted
            graph(*batches[taken])
            taken += 1
        for one in (graph.embedding, graph.users):
            assert one.stats()["device"]["pinned"] == 0 and not one.store.pins.prefetched
        for batch in batches[:taken]:
            plain(*batch)
        done += taken
        now = state()
        before = before or now
        assert now == before, (now, before)
        memory.append(resident_bytes())
    for one, other in ((graph.embedding, plain.embedding), (graph.users, plain.users)):
        assert one.stats()["rows"] == other.stats()["rows"]
        assert rows_of(one) == rows_of(other)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(graph.mlp), weights_of(plain.mlp), strict=True))
    return memory


def run(graph, loop, how, stop, batches, choose, folder):
    for taken, _ in enumerate(loop, 1):
        if choose.random() < 0.05:
            graph.eval()
            graph(*batches[0])
            graph.train()
        if how in ("break", "forget") and taken > stop:
            break
        if how == "raise" and taken > stop:
            raise KeyError("loop")
        if how == "fork" and taken == stop:
            fork(graph)
        if how == "save" and taken == stop:
            graph.save(folder / "checkpoint", keep=2)
            if choose.random() < 0.3:
                graph.load(folder / "checkpoint")


def failing(batches):
    yield from batches
    raise OSError("loader")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_short_soak(tmp_path, seed):
    soak(1, seed, tmp_path, batches_max=8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_soak_of_20_000_steps_keeps_its_memory(tmp_path, seed):
    memory = soak(20_000, seed, tmp_path)
    half, last = memory[len(memory) // 2], memory[-1]
    print(f"resident: {memory[0] >> 20} MiB, halfway {half >> 20} MiB, at the end {last >> 20} MiB")
    assert last < half + 32 * 2**20
