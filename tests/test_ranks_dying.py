"""Where a rank dies, or is silent, at any moment, the others raise in words and end; the last snapshot is whole."""

import gc
import os
import random
import signal
import threading
import time

import pytest
import torch
from torch import distributed

import oneemb
from oneemb.graph.ranks import Ranks
from tests.support.rank_jobs import RankJob

RANKS, IDS = 3, 30

# Seconds after which a rank counts as silent: on a busy machine a living one takes a while. A killed one is known at
# once.
TIMEOUT_S = {signal.SIGSTOP: 8.0, signal.SIGKILL: 120.0}
WAYS = ["eager", "call", "run 0", "run 1", "run 3", "save"]
FAST = ["eager", "run 1", "save"]


def make(path, group):
    """Rows begin at 0 and each step adds 1 to all, whoever looks them up."""
    return oneemb.MultiTableEmbedding(
        "items", 2, torch.float32, torch.int64, [oneemb.make_table(oneemb.make_constant_initializer(0.0))],
        oneemb.make_cached_ssd_store_options(1, path), num_threads=1, process_group=group, gradients_of_ranks="sum",
    )  # fmt: skip


class Graph(oneemb.TrainGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.sgd = torch.optim.SGD(embedding.parameters(), lr=1.0)
        self.add_optimizer(self.sgd)

    def build(self, ids):
        loss = -self.embedding(ids).sum()
        loss.backward()
        return loss.detach()


def trains(group, report, path, way):
    """Until another rank dies: every fourth step is saved, or with `way` "save" each."""
    embedding = make(path, group)
    graph = Graph(embedding)
    own = torch.arange(IDS)[group.rank() :: group.size(), None]
    steps = 0

    def made():
        nonlocal steps
        steps += 1
        report(("begins",)) if steps == 2 else None
        if way == "save" or steps % 4 == 0:
            embedding.save_snapshot("last", overwrite=True)
            report(("saved", steps))

    def loader():
        while True:
            yield (own,)

    try:
        if way.startswith("run"):
            for _ in graph.run(loader(), prefetch_depth=int(way[-1])):
                made()
        else:
            while True:
                if way == "eager":
                    graph.embedding(own).sum().neg().backward()
                    graph.sgd.step()
                    graph.sgd.zero_grad()
                else:
                    graph(own)
                made()
    except Exception as error:
        report(("raised", type(error).__name__, str(error)))
    gc.collect()
    left, end = loop_threads(), time.monotonic() + 600
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = loop_threads()
    report(("threads", left))
    embedding.close()
    report(("closed",))


def loop_threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "oneemb-prefetch"]


def dies(tmp_path, way, rng, how):
    """Kill a rank at a random moment, and look at the others and at what is there."""
    path = str(tmp_path / "rows")
    job = RankJob(RANKS, trains, path, way, timeout_s=TIMEOUT_S[how])
    job.wait_for("begins")
    time.sleep(rng.uniform(0, 0.5))
    victim = rng.randrange(RANKS)
    job.kill(victim, how)
    if how == signal.SIGSTOP:
        job.wait_for("raised", ranks=[rank for rank in range(RANKS) if rank != victim])
        job.kill(victim, signal.SIGKILL)
    results = job.end()
    saved = max((report[1] for _, reports in results for report in reports if report[0] == "saved"), default=0)
    for rank, (code, reports) in enumerate(results):
        if rank == victim:
            continue
        found = {report[0]: report[1:] for report in reports}
        assert code == 0 and "closed" in found, (code, reports[-3:], job.texts())
        kind, text = found["raised"]
        assert kind == "RankError", text
        assert "another rank has ended, was killed, or did not start" in text and "from its last snapshot" in text
        assert found["threads"] == ([],)
    check_last(path, saved)


def check_last(path, saved):
    """The newest complete snapshot is one moment's, not older than what was announced, and one process loads it."""
    embedding = make(path, None)
    names = embedding.snapshots()
    assert saved == 0 or "last" in names
    if "last" in names:
        embedding.load_snapshot("last")
        step = embedding.store.step
        assert step >= saved
        assert torch.equal(embedding.eval()(torch.arange(IDS)[:, None]), torch.full((IDS, 1, 2), float(step)))
        assert embedding.stats()["rows"] == IDS
    embedding.close()


@pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")
@pytest.mark.parametrize("way", [way if way in FAST else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_where_a_rank_is_killed_the_others_raise_and_end(tmp_path, way, seed):
    dies(tmp_path, way, random.Random(seed), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")
@pytest.mark.parametrize("way", [pytest.param("eager", marks=pytest.mark.slow), "run 1"])
def test_where_a_rank_is_silent_the_others_raise_after_the_timeout_of_the_group(tmp_path, way, seed):
    dies(tmp_path, way, random.Random(seed), signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")
def test_a_hundred_kills(tmp_path, seed):
    rng = random.Random(seed)
    for n in range(100):
        folder = tmp_path / str(n)
        os.mkdir(folder)
        dies(folder, rng.choice(WAYS), rng, rng.choice([signal.SIGKILL] * 5 + [signal.SIGSTOP]))


def connects(group, report, path):
    """The second rank is slow: it has its connections a second before it goes on."""
    connect = distributed.ProcessGroupGloo

    def slowly(*args):
        connections = connect(*args)
        time.sleep(1.0)
        path.touch()
        return connections

    with pytest.MonkeyPatch.context() as patch:
        if group.rank() == 1:
            patch.setattr(distributed, "ProcessGroupGloo", slowly)
        Ranks(group).again()
    report(path.exists())


def test_no_rank_goes_on_while_another_one_connects(tmp_path):
    """A rank that went on could end, and so break connections that the other rank is still making."""
    job = RankJob(2, connects, tmp_path / "connected")
    assert job.end() == [(0, [True]), (0, [True])], job.texts()
