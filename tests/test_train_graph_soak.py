"""Loops that are left, that fail and that are forgotten: no pin, no thread, no memory and no file stays behind."""

import gc
import os
import random
import threading

import numpy as np
import pytest
import torch

import oneemb
from tests.support.graph_models import adam, make_embedding, make_graph, rows_of, weights_of


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


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def state():
    """Open files, but for the chunks of tables, which grow in number; and threads, but for those that stores keep."""
    gc.collect()
    files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            pass  # the folder's own
    names = sorted(one.name for one in threading.enumerate())
    threads = [name for name in names if not name.startswith("oneemb-") or name == "oneemb-prefetch"]
    return sorted(file for file in files if "oneemb-test-" not in file), threads


def soak(steps, seed):
    """Two graphs see the same steps: one in loops with everything that may happen to them, one in plain calls."""
    graph, plain = graph_of(), graph_of()
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    memory, before, done = [], None, 0
    while done < steps:
        batches = [batch_of(rng) for _ in range(choose.randint(1, 30))]
        how = choose.choice(["end", "break", "raise", "loader fails", "bad batch", "forget"])
        stop = choose.randrange(len(batches))
        if how == "bad batch":
            loader = [*batches[:stop], (batches[stop][0].int(), batches[stop][1])]
        elif how == "loader fails":
            loader = failing(batches[:stop])
        else:
            loader = batches
        taken = 0
        loop = graph.run(loader, prefetch_depth=choose.choice([1, 1, 2, 4]))
        try:
            for _ in loop:
                taken += 1
                if choose.random() < 0.05:
                    graph.eval()
                    graph(*batches[0])
                    graph.train()
                if how in ("break", "forget") and taken > stop:
                    break
                if how == "raise" and taken > stop:
                    raise KeyError("loop")
        except (KeyError, OSError, TypeError) as error:
            del error
        if how != "forget":
            loop.close()
        del loop
        for one in (graph.embedding, graph.users):
            assert one.stats()["device"]["pinned"] == 0 and not one.store._staged
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


def failing(batches):
    yield from batches
    raise OSError("loader")


def test_a_short_soak():
    soak(60, seed=1)


@pytest.mark.slow
def test_a_soak_of_20_000_steps_keeps_its_memory():
    memory = soak(20_000, seed=2)
    half, last = memory[len(memory) // 2], memory[-1]
    print(f"resident: {memory[0] >> 20} MiB, halfway {half >> 20} MiB, at the end {last >> 20} MiB")
    assert last < half + 32 * 2**20
