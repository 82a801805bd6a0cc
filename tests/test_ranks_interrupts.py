"""After Ctrl-C on one rank at any moment the others raise RankError or go on, and all ranks end with equal bits."""

import random
import signal
import threading
import time

import pytest
import torch

import oneemb
from oneemb.graph.ranks import Ranks
from tests.support.rank_jobs import RankJob

RANKS, DIM, STEPS = 3, 4, 60
WAYS = ["call", "run 0", "run 1", "run 3", "optimizer", "saves"]


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randint(-20, 20, (3 + rank, 2), generator=generator) * 2**50,)


class Graph(oneemb.TrainGraph):
    def __init__(self, path, group):
        super().__init__()
        for name, tables in (("users", 2), ("items", 1)):
            embedding = oneemb.MultiTableEmbedding(
                name, DIM, torch.float32, torch.int64, [oneemb.make_table()] * tables,
                oneemb.make_device_mem_store_options(f"{path}/{name}"), num_threads=1, process_group=group,
            )  # fmt: skip
            setattr(self, name, embedding)
        self.adam = torch.optim.Adam(self.parameters(), lr=0.05)

    def loss(self, ids):
        return self.users(ids).square().sum() + self.items(ids[:, 0]).square().sum()

    def build(self, ids):
        loss = self.loss(ids)
        loss.backward()
        return loss.detach()


def goes_on(graph, way, rank, optimizer):
    """Train from the last step that was made to the end."""
    if way.startswith("run"):
        for _ in graph.run([batch_of(step, rank) for step in range(graph.steps, STEPS)], int(way[-1])):
            pass
        return
    while way != "optimizer" and graph.steps < STEPS:
        if way == "saves" and graph.steps % 5 == 0 and f"at {graph.steps}" not in graph.users.snapshots():
            graph.users.save_snapshot(f"at {graph.steps}")
        graph(*batch_of(graph.steps, rank))
    while way == "optimizer" and optimizer.taken < STEPS:
        optimizer.zero_grad()
        graph.loss(*batch_of(optimizer.taken, rank)).backward()
        optimizer.step()


def trains(group, report, path, way):
    graph, rank = Graph(path, group), group.rank()
    optimizer = None
    if way == "optimizer":
        optimizer = oneemb.Optimizer(graph.adam)
    else:
        graph.add_optimizer(graph.adam)
    made = (lambda: optimizer.taken) if optimizer else (lambda: graph.steps)
    caught = []
    if way.startswith("run"):
        for _ in graph.run([batch_of(0, rank)]):
            pass
    report(("begins",))

    def to_the_end():
        while made() < STEPS:
            try:
                goes_on(graph, way, rank, optimizer)
            except oneemb.RankError as error:
                assert "has failed (KeyboardInterrupt" in str(error) or "do different things" in str(error), error
                caught.append("RankError")

    # An interrupt may come at any line here, also as an error of another rank, or another interrupt, is caught.
    going = True
    while going:
        try:
            while going:
                try:
                    to_the_end()
                    going = False
                except KeyboardInterrupt:
                    caught.append("KeyboardInterrupt")
        except KeyboardInterrupt:
            caught.append("KeyboardInterrupt")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report(("done", caught))
    rows = []
    for embedding in (graph.users, graph.items):
        assert embedding.stats()["device"]["pinned"] == 0
        ids = (torch.arange(-20, 20) * 2**50)[:, None].expand(-1, embedding.num_tables).contiguous()
        rows.append(looks_up(embedding.eval(), ids).detach().numpy().tobytes())
        rows.append(embedding.stats()["step"])
    report(("rows", rows))
    graph.users.close()
    graph.items.close()


def looks_up(embedding, ids):
    """The rows; a rank that was interrupted after its last step tells the others so in their next exchange."""
    while True:
        try:
            return embedding(ids)
        except oneemb.RankError as error:
            assert "has failed (KeyboardInterrupt" in str(error), error


def run(path, way, interrupts, rng):
    job = RankJob(RANKS, trains, str(path), way, timeout_s=20)
    job.wait_for("begins")
    for _ in range(interrupts):
        time.sleep(rng.uniform(0.005, 0.15))
        if any(report[0] == "done" for its in job.reports for report in its):
            break
        job.kill(rng.randrange(RANKS), signal.SIGINT)
        job.read()
    found = []
    for code, reports in job.end(seconds=90):
        said = {report[0]: report[1:] for report in reports}
        assert code == 0 and "rows" in said, job.texts()
        found.append((said["rows"][0], said["done"][0]))
    return found


@pytest.mark.parametrize("way", [way if way == "saves" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_ranks_go_on_after_interrupts_with_the_same_bits(tmp_path, way, seed):
    expected = run(tmp_path / "plain", way, 0, None)
    assert not any(caught for _, caught in expected)
    found = run(tmp_path / "interrupted", way, 12, random.Random(seed))
    print([caught for _, caught in found])
    assert [rows for rows, _ in found] == [rows for rows, _ in expected]
    assert any("KeyboardInterrupt" in caught for _, caught in found)


class Messages:
    """Ctrl-C on this rank's main thread in the message number `at` of its ranks, once; counts them."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def __enter__(self):
        self.real = real = Ranks.all_to_all

        def all_to_all(ranks, *args):
            real(ranks, *args)
            if threading.current_thread() is threading.main_thread():
                self.count += 1
                if self.count == self.at:
                    signal.raise_signal(signal.SIGINT)

        Ranks.all_to_all = all_to_all
        return self

    def __exit__(self, *error):
        Ranks.all_to_all = self.real


MESSAGES = {"call": 32, "run": 32, "optimizer": 32, "torch": 32}  # at least as many as two steps have


def is_interrupted_in_messages(group, path, way, interrupts, first, every):
    """Two steps at a time, in which rank 1 is interrupted in message `first`, then in one `every` later each time."""
    graph, rank = Graph(path, group), group.rank()
    joined = oneemb.Optimizer(graph.adam) if way == "optimizer" else None
    if way in ("call", "run"):
        graph.add_optimizer(graph.adam)
    made = {"optimizer": lambda: joined.taken, "torch": lambda: graph.users.stats()["step"]}.get(
        way, lambda: graph.steps
    )
    caught, most = set(), 0
    for turn, at in enumerate(range(first, MESSAGES[way] + 1, every), 1):
        with Messages(at if interrupts and rank == 1 else 0) as messages:
            while made() < 2 * turn:
                try:
                    if way == "run":
                        for _ in graph.run([batch_of(step, rank) for step in range(made(), 2 * turn)]):
                            pass
                    elif way == "call":
                        graph(*batch_of(made(), rank))
                    else:
                        optimizer = joined or graph.adam
                        optimizer.zero_grad()
                        graph.loss(*batch_of(made(), rank)).backward()
                        optimizer.step()
                except (KeyboardInterrupt, oneemb.RankError) as error:
                    caught.add(type(error).__name__)
        most = max(most, messages.count)
    rows = []
    for embedding in (graph.users, graph.items):
        ids = (torch.arange(-20, 20) * 2**50)[:, None].expand(-1, embedding.num_tables).contiguous()
        rows += [embedding.eval()(ids).detach().numpy().tobytes(), embedding.stats()["step"]]
        assert embedding.stats()["device"]["pinned"] == 0
        embedding.close()
    return rows, caught, most


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", MESSAGES)
def test_ctrl_c_in_any_message_changes_no_bit(tmp_path, rank_pool, way, every, seed):
    first = 1 + seed % every
    expected = rank_pool(3, is_interrupted_in_messages, str(tmp_path / "plain"), way, False, first, every)
    found = rank_pool(3, is_interrupted_in_messages, str(tmp_path / "interrupted"), way, True, first, every)
    assert all(most <= MESSAGES[way] for _, _, most in expected), expected[0][2]
    assert [rows for rows, _, _ in found] == [rows for rows, _, _ in expected]
    assert "KeyboardInterrupt" in found[1][1] and found[0][1] <= {"RankError"}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_many_interrupts(tmp_path, way, seed):
    rng = random.Random(seed)
    expected = run(tmp_path / "plain", way, 0, None)
    for n in range(20):
        found = run(tmp_path / str(n), way, 100, rng)
        assert [rows for rows, _ in found] == [rows for rows, _ in expected]
